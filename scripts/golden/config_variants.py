#!/usr/bin/env python3
"""Makes tests/golden/config_variants.jsonl: every golden family with each key of its config.json changed, run by Transformers.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/config_variants.py tests/golden [--only FAMILY…] [--new]

A line is a family: {"family", "base", "variants": {key: {outcome: [values]}}}. A nested key has dots; the value ["removed"] removes it.
The values of the key "*" are keys of other classes with their values: a class ignores them, or its code reads them all the same. Outcomes:

    same     the logits of the unchanged model, to the bit
    logits   others: the values are pairs, [value, some logits], as `base` has of the unchanged model
    refused  Transformers refuses the configuration, or the weights do not fit it
    random   a weight is missing, and Transformers starts it at random
    nan      the logits are not finite

With --only, the lines of other families stay. With --new, outcomes that are there stay, and only variants without one are run.
"""
import argparse
import collections
import copy
import dataclasses
import glob
import json
import os
import tempfile
import warnings

import torch
import transformers
from safetensors.torch import load_file

import common  # registers classes

REMOVED = ["removed"]
# Nothing of the model's mathematics: notes of who wrote the file, and the type that Transformers computes in.
SKIPPED = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "model_type"}
# What every class has, of no matter to the logits, or to this script.
SKIPPED |= {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)} - {"architectures"}
ACTIVATIONS = ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu"]
ACTIVATIONS += ["gelu_fast", "gelu_python", "gelu_10", "mish", "tanh", "sigmoid", "leaky_relu", "linear", "SiLU"]
WORDS = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "activation_function": ACTIVATIONS,
    "mlp_hidden_act": ACTIVATIONS,
    "mamba_hidden_act": ACTIVATIONS,
    "rope_type": ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["sigmoid", "softmax"],
    "position_embedding_type": ["rope", "nope"],
}
LAYERS = ["full_attention", "sliding_attention", "linear_attention", "conv", "sparse", "dense", "mamba", "attention", "moe", "mlp"]
TOKENS = 24
LARGE = 5_000_000
# Where these rules are tried: a class of each way to read them. Elsewhere the first and the last ones.
ROPE_FAMILIES = [
    "llama", "deepseek_v2", "deepseek_v3", "gemma3", "gemma4_31b", "glm4", "glm4_moe_lite", "gpt_oss", "hunyuan_v1_dense", "lfm3",
    "minimax_m2", "ministral3", "olmo3", "olmo_hybrid", "phi3", "qwen3_5",
]
# Rules of rotary positions as a whole: changing one key of one at a time reaches few of another kind.
ROPES = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear"},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "truncate": None},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": None, "beta_slow": None},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 0, "beta_slow": 0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": None},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": None},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8},
    {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 0.0},
    {"rope_type": "default", "partial_rotary_factor": None},
    {"rope_type": "default", "rope_theta": None},
    {"rope_type": "default", "rope_theta": 500},
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, "rope_type": None},
    {"rope_type": "default", "factor": 2.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0}, "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0}},
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
    {"full_attention": None},
]
# Keys that a file may have in addition, of this class or of no class.
MORE = [
    ("rope_theta", [500.0, 500, None, "500"]),
    ("rope_local_base_freq", [500.0, None]),
    ("partial_rotary_factor", [0.5, 0.0, None]),
    ("original_max_position_embeddings", [8, None]),
    ("rope_scaling", [None, {}, *ROPES[2:5], *ROPES[-8:]]),
    ("rope_parameters", ROPES),
    ("per_layer_config", [{"0": {"num_key_value_heads": 1}}, {"0": {"intermediate_size": 32}}, {}, None]),
    ("sliding_window", [3]),
    ("layer_types", [["full_attention", "sliding_attention"]]),
    ("quantization_config", [None, {}, {"quant_method": "bogus"}]),
    ("head_dim", [None]),
    ("unknown_key", [1]),
]
# Further values of a key: an odd head where nothing turns, and less than a pair that turns.
FURTHER = {"n_head": [64], "partial_rotary_factor": [0.1]}
# Keys of other classes, where a class does not have them.
OTHERS = [
    {"attention_bias": True}, {"qkv_bias": True}, {"mlp_bias": True}, {"use_bias": True}, {"conv_bias": True}, {"lm_head_bias": True},
    {"hidden_act": "relu"}, {"hidden_activation": "relu"}, {"mlp_hidden_act": "relu"}, {"activation_function": "relu"},
    {"rms_norm_eps": 0.5}, {"norm_eps": 0.5}, {"layer_norm_eps": 0.5}, {"layer_norm_epsilon": 0.5}, {"block_ff_dim": 40},
    {"attn_logit_softcapping": 0.5}, {"final_logit_softcapping": 0.5}, {"query_pre_attn_scalar": 3}, {"attention_multiplier": 0.7},
    {"embedding_multiplier": 3.0}, {"residual_multiplier": 0.3}, {"logits_scaling": 3.0}, {"logit_scale": 3.0}, {"output_multiplier": 0.3},
    {"mup_enabled": True}, {"attn_output_gate": True}, {"use_qk_norm": True}, {"qk_norm": True}, {"qk_layernorm": True},
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}, {"sliding_window_pattern": 2}, {"attention_chunk_size": 4},
    {"window_size": 3}, {"use_bidirectional_attention": True}, {"is_causal": False}, {"is_causal": None}, {"is_causal": True}, {"no_rope_layers": [0, 0, 0, 0]},
    {"no_rope_layer_interval": 1}, {"rope_interleave": True}, {"rotary_dim": 4}, {"position_embedding_type": "nope"}, {"use_rope": False},
    {"head_dim": 4}, {"num_key_value_heads": 1}, {"global_head_dim": 8}, {"attention_k_eq_v": True}, {"num_kv_shared_layers": 1},
    {"hidden_size_per_layer_input": 8}, {"norm_topk_prob": True}, {"norm_topk_prob": False}, {"routed_scaling_factor": 3.0},
    {"num_experts_per_tok": 1}, {"num_experts": 2}, {"num_local_experts": 2}, {"n_group": 2, "topk_group": 1}, {"n_shared_experts": 2},
    {"scoring_func": "softmax"}, {"scoring_func": "sigmoid"}, {"topk_method": "greedy"}, {"use_expert_bias": True},
    {"first_k_dense_replace": 0}, {"num_dense_layers": 0}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"moe_layer_freq": 2},
    {"mlp_layer_types": ["dense", "dense"]}, {"swiglu_limit": 0.1}, {"llama_4_scaling_beta": 0.5}, {"tie_embedding": True},
    {"layer_rope_theta": [500.0, 500.0]}, {"rope_local_base_freq": 500.0, "sliding_window": 3}, {"clip_qkv": 0.1}, {"pruned_heads": {"0": [1]}},
    {"quantization": {"bits": 4}}, {"time_step_min": 0.5}, {"linear_conv_kernel_dim": 3}, {"conv_L_cache": 2}, {"mamba_d_conv": 3},
    {"full_attention_interval": 2}, {"global_attn_every_n_layers": 2}, {"kv_lora_rank": 8}, {"q_lora_rank": 8}, {"v_head_dim": 8},
    {"unpadded_vocab_size": 50}, {"logits_mup_width_multiplier": 3.0}, {"num_nextn_predict_layers": 1}, {"is_decoder": False},
]


