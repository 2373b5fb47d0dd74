#!/usr/bin/env python3
"""Predicted and measured peak memory of twelve configurations: the table of docs/memory.md.

    python3 scripts/memory_table.py [--binary target/release/tunesmith] [--only N]

Each line is one `tunesmith bench --json` in a fresh process: real optimizer steps on random weights. The measured figure is the peak resident
memory (VmHWM). `--svg` draws the predicted parts instead, and runs nothing: > docs/memory.svg
"""
import argparse
import json
import subprocess

CASES = [
    ("small, LoRA, 1 x 512", "--shape small --seq 512 --batch 1"),
    ("small, full, 2 x 512", "--shape small --seq 512 --batch 2 --mode full"),
    ("135M, LoRA, 2 x 512", "--shape smollm2-135m --seq 512 --batch 2"),
    ("135M, LoRA, 2 x 512 in one pass", "--shape smollm2-135m --seq 512 --batch 2 --max-tokens-per-pass 1024"),
    ("135M, LoRA, 2 x 512 in one pass, gradient checkpointing",
     "--shape smollm2-135m --seq 512 --batch 2 --max-tokens-per-pass 1024 --gradient-checkpointing"),
    ("135M, LoRA, 2 x 512, bfloat16", "--shape smollm2-135m --seq 512 --batch 2 --bf16"),
    ("135M, full, 1 x 512", "--shape smollm2-135m --seq 512 --batch 1 --mode full"),
    ("135M, LoRA, 1 x 2048", "--shape smollm2-135m --seq 2048 --batch 1"),
    ("135M, full, 4 x 256 in one pass, gradient checkpointing",
     "--shape smollm2-135m --seq 256 --batch 4 --max-tokens-per-pass 1024 --mode full --gradient-checkpointing"),
    ("0.5B, LoRA, 1 x 512", "--shape qwen2.5-0.5b --seq 512 --batch 1"),
    ("0.5B, LoRA, 1 x 1024, bfloat16, gradient checkpointing",
     "--shape qwen2.5-0.5b --seq 1024 --batch 1 --bf16 --gradient-checkpointing"),
    ("0.5B, LoRA r = 64, 2 x 256, bfloat16", "--shape qwen2.5-0.5b --seq 256 --batch 2 --bf16 --rank 64"),
]
COLOURS = {"weights": "#6e7781", "trained": "#0969da", "gradients": "#54aeff", "optimizer": "#8250df", "kept": "#2da44e",
           "work": "#7ee0a0", "head": "#bf8700", "attention": "#d4a72c", "passing": "#cf222e", "program": "#d0d7de"}


def bench(binary, words, *more):
    run = subprocess.run([binary, "bench", "--steps", "1", "--json", *words.split(), *more], check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


def table(binary, cases):
    print("| configuration | predicted | measured | off by |\n|---|---|---|---|")
    for name, words in cases:
        outcome = bench(binary, words)
        parts, measured = outcome["predicted"], outcome["peak_bytes"]
        predicted = sum(bytes for part, bytes in parts.items() if part != "host")
        off = 100 * (predicted / measured - 1)
        print(f"| {name} | {predicted / 2**20:,.0f} MiB | {measured / 2**20:,.0f} MiB | {off:+.1f} % |", flush=True)


def svg(binary, cases):
    left, top, row, scale = 380, 16, 24, 0.155
    height = top + row * len(cases) + 64
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" font-family="system-ui, sans-serif" font-size="12">')
    print(f'<rect width="900" height="{height}" rx="8" fill="#ffffff"/>')
    for index, (name, words) in enumerate(cases):
        y, x = top + index * row, left
        outcome = bench(binary, words, "--predict")
        print(f'<text x="12" y="{y + 13}" fill="#1f2328">{name}</text>')
        for part, colour in COLOURS.items():
            width = outcome["predicted"][part] / 2**20 * scale
            if width > 0:
                print(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row - 6}" fill="{colour}"><title>{part}</title></rect>')
            x += width
        print(f'<text x="{x + 6:.1f}" y="{y + 13}" fill="#59636e">{outcome["total"] / 2**20:,.0f} MiB</text>')
    for index, (part, colour) in enumerate(COLOURS.items()):
        x, y = 12 + index % 5 * 175, top + row * len(cases) + 12 + index // 5 * 22
        print(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}"/><text x="{x + 20}" y="{y + 12}" fill="#59636e">{part}</text>')
    print("</svg>")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/tunesmith")
    parser.add_argument("--only", type=int, help="the case of this number, from 1")
    parser.add_argument("--svg", action="store_true")
    args = parser.parse_args()
    cases = CASES if args.only is None else CASES[args.only - 1:args.only]
    (svg if args.svg else table)(args.binary, cases)


if __name__ == "__main__":
    main()
