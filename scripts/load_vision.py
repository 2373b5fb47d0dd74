"""Loads the folders that tunesmith writes and Transformers has no class for: a text model with an image encoder (a run with
`vision.encoder`, whose folder has vision.json), and a model with a second encoder (`vision.world`, world.json). Such folders come from
`tunesmith merge`, `tunesmith export --hf`, and runs with `tuning.mode: full` or `freeze`. Also loads adapters that were trained on them.
Needs torch, transformers, and safetensors; for adapters peft, for second encoders diffusers.

    from load_vision import load, answer
    seeing = load("runs/captions/merged")                       # or load(folder, adapter="runs/stage2/adapter")
    print(answer(seeing, "cat.jpg"))                            # a caption, of models that were trained on rows {image, caption}
    print(answer(seeing, "cat.jpg", "What is it?"))             # of models that chat

The folder is also that of the plain model, as Transformers reads it. vision.json describes the image encoder and the connector, and
vision.safetensors has their weights; world.json and world.safetensors are those of the second encoder and its projector. Images are resized by
torchvision if it is installed, as `vision.backend: torchvision` does, and otherwise by Pillow.
"""
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer


def load(folder, adapter=None, dtype=torch.float32):
    """The model and what prepares its input. `base` has the parts: `vision_tower` and `multi_modal_projector` of a text model with an image
    encoder; `world_encoder` and `world_projector`."""
    folder = Path(folder)
    read = lambda name: json.loads((folder / name).read_text()) if (folder / name).is_file() else None
    pair, world = read("vision.json"), read("world.json")
    kind = AutoModelForCausalLM if pair or not hasattr(AutoConfig.from_pretrained(folder), "vision_config") else AutoModelForImageTextToText
    model = kind.from_pretrained(folder, dtype=dtype)
    if not hasattr(model, "model"):
        model.model = torch.nn.Module()  # GPT-2 has its blocks elsewhere
    base = model.model  # LlamaModel of LlamaForCausalLM, and so on
    if pair:
        parts = parts_of(folder / "vision.safetensors")
        base.vision_tower = saved(pair["vision_config"], parts["vision_tower"], "model", lambda place: AutoModel.from_pretrained(place, dtype=dtype))
        base.vision_tower = getattr(base.vision_tower, "vision_model", base.vision_tower)  # some classes wrap the encoder
        base.multi_modal_projector = Connector(parts["multi_modal_projector"]).to(dtype)
    if world:
        import diffusers

        parts = parts_of(folder / "world.safetensors")
        settings = world["encoder_config"]
        encoder = getattr(diffusers, settings["_class_name"])
        base.world_encoder = saved(settings, parts["world_encoder"], "diffusion_pytorch_model", encoder.from_pretrained)
        base.world_projector = Connector(parts["world_projector"], world["projection_architecture"] == "mlp").to(dtype)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    shown = SimpleNamespace(at=torch.zeros(0, dtype=torch.bool), rows=None)

    def put_rows(_embedding, _inputs, output):
        here = shown.rows is not None and output.shape[1] == len(shown.at)
        return output.masked_scatter(shown.at[:, None], shown.rows) if here else output

    model.get_input_embeddings().register_forward_hook(put_rows)
    tokenizer = AutoTokenizer.from_pretrained(adapter or folder)
    processor = AutoImageProcessor.from_pretrained(folder) if pair else AutoProcessor.from_pretrained(folder)
    return SimpleNamespace(model=model.eval(), base=base, pair=pair, world=world, tokenizer=tokenizer, processor=processor, shown=shown)


def parts_of(file):
    """The tensors of a file by the first part of their names."""
    parts = {}
    for name, value in load_file(file).items():
        part, name = name.split(".", 1)
        parts.setdefault(part, {})[name] = value
    return parts


