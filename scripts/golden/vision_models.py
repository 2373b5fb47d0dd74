#!/usr/bin/env python3
"""Makes more of tests/golden/vision: models whose pictures have sides of their own, or whose decoders see them in other ways.

    python3 scripts/golden/vision_models.py --out tests/golden/vision

Everything is as in vision.py, but that picture i is `pixel_values.i`, [channels, height, width].
"""

import numpy as np
import torch
import transformers
from transformers.image_processing_utils import select_best_resolution

import vision
from vision import IMAGE, PATCH, SIDE, TEXT

# Height and width of each picture.
SIDES = [(32, 32), (16, 48), (48, 32), (64, 48), (16, 16), (48, 80)]
FRAMES, MERGE = 2, 2
SECTIONS = dict(qwen2_vl=[1, 1, 2], qwen2_5_vl=[2, 1, 1], qwen3_vl=[2, 1, 1], qwen3_5=[2, 1, 1], qwen3_5_moe=[2, 1, 1])
# Qwen3.5's decoders, as in architectures.py: half of a head turns here. The norm behind the rule makes small outputs large, with their
# rounding: a larger eps keeps it small.
DELTA = dict(
    rms_norm_eps=1e-3, head_dim=16, layer_types=["linear_attention", "full_attention", "linear_attention"], linear_conv_kernel_dim=4,
    linear_key_head_dim=12, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4,
)
EXPERTS = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40)
# Modules of its linear attention have names such as in_proj_qkv.
DELTA_LANGUAGE = r".*language_model\.layers\.\d+\..*(?:_proj(?:_\w+)?|shared_expert_gate)"


class Pictures(list):
    """Pictures of several sizes, of which a list of numbers takes some."""

    def __getitem__(self, numbers):
        return [super(Pictures, self).__getitem__(number) for number in numbers]


def patches(picture):
    """A picture as Qwen's processors cut it: squares of MERGE x MERGE patches, each patch [channels, frames, PATCH, PATCH]."""
    channels, height, width = picture.shape
    rows, columns = height // PATCH, width // PATCH
    cut = picture.reshape(channels, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, FRAMES, -1, -1)
    return cut.reshape(rows * columns, -1), [1, rows, columns]


def qwen(out, name, seed):
    """Qwen2-VL, 2.5, 3, and Qwen3.5."""
    rope = dict(rope_type="default", rope_theta=1000.0, mrope_section=SECTIONS[name])
    text = dict(model_type=f"{name}_text", **TEXT | dict(num_hidden_layers=3, rope_parameters=rope))
    tower = dict(depth=3, num_heads=4, patch_size=PATCH, spatial_merge_size=MERGE, temporal_patch_size=FRAMES)
    tower |= dict(
        qwen2_vl=dict(embed_dim=32, hidden_size=32, mlp_ratio=2),
        qwen2_5_vl=dict(hidden_size=32, out_hidden_size=32, intermediate_size=48, window_size=32, fullatt_block_indexes=[1]),
        qwen3_vl=dict(hidden_size=32, out_hidden_size=32, intermediate_size=48, num_position_embeddings=25, deepstack_visual_indexes=[0, 1]),
        qwen3_5=dict(hidden_size=32, out_hidden_size=32, intermediate_size=48, num_position_embeddings=25),
        qwen3_5_moe=dict(hidden_size=32, out_hidden_size=32, intermediate_size=48, num_position_embeddings=25),
    )[name]
    if name == "qwen3_vl":
        text |= dict(head_dim=8)
    if name.startswith("qwen3_5"):
        text |= DELTA
        text["rope_parameters"] |= dict(partial_rotary_factor=0.5)
    if name == "qwen3_5_moe":
        del text["intermediate_size"]
        text |= EXPERTS
    cls = dict(qwen2_vl="Qwen2VL", qwen2_5_vl="Qwen2_5_VL", qwen3_vl="Qwen3VL", qwen3_5="Qwen3_5", qwen3_5_moe="Qwen3_5Moe")[name]
    config = getattr(transformers, f"{cls}Config")(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=94, vision_start_token_id=93, vision_end_token_id=92
    )
    plain = vision.scramble(getattr(transformers, f"{cls}ForConditionalGeneration")._from_config(config, attn_implementation="eager"), seed)
    vision.store(plain, f"{out}/{name}/model")
    model = vision.lora(plain, DELTA_LANGUAGE if name.startswith("qwen3_5") else vision.LANGUAGE, seed + 3)
    for key, parameter in model.named_parameters():
        if "visual" in key:
            parameter.requires_grad_(True)

    def forward(ids, mask, pictures):
        plain.model.rope_deltas = None
        more = dict(mm_token_type_ids=(ids == IMAGE).int())
        if pictures is not None:
            cut = [patches(picture) for picture in pictures]
            more |= dict(pixel_values=torch.cat([values for values, _ in cut]), image_grid_thw=torch.tensor([grid for _, grid in cut]))
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits

    rows = [height * width // (PATCH * MERGE) ** 2 for height, width in SIDES]
    return model, forward, dict(prefix=False, rows=rows)


def trained(config, folder, seed):
    """A model of random weights, stored in `folder`, with LoRA on its language model; encoder and connector are trained in full."""
    cls = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))
    plain = vision.scramble(cls._from_config(config, attn_implementation="eager"), seed)
    vision.store(plain, folder)
    model = vision.lora(plain, vision.LANGUAGE, seed + 3)
    for key, parameter in model.named_parameters():
        if "vision_tower" in key or "projector" in key:
            parameter.requires_grad_(True)
    return model


