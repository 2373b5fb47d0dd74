#!/usr/bin/env python3
"""Generates with random weights of a shape in llama.cpp and in tunesmith, one after the other in fresh processes, for each type of weights:
tokens per second, and the bytes of weights that a token reads.

    pip install llama-cpp-python gguf numpy
    python3 scripts/bench_llama_cpp.py --shape smollm2-135m

Both sides: greedy, the same lengths of prompts and generations, the same number of threads. Reading the prompts is not counted. The GGUF file
has the shape's matrices in one type and no tokenizer. The head, which these models share with the embedding, is float32 with quantized types,
as tunesmith holds it; `--head same` gives it the matrices' type on both sides, which then read fewer bytes.
The runs alternate (A B A B), because a machine's speed drifts: only the ratio of neighbours means something.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time

from bench_decode import add_arguments
from bench_torch import SHAPES, child, model_config

# llama.cpp's types, and the arguments of `tunesmith bench` for the same width.
TYPES = {
    "f32": ("float32", []),
    "f16": ("bfloat16", ["--bf16"]),
    "q8_0": ("int8", ["--quantization", "int8"]),
    "q4_0": ("nf4", ["--quantization", "nf4"]),
}


def write_gguf(path, shape, name, head):
    """A llama model of random weights. Returns the bytes of the weights that a token reads."""
    import gguf
    import numpy as np

    values = model_config(shape)
    if values["model_type"] != "llama" or not values["tie_word_embeddings"]:
        raise SystemExit(f"bench_llama_cpp: {shape}: a shape of llama with a shared head is needed, such as smollm2-135m")
    hidden, inner, vocabulary = values["hidden_size"], values["intermediate_size"], values["vocab_size"]
    heads, kv_heads, layers = values["num_attention_heads"], values["num_key_value_heads"], values["num_hidden_layers"]
    dim = hidden // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("no_vocab")
    random, read = np.random.default_rng(0), 0

    def matrix(tensor, rows, columns, kind):
        nonlocal read
        numbers = random.standard_normal((rows, columns), dtype=np.float32) * 0.02
        kind = gguf.GGMLQuantizationType[kind.upper()]
        data = gguf.quants.quantize(numbers, kind)
        read += data.nbytes
        writer.add_tensor(tensor, data, raw_dtype=kind)

    def norm(tensor):
        writer.add_tensor(tensor, np.ones(hidden, dtype=np.float32))

    matrix("token_embd.weight", vocabulary, hidden, "f32" if name.startswith("q") and head == "f32" else name)
    for layer in range(layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm.weight")
        norm(f"{block}.ffn_norm.weight")
        for part, rows, columns in (("attn_q", hidden, hidden), ("attn_k", kv_heads * dim, hidden), ("attn_v", kv_heads * dim, hidden),
                                    ("attn_output", hidden, hidden), ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden),
                                    ("ffn_down", hidden, inner)):
            matrix(f"{block}.{part}.weight", rows, columns, name)
    norm("output_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def run_llama_cpp(args):
    """The llama.cpp side, in a process of its own: prints one JSON line."""
    import llama_cpp as llama
    import numpy as np

    @llama.llama_log_callback
    def silent(_level, _text, _data):
        pass

    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    settings = llama.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(args.gguf.encode(), settings)
    if not model:
        raise SystemExit(f"bench_llama_cpp: llama.cpp does not load {args.gguf}")
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    ids = np.random.default_rng(1).integers(3, vocabulary, (max(args.batch), args.prompt))
    runs = []
    for count in args.batch:
        settings = llama.llama_context_default_params()
        settings.n_ctx = count * (args.prompt + args.tokens + 32)
        settings.n_batch = settings.n_ubatch = max(512, count * args.prompt)
        settings.n_seq_max = count
        settings.n_threads = settings.n_threads_batch = args.threads
        context = llama.llama_init_from_model(model, settings)
        batch = llama.llama_batch_init(count * args.prompt, 0, 1)

        def decode(rows, first):
            """One pass; `rows` are the next tokens of each text. Returns each text's most probable token."""
            batch.n_tokens, outputs = 0, []
            for text, tokens in enumerate(rows):
                for place, token in enumerate(tokens):
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at], batch.n_seq_id[at] = int(token), first + place, 1
                    batch.seq_id[at][0] = text
                    batch.logits[at] = place + 1 == len(tokens)
                    batch.n_tokens += 1
                outputs.append(batch.n_tokens - 1)
            if llama.llama_decode(context, batch) != 0:
                raise SystemExit("bench_llama_cpp: llama_decode failed")
            logits = (llama.llama_get_logits_ith(context, at) for at in outputs)
            return [[int(np.argmax(np.ctypeslib.as_array(row, (vocabulary,))))] for row in logits]

        next_tokens = decode(ids[:count], 0)
        start = time.perf_counter()
        for step in range(args.tokens):
            next_tokens = decode(next_tokens, args.prompt + step)
        runs.append({"batch": count, "tokens_per_second": count * args.tokens / (time.perf_counter() - start)})
        llama.llama_batch_free(batch)
        llama.llama_free(context)
    print(json.dumps({"runs": runs}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", help=f"{', '.join(SHAPES)}, or a Hugging Face config.json")
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=list(TYPES), help="llama.cpp's types of weights")
    parser.add_argument("--head", choices=["f32", "same"], default="f32", help="the head's type with quantized types")
    add_arguments(parser)
    parser.add_argument("--gguf", help=argparse.SUPPRESS)  # the child's file
    args = parser.parse_args()
    if args.gguf:
        run_llama_cpp(args)
        return
    if not os.path.exists(args.binary):
        raise SystemExit(f"bench_llama_cpp: {args.binary} does not exist: run `scripts/just install` first")
    load = os.getloadavg()[0]
    if load > 0.5 or os.nice(0) > 0:
        print(f"bench_llama_cpp: the machine is busy (load average {load:.1f}) or this process is niced: the figures mean little", file=sys.stderr)
    environment = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
    with tempfile.TemporaryDirectory() as folder:
        for name in args.types:
            codes, flags = TYPES[name]
            if args.head == "same" and name.startswith("q"):
                flags = [*flags, "--quantize-head"]
            path = os.path.join(folder, f"{name}.gguf")
            read = write_gguf(path, args.shape, name, args.head)
            common = ["--prompt", str(args.prompt), "--tokens", str(args.tokens), "--threads", str(args.threads)]
            theirs = [sys.executable, os.path.abspath(__file__), "--gguf", path, *common, "--batch", *map(str, args.batch)]
            ours = [args.binary, "bench", "--json", "--mode", "decode", "--shape", args.shape, "--seq", str(args.prompt), "--steps", str(args.tokens), *flags]
            ratios = {batch: [] for batch in args.batch}
            for _ in range(args.repeats):
                found = {run["batch"]: run["tokens_per_second"] for run in child(theirs, environment)["runs"]}
                for batch in args.batch:
                    outcome = child([*ours, "--batch", str(batch)], environment)
                    speed = outcome["runs"][0]["tokens_per_second"]
                    ratios[batch].append(speed / found[batch])
                    print(f"batch {batch:3}: llama.cpp {name:4} {found[batch]:8.1f} tokens/s ({read / 1e6:.0f} MB a token)   tunesmith {codes:8} "
                          f"{speed:8.1f} tokens/s ({outcome['weight_bytes'] / 1e6:.0f} MB, reads {outcome['read_bandwidth'] / 1e9:.1f} GB/s, "
                          f"{100 * outcome['runs'][0]['bandwidth_share']:.0f} %)   {ratios[batch][-1]:.2f}x", flush=True)
            for batch, values in ratios.items():
                print(f"tunesmith {codes} / llama.cpp {name} at batch {batch}: {statistics.median(values):.2f}x the tokens/s", flush=True)
            os.remove(path)


if __name__ == "__main__":
    main()
