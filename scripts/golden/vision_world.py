#!/usr/bin/env python3
"""Makes more of tests/golden/vision: models with a second encoder of pictures, a variational autoencoder of diffusers (TheWorld).

    python3 scripts/golden/vision_world.py --out tests/golden/vision

As the models of vision.py and vision_models.py, but that a row begins with BOS and, for each of its pictures, `<start_of_world>`, the rows of
the second encoder, `<end_of_world>`. In `world_prefix` there is no BOS, and the first encoder's rows and the caption follow. The second
encoder's rows see what is before them alone, and have counted positions, as text has. NAME/vae is the autoencoder as diffusers saves it, unless
`world.vae` names another folder; `world_values` are the pictures that it reads, and `latents` the means that it gives. Adapters on the language
model and the projector are trained, in `world_prefix` the connector too. Language model and first encoder are those of another golden model:
they are made once more from the same seed.
"""
import os
import tempfile

import diffusers
import torch

import vision
import vision_models
from vision import IMAGE

SIDE, LATENT = 16, 4
PLACES = (SIDE // 4) ** 2
VAES = dict(
    world_kl=(
        "AutoencoderKL",
        dict(block_out_channels=[8, 8, 16], layers_per_block=1, norm_num_groups=4, latent_channels=LATENT, down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3),
    ),
    world_wan=(
        "AutoencoderKLWan",
        dict(base_dim=4, z_dim=LATENT, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
    ),
)
# Name: number, autoencoder, what a row is, what the projector is, the tokens around the rows, the other golden model and its seed.
MODELS = dict(
    world_kl=(412, "world_kl", "spatial", "mlp_no_final_gelu", [92, 91], "gemma3", 7200),
    world_wan=(413, "world_wan", "channel", "mlp", [92, 91], "gemma3", 7200),
    world_prefix=(414, "world_wan", "channel", "mlp", [92, 91], "prefix", 7120),
    world_qwen2_5_vl=(415, "world_wan", "spatial", "mlp_no_final_gelu", [90, 91], "qwen2_5_vl", 8020),
    world_qwen3_vl=(416, "world_kl", "channel", "mlp", [90, 91], "qwen3_vl", 8041),
    world_paligemma=(417, "world_kl", "spatial", "linear", [90, 91], "paligemma", 8080),
)


class World(torch.nn.Module):
    """A model, `inner`, that hears from its embedding what a second encoder makes of pictures."""

    def __init__(self, inner, embedding, vae, projection, settings):
        super().__init__()
        self.inner, self.projection = inner, projection
        # Neither trained nor stored here.
        self.vae, self.settings, self.rows = [vae], settings, None
        embedding.register_forward_hook(self.put)

    def latents(self, pictures):
        """[pictures, latent, rows, columns]."""
        video = "Wan" in type(self.vae[0]).__name__
        with torch.no_grad():
            found = self.vae[0].encode(pictures[:, :, None] if video else pictures).latent_dist.mode()
        return found[:, :, 0] if video else found

    def put(self, _embedding, inputs, output):
        begin, ids = self.settings["tokens"][0], inputs[0]
        # Placeholders are between the token that begins a picture's rows and the one that ends them.
        inside = (ids == begin) & torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1).eq(begin)
        return output if self.rows is None else output.masked_scatter(inside[..., None], self.rows)

    def forward(self, ids, mask, pictures, *labels):
        own, self.rows = None, None
        if pictures is not None:
            own, second = zip(*pictures)
            rows = self.latents(torch.stack(second)).flatten(2)
            channels = self.settings["projection_mode"] == "channel"
            rows = self.projection["world"](rows if channels else rows.transpose(1, 2))
            self.rows = rows.flatten(0, 1)
        return self.inner(ids, mask, own, *labels)


class Captions(torch.nn.Module):
    """Rows of pictures before a text: those of the second encoder, and of the first one."""

    def __init__(self, encoder, connector, decoder, settings):
        super().__init__()
        self.encoder, self.connector, self.decoder, self.settings = encoder, [connector], decoder, settings

    def forward(self, ids, mask, pictures):
        rows = self.connector[0](self.encoder(pixel_values=torch.stack(pictures)).last_hidden_state)
        begin, end = self.settings["tokens"]
        world = torch.tensor([begin] * (1 + self.settings["rows"]) + [end]).expand(len(ids), -1)
        embeddings = self.decoder.get_input_embeddings()(torch.cat([world, ids], 1))
        embeddings = torch.cat([embeddings[:, : world.shape[1]], rows, embeddings[:, world.shape[1] :]], 1)
        before = world.shape[1] + rows.shape[1]
        mask = torch.cat([torch.ones(len(ids), before, dtype=mask.dtype), mask], 1)
        logits = self.decoder(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits
        return logits[:, before - 1 : -1]


class Golden(torch.nn.Module):
    """A golden model, and what computes it."""

    def __init__(self, golden, read):
        super().__init__()
        self.golden, self.read = golden, read

    def forward(self, ids, mask, own, *labels):
        return self.read(ids, mask, own, *labels)


def projector(architecture, size):
    first, second = torch.nn.Linear(size, 32), torch.nn.Linear(32, 32)
    if architecture == "linear":
        return torch.nn.Sequential(first)
    return torch.nn.Sequential(first, torch.nn.GELU(), second, *([torch.nn.GELU()] if architecture == "mlp" else []))


def base(name, seed, settings):
    """A golden model without a second encoder: its module, its embedding, its connector if that is trained, and its settings."""
    with tempfile.TemporaryDirectory() as scratch:
        if name == "prefix":
            plain, _, shown = vision.prefix_model(scratch, name, seed)
            inner = Captions(plain.encoder, plain.projection, plain.decoder, settings)
            return inner, plain.decoder.get_input_embeddings(), plain.projection, shown
        if name == "gemma3":
            inner, forward, shown = vision.composite(scratch, name, seed)
        else:
            inner, forward, shown = vision_models.MODELS[name](scratch, name, seed)
    stacked = name == "gemma3"
    read = lambda ids, mask, own, *labels: forward(ids, mask, torch.stack(own) if own and stacked else own, *labels)
    return Golden(inner, read), inner.get_input_embeddings(), None, shown


def our_name(plain_name, architecture):
    parts = {"0": "linear"} if architecture == "linear" else {"0": "linear_1", "2": "linear_2"}

    def named(name):
        if name.startswith("projection.world."):
            part, kind = name.split(".")[2:]
            return f"model.world_projector.{parts[part]}.{kind}"
        if name.startswith("projection.connector."):
            return name.replace("projection.connector.", "model.multi_modal_projector.")
        return plain_name(name.removeprefix("inner.").removeprefix("golden."))

    return named


def main():
    arguments = vision.arguments_of_command()
    plain_name = vision.our_name
    for name, (number, vae_of, mode, architecture, tokens, of_model, of_seed) in MODELS.items():
        if arguments.only not in (None, name):
            continue
        vision.our_name = our_name(plain_name, architecture)
        seed = 7000 + 20 * number
        folder = f"{arguments.out}/{name}"
        os.makedirs(folder, exist_ok=True)
        # Each autoencoder has the seed of the model that it is stored with.
        autoencoder, form = VAES[vae_of]
        vae = vision.scramble(getattr(diffusers, autoencoder)(**form), 7000 + 20 * MODELS[vae_of][0]).eval().requires_grad_(False)
        if vae_of == name:
            vision.store(vae, f"{folder}/vae")
        channels = mode == "channel"
        world = dict(rows=LATENT if channels else PLACES, tokens=tokens, side=SIDE, vae=vae_of, projection_mode=mode, projection_architecture=architecture)
        inner, embedding, connector, shown = base(of_model, of_seed, world)
        for key, parameter in inner.named_parameters():
            parameter.requires_grad_("lora_" in key)
        projection = torch.nn.ModuleDict(dict(world=vision.scramble(projector(architecture, PLACES if channels else LATENT), seed + 1)))
        if connector is not None:
            projection["connector"] = connector.requires_grad_(True)
        model = World(inner, embedding, vae, projection, world)
        second = vision.normals((vision.PICTURES, 3, SIDE, SIDE), seed + 3)
        if of_model in vision_models.MODELS:
            sides = vision_models.sides_of(vision_models.MODELS[of_model])
            own = [vision.normals((3, *side), seed + 10 + place) for place, side in enumerate(sides)]
            stored = {f"pixel_values.{place}": picture for place, picture in enumerate(own)}
        else:
            own = vision.normals((vision.PICTURES, 3, vision.SIDE, vision.SIDE), seed + 2)
            stored = dict(pixel_values=own)
        stored |= dict(world_values=second, latents=model.latents(second))
        made = model, model, shown | dict(world=world)
        vision.write_model(folder, made, vision_models.Pictures(zip(own, second)), stored, seed)
        print(name)


if __name__ == "__main__":
    main()
