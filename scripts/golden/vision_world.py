#!/usr/bin/env python3
"""Makes more of tests/golden/vision: Gemma 3 with a second encoder of pictures, a variational autoencoder of diffusers (TheWorld).

    python3 scripts/golden/vision_world.py --out tests/golden/vision

As the models of vision.py, but that a row begins with BOS and, for each of its pictures, `<start_of_world>`, the rows of the second encoder,
`<end_of_world>`. These rows see what is before them alone. MODEL/vae is the autoencoder as diffusers saves it; `world_values` are the pictures
that it reads, and `latents` the means that it gives. Adapters on the language model and the projector are trained. The language model and the
first encoder are gemma3/model: it is made once more from the same seed.
"""
import tempfile

import diffusers
import torch

import vision
import vision_models
from vision import IMAGE

BEGIN, END = 92, 91
SIDE = 16
# Name: number, autoencoder and its arguments, what a row is, what the projector is.
MODELS = dict(
    world_kl=(
        412, "AutoencoderKL",
        dict(block_out_channels=[8, 8, 16], layers_per_block=1, norm_num_groups=4, latent_channels=4, down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3),
        "spatial", "mlp_no_final_gelu",
    ),
    world_wan=(
        413, "AutoencoderKLWan",
        dict(base_dim=4, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        "channel", "mlp",
    ),
)
# That of gemma3 in vision.py.
GEMMA = 7200


class TheWorld(torch.nn.Module):
    def __init__(self, gemma, vae, projection, channels):
        super().__init__()
        self.gemma, self.vae, self.projection, self.channels = gemma, vae, projection, channels

    def latents(self, pictures):
        """[pictures, latent, rows, columns]."""
        video = pictures.dim() == 4 and "Wan" in type(self.vae).__name__
        with torch.no_grad():
            found = self.vae.encode(pictures[:, :, None] if video else pictures).latent_dist.mode()
        return found[:, :, 0] if video else found

    def forward(self, ids, mask, pictures):
        embeddings = self.gemma.get_input_embeddings()(ids)
        more = {}
        if pictures is not None:
            own, second = (torch.stack(values) for values in zip(*pictures))
            rows = self.latents(second).flatten(2)
            rows = self.projection(rows if self.channels else rows.transpose(1, 2)).flatten(0, 1)
            # Placeholders are between the token that begins a picture's rows and the one that ends them.
            inside = (ids == BEGIN) & torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1).eq(BEGIN)
            embeddings = embeddings.masked_scatter(inside[..., None], rows)
            more = dict(pixel_values=own)
        return self.gemma(inputs_embeds=embeddings, attention_mask=mask, token_type_ids=(ids == IMAGE).long(), use_cache=False, **more).logits


def projector(architecture, size):
    first, second = torch.nn.Linear(size, 32), torch.nn.Linear(32, 32)
    if architecture == "linear":
        return torch.nn.Sequential(first)
    return torch.nn.Sequential(first, torch.nn.GELU(), second, *([torch.nn.GELU()] if architecture == "mlp" else []))


def main():
    arguments = vision.arguments_of_command()
    plain_name = vision.our_name
    parts = {"0": "linear_1", "2": "linear_2"}

    def our_name(name):
        if name.startswith("projection."):
            _, part, kind = name.split(".")
            return f"model.world_projector.{parts[part]}.{kind}"
        return plain_name(name.removeprefix("gemma."))

    vision.our_name = our_name
    for name, (number, autoencoder, settings, mode, architecture) in MODELS.items():
        if arguments.only not in (None, name):
            continue
        seed = 7000 + 20 * number
        folder = f"{arguments.out}/{name}"
        vae = vision.scramble(getattr(diffusers, autoencoder)(**settings), seed).eval().requires_grad_(False)
        vision.store(vae, f"{folder}/vae")
        with tempfile.TemporaryDirectory() as scratch:
            gemma, _, shown = vision.composite(scratch, "gemma3", GEMMA)
        for key, parameter in gemma.named_parameters():
            parameter.requires_grad_("lora_" in key)
        places = (SIDE // 4) ** 2
        channels = mode == "channel"
        model = TheWorld(gemma, vae, vision.scramble(projector(architecture, places if channels else 4), seed + 1), channels)
        own = vision.normals((vision.PICTURES, 3, vision.SIDE, vision.SIDE), seed + 2)
        second = vision.normals((vision.PICTURES, 3, SIDE, SIDE), seed + 3)
        pictures = vision_models.Pictures(zip(own, second))
        stored = dict(pixel_values=own, world_values=second, latents=model.latents(second))
        world = dict(rows=4 if channels else places, tokens=[BEGIN, END], side=SIDE, projection_mode=mode, projection_architecture=architecture)
        made = model, lambda ids, mask, pixels: model(ids, mask, pixels), shown | dict(world=world)
        vision.write_model(folder, made, pictures, stored, seed)
        print(name)


if __name__ == "__main__":
    main()
