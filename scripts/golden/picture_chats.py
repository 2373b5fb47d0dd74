"""Chats with pictures as the processors of Transformers tokenize them.

    python scripts/golden/picture_chats.py tests/golden/picture_chats [MODEL…]

Written for each model of tests/golden/vision: a tokenizer, a chat template and an image processor that fit its config.json, and
chats.json with the rows, token ids, and the CRC-32 of the pixel values in the order of patches. The tokenizer merges line breaks,
so that a text which is put together after it was tokenized has other ids.
"""

import json
import os
import string
import sys
import zlib
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

PICTURES = Path(__file__).resolve().parents[2] / "tests/golden/pixels"
PATCH = 8
SIZE = {"height": 32, "width": 32}
TILES = dict(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
PAN_AND_SCAN = dict(
    do_pan_and_scan=True, pan_and_scan_min_crop_size=16, pan_and_scan_max_num_crops=4, pan_and_scan_min_ratio_to_activate=1.2)
# What templates of the makers write, in short.
PARTS = (
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}{{ 'IMAGE' }}{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}"
)
TEMPLATE = (
    "{%- for message in messages -%}{{ '<turn>' + message.role + '\\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}" + PARTS + "{%- endif -%}"
    "{{ '</s>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<turn>assistant\\n' }}{%- endif -%}"
)
CHATS = [
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]},
     {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": "\n\nand "}, {"type": "image"}]},
     {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
     {"role": "user", "content": [{"type": "image"}]},
     {"role": "assistant", "content": [{"type": "text", "text": "three"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "no picture"}]},
     {"role": "assistant", "content": [{"type": "text", "text": "none"}]}],
]
FILES = [["rgb.png"], ["wide.png", "tall.png", "grey.png"], []]
# PaliGemma answers one question about pictures.
QUESTIONS = [
    CHATS[0],
    [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what, and\n\nwhat?"}]},
     {"role": "assistant", "content": [{"type": "text", "text": "a cat, the cat"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "image"}]},
     {"role": "assistant", "content": [{"type": "text", "text": "two"}]}],
]
QUESTION_FILES = [["rgb.png"], ["wide.png", "tall.png"], ["grey.png"]]


