#!/usr/bin/env python3
"""Makes tests/golden/vision_variants.jsonl: each key of image encoders and of image processors changed, run by Transformers.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/vision_variants.py tests/golden [--only NAME…]

A line is a model of tests/golden/vision, {"model", "base", "variants": {key: {outcome: [values]}}}, or a processor of pixels.py,
{"processor", "settings", "base", "variants"}. Keys, values, and outcomes are those of config_variants.py; where that has logits, a
processor has tiles and the CRC-32 of the values of each picture in PICTURES. A model's logits are those of its first row with one
picture, at the last token; an encoder's are its last hidden state of the first picture.
"""
import argparse
import json
import os
import tempfile
import warnings

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

import pixels
import vision_models
from config_variants import REMOVED, changed, lookup, variants

ENCODERS = ["vit", "clip", "siglip", "dinov2", "dinov2_registers", "pixtral_alone"]
MODELS = [
    "llava", "gemma3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "internvl", "paligemma",
    "llava_onevision", "mistral3", "ministral3", "pixtral", "gemma4", "gemma4_31b",
]
PICTURES = ["rgb.png", "wide.png", "tall.png"]
# Of the decoder, which config_variants.py tries, or of no matter to numbers.
SKIPPED = {
    "text_config", "transformers_version", "dtype", "torch_dtype", "architectures", "model_type", "_name_or_path", "_attn_implementation",
    "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "tie_word_embeddings", "video_token_id", "video_token_index",
    "vision_start_token_id", "vision_end_token_id", "id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states",
    "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "image_token_id", "image_token_index",
}
# Keys that a file may have in addition, of another class or of none.
MORE = [
    ("hidden_act", ["relu", "quick_gelu", "gelu_new"]), ("attention_bias", [False]), ("qkv_bias", [False]), ("layer_norm_eps", [0.5]),
    ("rms_norm_eps", [0.5]), ("layerscale_value", [0.5]), ("use_mask_token", [True]), ("use_absolute_position_embeddings", [False]),
    ("use_swiglu_ffn", [True]), ("num_register_tokens", [2]), ("use_head", [True]), ("vision_use_head", [True]), ("drop_path_rate", [0.5]),
    ("use_qk_norm", [True]), ("norm_type", ["rms_norm", "layer_norm"]), ("projection_dim", [16]), ("image_size", [64, [32, 32]]),
    ("patch_size", [[8, 8], 16]), ("num_channels", [1]), ("encoder_stride", [8]), ("pooler_output_size", [16]), ("unknown_key", [1]),
    ("attention_dropout", [0.5]), ("hidden_dropout_prob", [0.5]), ("attention_probs_dropout_prob", [0.5]), ("mlp_ratio", [4]),
]
# Of the decoder, but what rows of an image see depends on it: windows shorter than an image.
WINDOWS = {"gemma3": [("text_config.sliding_window", [2, 3])]}
# The same for image processors.
MORE_OF_PROCESSORS = [("do_center_crop", [True]), ("do_pad", [True]), ("pad_size", [{"height": 64, "width": 64}]), ("unknown_key", [1])]
LARGE = 5_000_000
FOLDER = ""


def keys(config, prefix):
    for name, value in config.items():
        if name not in SKIPPED:
            yield prefix + name, value


def every_variant(config, composite, more=()):
    parts = [("", config)] + ([("vision_config.", config["vision_config"])] if composite else [])
    seen, found = set(), []
    for prefix, part in parts:
        found += [(key, other) for key, value in keys(part, prefix) if key != "vision_config" for other in variants(key, value)]
        if not composite or prefix:
            found += [(prefix + key, other) for key, others in MORE for other in others]
    for key, other in found + [(key, other) for key, others in more for other in others]:
        text = json.dumps([key, other])
        if text not in seen and json.dumps(lookup(config, key)) != json.dumps(other):
            seen.add(text)
            yield key, other


