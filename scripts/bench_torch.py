#!/usr/bin/env python3
"""Runs the same training work in PyTorch + PEFT and in tunesmith, one after the other in fresh processes, and prints the ratio.

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2
    python3 scripts/bench_torch.py --shape smollm2-135m --mode lora --seq 512 --batch 2 --steps 3
    python3 scripts/bench_torch.py --shape smollm2-135m --data chat.jsonl --batch 8 --steps 3     # make_chat_rows.py writes such rows

Both sides: float32 (`--bf16`: products and a frozen base in bfloat16; `--dtype bfloat16`: a frozen base alone), random weights of the shape, LoRA r=16 on every linear layer, AdamW, gradient clipping, the same number of threads.
`--mode full` trains all weights. `--mode qlora` uses a base in NF4 with double quantization, which needs `pip install bitsandbytes`.
PyTorch uses sdpa attention and the fused AdamW. `--device cuda` computes on a GPU on both sides, and there peak memory is the GPU's. The runs alternate (A B A B), because a machine's speed drifts: only the ratio of
neighbours means something. One process runs at a time.

With `--data`, each step takes the next `--batch` rows. PyTorch pads them to the longest, as the usual collator does. Tokens/s counts real
tokens on both sides.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# name: (hidden, layers, heads, key-value heads, feed-forward, vocabulary, tied, qkv bias)
SHAPES = {
    "small": (384, 8, 6, 6, 1024, 8192, False, False),
    "smollm2-135m": (576, 30, 9, 3, 1536, 49152, True, False),
    "qwen2.5-0.5b": (896, 24, 14, 2, 4864, 151936, True, True),
}

# Hybrids, in these models' sizes, of Qwen3.5 the text model alone; and a mixture of 32 experts, of which each token uses four.
CONFIGS = {
    "experts-32": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536, "moe_intermediate_size": 384,
        "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "output_router_logits": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 3584, "vocab_size": 248320,
        "tie_word_embeddings": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "attn_output_gate": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    "lfm2-350m": {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 8, "intermediate_size": 6656, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "vocab_size": 65536, "tie_word_embeddings": True, "max_position_embeddings": 4096, "norm_eps": 1e-5,
        "conv_L_cache": 3, "conv_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
}


def model_config(shape):
    """A Hugging Face `config.json` as a dictionary: of a known shape, or read from a file."""
    if shape in CONFIGS:
        return dict(CONFIGS[shape])
    if shape not in SHAPES:
        with open(shape, encoding="utf-8") as file:
            return json.load(file)
    hidden, layers, heads, kv_heads, feed_forward, vocabulary, tied, bias = SHAPES[shape]
    return {
        "model_type": "qwen2" if bias else "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": feed_forward,
        "vocab_size": vocabulary, "tie_word_embeddings": tied, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }


def batches(args, vocabulary, torch):
    """Endless (input_ids, attention_mask, labels, real tokens), each as long as its longest row."""
    if args.data:
        with open(args.data, encoding="utf-8") as file:
            rows = [(row["input_ids"], row["labels"]) for row in map(json.loads, file)]
    else:
        ids = torch.randint(3, vocabulary, (64, args.seq), generator=torch.Generator().manual_seed(1)).tolist()
        rows = [(row, row) for row in ids]
    at = 0
    while True:
        chosen = [rows[(at + step) % len(rows)] for step in range(args.batch)]
        at += args.batch
        longest = max(len(ids) for ids, _ in chosen)
        padded = [(longest - len(ids)) for ids, _ in chosen]
        inputs = torch.tensor([ids + [0] * pad for (ids, _), pad in zip(chosen, padded)])
        mask = torch.tensor([[1] * len(ids) + [0] * pad for (ids, _), pad in zip(chosen, padded)])
        labels = torch.tensor([labels + [-100] * pad for (_, labels), pad in zip(chosen, padded)])
        yield inputs, None if max(padded) == 0 else mask, labels, sum(len(ids) for ids, _ in chosen)


def run_torch(args):
    """The PyTorch side, in a process of its own: prints one JSON line."""
    import resource

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    values = model_config(args.shape)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    # As the Trainer has it with bf16: a frozen base in bfloat16, what is trained in float32, and autocast.
    base = torch.bfloat16 if args.bf16 and args.mode != "full" else torch.float32
    if args.mode == "qlora":
        from transformers import BitsAndBytesConfig

        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=base)
        loaded = dict(device_map={"": args.device}, dtype=base, attn_implementation="sdpa")
        model = AutoModelForCausalLM.from_pretrained(args.torch_model, quantization_config=how, **loaded)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=base).to(args.device)
    if args.dtype == "bfloat16" and base == torch.float32:
        # The numbers of a checkpoint in bfloat16, widened: so transformers loads it with dtype=torch.float32.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    if args.torch_model and args.mode != "qlora":
        model.save_pretrained(args.torch_model)
        print(json.dumps({"saved": args.torch_model}))
        return
    if args.mode != "full":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if args.mode != "full":
            model.enable_input_require_grads()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0, fused=True)
    feed = batches(args, config.vocab_size, torch)
    seconds = tokens = 0
    on_gpu = args.device != "cpu"
    for step in range(args.steps + 1):
        inputs, mask, labels, real = next(feed)
        inputs, mask, labels = (part if part is None else part.to(args.device) for part in (inputs, mask, labels))
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast(args.device.split(":")[0], dtype=torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        if step > 0:  # the first one warms up
            seconds += time.perf_counter() - begin
            tokens += real
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"tokens_per_second": tokens / seconds, "peak_bytes": peak}))


def child(command, environment=None):
    """Runs a command to its end and returns the JSON of its last line."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"bench_torch: `{' '.join(command)}` ended with status {done.returncode}")
    text = done.stdout.strip()
    return json.loads(text if text.startswith("{") else text.splitlines()[-1])


