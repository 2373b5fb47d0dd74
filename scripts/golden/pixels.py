"""Draws small pictures and writes what Pillow, torchvision and the image processors of Transformers make of them.

    python scripts/golden/pixels.py tests/golden/pixels

Written: the pictures, and pixels.json with versions, sizes and CRC-32 sums: of the decoded bytes, of resized bytes, and of
the float32 values in the order of patches.
"""

import io
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
import transformers
from PIL import Image, ImageOps
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

FILTERS = {
    "nearest": (Image.Resampling.NEAREST, InterpolationMode.NEAREST_EXACT),
    "bilinear": (Image.Resampling.BILINEAR, InterpolationMode.BILINEAR),
    "bicubic": (Image.Resampling.BICUBIC, InterpolationMode.BICUBIC),
    "lanczos": (Image.Resampling.LANCZOS, InterpolationMode.LANCZOS),
}
SIZES = [(16, 16), (40, 40), (7, 90), (64, 5), (31, 17)]
SMALL = {"height": 32, "width": 32}
EDGE = {"shortest_edge": 28}
PROCESSORS = [
    ("siglip", "SiglipImageProcessor", dict(size=SMALL)),
    ("siglip2", "Siglip2ImageProcessor", dict(patch_size=8, max_num_patches=20)),
    ("siglip_lanczos", "SiglipImageProcessor", dict(size={"height": 24, "width": 40}, resample=1)),
    ("vit", "ViTImageProcessor", dict(size=SMALL, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6])),
    ("vit_nearest", "ViTImageProcessor", dict(size=SMALL, resample=0, do_normalize=False)),
    ("vit_raw", "ViTImageProcessor", dict(size=SMALL, do_rescale=False)),
    ("clip", "CLIPImageProcessor", dict(size=EDGE, crop_size={"height": 24, "width": 24})),
    ("clip_larger_crop", "CLIPImageProcessor", dict(size={"shortest_edge": 16}, crop_size={"height": 40, "width": 24})),
    ("dinov2", "BitImageProcessor", dict(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28})),
    ("llava", "LlavaImageProcessor", dict(size=EDGE, crop_size={"height": 24, "width": 24}, do_pad=True)),
    ("llava_onevision", "LlavaOnevisionImageProcessor",
     dict(size=SMALL, image_grid_pinpoints=[[32, 32], [32, 64], [64, 32], [64, 64], [32, 96], [96, 32], [128, 32]])),
    ("gemma3", "Gemma3ImageProcessor", dict(size=SMALL)),
    ("gemma4", "Gemma4ImageProcessor", dict(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)),
    ("gemma4_normalized", "Gemma4ImageProcessor",
     dict(patch_size=8, pooling_kernel_size=1, max_soft_tokens=140, resample=2, do_normalize=True, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6])),
    ("gemma3_pan_and_scan", "Gemma3ImageProcessor",
     dict(size=SMALL, do_pan_and_scan=True, pan_and_scan_min_crop_size=16, pan_and_scan_max_num_crops=4, pan_and_scan_min_ratio_to_activate=1.2)),
    ("gemma3_pan_and_scan_narrow", "Gemma3ImageProcessor",
     dict(size={"height": 24, "width": 40}, do_resize=False, do_pan_and_scan=True, pan_and_scan_min_crop_size=3, pan_and_scan_max_num_crops=7,
          pan_and_scan_min_ratio_to_activate=1.5)),
    ("idefics3", "Idefics3ImageProcessor", dict(size={"longest_edge": 70}, max_image_size={"longest_edge": 32})),
    ("smolvlm", "SmolVLMImageProcessor", dict(size={"longest_edge": 60}, max_image_size={"longest_edge": 32})),
    ("smolvlm_whole", "SmolVLMImageProcessor",
     dict(size={"longest_edge": 60}, max_image_size={"longest_edge": 32}, do_image_splitting=False)),
    ("qwen2_vl", "Qwen2VLImageProcessor", dict(patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600})),
    ("pixtral", "PixtralImageProcessor", dict(size={"longest_edge": 40}, patch_size={"height": 8, "width": 8})),
    ("pixtral_oblong", "PixtralImageProcessor", dict(size={"height": 60, "width": 50}, patch_size=16, resample=2)),
    ("qwen2_vl_small", "Qwen2VLImageProcessor",
     dict(patch_size=8, min_pixels=4000, max_pixels=9000, merge_size=4, temporal_patch_size=1, image_mean=[0.5] * 3, image_std=[0.5] * 3)),
]
PATCH = 8


