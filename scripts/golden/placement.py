"""Writes tests/golden/peft/placement.json: where PEFT 0.21.2 puts adapters, with their rank, alpha and scale, and what it saves in full. It covers
many settings on a 12-block model, and models with experts and classification heads.

Usage: python scripts/golden/placement.py tests/golden/peft/placement.json
"""
import copy
import json
import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

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
SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)
PLAIN = dict(model_type="qwen3", num_hidden_layers=12, head_dim=8, **SIZES)
EXPERTS = dict(num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, mlp_only_layers=[1], **SIZES)
OTHERS = {
    "mixtral": dict(model_type="mixtral", num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, **SIZES),
    "qwen2_moe": dict(model_type="qwen2_moe", shared_expert_intermediate_size=8, **EXPERTS),
    "qwen3_moe": dict(model_type="qwen3_moe", head_dim=8, **EXPERTS),
    "phi3": dict(model_type="phi3", num_hidden_layers=2, pad_token_id=0, **SIZES),
}
# Mixtures of experts that have no classification head, or whose names PEFT does not know.
SIGMOIDS = dict(num_hidden_layers=3, moe_intermediate_size=8, num_experts_per_tok=2, head_dim=8, **SIZES)
NEW = {
    "glm4_moe": dict(model_type="glm4_moe", n_routed_experts=4, first_k_dense_replace=1, **SIGMOIDS),
    "afmoe": dict(model_type="afmoe", num_experts=4, num_dense_layers=1, **SIGMOIDS),
    "lfm2_moe": dict(model_type="lfm2_moe", num_experts=4, num_dense_layers=1, layer_types=["conv", "full_attention", "conv"], **SIGMOIDS),
    "minimax_m2": dict(model_type="minimax_m2", num_local_experts=4, num_hidden_layers=2, num_experts_per_tok=2, head_dim=8, **SIZES),
    "qwen3_5_moe_text": dict(
        model_type="qwen3_5_moe_text", num_experts=4, shared_expert_intermediate_size=8, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=1, linear_num_value_heads=2, layer_types=["linear_attention", "full_attention", "linear_attention"],
        **{key: value for key, value in SIGMOIDS.items() if key != "intermediate_size"}),
}
QWEN, MIXTRAL = ["gate_proj", "up_proj", "down_proj"], ["w1", "w2", "w3"]
ON_OTHERS = [("CAUSAL_LM", name, {"target_modules": "all-linear", "use_rslora": rslora}) for name in OTHERS for rslora in (False, True)]
ON_OTHERS += [("SEQ_CLS", name, {"target_modules": "all-linear"}) for name in OTHERS]
ON_OTHERS += [("CAUSAL_LM", name, {"target_modules": "all-linear"}) for name in NEW]
OTHERS |= NEW
ON_OTHERS += [
    ("CAUSAL_LM", "glm4_moe", {"target_modules": ["q_proj", "gate", *QWEN]}),
    ("CAUSAL_LM", "afmoe", {"target_modules": ["v_proj", "router.gate"]}),
    ("CAUSAL_LM", "minimax_m2", {"target_modules": ["v_proj", *MIXTRAL]}),
    ("CAUSAL_LM", "lfm2_moe", {"target_modules": ["q_proj", "w1"], "target_parameters": ["feed_forward.experts.gate_up_proj"]}),
    ("CAUSAL_LM", "qwen3_5_moe_text", {"target_modules": ["in_proj_qkv", "down_proj"], "target_parameters": ["experts.down_proj"]}),
    ("CAUSAL_LM", "mixtral", {"target_modules": ["q_proj", "gate"]}),
    ("CAUSAL_LM", "mixtral", {"target_modules": ["v_proj", *MIXTRAL], "rank_pattern": {"gate_up_proj": 3, "down_proj": 5}}),
    ("CAUSAL_LM", "mixtral", {"target_modules": ["block_sparse_moe.gate", "w2"], "rank_pattern": {"gate.weight": 3}}),
    ("CAUSAL_LM", "mixtral", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight", "experts.gate_up_proj"]}),
    ("CAUSAL_LM", "qwen3_moe", {"target_modules": ["q_proj", "gate", *QWEN], "alpha_pattern": {"experts.gate_up_proj": 3}}),
    ("CAUSAL_LM", "qwen3_moe", {"target_modules": ["down_proj"], "exclude_modules": ["q_proj"]}),
    ("CAUSAL_LM", "qwen2_moe", {"target_modules": ["q_proj", *QWEN]}),
    ("CAUSAL_LM", "qwen2_moe", {"target_modules": [], "target_parameters": ["mlp.gate.weight", "layers.0.self_attn.q_proj.weight"]}),
]
out = []
for task, base, case in [("CAUSAL_LM", PLAIN, case) for case in CASES] + [(task, OTHERS[name], case) for task, name, case in ON_OTHERS]:
    torch.manual_seed(0)
    config = {key: value for key, value in base.items() if key != "model_type"}
    auto = AutoModelForCausalLM if task == "CAUSAL_LM" else AutoModelForSequenceClassification
    model = auto.from_config(AutoConfig.for_model(base["model_type"], **config))
    model = get_peft_model(model, LoraConfig(task_type=task, r=4, lora_alpha=8, **copy.deepcopy(case)))
    placed = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            numbers = [module.r["default"], module.lora_alpha["default"], module.scaling["default"]]
            placed[name.removeprefix("base_model.model.")] = numbers
    saved = sorted(k.removeprefix("base_model.model.") for k in get_peft_model_state_dict(model) if "lora_" not in k)
    out.append({"model": base, "task": task, "config": case, "placed": placed, "saved": saved})
json.dump(out, open(sys.argv[1], "w"), indent=0)
