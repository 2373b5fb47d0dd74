#!/usr/bin/env python3
"""Exports tiny models of all families as GGUF and compares llama.cpp's greedy tokens with those of Transformers.

    python3 -m venv llama && llama/bin/pip install xllamacpp==2026.10.11549 cffi torch transformers peft
    PYTHON=llama/bin/python just gguf-check [--families llama,qwen2,gemma2,…]

Each model is first overfitted on three texts, and its adapter on three others. With random weights, logits are nearly equal, and rounding
decides between tokens. For each family, the check compares:

- 24 greedy tokens of three prompts from f32, f16, q8_0 and q4_0 files
- the same from f32 and f16 files with the adapter merged, and from the f32 file with the adapter's own file (f32, f16)
- `tunesmith infer` with that adapter
- the tokens of a few texts by llama.cpp's tokenizer

llama.cpp stores keys and values in f32 here. It is the library inside xllamacpp, whose C functions are called, so nothing is built.

Prints a JSON line per family. For each file, `equal` is the share of equal tokens. `logits` is the largest difference of a logit on the texts
that Transformers wrote. `margin` is the smallest lead of a best token over the second. Exits 1 if tokens differ (except for q4_0, which is
coarse), or if logits of f32 differ by more than 1e-3. The limit is 0.02 for the Gemmas, whose GELU llama.cpp reads from a table in f16.
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
YARN = dict(rope_theta=10000.0, rope_type="yarn", factor=8.0, original_max_position_embeddings=32)
FAMILIES = {
    "llama": ("LlamaConfig", dict(rope_parameters=LLAMA3)),
    "mistral": ("MistralConfig", dict(sliding_window=None)),
    "qwen2": ("Qwen2Config", dict(head_dim=None)),
    "qwen3": ("Qwen3Config", dict(head_dim=32)),
    "gemma": ("GemmaConfig", dict(tie_word_embeddings=True)),
    "gemma2": ("Gemma2Config", dict(query_pre_attn_scalar=16, sliding_window=16, tie_word_embeddings=True)),
    "gemma3": ("Gemma3TextConfig", dict(query_pre_attn_scalar=16, sliding_window=16, num_hidden_layers=6, tie_word_embeddings=True)),
    "phi3": ("Phi3Config", dict(head_dim=None, original_max_position_embeddings=256)),
    "olmo2": ("Olmo2Config", dict(head_dim=None)),
    "olmo3": (
        "Olmo3Config",
        dict(head_dim=None, sliding_window=16, num_hidden_layers=4, rope_parameters=dict(full_attention=YARN, sliding_attention=ROPE)),
    ),
    "granite": ("GraniteConfig", dict(head_dim=None, embedding_multiplier=2.0, residual_multiplier=0.7, logits_scaling=2.0, attention_multiplier=0.2)),
    "smollm3": ("SmolLM3Config", dict(head_dim=None, num_hidden_layers=4)),
    "mixtral": ("MixtralConfig", dict(head_dim=None, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        dict(head_dim=None, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96, mlp_only_layers=[]),
    ),
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[])),
}


def tokenizer():
    import tokenizers

    return tokenizers.Tokenizer.from_file(f"{ROOT}/tests/golden/c/tokenizer_bpe_gpt2/tokenizer.json")


def whole_words():
    """The tokens that are a space and a word. A sequence of them stays the same after decoding and encoding."""
    coder = tokenizer()
    texts = {token: coder.decode([token]) for token in range(3, coder.get_vocab_size())}
    fits = lambda token, text: text[:1] == " " and text[1:].isalpha() and coder.encode(text, add_special_tokens=False).ids == [token]
    return [token for token, text in texts.items() if fits(token, text)]


def learn(model, texts, steps, rate):
    """Trains until the texts are overfitted."""
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
    """A model with the tokenizer of the text goldens, an adapter, the prompts, and the tokens and logits of both."""
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
        # No bias, norm or new factor has its default value.
        for name, parameter in model.named_parameters():
            scale = 0.2 if "norm" in name or name.endswith("bias") else 0.3 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn_like(parameter) * scale)
    words = torch.tensor(whole_words())
    draws = words[torch.randint(len(words), (2, 3, PROMPT + NEW), generator=torch.Generator().manual_seed(3))]
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


# The used part of llama.h, in the version above. Unused pointers are `void *`.
HEADER = """
struct llama_model_params {
    void *devices, *tensor_buft_overrides; int32_t n_gpu_layers, split_mode, load_mode, lazy_mode, main_gpu;
    void *tensor_split, *progress_callback, *progress_callback_user_data, *kv_overrides;
    bool vocab_only, check_tensors, use_extra_bufts, no_host, no_alloc, load_mtp;
};
struct llama_context_params {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq; int32_t n_threads, n_threads_batch;
    int32_t ctx_type, rope_scaling_type, pooling_type, attention_type, flash_attn_type;
    float rope_freq_base, rope_freq_scale, yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow;
    uint32_t yarn_orig_ctx; float defrag_thold; void *cb_eval, *cb_eval_user_data; int32_t type_k, type_v; size_t moe_cache_size;
    void *abort_callback, *abort_callback_data; bool embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified;
    void *samplers; size_t n_samplers; void *ctx_other;
};
struct llama_batch { int32_t n_tokens; int32_t *token; float *embd; int32_t *pos, *n_seq_id, **seq_id; int8_t *logits; };
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
void llama_log_set(void (*)(int, const char *, void *), void *);
void *llama_model_load_from_file(const char *, struct llama_model_params);
void *llama_model_get_vocab(void *);
int32_t llama_vocab_n_tokens(void *);
int32_t llama_tokenize(void *, const char *, int32_t, int32_t *, int32_t, bool, bool);
void *llama_init_from_model(void *, struct llama_context_params);
void llama_free(void *);
void *llama_adapter_lora_init(void *, const char *);
int32_t llama_set_adapters_lora(void *, void **, size_t, float *);
struct llama_batch llama_batch_get_one(int32_t *, int32_t);
int32_t llama_decode(void *, struct llama_batch);
float *llama_get_logits_ith(void *, int32_t);
"""


class Llama:
    """A GGUF file in llama.cpp, with an adapter if one is named."""

    def __init__(self, path, adapter=None):
        import cffi
        import xllamacpp.xllamacpp

        self.ffi = cffi.FFI()
        self.ffi.cdef(HEADER)
        self.lib = self.ffi.dlopen(xllamacpp.xllamacpp.__file__)
        params = self.lib.llama_context_default_params()
        assert (params.n_ctx, params.type_k, params.ctx_other) == (512, 1, self.ffi.NULL), "another llama.cpp than the header is of"
        self.quiet = self.ffi.callback("void(int, const char *, void *)", lambda *_: None)
        self.lib.llama_log_set(self.quiet, self.ffi.NULL)
        self.model = self.given(self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params()), path)
        self.vocabulary = self.lib.llama_model_get_vocab(self.model)
        self.adapter = self.given(self.lib.llama_adapter_lora_init(self.model, adapter.encode()), adapter) if adapter else None

    def given(self, pointer, what):
        if pointer == self.ffi.NULL:
            raise ValueError(f"llama.cpp does not load {os.path.basename(what)}")
        return pointer

    def tokens(self, text):
        data, room = text.encode(), self.ffi.new("int32_t[]", 256)
        return list(room[0 : self.lib.llama_tokenize(self.vocabulary, data, len(data), room, 256, False, True)])

    def walk(self, prompt, follow=None):
        """24 tokens and the logits before each. Each token is the best one, or the given one."""
        import numpy as np

        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
        # 0: GGML_TYPE_F32. Flash attention would work in f16.
        params.type_k, params.type_v, params.flash_attn_type = 0, 0, 0
        context = self.given(self.lib.llama_init_from_model(self.model, params), "the context")
        if self.adapter:
            adapters, scales = self.ffi.new("void *[]", [self.adapter]), self.ffi.new("float[]", [1.0])
            assert self.lib.llama_set_adapters_lora(context, adapters, 1, scales) == 0
        ids, rows, given = [], [], list(prompt)
        for at in range(NEW):
            room = self.ffi.new("int32_t[]", given)
            assert self.lib.llama_decode(context, self.lib.llama_batch_get_one(room, len(given))) == 0
            logits = self.lib.llama_get_logits_ith(context, -1)
            size = self.lib.llama_vocab_n_tokens(self.vocabulary)
            rows.append(np.frombuffer(self.ffi.buffer(logits, 4 * size), dtype=np.float32).copy())
            given = [int(rows[-1].argmax()) if follow is None else follow[at]]
            ids += given
        self.lib.llama_free(context)
        return ids, rows


def compare(llama, prompts, wanted):
    """Compares llama.cpp's greedy tokens and logits with the expected ones."""
    import numpy as np

    equal, difference, margin = 0, 0.0, float("inf")
    for prompt, (tokens, logits) in zip(prompts, wanted):
        equal += sum(a == b for a, b in zip(llama.walk(prompt)[0], tokens))
        for own, theirs in zip(llama.walk(prompt, tokens)[1], logits):
            difference = max(difference, float(abs(own[: len(theirs)] - theirs).max()))
            second, first = np.partition(theirs, -2)[-2:]
            margin = min(margin, float(first - second))
    return dict(equal=round(equal / (len(prompts) * NEW), 3), logits=float(f"{difference:.2e}"), margin=round(margin, 3))


