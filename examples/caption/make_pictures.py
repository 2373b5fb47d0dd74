#!/usr/bin/env python3
"""Draws small pictures of shapes, and writes a caption for each. Needs Python alone.

    python3 make_pictures.py data --train 320 --held-out 80            # what the example ships
    python3 make_pictures.py .cache/caption --train 6000 --plain       # what the encoder was made with

Each picture shows one to three shapes of one kind and color in one part of the picture. With --plain the caption lists what
is there in other words and another order. Writes FOLDER/NUMBER.png, FOLDER/train.jsonl, FOLDER/held_out.jsonl.
"""

import argparse
import json
import random
import struct
import zlib
from pathlib import Path

SIDE = 48
COLORS = {
    "red": (220, 40, 40), "green": (40, 180, 70), "blue": (50, 90, 230),
    "yellow": (240, 220, 50), "white": (245, 245, 245), "purple": (160, 60, 200),
}
SHAPES = ["circle", "square", "triangle", "cross"]
COUNTS = ["one", "two", "three"]
# Where the shapes are: the middle of the part, in shares of the side.
PLACES = {"left": (0.27, 0.5), "right": (0.73, 0.5), "top": (0.5, 0.27), "bottom": (0.5, 0.73)}


def covers(shape, dx, dy, radius):
    if shape == "circle":
        return dx * dx + dy * dy <= radius * radius
    if shape == "square":
        return max(abs(dx), abs(dy)) <= radius * 0.85
    if shape == "triangle":
        return -radius <= dy <= radius * 0.8 and abs(dx) <= (dy + radius) * 0.55
    return (abs(dx) <= radius * 0.34 and abs(dy) <= radius) or (abs(dy) <= radius * 0.34 and abs(dx) <= radius)


def centers(count, place, rng):
    """Places of the shapes: next to one another along the part's longer direction."""
    x, y = (share * SIDE for share in PLACES[place])
    step = SIDE * 0.29
    along = [(index - (count - 1) / 2) * step for index in range(count)]
    jitter = lambda: rng.uniform(-1.5, 1.5)
    if place in ("left", "right"):
        return [(x + jitter(), y + at + jitter()) for at in along]
    return [(x + at + jitter(), y + jitter()) for at in along]


def draw(shape, color, count, place, rng):
    ground = rng.randrange(10, 70)
    pixels = [[(ground, ground, ground)] * SIDE for _ in range(SIDE)]
    for cx, cy in centers(count, place, rng):
        radius = rng.uniform(4.6, 6.2)
        for row in range(max(0, int(cy - radius - 1)), min(SIDE, int(cy + radius + 2))):
            for column in range(max(0, int(cx - radius - 1)), min(SIDE, int(cx + radius + 2))):
                if covers(shape, column - cx, row - cy, radius):
                    pixels[row][column] = color
    return pixels


def png(pixels):
    """The bytes of a PNG file with a palette."""
    palette = sorted({pixel for row in pixels for pixel in row})
    lines = b"".join(b"\0" + bytes(palette.index(pixel) for pixel in row) for row in pixels)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 3, 0, 0, 0)
    colors = b"".join(bytes(color) for color in palette)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"PLTE", colors) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")


def caption(shape, color, count, place, plain):
    many = f"{shape}{'' if count == 1 else 'es' if shape == 'cross' else 's'}"
    if plain:
        return f"{place}: {color}, {shape}, {COUNTS[count - 1]}"
    where = f"at the {place}" if place in ("top", "bottom") else f"on the {place}"
    return f"{COUNTS[count - 1]} {color} {many} {where}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=320)
    parser.add_argument("--held-out", type=int, default=80)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    rng = random.Random(args.seed + args.plain)
    whole = [(s, c, n, p) for s in SHAPES for c in COLORS for n in (1, 2, 3) for p in PLACES]
    rng.shuffle(whole)
    args.folder.mkdir(parents=True, exist_ok=True)
    number = 0
    # A held-out picture may show what a training picture shows, but never in the same place to the pixel.
    for name, rows in [("train", args.train), ("held_out", args.held_out)]:
        with open(args.folder / f"{name}.jsonl", "w") as file:
            for _ in range(rows):
                shape, color, count, place = whole[number % len(whole)]
                picture = f"{number:04}.png"
                (args.folder / picture).write_bytes(png(draw(shape, COLORS[color], count, place, rng)))
                row = {"image": picture, "caption": caption(shape, color, count, place, args.plain)}
                file.write(json.dumps(row) + "\n")
                number += 1


if __name__ == "__main__":
    main()
