//! Writes the sizes and constants of a model to the header of a GGUF file, under llama.cpp's keys.
use super::container::{Header, Value};
use super::names::is_mixer;
use tunesmith_config::arch::{
    Arch, AttentionSpec, BlockSpec, ExpertNames, Experts, Gguf, LatentSpec, PartSpec, Rope, RopeScaling,
};

/// Writes everything but the tokenizer to the header.
pub(super) fn describe(arch: &Arch, gguf: &Gguf, header: &mut Header) {
    let mut put = |key: &str, value: Value| header.own(key, value);
    put("block_count", Value::count(arch.num_hidden_layers));
    put("context_length", Value::count(arch.max_position_embeddings));
    put("embedding_length", Value::count(arch.hidden_size));
    put("feed_forward_length", of_blocks(arch.blocks.iter().map(|block| width(arch, block))));
    if !arch.layer_norms {
        put("attention.layer_norm_rms_epsilon", Value::F32(arch.rms_norm_eps as f32));
    }
    if arch.layer_norms || gguf.name == "nemotron_h" {
        // llama.cpp expects this key for Nemotron-H too, although its norms are RMS norms.
        put("attention.layer_norm_epsilon", Value::F32(arch.rms_norm_eps as f32));
    }
    put("vocab_size", Value::count(arch.vocab_size));
    if let Some(cap) = arch.attention_softcap {
        put("attn_logit_softcapping", Value::F32(cap as f32));
    }
    if let Some(cap) = arch.logit_softcap {
        put("final_logit_softcapping", Value::F32(cap as f32));
    }
    if gguf.scales {
        put("attention.scale", Value::F32(arch.attention_scale as f32));
        put("embedding_scale", Value::F32(arch.embedding_scale as f32));
        put("residual_scale", Value::F32(arch.residual_scale as f32));
        put("logit_scale", Value::F32((1.0 / arch.logit_scale) as f32));
    }
    if gguf.multiplied_logits {
        put("logit_scale", Value::F32(arch.logit_scale as f32));
    }
    attention(arch, gguf, &mut put);
    mixers(arch, &mut put);
    if let Some(experts) = &arch.experts {
        of_experts(arch, gguf, experts, &mut put);
    }
    if let Some(per_layer) = &arch.per_layer {
        put("embedding_length_per_layer_input", Value::count(per_layer.width));
    } else if gguf.name == "gemma4" {
        put("embedding_length_per_layer_input", Value::count(0));
    }
    streams(arch, &mut put);
    rotary(arch, gguf, &mut put);
}

/// One number, or one for each block where they differ.
fn of_blocks(numbers: impl Iterator<Item = usize>) -> Value {
    let numbers: Vec<usize> = numbers.collect();
    match numbers.first() {
        Some(&first) if numbers.iter().all(|number| *number == first) => Value::count(first),
        _ => Value::counts(&numbers),
    }
}

/// The width of a block's MLP or experts; 0 for a block without either.
fn width(arch: &Arch, block: &BlockSpec) -> usize {
    let of = |part: &PartSpec| match part {
        PartSpec::Mlp { intermediate_size, .. }
        | PartSpec::PlainMlp { intermediate_size, .. }
        | PartSpec::MlpAndExperts { intermediate_size } => Some(*intermediate_size),
        PartSpec::Experts => Some(match &arch.experts {
            Some(experts) if matches!(experts.names, ExpertNames::Granite | ExpertNames::Nemotron) => experts.width,
            _ => arch.intermediate_size,
        }),
        _ => None,
    };
    block.branches.iter().find_map(|branch| of(&branch.part)).unwrap_or(0)
}

/// The first attention with or without a window, or else any.
fn first(arch: &Arch, window: bool) -> Option<&AttentionSpec> {
    arch.attentions().find(|attention| attention.window.is_some() == window).or_else(|| arch.attentions().next())
}

