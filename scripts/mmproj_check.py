#!/usr/bin/env python3
"""Exports tiny models that see images as two GGUF files and compares what llama.cpp computes of an image with Transformers.

    python3 -m venv llama && llama/bin/pip install llama-cpp-python==0.3.36 torch transformers peft
    llama/bin/pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xzf llama_cpp_python-0.3.36.tar.gz
    llama/bin/python scripts/mmproj_check.py --build llama_cpp_python-0.3.36 --libmtmd lib     # compiles llama.cpp's tools/mtmd, once
    PYTHON=llama/bin/python just mmproj-check --libmtmd lib [--families gemma3,llava,…]

The package's wheel has no libmtmd. `--build` compiles the sources in its source distribution against the wheel's own libllama.

The models are those of tests/golden/vision, with the tokenizers and image processors of tests/golden/picture_chats. Each gets an adapter on
language model and image encoder with random values, which is merged. The picture has a size that needs no resizing, so both sides read the
same pixels. For each family, the check compares:

- the rows behind the connector from f32, f16 and q8_0 files, and from f32 files with the adapter merged
- the logits behind a text with that picture, from both files in f32, without and with the adapter

llama.cpp reads GELU from a table in float16, in tanh's approximation where a model has erf, and rounds pixels and the patch embedding to
float16. Transformers' models are given the same; `coarser` is what that changes of their rows.

In LLaVA and InternVL, llama.cpp puts the class token behind the patches and gives each token the position of its neighbour. LLaVA's rows then
begin with the second patch and end with the class token. `as_published` is how far its rows are from those of Transformers. The limits
are for Transformers with the same order.

Prints a JSON line per family: the largest differences, relative to the largest number. Exits 1 if one of f32 is above 1e-3, of f16 above
2e-3, or of q8_0 above 5e-2. (A number next to a border of float16's may be rounded to the other side, which changes a row by 1e-4.)
"""
import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEXT = "what is it <__media__> a cat"
# Width and height of the picture of each family in pixels; what of config.json is changed.
WINDOWS = dict(text_config=dict(layer_types=["sliding_attention"] * 3))
FAMILIES = {
    "gemma3": ((32, 32), WINDOWS),
    # llama.cpp gives an image at least 70 rows, and masks in both directions to a language model of this width.
    "gemma4": ((160, 128), dict(text_config=dict(use_bidirectional_attention="vision"))),
    "gemma4_31b": ((160, 128), {}),
    "smolvlm": ((64, 64), {}),
    "internvl": ((32, 32), {}),
    "llava": ((32, 32), {}),
    # As llava-interleave: all of SigLIP's rows, behind its last block.
    "llava_siglip": ((32, 32), {}),
    "qwen2_vl": ((64, 48), {}),
    # More than one window of attention.
    "qwen2_5_vl": ((160, 128), dict(vision_config=dict(window_size=112))),
    "qwen3_vl": ((64, 48), {}),
    "qwen3_5": ((64, 48), {}),
    "qwen3_5_moe": ((64, 48), {}),
    # llama.cpp's norm before the merger has the encoder's epsilon.
    "mistral3": ((64, 48), dict(text_config=dict(rms_norm_eps=1e-5))),
    "pixtral": ((56, 24), {}),
}
# Their lines end with [IMG_BREAK], whose embedding llama.cpp puts among the rows. Pixels of a side that become a row.
PIXTRAL, LINE_END = dict(mistral3=16, pixtral=8), 94
LIMITS = dict(f32=1e-3, f16=2e-3, q8_0=5e-2, adapter_f32=1e-3, logits=1e-3, adapter_logits=1e-3)
# Modules of encoders and language models that get an adapter.
TARGETS = r".*(language_model|text_model)\.layers\.\d+\..*\.(q_proj|down_proj)|.*(layers?|blocks)\.[01]\..*\.(q_proj|v_proj|qkv|fc2|linear_fc2)"
GEMMA4_TARGETS = r".*language_model\.layers\.\d+\..*\.(q_proj|down_proj)|.*vision_tower\..*layers\.[01]\..*\.(q_proj|v_proj)\.linear"


