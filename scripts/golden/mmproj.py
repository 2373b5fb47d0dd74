"""Writes tests/golden/mmproj/files.json: what llama.cpp's own converter makes of the image encoders of tests/golden/vision.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xzf llama_cpp_python-0.3.36.tar.gz
    pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy
    python scripts/golden/mmproj.py llama_cpp_python-0.3.36/vendor/llama.cpp tests/golden/mmproj/files.json

For each family and type of file: the keys of the header but for names and sizes in words, and of each tensor its shape (rows first), its
type, and the CRC-32 of its bytes, as `32x64 F16 1234`. `changes` is what differs in config.json and preprocessor_config.json from the golden models.

The converter reads the names of published checkpoints. Transformers 5 saves two of these models under other names, which are changed back.
It knows no LLaVA with CLIP. Of Pixtral's encoder it leaves the language model's tensors out before it looks for the embedding of
[IMG_BREAK] among them, which llama.cpp needs: here it sees them.
"""
import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import zlib

import numpy as np
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# By family: changes, the class that the converter is given if it does not find it, and prefixes that published checkpoints have otherwise.
FAMILIES = {
    "gemma3": ({"config": {"text_config": {"layer_types": ["sliding_attention"] * 3}}}, None, ("vision_tower.", "vision_tower.vision_model.")),
    # llama.cpp's language models of this width have masks in both directions.
    "gemma4": ({"config": {"text_config": {"use_bidirectional_attention": "vision"}}}, None, None),
    "gemma4_31b": ({}, None, None),
    "smolvlm": ({}, None, None),
    "internvl": ({}, "InternVisionModel", ("", "model.")),
    # Files have as many pixels of a side as the image processor.
    "mistral3": ({"config": {"vision_config": {"image_size": 64}, "text_config": {"rms_norm_eps": 1e-5}}}, None, None),
    "pixtral": ({"config": {"vision_config": {"image_size": 64}}}, None, None),
    "qwen2_vl": ({}, None, None),
    "qwen2_5_vl": ({"config": {"vision_config": {"window_size": 112}}}, None, None),
    "qwen3_vl": ({}, None, None),
    # The converter takes the language model's epsilon for the encoder's.
    "qwen3_5": ({"config": {"text_config": {"rms_norm_eps": 1e-6}}}, None, None),
    "qwen3_5_moe": ({"config": {"text_config": {"rms_norm_eps": 1e-6}}}, None, None),
}
TYPES = dict(f32="ALL_F32", f16="MOSTLY_F16", q8_0="MOSTLY_Q8_0")
# These are names, or depend on them.
LEFT_OUT = ("general.name", "general.size_label", "general.basename")


def folder(name, changes, prefixes, to):
    for source in (f"vision/{name}/model", f"picture_chats/{name}"):
        shutil.copytree(ROOT / "tests/golden" / source, to, dirs_exist_ok=True)
    config = json.loads((to / "config.json").read_text())
    for part, keys in changes.get("config", {}).items():
        config[part] |= keys
    (to / "config.json").write_text(json.dumps(config))
    if prefixes:
        old, new = prefixes
        tensors = load_file(to / "model.safetensors")
        tensors = {new + key.removeprefix(old) if key.startswith(old) else key: value for key, value in tensors.items()}
        save_file(tensors, to / "model.safetensors")


def convert(name, changes, given, prefixes, kind, gguf, conversion):
    with tempfile.TemporaryDirectory() as temporary:
        model, out = pathlib.Path(temporary, name), pathlib.Path(temporary, "out.gguf")
        model.mkdir()
        folder(name, changes, prefixes, model)
        hparams = conversion.ModelBase.load_hparams(model, False)
        found = given or conversion.get_model_architecture(hparams, conversion.ModelType.MMPROJ)
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            kind_of_model = conversion.get_model_class(found, mmproj=True)
            if name in ("mistral3", "pixtral"):
                kind_of_model = type(kind_of_model.__name__, (kind_of_model,), dict(filter_tensors=classmethod(lambda cls, item: item)))
            converter = kind_of_model(model, getattr(gguf.LlamaFileType, TYPES[kind]), out)
            # InternVL's connector has names up to mlp1.3, which a map for three blocks lacks.
            converter.tensor_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
            converter.write()
        read = gguf.GGUFReader(out)
        plain = lambda value: [plain(one) for one in value] if isinstance(value, list) else value.item() if isinstance(value, np.generic) else value
        keys = {key: plain(field.contents()) for key, field in read.fields.items() if not key.startswith("GGUF.") and key not in LEFT_OUT}
        shape = lambda tensor: "x".join(str(int(size)) for size in reversed(tensor.shape))
        crc = lambda tensor: zlib.crc32(np.ascontiguousarray(tensor.data).tobytes())
        ordered = sorted(read.tensors, key=lambda tensor: tensor.name)
        tensors = {tensor.name: f"{shape(tensor)} {tensor.tensor_type.name} {crc(tensor)}" for tensor in ordered}
        return dict(keys=keys, tensors=tensors)


def main():
    llama_cpp, out = sys.argv[1:]
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    import conversion
    import gguf

    found = {}
    for name, (changes, given, prefixes) in FAMILIES.items():
        found[name] = dict(changes=changes, **{kind: convert(name, changes, given, prefixes, kind, gguf, conversion) for kind in TYPES})
        print(name)
    os.makedirs(os.path.dirname(out), exist_ok=True)
    lines = json.dumps(dict(made_with="llama-cpp-python 0.3.36", families=found), indent=1)
    with open(out, "w", encoding="utf-8") as file:
        file.write(lines + "\n")


if __name__ == "__main__":
    main()
