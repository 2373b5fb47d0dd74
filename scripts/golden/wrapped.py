#!/usr/bin/env python3
"""Makes tests/golden/wrapped: the models of tests/golden/a as the language models of multimodal ones.

    python3 scripts/golden/wrapped.py --models tests/golden/a --out tests/golden/wrapped [--only NAME ...]

Each wrapped model gets the language model of tests/golden/a unchanged and a small random rest. The script asserts that on text it computes
the same as the language model alone: logits, with PEFT's adapter too, the adapter's gradients, twenty training steps, and greedy generation.
So the goldens of tests/golden/a are its goldens. The script also asserts that Transformers and PEFT load the files in both naming schemes.

Stored are config.json, the names in the file that Transformers saves, the tensors outside the language model, and PEFT's adapter. A test
assembles the model from them and tests/golden/a.

defaults.json has what the configuration classes of language models assume, and wrappers.json what the multimodal classes assume.
"""
import argparse
import json
import os
import shutil
import sys
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from common import *

VISION = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)

GEMMA4_VISION = {key: value for key, value in VISION.items() if key != "image_size"}
# Tokens that no text has.
GEMMA4_IDS = dict(boi_token_id=600, eoi_token_id=601, image_token_id=602, video_token_id=603, boa_token_id=604, eoa_token_index=605, audio_token_id=606)

# Small towers for images and sound. timm has the first one's class.
GEMMA3N_VISION = dict(architecture="test_vit", hidden_size=24, vocab_size=8, model_args=dict(embed_dim=24, depth=1, num_heads=2, img_size=32))
GEMMA3N_AUDIO = dict(
    hidden_size=16, vocab_size=8, input_feat_size=16, conf_num_attention_heads=2, conf_num_hidden_layers=1, conf_attention_chunk_size=4,
    conf_attention_context_left=5, sscp_conv_channel_size=[8, 4],
)

