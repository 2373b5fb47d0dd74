#!/usr/bin/env python3
"""Exports the golden models of all families with the tunesmith binary, as a folder for Transformers (the adapter merged) and as a PEFT adapter.
Loads both with the real libraries, and compares their logits and losses with the stored ones. Takes seconds per family.

    pip install -r scripts/golden/requirements.txt && cargo build
    python3 scripts/export_check.py [--binary target/debug/tunesmith] [--families llama,phi3,…]

Prints a line per family; exits 1 if a logit or a loss differs by more than 5e-5.
"""
import argparse
import os
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
GOLDEN = f"{HERE}/../tests/golden/a"
LIMIT = 5e-5


def main():
    from peft_check import golden_difference

    every = sorted(name for name in os.listdir(GOLDEN) if os.path.isfile(f"{GOLDEN}/{name}/forward.safetensors"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=f"{HERE}/../target/debug/tunesmith")
    parser.add_argument("--families", default=",".join(every))
    args = parser.parse_args()
    bad = False
    for family in args.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            parts = ["--base", f"{GOLDEN}/{family}/model", "--adapter", f"{GOLDEN}/{family}/adapter_init"]
            for form in (["--hf", "--dtype", "float32"], ["--peft"]):
                command = [args.binary, "export", *parts, *form, "--output", f"{folder}/{form[0][2:]}"]
                subprocess.run(command, check=True, capture_output=True, text=True)
            merged = golden_difference(f"{GOLDEN}/{family}", model=f"{folder}/hf")
            adapter = golden_difference(f"{GOLDEN}/{family}", adapter=f"{folder}/peft")
        bad |= max(*merged, *adapter) > LIMIT
        show = lambda pair: f"logits {pair[0]:.1e}, losses {pair[1]:.1e}"
        print(f"{family:14} merged: {show(merged)}   adapter: {show(adapter)}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
