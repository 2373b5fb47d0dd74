"""Writes tests/golden/peft/all_linear.json: what PEFT's `target_modules="all-linear"` adapts in the models of `tests/golden/a`.

    python scripts/golden/all_linear.py --models tests/golden/a --out tests/golden/peft/all_linear.json

For each model: the modules within a block, each with the blocks that have it, its rank and its alpha (of 4 and 8), or the error that PEFT
raises.
"""
import argparse
import json
import os
import warnings

os.environ |= {"HF_HUB_OFFLINE": "1"}
import peft
import transformers

import common  # noqa: F401, it registers what AutoModelForCausalLM does not know

warnings.simplefilter("ignore")


def adapted(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    try:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))
    except ValueError as error:
        return {"refused": str(error)}
    found = {}
    for name, module in model.named_modules():
        if "default" in getattr(module, "lora_A", {}):
            # GPT-2's blocks have another name.
            name = name.removeprefix("base_model.model.").replace("transformer.h.", "model.layers.")
            layer, inside = None, name
            if name.startswith("model.layers."):
                layer, inside = name.removeprefix("model.layers.").split(".", 1)
            numbers = [module.r["default"], module.lora_alpha["default"]]
            layers = found.setdefault(inside, [numbers, []])
            assert layers[0] == numbers, name
            if layer is not None:
                layers[1].append(int(layer))
    return {"adapted": found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    folders = {name: f"{args.models}/{name}/model" for name in sorted(os.listdir(args.models))}
    table = {name: adapted(folder) for name, folder in folders.items() if os.path.exists(f"{folder}/config.json")}
    with open(args.out, "w", encoding="utf-8") as file:
        lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items()]
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


main()