def inputs(golden, name):
    """The row, and what Transformers reads of it."""
    with open(f"{golden}/vision/{name}/run.json", encoding="utf-8") as file:
        run = json.load(file)
    stored = load_file(f"{golden}/vision/{name}/forward.safetensors")
    row = next(row for row in run["data"] if len(row["images"]) == 1)
    at = row["images"][0]
    image = run["image_token"]
    if f"pixel_values.{at}" in stored:
        picture = stored[f"pixel_values.{at}"]
    else:
        picture = stored["pixel_values"][at]
    ids = torch.tensor([row["input_ids"]])
    more = dict(pixel_values=picture[None])
    if name.startswith("qwen"):
        values, grid = vision_models.patches(picture)
        more = dict(pixel_values=values, image_grid_thw=torch.tensor([grid]), mm_token_type_ids=(ids == image).int())
    elif name in ("mistral3", "ministral3", "pixtral"):
        more = vision_models.padded([picture])
    elif name.startswith("gemma4"):
        more = dict(mm_token_type_ids=(ids == image).int(), **vision_models.spread([picture]))
    elif name == "gemma3":
        more |= dict(token_type_ids=(ids == image).long())
    elif name == "paligemma":
        more |= dict(token_type_ids=vision_models.suffix(ids, torch.tensor([row["labels"]])))
    elif name == "smolvlm":
        more = dict(pixel_values=picture[None, None])
    elif name == "llava_onevision":
        more |= dict(image_sizes=torch.tensor([run["sizes"][at]]), batch_num_images=torch.tensor([1]))
    return lambda model: model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more).logits[0, -1]


