#!/usr/bin/env python3
"""Exports tiny random models of several families as GGUF and holds llama.cpp's greedy tokens against Transformers'.

    python3 -m venv llama && llama/bin/pip install cyllama==0.2.18 gguf==0.19.0 torch transformers peft
    llama/bin/python scripts/gguf_check.py [--tunesmith target/release/tunesmith] [--families llama,qwen2,gemma2,…]

For each family: 24 greedy tokens of three prompts from an f32 and an f16 file (equal), the share of equal tokens of q8_0 and q4_0, the tokens of a
few texts by llama.cpp's tokenizer (equal), 24 greedy tokens of the model with an adapter merged (equal), and the adapter as GGUF: llama.cpp
loads it, and base plus alpha / rank B A is the merged model. Prints a JSON line each; exits 1 if something that must be equal is not.
llama.cpp is that inside of cyllama, so that nothing is built.
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


def make(family, folder):
    """A random model with the tokenizer of the text goldens, and a random adapter on q, v and down."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(1)
    kind, more = FAMILIES[family]
    arguments = {key: value for key, value in (SIZES | more).items() if not (key == "head_dim" and value is None)}
    torch.manual_seed(7)
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if "norm" in name or name.endswith("bias") else 1.2 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn_like(parameter) * scale)
    model.save_pretrained(f"{folder}/model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{ROOT}/tests/golden/c/tokenizer_bpe_gpt2/{file}", f"{folder}/model/{file}")
    targets = ["qkv_proj", "down_proj"] if family == "phi3" else ["q_proj", "v_proj", "k_proj", "o_proj"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    tuned.save_pretrained(f"{folder}/adapter")
    prompts = [[5, 17, 300, 44], [9, 8, 7, 600, 21, 33, 100], list(range(10, 40))]

    def greedy(model):
        out = []
        with torch.no_grad():
            for prompt in prompts:
                ids = list(prompt)
                for _ in range(NEW):
                    ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
                out.append(ids[len(prompt):])
        return out

    return prompts, greedy(tuned), greedy(tuned.unload())


def llama_greedy(path, prompts):
    """24 greedy tokens of each prompt, and the tokens of TEXTS, by llama.cpp."""
    import cyllama.llama.llama_cpp as cpp

    cpp.disable_logging()
    cpp.ggml_backend_load_all()
    model = cpp.LlamaModel(path, cpp.LlamaModelParams())
    out = []
    for prompt in prompts:
        params = cpp.LlamaContextParams()
        params.n_ctx = 256
        context = cpp.LlamaContext(model, params)
        sampler = cpp.LlamaSampler(cpp.LlamaSamplerChainParams())
        sampler.add_greedy()
        ids, given, past = [], list(prompt), 0
        for _ in range(NEW):
            context.decode(cpp.llama_batch_get_one(given, past))
            past += len(given)
            given = [sampler.sample(context, -1)]
            ids += given
        out.append(ids)
    vocabulary = model.get_vocab()
    return out, [list(vocabulary.tokenize(text, False, True)) for text in TEXTS]


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
            prompts, tuned, plain = make(family, folder)
            result = dict(family=family)

            def export(*more):
                subprocess.run([args.tunesmith, "export", "--base", f"{folder}/model", *more], check=True, capture_output=True, text=True)

            try:
                for kind in ("f32", "f16", "q8_0", "q4_0"):
                    path = f"{folder}/{kind}.gguf"
                    export("--gguf", kind, "--output", path)
                    got, texts = llama_greedy(path, prompts)
                    equal = sum(a == b for x, y in zip(got, plain) for a, b in zip(x, y)) / (len(prompts) * NEW)
                    result[kind] = equal
                    bad |= kind in ("f32", "f16") and equal < 1
                result["tokens"] = texts == wanted_texts
                export("--adapter", f"{folder}/adapter", "--gguf", "f32", "--output", f"{folder}/merged.gguf")
                result["merged"] = llama_greedy(f"{folder}/merged.gguf", prompts)[0] == tuned
                export("--adapter", f"{folder}/adapter", "--gguf", "f32", "--adapter-only", "--output", f"{folder}/lora.gguf")
                result["adapter_difference"] = adapter_fits(*(f"{folder}/{name}.gguf" for name in ("f32", "lora", "merged")))
                bad |= not (result["tokens"] and result["merged"] and result["adapter_difference"] < 1e-5)
            except subprocess.CalledProcessError as error:
                result["error"], bad = error.stderr.strip(), True
            print(json.dumps(result), flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