def show(side, result):
    print(f"{side:10} {result['tokens_per_second']:9.1f} tokens/s   peak {result['peak_bytes'] / 2**20:7.0f} MiB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", help=f"{', '.join([*SHAPES, *CONFIGS])}, or a Hugging Face config.json")
    parser.add_argument("--mode", choices=["lora", "qlora", "full"], default="lora")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each run; one more warms up")
    parser.add_argument("--repeats", type=int, default=2, help="how often both sides run")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16 on both sides")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="what tunesmith keeps the base in; PyTorch then has the same numbers (default: bfloat16 with --bf16, else float32)")
    parser.add_argument("--data", help="JSONL of {input_ids, labels} instead of full rows of random ids")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--simd", help="hold tunesmith to these instructions: portable, avx2, avx512, amx (PyTorch chooses its own)")
    parser.add_argument("--binary", default=os.path.join(ROOT, "target", "release", "tunesmith"))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or cuda:N, on both sides")
    parser.add_argument("--only", choices=["torch", "tunesmith"], help="one side alone, without a ratio")
    parser.add_argument("--torch-model", help=argparse.SUPPRESS)  # a folder: written, or with qlora read
    parser.add_argument("--torch-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_child:
        run_torch(args)
        return
    kept = tempfile.TemporaryDirectory()
    shape = args.shape
    if shape in CONFIGS:
        shape = os.path.join(kept.name, "shape.json")
        with open(shape, "w", encoding="utf-8") as file:
            json.dump(CONFIGS[args.shape], file)
    work = ["--shape", shape, "--mode", args.mode, "--seq", str(args.seq), "--batch", str(args.batch), "--steps", str(args.steps), "--device", args.device]
    work += ["--data", args.data] if args.data else []
    work += ["--gradient-checkpointing"] if args.gradient_checkpointing else []
    work += ["--bf16"] if args.bf16 else []
    work += ["--dtype", args.dtype] if args.dtype else []
    sides = {}
    if args.only != "tunesmith":
        missing = subprocess.run([sys.executable, "-c", "import torch, transformers, peft"], stderr=subprocess.DEVNULL, check=False)
        if missing.returncode != 0:
            raise SystemExit("bench_torch: PyTorch is not installed here: pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2")
        sides["PyTorch"] = [sys.executable, os.path.abspath(__file__), "--torch-child", "--threads", str(args.threads), *work]
    if args.only != "torch":
        if not os.path.exists(args.binary):
            raise SystemExit(f"bench_torch: {args.binary} does not exist: run `scripts/just install` first")
        sides["tunesmith"] = [args.binary, "bench", "--json", *work, *(["--simd", args.simd] if args.simd else [])]
    environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads), RAYON_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1")
    load = os.getloadavg()[0]
    if load > 0.5 or os.nice(0) > 0:
        print(f"bench_torch: the machine is busy (load average {load:.1f}) or this process is niced: PyTorch's threads wait for each other "
              "by spinning and fall far behind then, so the ratio would flatter tunesmith", file=sys.stderr)
    if args.mode == "qlora" and "PyTorch" in sides:
        # bitsandbytes quantizes while it loads. So the random model is written to a folder first, which must not count as the run's memory.
        drawn = [argument if argument != "qlora" else "lora" for argument in sides["PyTorch"]]
        folder = os.path.join(kept.name, "model")
        child([*drawn, "--torch-model", folder], environment)
        sides["PyTorch"] += ["--torch-model", folder]
    results = {side: [] for side in sides}
    for _ in range(args.repeats):
        for side, command in sides.items():
            results[side].append(child(command, environment))
            show(side, results[side][-1])
    if len(sides) == 2:
        ours, theirs = results["tunesmith"], results["PyTorch"]
        speed = [our["tokens_per_second"] / their["tokens_per_second"] for our, their in zip(ours, theirs)]
        memory = [our["peak_bytes"] / their["peak_bytes"] for our, their in zip(ours, theirs)]
        print(f"tunesmith / PyTorch: {statistics.median(speed):.2f}x the tokens/s, {statistics.median(memory):.2f}x the peak memory")


if __name__ == "__main__":
    main()
