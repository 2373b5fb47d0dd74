#!/usr/bin/env python3
"""Exports tiny models of all families as GGUF and compares llama.cpp's greedy tokens with those of Transformers.

    python3 -m venv llama && llama/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0 torch transformers peft
    PYTHON=llama/bin/python just gguf-check [--families llama,qwen2,gemma2,…]

Each model is first overfitted on three texts, and its adapter on three others. With random weights, logits are nearly equal, and rounding
decides between tokens. For each family, the check compares:

- 24 greedy tokens of three prompts from f32, f16, q8_0 and q4_0 files
- the same from f32 and f16 files with the adapter merged, and from the f32 file with the adapter's own file (f32, f16)
- `tunesmith infer` with that adapter
- the tokens of a few texts by llama.cpp's tokenizer

With `llama`, it also compares the tokens of tokenizers that split text by other rules. With `gpt_oss`, it compares the numbers of experts that
stay in MXFP4 with those of Transformers (tests/golden/mxfp4).

llama.cpp stores keys and values in f32 here. It is the library inside llama-cpp-python.

Prints a JSON line per family. For each file, `equal` is the share of equal tokens. `logits` is the largest difference of a logit on the texts
that Transformers wrote. `margin` is the smallest lead of a best token over the second. Exits 1 if tokens differ (except for q4_0, which is
coarse), or if logits of f32 differ by more than 1e-3. The limit is 5e-3 for the Gemmas and GPT-2, whose GELU llama.cpp reads from a table in f16; their
models in Transformers round it here too.
"""
import argparse
import ctypes
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
# Keys whose null means something.
NULLABLE = ("bos_token_id", "sliding_window", "q_lora_rank")
ROPE = dict(rope_theta=10000.0, rope_type="default")
LLAMA3 = dict(rope_theta=10000.0, rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_theta=10000.0, rope_type="yarn", factor=8.0, original_max_position_embeddings=32)
QUARTER, HALF = dict(ROPE, partial_rotary_factor=0.25), dict(ROPE, partial_rotary_factor=0.5)
# Modules that get an adapter.
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
DELTA = ATTENTION + ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
# llama.cpp ignores adapters on the other modules of latent attention.
LATENT = ["o_proj"]
MLA = dict(
    head_dim=None, num_key_value_heads=4, num_hidden_layers=3, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, rms_norm_eps=1e-6,
)
MAMBA = dict(
    head_dim=None, num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"], position_embedding_type="nope", shared_intermediate_size=96,
    mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_head=16, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=16,
    embedding_multiplier=2.0, residual_multiplier=0.7, logits_scaling=2.0, attention_multiplier=0.2,
)
NEMOTRON = dict(
    mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16, conv_kernel=4, chunk_size=16, layer_norm_epsilon=1e-5, time_step_min=1e-9,
    num_hidden_layers=None,
)
GEMMA4 = dict(
    global_head_dim=32, sliding_window=16, final_logit_softcapping=30.0, tie_word_embeddings=True,
    rope_parameters=dict(sliding_attention=ROPE, full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25)),
)
# How far a merged model may differ from the adapter, of the largest logit, where small models enlarge rounding.
ROUNDING = {"gemma3n": "1e-2", "qwen3_next": "1e-4", "gpt_oss": "1e-4"}
# Rounding to f16 chooses other experts here, and the best tokens lead by little.
COARSE = [("gpt_oss", "adapter_f16")]
# By name: the class of the configuration, what differs from SIZES, and the modules that get an adapter, if not attention's.
FAMILIES = {
    "llama": ("LlamaConfig", dict(rope_parameters=LLAMA3)),
    "mistral": ("MistralConfig", dict(sliding_window=None)),
    "mistral_yarn": ("MistralConfig", dict(sliding_window=None, rope_parameters=dict(YARN, attention_factor=1.2))),
    "qwen2": ("Qwen2Config", dict(head_dim=None)),
    "qwen3": ("Qwen3Config", dict(head_dim=32)),
    "gpt2": (
        "GPT2Config",
        dict(head_dim=None, intermediate_size=None, num_key_value_heads=None, n_inner=128, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
             tie_word_embeddings=True),
        ["c_attn", "c_proj", "c_fc"],
    ),
    "gemma": ("GemmaConfig", dict(tie_word_embeddings=True)),
    "gemma2": ("Gemma2Config", dict(query_pre_attn_scalar=16, sliding_window=16, tie_word_embeddings=True)),
    "gemma3": ("Gemma3TextConfig", dict(query_pre_attn_scalar=16, sliding_window=16, num_hidden_layers=6, tie_word_embeddings=True)),
    "phi3": ("Phi3Config", dict(head_dim=None, original_max_position_embeddings=256), ["qkv_proj", "down_proj"]),
    "olmo2": ("Olmo2Config", dict(head_dim=None)),
    "olmo3": (
        "Olmo3Config",
        dict(head_dim=None, sliding_window=16, num_hidden_layers=4, rope_parameters=dict(full_attention=YARN, sliding_attention=ROPE)),
    ),
    "granite": ("GraniteConfig", dict(head_dim=None, embedding_multiplier=2.0, residual_multiplier=0.7, logits_scaling=2.0, attention_multiplier=0.2)),
    "smollm3": ("SmolLM3Config", dict(head_dim=None, num_hidden_layers=4)),
    "seed_oss": (
        "SeedOssConfig",
        dict(head_dim=32, attention_bias=True, attention_out_bias=False, attention_dropout=0.0, residual_dropout=0.0),
    ),
    "mixtral": ("MixtralConfig", dict(head_dim=None, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        dict(head_dim=None, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96, mlp_only_layers=[]),
    ),
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[])),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        dict(num_hidden_layers=4, partial_rotary_factor=0.25, layer_types=None, linear_key_head_dim=16, linear_value_head_dim=16,
             linear_num_key_heads=2, linear_num_value_heads=6, rope_parameters=QUARTER),
        DELTA + MLP,
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        dict(intermediate_size=None, num_hidden_layers=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
             linear_num_value_heads=4, rope_parameters=QUARTER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
             shared_expert_intermediate_size=96),
        DELTA,
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(num_hidden_layers=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
             rope_parameters=QUARTER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96,
             norm_topk_prob=True),
        ATTENTION + ["in_proj_qkvz", "in_proj_ba", "out_proj"],
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16, num_hidden_layers=4,
             rope_parameters=dict(YARN, truncate=True)),
    ),
    "lfm2": (
        "Lfm2Config",
        dict(head_dim=None, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"],
             block_auto_adjust_ff_dim=False, tie_word_embeddings=True),
        ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"],
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        dict(head_dim=None, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"], num_dense_layers=1,
             num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, use_expert_bias=True, tie_word_embeddings=True),
        ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"],
    ),
    "ministral3": (
        "Ministral3Config",
        dict(head_dim=32, sliding_window=None, max_position_embeddings=256,
             rope_parameters=dict(YARN, factor=16.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0,
                                  llama_4_scaling_beta=0.1)),
    ),
    "mistral4": (
        "Mistral4Config",
        dict(MLA, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=0, routed_scaling_factor=1.0,
             rope_parameters=dict(YARN, factor=16.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0,
                                  llama_4_scaling_beta=0.1, partial_rotary_factor=1 / 3)),
        LATENT,
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        dict(MLA, q_lora_rank=None, num_hidden_layers=27, hidden_size=32, n_shared_experts=2, topk_method="greedy", first_k_dense_replace=1, routed_scaling_factor=1.5,
             rope_parameters=dict(YARN, mscale=0.707, mscale_all_dim=0.707)),
        LATENT,
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(MLA, n_shared_experts=1, n_routed_experts=6, num_experts_per_tok=3, n_group=3, topk_group=2, first_k_dense_replace=1,
             routed_scaling_factor=2.5, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0)),
        LATENT,
    ),
    "moonlight": (
        "DeepseekV3Config",
        dict(MLA, q_lora_rank=None, num_hidden_layers=27, hidden_size=32, rope_interleave=False, n_shared_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1,
             routed_scaling_factor=2.446),
        LATENT,
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        dict(MLA, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.8, mlp_layer_types=["dense", "sparse", "sparse"]),
        LATENT,
    ),
    "glm4": ("Glm4Config", dict(attention_bias=True, rope_parameters=HALF), ATTENTION + ["gate_up_proj", "down_proj"]),
    "glm4_moe": (
        "Glm4MoeConfig",
        dict(num_hidden_layers=3, attention_bias=True, use_qk_norm=True, rope_parameters=HALF, n_routed_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=64, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.5, first_k_dense_replace=1),
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        dict(MAMBA, num_local_experts=0, num_experts_per_tok=0),
        ATTENTION + ["in_proj", "out_proj", "input_linear", "output_linear"],
    ),
    "granite4_moe": (
        "GraniteMoeHybridConfig",
        dict(MAMBA, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64),
        ATTENTION + ["in_proj", "out_proj", "input_linear", "output_linear"],
    ),
    "granite4_dense": (
        "GraniteMoeHybridConfig",
        dict(MAMBA, num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope", rope_parameters=ROPE,
             layer_types=["attention"] * 3),
        ATTENTION + ["input_linear", "output_linear"],
    ),
    "nemotron_h": (
        "NemotronHConfig",
        dict(NEMOTRON, layers_block_type=["mamba", "mlp", "attention", "mlp", "mamba"]),
        ATTENTION + ["in_proj", "up_proj", "down_proj"],
    ),
    "nemotron3_nano": (
        "NemotronHConfig",
        dict(NEMOTRON, layers_block_type=["mamba", "moe", "attention", "moe"], n_routed_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=64, moe_shared_expert_intermediate_size=96, routed_scaling_factor=2.5),
        ATTENTION + ["in_proj"],
    ),
    "nemotron3_super": (
        "NemotronHConfig",
        dict(NEMOTRON, layers_block_type=["mamba", "moe", "attention", "moe"], n_routed_experts=4, num_experts_per_tok=2,
             moe_intermediate_size=64, moe_shared_expert_intermediate_size=96, moe_latent_size=32, routed_scaling_factor=2.5),
        ATTENTION + ["in_proj"],
    ),
    "hunyuan": (
        "HunYuanDenseV1Config",
        dict(head_dim=32, tie_word_embeddings=True, rope_parameters=dict(rope_theta=10000.0, rope_type="dynamic", alpha=1000.0, factor=1.0)),
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        dict(head_dim=32, rotary_dim=16, rope_parameters=dict(ROPE, partial_rotary_factor=0.5), intermediate_size=64, num_local_experts=4,
             num_experts_per_tok=2),
    ),
    "afmoe": (
        "AfmoeConfig",
        dict(num_hidden_layers=4, sliding_window=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, num_shared_experts=2,
             num_dense_layers=1, route_scale=1.7, mup_enabled=True),
        ATTENTION,
    ),
    "muse_glimmer": (
        "MuseGlimmerTextConfig",
        dict(num_hidden_layers=5, sliding_window=16, qk_scale_factor=2.3, output_multiplier=0.6, final_logit_softcapping=20.0),
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        dict(num_hidden_layers=25, sliding_window=16, num_kv_shared_layers=5, hidden_size_per_layer_input=256,
             vocab_size_per_layer_input=600, final_logit_softcapping=30.0, tie_word_embeddings=True,
             activation_sparsity_pattern=[0.95] * 10 + [0.0] * 15),
        ATTENTION + MLP,
    ),
    "gemma4_e2b": (
        "Gemma4TextConfig",
        dict(GEMMA4, num_hidden_layers=6, num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=32,
             vocab_size_per_layer_input=640,
             layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]),
        ATTENTION + MLP + ["per_layer_input_gate", "per_layer_projection"],
    ),
    "gemma4_31b": (
        "Gemma4TextConfig",
        dict(GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True, num_hidden_layers=3, hidden_size_per_layer_input=0,
             layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
        ATTENTION + MLP,
    ),
    "gemma4_a4b": (
        "Gemma4TextConfig",
        dict(GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True, num_hidden_layers=3, hidden_size_per_layer_input=0,
             layer_types=["sliding_attention", "sliding_attention", "full_attention"], enable_moe_block=True, num_experts=4,
             top_k_experts=2, moe_intermediate_size=64),
        ATTENTION + MLP + ["router.proj"],
    ),
    "gemma4_unified": (
        "Gemma4UnifiedTextConfig",
        dict(GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True, num_hidden_layers=3,
             layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
        ATTENTION + MLP,
    ),
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


def as_llama_cpp(model, family):
    """Gives a Gemma, or GPT-2, llama.cpp's numerics where they are coarser, so that everything else can be compared closely: GELU from a table in
    float16, and in Gemma 3n a variance that is divided by one less than the width."""
    import torch
    from transformers.models.gemma3n import modeling_gemma3n

    class Gelu(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def std(self, *arguments, **named):
            return torch.std(*arguments, **(named | dict(unbiased=True)))

    for module in list(model.modules()):
        if hasattr(module, "act_fn"):
            module.act_fn = Gelu()
        if type(module).__name__ == "GPT2MLP":
            module.act = Gelu()
    if family == "gemma3n":
        modeling_gemma3n.torch = Torch()


def make(family, folder):
    """A model with the tokenizer of the text goldens, an adapter, the prompts, and the tokens and logits of both."""
    import peft
    import torch
    import transformers

    sys.path.append(f"{ROOT}/scripts/golden")
    import muse  # noqa: F401 (makes its class known)

    torch.set_num_threads(1)
    kind, more, *modules = FAMILIES[family]
    arguments = {key: value for key, value in (SIZES | more).items() if value is not None or key in NULLABLE}
    torch.manual_seed(7)
    config = getattr(transformers, kind)(**arguments)
    # Transformers has the class, and does not list it.
    transformers.AutoModelForCausalLM.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager)
    with torch.no_grad():
        # No bias, norm or new factor has its default value.
        for name, parameter in model.named_parameters():
            scale = 0.2 if "norm" in name or name.endswith("bias") else 0.3 / parameter.shape[-1] ** 0.5
            # Larger ones make the streams grow from block to block.
            scale = 0.05 if "_coefs" in name else scale
            parameter.add_(torch.randn_like(parameter) * scale)
        # Nor any number that files have and nothing trains.
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    words = torch.tensor(whole_words())
    draws = words[torch.randint(len(words), (2, 3, PROMPT + NEW), generator=torch.Generator().manual_seed(3))]
    draws[1, :, :PROMPT] = draws[0, :, :PROMPT]
    learn(model, draws[0].tolist(), 120, 5e-3)
    model.eval()
    model.save_pretrained(f"{folder}/model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{ROOT}/tests/golden/c/tokenizer_bpe_gpt2/{file}", f"{folder}/model/{file}")
    prompts = draws[0, :, :PROMPT].tolist()

    if family.startswith(("gemma", "gpt2")):
        as_llama_cpp(model, family)

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
    targets = modules[0] if modules else ATTENTION
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=6, use_rslora=True, target_modules=targets, task_type="CAUSAL_LM"))
    learn(tuned, draws[1].tolist(), 200, 2e-2)
    tuned.eval()
    tuned.save_pretrained(f"{folder}/adapter")
    return prompts, plain, greedy(tuned)