def square(out, name, seed):
    """Models whose pictures are all of the encoder's size."""
    tower = dict(vision.TOWER)
    if name == "internvl":
        tower |= dict(model_type="internvl_vision", image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH], attention_bias=True)
        config = transformers.InternVLConfig(text_config=dict(model_type="qwen2", **TEXT), vision_config=tower, image_token_id=IMAGE, tie_word_embeddings=False)
    else:
        tower |= dict(model_type="siglip_vision_model", vision_use_head=False)
        text = dict(model_type="gemma2", **TEXT | dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=8, num_hidden_layers=3, tie_word_embeddings=True))
        config = transformers.PaliGemmaConfig(text_config=text, vision_config=tower, projection_dim=32, image_token_index=IMAGE, image_token_id=IMAGE)
    model = trained(config, f"{out}/{name}/model", seed)

    def forward(ids, mask, pictures, labels=None):
        more = {}
        if name == "paligemma":
            # The suffix begins with the first label; a prompt that is answered is all prefix, what was answered is not.
            more = dict(token_type_ids=suffix(ids, labels))
        if pictures is not None:
            more |= dict(pixel_values=torch.stack(pictures))
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits

    return model, forward, dict(prefix=False, rows=dict(internvl=4, paligemma=16)[name], needs_labels=name == "paligemma")


def suffix(ids, labels):
    """Zeros before each row's first label, then ones. `labels` may be the number of a prompt's tokens."""
    if isinstance(labels, int):
        return (torch.arange(ids.shape[1]) >= labels).long()[None]
    return ((labels != vision.IGNORE).cumsum(1) > 0).long()


# Pictures of a Pixtral whose patches are rows of the decoder each: sides of any number of patches.
ODD_SIDES = [(32, 32), (8, 40), (24, 16), (40, 56), (8, 8), (56, 24)]
# Of Mistral 3, whose class in Transformers takes no picture of one row.
EVEN_SIDES = [sides if sides != (16, 16) else (16, 32) for sides in SIDES]


def padded(pictures):
    """Pictures as PixtralImageProcessor gives them: with zeros up to one size, and their own sizes."""
    sizes = [picture.shape[-2:] for picture in pictures]
    height, width = (max(size[side] for size in sizes) for side in (0, 1))
    grown = [torch.nn.functional.pad(picture, (0, width - size[1], 0, height - size[0])) for picture, size in zip(pictures, sizes)]
    return dict(pixel_values=torch.stack(grown), image_sizes=torch.tensor([list(size) for size in sizes]))


