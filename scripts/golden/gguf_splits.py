"""Writes tests/golden/gguf/splits.json: the tokens of llama.cpp for tokenizers that split text by the rules of published ones.

    pip install llama-cpp-python==0.3.36 gguf==0.19.0 tokenizers==0.23.3 numpy safetensors
    python scripts/golden/gguf_splits.py tests/golden/gguf/splits.json
    python scripts/golden/gguf_splits.py --tunesmith target/release/tunesmith    # compares the files that tunesmith exports, and writes nothing

The tokenizers have one small vocabulary each for bytes and for pieces. Its merges cross the borders of words, so that tokens show where a text is
split. `cases` has for each rule: a family whose models have it, what its published tokenizer.json defines, llama.cpp's name, and llama.cpp's tokens
of `texts`. `differing` are the numbers of the texts of which the package tokenizers makes other tokens: llama.cpp's expressions know no combining
marks and no capitals but Latin ones. `fuzzed` counts such texts among 3,000.
"""
import argparse
import copy
import ctypes
import json
import os
import random
import subprocess
import tempfile

import gguf
import llama_cpp.llama_cpp as lib
import numpy as np
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

STORED, FUZZED, SIZE = 120, 3000, 1400
GPT2 = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
BYTES = dict(GPT2, use_regex=False)
DIGITS = dict(type="Digits", individual_digits=True)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FRONT = r"[^\r\n\p{L}\p{N}]?"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = rf"{FRONT}{UPPER}*{LOWER}+{SHORT}|{FRONT}{UPPER}+{LOWER}*{SHORT}|\p{{N}}{{1,3}}|{REST}"
TEKKEN = rf"{FRONT}{UPPER}*{LOWER}+|{FRONT}{UPPER}+{LOWER}*|\p{{N}}|{REST}"
# With line breaks instead of escapes, as the published files have them.
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n"
    + r"]*|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+",
]
SEED = (
    LLAMA3.replace("{1,3}", "{1}").replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+").replace(r"\r\n", "\r\n")
)


def splits(*patterns, keeps_matches=False):
    """Expressions one after the other, then bytes. `keeps_matches`: in the form that converted tiktoken files have."""
    how = dict(behavior="Removed", invert=True) if keeps_matches else dict(behavior="Isolated", invert=False)
    parts = [dict(type="Split", pattern=dict(Regex=pattern), **how) for pattern in patterns]
    return dict(type="Sequence", pretokenizers=parts + [BYTES])


# A golden model, the definition, whether words are taken whole (`ignore_merges`), and llama.cpp's name.
CASES = [
    ("llama", GPT2, False, "gpt-2"),
    ("llama", dict(type="Sequence", pretokenizers=[DIGITS, GPT2]), False, "smollm"),
    ("granite", dict(type="Sequence", pretokenizers=[DIGITS, GPT2]), False, "refact"),
    ("qwen2", splits(QWEN2), False, "qwen2"),
    ("hunyuan_v1_dense", splits(QWEN2), False, "hunyuan"),
    ("hunyuan_v1_dense", splits(*DEEPSEEK3), False, "hunyuan-dense"),
    ("deepseek_v3", splits(*DEEPSEEK3), False, "deepseek-v3"),
    ("llama", splits(LLAMA3), True, "llama-bpe"),
    ("glm4", splits(LLAMA3), True, "glm4"),
    ("granitemoehybrid", splits(LLAMA3, keeps_matches=True), False, "dbrx"),
    ("qwen2", splits(QWEN35), False, "qwen35"),
    ("seed_oss", splits(SEED), False, "seed-coder"),
    ("llama", splits(GPT4O), False, "gpt-4o"),
    ("minimax_m2", splits(GPT4O, keeps_matches=True), False, "minimax-m2"),
    ("nemotron_h", splits(TEKKEN), True, "tekken"),
    # All words can be merged, so whether they are taken whole makes no difference.
    ("nemotron_h", splits(TEKKEN), False, "tekken"),
    ("gemma4_31b", dict(type="Split", pattern=dict(String=" "), behavior="MergedWithPrevious", invert=False), False, "gemma4"),
]

SOURCES = [
    "Hello, world! It's 3.14 o'clock, I'll WE'VE they'Re HTMLParser camelCase XMLHttpRequest",
    "  two  spaces\n\nand lines\t1234567\r\n\r\n  x  ",
    "Größe ÉCOLE École ÜBER übEr straße İstanbul ǅ",
    "漢字かなカナ日本語123中文",
    "🙂👍🏽🚀 (normal) 😶\u200d🌫️",
    "नमस्ते दुनिया भाषा é a\u0301b\u0308 กำลังทำ",
    "слово СЛОВО Слово СлОвО",
    "a_b-c/d [x](y) {z} <t> \\path //comment /* c */",
    "def f(x):\n    return x+1\n\tif y:\n\n\n\n",
    "½ ² Ⅷ ٣٤٥ １２３",
    "العربية 123 עברית",
    "!!!???...---===",
    "\u00a0nb\u2003em\u3000",
    "ʰˢ ªº ˈ 'S 'T x'y''z",
]


