#!/usr/bin/env python3
"""Makes tests/golden/vision/naflex: the image encoder of SigLIP 2 with pictures of several shapes in one padded batch.

    python3 scripts/golden/vision_naflex.py --out tests/golden/vision

As the encoders of vision.py, but that picture i is `pixel_values.i`, [channels, height, width]. `last`, `second`, and `seed` have the rows
of its patches, picture after picture, without those of padding.
"""
import argparse

import torch
import transformers

import vision
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tower = {key: value for key, value in vision.TOWER.items() if key != "image_size"}
    config = transformers.Siglip2VisionConfig(**tower, num_patches=16, vision_use_head=False, attn_implementation="eager")
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