class Llama:
    """A GGUF file in llama.cpp, with an adapter if one is named."""

    quiet = None

    def __init__(self, path, adapter=None):
        import llama_cpp

        self.lib = llama_cpp.llama_cpp
        if Llama.quiet is None:
            Llama.quiet = self.lib.llama_log_callback(lambda *_: None)
            self.lib.llama_log_set(Llama.quiet, None)
        self.model = self.given(self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params()), path)
        self.vocabulary = self.lib.llama_model_get_vocab(self.model)
        self.adapter = self.given(self.lib.llama_adapter_lora_init(self.model, adapter.encode()), adapter) if adapter else None

    def given(self, pointer, what):
        if not pointer:
            raise ValueError(f"llama.cpp does not load {os.path.basename(what)}")
        return pointer

    def tokens(self, text):
        data, room = text.encode(), (ctypes.c_int32 * 256)()
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
            adapters, scales = (self.lib.llama_adapter_lora_p_ctypes * 1)(self.adapter), (ctypes.c_float * 1)(1.0)
            assert self.lib.llama_set_adapters_lora(context, adapters, 1, scales) == 0
        ids, rows, given = [], [], list(prompt)
        size = self.lib.llama_vocab_n_tokens(self.vocabulary)
        for at in range(NEW):
            room = (ctypes.c_int32 * len(given))(*given)
            assert self.lib.llama_decode(context, self.lib.llama_batch_get_one(room, len(given))) == 0
            rows.append(np.ctypeslib.as_array(self.lib.llama_get_logits_ith(context, -1), (size,)).copy())
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


