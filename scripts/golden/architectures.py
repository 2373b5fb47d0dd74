"""The tiny models of the parity goldens. The order counts: each takes its seed from its place, so new ones go to the end."""
from dataclasses import dataclass

BASE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32,
)


@dataclass
class Architecture:
    """A configuration class of Transformers, its arguments in the spelling of Transformers 4, and how the model is made and saved."""

    kind: str
    arguments: dict
    stored: str
    # The size above which the weights are split over several files.
    shard: str | None = None
    # Whether every row is computed as if it were alone: Transformers stretches the rotary frequencies of `dynamic` and `longrope` by
    # the longest row of the batch (and `dynamic` also by those before it), so a row's result would depend on its neighbours.
    alone: bool = False


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaConfig", dict(BASE, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=LLAMA3_ROPE, tie_word_embeddings=False), "F32"
    ),
    "qwen2": Architecture("Qwen2Config", dict(BASE, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True, intermediate_size=144), "F32"),
    "qwen3": Architecture("Qwen3Config", dict(BASE, rms_norm_eps=1e-6, rope_theta=1e6, head_dim=24, tie_word_embeddings=True), "BF16"),
    "gemma2": Architecture(
        "Gemma2Config",
        dict(BASE, rms_norm_eps=1e-6, rope_theta=10000.0, head_dim=16, query_pre_attn_scalar=24, sliding_window=6,
             attn_logit_softcapping=2.0, final_logit_softcapping=2.0, tie_word_embeddings=True),
        "BF16",
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        dict(BASE, rms_norm_eps=1e-6, num_hidden_layers=3, head_dim=16, query_pre_attn_scalar=20, sliding_window=6,
             layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_theta=1e6, rope_local_base_freq=10000.0,
             rope_scaling=dict(rope_type="linear", factor=8.0), tie_word_embeddings=True),
        "BF16",
        shard="100KB",
    ),
    "mistral": Architecture("MistralConfig", dict(BASE, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=7, tie_word_embeddings=False), "F16"),
    "phi3": Architecture(
        "Phi3Config",
        dict(BASE, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=None, tie_word_embeddings=False, intermediate_size=144,
             original_max_position_embeddings=256),
        "BF16",
    ),
    "smollm3": Architecture("SmolLM3Config", dict(BASE, rms_norm_eps=1e-6, rope_theta=5e6, no_rope_layers=[1, 0], tie_word_embeddings=True), "BF16"),
    "olmo2": Architecture("Olmo2Config", dict(BASE, rms_norm_eps=1e-6, rope_theta=5e5, tie_word_embeddings=False, intermediate_size=136), "BF16"),
}
