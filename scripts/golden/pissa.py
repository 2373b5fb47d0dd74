"""PEFT's PiSSA initialization of a few matrices: python3 scripts/golden/pissa.py tests/golden/peft/pissa.safetensors

For each matrix: its weight W, A, B, and the remaining weight of the base. `fast` are the same by pissa_niter_16, for a matrix whose singular
values fall. Versions: requirements.txt.
"""
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import numpy as np
import peft
import torch
from safetensors.torch import save_file

CASES = {"tall": (48, 20, 4, 8, False), "wide": (20, 48, 4, 8, False), "square": (32, 32, 8, 4, False), "stabilised": (24, 40, 4, 8, True),
         "whole": (6, 10, 6, 6, False), "fast": (40, 28, 4, 8, False)}


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    stored = {}
    for seed, (name, (rows, cols, rank, alpha, stabilised)) in enumerate(CASES.items()):
        rng = np.random.default_rng(seed)
        weight = rng.standard_normal((rows, cols)).astype(np.float32) / np.sqrt(np.float32(cols))
        if name == "fast":
            u, _, v = np.linalg.svd(weight.astype(np.float64), full_matrices=False)
            weight = (u * 0.6 ** np.arange(min(rows, cols)) @ v).astype(np.float32)
        model = torch.nn.Sequential(torch.nn.Linear(cols, rows, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(torch.from_numpy(weight))
        how = "pissa_niter_16" if name == "fast" else "pissa"
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, use_rslora=stabilised, target_modules=["0"], init_lora_weights=how)
        layer = peft.get_peft_model(model, config).base_model.model[0]
        stored[f"{name}.w"] = torch.from_numpy(weight)
        stored[f"{name}.a"] = layer.lora_A["default"].weight.detach()
        stored[f"{name}.b"] = layer.lora_B["default"].weight.detach()
        stored[f"{name}.rest"] = layer.base_layer.weight.detach()
        stored[f"{name}.scale"] = torch.tensor([layer.scaling["default"]], dtype=torch.float32)
    save_file({key: value.contiguous() for key, value in stored.items()}, sys.argv[1])


if __name__ == "__main__":
    main()
