#!/usr/bin/env python3
"""Trains the quickstart model's tokenizer (byte-level BPE, 1024 tokens) on its corpus and writes the files that a
Hugging Face model folder holds beside the weights: tokenizer.json, tokenizer_config.json, config.json.

    pip install tokenizers==0.23.3
    python3 make_tokenizer.py --corpus corpus.jsonl --out model
"""
import argparse
import json
import os

VOCABULARY = 1024
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# GPT-2's split but for two things that help a small model to copy: digits stand alone (19:30 is always five tokens), and
# a capitalised word doesn't take the space before it (a name has the same tokens after a space and after a quotation mark).
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{Ll}+|\p{Lu}\p{L}*|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# What every tokenizer of a chat model has seen often, and the corpus has not: role words and the punctuation of data.
COMMON = ["system user assistant", '{"a":"b","c":1,"d":null,"e":["f","g"]}', "[1,2] (a) b; c: d"] * 2000

CHAT_TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}
{{- message.content + '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 512,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "chat_template": CHAT_TEMPLATE,
}


def texts(path):
    """What the corpus's people say, without the chat's frame."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            for message in json.loads(line)["messages"]:
                yield message["content"]


def write(value, *path):
    with open(os.path.join(*path), "w", encoding="utf-8") as out:
        json.dump(value, out, indent=2)
        out.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise SystemExit("make_tokenizer.py needs the Python package tokenizers: pip install tokenizers==0.23.3") from None
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*COMMON, *texts(args.corpus)], trainer)
    os.makedirs(args.out, exist_ok=True)
    tokenizer.save(os.path.join(args.out, "tokenizer.json"))
    write(TOKENIZER_CONFIG, args.out, "tokenizer_config.json")
    write(CONFIG, args.out, "config.json")


if __name__ == "__main__":
    main()
