#!/usr/bin/env python3
"""Makes more of tests/golden/vision: PEFT's adapters on image encoders, beside those on the language model.

    python3 scripts/golden/vision_adapters.py --out tests/golden/vision

MODEL_adapters has what vision.py stores of a model, but that every linear module of the encoder's blocks has an adapter, and nothing
else of encoder and connector is trained. The model itself is MODEL/model: it is made once more from the same seed.
"""
import tempfile

import torch

import vision
import vision_models

CLIP = r"layers\.\d+\.(?:self_attn\.(?:q_proj|k_proj|v_proj|out_proj)|mlp\.fc[12])"
TOWERS = dict(
    llava=rf".*vision_tower\..*{CLIP}",
    smolvlm=rf".*vision_model\..*{CLIP}",
    idefics3=rf".*vision_model\..*{CLIP}",
    gemma3=rf".*vision_tower\..*{CLIP}",
    paligemma=rf".*vision_tower\..*{CLIP}",
    internvl=r".*vision_tower\..*layer\.\d+\.(?:attention\.(?:q_proj|k_proj|v_proj|projection_layer)|mlp\.fc[12])",
    qwen2_vl=r".*visual\.blocks\.\d+\.(?:attn\.(?:qkv|proj)|mlp\.fc[12])",
    qwen3_vl=r".*visual\.blocks\.\d+\.(?:attn\.(?:qkv|proj)|mlp\.linear_fc[12])",
    qwen2_5_vl=r".*visual\.blocks\.\d+\.(?:attn\.(?:qkv|proj)|mlp\.(?:gate_proj|up_proj|down_proj))",
    mistral3=r".*vision_tower\..*layers\.\d+\.(?:attention\.(?:q|k|v|o)_proj|feed_forward\.(?:gate|up|down)_proj)",
    gemma4=r".*vision_tower\..*layers\.\d+\.(?:self_attn\.(?:q|k|v|o)_proj|mlp\.(?:gate|up|down)_proj)\.linear",
    qwen3_5=r".*visual\.blocks\.\d+\.(?:attn\.(?:qkv|proj)|mlp\.linear_fc[12])",
)
# The seeds of vision.py and vision_models.py.
SEEDS = dict(llava=7160, smolvlm=7180, idefics3=7280, gemma3=7200, qwen2_vl=8000, qwen2_5_vl=8020, qwen3_vl=8041, internvl=8060, paligemma=8080)
SEEDS |= dict(qwen3_5=8124, mistral3=8161, gemma4=8223)
OF_ONE_SIDE = ("llava", "smolvlm", "idefics3", "gemma3")


def main():
    arguments = vision.arguments_of_command()
    language, delta, gemma4 = vision.LANGUAGE, vision_models.DELTA_LANGUAGE, vision_models.GEMMA4_LANGUAGE
    for name, tower in TOWERS.items():
        if arguments.only not in (None, name):
            continue
        seed = SEEDS[name]
        vision.LANGUAGE = f"(?:{language}|{tower})"
        vision_models.DELTA_LANGUAGE = f"(?:{delta}|{tower})"
        vision_models.GEMMA4_LANGUAGE = f"(?:{gemma4}|{tower})"
        with tempfile.TemporaryDirectory() as scratch:
            maker = vision.composite if name in OF_ONE_SIDE else vision_models.MODELS[name]
            made = maker(scratch, name, seed)
        for key, parameter in made[0].named_parameters():
            parameter.requires_grad_("lora_" in key)
        if name in OF_ONE_SIDE:
            pictures = vision.normals((vision.PICTURES, 3, vision.SIDE, vision.SIDE), seed + 4)
            stored = dict(pixel_values=pictures)
        else:
            pictures = vision_models.Pictures(vision.normals((3, *sides), seed + 10 + place) for place, sides in enumerate(vision_models.sides_of(maker, name)))
            stored = {f"pixel_values.{place}": picture for place, picture in enumerate(pictures)}
        folder = f"{arguments.out}/{name}_adapters"
        vision.os.makedirs(folder, exist_ok=True)
        vision.write_model(folder, made, pictures, stored, seed, drifts=name.startswith("qwen2"))
        print(name)


if __name__ == "__main__":
    main()
