#!/usr/bin/env python3
"""Makes tests/golden/config_variants.jsonl: every golden family with each key of its config.json changed, run by Transformers.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/config_variants.py --models tests/golden/a --out tests/golden/config_variants.jsonl [--only FAMILY…]

A line is a family: {"family", "base", "variants": [[key, value, outcome]]}. A nested key has dots; the value ["removed"] removes it. Outcomes:

    0          the logits of the unchanged model, to the bit
    "refused"  Transformers refuses the configuration, or the weights do not fit it
    "random"   a weight is missing, and Transformers starts it at random
    "nan"      the logits are not finite
    [numbers]  some logits, as `base` has of the unchanged model

With --only, the lines of other families stay.
"""
import argparse
import copy
import glob
import json
import os
import tempfile
import warnings

import torch
import transformers
from safetensors.torch import load_file

import common  # registers classes

REMOVED = ["removed"]
# Nothing of the model's mathematics: notes of who wrote the file, and the type that Transformers computes in.
SKIPPED = {"transformers_version", "dtype", "torch_dtype", "_name_or_path"}
WORDS = {
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh", "silu", "quick_gelu"],
    "hidden_activation": ["gelu", "relu", "gelu_pytorch_tanh", "silu"],
    "mlp_hidden_act": ["silu", "relu", "relu2"],
    "rope_type": ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"],
    "type": ["linear", "yarn"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["sigmoid", "softmax"],
}
LAYERS = ["full_attention", "sliding_attention", "linear_attention", "conv"]
TOKENS = 24


def variants(key, value):
    """Other values of a key."""
    name = key.split(".")[-1]
    found = []
    if isinstance(value, bool):
        found = [not value, 1]
    elif isinstance(value, int):
        found = [value + 1, value * 2, 0, -1, float(value) + 0.5, str(value)]
    elif isinstance(value, float):
        found = [value * 3, 0.0, -1.0, "1"]
    elif isinstance(value, str):
        found = [*WORDS.get(name, []), "bogus", 7]
    elif isinstance(value, list):
        found = [value[:-1], value + value[-1:], "bogus"]
        if value and all(isinstance(one, str) for one in value):
            found += [[other] + value[1:] for other in LAYERS if name.endswith("types")] + [["bogus"] + value[1:]]
        elif value and all(isinstance(one, (int, float)) for one in value):
            found += [[one + 1 for one in value]]
    elif value is None:
        found = [1, 0, True, 0.5, "bogus"]
    elif isinstance(value, dict):
        found = ["bogus", {}]
    found = [one for one in found if type(one) is not type(value) or one != value]
    return [*found, *([] if value is None else [None]), REMOVED]


def keys(config, prefix=""):
    for name, value in config.items():
        if not prefix and name in SKIPPED:
            continue
        yield prefix + name, value
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")


def changed(config, key, value):
    config = copy.deepcopy(config)
    *path, name = key.split(".")
    place = config
    for part in path:
        place = place[part]
    if value == REMOVED:
        del place[name]
    else:
        place[name] = value
    return config


def ids(vocabulary):
    return [(7 * at * at + 3 * at + 11) % min(vocabulary, 300) for at in range(TOKENS)]


def sample(logits):
    row = logits[0].float()
    picked = [row[-1, 5], row[-1, 77], row[TOKENS // 2, 140]]
    return [float(f"{float(value):.5f}") for value in picked]


def outcome(config, width):
    """The logits, or a word."""
    try:
        with open(os.path.join(FOLDER, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            FOLDER, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if report["mismatched_keys"]:
            return "refused"
        if report["missing_keys"]:
            return "random"
        model.eval()
        with torch.no_grad():
            logits = model(torch.tensor([ids(width)]), use_cache=False).logits
    except Exception as error:
        outcome.reason = error
        return "refused"
    return "nan" if not torch.isfinite(logits).all() else logits


FOLDER = "/tmp/config_variants"


def main():
    global FOLDER
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    lines = {}
    if os.path.exists(args.out):
        with open(args.out, encoding="utf-8") as file:
            lines = {json.loads(line)["family"]: line.strip() for line in file}
    for folder in sorted(glob.glob(os.path.join(args.models, "*", "model"))):
        family = os.path.basename(os.path.dirname(folder))
        if args.only and family not in args.only:
            continue
        with tempfile.TemporaryDirectory() as place:
            FOLDER = place
            for name in os.listdir(folder):
                if "safetensors" in name:
                    os.symlink(os.path.abspath(os.path.join(folder, name)), os.path.join(place, name))
            with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
                config = json.load(file)
            width = config["vocab_size"]
            base = outcome(config, width)
            assert not isinstance(base, str), (family, base, outcome.reason)
            found = []
            for key, value in keys(config):
                for other in variants(key, value):
                    logits = outcome(changed(config, key, other), width)
                    if not isinstance(logits, str):
                        same = logits.shape == base.shape and torch.equal(logits, base)
                        logits = 0 if same else sample(logits)
                    found.append([key, other, logits])
            lines[family] = json.dumps(dict(family=family, base=sample(base), variants=found), separators=(",", ":"))
            print(family, len(found), {word: sum(one[2] == word for one in found) for word in (0, "refused", "random", "nan")}, flush=True)
        with open(args.out, "w", encoding="utf-8") as file:
            file.write("".join(lines[name] + "\n" for name in sorted(lines)))


if __name__ == "__main__":
    main()