def build(sdist, folder):
    """Compiles libmtmd of a source distribution against the installed wheel's libraries."""
    import llama_cpp

    libraries = os.path.join(os.path.dirname(llama_cpp.__file__), "lib")
    top = os.path.abspath(os.path.join(sdist, "vendor/llama.cpp"))
    tools = os.path.join(top, "tools/mtmd")
    os.makedirs(folder, exist_ok=True)
    listed = re.search(r"add_library\(mtmd(.*?)\)", open(f"{tools}/CMakeLists.txt", encoding="utf-8").read(), re.S).group(1)
    sources = [os.path.join(tools, name) for name in listed.split() if name.endswith(".cpp")]
    sources += [f"{top}/vendor/hash/{name}" for name in ("hash.cpp", "sha256/sha256.c", "xxhash/xxhash.c")]
    include = [f"-I{top}/{place}" for place in ("tools/mtmd", "tools", "include", "ggml/include", "src", "vendor", "vendor/stb", "vendor/miniaudio", "vendor/hash", ".")]
    objects = []
    for number, source in enumerate(sources):
        objects.append(f"{folder}/{number}.o")
        compiler = ["g++", "-std=c++17"] if source.endswith(".cpp") else ["gcc"]
        subprocess.run([*compiler, "-O1", "-w", "-fPIC", "-DGGML_SHARED", "-DLLAMA_SHARED", *include, "-c", source, "-o", objects[-1]], check=True)
    link = ["-lllama", "-lggml", "-lggml-base", "-lggml-cpu", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["g++", "-shared", "-o", f"{folder}/libmtmd.so", *objects, *link], check=True)
    for name in objects:
        os.remove(name)


class Mtmd:
    """A GGUF file and its mmproj file in llama.cpp."""

    quiet = None

    def __init__(self, path, mmproj):
        import llama_cpp
        import llama_cpp.mtmd_cpp as mtmd

        self.lib, self.mtmd = llama_cpp.llama_cpp, mtmd
        if Mtmd.quiet is None:
            Mtmd.quiet = self.lib.llama_log_callback(lambda *_: None)
            self.lib.llama_log_set(Mtmd.quiet, None)
            mtmd.mtmd_log_set(Mtmd.quiet, None)
        self.model = self.given(self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params()), path)
        params = mtmd.mtmd_context_params_default()
        params.use_gpu, params.warmup, params.n_threads = False, False, 1
        # 0: no flash attention, which would work in f16.
        params.flash_attn_type = 0
        self.context = self.given(mtmd.mtmd_init_from_file(mmproj.encode(), self.model, params), mmproj)

    def given(self, pointer, what):
        if not pointer:
            raise ValueError(f"llama.cpp does not load {os.path.basename(what)}")
        return pointer

    def chunks(self, picture):
        """A text with the picture, `[height, width, 3]` in bytes."""
        mtmd = self.mtmd
        height, width, _ = picture.shape
        data = (ctypes.c_uint8 * picture.size).from_buffer_copy(picture.tobytes())
        bitmap = mtmd.mtmd_bitmap_init(width, height, data)
        text = mtmd.mtmd_input_text(TEXT.encode(), len(TEXT.encode()), False, True)
        chunks = mtmd.mtmd_input_chunks_init()
        bitmaps = (ctypes.c_void_p * 1)(bitmap)
        assert mtmd.mtmd_tokenize(self.context, chunks, ctypes.byref(text), bitmaps, 1) == 0
        return chunks

    def parts(self, chunks):
        """Tokens of text, and the number of rows of each tile of the picture."""
        mtmd, found = self.mtmd, []
        for at in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, at)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                count = ctypes.c_size_t()
                tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                found.append((chunk, [tokens[place] for place in range(count.value)]))
            else:
                found.append((chunk, mtmd.mtmd_input_chunk_get_n_tokens(chunk)))
        return found

    def rows(self, picture, width):
        """What the connector gives for each tile, `[rows, width]`."""
        import numpy as np

        chunks, tiles = self.chunks(picture), []
        for chunk, part in self.parts(chunks):
            if isinstance(part, int):
                assert self.mtmd.mtmd_encode_chunk(self.context, chunk) == 0
                numbers = self.mtmd.mtmd_get_output_embd(self.context)
                tiles.append(np.ctypeslib.as_array(numbers, (part, width)).copy())
        self.mtmd.mtmd_input_chunks_free(chunks)
        return tiles

    def logits(self, picture):
        """The logits behind the text, and its parts."""
        import numpy as np

        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 512, 512, 512, 1, 1
        params.type_k, params.type_v, params.flash_attn_type = 0, 0, 0
        context = self.given(self.lib.llama_init_from_model(self.model, params), "the context")
        chunks = self.chunks(picture)
        parts = [part for _, part in self.parts(chunks)]
        past = self.lib.llama_pos(0)
        assert self.mtmd.mtmd_helper_eval_chunks(self.context, context, chunks, 0, 0, 512, True, ctypes.byref(past)) == 0
        size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(context, -1), (size,)).copy()
        self.mtmd.mtmd_input_chunks_free(chunks)
        self.lib.llama_free(context)
        return logits, parts


