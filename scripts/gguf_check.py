#!/usr/bin/env python3
"""Exports tiny models of twelve families as GGUF and holds llama.cpp's greedy tokens against Transformers'.

    python3 -m venv llama && llama/bin/pip install cyllama==0.2.18 gguf==0.19.0 torch transformers peft
    PYTHON=llama/bin/python just gguf-check [--families llama,qwen2,gemma2,…]

Each model is first taught three texts by heart, and its adapter three others: a model with random weights has nearly equal logits, of which
rounding alone picks another than Transformers does. For each family: 24 greedy tokens of three prompts from f32, f16, q8_0 and q4_0 files, and from
f32 and f16 files with the adapter merged; the tokens of a few texts by llama.cpp's tokenizer; and the adapter as GGUF: llama.cpp loads it, and
base plus alpha / rank B A is the merged model. llama.cpp keeps keys and values in f32 here.

Prints a JSON line each: for each file `equal`, the share of equal tokens, `logits`, the largest difference of a logit on the texts that Transformers
wrote, and `margin`, the smallest lead of a best token over the second. Exits 1 if tokens differ (but for q4_0, which is coarse), or logits of f32 do by
more than 1e-3. llama.cpp is that inside of cyllama, so that nothing is built.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NEW = 24
PROMPT = 12
TEXTS = ["Hello, world! It's 3.14 o'clock.", "  two  spaces\n\nand lines\t1234567", "Größe 漢字 🙂", "a_b-c/d"]

SIZES = dict(
    vocab_size=640, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=256, bos_token_id=None, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
)
ROPE = dict(rope_theta=10000.0, rope_type="default")
LLAMA3 = dict(rope_theta=10000.0, rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
FAMILIES = {
    "llama": ("LlamaConfig", dict(rope_parameters=LLAMA3)),
    "mistral": ("MistralConfig", dict(sliding_window=None)),
    "qwen2": ("Qwen2Config", dict(head_dim=None)),
    "qwen3": ("Qwen3Config", dict(head_dim=32)),
    "gemma2": ("Gemma2Config", dict(query_pre_attn_scalar=16, sliding_window=16, tie_word_embeddings=True)),
    "gemma3": ("Gemma3TextConfig", dict(query_pre_attn_scalar=16, sliding_window=16, num_hidden_layers=6, tie_word_embeddings=True)),
    "phi3": ("Phi3Config", dict(head_dim=None, original_max_position_embeddings=256)),
    "olmo2": ("Olmo2Config", dict(head_dim=None)),
    "granite": ("GraniteConfig", dict(head_dim=None, embedding_multiplier=2.0, residual_multiplier=0.7, logits_scaling=2.0, attention_multiplier=0.2)),
    "smollm3": ("SmolLM3Config", dict(head_dim=None, num_hidden_layers=4)),
    "mixtral": ("MixtralConfig", dict(head_dim=None, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[])),
}


def learn(model, texts, steps, rate):
    """Trains what can be trained until the texts are known by heart."""
    import torch

    ids = torch.tensor(texts)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=rate, weight_decay=0.0)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def make(family, folder):
    """A model with the tokenizer of the text goldens, an adapter for it, the prompts, and what both say of them: tokens and logits."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(1)
    kind, more = FAMILIES[family]
    arguments = {key: value for key, value in (SIZES | more).items() if not (key == "head_dim" and value is None)}
    torch.manual_seed(7)
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        # So that no bias, norm or new factor is what it is by default.
        for name, parameter in model.named_parameters():
            scale = 0.2 if "norm" in name or name.endswith("bias") else 0.3 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn_like(parameter) * scale)
    draws = torch.randint(3, 640, (2, 3, PROMPT + NEW), generator=torch.Generator().manual_seed(3))
    draws[1, :, :PROMPT] = draws[0, :, :PROMPT]
    learn(model, draws[0].tolist(), 120, 5e-3)
    model.eval()
    model.save_pretrained(f"{folder}/model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{ROOT}/tests/golden/c/tokenizer_bpe_gpt2/{file}", f"{folder}/model/{file}")
    prompts = draws[0, :, :PROMPT].tolist()

    def greedy(model):
        out = []
        with torch.no_grad():
            for prompt in prompts:
                ids, logits = list(prompt), []
                for _ in range(NEW):
                    logits.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].numpy())
                    ids.append(int(logits[-1].argmax()))
                out.append((ids[len(prompt):], logits))
        return out

    plain = greedy(model)
    targets = ["qkv_proj", "down_proj"] if family == "phi3" else ["q_proj", "v_proj", "k_proj", "o_proj"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=6, use_rslora=True, target_modules=targets, task_type="CAUSAL_LM"))
    learn(tuned, draws[1].tolist(), 200, 2e-2)
    tuned.eval()
    tuned.save_pretrained(f"{folder}/adapter")
    return prompts, plain, greedy(tuned)


