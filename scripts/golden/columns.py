#!/usr/bin/env python3
"""Makes tests/golden/columns: the same rows as JSON Lines, Parquet and Arrow, written by pyarrow.

    pip install pyarrow==26.0.1
    python3 scripts/golden/columns.py --out tests/golden/columns
"""
import argparse
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq

TOOLS = json.dumps([dict(type="function", function=dict(name="get_weather", parameters=dict(type="object", properties=dict(city=dict(type="string")))))])


def row(number):
    question = dict(role="user", content=f"What about {number}? Größe 漢字")
    if number % 3:
        return dict(messages=[question, dict(role="assistant", content=f"It is {number}.", weight=number % 2)] * 2, tools=None, score=number / 7)
    call = dict(type="function", id=f"call{number:05}", function=dict(name="get_weather", arguments=json.dumps(dict(city=f"City {number}", days=number))))
    messages = [question, dict(role="assistant", content=None, tool_calls=[call]), dict(role="tool", content="21"), dict(role="assistant", content="Warm.")]
    return dict(messages=messages, tools=TOOLS, score=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rows = [row(number) for number in range(40)]
    with open(os.path.join(args.out, "rows.jsonl"), "w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    pixels = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/golden/pixels")
    pictures = []
    for name, caption in [("rgb.png", "a cat"), ("rgb.jpg", "the sea"), ("rgb.webp", "a tree")]:
        with open(os.path.join(pixels, name), "rb") as file:
            # As `datasets` stores a column of pictures: what the file was called, which need not exist.
            pictures.append(dict(image=dict(bytes=file.read(), path=f"gone/{name}"), caption=caption))
    pq.write_table(pa.Table.from_pylist(pictures), os.path.join(args.out, "pictures.parquet"), compression="zstd")
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, os.path.join(args.out, "rows.parquet"), row_group_size=16, compression="zstd")
    pq.write_table(table, os.path.join(args.out, "rows_snappy.parquet"), compression="snappy", use_dictionary=True)
    with pa.ipc.new_stream(os.path.join(args.out, "rows_stream.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    dictionary = table.set_column(1, "tools", table["tools"].dictionary_encode())
    for codec in ["lz4", "zstd"]:
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_file(os.path.join(args.out, f"rows_{codec}.arrow"), dictionary.schema, options=options) as writer:
            writer.write_table(dictionary, max_chunksize=15)


if __name__ == "__main__":
    main()