def prepare(family, changes, folder):
    """The folder of a golden model, and an adapter on it with random values."""
    import peft
    import torch
    import transformers

    golden = family.removesuffix("_siglip")
    for source in (f"{ROOT}/tests/golden/vision/{golden}/model", f"{ROOT}/tests/golden/picture_chats/{golden}"):
        shutil.copytree(source, f"{folder}/model", dirs_exist_ok=True)
    if family != golden:
        with_siglip(f"{folder}/model")
    path = f"{folder}/model/config.json"
    config = json.load(open(path, encoding="utf-8"))
    for part, keys in changes.items():
        config[part] |= keys
    json.dump(config, open(path, "w", encoding="utf-8"))
    if family == "smolvlm":
        add_ends_of_lines(f"{folder}/model/tokenizer.json")
    model = load(folder)
    torch.manual_seed(5)
    targets = GEMMA4_TARGETS if family.startswith("gemma4") else TARGETS
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * (0.2 if "lora_B" in name else parameter.shape[1] ** -0.5))
    tuned.save_pretrained(f"{folder}/adapter")
    return config


def with_siglip(folder):
    """Makes a LLaVA whose encoder is SigLIP's."""
    import torch
    import transformers

    sys.path.append(f"{ROOT}/scripts/golden")
    import vision

    config = transformers.LlavaConfig.from_pretrained(folder)
    tower = transformers.SiglipVisionConfig(**vision.TOWER, vision_use_head=False)
    more = dict(image_token_index=config.image_token_index, vision_feature_layer=-1, vision_feature_select_strategy="full")
    config = transformers.LlavaConfig(text_config=config.text_config, vision_config=tower, **more)
    vision.scramble(transformers.LlavaForConditionalGeneration(config).to(torch.float32), 11).save_pretrained(folder)


def add_ends_of_lines(path):
    """Gives a tokenizer the tokens of one and two ends of lines, which llama.cpp looks up for SmolVLM."""
    settings = json.load(open(path, encoding="utf-8"))
    vocabulary = settings["model"]["vocab"]
    spare = [name for name in sorted(vocabulary, key=vocabulary.get) if name.isalpha()]
    for text, other in zip(("\n", "\n\n"), spare):
        id = vocabulary[text] = vocabulary[text] if text in vocabulary else vocabulary.pop(other)
        about = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        settings["added_tokens"].append(dict(id=id, content=text, **about))
    settings["added_tokens"].sort(key=lambda token: token["id"])
    json.dump(settings, open(path, "w", encoding="utf-8"))


def load(folder, adapter=False):
    import peft
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(f"{folder}/model", dtype="float32", attn_implementation="eager").eval()
    return peft.PeftModel.from_pretrained(model, f"{folder}/adapter").merge_and_unload() if adapter else model


