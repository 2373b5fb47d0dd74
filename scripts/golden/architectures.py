"""The tiny models of the parity goldens. `place` decides a model's seed: where it stands in the list, or a number of its own."""
from dataclasses import dataclass, field

BASE = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32,
)
GEMMA4_ROPE = dict(
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
    full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25),
)
ATTENTION, DENSE = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
GRANITE_MAMBA = dict(mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=12, mamba_d_head=16, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=16)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Its dropout is 0.1 where a file does not say otherwise.
OF_GPT2 = dict(
    vocab_size=512, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@dataclass
class Architecture:
    """A configuration class of Transformers, its arguments in the spelling of Transformers 4, and how to make and save the model."""

    kind: str
    arguments: dict
    stored: str
    # The size above which the weights are split over several files.
    shard: str | None = None
    # The adapter's settings besides rank and alpha; without them, every linear layer gets an adapter.
    lora: dict = field(default_factory=dict)
    # Whether the gradients of all weights are stored: of those that no adapter reaches.
    full: bool = False
    # Its number among all models, which no other one has; without it, its position in the list. New models name theirs.
    number: int | None = None


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
    "gemma": Architecture(
        "GemmaConfig", dict(BASE, rms_norm_eps=1e-6, rope_theta=10000.0, head_dim=24, num_key_value_heads=1, tie_word_embeddings=True), "BF16"
    ),
    "granite": Architecture(
        "GraniteConfig",
        dict(BASE, rms_norm_eps=1e-5, rope_theta=10000.0, embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.6,
             logits_scaling=1.7, tie_word_embeddings=True),
        "BF16",
    ),
    "phi3_longrope": Architecture(
        "Phi3Config",
        dict(BASE, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=7, tie_word_embeddings=True, partial_rotary_factor=0.5,
             original_max_position_embeddings=16,
             rope_scaling=dict(type="longrope", short_factor=[1.0, 1.05, 1.3, 1.6], long_factor=[1.1, 2.5, 6.0, 14.0])),
        "BF16",
    ),
    "mistral_yarn": Architecture(
        "MistralConfig",
        dict(BASE, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=None, tie_word_embeddings=False, max_position_embeddings=128,
             rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
        "BF16",
    ),
    "qwen2_window": Architecture(
        "Qwen2Config",
        dict(BASE, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True, use_sliding_window=True, sliding_window=6, max_window_layers=1),
        "BF16",
    ),
    "llama_dynamic": Architecture(
        "LlamaConfig",
        dict(BASE, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, max_position_embeddings=16,
             rope_scaling=dict(rope_type="dynamic", factor=4.0)),
        "BF16",
    ),
    "mixtral": Architecture(
        "MixtralConfig",
        dict(BASE, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, tie_word_embeddings=True, intermediate_size=48, num_local_experts=4,
             num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.02),
        "BF16",
        lora=dict(target_modules=ATTENTION, target_parameters=EXPERTS),
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeConfig",
        dict(BASE, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True, intermediate_size=80, num_experts=6, num_experts_per_tok=3,
             moe_intermediate_size=24, shared_expert_intermediate_size=40, mlp_only_layers=[0], decoder_sparse_step=1, norm_topk_prob=False),
        "BF16",
        # The names of the MLP reach the dense block and the shared expert.
        lora=dict(target_modules=ATTENTION + DENSE, target_parameters=EXPERTS),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeConfig",
        dict(BASE, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True, head_dim=24, num_experts=6, num_experts_per_tok=3,
             moe_intermediate_size=24, mlp_only_layers=[], decoder_sparse_step=1, norm_topk_prob=True),
        "BF16",
        lora=dict(target_modules=ATTENTION, target_parameters=EXPERTS),
    ),
    "olmo3": Architecture(
        "Olmo3Config",
        dict(BASE, rms_norm_eps=1e-6, rope_theta=5e5, num_hidden_layers=4, tie_word_embeddings=False, intermediate_size=136, sliding_window=6,
             rope_scaling=dict(rope_type="yarn", factor=8.0, attention_factor=1.2, beta_fast=32.0, beta_slow=1.0,
                               original_max_position_embeddings=32)),
        "BF16",
    ),
    "qwen3_5": Architecture(
        "Qwen3_5TextConfig",
        # The norm behind the rule makes small outputs large, with their rounding: a larger eps keeps it small.
        dict(BASE, rms_norm_eps=1e-3, rope_theta=1e6, num_hidden_layers=3, head_dim=16, partial_rotary_factor=0.25, tie_word_embeddings=True,
             layer_types=["linear_attention", "full_attention", "linear_attention"], linear_conv_kernel_dim=4, linear_key_head_dim=12,
             linear_value_head_dim=10, linear_num_key_heads=2, linear_num_value_heads=4),
        "BF16",
        full=True,
    ),
    "lfm2": Architecture(
        "Lfm2Config",
        dict(BASE, norm_eps=1e-5, rope_theta=1e6, num_hidden_layers=4, tie_word_embeddings=True, conv_L_cache=3, conv_bias=False,
             block_auto_adjust_ff_dim=True, block_multiple_of=8, block_ffn_dim_multiplier=1.1,
             layer_types=["conv", "full_attention", "conv", "conv"]),
        "BF16",
        full=True,
    ),
    "seed_oss": Architecture(
        "SeedOssConfig",
        dict(BASE, rms_norm_eps=1e-6, rope_theta=1e7, head_dim=24, tie_word_embeddings=False, attention_bias=True, attention_out_bias=False,
             attention_dropout=0.0, residual_dropout=0.0),
        "BF16",
    ),
    "ministral3": Architecture(
        "Ministral3Config",
        dict(BASE, rms_norm_eps=1e-5, rope_theta=1e6, head_dim=24, tie_word_embeddings=False, sliding_window=None, max_position_embeddings=128,
             rope_scaling=dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                               mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
        "BF16",
    ),
    "hunyuan_v1_dense": Architecture(
        "HunYuanDenseV1Config",
        dict(BASE, rms_norm_eps=1e-5, rope_theta=10000.0, head_dim=24, tie_word_embeddings=True,
             rope_scaling=dict(rope_type="dynamic", alpha=1000.0, factor=1.0)),
        "BF16",
        full=True,
    ),
    "gpt_oss": Architecture(
        "GptOssConfig",
        # The clamp is low enough to cut some values.
        dict(BASE, rms_norm_eps=1e-5, rope_theta=150000.0, head_dim=24, tie_word_embeddings=False, intermediate_size=32, num_local_experts=6,
             num_experts_per_tok=3, sliding_window=6, layer_types=["sliding_attention", "full_attention"], attention_bias=True,
             swiglu_limit=0.7, swiglu_alpha=1.3, output_router_logits=True, router_aux_loss_coef=0.02,
             rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0,
                               truncate=False)),
        "BF16",
        full=True,
    ),
    "glm4_moe": Architecture(
        "Glm4MoeConfig",
        # Three groups of two experts, of which a token goes to two; a dense block before those with experts.
        dict(BASE, rms_norm_eps=1e-5, rope_theta=1e6, num_hidden_layers=3, head_dim=24, partial_rotary_factor=0.5, tie_word_embeddings=False,
             attention_bias=True, use_qk_norm=True, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2,
             n_group=3, topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.8, first_k_dense_replace=1),
        "BF16",
        lora=dict(target_modules=ATTENTION, target_parameters=EXPERTS + ["mlp.gate.weight"]),
        full=True,
        number=317,
    ),
    "qwen3_5_moe": Architecture(
        "Qwen3_5MoeTextConfig",
        dict({key: value for key, value in BASE.items() if key != "intermediate_size"}, rms_norm_eps=1e-3, rope_theta=1e6, num_hidden_layers=3,
             head_dim=16, partial_rotary_factor=0.25, tie_word_embeddings=False,
             layer_types=["linear_attention", "full_attention", "linear_attention"], linear_conv_kernel_dim=4, linear_key_head_dim=12,
             linear_value_head_dim=10, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=6, num_experts_per_tok=3,
             moe_intermediate_size=24, shared_expert_intermediate_size=40, output_router_logits=True, router_aux_loss_coef=0.02),
        "BF16",
        full=True,
        number=319,
    ),
    "qwen3_next": Architecture(
        "Qwen3NextConfig",
        dict(BASE, rms_norm_eps=1e-3, rope_theta=1e6, num_hidden_layers=3, head_dim=16, partial_rotary_factor=0.25, tie_word_embeddings=False,
             intermediate_size=80, layer_types=["linear_attention", "full_attention", "linear_attention"], linear_conv_kernel_dim=4,
             linear_key_head_dim=12, linear_value_head_dim=10, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=6,
             num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40, mlp_only_layers=[0], norm_topk_prob=True,
             output_router_logits=True, router_aux_loss_coef=0.02),
        "BF16",
        lora=dict(target_modules=ATTENTION + ["in_proj_qkvz", "in_proj_ba", "out_proj"], target_parameters=EXPERTS),
        full=True,
        number=328,
    ),
    "lfm2_moe": Architecture(
        "Lfm2MoeConfig",
        dict(BASE, norm_eps=1e-5, rope_theta=1e6, num_hidden_layers=4, tie_word_embeddings=True, intermediate_size=80, conv_L_cache=3,
             conv_bias=False, layer_types=["conv", "full_attention", "conv", "full_attention"], num_dense_layers=1, num_experts=6,
             num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True, use_expert_bias=True, routed_scaling_factor=1.4),
        "BF16",
        full=True,
        number=313,
    ),
    "glm4": Architecture(
        "Glm4Config",
        dict(BASE, rms_norm_eps=1.5625e-7, rope_theta=10000.0, head_dim=24, partial_rotary_factor=0.5, tie_word_embeddings=False,
             attention_bias=True),
        "BF16",
        full=True,
        number=314,
    ),
    "afmoe": Architecture(
        "AfmoeConfig",
        dict(BASE, rms_norm_eps=1e-5, rope_theta=10000.0, num_hidden_layers=3, head_dim=24, tie_word_embeddings=False, sliding_window=6,
             layer_types=["sliding_attention", "full_attention", "sliding_attention"], num_experts=6, num_experts_per_tok=3,
             moe_intermediate_size=24, num_shared_experts=2, num_dense_layers=1, route_scale=1.7, mup_enabled=True),
        "BF16",
        lora=dict(target_modules=ATTENTION, target_parameters=EXPERTS + ["mlp.router.gate.weight"]),
        full=True,
        number=315,
    ),
    "minimax_m2": Architecture(
        "MiniMaxM2Config",
        dict(BASE, rms_norm_eps=1e-6, rope_theta=5e6, head_dim=24, rotary_dim=12, tie_word_embeddings=False, intermediate_size=24,
             num_local_experts=6, num_experts_per_tok=3, output_router_logits=True, router_aux_loss_coef=0.02),
        "BF16",
        lora=dict(target_modules=ATTENTION, target_parameters=EXPERTS),
        full=True,
        number=333,
    ),
    # As E2B: per-layer embeddings, the last blocks without keys of their own and with MLPs twice as wide.
    "gemma4_e2b": Architecture(
        "Gemma4TextConfig",
        dict(BASE, rms_norm_eps=1e-6, num_hidden_layers=5, head_dim=16, global_head_dim=24, sliding_window=6, intermediate_size=72,
             layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
             num_kv_shared_layers=2, use_double_wide_mlp=True, hidden_size_per_layer_input=32, vocab_size_per_layer_input=512,
             final_logit_softcapping=2.0, tie_word_embeddings=True, rope_parameters=GEMMA4_ROPE),
        "BF16",
        full=True,
        number=300,
    ),
    # As 31B: full attention with fewer key heads, whose values are the keys before their norm.
    "gemma4_31b": Architecture(
        "Gemma4TextConfig",
        dict(BASE, rms_norm_eps=1e-6, num_hidden_layers=3, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
             sliding_window=6, layer_types=["sliding_attention", "full_attention", "full_attention"], hidden_size_per_layer_input=0,
             final_logit_softcapping=2.0, tie_word_embeddings=True, rope_parameters=GEMMA4_ROPE),
        "BF16",
        shard="150KB",
        full=True,
        number=301,
    ),
    # As 26B-A4B: experts beside the MLP of each block.
    "gemma4_a4b": Architecture(
        "Gemma4TextConfig",
        dict(BASE, rms_norm_eps=1e-6, num_hidden_layers=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
             sliding_window=6, layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0, intermediate_size=48,
             enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=24, final_logit_softcapping=2.0,
             tie_word_embeddings=True, rope_parameters=GEMMA4_ROPE),
        "BF16",
        # The router is a module, and the experts are parameters.
        lora=dict(target_modules=ATTENTION + DENSE + ["router.proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
        full=True,
        number=302,
    ),
    "gemma4_unified": Architecture(
        "Gemma4UnifiedTextConfig",
        dict(BASE, rms_norm_eps=1e-6, num_hidden_layers=3, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
             sliding_window=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"], final_logit_softcapping=30.0,
             tie_word_embeddings=False, rope_parameters=GEMMA4_ROPE),
        "BF16",
        number=303,
    ),
    # As E2B: four streams, a branch beside attention, embeddings of fewer tokens than the vocabulary has, blocks of few features, last
    # blocks without keys of their own.
    "gemma3n": Architecture(
        "Gemma3nTextConfig",
        dict(BASE, rms_norm_eps=1e-6, num_hidden_layers=5, head_dim=16, sliding_window=6, intermediate_size=[72, 72, 80, 72, 88],
             layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
             num_kv_shared_layers=2, activation_sparsity_pattern=[0.7, 0.5, 0.0, 0.8, 0.0], hidden_size_per_layer_input=32,
             vocab_size_per_layer_input=400, laurel_rank=8, altup_num_inputs=4, altup_active_idx=0, altup_coef_clip=120.0,
             final_logit_softcapping=2.0, rope_theta=1e6, rope_local_base_freq=10000.0, tie_word_embeddings=True),
        "BF16",
        full=True,
        number=366,
    ),
    # Three streams, of which blocks compute the second; a head of its own; widths that are no multiples of 16.
    "gemma3n_odd": Architecture(
        "Gemma3nTextConfig",
        dict(BASE, hidden_size=52, rms_norm_eps=1e-5, num_hidden_layers=3, head_dim=12, sliding_window=7, intermediate_size=70,
             layer_types=["sliding_attention", "full_attention", "sliding_attention"], num_kv_shared_layers=0,
             activation_sparsity_pattern=[0.6, 0.0, 0.3], hidden_size_per_layer_input=20, vocab_size_per_layer_input=600, laurel_rank=5,
             altup_num_inputs=3, altup_active_idx=1, final_logit_softcapping=30.0, rope_theta=1e5, rope_local_base_freq=5000.0,
             rope_scaling=dict(rope_type="linear", factor=4.0), attention_bias=True, tie_word_embeddings=False),
        "F32",
        full=True,
        number=367,
    ),
    "granitemoehybrid": Architecture(
        "GraniteMoeHybridConfig",
        dict(BASE, rms_norm_eps=1e-2, num_hidden_layers=3, tie_word_embeddings=False, position_embedding_type="nope", num_local_experts=0,
             num_experts_per_tok=0, shared_intermediate_size=72, layer_types=["mamba", "attention", "mamba"], embedding_multiplier=3.0,
             attention_multiplier=0.3, residual_multiplier=0.6, logits_scaling=1.7, **GRANITE_MAMBA),
        "BF16",
        full=True,
        number=350,
    ),
    # Granite 4 with experts: three matrices of all experts beside an MLP that all tokens share.
    "granite4_moe": Architecture(
        "GraniteMoeHybridConfig",
        dict(BASE, rms_norm_eps=1e-2, num_hidden_layers=3, tie_word_embeddings=True, position_embedding_type="rope", rope_theta=10000.0,
             num_local_experts=6, num_experts_per_tok=3, intermediate_size=24, shared_intermediate_size=40,
             layer_types=["mamba", "attention", "mamba"], embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.6,
             logits_scaling=1.7, output_router_logits=True, router_aux_loss_coef=0.02, **GRANITE_MAMBA),
        "BF16",
        lora=dict(target_modules=ATTENTION + ["in_proj", "out_proj", "input_linear", "output_linear"],
                  target_parameters=["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj", "block_sparse_moe.router.weight"]),
        full=True,
        number=360,
    ),
    "olmo_hybrid": Architecture(
        "OlmoHybridConfig",
        dict(BASE, rms_norm_eps=1e-6, num_hidden_layers=3, tie_word_embeddings=False, intermediate_size=136,
             layer_types=["linear_attention", "full_attention", "linear_attention"], linear_conv_kernel_dim=4, linear_key_head_dim=12,
             rope_parameters=dict(rope_theta=None, rope_type="default"), linear_value_head_dim=10, linear_num_key_heads=4, linear_num_value_heads=4),
        "BF16",
        full=True,
        number=352,
    ),
    "nemotron_h": Architecture(
        "NemotronHConfig",
        # Time steps are cut from below. The norm behind the state space makes small outputs large, with their rounding: a larger eps
        # keeps it small.
        dict(BASE, layer_norm_epsilon=0.05, head_dim=24, tie_word_embeddings=False, hybrid_override_pattern="M*-M", mamba_num_heads=6,
             mamba_head_dim=10, n_groups=2, ssm_state_size=13, conv_kernel=4, chunk_size=16, time_step_min=0.4),
        "BF16",
        # PEFT refuses the output projection of Mamba.
        lora=dict(target_modules=["in_proj", "up_proj", "down_proj"] + ATTENTION),
        full=True,
        number=354,
    ),
    # Nemotron 3 Nano: experts without gates, beside an MLP.
    "nemotron3_nano": Architecture(
        "NemotronHConfig",
        dict(BASE, layer_norm_epsilon=0.05, head_dim=24, tie_word_embeddings=False, layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
             mamba_num_heads=6, mamba_head_dim=10, n_groups=2, ssm_state_size=13, conv_kernel=4, chunk_size=16, time_step_min=0.4,
             n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, moe_shared_expert_intermediate_size=40,
             routed_scaling_factor=2.5),
        "BF16",
        lora=dict(target_modules=["in_proj", "up_proj", "down_proj"] + ATTENTION,
                  target_parameters=["mixer.experts.up_proj", "mixer.experts.down_proj", "mixer.gate.weight"]),
        full=True,
        number=361,
    ),
    # Nemotron 3 Super: experts between two projections, three groups of two experts, of which a token goes to two.
    "nemotron3_super": Architecture(
        "NemotronHConfig",
        dict(BASE, layer_norm_epsilon=0.05, head_dim=24, tie_word_embeddings=False, mlp_bias=True,
             layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"], mamba_num_heads=6, mamba_head_dim=10, n_groups=2,
             ssm_state_size=13, conv_kernel=4, chunk_size=16, time_step_min=0.4, n_routed_experts=6, num_experts_per_tok=3,
             moe_intermediate_size=24, moe_shared_expert_intermediate_size=40, moe_latent_size=28, n_group=3, topk_group=2,
             routed_scaling_factor=1.8),
        "BF16",
        lora=dict(target_modules=["in_proj", "up_proj", "down_proj", "fc1_latent_proj", "fc2_latent_proj"] + ATTENTION,
                  target_parameters=["mixer.experts.up_proj", "mixer.experts.down_proj"]),
        full=True,
        number=362,
    ),
    "lfm3": Architecture(
        "Lfm3Config",
        dict(BASE, norm_eps=1e-5, num_hidden_layers=5, head_dim=24, tie_word_embeddings=True, conv_L_cache=7, conv_bias=False, sliding_window=6,
             layer_types=["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"], use_sandwich_norm=True,
             use_attention_gate=True,
             rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=1e4),
                                  full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.5))),
        "BF16",
        full=True,
        number=363,
    ),
    "muse_glimmer": Architecture(
        "MuseGlimmerTextConfig",
        # Full attention without positions in the first and the last block.
        dict(BASE, rms_norm_eps=1e-5, num_hidden_layers=5, head_dim=24, tie_word_embeddings=False, intermediate_size=72, sliding_window=6,
             post_norm_eps=1e-8, qk_scale_factor=2.3, output_multiplier=0.6, final_logit_softcapping=2.0),
        "BF16",
        full=True,
        number=364,
    ),
    "deepseek_v3_dense": Architecture(
        "DeepseekV3Config",
        dict(BASE, hidden_size=52, num_key_value_heads=4, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
             first_k_dense_replace=2, q_lora_rank=22, kv_lora_rank=26, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=10,
             attention_bias=True, max_position_embeddings=128,
             rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                               mscale_all_dim=0.7)),
        "BF16",
        full=True,
        lora=dict(target_modules=LATENT),
        number=340,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3Config",
        # Three groups of two experts, of which a token goes to two; a dense block before the one with experts.
        dict(BASE, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=10000.0, intermediate_size=80, tie_word_embeddings=False, q_lora_rank=24,
             kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=6, num_experts_per_tok=3,
             moe_intermediate_size=24, n_shared_experts=1, n_group=3, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
             first_k_dense_replace=1),
        "BF16",
        full=True,
        lora=dict(target_modules=LATENT, target_parameters=EXPERTS + ["mlp.gate.weight"]),
        number=341,
    ),
    "moonlight": Architecture(
        "DeepseekV3Config",
        # Queries without a latent, and pairs of rotated features across the halves.
        dict(BASE, num_key_value_heads=4, rms_norm_eps=1e-5, rope_theta=50000.0, intermediate_size=80, tie_word_embeddings=False, q_lora_rank=None,
             rope_interleave=False, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=6,
             num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=2, n_group=1, topk_group=1, norm_topk_prob=True,
             routed_scaling_factor=2.446, first_k_dense_replace=1),
        "BF16",
        full=True,
        lora=dict(target_modules=["q_proj", *LATENT[2:]], target_parameters=EXPERTS),
        number=342,
    ),
    "glm4_moe_lite": Architecture(
        "Glm4MoeLiteConfig",
        # A dense block between two with experts.
        dict(BASE, num_hidden_layers=3, num_key_value_heads=4, rms_norm_eps=1e-5, rope_theta=1e6, intermediate_size=80, tie_word_embeddings=False,
             q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, n_routed_experts=6, num_experts_per_tok=3,
             moe_intermediate_size=24, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.8,
             mlp_layer_types=["sparse", "dense", "sparse"]),
        "BF16",
        full=True,
        lora=dict(target_modules=LATENT, target_parameters=EXPERTS),
        number=343,
    ),
    "mistral4": Architecture(
        "Mistral4Config",
        dict(BASE, num_key_value_heads=4, rms_norm_eps=1e-6, intermediate_size=80, tie_word_embeddings=False, q_lora_rank=24, kv_lora_rank=32,
             qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
             n_shared_experts=1, n_group=3, topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.3, first_k_dense_replace=1,
             max_position_embeddings=128,
             rope_scaling=dict(rope_type="yarn", rope_theta=10000.0, factor=16.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0,
                               mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1, partial_rotary_factor=0.4)),
        "BF16",
        full=True,
        lora=dict(target_modules=LATENT + DENSE, target_parameters=EXPERTS),
        number=344,
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2Config",
        dict(BASE, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=10000.0, intermediate_size=80, tie_word_embeddings=False, q_lora_rank=None,
             kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=6, num_experts_per_tok=3,
             moe_intermediate_size=24, n_shared_experts=2, topk_method="greedy", routed_scaling_factor=1.5, first_k_dense_replace=1,
             max_position_embeddings=128,
             rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, mscale=0.707,
                               mscale_all_dim=0.707)),
        "BF16",
        full=True,
        lora=dict(target_modules=["q_proj", *LATENT[2:]], target_parameters=EXPERTS),
        number=346,
    ),
    "deepseek_v2_groups": Architecture(
        "DeepseekV2Config",
        # Four groups of two experts, of which a token goes to two by their best one, and one shared expert.
        dict(BASE, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=10000.0, intermediate_size=80, tie_word_embeddings=False, q_lora_rank=24,
             kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8, num_experts_per_tok=3,
             moe_intermediate_size=24, n_shared_experts=1, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=4.0,
             first_k_dense_replace=1),
        "BF16",
        full=True,
        lora=dict(target_modules=LATENT, target_parameters=EXPERTS + ["mlp.gate.weight"]),
        number=347,
    ),
    "gpt2": Architecture(
        "GPT2Config",
        dict(OF_GPT2, n_embd=64, n_head=4, n_layer=2, n_positions=128, tie_word_embeddings=True),
        "F32",
        full=True,
        number=380,
    ),
    # Every other choice of its keys.
    "gpt2_scaled": Architecture(
        "GPT2Config",
        dict(OF_GPT2, n_embd=56, n_head=4, n_layer=3, n_positions=96, n_inner=88, activation_function="gelu", layer_norm_epsilon=0.05,
             scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, tie_word_embeddings=False),
        "BF16",
        full=True,
        number=381,
    ),
}


def place(name):
    """The number of an architecture that its seeds are made from."""
    number = ARCHITECTURES[name].number
    return list(ARCHITECTURES).index(name) if number is None else number


NUMBERS = [place(name) for name in ARCHITECTURES]
assert len(set(NUMBERS)) == len(NUMBERS), "two architectures have one number"