fn attention(arch: &Arch, gguf: &Gguf, put: &mut impl FnMut(&str, Value)) {
    let (Some(full), Some(local)) = (first(arch, false), first(arch, true)) else { return };
    put("attention.head_count", Value::count(full.num_heads));
    if let Some(LatentSpec { query_rank, kv_rank, rope_dim, value_dim, .. }) = full.latent {
        // In llama.cpp, latent attention has one head of keys and values: the latent with the rotary part.
        put("attention.head_count_kv", Value::count(1));
        put("attention.key_length", Value::count(kv_rank + rope_dim));
        put("attention.value_length", Value::count(kv_rank));
        put("attention.key_length_mla", Value::count(full.head_dim));
        put("attention.value_length_mla", Value::count(value_dim));
        put("attention.kv_lora_rank", Value::count(kv_rank));
        if let Some(rank) = query_rank {
            put("attention.q_lora_rank", Value::count(rank));
        }
    } else {
        let mut parts = arch.blocks.iter().flat_map(|block| &block.branches).map(|branch| &branch.part);
        let delta = parts.any(|part| matches!(part, PartSpec::DeltaNet(_)));
        // A block with another mixer has no heads of keys. Families whose file names an interval give one number for all blocks.
        let heads = |block: &BlockSpec| block.attention().map_or(0, |attention| attention.num_kv_heads);
        put(
            "attention.head_count_kv",
            if delta { Value::count(full.num_kv_heads) } else { of_blocks(arch.blocks.iter().map(heads)) },
        );
        put("attention.key_length", Value::count(full.head_dim));
        put("attention.value_length", Value::count(full.head_dim));
        if gguf.uneven && gguf.listed_windows {
            put("attention.key_length_swa", Value::count(local.head_dim));
            put("attention.value_length_swa", Value::count(local.head_dim));
        }
    }
    if let Some(window) = arch.attentions().find_map(|attention| attention.window) {
        put("attention.sliding_window", Value::count(window));
    }
    if gguf.listed_windows {
        let windows = arch.attentions().map(|attention| attention.window.is_some());
        put("attention.sliding_window_pattern", Value::Bools(windows.collect()));
    }
    let shared = arch.attentions().filter(|attention| attention.kv_from.is_some()).count();
    if gguf.uneven && (shared > 0 || gguf.listed_windows) {
        put("attention.shared_kv_layers", Value::count(shared));
    }
    if let Some(scaling) = &arch.query_scaling {
        put("attention.temperature_scale", Value::F32(scaling.beta as f32));
        put("attention.temperature_length", Value::count(scaling.original_max_position_embeddings));
    }
}

/// The sizes of mixers other than attention.
fn mixers(arch: &Arch, put: &mut impl FnMut(&str, Value)) {
    let mut parts = arch.blocks.iter().flat_map(|block| &block.branches).map(|branch| &branch.part);
    let Some(mixer) = parts.find(|part| is_mixer(part) && !matches!(part, PartSpec::Attention(_))) else { return };
    match mixer {
        PartSpec::DeltaNet(spec) => {
            put("ssm.conv_kernel", Value::count(spec.kernel));
            put("ssm.state_size", Value::count(spec.key_dim));
            put("ssm.group_count", Value::count(spec.key_heads));
            put("ssm.time_step_rank", Value::count(spec.value_heads));
            put("ssm.inner_size", Value::count(spec.value_size()));
            put("full_attention_interval", Value::count(interval(arch).unwrap_or(0)));
        }
        PartSpec::Mamba(spec) => {
            put("ssm.conv_kernel", Value::count(spec.kernel));
            put("ssm.state_size", Value::count(spec.state));
            put("ssm.group_count", Value::count(spec.groups));
            put("ssm.time_step_rank", Value::count(spec.heads));
            put("ssm.inner_size", Value::count(spec.inner_size()));
        }
        PartSpec::ShortConv(spec) => put("shortconv.l_cache", Value::count(spec.kernel)),
        _ => {}
    }
}

/// The number n, if exactly every n-th block has attention.
pub(super) fn interval(arch: &Arch) -> Option<usize> {
    let attends: Vec<bool> = arch.blocks.iter().map(|block| block.attention().is_some()).collect();
    let interval = attends.iter().position(|attends| *attends)? + 1;
    attends
        .iter()
        .enumerate()
        .all(|(layer, attends)| *attends == (layer + 1).is_multiple_of(interval))
        .then_some(interval)
}