def as_llama_cpp(model):
    """Gives a model llama.cpp's numerics where they are coarser, so that everything else can be compared closely: GELU from a table in
    float16, and a patch embedding whose pixels and weights are rounded to float16."""
    import torch

    class Gelu(torch.nn.Module):
        def forward(self, x):
            return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()))

    class Quick(torch.nn.Module):
        def forward(self, x):
            x = x.half().float()
            return (x * torch.sigmoid(1.702 * x)).half().float()

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            kind = type(child).__name__
            if "GELU" in kind:
                setattr(module, name, Quick() if "Quick" in kind else Gelu())
            # Gemma 4's patch embedding is a linear module.
            if isinstance(child, (torch.nn.Conv2d, torch.nn.Conv3d)) or name == "input_proj":
                child.weight.data = child.weight.data.half().float()
                child.register_forward_pre_hook(lambda _, given: (given[0].half().float(),))
    return model


def with_class_token_behind(model, family):
    """Puts the class token behind the patches, which then have the positions of their neighbours."""
    import torch

    if family == "llava":
        embeddings = next(module for module in model.modules() if type(module).__name__ == "CLIPVisionEmbeddings")

        def forward(pixel_values, **_):
            patches = embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
            own = embeddings.class_embedding.expand(len(patches), 1, -1)
            return torch.cat([patches, own], 1) + embeddings.position_embedding.weight

        embeddings.forward = forward
    if family == "internvl":
        embeddings = next(module for module in model.modules() if type(module).__name__ == "InternVLVisionEmbeddings")
        first = embeddings.forward

        def forward(*arguments, **named):
            positions, embeddings.position_embeddings = embeddings.position_embeddings, None
            out = first(*arguments, **named)
            embeddings.position_embeddings = positions
            out = torch.cat([out[:, 1:], out[:, :1]], 1) + positions
            # The class token is left out at the front.
            return torch.roll(out, 1, 1)

        embeddings.forward = forward
    return model


def pixels(family, picture, folder):
    """Tiles as a processor makes them of a picture whose size is right: `[tiles, 3, height, width]`."""
    import torch

    settings = json.load(open(f"{folder}/model/preprocessor_config.json", encoding="utf-8"))
    mean, std = (torch.tensor(settings[key])[:, None, None] for key in ("image_mean", "image_std"))
    whole = (torch.from_numpy(picture).permute(2, 0, 1).float() / 255 - mean) / std
    side = settings["max_image_size"]["longest_edge"] if family == "smolvlm" else None
    return whole.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4).flatten(0, 1) if side else whole[None]


def inputs(family, tiles, config):
    """What Transformers' model reads beside the ids."""
    import torch

    if family in PIXTRAL:
        return dict(pixel_values=tiles, image_sizes=torch.tensor([tiles.shape[-2:]]))
    if family.startswith("gemma4"):
        sys.path.append(f"{ROOT}/scripts/golden")
        import vision_models

        return vision_models.spread([tiles[0]])
    if not family.startswith("qwen"):
        return dict(pixel_values=tiles[None] if family == "smolvlm" else tiles)
    sys.path.append(f"{ROOT}/scripts/golden")
    import vision_models

    values, grid = vision_models.patches(tiles[0])
    return dict(pixel_values=values, image_grid_thw=torch.tensor([grid]))


def columns(family, given):
    """Rows of the connector in a line of the picture; 0 where lines do not end."""
    return int(given["image_sizes"][0, 1]) // PIXTRAL[family] if family in PIXTRAL else 0


def without_ends(rows, columns):
    """Rows without those of [IMG_BREAK]."""
    import numpy as np

    return np.delete(rows, slice(columns, None, columns + 1), 0) if columns else rows


def features(model, family, given):
    """Rows behind the connector, `[rows, width]`, those of inner blocks beside them."""
    import torch

    with torch.no_grad():
        out = model.model.get_image_features(**given, **(dict(return_dict=True)))
    rows = out.pooler_output if hasattr(out, "pooler_output") else out
    flat = lambda rows: torch.cat(list(rows)) if isinstance(rows, (tuple, list)) else rows.flatten(0, -2)
    return torch.cat([flat(rows), *map(flat, getattr(out, "deepstack_features", None) or [])], -1).numpy()


