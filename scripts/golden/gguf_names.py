"""Writes tests/golden/gguf/names.json: the tensors and keys of the architectures of llama.cpp that tunesmith writes, from the package gguf.

    pip install gguf==0.19.0
    python scripts/golden/gguf_names.py tests/golden/gguf/names.json

`architectures` has the tensor names of each, without what follows the name (`.weight`, `.bias`); `{bid}` is the number of a block. `keys` has
the keys of a header; `{arch}` is the architecture's name.
"""
import json
import os
import sys

from gguf import constants

WRITTEN = [
    "afmoe", "deepseek2", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "glm4", "glm4moe", "gpt-oss", "gpt2", "granite", "granitehybrid", "granitemoe",
    "hunyuan-dense", "lfm2", "lfm2moe", "llama", "minimax-m2", "mistral3", "mistral4", "nemotron_h", "nemotron_h_moe", "olmo2", "phi3", "qwen2",
    "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl", "seed_oss", "smollm3",
]


def texts(kind):
    """Every string among the constants of a class, and of the classes within."""
    for name, value in vars(kind).items():
        if isinstance(value, str) and not name.startswith("_"):
            yield value
        elif isinstance(value, type):
            yield from texts(value)


def main():
    numbers = {name: number for number, name in constants.MODEL_ARCH_NAMES.items()}
    of = lambda name: sorted(constants.TENSOR_NAMES[tensor] for tensor in constants.MODEL_TENSORS[numbers[name]])
    found = dict(architectures={name: of(name) for name in WRITTEN}, keys=sorted(set(texts(constants.Keys))))
    os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
