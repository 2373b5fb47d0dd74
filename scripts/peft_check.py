#!/usr/bin/env python3
"""Loads an adapter or a model that tunesmith wrote with the real Transformers and PEFT, and compares it with a golden forward pass.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/peft_check.py --golden tests/golden/a/llama --adapter runs/my-run/adapter
    python3 scripts/peft_check.py --golden tests/golden/a/llama --model runs/full-run/model --expect base
    python3 scripts/peft_check.py --run runs/my-run --base models/my-model --rows rows.jsonl [--below ADAPTER]...

Prints the largest difference of a logit and of a token's loss as one JSON line; exits 1 above --limit.

--run compares the loss of the run's final adapter/ or model/ on rows {input_ids, labels} with the last validation loss of the run on the same
rows. With new tokens, the base gets the rows that the saved tokenizer needs. --below names adapters that are merged first (tuning.adapters).
scripts/peft_roundtrip.py does this for every mode.
"""
import argparse
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"


def grow(model, tokens):
    """Grows the embedding and the head to `tokens` rows. New rows are the mean of the old ones; the trained rows then replace them."""
    import torch

    rows = model.config.vocab_size
    model.resize_token_embeddings(tokens, mean_resizing=False)
    with torch.no_grad():
        for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            table[rows:] = table[:rows].mean(0)


def vocabulary(adapter):
    """The number of tokens that the base's tables need for an adapter, from its rows and whole tables."""
    from safetensors import safe_open

    with open(f"{adapter}/adapter_config.json", encoding="utf-8") as file:
        rows = json.load(file).get("trainable_token_indices") or []
    rows = sum(rows.values(), []) if isinstance(rows, dict) else rows
    with safe_open(f"{adapter}/adapter_model.safetensors", "pt") as file:
        tables = [name for name in file.keys() if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
        return max([0, *(row + 1 for row in rows), *(file.get_slice(name).get_shape()[0] for name in tables)])


def run_loss(run, base, rows, below=()):
    """The mean loss of a run's result in Transformers and PEFT, and the run's own last validation loss."""
    import peft
    import torch
    import torch.nn.functional as F
    import transformers

    def load(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    if os.path.isdir(f"{run}/model"):
        model = load(f"{run}/model")
    else:
        model = load(base)
        for adapter in below:
            model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
        tokens = vocabulary(f"{run}/adapter")
        if tokens > model.config.vocab_size:
            grow(model, tokens)
        model = peft.PeftModel.from_pretrained(model, f"{run}/adapter")
    model.eval()
    total, count = 0.0, 0
    for line in open(rows):
        row = json.loads(line)
        labels = torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        total += F.cross_entropy(logits[:-1].double(), labels[1:], ignore_index=-100, reduction="sum").item()
        count += int((labels[1:] != -100).sum())
    evaluations = [json.loads(line) for line in open(f"{run}/metrics.jsonl")]
    own = [line["eval_loss"] for line in evaluations if "eval_loss" in line][-1]
    return total / count, own


def golden_difference(folder, model=None, adapter=None, expect="lora"):
    """The largest differences of a logit and of a token's loss from those stored in a golden folder."""
    import peft
    import torch
    import torch.nn.functional as F
    import transformers
    from safetensors.torch import load_file

    sys.path.insert(0, f"{os.path.dirname(os.path.abspath(__file__))}/golden")
    from common import outputs_of

    golden = load_file(f"{folder}/forward.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model or f"{folder}/model", dtype=torch.float32, attn_implementation="eager")
    if adapter:
        loaded = peft.PeftModel.from_pretrained(loaded, adapter)
    ids, mask, labels = (golden[name].long() for name in ("input_ids", "attention_mask", "labels"))
    with torch.no_grad():
        logits = outputs_of(loaded, ids, mask)[0]
    rows = logits[:, :-1].reshape(-1, logits.shape[-1])
    losses = F.cross_entropy(rows, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="none").reshape(ids.shape[0], -1)
    stored = logits[golden["sel_row"].long(), golden["sel_pos"].long()]
    difference = lambda found, name: float((found - golden[f"{name}_{expect}"]).abs().max())
    return difference(stored, "logits"), difference(losses, "nll")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="the output folder of a run")
    parser.add_argument("--base", help="with --run: the base model's folder")
    parser.add_argument("--rows", help="with --run: the validation rows, JSONL of {input_ids, labels}")
    parser.add_argument("--below", action="append", default=[], help="with --run: an adapter to merge first")
    parser.add_argument("--golden", help="a folder with forward.safetensors and model/")
    parser.add_argument("--adapter", help="a PEFT adapter folder")
    parser.add_argument("--model", help="a model folder in place of the golden's own")
    parser.add_argument("--expect", choices=["base", "lora"], default="lora", help="which stored values to compare with")
    parser.add_argument("--limit", type=float, default=5e-5)
    args = parser.parse_args()
    if args.run:
        theirs, own = run_loss(args.run, args.base, args.rows, args.below)
        print(json.dumps({"run": args.run, "loss": theirs, "eval_loss": own, "diff": abs(theirs - own)}))
        sys.exit(abs(theirs - own) > args.limit)

    logits, losses = golden_difference(args.golden, args.model, args.adapter, args.expect)
    print(json.dumps({"expect": args.expect, "max_logit_diff": logits, "max_nll_diff": losses}))
    sys.exit(max(logits, losses) > args.limit)


if __name__ == "__main__":
    main()