def saved(settings, weights, name, read):
    """What `read` makes of a folder with these settings and weights."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(settings))
        save_file(weights, Path(place) / f"{name}.safetensors", metadata={"format": "pt"})
        return read(place)


class Connector(torch.nn.Module):
    """One linear module, or two with GELU between them, and behind the last one with `ends_in_gelu`."""

    def __init__(self, weights, ends_in_gelu=False):
        super().__init__()
        for name in sorted({name.split(".")[0] for name in weights}):
            size, inputs = weights[f"{name}.weight"].shape
            setattr(self, name, torch.nn.Linear(inputs, size))
        self.ends_in_gelu = ends_in_gelu
        self.load_state_dict(weights)

    def forward(self, rows):
        first, *later = self.children()
        rows = first(rows)
        for linear in later:
            rows = linear(torch.nn.functional.gelu(rows))
        return torch.nn.functional.gelu(rows) if self.ends_in_gelu else rows


def image_rows(seeing, images):
    """What the connector makes of images: for each [rows, width of the text model]. In SigLIP 2's NaFlex form images have as many rows as patches."""
    tower, layer = seeing.base.vision_tower, seeing.pair["feature_layer"]
    given = seeing.processor(images, return_tensors="pt")
    pixels = given["pixel_values"].to(tower.dtype)
    shapes = given.get("spatial_shapes")
    more = {} if shapes is None else dict(pixel_attention_mask=given["pixel_attention_mask"], spatial_shapes=shapes)
    if layer is None:
        rows = tower(pixels, **more).last_hidden_state
    else:  # the output of a block, before the norm behind the last one
        blocks = next(module for module in tower.modules() if isinstance(module, torch.nn.ModuleList))
        kept = []
        hook = blocks[layer].register_forward_hook(lambda _module, _inputs, output: kept.append(output))
        tower(pixels, **more)
        hook.remove()
        rows = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    if shapes is not None:  # padding stands behind the patches
        return [seeing.base.multi_modal_projector(own[: height * width]) for own, (height, width) in zip(rows, shapes.tolist())]
    # Class and register tokens stand before the patches.
    patches = (pixels.shape[-2] // tower.config.patch_size) * (pixels.shape[-1] // tower.config.patch_size)
    return list(seeing.base.multi_modal_projector(rows[:, -patches:]))


def world_rows(seeing, images):
    """What the second encoder and its projector make of images: [images, rows, width of the model]."""
    side = seeing.world["image_size"]
    settings = dict(image_processor_type="SiglipImageProcessor", size=dict(height=side, width=side), resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "preprocessor_config.json").write_text(json.dumps(settings))
        pixels = AutoImageProcessor.from_pretrained(place)(images, return_tensors="pt")["pixel_values"]
    if type(seeing.base.world_encoder).__name__ == "AutoencoderKLWan":
        pixels = pixels[:, :, None]  # a video of one frame
    latents = seeing.base.world_encoder.encode(pixels).latent_dist.mode().flatten(2)
    latents = latents if seeing.world["projection_mode"] == "channel" else latents.transpose(1, 2)
    return seeing.base.world_projector(latents.to(next(seeing.base.world_projector.parameters()).dtype))


def inputs(seeing, images, question=None, answer=None):
    """What the model reads: a chat with the images, the question, and perhaps an answer; without a question the images before a caption.
    The rows of the encoders are put in place when the model reads so many tokens next."""
    ask = lambda content: [dict(role="user", content=content)] + ([] if answer is None else [dict(role="assistant", content=answer)])
    at, rows = None, []
    if seeing.pair is None and seeing.model.config.model_type == "paligemma":
        # Its processor has no chats: the question follows the images, and the answer is a suffix, whose tokens see what is before them.
        text = seeing.processor.image_token * len(images) + question
        found = dict(seeing.processor(text=[text], suffix=answer and [answer], images=[images], return_tensors="pt"))
        found.pop("labels", None)
        at = torch.zeros(found["input_ids"].shape[1], dtype=torch.bool)
    elif seeing.pair is None:
        content = [dict(type="image", image=image) for image in images] + [dict(type="text", text=question)]
        found = seeing.processor.apply_chat_template(ask(content), add_generation_prompt=answer is None, tokenize=True, return_dict=True, return_tensors="pt")
        found = dict(found)
        at = torch.zeros(found["input_ids"].shape[1], dtype=torch.bool)
    else:
        own = image_rows(seeing, images)
        rows, token = list(own), seeing.pair["image_token_id"]
        if token is None:
            shown = sum(map(len, own))
            ids = [0] * shown + ([] if answer is None else seeing.tokenizer(answer, add_special_tokens=False).input_ids + [seeing.tokenizer.eos_token_id])
            at = torch.arange(len(ids)) < shown
        else:
            image = seeing.tokenizer.convert_ids_to_tokens(token)
            text = seeing.tokenizer.apply_chat_template(ask(image * len(images) + question), add_generation_prompt=answer is None, tokenize=False)
            first, *behind = text.split(image)
            text = first + "".join(image * len(of) + more for of, more in zip(own, behind, strict=True))
            ids = seeing.tokenizer(text, add_special_tokens=False).input_ids
            at = torch.tensor(ids) == token
        found = dict(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    if seeing.world:
        # For each image a token, its rows, another token: behind BOS, before everything else.
        second = world_rows(seeing, images)
        begin, end = seeing.world["token_ids"]
        block = torch.tensor(([begin] * (1 + second.shape[1]) + [end]) * len(images))
        inside = torch.tensor(([False] + [True] * second.shape[1] + [False]) * len(images))
        ids = found["input_ids"][0]
        first = int(ids[0] == seeing.tokenizer.bos_token_id)
        put = lambda whole, part: torch.cat([whole[:first], part.to(whole.dtype), whole[first:]])
        fill = dict(input_ids=block, attention_mask=torch.ones_like(block))
        for name, value in found.items():
            if value.shape == (1, len(ids)):
                found[name] = put(value[0], fill.get(name, torch.zeros_like(block)))[None]
        at, rows = put(at, inside), [second.flatten(0, 1), *rows]
    seeing.shown.at, seeing.shown.rows = at, torch.cat(rows) if rows else None
    return found


@torch.no_grad()
def answer(seeing, file, question=None, most=30):
    """The greedy answer to a question about an image; without a question, its caption."""
    from PIL import Image

    found = inputs(seeing, [Image.open(file).convert("RGB")], question)
    stops = seeing.model.generation_config.eos_token_id
    stops = {seeing.tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])} - {None}
    ids = seeing.model.generate(**found, max_new_tokens=most, do_sample=False, eos_token_id=sorted(stops))
    return seeing.tokenizer.decode(ids[0, found["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    folder, image, *question = sys.argv[1:]
    print(answer(load(folder), image, *question))