def of_encoder(golden, name):
    picture = load_file(f"{golden}/vision/{name}/features.safetensors")["pixel_values"][:1]

    def run(model):
        try:
            return model(pixel_values=picture).last_hidden_state[0].flatten()
        except ValueError as error:
            # With as many patches as positions, nothing is interpolated: this only turns the comparison of sizes off.
            patches = (model.config.image_size // model.config.patch_size) ** 2
            if "doesn't match model" not in str(error) or patches != (picture.shape[-1] // model.config.patch_size) ** 2:
                raise
            return model(pixel_values=picture, interpolate_pos_encoding=True).last_hidden_state[0].flatten()

    return run


def without_backbone(config, key):
    """With another number of blocks, a backbone's outputs have other names; an encoder alone has none."""
    if key == "num_hidden_layers":
        config = {name: value for name, value in config.items() if name not in ("out_features", "out_indices", "stage_names")}
    return config


def sample(found):
    row = found.float()
    return [float(f"{float(value):.5f}") for value in (row[5], row[len(row) // 2], row[-7])]


def outcome(config, run, auto):
    try:
        with open(os.path.join(FOLDER, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        with torch.device("meta"):
            model = auto.from_config(transformers.AutoConfig.from_pretrained(FOLDER))
        if sum(parameter.numel() for parameter in model.parameters()) > LARGE:
            return "random"
        model, report = auto.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        if report["mismatched_keys"]:
            return "refused"
        if [key for key in report["missing_keys"] if "pooler" not in key and ".head." not in key]:
            return "random"
        model.eval()
        with torch.no_grad():
            found = run(model)
    except Exception as error:
        outcome.reason = error
        return "refused"
    return "nan" if not torch.isfinite(found).all() else found


def add(found, key, other, result, base, sampled):
    if not isinstance(result, str):
        same = result == base if isinstance(result, list) else result.shape == base.shape and torch.equal(result, base)
        other, result = (other, "same") if same else ([other, sampled(result)], "logits")
    found.setdefault(key, {}).setdefault(result, []).append(other)


def model_line(golden, name):
    global FOLDER
    source = f"{golden}/vision/{name}/model"
    with open(f"{source}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    composite = name in MODELS
    auto = transformers.AutoModelForImageTextToText if composite else transformers.AutoModel
    run = inputs(golden, name) if composite else of_encoder(golden, name)
    found = {}
    with tempfile.TemporaryDirectory() as place:
        FOLDER = place
        for file in os.listdir(source):
            if "safetensors" in file:
                os.symlink(os.path.abspath(os.path.join(source, file)), os.path.join(place, file))
        base = outcome(config, run, auto)
        assert not isinstance(base, str), (name, base, getattr(outcome, "reason", None))
        for key, other in every_variant(config, composite, WINDOWS.get(name, ())):
            add(found, key, other, outcome(changed(without_backbone(config, key), key, other), run, auto), base, sample)
    return dict(model=name, base=sample(base), variants=found)


def processed(settings):
    """Tiles and sums of the pictures, or a word."""
    try:
        with tempfile.TemporaryDirectory() as place:
            with open(f"{place}/preprocessor_config.json", "w", encoding="utf-8") as file:
                json.dump(settings, file)
            processor = transformers.AutoImageProcessor.from_pretrained(place)
        # What Gemma3Processor fills in for keys that the file lacks.
        more = {}
        if settings.get("image_processor_type") == "Gemma3ImageProcessor":
            more = {key: value for key, value in transformers.Gemma3Processor.images_kwargs.items() if getattr(processor, key, None) is None}
        found = []
        for name in PICTURES:
            given = processor(pixels.opened(FILES / name), return_tensors="np", **more)
            cut = pixels.cut(processor, given)
            whole = np.concatenate([each for each, _ in cut]).astype(np.float32)
            if not np.isfinite(whole).all():
                return "nan"
            found.append([[size for _, size in cut], pixels.crc(whole)])
        return found
    except Exception as error:
        processed.reason = error
        return "refused"


def processor_line(name, kind, settings):
    config = json.loads(getattr(transformers, kind)(**settings).to_json_string())
    base = processed(config)
    assert not isinstance(base, str), (name, base, processed.reason)
    found = {}
    for key, value in config.items():
        if key in ("image_processor_type", "processor_class", "return_tensors", "data_format", "input_data_format", "device", "disable_grouping"):
            continue
        others = variants(key, value)
        if isinstance(value, list) and len(value) == 3:
            others += [[0.1, 0.2, 0.3], 0.25]
        if key in ("size", "crop_size", "max_image_size"):
            others += [48, {"height": 40, "width": 24}, {"shortest_edge": 20}, {"longest_edge": 40}, {"shortest_edge": 20, "longest_edge": 60}]
            others += [[48, 48], [40, 24], {"shortest_edge": 20, "longest_edge": None}]
        if key == "resample":
            others += [4, 5]
        for other in others:
            if json.dumps(other) != json.dumps(value):
                add(found, key, other, processed(changed(config, key, other)), base, lambda result: result)
    for key, others in MORE_OF_PROCESSORS:
        for other in others:
            if key not in config:
                add(found, key, other, processed(changed(config, key, other)), base, lambda result: result)
    return dict(processor=name, settings=config, base=base, variants=found)


def main():
    global FILES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden")
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    from pathlib import Path

    FILES = Path(args.golden) / "pixels"
    lines, out = {}, os.path.join(args.golden, "vision_variants.jsonl")
    if os.path.exists(out):
        with open(out, encoding="utf-8") as file:
            for line in file:
                read = json.loads(line)
                lines[read.get("model") or f"processor {read['processor']}"] = line.strip()
    jobs = {name: lambda name=name: model_line(args.golden, name) for name in ENCODERS + MODELS}
    jobs |= {f"processor {name}": lambda job=(name, kind, settings): processor_line(*job) for name, kind, settings in pixels.PROCESSORS}
    for name, job in jobs.items():
        if args.only and name not in args.only:
            continue
        found = job()
        count = {}
        for outcomes in found["variants"].values():
            for result, values in outcomes.items():
                count[result] = count.get(result, 0) + len(values)
        print(name, count, flush=True)
        found["versions"] = {"transformers": transformers.__version__, "torch": torch.__version__}
        lines[name] = json.dumps(found, separators=(",", ":"))
    with open(out, "w", encoding="utf-8") as file:
        file.write("".join(lines[name] + "\n" for name in sorted(lines)))


if __name__ == "__main__":
    main()