# As in the model's config.json.
GRIDS = [[32, 32], [32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]
NAMES = [("image_token", 95), ("boi_token", 94), ("eoi_token", 93)]
GEMMA4 = [*NAMES, ("audio_token", 91), ("boa_token", 90), ("eoa_token", 89)]
INTERNVL = [("context_image_token", 95), ("start_image_token", 94), ("end_image_token", 93), ("video_token", 92)]


def tokenizer(special, names=NAMES):
    """Letters, merged line breaks, and special tokens with the ids that the models' config.json has."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>"] + list(string.ascii_lowercase) + list(" ,.?\n") + ["\n\n", "\n\n\n", "ca", "cat", "th"]
    special = {2: "</s>", 80: "<turn>", **special}
    filler = iter(range(1000))
    while len(vocabulary) < 96:
        vocabulary.append(special.get(len(vocabulary)) or f"<unused{next(filler)}>")
    merges = [("\n", "\n"), ("\n\n", "\n"), ("c", "a"), ("ca", "t"), ("t", "h")]
    inner = Tokenizer(models.BPE({token: id for id, token in enumerate(vocabulary)}, merges, unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ["<pad>", "<s>", *special.values()]])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", bos_token="<s>", unk_token="<unk>",
        extra_special_tokens={name: special[id] for name, id in names if id in special},
    )


def processor(name):
    tiles = {88 + row * 2 + column: f"<row_{row + 1}_col_{column + 1}>" for row in range(2) for column in range(2)}
    if name == "llava":
        own = tokenizer({95: "<image>"})
        image = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SIZE)
        return transformers.LlavaProcessor(
            image, own, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1,
            chat_template=TEMPLATE.replace("IMAGE", "<image>"))
    if name == "llava_onevision":
        own = tokenizer({95: "<image>", 94: "<video>"})
        image = transformers.LlavaOnevisionImageProcessor(size=SIZE, image_grid_pinpoints=GRIDS)
        video = transformers.LlavaOnevisionVideoProcessor()
        return transformers.LlavaOnevisionProcessor(
            image, own, video, num_image_tokens=16, vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_2",
            chat_template=TEMPLATE.replace("IMAGE", "<image>"))
    if name.startswith("gemma3"):
        own = tokenizer({95: "<soft>", 94: "<begin>", 93: "<end>"})
        image = transformers.Gemma3ImageProcessor(size=SIZE, **(PAN_AND_SCAN if name == "gemma3_pan_and_scan" else {}))
        return transformers.Gemma3Processor(image, own, image_seq_length=4, chat_template=TEMPLATE.replace("IMAGE", "<begin>"))
    if name.startswith("gemma4"):
        own = tokenizer({95: "<|image|>", 94: "<|image>", 93: "<image|>", 92: "<|video|>", 91: "<|audio|>", 90: "<|audio>", 89: "<audio|>"}, GEMMA4)
        image = transformers.Gemma4ImageProcessor(patch_size=PATCH, pooling_kernel_size=2, max_soft_tokens=70)
        return transformers.Gemma4Processor(
            transformers.Gemma4AudioFeatureExtractor(), image, own, transformers.Gemma4VideoProcessor(), chat_template=TEMPLATE.replace("IMAGE", "<|image|>"))
    if name.startswith("qwen"):
        own = tokenizer({95: "<|image_pad|>", 94: "<|video_pad|>", 93: "<|vision_start|>", 92: "<|vision_end|>"})
        image = transformers.Qwen2VLImageProcessor(patch_size=PATCH, size={"shortest_edge": 512, "longest_edge": 2048})
        made = dict(qwen2_vl=transformers.Qwen2VLProcessor, qwen2_5_vl=transformers.Qwen2_5_VLProcessor).get(name, transformers.Qwen3VLProcessor)
        video = transformers.Qwen3VLVideoProcessor() if name.startswith("qwen3") else transformers.Qwen2VLVideoProcessor()
        return made(image, own, video, chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"))
    if name in ("mistral3", "ministral3", "pixtral"):
        own = tokenizer({95: "[IMG]", 94: "[IMG_BREAK]", 93: "[IMG_END]"})
        image = transformers.PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": PATCH, "width": PATCH})
        merged = 1 if name == "pixtral" else 2
        return transformers.PixtralProcessor(image, own, patch_size=PATCH, spatial_merge_size=merged, chat_template=TEMPLATE.replace("IMAGE", "[IMG]"))
    if name == "internvl":
        own = tokenizer({95: "<IMG_CONTEXT>", 94: "<img>", 93: "</img>", 92: "<video>"}, INTERNVL)
        image = transformers.GotOcr2ImageProcessor(size=SIZE, max_patches=6)
        video = transformers.InternVLVideoProcessor()
        return transformers.InternVLProcessor(image, own, video, image_seq_length=4, chat_template=TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>\n"))
    if name == "paligemma":
        image = transformers.SiglipImageProcessor(size=SIZE)
        image.image_seq_length = 16
        return transformers.PaliGemmaProcessor(image, tokenizer({95: "<image>"}))
    own = tokenizer({95: "<image>", 94: "<fake_token_around_image>", 93: "<global-img>", **tiles})
    image = transformers.SmolVLMImageProcessor(**TILES)
    video = transformers.SmolVLMVideoProcessor()
    return transformers.SmolVLMProcessor(image, own, video, image_seq_len=4, chat_template=TEMPLATE.replace("IMAGE", "<image>"))


def patches(tile):
    channels, height, width = tile.shape
    rows, columns = height // PATCH, width // PATCH
    return tile.reshape(channels, rows, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)


def unmerged(values, grid):
    """Qwen's patches, which stand square by square, row by row."""
    _, rows, columns = grid
    return values.reshape(rows // 2, columns // 2, 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)


def main(folder, only):
    for name in only or ["llava", "gemma3", "gemma3_pan_and_scan", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "internvl", "paligemma", "llava_onevision",
                         "mistral3", "ministral3", "pixtral", "gemma4", "gemma4_31b"]:
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        whole = processor(name)
        if name == "paligemma":
            # Its processor adds tokens for places, which the golden model's vocabulary lacks; a template of ours is built in.
            tokenizer({95: "<image>"}).save_pretrained(target)
        else:
            whole.tokenizer.save_pretrained(target)
            (target / "chat_template.jinja").write_text(whole.chat_template)
        (target / "preprocessor_config.json").write_text(whole.image_processor.to_json_string())
        if name in ("mistral3", "ministral3", "pixtral"):
            # It has the sides of what becomes a row.
            (target / "processor_config.json").write_text(whole.to_json_string())
        rows = []
        chats = zip(QUESTIONS, QUESTION_FILES) if name == "paligemma" else zip(CHATS, FILES)
        for chat, files in chats:
            images = [Image.open(PICTURES / file).convert("RGB") for file in files] or None
            if name == "paligemma":
                question, answer = (["<image>" if part["type"] == "image" else part["text"] for part in turn["content"]] for turn in chat)
                found = whole(text=["".join(question)], suffix=["".join(answer)], images=[images], return_tensors="np")
            else:
                text = whole.apply_chat_template(chat, tokenize=False)
                # Gemma3Processor's own defaults go before what the file of its image processor says.
                own = PAN_AND_SCAN if name == "gemma3_pan_and_scan" and images else {}
                found = whole(text=[text], images=[images] if images else None, return_tensors="np", **own)
            row = {"messages": chat, "images": files, "input_ids": found["input_ids"][0].tolist()}
            if images and "image_grid_thw" in found:
                counts = [int(grid.prod()) for grid in found["image_grid_thw"]]
                each = np.split(np.asarray(found["pixel_values"], dtype=np.float32), np.cumsum(counts)[:-1])
                cut = [unmerged(values, grid) for values, grid in zip(each, found["image_grid_thw"])]
                row["pixels"] = zlib.crc32(np.concatenate(cut).astype("<f4").tobytes())
            elif images and "image_position_ids" in found:
                kept = np.asarray(found["image_position_ids"]).min(axis=2) >= 0
                row["pixels"] = zlib.crc32(np.asarray(found["pixel_values"], dtype=np.float32)[kept].astype("<f4").tobytes())
            elif images and "image_sizes" in found and name != "llava_onevision":
                cut = [values[:, :height, :width] for values, (height, width) in zip(found["pixel_values"], found["image_sizes"].tolist())]
                row["pixels"] = zlib.crc32(np.concatenate([patches(np.asarray(tile, dtype=np.float32)) for tile in cut]).astype("<f4").tobytes())
            elif images and name == "llava_onevision":
                # Behind a picture's own tiles stand empty ones, where another has more.
                alone = len(images) == 1
                counts = [image_size_to_num_patches(size, GRIDS, 32) if alone else 1 for size in found["image_sizes"].tolist()]
                tiles = [tile for values, own in zip(found["pixel_values"], counts) for tile in np.asarray(values, dtype=np.float32)[:own]]
                row["pixels"] = zlib.crc32(np.concatenate([patches(tile) for tile in tiles]).astype("<f4").tobytes())
            elif images:
                values = np.asarray(found["pixel_values"], dtype=np.float32)
                tiles = values.reshape(-1, *values.shape[-3:])
                kept = tiles
                if name == "smolvlm":
                    mask = np.asarray(found["pixel_attention_mask"]).reshape(len(tiles), -1).any(axis=1)
                    kept = tiles[mask]
                row["pixels"] = zlib.crc32(np.concatenate([patches(tile) for tile in kept]).astype("<f4").tobytes())
            rows.append(row)
        versions = {"transformers": transformers.__version__}
        (target / "chats.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
