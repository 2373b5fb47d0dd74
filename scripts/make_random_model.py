#!/usr/bin/env python3
"""A Llama-shaped checkpoint of random bfloat16 numbers in shards, to measure loading and quantizing: needs numpy only.

    python3 scripts/make_random_model.py --out /tmp/random-7b [--hidden 4096 --layers 32 --heads 32 --kv-heads 32 --inner 11008 --vocab 32000]
"""
import argparse
import json
import os
import struct

import numpy as np

SHARD_BYTES = 2 << 30


def tensors(args):
    """Names and shapes in model order."""
    kv = args.hidden // args.heads * args.kv_heads
    yield "model.embed_tokens.weight", (args.vocab, args.hidden)
    for layer in range(args.layers):
        block = f"model.layers.{layer}"
        for name, shape in (("self_attn.q_proj", (args.hidden, args.hidden)), ("self_attn.k_proj", (kv, args.hidden)), ("self_attn.v_proj", (kv, args.hidden)),
                            ("self_attn.o_proj", (args.hidden, args.hidden)), ("mlp.gate_proj", (args.inner, args.hidden)),
                            ("mlp.up_proj", (args.inner, args.hidden)), ("mlp.down_proj", (args.hidden, args.inner)),
                            ("input_layernorm", (args.hidden,)), ("post_attention_layernorm", (args.hidden,))):
            yield f"{block}.{name}.weight", shape
    yield "model.norm.weight", (args.hidden,)
    yield "lm_head.weight", (args.vocab, args.hidden)


def bfloat16(values):
    """The upper halves of float32 numbers."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    for name, default in (("hidden", 4096), ("layers", 32), ("heads", 32), ("kv-heads", 32), ("inner", 11008), ("vocab", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    # The same normal numbers again and again: the values do not matter.
    stretch = bfloat16(np.random.default_rng(1).standard_normal(8 << 20) * 0.02)
    ones = bfloat16(np.ones(1))
    shards, size = [[]], 0
    for name, shape in tensors(args):
        count = 2 * int(np.prod(shape))
        if size + count > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append((name, shape, count))
        size += count
    weight_map = {}
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        header, at = {}, 0
        for name, shape, count in shard:
            header[name] = dict(dtype="BF16", shape=shape, data_offsets=[at, at + count])
            weight_map[name] = file_name
            at += count
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(f"{args.out}/{file_name}", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, shape, count in shard:
                source = ones if len(shape) == 1 else stretch
                whole, rest = divmod(count, len(source))
                for _ in range(whole):
                    file.write(source)
                file.write(source[:rest])
    with open(f"{args.out}/model.safetensors.index.json", "w", encoding="utf-8") as file:
        json.dump(dict(metadata={}, weight_map=weight_map), file)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", hidden_size=args.hidden, num_hidden_layers=args.layers,
                  num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, intermediate_size=args.inner, vocab_size=args.vocab,
                  rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=4096, tie_word_embeddings=False, torch_dtype="bfloat16")
    with open(f"{args.out}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)


if __name__ == "__main__":
    main()
