#!/usr/bin/env python3
"""Makes tests/golden/vision/naflex: the image encoder of SigLIP 2 with pictures of several shapes in one padded batch; and prefix_naflex, a Llama
behind it.

    python3 scripts/golden/vision_naflex.py --out tests/golden/vision

As the encoders of vision.py, but that picture i is `pixel_values.i`, [channels, height, width]. `last`, `second`, and `seed` have the rows
of its patches, picture after picture, without those of padding. prefix_naflex is as prefix of vision.py, with as many rows as a picture has
patches.
"""

import torch
import transformers

import vision
import vision_models
from vision import PATCH

# Height and width: as many patches a side as the encoder has positions for, more, fewer, and both.
SHAPES = [(32, 32), (48, 40), (16, 24), (8, 72)]
SEED = 7000 + 20 * 411


def patches(picture):
    """Patches [row, column, channel] row by row, and their rows and columns."""
    channels, height, width = picture.shape
    rows, columns = height // PATCH, width // PATCH
    cut = picture.reshape(channels, rows, PATCH, columns, PATCH).permute(1, 3, 2, 4, 0)
    return cut.reshape(rows * columns, -1), [rows, columns]


class Prefix(torch.nn.Module):
    """Rows of a picture before each text, as many as it has patches."""

    def __init__(self, encoder, projection, decoder):
        super().__init__()
        self.encoder, self.projection, self.decoder = encoder, projection, decoder

    def forward(self, ids, mask, pictures):
        cut = [patches(picture) for picture in pictures]
        most = max(len(values) for values, _ in cut)
        padded = torch.stack([torch.nn.functional.pad(values, (0, 0, 0, most - len(values))) for values, _ in cut])
        seen = torch.tensor([[int(at < len(values)) for at in range(most)] for values, _ in cut])
        output = self.encoder(pixel_values=padded, pixel_attention_mask=seen, spatial_shapes=torch.tensor([shape for _, shape in cut]))
        rows = [self.projection(own[: len(values)]) for own, (values, _) in zip(output.last_hidden_state, cut)]
        texts = self.decoder.get_input_embeddings()(ids)
        whole = [torch.cat(parts) for parts in zip(rows, texts)]
        longest = max(len(values) for values in whole)
        embeddings = torch.stack([torch.nn.functional.pad(values, (0, 0, 0, longest - len(values))) for values in whole])
        given = [torch.cat([torch.ones(len(own), dtype=mask.dtype), text]) for own, text in zip(rows, mask)]
        given = torch.stack([torch.nn.functional.pad(values, (0, longest - len(values))) for values in given])
        logits = self.decoder(inputs_embeds=embeddings, attention_mask=given, use_cache=False).logits
        return torch.stack([of[len(own) - 1 : len(own) - 1 + ids.shape[1]] for of, own in zip(logits, rows)])


def prefix(out, tower, seed):
    """The encoder of `naflex` itself, in front of a Llama."""
    encoder = vision.scramble(transformers.Siglip2VisionModel(tower), SEED)
    text = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**vision.TEXT), attn_implementation="eager")
    text = vision.scramble(text, seed)
    folder = f"{out}/prefix_naflex"
    vision.store(encoder, f"{folder}/encoder")
    vision.store(text, f"{folder}/model")
    projection = torch.nn.ModuleDict(dict(linear=torch.nn.Linear(32, 32)))
    projection.forward = lambda rows: projection["linear"](rows)
    vision.scramble(projection, seed + 1)
    decoder = vision.lora(text, ["q_proj", "k_proj", "v_proj", "o_proj"], seed + 2)
    encoder.requires_grad_(True)
    projection.requires_grad_(True)
    model = Prefix(encoder, projection, decoder)
    # Two pictures have the encoder's own shape.
    shapes = [*SHAPES, (32, 32), (24, 24)]
    pictures = vision_models.Pictures(vision.normals((3, *shape), seed + 10 + place) for place, shape in enumerate(shapes))
    stored = {f"pixel_values.{place}": picture for place, picture in enumerate(pictures)}
    rows = [height * width // PATCH**2 for height, width in shapes]
    vision.write_model(folder, (model, lambda *given: model(*given), dict(prefix=True, rows=rows)), pictures, stored, seed)
    print("prefix_naflex")


def main():
    arguments = vision.arguments_of_command()
    tower = {key: value for key, value in vision.TOWER.items() if key != "image_size"}
    config = transformers.Siglip2VisionConfig(**tower, num_patches=16, vision_use_head=False, attn_implementation="eager")
    if arguments.only in (None, "prefix_naflex"):
        prefix(arguments.out, config, 7000 + 20 * 414)
    if arguments.only not in (None, "naflex"):
        return
    model = vision.scramble(transformers.Siglip2VisionModel(config), SEED)
    folder = f"{arguments.out}/naflex"
    vision.store(model, f"{folder}/model")
    pictures = [vision.normals((3, *shape), SEED + 1 + place) for place, shape in enumerate(SHAPES)]
    cut = [patches(picture) for picture in pictures]
    most = max(len(values) for values, _ in cut)
    padded = torch.stack([torch.nn.functional.pad(values, (0, 0, 0, most - len(values))) for values, _ in cut])
    mask = torch.tensor([[int(at < len(values)) for at in range(most)] for values, _ in cut])
    output = model(pixel_values=padded, pixel_attention_mask=mask, spatial_shapes=torch.tensor([shape for _, shape in cut]), output_hidden_states=True)
    last, second = output.last_hidden_state[mask.bool()], output.hidden_states[-2][mask.bool()]
    weights = vision.normals(tuple(last.shape), SEED + 8)
    (last * weights).sum().backward()
    tensors = {f"grad.{key}": value.grad for key, value in model.named_parameters() if value.grad is not None}
    stored = {f"pixel_values.{place}": picture for place, picture in enumerate(pictures)}
    vision.save(dict(**stored, last=last, second=second, seed=weights, **tensors), f"{folder}/features.safetensors")
    print("naflex")


if __name__ == "__main__":
    main()