# Name: the configuration's class, the language model of tests/golden/a, the vision tower, further arguments.
MODELS = {
    "gemma3": ("Gemma3Config", "gemma3", dict(model_type="siglip_vision_model", **VISION), dict(mm_tokens_per_image=4, image_token_index=511)),
    "llava": ("LlavaConfig", "llama", dict(model_type="clip_vision_model", **VISION), dict(image_token_index=511)),
    "mistral3": ("Mistral3Config", "mistral", dict(model_type="pixtral", head_dim=8, **VISION), dict(image_token_index=511)),
    "idefics3": ("Idefics3Config", "llama", dict(model_type="idefics3_vision", **VISION), dict(image_token_id=511, scale_factor=1)),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "qwen2",
        dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=8, out_hidden_size=64, fullatt_block_indexes=[0]),
        dict(image_token_id=511, video_token_id=510, vision_start_token_id=509, vision_end_token_id=508),
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        "qwen3_5",
        dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=8, out_hidden_size=64, num_position_embeddings=16),
        dict(image_token_id=511, video_token_id=510, vision_start_token_id=509, vision_end_token_id=508),
    ),
    "gemma4": ("Gemma4Config", "gemma4_e2b", dict(head_dim=8, num_key_value_heads=2, position_embedding_size=16, **GEMMA4_VISION), GEMMA4_IDS),
    "gemma4_a4b": ("Gemma4Config", "gemma4_a4b", dict(head_dim=8, num_key_value_heads=2, position_embedding_size=16, **GEMMA4_VISION), GEMMA4_IDS),
    "gemma4_unified": ("Gemma4UnifiedConfig", "gemma4_unified", dict(patch_size=8, mm_embed_dim=16, mm_posemb_size=8, output_proj_dims=64), GEMMA4_IDS),
    "gemma3n": ("Gemma3nConfig", "gemma3n", GEMMA3N_VISION, dict(audio_config=GEMMA3N_AUDIO)),
    "muse_glimmer": (
        "MuseGlimmerConfig",
        "muse_glimmer",
        dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=8, pos_emb_height=4, pos_emb_width=4),
        dict(out_hidden_size=64, projector_hidden_size=16, image_token_id=600, video_token_id=601),
    ),
}
# What the class of a language model is called where text_config names it.
TEXTS = {
    "llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "gemma": "GemmaConfig", "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig", "mistral": "MistralConfig", "phi3": "Phi3Config", "smollm3": "SmolLM3Config", "olmo2": "Olmo2Config",
    "olmo3": "Olmo3Config", "granite": "GraniteConfig", "qwen2_vl_text": "Qwen2VLTextConfig", "qwen2_5_vl_text": "Qwen2_5_VLTextConfig",
    "qwen3_vl_text": "Qwen3VLTextConfig", "qwen3_5_text": "Qwen3_5TextConfig", "lfm2": "Lfm2Config", "ministral3": "Ministral3Config",
    "mistral4": "Mistral4Config",
    "hunyuan_v1_dense": "HunYuanDenseV1Config", "gemma4_text": "Gemma4TextConfig", "gemma4_unified_text": "Gemma4UnifiedTextConfig", "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "muse_glimmer_text": "MuseGlimmerTextConfig", "gemma3n_text": "Gemma3nTextConfig",
}
WRAPPERS = {
    "gemma3": "Gemma3Config", "llava": "LlavaConfig", "llava_next": "LlavaNextConfig", "llava_next_video": "LlavaNextVideoConfig",
    "llava_onevision": "LlavaOnevisionConfig", "vipllava": "VipLlavaConfig", "video_llava": "VideoLlavaConfig", "mistral3": "Mistral3Config",
    "paligemma": "PaliGemmaConfig", "idefics2": "Idefics2Config", "idefics3": "Idefics3Config", "smolvlm": "SmolVLMConfig",
    "internvl": "InternVLConfig", "qwen2_vl": "Qwen2VLConfig", "qwen2_5_vl": "Qwen2_5_VLConfig", "qwen3_vl": "Qwen3VLConfig",
    "qwen3_5": "Qwen3_5Config", "gemma4": "Gemma4Config", "gemma4_unified": "Gemma4UnifiedConfig", "qwen3_5_moe": "Qwen3_5MoeConfig",
    "muse_glimmer": "MuseGlimmerConfig", "gemma3n": "Gemma3nConfig",
}


def of(config):
    """The class that loads a configuration."""
    return getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))


def plain(models, name):
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{models}/{name}/model", dtype=torch.float32, attn_implementation="eager")
    return in_training(model)


def make(name, models, seed):
    """The wrapped model, and the language model alone."""
    kind, language, vision, further = MODELS[name]
    alone = plain(models, language)
    text = alone.config.to_dict()
    if name == "qwen2_5_vl":
        text["model_type"] = "qwen2_5_vl_text"
        text["rope_parameters"] |= dict(mrope_section=[2, 3, 3], rope_type="default")
    config = getattr(transformers, kind)(text_config=text, vision_config=vision, tie_word_embeddings=alone.config.tie_word_embeddings, **further)
    model = of(config)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    base = text_base(model)
    rng = np.random.default_rng(seed)
    weights = {}
    for key, value in sorted(model.state_dict().items()):
        if not key.startswith((base, "lm_head")):
            noise = torch.from_numpy(rng.standard_normal(tuple(value.shape), dtype=np.float32)).to(torch.bfloat16).to(value.dtype)
            weights[key] = noise if value.is_floating_point() else value
    for key, value in alone.state_dict().items():
        weights[base + key.removeprefix("model.") if key.startswith("model.") else key] = value
    model.load_state_dict(weights)
    model.tie_weights()
    return in_training(model), alone


def text_base(model):
    """The prefix of `layers` in the names of the language model."""
    found = [key for key in model.state_dict() if key.endswith("_model.embed_tokens.weight")]
    assert len(found) == 1, found
    return found[0].removesuffix("embed_tokens.weight")


