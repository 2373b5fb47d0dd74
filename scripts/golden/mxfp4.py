#!/usr/bin/env python3
"""Makes tests/golden/mxfp4: the gpt-oss model of tests/golden/a with its experts in MXFP4, as OpenAI stores them.

    python3 scripts/golden/mxfp4.py --models tests/golden/a --out tests/golden/mxfp4

The script codes the experts itself. Transformers reads the folder back (`Mxfp4Config(dequantize=True)`): stored are the experts' numbers as it
widens them, and logits.
"""
import argparse
import json
import os
import shutil

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK = 32


def coded(rows):
    """`rows [experts, out, in]` as bytes of codes `[experts, out, in / 32, 16]` and of exponents `[experts, out, in / 32]`."""
    blocks = rows.reshape(*rows.shape[:-1], -1, BLOCK)
    largest = blocks.abs().amax(-1)
    exponents = torch.where(largest > 0, torch.floor(torch.log2(largest)) - 2, torch.full_like(largest, -127)).clamp(-127, 125)
    scaled = blocks / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes[..., 0::2] + 16 * codes[..., 1::2]
    return pairs.to(torch.uint8), (exponents + 127).to(torch.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    source = f"{args.models}/gpt_oss"
    shutil.rmtree(args.out, ignore_errors=True)
    os.makedirs(f"{args.out}/model")
    tensors = {}
    for name, value in load_file(f"{source}/model/model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            # The matrices are transposed in the file that is not quantized.
            blocks, scales = coded(value.float().transpose(1, 2).contiguous())
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = value
    save_file(tensors, f"{args.out}/model/model.safetensors", metadata={"format": "pt"})
    with open(f"{source}/model/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config["quantization_config"] = dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    )
    with open(f"{args.out}/model/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        f"{args.out}/model", dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True), attn_implementation="eager",
        experts_implementation="eager",
    ).float()
    ids = torch.from_numpy(np.random.default_rng(77).integers(3, config["vocab_size"], (1, 21)))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    stored = dict(input_ids=ids[0].int(), logits=logits.contiguous())
    for name, value in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = value.float().contiguous()
    save_file(stored, f"{args.out}/dequantized.safetensors")
    with open(f"{args.out}/versions.json", "w", encoding="utf-8") as file:
        json.dump(dict(torch=torch.__version__, transformers=transformers.__version__), file)


if __name__ == "__main__":
    main()