fn of_experts(arch: &Arch, gguf: &Gguf, experts: &Experts, put: &mut impl FnMut(&str, Value)) {
    put("expert_count", Value::count(experts.count));
    put("expert_used_count", Value::count(experts.per_token));
    put("expert_feed_forward_length", Value::count(experts.width));
    if let Some(shared) = experts.shared {
        put("expert_shared_feed_forward_length", Value::count(shared.width));
        if gguf.router_keys {
            let whole = experts.names == ExpertNames::Nemotron;
            put("expert_shared_count", Value::count(if whole { 1 } else { shared.width / experts.width }));
        }
    }
    if experts.router.sigmoid || gguf.router_keys {
        put("expert_gating_func", Value::U32(if experts.router.sigmoid { 2 } else { 1 }));
    }
    if gguf.router_keys {
        put("expert_weights_norm", Value::Bool(experts.normalised));
        put("expert_weights_scale", Value::F32(experts.router.scale as f32));
        if let Some(groups) = experts.router.groups {
            put("expert_group_count", Value::count(groups.count));
            put("expert_group_used_count", Value::count(groups.chosen));
        }
    }
    if gguf.dense_first {
        let dense = arch.blocks.iter().take_while(|block| !block.has_experts()).count();
        put("leading_dense_block_count", Value::count(dense));
    }
    if let Some(latent) = experts.latent {
        put("moe_latent_size", Value::count(latent));
    }
}

/// The keys of Gemma 3n: several residual streams (`AltUp`), and MLP gates that keep few features.
fn streams(arch: &Arch, put: &mut impl FnMut(&str, Value)) {
    let Some(altup) = &arch.altup else { return };
    put("altup.active_idx", Value::count(altup.active));
    put("altup.num_inputs", Value::count(altup.streams));
    let cuts = arch.blocks.iter().map(|block| {
        block.branches.iter().find_map(|branch| match branch.part {
            PartSpec::Mlp { cut, .. } => cut,
            _ => None,
        })
    });
    put("activation_sparsity_scale", Value::F32s(cuts.map(|cut| cut.unwrap_or(f32::NEG_INFINITY)).collect()));
}

fn rotary(arch: &Arch, gguf: &Gguf, put: &mut impl FnMut(&str, Value)) {
    if gguf.stated_turns {
        put("rope.scaling.finetuned", Value::Bool(!arch.ropes.is_empty()));
    }
    let of = |window| first(arch, window).and_then(|attention| arch.ropes.get(attention.rope?));
    let Some(rope) = of(false).or_else(|| arch.ropes.first()) else { return };
    put("rope.dimension_count", Value::count(rope.rotary_dim));
    put("rope.freq_base", Value::F32(rope.theta as f32));
    if let Some(vision) = arch.vision.as_ref()
        && let Some(mrope) = &vision.mrope
    {
        let [time, row, column] = mrope.sections.map(|frequencies| frequencies as i32);
        put("rope.dimension_sections", Value::I32s(vec![time, row, column, 0]));
        if !vision.deepstack.is_empty() {
            put("n_deepstack_layers", Value::count(vision.deepstack.len()));
        }
    } else if gguf.sections {
        put("rope.dimension_sections", Value::I32s(sections(rope.rotary_dim / 2)));
    }
    scaling(arch, gguf, rope, put);
    let local = arch.ropes.get(1).or_else(|| of(true).filter(|_| gguf.listed_windows));
    if let Some(local) = local {
        put("rope.freq_base_swa", Value::F32(local.theta as f32));
        if gguf.uneven && gguf.listed_windows {
            put("rope.dimension_count_swa", Value::count(local.rotary_dim));
        }
    }
}

/// How many rotary frequencies belong to each axis of positions, divided as evenly as in Qwen's models.
fn sections(frequencies: usize) -> Vec<i32> {
    let third = |place: usize| ((frequencies + 2 - place) / 3) as i32;
    vec![third(0), third(1), third(2), 0]
}

