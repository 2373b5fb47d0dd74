#!/usr/bin/env python3
"""Draws pictures of every kind that a data set may hold, and writes what is in them: tests/golden/picture_kinds.

    pip install pillow==13.0.0 numpy
    python3 scripts/golden/picture_kinds.py tests/golden/picture_kinds

kinds.json has versions, and for each file the size and the CRC-32 of its RGB bytes: as Pillow reads it, with its EXIF orientation applied
and transparent pixels put on white, and of an animation the first frame. Pillow drops the lower byte of colors with 16 bits, and cuts
greys with 16 bits off at 255. So for these it is the definition: value / 257, rounded.
"""
import io
import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, ImageOps

WIDTH, HEIGHT = 13, 9


def draw(seed, channels=3, most=255):
    random = np.random.default_rng(seed)
    return random.integers(0, most + 1, (HEIGHT, WIDTH, channels))


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png16(path, values, kind):
    """A PNG file with 16 bits a value: Pillow writes none in color."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 16, kind, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def scaled(values):
    """16 bits to 8."""
    return (values + 128) // 257


def on_white(image):
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def opened(path):
    image = ImageOps.exif_transpose(Image.open(path))
    return np.array(on_white(image) if image.mode in ("RGBA", "LA") else image.convert("RGB"))


def turned_otherwise(folder, plain):
    """Orientations that are not in the usual place: behind the pixels, in a text as ImageMagick writes it, in XMP data, under two heads."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = exif.tobytes()[6:]
    profile = f"\nexif\n{len(data):8}\n{data.hex()}\n".encode()
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="5"/></x:xmpmeta>'
    buffer = io.BytesIO()
    plain.save(buffer, "PNG")
    png = buffer.getvalue()
    head, pixels = png[:33], png[33:-12]
    end = chunk(b"IEND", b"")
    name = b"XML:com.adobe.xmp\0"
    for file, before, behind in [
        ("turned_late.png", b"", chunk(b"eXIf", data)),
        ("turned_raw.png", chunk(b"tEXt", b"Raw profile type exif\0" + profile), b""),
        ("turned_raw_packed.png", b"", chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile))),
        ("turned_xmp.png", chunk(b"iTXt", name + b"\0\0en\0\0" + xmp), b""),
        ("turned_xmp_packed.png", b"", chunk(b"iTXt", name + b"\1\0\0\0" + zlib.compress(xmp))),
        ("turned_both.png", chunk(b"iTXt", name + b"\0\0\0\0" + xmp), chunk(b"eXIf", data)),
        ("behind_the_end.png", b"", end + chunk(b"eXIf", data)),
    ]:
        (folder / file).write_bytes(head + before + pixels + behind + (b"" if file == "behind_the_end.png" else end))
    plain.save(folder / "turned_xmp.webp", lossless=True, xmp=xmp)
    plain.save(folder / "turned_heads.webp", lossless=True, exif=2 * b"Exif\0\0" + data)
    # Larger, because tunesmith's decoder of TIFF bounds the memory of a tag by that of the pixels.
    plain.resize((65, 45), Image.Resampling.NEAREST).save(folder / "turned_xmp.tif", compression="tiff_lzw", tiffinfo={700: xmp})
    # One color: two decoders of JPEG may round others differently. The size shows the turn.
    Image.new("RGB", plain.size, (128, 128, 128)).save(folder / "turned_xmp.jpg", xmp=xmp)


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    expected = {}
    deep = draw(0, 3, 65535)
    png16(folder / "deep.png", deep, 2)
    expected["deep.png"] = scaled(deep)
    grey = draw(1, 1, 65535)
    png16(folder / "deep_grey.png", grey, 0)
    expected["deep_grey.png"] = np.repeat(scaled(grey), 3, 2)
    alpha = draw(2, 4, 65535)
    png16(folder / "deep_alpha.png", alpha, 6)
    expected["deep_alpha.png"] = np.array(on_white(Image.fromarray(scaled(alpha).astype(np.uint8), "RGBA")))
    plain = Image.fromarray(draw(3).astype(np.uint8))
    other = Image.new("RGB", plain.size, "red")
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        plain.save(folder / f"turned_{turn}.png", exif=exif)
    exif = Image.Exif()
    exif[0x0112] = 8
    plain.save(folder / "turned.webp", lossless=True, exif=exif)
    turned_otherwise(folder, plain)
    plain.save(folder / "animated.webp", lossless=True, save_all=True, append_images=[other], duration=100)
    plain.save(folder / "animated.png", save_all=True, append_images=[other], duration=100)
    plain.quantize(16).save(folder / "animated.gif", save_all=True, append_images=[other.quantize(16)], duration=100)
    Image.fromarray(draw(4, 2).astype(np.uint8), "LA").save(folder / "grey_alpha.png")
    plain.convert("1").save(folder / "two_colors.png")
    out = {"versions": {"pillow": PIL.__version__, "numpy": np.__version__}, "pictures": []}
    for path in sorted(folder.glob("*")):
        if path.suffix == ".json":
            continue
        rgb = np.ascontiguousarray(expected.get(path.name, opened(path)).astype(np.uint8))
        out["pictures"].append({"file": path.name, "size": [rgb.shape[1], rgb.shape[0]], "crc": zlib.crc32(rgb.tobytes())})
    (folder / "kinds.json").write_text(json.dumps(out, indent=1) + "\n")


main(Path(sys.argv[1]))
