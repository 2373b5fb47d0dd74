#!/usr/bin/env python3
"""Tokenization speed of tunesmith and of Hugging Face `datasets.map` with the same tokenizer, both on two processors.

    pip install datasets==5.2.0 transformers==5.23.0
    cargo build --release
    python3 scripts/bench_tokenize.py --mb 200

Both sides read the same JSON Lines, render each conversation with the model's chat template, tokenize it, and write ids and labels to
disk. The sides alternate (A B A B), with a fresh process each and no cache. By default, the model folder is the quickstart's, and the rows
are the quickstart's, repeated with a number in them. `--text` measures plain text instead.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join(ROOT, "examples/quickstart/model")
ROWS = os.path.join(ROOT, "examples/quickstart/data/train.jsonl")


def write_rows(path, megabytes, text):
    """Rows of the wanted size in all; none is like another."""
    with open(ROWS, encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in file]
    written, number = 0, 0
    with open(path, "w", encoding="utf-8") as out:
        while written < megabytes << 20:
            messages = [dict(message) for message in rows[number % len(rows)]]
            messages[-2]["content"] += f" ({number})"
            row = dict(text=" ".join(message["content"] for message in messages)) if text else dict(messages=messages)
            line = json.dumps(row, ensure_ascii=False) + "\n"
            out.write(line)
            written += len(line.encode())
            number += 1
    return number


def hugging_face(path, model, processes, text):
    """The other side, in a process of its own."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(batch):
        if text:
            ids = tokenizer([text + tokenizer.eos_token for text in batch["text"]], truncation=True, max_length=2048)["input_ids"]
            return dict(input_ids=ids, labels=ids)
        encoded = tokenizer.apply_chat_template(
            batch["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True, truncation=True, max_length=2048
        )
        labels = [[id if inside else -100 for id, inside in zip(*row)] for row in zip(encoded["input_ids"], encoded["assistant_masks"])]
        return dict(input_ids=encoded["input_ids"], labels=labels)

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        rows = load_dataset("json", data_files=path, split="train", cache_dir=folder)
        loaded = time.perf_counter()
        mapped = rows.map(encode, batched=True, num_proc=processes, remove_columns=rows.column_names)
        end = time.perf_counter()
        tokens = sum(len(ids) for ids in mapped[:2000]["input_ids"]) / min(2000, len(mapped)) * len(mapped)
    print(json.dumps(dict(load=loaded - begin, map=end - loaded, tokens=tokens)))


def tunesmith(path, model, processes, binary, folder):
    words = [
        f"model.name={model}", f"data.train_path={path}", f"data.num_proc={processes}", "data.use_cache=false", f"data.cache_dir={folder}",
    ]
    config = os.path.join(folder, "config.yaml")
    with open(config, "w", encoding="utf-8") as out:
        out.write("model:\n  max_seq_len: 2048\n")
    begin = time.perf_counter()
    output = subprocess.run([binary, "data", config, "--json", *words], check=True, capture_output=True, text=True).stdout
    seconds = time.perf_counter() - begin
    return seconds, json.loads(output)["splits"]["train"]["tokens"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100, help="size of the rows")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--text", action="store_true", help="plain text instead of conversations")
    parser.add_argument("--binary", default=os.path.join(ROOT, "target/release/tunesmith"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return hugging_face(args.side, args.model, args.processes, args.text)
    folder = tempfile.mkdtemp()
    try:
        path = os.path.join(folder, "rows.jsonl")
        rows = write_rows(path, args.mb, args.text)
        megabytes = os.path.getsize(path) / 2**20
        print(f"{rows} rows, {megabytes:.0f} MB, {args.processes} processes")
        for _ in range(args.rounds):
            seconds, tokens = tunesmith(path, args.model, args.processes, args.binary, folder)
            print(f"tunesmith     {seconds:7.2f} s  {megabytes / seconds:6.1f} MB/s  {tokens / seconds / 1e6:5.2f} M tokens/s")
            command = [sys.executable, __file__, "--side", path, "--model", args.model, "--processes", str(args.processes)]
            output = subprocess.run(command + ["--text"] * args.text, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
            side = json.loads(output.splitlines()[-1])
            for name, seconds in [("datasets.map", side["map"]), ("with loading", side["map"] + side["load"])]:
                print(f"{name:13s} {seconds:7.2f} s  {megabytes / seconds:6.1f} MB/s  {side['tokens'] / seconds / 1e6:5.2f} M tokens/s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
