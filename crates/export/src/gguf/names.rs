//! llama.cpp's names for the tensors of a model.
use tunesmith_config::arch::{
    ALTUP_PROJECTIONS, ALTUP_UNEMBED_PROJECTIONS, Arch, BlockSpec, BranchSpec, EMBEDDING, Experts, Gguf, LAYER_SCALAR,
    LM_HEAD, PER_LAYER_EMBEDDING, PER_LAYER_NORM, PER_LAYER_PROJECTION, POSITIONS, PartSpec,
};

/// The number of the block and the rest of a tensor's name, `model.layers.0.REST`.
pub(super) fn in_block(name: &str) -> Option<(usize, &str)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// llama.cpp's name of a tensor; `None` if it has none. Tensors that get the same name are stacked into one in the file.
pub(super) fn name_of(arch: &Arch, gguf: &Gguf, tensor: &str) -> Option<String> {
    let Some((layer, rest)) = in_block(tensor) else { return outside(arch, gguf, tensor) };
    let block = arch.blocks.get(layer)?;
    Some(format!("blk.{layer}.{}", whole(arch, block, rest).or_else(|| in_module(arch, gguf, block, rest))?))
}

fn outside(arch: &Arch, gguf: &Gguf, tensor: &str) -> Option<String> {
    let module = |module: &str| tensor.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
    let name = match tensor {
        EMBEDDING => "token_embd",
        LM_HEAD => "output",
        POSITIONS => "position_embd",
        PER_LAYER_EMBEDDING => "per_layer_token_embd",
        PER_LAYER_NORM => "per_layer_proj_norm",
        _ if tensor == arch.final_norm() => gguf.final_norm,
        _ if tensor.strip_suffix("bias") == arch.final_norm().strip_suffix("weight") => {
            return Some(format!("{}.bias", gguf.final_norm));
        }
        _ if module(PER_LAYER_PROJECTION) => "per_layer_model_proj",
        _ if module(ALTUP_PROJECTIONS) => "altup_proj",
        _ if module(ALTUP_UNEMBED_PROJECTIONS) => "altup_unembd_proj",
        _ => return None,
    };
    Some(format!("{name}.weight"))
}

/// Names of tensors of a block that are not the weight or the bias of a module.
fn whole(arch: &Arch, block: &BlockSpec, rest: &str) -> Option<String> {
    let name = match rest.rsplit('.').next()? {
        "A_log" => "ssm_a",
        "D" => "ssm_d",
        "dt_bias" => "ssm_dt.bias",
        "sinks" => "attn_sinks.weight",
        "correct_output_scale" => "altup_correct_scale.weight",
        _ if rest == LAYER_SCALAR.trim_start_matches('.') => "layer_output_scale.weight",
        _ if rest == "router.scale" => "ffn_gate_inp.scale",
        _ if rest == "router.per_expert_scale" => "ffn_down_exps.scale",
        _ => {
            let experts = arch.experts.as_ref().filter(|_| block.has_experts())?;
            (experts.choice_bias() == Some(rest)).then_some("exp_probs_b.bias")?
        }
    };
    Some(name.to_owned())
}

/// Weights and biases of a block's modules.
fn in_module(arch: &Arch, gguf: &Gguf, block: &BlockSpec, rest: &str) -> Option<String> {
    let (module, kind) = rest.rsplit_once('.')?;
    let experts = arch.experts.as_ref().filter(|_| block.has_experts());
    let name = norm(gguf, block, module)
        .or_else(|| experts.and_then(|experts| of_experts(arch, experts, rest, module)))
        .or_else(|| of_mlp(arch, module, ""))
        .or_else(|| block.branches.iter().find_map(|branch| of_mixer(arch, branch, module)))
        .or_else(|| beside(module))?;
    Some(format!("{name}.{kind}"))
}

/// The norms around a branch.
fn norm(gguf: &Gguf, block: &BlockSpec, module: &str) -> Option<&'static str> {
    block.branches.iter().find_map(|branch| {
        let feeds = !is_mixer(&branch.part);
        if branch.norm == Some(module) {
            // If a block has only one branch, llama.cpp names its norm like that of attention.
            Some(if feeds && block.branches.len() > 1 { gguf.ffn_norm } else { "attn_norm" })
        } else if branch.post_norm == Some(module) {
            Some(match branch.part {
                PartSpec::PerLayer => "post_norm",
                _ if feeds => "post_ffw_norm",
                _ => "post_attention_norm",
            })
        } else {
            None
        }
    })
}

/// Whether a part mixes tokens, as attention and recurrences do and an MLP does not.
pub(super) const fn is_mixer(part: &PartSpec) -> bool {
    matches!(part, PartSpec::Attention(_) | PartSpec::DeltaNet(_) | PartSpec::ShortConv(_) | PartSpec::Mamba(_))
}