def behind(model, family, given, parts, config):
    """Transformers' logits behind the same tokens."""
    import torch

    token = config.get("image_token_id", config.get("image_token_index"))
    line = columns(family, given)
    shown = lambda count: [LINE_END if line and at % (line + 1) == line else token for at in range(count)]
    ids = torch.tensor([[id for part in parts for id in (part if isinstance(part, list) else shown(part))]])
    more = dict(given)
    if family == "gemma3":
        more |= dict(token_type_ids=(ids == token).long())
    if family.startswith(("qwen", "gemma4")):
        more |= dict(mm_token_type_ids=(ids == token).int())
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more).logits[0, -1].numpy()


def apart(own, theirs):
    return float(f"{abs(own - theirs).max() / abs(theirs).max():.2e}")


def check(family, tunesmith, folder):
    import numpy as np
    import torch

    torch.set_num_threads(1)
    (width, height), changes = FAMILIES[family]
    config = prepare(family, changes, folder)
    picture = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    tiles = pixels(family, picture, folder)
    given = inputs(family, tiles, config)

    def export(kind, adapter):
        own = ["export", "--base", f"{folder}/model", "--gguf", kind, "--pre-tokenizer", "gpt-2", "--overwrite", "--output", f"{folder}/m.gguf"]
        subprocess.run([tunesmith, *own, *(["--adapter", f"{folder}/adapter"] if adapter else [])], check=True, capture_output=True, text=True)
        return Mtmd(f"{folder}/m.gguf", f"{folder}/mmproj-m.gguf")

    result = dict(family=family)
    models = [as_llama_cpp(with_class_token_behind(load(folder, adapter), family)) for adapter in (False, True)]
    own, published = features(load(folder), family, given), features(as_llama_cpp(load(folder)), family, given)
    result["coarser"] = apart(published, own)
    for kind, adapter in (("f32", False), ("f16", False), ("q8_0", False), ("f32", True)):
        rows = features(models[adapter], family, given)
        # SmolVLM's picture as a whole, which follows its tiles, is resized: it is not compared.
        found = np.concatenate(export(kind, adapter).rows(picture, rows.shape[1])[: len(tiles)])
        found = without_ends(found, columns(family, given))
        result[("adapter_" if adapter else "") + kind] = apart(found, rows)
        if kind == "f32" and not adapter and family in ("llava", "internvl"):
            result["as_published"] = apart(found, published)
    result["adapter_changes"] = apart(features(models[1], family, given), features(models[0], family, given))
    if family == "smolvlm":
        # One tile, and then the same again as the whole.
        settings = json.load(open(f"{folder}/model/preprocessor_config.json", encoding="utf-8"))
        settings["size"]["longest_edge"] = 32
        json.dump(settings, open(f"{folder}/model/preprocessor_config.json", "w", encoding="utf-8"))
        picture = np.ascontiguousarray(picture[:32, :32])
        given = inputs(family, pixels(family, picture, folder).expand(2, -1, -1, -1), config)
    for adapter in (False, True):
        logits, parts = export("f32", adapter).logits(picture)
        result["adapter_logits" if adapter else "logits"] = apart(logits, behind(models[adapter], family, given, parts, config))
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunesmith", default=f"{ROOT}/target/release/tunesmith")
    parser.add_argument("--libmtmd", required=True, help="the folder with libmtmd.so")
    parser.add_argument("--build", help="compile libmtmd.so first, from this folder of the source distribution")
    parser.add_argument("--families", default=",".join(FAMILIES))
    args = parser.parse_args()
    if args.build:
        build(args.build, args.libmtmd)
        return
    os.environ["MTMD_CPP_LIB"] = os.path.abspath(args.libmtmd)
    bad = False
    for family in args.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = check(family, args.tunesmith, folder)
                bad |= any(result[name] > limit for name, limit in LIMITS.items()) or result["adapter_changes"] < 0.1
            except subprocess.CalledProcessError as error:
                result, bad = dict(family=family, error=error.stderr.strip()), True
            except ValueError as error:
                result, bad = dict(family=family, error=str(error)), True
            print(json.dumps(result), flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
