"""Writes tests/golden/peft/blend.safetensors: PEFT's add_weighted_adapter on two adapters of the tiny Llama of tests/golden/a/llama
(adapter_init and adapter_final, weights 0.7 and -0.4).

Usage: python scripts/golden/blend.py tests/golden

Stored are A and B of the first block's q_proj and the second's down_proj by method: METHOD.MODULE.lora_A. DARE draws random numbers, so it is
stored with density 1, for which it draws none.
"""
import sys

import peft
import torch
import transformers
from safetensors.torch import save_file

MODULES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
METHODS = [("cat", None), ("linear", None), ("ties", 0.4), ("magnitude_prune", 0.4), ("dare_linear", 1.0), ("dare_ties", 1.0)]


def main():
    torch.set_num_threads(1)
    folder = f"{sys.argv[1]}/a/llama"
    base = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, f"{folder}/adapter_init", adapter_name="first")
    model.load_adapter(f"{folder}/adapter_final", adapter_name="second")
    tensors = {}
    for method, density in METHODS:
        model.add_weighted_adapter(["first", "second"], [0.7, -0.4], method, combination_type=method, density=density)
        for module in MODULES:
            layer = model.base_model.model.get_submodule(module)
            assert layer.scaling[method] == 1.0
            for side in ("lora_A", "lora_B"):
                tensors[f"{method}.{module}.{side}"] = getattr(layer, side)[method].weight.detach().clone()
    save_file(tensors, f"{sys.argv[1]}/peft/blend.safetensors")


if __name__ == "__main__":
    main()