fn of_experts(arch: &Arch, experts: &Experts, rest: &str, module: &str) -> Option<&'static str> {
    let shared = experts.shared_module();
    if experts.router().strip_suffix("weight") == rest.strip_suffix("weight").or(rest.strip_suffix("bias")) {
        return Some("ffn_gate_inp");
    }
    if module.contains(".experts.") || module.starts_with("experts.") {
        return match module.rsplit('.').next()? {
            "gate_proj" | "w1" => Some("ffn_gate_exps"),
            "up_proj" | "w3" => Some("ffn_up_exps"),
            "down_proj" | "w2" => Some("ffn_down_exps"),
            _ => None,
        };
    }
    if shared == arch.module_names.mlp {
        return of_mlp(arch, module, "_shexp");
    }
    match module.strip_prefix(shared) {
        Some(".gate_proj") => Some("ffn_gate_shexp"),
        Some(".up_proj") => Some("ffn_up_shexp"),
        Some(".down_proj") => Some("ffn_down_shexp"),
        Some("_gate") => Some("ffn_gate_inp_shexp"),
        _ if module.ends_with(".fc1_latent_proj") => Some("ffn_latent_down"),
        _ if module.ends_with(".fc2_latent_proj") => Some("ffn_latent_up"),
        _ => None,
    }
}

/// A projection of the MLP, or of the shared expert that has its name.
fn of_mlp(arch: &Arch, module: &str, end: &str) -> Option<&'static str> {
    let names = arch.module_names;
    let own = module.strip_prefix(names.mlp)?.strip_prefix('.')?;
    let [gate, up, down] = names.projections;
    let shared = end == "_shexp";
    match own {
        _ if own == down => Some(if shared { "ffn_down_shexp" } else { "ffn_down" }),
        // A fused matrix of gate and up, in this order. If llama.cpp expects two matrices, `tensors::split` has cut it before.
        _ if own == up || names.gate_up == Some(own) => Some(if shared { "ffn_up_shexp" } else { "ffn_up" }),
        _ if own == gate => Some(if shared { "ffn_gate_shexp" } else { "ffn_gate" }),
        _ => None,
    }
}

fn of_mixer(arch: &Arch, branch: &BranchSpec, module: &str) -> Option<&'static str> {
    let names = arch.module_names;
    let below = |parent: &str| module.strip_prefix(parent)?.strip_prefix('.');
    match &branch.part {
        PartSpec::Attention(_) => match below(names.attention)? {
            "q_proj" => Some("attn_q"),
            "k_proj" => Some("attn_k"),
            "v_proj" => Some("attn_v"),
            "gate_proj" => Some("attn_gate"),
            "q_a_proj" => Some("attn_q_a"),
            "q_a_layernorm" => Some("attn_q_a_norm"),
            "q_b_proj" => Some("attn_q_b"),
            "kv_a_proj_with_mqa" => Some("attn_kv_a_mqa"),
            "kv_a_layernorm" => Some("attn_kv_a_norm"),
            own if own == names.qkv_proj => Some("attn_qkv"),
            own if own == names.o_proj => Some("attn_output"),
            own if own == names.q_norm => Some("attn_q_norm"),
            own if own == names.k_norm => Some("attn_k_norm"),
            _ => None,
        },
        PartSpec::DeltaNet(_) => match below("linear_attn")? {
            "in_proj_qkv" => Some("attn_qkv"),
            "in_proj_z" => Some("attn_gate"),
            "in_proj_b" => Some("ssm_beta"),
            "in_proj_a" => Some("ssm_alpha"),
            "in_proj_ba" => Some("ssm_ba"),
            "conv1d" => Some("ssm_conv1d"),
            "norm" => Some("ssm_norm"),
            "out_proj" => Some("ssm_out"),
            _ => None,
        },
        PartSpec::Mamba(_) => match below(names.mamba)? {
            "in_proj" => Some("ssm_in"),
            "conv1d" => Some("ssm_conv1d"),
            "norm" => Some("ssm_norm"),
            "out_proj" => Some("ssm_out"),
            _ => None,
        },
        PartSpec::ShortConv(_) => match below("conv")? {
            "conv" => Some("shortconv.conv"),
            "in_proj" => Some("shortconv.in_proj"),
            "out_proj" => Some("shortconv.out_proj"),
            _ => None,
        },
        _ => None,
    }
}

/// Modules beside the branches: per-layer embeddings, several streams, and the norms of experts beside an MLP.
fn beside(module: &str) -> Option<&'static str> {
    match module {
        "per_layer_input_gate" => Some("inp_gate"),
        "per_layer_projection" => Some("proj"),
        "altup.correction_coefs" => Some("altup_correct_coef"),
        "altup.prediction_coefs" => Some("altup_predict_coef"),
        "altup.modality_router" => Some("altup_router"),
        "altup.router_norm" => Some("altup_router_norm"),
        "laurel.linear_left" => Some("laurel_l"),
        "laurel.linear_right" => Some("laurel_r"),
        "laurel.post_laurel_norm" => Some("laurel_post_norm"),
        "post_feedforward_layernorm_1" => Some("post_ffw_norm_1"),
        "pre_feedforward_layernorm_2" => Some("pre_ffw_norm_2"),
        "post_feedforward_layernorm_2" => Some("post_ffw_norm_2"),
        _ => None,
    }
}