def texts(count, seed):
    """Random pieces of the sources, joined."""
    draw = random.Random(seed)
    pieces = [text[at : at + size] for text in SOURCES for at in range(len(text)) for size in (1, 2, 4, 8) if at + size <= len(text)]
    return ["".join(draw.choice(pieces) for _ in range(draw.randint(1, 8))) for _ in range(count)]


def of_bytes():
    """tokenizer.json of bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts(4000, 1) + SOURCES * 50, trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=alphabet, show_progress=False))
    return json.loads(made.to_str())


def of_pieces():
    """tokenizer.json of pieces with spaces as `▁`, as Gemma's."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    # No piece joins line breaks and other letters.
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    hexes = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|channel>", "<turn|>"]
    lines = ["\n" * size for size in (2, 3, 4)] * 50
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=special + hexes, limit_alphabet=120, show_progress=False)
    made.train_from_iterator(texts(4000, 1) + SOURCES * 50 + lines, trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in hexes]
    return data


def tokenizer(bases, definition, whole_words):
    """The tokenizer.json of a case."""
    data = copy.deepcopy(bases["pieces" if definition["type"] == "Split" else "bytes"])
    data["pre_tokenizer"] = definition
    data["model"]["ignore_merges"] = whole_words
    if whole_words:
        # Words that no merge makes.
        data["model"]["merges"] = [merge for at, merge in enumerate(data["model"]["merges"]) if at % 3]
    return data


def write(path, data, name):
    """A GGUF file of the vocabulary alone."""
    writer = gguf.GGUFWriter(path, "llama")
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    added = {token["content"] for token in data["added_tokens"]}
    kind = lambda token: 3 if token in added else 6 if name == "gemma4" and token.startswith("<0x") else 1
    writer.add_tokenizer_model("gemma4" if name == "gemma4" else "gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([kind(token) for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]])
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


QUIET = lib.llama_log_callback(lambda *_: None)


class Vocabulary:
    """The tokenizer of a GGUF file in llama.cpp."""

    def __init__(self, path):
        lib.llama_log_set(QUIET, None)
        params = lib.llama_model_default_params()
        params.vocab_only = True
        self.model = lib.llama_model_load_from_file(path.encode(), params)
        assert self.model, path
        self.vocabulary = lib.llama_model_get_vocab(self.model)

    def tokens(self, text):
        data, room = text.encode(), (ctypes.c_int32 * 512)()
        return list(room[0 : lib.llama_tokenize(self.vocabulary, data, len(data), room, 512, False, True)])


def small_model(folder):
    """A Llama of one block for the vocabularies, which differ in nothing else."""
    from safetensors.numpy import save_file

    width, inner = 32, 32
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=SIZE, hidden_size=width, intermediate_size=inner, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=True, hidden_act="silu",
    )
    shapes = {"model.embed_tokens": (SIZE, width), "model.norm": (width,)}
    block = "model.layers.0"
    shapes |= {f"{block}.{name}": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"{block}.self_attn.{name}_proj": (width, width) for name in "qkvo"}
    shapes |= {f"{block}.mlp.gate_proj": (inner, width), f"{block}.mlp.up_proj": (inner, width), f"{block}.mlp.down_proj": (width, inner)}
    json.dump(config, open(f"{folder}/config.json", "w", encoding="utf-8"))
    save_file({f"{name}.weight": np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}, f"{folder}/model.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?")
    parser.add_argument("--tunesmith")
    args = parser.parse_args()
    bases = dict(bytes=of_bytes(), pieces=of_pieces())
    stored, fuzzed = texts(STORED, 5), texts(FUZZED, 6)
    cases = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as results:
        small_model(folder)
        for family, definition, whole_words, name in CASES:
            data = tokenizer(bases, definition, whole_words)
            with open(f"{folder}/tokenizer.json", "w", encoding="utf-8") as file:
                json.dump(data, file)
            path = f"{results}/{len(cases)}.gguf"
            if args.tunesmith:
                # The small model is a Llama, so the names for other families are their equals.
                named = ["--pre-tokenizer", name] if name == "gemma4" else []
                subprocess.run([args.tunesmith, "export", "--base", folder, "--gguf", "f16", *named, "--output", path], check=True, stdout=subprocess.DEVNULL)
            else:
                write(path, data, name)
            own, llama = Tokenizer.from_file(f"{folder}/tokenizer.json"), Vocabulary(path)
            differs = lambda text: own.encode(text, add_special_tokens=False).ids != llama.tokens(text)
            case = dict(family=family, name=name, pre_tokenizer=definition, ignore_merges=whole_words)
            case |= dict(fuzzed=sum(map(differs, fuzzed)), differing=[at for at, text in enumerate(stored) if differs(text)])
            print(family, name, f"differing: {case['fuzzed']} of {FUZZED}", flush=True)
            cases.append(case | dict(ids=[llama.tokens(text) for text in stored]))
    if args.output:
        line = lambda value: json.dumps(value, ensure_ascii=False)
        with open(args.output, "w", encoding="utf-8") as file:
            file.write('{"tokenizers": ' + line(tokenizers.__version__) + ',\n"bases": {\n')
            file.write(",\n".join(f"{line(name)}: {line(base)}" for name, base in bases.items()) + '\n},\n"texts": ' + line(stored))
            file.write(',\n"cases": [\n' + ",\n".join(map(line, cases)) + "\n]}\n")


if __name__ == "__main__":
    main()
