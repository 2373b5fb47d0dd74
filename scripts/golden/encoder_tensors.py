#!/usr/bin/env python3
"""Writes tests/golden/encoder_tensors.json: names and shapes of all tensors of the image encoders and connectors of the golden models, as the
classes of Transformers have them in memory, buffers that are saved among them. PEFT wants all of these of a module in `modules_to_save`.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/encoder_tensors.py > tests/golden/encoder_tensors.json

Of an encoder alone, the names are those that `scripts/load_vision.py` gives it before a text model.
"""
import json
import pathlib

import torch
import transformers

VISION = pathlib.Path(__file__).parents[2] / "tests/golden/vision"
WHOLE = [
    "across_clip", "across_dinov2", "across_siglip", "across_vit", "gemma3", "gemma4", "gemma4_31b", "internvl", "llava", "llava_onevision", "mistral3",
    "paligemma", "pixtral", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "smolvlm",
]
ALONE = ["clip", "dinov2", "dinov2_registers", "naflex", "pixtral_alone", "siglip", "vit"]


def tensors(model, before=""):
    """Name and shape of all tensors but those of the language model."""
    names = {before + name: list(value.shape) for name, value in model.state_dict().items()}
    return {name: names[name] for name in sorted(names) if not name.startswith(("model.language_model.", "lm_head.", "decoder."))}


def main():
    found = {}
    with torch.device("meta"):
        for name in WHOLE:
            config = transformers.AutoConfig.from_pretrained(VISION / name / "model")
            across = config.model_type == "vision-encoder-decoder"
            kind = transformers.VisionEncoderDecoderModel(config=config) if across else transformers.AutoModelForImageTextToText.from_config(config)
            found[name] = tensors(kind)
        for name in ALONE:
            tower = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(VISION / name / "model"))
            found[name] = tensors(getattr(tower, "vision_model", tower), "model.vision_tower.")
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(names)}" for name, names in sorted(found.items()))
    print("{\n" + text + "\n}")


if __name__ == "__main__":
    main()