def variants(key, value):
    """Other values of a key."""
    name = key.split(".")[-1]
    found = []
    if isinstance(value, bool):
        found = [not value, 1, "true"]
    elif name.endswith("_token_id") and not isinstance(value, list):
        found = [-1, 1.5, "1"]
    elif isinstance(value, int):
        found = [value + 1, value * 2, 0, -1, float(value), str(value), True, value - 1, value // 2, 1]
    elif isinstance(value, float):
        found = [value * 3, 0.0, -1.0, 1, "1", value / 2]
    elif isinstance(value, str):
        found = [*WORDS.get(name, []), "bogus", 7]
    elif isinstance(value, list):
        found = [value[:-1], value + value[-1:], "bogus", []]
        if value and all(isinstance(one, str) for one in value):
            layers = LAYERS if name.endswith(("types", "type")) else []
            found += [[other] + value[1:] for other in layers] + [["bogus"] + value[1:]]
            found += [[other] * len(value) for other in layers] + [value[::-1], value[:-1] + value[:1]]
        elif value and all(isinstance(one, (int, float)) for one in value):
            found += [[one + 1 for one in value], [0] * len(value), [None] * len(value), ["1"] * len(value)]
    elif value is None:
        found = [1, 0, True, 0.5, "bogus", []]
    elif isinstance(value, dict):
        found = ["bogus", {}, []]
    return [*found, None, REMOVED]


def keys(config, prefix=""):
    for name, value in config.items():
        if not prefix and name in SKIPPED:
            continue
        yield prefix + name, value
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")


def every_variant(family, config, first):
    """(key, value) of every variant, each once. `first`: the configuration of another model of the class, whose variants are left out."""
    seen = set()
    if first is not None:
        seen = {json.dumps([key, other]) for key, value in keys(config) if lookup(first, key) == value for other in [*variants(key, value), REMOVED]}
    found = [(key, other) for key, value in keys(config) for other in variants(key, value)]
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    more = [] if first is not None else MORE
    # What the class knows and the file leaves out: its default, and others.
    for field in dataclasses.fields(kind) if first is None else []:
        if field.name not in config and field.name not in SKIPPED and field.default is not dataclasses.MISSING:
            found += [(field.name, other) for other in [field.default, *variants(field.name, field.default)] if other != REMOVED]
    # Other names of a key.
    for other, name in kind.attribute_map.items():
        if isinstance(config.get(name), (int, float)):
            found += [(other, config[name] * 2), (other, None)]
    for key, values in more:
        few = key in ("rope_parameters", "rope_scaling") and os.path.basename(family) not in ROPE_FAMILIES
        found += [(key, other) for other in ([*values[:3], *values[-6:]] if few else values)]
    known = set(kind.attribute_map) | {field.name for field in dataclasses.fields(kind)} | set(config)
    found += [("*", other) for other in OTHERS if first is None and not known & set(other)]
    found += [(key, other) for key, _ in keys(config) for other in FURTHER.get(key.split(".")[-1], []) if first is None]
    for key, other in found:
        text = json.dumps([key, other])
        if text not in seen and json.dumps(lookup(config, key)) != json.dumps(other):
            seen.add(text)
            yield key, other


def lookup(config, key):
    for part in key.split("."):
        if part not in config:
            return REMOVED
        config = config[part]
    return config


def changed(config, key, value):
    if key == "*":
        return config | value
    config = copy.deepcopy(config)
    *path, name = key.split(".")
    place = config
    for part in path:
        place = place[part]
    if value == REMOVED:
        place.pop(name, None)
    else:
        place[name] = value
    return config


def ids(vocabulary):
    return [(7 * at * at + 3 * at + 11) % min(vocabulary, 300) for at in range(TOKENS)]


def sample(logits):
    row = logits[0].float()
    picked = [row[-1, 5], row[-1, 77], row[TOKENS // 2, 140]]
    return [float(f"{float(value):.5f}") for value in picked]


def is_large():
    """Whether the model has far more weights than the files: a class's defaults describe models of any size."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(FOLDER))
    return sum(parameter.numel() for parameter in model.parameters()) > LARGE


def outcome(config, width):
    """The logits, or a word."""
    try:
        with open(os.path.join(FOLDER, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        if is_large():
            return "random"
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            FOLDER, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if report["mismatched_keys"]:
            return "refused"
        if report["missing_keys"]:
            return "random"
        model.eval()
        with torch.no_grad():
            logits = model(torch.tensor([ids(width)]), use_cache=False).logits
    except Exception as error:
        outcome.reason = error
        return "refused"
    return "nan" if not torch.isfinite(logits).all() else logits


FOLDER = "/tmp/config_variants"


def main():
    global FOLDER
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--new", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    lines, out = {}, os.path.join(args.golden, "config_variants.jsonl")
    if os.path.exists(out):
        with open(out, encoding="utf-8") as file:
            lines = {json.loads(line)["family"]: line.strip() for line in file}
    firsts = {}
    for folder in sorted(glob.glob(os.path.join(args.golden, "a", "*", "model"))):
        family = os.path.relpath(os.path.dirname(folder), args.golden)
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        first = firsts.get(config["model_type"])
        firsts.setdefault(config["model_type"], config)
        if args.only and family not in args.only:
            continue
        with tempfile.TemporaryDirectory() as place:
            FOLDER = place
            for name in os.listdir(folder):
                if "safetensors" in name:
                    os.symlink(os.path.abspath(os.path.join(folder, name)), os.path.join(place, name))
            width = config["vocab_size"]
            base = outcome(config, width)
            assert not isinstance(base, str), (family, base, outcome.reason)
            found = json.loads(lines[family])["variants"] if args.new else {}
            of_outcome = lambda result, values: [value[0] if result == "logits" else value for value in values]
            there = {json.dumps([key, one]) for key, outcomes in found.items() for result, values in outcomes.items() for one in of_outcome(result, values)}
            count = collections.Counter()
            for key, other in every_variant(family, config, first):
                if json.dumps([key, other]) in there:
                    continue
                result = outcome(changed(config, key, other), width)
                if not isinstance(result, str):
                    same = result.shape == base.shape and torch.equal(result, base)
                    other, result = (other, "same") if same else ([other, sample(result)], "logits")
                found.setdefault(key, {}).setdefault(result, []).append(other)
                count[result] += 1
            lines[family] = json.dumps(dict(family=family, base=sample(base), variants=found), separators=(",", ":"))
            print(family, dict(count), flush=True)
        with open(out, "w", encoding="utf-8") as file:
            file.write("".join(lines[name] + "\n" for name in sorted(lines)))


if __name__ == "__main__":
    main()