# Rules by which tokenizers split text, with llama.cpp's names for them.
SPLITS = {
    "qwen35": [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ],
}


def splits(folder, export):
    """For each rule: whether its name is in the file, and llama.cpp makes the tokenizer's tokens of the texts."""
    import gguf
    import tokenizers

    path, found = f"{folder}/model/tokenizer.json", {}
    plain = open(path, encoding="utf-8").read()
    for name, patterns in SPLITS.items():
        data = json.loads(plain)
        parts = [dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False) for pattern in patterns]
        parts.append(dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False))
        data["pre_tokenizer"] = dict(type="Sequence", pretokenizers=parts)
        data["model"]["ignore_merges"] = name == "tekken"
        with open(path, "w", encoding="utf-8") as file:
            json.dump(data, file)
        export("--gguf", "f16", "--output", f"{folder}/{name}.gguf")
        own, llama = tokenizers.Tokenizer.from_file(path), Llama(f"{folder}/{name}.gguf")
        same = all(llama.tokens(text) == own.encode(text, add_special_tokens=False).ids for text in TEXTS)
        found[name] = same and gguf.GGUFReader(f"{folder}/{name}.gguf").get_field("tokenizer.ggml.pre").contents() == name
    with open(path, "w", encoding="utf-8") as file:
        file.write(plain)
    return found