def pixtral(out, name, seed):
    """Mistral 3, Ministral 3, and LLaVA with Pixtral's encoder."""
    tower = dict(model_type="pixtral", hidden_act="gelu" if name == "mistral3" else "silu", **vision.TOWER)
    if name == "pixtral":
        config = transformers.LlavaConfig(
            text_config=dict(model_type="mistral", **TEXT), vision_config=tower, image_token_index=IMAGE, vision_feature_layer=-1,
            vision_feature_select_strategy="full", projector_hidden_act="gelu")
    else:
        # Its norm is one of the connector too.
        text = dict(model_type="mistral" if name == "mistral3" else name, **TEXT | dict(rms_norm_eps=1e-3))
        rope = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
                    mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
        text |= dict(rope_parameters=rope, head_dim=8) if name == "ministral3" else {}
        config = transformers.Mistral3Config(
            text_config=text, vision_config=tower, image_token_index=IMAGE, spatial_merge_size=MERGE, tie_word_embeddings=False,
            vision_feature_layer=-2 if name == "ministral3" else -1)
    model = trained(config, f"{out}/{name}/model", seed)

    def forward(ids, mask, pictures):
        more = padded(pictures) if pictures is not None else {}
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits

    side = PATCH if name == "pixtral" else PATCH * MERGE
    rows = [height * width // side**2 for height, width in sides_of(pixtral, name)]
    return model, forward, dict(prefix=False, rows=rows)


# As in wrapped.py: what stands beside the blocks, too, and the router of experts.
GEMMA4_LANGUAGE = r".*language_model\.(?:layers\.\d+\..*(?:_proj|router\.proj|per_layer_input_gate|per_layer_projection)|per_layer_model_projection)"
GEMMA4_ROPE = dict(
    sliding_attention=dict(rope_type="default", rope_theta=10000.0),
    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
)


def spread(pictures):
    """Pictures as Gemma4ImageProcessor gives them: patches [row, column, channel], with zeros up to one number, and their places."""
    cut, places = [], []
    for picture in pictures:
        channels, height, width = picture.shape
        rows, columns = height // PATCH, width // PATCH
        cut.append(picture.reshape(channels, rows, PATCH, columns, PATCH).permute(1, 3, 2, 4, 0).reshape(rows * columns, -1))
        grid = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        places.append(torch.stack(grid, -1).reshape(rows * columns, 2))
    most = max(len(patches) for patches in cut)
    grown = lambda values, filler: torch.stack([torch.nn.functional.pad(one, (0, 0, 0, most - len(one)), value=filler) for one in values])
    return dict(pixel_values=grown(cut, 0), image_position_ids=grown(places, -1))


def buffers_of(model, seed):
    """Gives every buffer that a checkpoint has numbers: bounds that some values lie beyond, factors near one."""
    rng = np.random.default_rng(seed)
    for key, buffer in sorted(model.named_buffers()):
        noise = torch.from_numpy(rng.standard_normal(tuple(buffer.shape), dtype=np.float32)) if buffer.dim() else float(rng.standard_normal())
        if key.endswith(("input_min", "output_min")):
            value = -1.6 + 0.1 * noise
        elif key.endswith(("input_max", "output_max")):
            value = 1.8 + 0.1 * noise
        elif key.endswith(("std_scale", "layer_scalar")):
            value = 1.0 + 0.2 * noise
        elif key.endswith("std_bias"):
            value = 0.5 * noise
        else:
            continue
        buffer.copy_(torch.as_tensor(value).reshape(buffer.shape).to(torch.bfloat16).to(torch.float32))


def gemma4(out, name, seed):
    """As E2B: embeddings for each block, last blocks that share keys, modules that clip. As 31B: values of the keys, rows of images that see
    each other within a window which is shorter than images, numbers of the encoder that are taken off and multiplied. As 26B-A4B: the same,
    with experts beside the MLP of each block."""
    small, experts = name == "gemma4", name == "gemma4_a4b"
    # With a larger eps the norms of heads make no small numbers large, with their rounding.
    text = TEXT | dict(model_type="gemma4_text", rms_norm_eps=1e-2, head_dim=8, sliding_window=6, rope_parameters=GEMMA4_ROPE,
                       final_logit_softcapping=30.0, tie_word_embeddings=True)
    if small:
        text |= dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, global_head_dim=16, num_kv_shared_layers=2,
                     use_double_wide_mlp=True, hidden_size_per_layer_input=16, vocab_size_per_layer_input=vision.VOCABULARY)
    else:
        text |= dict(num_hidden_layers=3, layer_types=["sliding_attention", "sliding_attention", "full_attention"], global_head_dim=16,
                     num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0, use_bidirectional_attention="vision")
    if experts:
        text |= dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], intermediate_size=48, enable_moe_block=True,
                     num_experts=6, top_k_experts=3, moe_intermediate_size=24)
    tower = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4 if small or experts else 2,
                 head_dim=8 if small or experts else 12, patch_size=PATCH, pooling_kernel_size=MERGE, position_embedding_size=64,
                 use_clipped_linears=small, standardize=not small)
    config = transformers.Gemma4Config(
        text_config=text, vision_config=tower, audio_config=None, image_token_id=IMAGE, boi_token_id=94, eoi_token_id=93, video_token_id=92,
        audio_token_id=91, boa_token_id=90, eoa_token_index=89)
    plain = vision.scramble(transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager"), seed)
    with torch.no_grad():
        buffers_of(plain, seed + 1)
        # Else the token that a table shares with the head is always its own successor.
        plain.model.language_model.embed_tokens.weight *= 0.125
    vision.store(plain, f"{out}/{name}/model")
    model = vision.lora(plain, GEMMA4_LANGUAGE, seed + 3)
    for key, parameter in model.named_parameters():
        if "vision_tower" in key or "embed_vision" in key:
            parameter.requires_grad_(True)

    def forward(ids, mask, pictures):
        more = spread(pictures) if pictures is not None else {}
        return model(input_ids=ids, attention_mask=mask, mm_token_type_ids=(ids == IMAGE).int(), use_cache=False, **more).logits

    rows = [height * width // (PATCH * MERGE) ** 2 for height, width in sides_of(gemma4, name)]
    return model, forward, dict(prefix=False, rows=rows)


# Height and width in pixels of LLaVA-OneVision's pictures, of which only tiles are read: wide, tall, larger than two tiles, smaller than one.
SHAPES = [(32, 32), (40, 64), (60, 64), (20, 90), (90, 20), (10, 9)]
GRIDS = [[32, 32], [32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]


class Cut:
    """A picture of LLaVA-OneVision: its size, its tiles, and the one tile of it where it stands with others."""

    def __init__(self, size, tiles, whole):
        self.size, self.tiles, self.whole = size, tiles, whole

    def double(self):
        return Cut(self.size, self.tiles.double(), self.whole.double())


def cut_pictures(seed):
    grids = [select_best_resolution(size, GRIDS) for size in SHAPES]
    counts = [1 + height * width // SIDE**2 for height, width in grids]
    normal = lambda count, place: vision.normals((count, 3, SIDE, SIDE), seed + place)
    return Pictures(Cut(size, normal(count, place), normal(1, 30 + place)) for place, (size, count) in enumerate(zip(SHAPES, counts)))


def llava_onevision(out, name, seed):
    """Tiles in a grid, of which margins are left out, with a learned row at the end of each line."""
    tower = dict(model_type="siglip_vision_model", vision_use_head=False, **vision.TOWER)
    config = transformers.LlavaOnevisionConfig(
        text_config=dict(model_type="qwen2", **TEXT), vision_config=tower, image_token_index=IMAGE, video_token_index=94,
        image_grid_pinpoints=GRIDS, vision_aspect_ratio="anyres_max_2", tie_word_embeddings=False)
    plain = vision.scramble(transformers.LlavaOnevisionForConditionalGeneration._from_config(config, attn_implementation="eager"), seed)
    vision.store(plain, f"{out}/{name}/model")
    model = vision.lora(plain, vision.LANGUAGE, seed + 3)
    for key, parameter in model.named_parameters():
        if "vision_tower" in key or "projector" in key or "newline" in key:
            parameter.requires_grad_(True)
    processor = transformers.LlavaOnevisionProcessor.__new__(transformers.LlavaOnevisionProcessor)
    processor.image_processor = type("Grids", (), dict(image_grid_pinpoints=GRIDS))
    processor.num_image_tokens, processor.vision_aspect_ratio = (SIDE // PATCH) ** 2, "anyres_max_2"
    rows = [processor._get_number_of_features(*size, SIDE, SIDE) for size in SHAPES]
    among = processor.num_image_tokens + 1
    assert all(count % among for count in rows), rows

    def forward(ids, mask, pictures):
        more = {}
        if pictures is not None:
            # How many pictures each row has: one with its own number of places, or several with as many each.
            counts, at = [], 0
            for places in (ids == IMAGE).sum(1).tolist():
                several = places // among if places % among == 0 else 1
                counts += [several] if several else []
                at += several
            assert at == len(pictures)
            alone = [count == 1 for count in counts for _ in range(count)]
            shown = [picture.tiles if only else picture.whole for picture, only in zip(pictures, alone)]
            most = max(len(tiles) for tiles in shown)
            padded = [torch.nn.functional.pad(tiles, (0, 0, 0, 0, 0, 0, 0, most - len(tiles))) for tiles in shown]
            sizes = torch.tensor([picture.size for picture in pictures])
            more = dict(pixel_values=torch.stack(padded), image_sizes=sizes, batch_num_images=torch.tensor(counts))
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits

    return model, forward, dict(prefix=False, rows=rows, rows_among_others=among, sizes=SHAPES)


MODELS = dict(qwen2_vl=qwen, qwen2_5_vl=qwen, qwen3_vl=qwen, internvl=square, paligemma=square, llava_onevision=llava_onevision)
MODELS |= dict(qwen3_5=qwen, qwen3_5_moe=qwen, mistral3=pixtral, ministral3=pixtral, pixtral=pixtral)
MODELS |= dict(gemma4=gemma4, gemma4_31b=gemma4, gemma4_a4b=gemma4)


# With these, no greedy answer has the token that stands for a picture, or for what else a model reads.
OTHER_SEEDS = dict(qwen3_vl=1, mistral3=1, qwen3_5=4, gemma4=3, gemma4_a4b=24)


def sides_of(maker, name):
    """Height and width of each picture."""
    if maker is pixtral:
        return ODD_SIDES if name == "pixtral" else EVEN_SIDES
    if name in ("gemma4_31b", "gemma4_a4b"):
        return EVEN_SIDES
    return SIDES if maker in (qwen, gemma4) else [(SIDE, SIDE)] * len(SIDES)


def main():
    arguments = vision.arguments_of_command()
    if arguments.only in (None, "pixtral_alone"):
        # An encoder alone, as those of vision.py.
        vision.ENCODERS["pixtral_alone"] = ("PixtralVisionConfig", "PixtralVisionModel", dict(hidden_act="silu"), SIDE)
        vision.make_encoder("pixtral_alone", arguments.out, 8500)
    for number, (name, maker) in enumerate(MODELS.items()):
        if arguments.only in (None, name):
            seed = 8000 + 20 * number + OTHER_SEEDS.get(name, 0)
            pictures = Pictures(vision.normals((3, *sides), seed + 10 + place) for place, sides in enumerate(sides_of(maker, name)))
            stored = {f"pixel_values.{place}": picture for place, picture in enumerate(pictures)}
            if maker is llava_onevision:
                # Models before it keep their seeds; this one's number is 410.
                seed = 7000 + 20 * 410
                pictures = cut_pictures(seed + 10)
                stored = {f"pixel_values.{place}": picture.tiles for place, picture in enumerate(pictures)}
                stored |= {f"among_others.{place}": picture.whole for place, picture in enumerate(pictures)}
            vision.write_model(f"{arguments.out}/{name}", maker(arguments.out, name, seed), pictures, stored, seed, drifts=name.startswith(("qwen2", "qwen3_5")))
            print(name)


if __name__ == "__main__":
    main()