def draw(width, height, seed):
    """Waves, an edge and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 3 + k) * np.cos(y / (4 + k)) for k in range(3)], -1) * 90 + 128
    waves[height // 3:, width // 2:] += 60
    waves += random.normal(0, 20, waves.shape)
    return np.clip(waves, 0, 255).astype(np.uint8)


def pictures(folder):
    rgb = Image.fromarray(draw(45, 33, 0))
    rgb.save(folder / "rgb.png")
    Image.fromarray(draw(17, 120, 1)).save(folder / "tall.png")
    Image.fromarray(draw(1, 1, 2)).save(folder / "one.png")
    Image.fromarray(draw(3, 50, 3)).save(folder / "narrow.png")
    Image.fromarray(draw(90, 41, 4)).save(folder / "wide.png")
    rgba = np.dstack([draw(30, 20, 5), draw(30, 20, 6)[..., :1]])
    Image.fromarray(rgba).save(folder / "rgba.png")
    rgb.quantize(32).save(folder / "palette.png")
    rgb.convert("L").save(folder / "grey.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb.save(folder / "rotated.png", exif=exif)
    rgb.save(folder / "rgb.bmp")
    rgb.save(folder / "rgb.webp", lossless=True)
    rgb.save(folder / "rgb.tiff", compression="tiff_lzw")
    rgb.quantize(16).save(folder / "animated.gif", save_all=True, append_images=[Image.new("RGB", rgb.size, "red").quantize(16)])
    rgb.save(folder / "rgb.jpg", quality=95, subsampling=0)
    rgb.save(folder / "rotated.jpg", quality=95, subsampling=0, exif=exif)
    Image.fromarray(draw(24, 16, 7)).convert("CMYK").save(folder / "cmyk.jpg")


def opened(path):
    picture = ImageOps.exif_transpose(Image.open(path))
    if picture.mode in ("RGBA", "LA"):
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


def crc(array):
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def patches(tile):
    """[channels, height, width] to [patches, channels * patch * patch]."""
    channels, height, width = tile.shape
    rows, columns = height // PATCH, width // PATCH
    tile = tile[:, : rows * PATCH, : columns * PATCH]
    cut = tile.reshape(channels, rows, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, -1), [rows, columns]


def unmerged(values, grid, merge):
    """Qwen's patches, which stand square by square, row by row."""
    _, rows, columns = grid
    squares = values.reshape(rows // merge, columns // merge, merge, merge, -1).transpose(0, 2, 1, 3, 4)
    return squares.reshape(rows * columns, -1), [int(rows), int(columns)]


def cut(processor, found):
    """The patches of each tile of what a processor gives for one picture, and the tile's rows and columns."""
    if "spatial_shapes" in found:
        rows, columns = (int(side) for side in found["spatial_shapes"][0])
        return [(np.asarray(found["pixel_values"][0], dtype=np.float32)[: rows * columns], [rows, columns])]
    if "image_grid_thw" in found:
        return [unmerged(np.asarray(found["pixel_values"]), found["image_grid_thw"][0], processor.merge_size)]
    if "image_position_ids" in found:
        places = np.asarray(found["image_position_ids"][0])
        kept = places.min(axis=1) >= 0
        columns, rows = (int(side) + 1 for side in places.max(axis=0))
        return [(np.asarray(found["pixel_values"][0], dtype=np.float32)[kept], [rows, columns])]
    if "num_crops" in found:
        return [patches(np.asarray(tile, dtype=np.float32)) for tile in found["pixel_values"]]
    values = np.asarray(found["pixel_values"][0], dtype=np.float32)
    tiles = values if values.ndim == 4 else values[None]
    return [patches(tile) for tile in tiles]


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    pictures(folder)
    out = {
        "versions": {
            "pillow": PIL.__version__, "torch": torch.__version__, "torchvision": torchvision.__version__,
            "transformers": transformers.__version__,
        },
        "patch": PATCH, "pictures": [], "resized": [], "processed": [],
    }
    lossless = [path.name for path in sorted(folder.glob("*")) if path.suffix not in (".jpg", ".json")]
    for name in lossless:
        array = np.array(opened(folder / name))
        out["pictures"].append({"file": name, "size": [array.shape[1], array.shape[0]], "crc": crc(array)})
    for name in ["rgb.jpg", "rotated.jpg"]:
        array = np.array(opened(folder / name))
        mean = array.reshape(-1, 3).mean(0).tolist()
        out["pictures"].append({"file": name, "size": [array.shape[1], array.shape[0]], "mean": mean})
    for name in ["rgb.png", "tall.png", "one.png", "narrow.png", "wide.png"]:
        picture = opened(folder / name)
        tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
        for word, (pil, mode) in FILTERS.items():
            for width, height in SIZES:
                torchvision_ = F.resize(tensor, [height, width], interpolation=mode, antialias=True)
                out["resized"].append({
                    "file": name, "filter": word, "size": [width, height],
                    "pil": crc(np.array(picture.resize((width, height), pil))),
                    "torchvision": crc(torchvision_.permute(1, 2, 0).numpy()),
                })
    for name, kind, settings in PROCESSORS:
        processor = getattr(transformers, kind)(**settings)
        described = json.loads(processor.to_json_string())
        files = []
        for file in ["rgb.png", "tall.png", "narrow.png", "wide.png", "rgba.png", "rotated.png", "grey.png"]:
            found = processor(opened(folder / file), return_tensors="np")
            cut_ = cut(processor, found)
            whole = np.concatenate([each for each, _ in cut_]).astype(np.float32)
            files.append({"file": file, "tiles": [size for _, size in cut_], "crc": crc(whole),
                          "first": whole[0, :4].tolist()})
        out["processed"].append({"name": name, "settings": described, "files": files})
    (folder / "pixels.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