def mxfp4_numbers(tunesmith, folder):
    """Whether the experts that stay in MXFP4 have the numbers that Transformers reads from the same files, and llama.cpp loads them."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    source = f"{ROOT}/tests/golden/mxfp4"
    shutil.copytree(f"{source}/model", f"{folder}/mxfp4")
    config = json.load(open(f"{folder}/mxfp4/config.json", encoding="utf-8"))
    # llama.cpp has the published constants. They do not matter to the experts' numbers.
    json.dump(config | dict(swiglu_alpha=1.702, swiglu_limit=7.0), open(f"{folder}/mxfp4/config.json", "w", encoding="utf-8"))
    data = json.loads(open(f"{ROOT}/tests/golden/c/tokenizer_bpe_gpt2/tokenizer.json", encoding="utf-8").read())
    bytes_only = {token: id for token, id in data["model"]["vocab"].items() if id < config["vocab_size"]}
    data["model"] |= dict(vocab=bytes_only, merges=[merge for merge in data["model"]["merges"] if "".join(merge).replace(" ", "") in bytes_only])
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < config["vocab_size"]]
    json.dump(data, open(f"{folder}/mxfp4/tokenizer.json", "w", encoding="utf-8"))
    words = ["export", "--base", f"{folder}/mxfp4", "--gguf", "q8_0", "--pre-tokenizer", "gpt-2", "--output", f"{folder}/mxfp4.gguf"]
    subprocess.run([tunesmith, *words], check=True, capture_output=True, text=True)
    Llama(f"{folder}/mxfp4.gguf")
    stored = load_file(f"{source}/dequantized.safetensors")
    held = 0
    for tensor in gguf.GGUFReader(f"{folder}/mxfp4.gguf").tensors:
        if tensor.tensor_type != gguf.GGMLQuantizationType.MXFP4:
            continue
        block, part = int(tensor.name.split(".")[1]), tensor.name.split(".")[2]
        name = f"model.layers.{block}.mlp.experts.{'down_proj' if part == 'ffn_down_exps' else 'gate_up_proj'}"
        wanted = stored[name].transpose(0, 2, 1)
        wanted = dict(ffn_gate_exps=wanted[:, 0::2], ffn_up_exps=wanted[:, 1::2], ffn_down_exps=wanted)[part]
        if not np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(wanted.shape), wanted):
            return False
        held += 1
    return held == 6


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
                    differs = ["--max-difference", ROUNDING[family]] if family in ROUNDING else []
                    export("--adapter", f"{folder}/adapter", *differs, "--gguf", kind, "--output", f"{folder}/merged-{kind}.gguf")
                    result[f"merged_{kind}"] = compare(Llama(f"{folder}/merged-{kind}.gguf"), prompts, tuned)
                    export("--adapter", f"{folder}/adapter", "--gguf", kind, "--adapter-only", "--output", f"{folder}/lora-{kind}.gguf")
                    beside = Llama(f"{folder}/f32.gguf", f"{folder}/lora-{kind}.gguf")
                    result[f"adapter_{kind}"] = compare(beside, prompts, tuned)
                if family == "llama":
                    result["splits"] = splits(folder, export)
                    bad |= not all(result["splits"].values())
                if family == "gpt_oss":
                    result["mxfp4"] = mxfp4_numbers(args.tunesmith, folder)
                    bad |= not result["mxfp4"]
                result["answers_differ"] = sum(a != b for (x, _), (y, _) in zip(plain, tuned) for a, b in zip(x, y))
                files = {name: found for name, found in result.items() if isinstance(found, dict) and "equal" in found}
                limit = 5e-3 if family.startswith(("gemma", "gpt2")) else 1e-3
                bad |= not (result["infer"] and result["tokens"] and result["answers_differ"] > NEW)
                exact = [found for name, found in files.items() if name != "q4_0" and (family, name) not in COARSE]
                bad |= any(found["equal"] < 1 for found in exact)
                bad |= any(found["logits"] > limit for name, found in files.items() if name.endswith("f32"))
            except subprocess.CalledProcessError as error:
                result["error"], bad = error.stderr.strip(), True
            except ValueError as error:
                result["error"], bad = str(error), True
            print(json.dumps(result), flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
