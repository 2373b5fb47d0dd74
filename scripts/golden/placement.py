"""Writes tests/golden/peft/placement.json: where PEFT 0.21.2 puts adapters, of which rank, alpha and scale, and what it
saves in full, for many settings on a 12-block model.

Usage: python scripts/golden/placement.py tests/golden/peft/placement.json
"""
import json
import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, Qwen3Config

warnings.simplefilter("ignore")
CASES = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": ["model.layers.1.mlp.up_proj", "o_proj"]},
    {"target_modules": ["mlp.up_proj", "self_attn.k_proj"]},
    {"target_modules": r".*\.[05]\.self_attn\.(q|v)_proj"},
    {"target_modules": r"model\.layers\.1\d?\.mlp\.down_proj"},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 11]},
    {"target_modules": ["q_proj", "model.layers.3.self_attn.v_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj"], "layers_to_transform": [1, 2], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj", "v_proj", "down_proj"], "exclude_modules": ["v_proj", "model.layers.0.mlp.down_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.1\..*"},
    {"target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"down_proj": 2, "layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"layers.1.self_attn.v_proj": 3}},
    {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {r"layers\.1\d?\.self_attn\.q_proj": 6, "q_proj": 5}},
    {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 5, r"layers\.1\d?\.self_attn\.q_proj": 6, "proj": 7}},
    {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"^model.layers.0.self_attn.v_proj": 9}, "alpha_pattern": {r"model\.layers\.\d\.self_attn\..*": 1}},
    {"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {"layers.2.self_attn.q_proj": 8}},
    {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head", "layers.0.mlp"]},
    {"target_modules": "all-linear", "modules_to_save": ["q_proj"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
]
out = []
base = Qwen3Config(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=12,
                   num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=False)
for case in CASES:
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_config(base), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **case))
    placed = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            numbers = [module.r["default"], module.lora_alpha["default"], module.scaling["default"]]
            placed[name.removeprefix("base_model.model.")] = numbers
    saved = sorted(k.removeprefix("base_model.model.") for k in get_peft_model_state_dict(model) if "lora_" not in k)
    out.append({"config": case, "placed": placed, "saved": saved})
json.dump(out, open(sys.argv[1], "w"), indent=0)
