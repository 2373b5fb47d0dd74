#!/usr/bin/env python3
"""Loads an adapter or a model that tunesmith wrote with the real Transformers and PEFT, and compares it with a golden forward pass.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/peft_check.py --golden tests/golden/a/llama --adapter runs/my-run/adapter
    python3 scripts/peft_check.py --golden tests/golden/a/llama --model runs/full-run/model --expect base

Prints the largest difference of a logit and of a token's loss as one JSON line; exits 1 above --limit.
"""
import argparse
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", required=True, help="a folder with forward.safetensors and model/")
    parser.add_argument("--adapter", help="a PEFT adapter folder")
    parser.add_argument("--model", help="a model folder in place of the golden's own")
    parser.add_argument("--expect", choices=["base", "lora"], default="lora", help="which stored values to compare with")
    parser.add_argument("--limit", type=float, default=5e-5)
    args = parser.parse_args()

    import peft
    import torch
    import torch.nn.functional as F
    import transformers
    from safetensors.torch import load_file

    golden = load_file(f"{args.golden}/forward.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model or f"{args.golden}/model", dtype=torch.float32, attn_implementation="eager"
    )
    if args.adapter:
        model = peft.PeftModel.from_pretrained(model, args.adapter)
    ids, mask, labels = (golden[name].long() for name in ("input_ids", "attention_mask", "labels"))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    rows = logits[:, :-1].reshape(-1, logits.shape[-1])
    losses = F.cross_entropy(rows, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="none").reshape(ids.shape[0], -1)
    stored = logits[golden["sel_row"].long(), golden["sel_pos"].long()]
    result = {
        "expect": args.expect,
        "max_logit_diff": float((stored - golden[f"logits_{args.expect}"]).abs().max()),
        "max_nll_diff": float((losses - golden[f"nll_{args.expect}"]).abs().max()),
    }
    print(json.dumps(result))
    sys.exit(max(result["max_logit_diff"], result["max_nll_diff"]) > args.limit)


if __name__ == "__main__":
    main()
