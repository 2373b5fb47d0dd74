#!/usr/bin/env python3
"""Writes rows of token ids shaped like chat data, for benchmarks: one {"input_ids": […], "labels": […]} per line.

    python3 scripts/make_chat_rows.py --out chat.jsonl [--rows 64] [--vocab 49152] [--seed 1]

Lengths vary (log-normal, clipped to 16..--max, mean about --mean). A share of about --labelled of the tokens carries a label, in one to three
assistant turns; the last one ends the row. The ids are random, because only their shape matters.
"""
import argparse
import json
import math
import random


def length(rng, mean, longest):
    """A row's length. The factor makes up for what the clipping takes away."""
    return max(16, min(longest, round(rng.lognormvariate(math.log(mean) - 0.18, 0.65))))


def row(rng, tokens, labelled, vocab):
    """One row: questions without labels, answers with them."""
    ids = [rng.randrange(vocab) for _ in range(tokens)]
    labels = [-100] * tokens
    turns = min(rng.randint(1, 3), tokens // 16)
    for turn in range(turns):
        start, end = tokens * turn // turns, tokens * (turn + 1) // turns
        answer = max(1, round((end - start) * min(0.95, max(0.05, rng.gauss(labelled, 0.08)))))
        labels[end - answer : end] = ids[end - answer : end]
    return {"input_ids": ids, "labels": labels}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49152, help="ids are below this")
    parser.add_argument("--mean", type=float, default=210)
    parser.add_argument("--max", type=int, default=512)
    parser.add_argument("--labelled", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    rows = [row(rng, length(rng, args.mean, args.max), args.labelled, args.vocab) for _ in range(args.rows)]
    with open(args.out, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    tokens = sum(len(row["input_ids"]) for row in rows)
    labels = sum(label != -100 for row in rows for label in row["labels"])
    print(f"{args.rows} rows, {tokens} tokens, mean {tokens / args.rows:.0f}, "
          f"max {max(len(row['input_ids']) for row in rows)}, {100 * labels / tokens:.0f} % labelled")


if __name__ == "__main__":
    main()
