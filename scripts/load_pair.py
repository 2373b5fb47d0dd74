"""Loads a text model and an image encoder that tunesmith has merged into one folder (`tunesmith merge` of a run with `vision.encoder`), and
adapters that were trained on it. Needs torch, transformers, safetensors, and for adapters peft.

    from load_pair import load, caption
    pair = load("runs/captions/merged")                      # or load(folder, adapter="runs/stage2/adapter")
    print(caption(pair, "cat.jpg"))

The folder is that of the text model, as AutoModelForCausalLM reads it. `vision.json` describes the encoder and the connector, and
`vision.safetensors` has their weights.
"""
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer


def load(folder, adapter=None):
    """The model, its tokenizer, and its image processor. `model.model.vision_tower` is the encoder, `model.model.multi_modal_projector` the connector."""
    folder = Path(folder)
    settings = json.loads((folder / "vision.json").read_text())
    weights = load_file(folder / "vision.safetensors")
    part = lambda name: {key.removeprefix(name): value for key, value in weights.items() if key.startswith(name)}

    model = AutoModelForCausalLM.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(settings["vision_config"]))
        save_file(part("vision_tower."), Path(place) / "model.safetensors", metadata={"format": "pt"})
        tower = AutoModel.from_pretrained(place)
    tower = getattr(tower, "vision_model", tower)  # some classes wrap the encoder

    width, inner = model.get_input_embeddings().embedding_dim, settings["connector_hidden_size"]
    about = tower.config
    connector = torch.nn.Module()
    if inner is None:
        connector.linear = torch.nn.Linear(about.hidden_size, width)
        connector.forward = lambda rows: connector.linear(rows)
    else:
        connector.linear_1 = torch.nn.Linear(about.hidden_size, inner)
        connector.linear_2 = torch.nn.Linear(inner, width)
        connector.forward = lambda rows: connector.linear_2(torch.nn.functional.gelu(connector.linear_1(rows)))
    connector.load_state_dict(part("multi_modal_projector."))

    base = model.base_model  # LlamaModel of LlamaForCausalLM, and so on
    base.vision_tower, base.multi_modal_projector = tower, connector
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    return SimpleNamespace(
        model=model.eval(),
        base=base,
        settings=settings,
        tokenizer=AutoTokenizer.from_pretrained(adapter or folder),
        processor=AutoImageProcessor.from_pretrained(folder),
    )


def image_rows(pair, pictures):
    """What the connector makes of pictures: [pictures, rows, width of the text model]."""
    pixels = pair.processor(pictures, return_tensors="pt")["pixel_values"]
    tower, layer = pair.base.vision_tower, pair.settings["feature_layer"]
    if layer is None:
        rows = tower(pixels).last_hidden_state
    else:  # the output of a block, before the norm behind the last one
        blocks = next(module for module in tower.modules() if isinstance(module, torch.nn.ModuleList))
        kept = []
        hook = blocks[layer].register_forward_hook(lambda _module, _inputs, output: kept.append(output))
        tower(pixels)
        hook.remove()
        rows = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    # Class and register tokens stand before the patches.
    patches = (pixels.shape[-2] // tower.config.patch_size) * (pixels.shape[-1] // tower.config.patch_size)
    return pair.base.multi_modal_projector(rows[:, -patches:])


@torch.no_grad()
def caption(pair, file, most=30):
    """The greedy caption of a picture, for pairs that were trained on rows {image, caption}."""
    from PIL import Image

    rows = image_rows(pair, [Image.open(file).convert("RGB")])
    ids = pair.model.generate(inputs_embeds=rows, attention_mask=torch.ones(rows.shape[:2]), max_new_tokens=most, do_sample=False)
    return pair.tokenizer.decode(ids[0], skip_special_tokens=True)


if __name__ == "__main__":
    folder, picture, *adapter = sys.argv[1:]
    print(caption(load(folder, *adapter), picture))
