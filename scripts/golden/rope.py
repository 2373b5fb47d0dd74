"""Writes tests/golden/rope/inv_freq.json: the bits of Transformers' inverse frequencies, and the factor of cosines and sines.

Usage: python scripts/golden/rope.py tests/golden/rope/inv_freq.json

The input of a case is `rope` (as `rope_parameters` of a Llama config.json), `head_dim`, `max_position_embeddings`, and `seq_len`, which only
`dynamic` and `longrope` use. Its output is `bits` (of float32) and `attention_factor`.
"""
import json
import os
import sys

os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding


def plain(theta, head_dim, **more):
    return dict(rope_type="default", rope_theta=theta, **more), head_dim, 131072, 40


def llama3(theta, head_dim, factor, low, high, original):
    rope = dict(rope_type="llama3", rope_theta=theta, factor=factor, low_freq_factor=low, high_freq_factor=high,
                original_max_position_embeddings=original)
    return rope, head_dim, 131072, 40


def linear(theta, head_dim, factor, **more):
    return dict(rope_type="linear", rope_theta=theta, factor=factor, **more), head_dim, 131072, 40


def dynamic(theta, head_dim, factor, context, seq_len, **more):
    return dict(rope_type="dynamic", rope_theta=theta, factor=factor, **more), head_dim, context, seq_len


def yarn(theta, head_dim, factor, original, **more):
    rope = dict(rope_type="yarn", rope_theta=theta, factor=factor, original_max_position_embeddings=original, **more)
    return rope, head_dim, int(original * (factor or 40)), 40


def longrope(theta, head_dim, original, context, seq_len, **more):
    pairs = int(head_dim * more.get("partial_rotary_factor", 1.0)) // 2
    rope = dict(rope_type="longrope", rope_theta=theta, original_max_position_embeddings=original,
                short_factor=[round(1 + 0.013 * pair, 4) for pair in range(pairs)],
                long_factor=[round(1.05 + 0.37 * pair + 0.11 * pair**2, 4) for pair in range(pairs)], **more)
    return rope, head_dim, context, seq_len


def proportional(theta, head_dim, partial, **more):
    return dict(rope_type="proportional", rope_theta=theta, partial_rotary_factor=partial, **more), head_dim, 131072, 40


CASES = [
    plain(10000.0, 16), plain(10000.0, 64), plain(500000.0, 128), plain(1e6, 128), plain(1e6, 24), plain(100000.0, 64),
    llama3(10000.0, 16, 8.0, 1.0, 4.0, 32), llama3(500000.0, 128, 8.0, 1.0, 4.0, 8192), llama3(500000.0, 64, 32.0, 1.0, 4.0, 8192),
    llama3(10000.0, 80, 3.0, 1.5, 5.0, 1000),
    plain(10000.0, 96, partial_rotary_factor=0.75), plain(10000.0, 80, partial_rotary_factor=0.4), plain(10000.0, 128, partial_rotary_factor=0.5),
    linear(10000.0, 128, 4.0), linear(1e6, 256, 8.0), linear(10000.0, 64, 2.5), linear(10000.0, 64, 3.0, partial_rotary_factor=0.5),
    # Within the context, at its end, one beyond, and far beyond.
    dynamic(10000.0, 128, 2.0, 4096, 100), dynamic(10000.0, 128, 2.0, 4096, 4096), dynamic(10000.0, 128, 2.0, 4096, 4097),
    dynamic(10000.0, 128, 2.0, 4096, 20000), dynamic(500000.0, 64, 3.5, 2048, 5000), dynamic(10000.0, 16, 4.0, 16, 24),
    dynamic(10000.0, 80, 2.0, 64, 200, partial_rotary_factor=0.5),
    yarn(10000.0, 128, 16.0, 4096), yarn(1e6, 128, 4.0, 32768), yarn(10000.0, 16, 4.0, 32),
    yarn(10000.0, 64, 40.0, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.707),
    yarn(10000.0, 64, 40.0, 4096, mscale=0.707, mscale_all_dim=0.707), yarn(10000.0, 64, 40.0, 4096, mscale=0.8),
    yarn(150000.0, 64, 32.0, 4096, truncate=False), yarn(10000.0, 16, 4.0, 32, truncate=False, beta_fast=16, beta_slow=2),
    yarn(10000.0, 128, 4.0, 2048, attention_factor=1.25), yarn(10000.0, 128, 4.0, 2048, attention_factor=0.9, mscale=1.0, mscale_all_dim=0.5),
    yarn(10000.0, 128, 8.0, 2048, partial_rotary_factor=0.5),
    # Short at the original context, long beyond it.
    longrope(10000.0, 96, 4096, 131072, 100), longrope(10000.0, 96, 4096, 131072, 4096), longrope(10000.0, 96, 4096, 131072, 4097),
    longrope(10000.0, 128, 4096, 131072, 9000, partial_rotary_factor=0.75), longrope(10000.0, 16, 16, 256, 9, partial_rotary_factor=0.5),
    longrope(10000.0, 16, 16, 256, 17, partial_rotary_factor=0.5), longrope(10000.0, 96, 4096, 4096, 4096),
    longrope(10000.0, 96, 4096, 131072, 5000, attention_factor=1.3), longrope(10000.0, 96, 4096, 131072, 5000, factor=16.0),
    proportional(1e6, 512, 0.25), proportional(1e6, 24, 0.25), proportional(10000.0, 64, 0.3, factor=8.0), proportional(10000.0, 64, 1.0),
]


def main():
    torch.set_num_threads(1)
    out = []
    for rope, head_dim, context, seq_len in CASES:
        # Llama's own rule for `default` turns whole heads whatever the file says, Phi-3's a part; the other rules are shared.
        partial = "partial_rotary_factor" in rope and rope["rope_type"] in ("default", "longrope")
        config, embedding = (Phi3Config, Phi3RotaryEmbedding) if partial else (LlamaConfig, LlamaRotaryEmbedding)
        arguments = dict(hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=context)
        if partial and rope["rope_type"] == "longrope":
            arguments["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        embedding = embedding(config(rope_parameters=dict(rope), **arguments))
        embedding(torch.zeros(1), torch.arange(seq_len)[None])
        inv_freq = embedding.inv_freq
        assert inv_freq.dtype == torch.float32 and ((inv_freq > 0).all() or rope["rope_type"] == "proportional")
        out.append(dict(rope=rope, head_dim=head_dim, max_position_embeddings=context, seq_len=seq_len,
                        bits=inv_freq.view(torch.int32).tolist(), attention_factor=float(embedding.attention_scaling)))
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(map(json.dumps, out)) + "\n]\n")


if __name__ == "__main__":
    main()
