"""Writes tests/golden/rope/inv_freq.json: the bits of Transformers' inverse frequencies (PyTorch 2.15, Transformers 5.23).

Usage: python scripts/golden/rope.py tests/golden/rope/inv_freq.json
"""
import json
import sys

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# (theta, head_dim, None or (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings))
CASES = [
    (10000.0, 16, None), (10000.0, 64, None), (500000.0, 128, None), (1e6, 128, None), (1e6, 24, None), (100000.0, 64, None),
    (10000.0, 16, (8.0, 1.0, 4.0, 32)), (500000.0, 128, (8.0, 1.0, 4.0, 8192)), (500000.0, 64, (32.0, 1.0, 4.0, 8192)),
    (10000.0, 80, (3.0, 1.5, 5.0, 1000)),
]
out = []
for theta, head_dim, llama3 in CASES:
    rope = {"rope_theta": theta, "rope_type": "default"}
    if llama3:
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rope |= dict(zip(keys, llama3)) | {"rope_type": "llama3"}
    config = LlamaConfig(hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, rope_parameters=rope,
                         max_position_embeddings=131072)
    inv_freq = LlamaRotaryEmbedding(config).inv_freq
    assert inv_freq.dtype == torch.float32
    out.append({"theta": theta, "head_dim": head_dim, "llama3": llama3, "bits": inv_freq.view(torch.int32).tolist()})
with open(sys.argv[1], "w") as file:
    json.dump(out, file)