def logits_of(model, ids, mask):
    kinds = dict(token_type_ids=torch.zeros_like(ids)) if model.config.model_type == "gemma3" else {}
    return model(input_ids=ids, attention_mask=mask, use_cache=False, **kinds).logits


def adapted(model, init):
    """PEFT's adapter on the language model's linear layers, with the values of tests/golden/a."""
    base = text_base(model)
    # Qwen3.5's linear attention has modules such as in_proj_qkv.
    further = r"(_\w+)?" if model.config.model_type == "qwen3_5" else ""
    modules = r"layers\.\d+\..*_proj" + further
    if model.config.model_type == "gemma4":
        # It has modules beside its blocks, whose experts are parameters.
        modules = r"(layers\.\d+\..*(_proj|router\.proj|per_layer_input_gate|per_layer_projection)|per_layer_model_projection)"
    if model.config.model_type == "gemma3n":
        beside = r"altup\.(\w+_coefs|modality_router)|laurel\.linear_\w+|per_layer_input_gate|per_layer_projection"
        modules = rf"(layers\.\d+\.(.*_proj|{beside})|per_layer_model_projection|altup_(unembed_)?projections\.\d+)"
    more = dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"]) if getattr(model.config.get_text_config(), "enable_moe_block", False) else {}
    pattern = base.replace(".", r"\.") + modules
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=pattern, task_type="CAUSAL_LM", **more))
    values = load_file(f"{init}/adapter_model.safetensors")
    own = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert len(own) == len(values)
    with torch.no_grad():
        for name, value in values.items():
            own[name.replace("base_model.model.model.", f"base_model.model.{base}").replace(".weight", ".default.weight")].copy_(value)
    return in_training(model)


def hold(model, models, language, name):
    """Compares a wrapped model with an adapter with the goldens of its language model."""
    golden = load_file(f"{models}/{language}/forward.safetensors")
    ids, mask, labels = golden["input_ids"].long(), golden["attention_mask"].long(), golden["labels"].long()
    rows, places = golden["sel_row"].long(), golden["sel_pos"].long()
    with torch.no_grad(), model.disable_adapter():
        assert difference(logits_of(model, ids, mask)[rows, places], golden["logits_base"]) < 1e-6
    logits = logits_of(model, ids, mask)
    assert difference(logits[rows, places].detach(), golden["logits_lora"]) < 1e-6
    token_losses(logits, labels, "mean").backward()
    for key, wanted in load_file(f"{models}/{language}/lora_grads.safetensors").items():
        key = key.replace("base_model.model.model.", f"base_model.model.{text_base(model.base_model.model)}").replace(".weight", ".default.weight")
        assert difference(dict(model.named_parameters())[key].grad, wanted) < 1e-6 * max(1.0, wanted.abs().max().item()), key
    model.zero_grad(set_to_none=True)
    with open(f"{models}/{language}/generate.json", encoding="utf-8") as file:
        for answer in json.load(file)["prompts"]:
            text = list(answer["prompt"])
            with torch.no_grad():
                for _ in answer["lora"]:
                    text.append(int(logits_of(model, torch.tensor([text]), torch.ones(1, len(text), dtype=torch.long))[0, -1].argmax()))
            assert text[len(answer["prompt"]) :] == answer["lora"]
    forward = model.forward
    if model.config.model_type == "gemma3":
        model.forward = lambda input_ids, **rest: forward(input_ids=input_ids, token_type_ids=torch.zeros_like(input_ids), **rest)
    with open(f"{models}/data.json", encoding="utf-8") as file:
        trace = train_trace(model, json.load(file)["rows"])
    with open(f"{models}/{language}/trace.json", encoding="utf-8") as file:
        for found, wanted in zip(trace, json.load(file)["steps"]):
            assert abs(found["loss"] - wanted["loss"]) < 2e-6, (name, found, wanted)


def reload(folder, model, dtype):
    """Transformers reads the folder as the model, rounded to the dtype of its files."""
    loaded = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").state_dict()
    for key, value in model.state_dict().items():
        assert difference(loaded[key].float(), value.to(dtype).float()) < 1e-6, key


