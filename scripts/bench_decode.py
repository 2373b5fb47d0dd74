#!/usr/bin/env python3
"""Generates with random weights of a shape in Transformers' generate (KV cache) and in tunesmith, one after the other in fresh
processes, and prints the ratio of tokens per second.

    pip install torch==2.15.0 transformers==5.23.0
    python3 scripts/bench_decode.py --shape smollm2-135m

Both sides: float32, greedy, the same lengths of prompts and generations, the same number of threads. Reading the prompts is not counted.
The runs alternate (A B A B), because a machine's speed drifts: only the ratio of neighbours means something.
"""
import argparse
import json
import os
import statistics
import sys
import time

from bench_torch import ROOT, SHAPES, child, model_config


def run_torch(args):
    """The Transformers side, in a process of its own: prints one JSON line."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria

    class Clock(StoppingCriteria):
        """Notes when each token came."""

        def __init__(self):
            self.times = []

        def __call__(self, input_ids, scores, **kwargs):
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    values = model_config(args.shape)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    runs = []
    for batch in args.batch:
        ids = torch.randint(3, config.vocab_size, (batch, args.prompt), generator=torch.Generator().manual_seed(1))
        for tokens in (4, args.tokens + 1):  # the first one warms up
            settings = GenerationConfig(
                do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, eos_token_id=None, bos_token_id=1, use_cache=True
            )
            clock = Clock()
            with torch.no_grad():
                model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings, stopping_criteria=[clock])
        seconds = clock.times[-1] - clock.times[0]
        runs.append({"batch": batch, "tokens_per_second": batch * args.tokens / seconds})
    print(json.dumps({"runs": runs}))


def add_arguments(parser):
    """What is generated, how often, and by which program."""
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer, after the first")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="answers side by side")
    parser.add_argument("--repeats", type=int, default=2, help="how often both sides run")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--binary", default=os.path.join(ROOT, "target", "release", "tunesmith"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", help=f"{', '.join(SHAPES)}, or a Hugging Face config.json")
    add_arguments(parser)
    parser.add_argument("--torch-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_child:
        run_torch(args)
        return
    if not os.path.exists(args.binary):
        raise SystemExit(f"bench_decode: {args.binary} does not exist: run `scripts/just install` first")
    common = ["--shape", args.shape]
    theirs = [sys.executable, os.path.abspath(__file__), "--torch-child", *common, "--threads", str(args.threads), "--prompt", str(args.prompt),
              "--tokens", str(args.tokens), "--batch", *map(str, args.batch)]
    ours = [args.binary, "bench", "--json", "--mode", "decode", *common, "--seq", str(args.prompt), "--steps", str(args.tokens)]
    environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads), RAYON_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1")
    load = os.getloadavg()[0]
    if load > 0.5 or os.nice(0) > 0:
        print(f"bench_decode: the machine is busy (load average {load:.1f}) or this process is niced: the figures mean little", file=sys.stderr)
    ratios = {batch: [] for batch in args.batch}
    for _ in range(args.repeats):
        found = {run["batch"]: run["tokens_per_second"] for run in child(theirs, environment)["runs"]}
        for batch in args.batch:
            outcome = child([*ours, "--batch", str(batch)], environment)
            run = outcome["runs"][0]
            speed, share = run["tokens_per_second"], run["bandwidth_share"]
            ratios[batch].append(speed / found[batch])
            print(f"batch {batch:3}: Transformers {found[batch]:8.1f} tokens/s   tunesmith {speed:8.1f} tokens/s "
                  f"({100 * share:.0f} % of {outcome['read_bandwidth'] / 1e9:.1f} GB/s)   {ratios[batch][-1]:.2f}x", flush=True)
    for batch, found in ratios.items():
        print(f"tunesmith / Transformers at batch {batch}: {statistics.median(found):.2f}x the tokens/s")


if __name__ == "__main__":
    main()