def answers_equal(tunesmith, folder, prompts, wanted):
    """Whether `tunesmith infer` with the adapter gives the expected texts."""
    coder = tokenizer()
    with open(f"{folder}/prompts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(dict(prompt=coder.decode(prompt))) + "\n" for prompt in prompts)
    ask = ["infer", "--model", f"{folder}/model", "--adapter", f"{folder}/adapter", "--raw", f"gen.max_new_tokens={NEW}"]
    files = ["--in", f"{folder}/prompts.jsonl", "--out", f"{folder}/answers.jsonl"]
    subprocess.run([tunesmith, *ask, *files], check=True, capture_output=True, text=True)
    answers = [json.loads(line)["answer"] for line in open(f"{folder}/answers.jsonl", encoding="utf-8")]
    return answers == [coder.decode(tokens) for tokens, _ in wanted]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunesmith", default=f"{ROOT}/target/release/tunesmith")
    parser.add_argument("--families", default=",".join(FAMILIES))
    args = parser.parse_args()
    coder = tokenizer()
    wanted_texts = [coder.encode(text, add_special_tokens=False).ids for text in TEXTS]
    bad = False
    for family in args.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            prompts, plain, tuned = make(family, folder)
            result = dict(family=family)

            def export(*more):
                subprocess.run([args.tunesmith, "export", "--base", f"{folder}/model", *more], check=True, capture_output=True, text=True)

            try:
                result["infer"] = answers_equal(args.tunesmith, folder, prompts, tuned)
                for kind in ("f32", "f16", "q8_0", "q4_0"):
                    export("--gguf", kind, "--output", f"{folder}/{kind}.gguf")
                    llama = Llama(f"{folder}/{kind}.gguf")
                    result[kind] = compare(llama, prompts, plain)
                    result["tokens"] = result.get("tokens", True) and [llama.tokens(text) for text in TEXTS] == wanted_texts
                for kind in ("f32", "f16"):
                    export("--adapter", f"{folder}/adapter", "--gguf", kind, "--output", f"{folder}/merged-{kind}.gguf")
                    result[f"merged_{kind}"] = compare(Llama(f"{folder}/merged-{kind}.gguf"), prompts, tuned)
                    export("--adapter", f"{folder}/adapter", "--gguf", kind, "--adapter-only", "--output", f"{folder}/lora-{kind}.gguf")
                    beside = Llama(f"{folder}/f32.gguf", f"{folder}/lora-{kind}.gguf")
                    result[f"adapter_{kind}"] = compare(beside, prompts, tuned)
                result["answers_differ"] = sum(a != b for (x, _), (y, _) in zip(plain, tuned) for a, b in zip(x, y))
                files = {name: found for name, found in result.items() if isinstance(found, dict)}
                limit = 0.02 if family.startswith("gemma") else 1e-3
                bad |= not (result["infer"] and result["tokens"] and result["answers_differ"] > NEW)
                bad |= any(found["equal"] < 1 for name, found in files.items() if name != "q4_0")
                bad |= any(found["logits"] > limit for name, found in files.items() if name.endswith("f32"))
            except subprocess.CalledProcessError as error:
                result["error"], bad = error.stderr.strip(), True
            except ValueError as error:
                result["error"], bad = str(error), True
            print(json.dumps(result), flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