fn scaling(arch: &Arch, gguf: &Gguf, rope: &Rope, put: &mut impl FnMut(&str, Value)) {
    match &rope.scaling {
        RopeScaling::Linear { factor } => {
            put("rope.scaling.type", Value::text("linear"));
            put("rope.scaling.factor", Value::F32(*factor as f32));
        }
        RopeScaling::Yarn { factor, original_max_position_embeddings, beta_fast, beta_slow, .. } => {
            put("rope.scaling.type", Value::text("yarn"));
            put("rope.scaling.factor", Value::F32(*factor as f32));
            put("rope.scaling.original_context_length", Value::count(*original_max_position_embeddings));
            put("rope.scaling.yarn_beta_fast", Value::F32(*beta_fast as f32));
            put("rope.scaling.yarn_beta_slow", Value::F32(*beta_slow as f32));
            if let Some(yarn) = Yarn::of(arch, gguf) {
                if yarn.log != 0.0 {
                    put("rope.scaling.yarn_log_multiplier", Value::F32(yarn.log as f32));
                }
                if (yarn.factor - 1.0).abs() > 1e-6 {
                    put("rope.scaling.attn_factor", Value::F32(yarn.factor as f32));
                }
            }
        }
        RopeScaling::LongRope { attention_factor, original_max_position_embeddings, .. } => {
            put("rope.scaling.type", Value::text("longrope"));
            put("rope.scaling.attn_factor", Value::F32(*attention_factor as f32));
            put("rope.scaling.original_context_length", Value::count(*original_max_position_embeddings));
        }
        RopeScaling::None
        | RopeScaling::Llama3 { .. }
        | RopeScaling::Dynamic { .. }
        | RopeScaling::Proportional { .. } => {}
    }
}

/// The factors of `YaRN` as a file states them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Yarn {
    /// `yarn_log_multiplier`; 0 without it.
    log: f64,
    /// `attn_factor`: a factor on cosines and sines in addition to llama.cpp's own.
    factor: f64,
}

impl Yarn {
    /// Computes both numbers; `None` without `YaRN`. The model's shape has no `mscale_all_dim`, so it is derived from the factors
    /// on scores and on cosines.
    fn of(arch: &Arch, gguf: &Gguf) -> Option<Self> {
        let RopeScaling::Yarn { factor, attention_factor, .. } = arch.ropes.first()?.scaling else { return None };
        let mscale = |all: f64| if factor <= 1.0 { 1.0 } else { 0.1 * all * factor.ln() + 1.0 };
        let Some(unit) = gguf.yarn_log else { return Some(Self { log: 0.0, factor: attention_factor / mscale(1.0) }) };
        if factor <= 1.0 {
            return Some(Self { log: 0.0, factor: attention_factor });
        }
        let ln = factor.ln();
        let attention = arch.attentions().next()?;
        let all = if attention.latent.is_some() {
            // The factor on scores is the square of mscale.
            ((arch.attention_scale * (attention.head_dim as f64).sqrt()).sqrt() - 1.0) / (0.1 * ln)
        } else {
            // The factor on cosines is mscale(1) / mscale(mscale_all_dim).
            (mscale(1.0) / attention_factor - 1.0) / (0.1 * ln)
        };
        let all = (all * 1e6).round() / 1e6;
        let own = if gguf.name == "deepseek2" && all != 0.0 && all != 1.0 { all } else { 1.0 };
        Some(Self { log: unit * all, factor: attention_factor / (mscale(own) / mscale(all)) })
    }

    /// Whether llama.cpp can compute with the model's factors. With latent attention it takes no `attn_factor`.
    pub(super) fn fits(arch: &Arch, gguf: &Gguf) -> bool {
        let latent = arch.attentions().any(|attention| attention.latent.is_some());
        Self::of(arch, gguf).is_none_or(|yarn| !latent || (yarn.factor - 1.0).abs() < 1e-5)
    }
}