def compare(path, prompts, wanted):
    """How llama.cpp's greedy tokens and logits compare with those wanted, and the tokens of TEXTS."""
    import cyllama.llama.llama_cpp as cpp
    import numpy as np

    class Model(cpp.LlamaModel):
        """With what cyllama's logits ask a model for, and none of this version has."""

        @property
        def n_vocab(self):
            return self.get_vocab().n_vocab

    cpp.disable_logging()
    cpp.ggml_backend_load_all()
    model = Model(path, cpp.LlamaModelParams())

    def walk(prompt, follow):
        """24 tokens, each the best one or the one to follow, and the logits before each."""
        params = cpp.LlamaContextParams()
        params.n_ctx, params.n_threads, params.n_threads_batch = 256, 2, 2
        # 0: GGML_TYPE_F32. Flash attention would work in f16.
        params.type_k, params.type_v, params.flash_attn_type = 0, 0, 0
        context = cpp.LlamaContext(model, params)
        ids, logits, given, past = [], [], list(prompt), 0
        for at in range(NEW):
            context.decode(cpp.llama_batch_get_one(given, past))
            past += len(given)
            logits.append(np.array(context.get_logits_ith(-1), dtype=np.float32))
            given = [int(logits[-1].argmax()) if follow is None else follow[at]]
            ids += given
        return ids, logits

    equal, difference, margin = 0, 0.0, float("inf")
    for prompt, (tokens, logits) in zip(prompts, wanted):
        equal += sum(a == b for a, b in zip(walk(prompt, None)[0], tokens))
        for own, theirs in zip(walk(prompt, tokens)[1], logits):
            difference = max(difference, float(abs(own[: len(theirs)] - theirs).max()))
            second, first = np.partition(theirs, -2)[-2:]
            margin = min(margin, float(first - second))
    vocabulary = model.get_vocab()
    found = dict(equal=round(equal / (len(prompts) * NEW), 3), logits=float(f"{difference:.2e}"), margin=round(margin, 3))
    return found, [list(vocabulary.tokenize(text, False, True)) for text in TEXTS]


def adapter_fits(base, adapter, merged):
    """Whether llama.cpp loads the adapter, and how far base + alpha / rank B A is from the merged model."""
    import cyllama.llama.llama_cpp as cpp
    import gguf

    cpp.disable_logging()
    cpp.ggml_backend_load_all()
    model = cpp.LlamaModel(base, cpp.LlamaModelParams())
    model.lora_adapter_init(adapter)
    files = [gguf.GGUFReader(path) for path in (base, adapter, merged)]
    plain, low, whole = ({tensor.name: tensor.data.astype("float64") for tensor in file.tensors} for file in files)
    alpha = float(files[1].fields["adapter.lora.alpha"].contents())
    most = 0.0
    for name, value in plain.items():
        if f"{name}.lora_a" in low:
            a, b = low[f"{name}.lora_a"], low[f"{name}.lora_b"]
            value = value + alpha / a.shape[0] * b @ a
        most = max(most, float(abs(value - whole[name]).max()))
    return most


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunesmith", default=f"{ROOT}/target/release/tunesmith")
    parser.add_argument("--families", default=",".join(FAMILIES))
    args = parser.parse_args()
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{ROOT}/tests/golden/c/tokenizer_bpe_gpt2/tokenizer.json")
    wanted_texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    bad = False
    for family in args.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            prompts, plain, tuned = make(family, folder)
            result = dict(family=family)

            def export(*more):
                subprocess.run([args.tunesmith, "export", "--base", f"{folder}/model", *more], check=True, capture_output=True, text=True)

            try:
                for kind in ("f32", "f16", "q8_0", "q4_0"):
                    path = f"{folder}/{kind}.gguf"
                    export("--gguf", kind, "--output", path)
                    result[kind], texts = compare(path, prompts, plain)
                    bad |= kind != "q4_0" and result[kind]["equal"] < 1
                    result["tokens"] = texts == wanted_texts
                    bad |= not result["tokens"]
                for kind in ("f32", "f16"):
                    path = f"{folder}/merged-{kind}.gguf"
                    export("--adapter", f"{folder}/adapter", "--gguf", kind, "--output", path)
                    result[f"merged_{kind}"], _ = compare(path, prompts, tuned)
                    bad |= result[f"merged_{kind}"]["equal"] < 1
                bad |= max(result[kind]["logits"] for kind in ("f32", "merged_f32")) > 1e-3
                result["answers_differ"] = sum(a != b for (x, _), (y, _) in zip(plain, tuned) for a, b in zip(x, y))
                export("--adapter", f"{folder}/adapter", "--gguf", "f32", "--adapter-only", "--output", f"{folder}/lora.gguf")
                result["adapter_difference"] = adapter_fits(*(f"{folder}/{name}.gguf" for name in ("f32", "lora", "merged-f32")))
                bad |= result["adapter_difference"] > 1e-5
            except subprocess.CalledProcessError as error:
                result["error"], bad = error.stderr.strip(), True
            print(json.dumps(result), flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