def store(name, models, out, seed):
    language = MODELS[name][1]
    model, alone = make(name, models, seed)
    dtype = DTYPES[ARCHITECTURES[language].stored]
    folder = f"{out}/{name}"
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    with tempfile.TemporaryDirectory() as saved:
        copy.deepcopy(model).to(dtype).save_pretrained(saved)
        tensors = load_file(f"{saved}/model.safetensors")
        shutil.copy(f"{saved}/config.json", folder)
        if name == "qwen2_5_vl":
            # The files on the hub have the language model's keys and names at the top level.
            with open(f"{saved}/config.json", encoding="utf-8") as file:
                written = json.load(file)
            text = written.pop("text_config")
            kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
                    "rms_norm_eps", "max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers", "hidden_act",
                    "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout")
            flat = written | {key: text[key] for key in kept if key in text}
            flat |= dict(rope_theta=text["rope_parameters"]["rope_theta"], rope_scaling=dict(type="mrope", mrope_section=[2, 3, 3]))
            flat |= dict(tie_word_embeddings=True)
            dump(dict(sorted(flat.items())), f"{folder}/config.json")
            shutil.copy(f"{folder}/config.json", saved)
            older = lambda key: key.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
            tensors = {older(key): value for key, value in tensors.items()}
            save_file(tensors, f"{saved}/model.safetensors", metadata={"format": "pt"})
        reload(saved, model, dtype)
        # The names that Transformers has in memory, which others save: a second naming of the same file.
        other = {key: value.to(dtype).clone() for key, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            other.pop("lm_head.weight", None)
        save_file(other, f"{saved}/model.safetensors", metadata={"format": "pt"})
        reload(saved, model, dtype)
    bases = ("language_model.", text_base(model), "lm_head", *(("model.",) if name == "qwen2_5_vl" else ()))
    is_text = lambda key: key.startswith(bases)
    beside = {key: value for key, value in tensors.items() if not is_text(key)}
    tied = alone.config.tie_word_embeddings
    assert beside and len(tensors) - len(beside) == len(alone.state_dict()) - int(tied)
    save_tensors(beside, f"{folder}/beside.safetensors")
    dump(dict(language_model=language, saved=sorted(tensors), in_memory=sorted(other)), f"{folder}/names.json")
    tuned = adapted(model, f"{models}/{language}/adapter_init")
    tuned.save_pretrained(f"{folder}/adapter")
    for file in os.listdir(f"{folder}/adapter"):
        if not file.startswith("adapter_"):
            os.remove(f"{folder}/adapter/{file}")
    hold(tuned, models, language, name)
    print(name, len(beside), "tensors beside")


def facts(out):
    defaults = {}
    for name, kind in TEXTS.items():
        written = getattr(transformers, kind)().to_dict()
        defaults[name] = {key: value for key, value in written.items() if key not in ("transformers_version", "architectures", "dtype")}
    dump(defaults, f"{out}/defaults.json")
    wrappers = {}
    for name, kind in WRAPPERS.items():
        config = getattr(transformers, kind)()
        with torch.device("meta"):
            model = of(config)(config)
        wrappers[name] = dict(class_name=type(model).__name__, base=text_base(model), language_model=config.text_config.model_type,
                              tied=bool(getattr(config, "tie_word_embeddings", False)))
        text = dict(model_type=config.text_config.model_type, tie_word_embeddings=True)
        ties = getattr(transformers, kind)(text_config=text, tie_word_embeddings=False)
        wrappers[name]["text_ties"] = bool(ties.tie_word_embeddings)
    dump(wrappers, f"{out}/wrappers.json")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="+", choices=[*MODELS, "facts"], metavar="NAME")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.makedirs(args.out, exist_ok=True)
    if not args.only or "facts" in args.only:
        facts(args.out)
    for index, name in enumerate(MODELS):
        if args.only and name not in args.only:
            continue
        store(name, args.models, args.out, SEED + 5000 + index)


if __name__ == "__main__":
    main()
