//! llama.cpp's names for a family's sizes and tensors, and its order of the rows of q and k. Models that llama.cpp computes
//! differently are refused; each family's file lists its reasons.
use super::container::{Header, Value};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, BlockSpec, Gguf, PartSpec, RopeScaling, TensorSpec};

/// A model family as llama.cpp knows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout(Gguf);

/// A tensor of the file: its name and shape, and the model's tensors that it concatenates.
type Made = (String, Vec<usize>, Vec<TensorSpec>);

impl Layout {
    /// The layout of a model.
    pub(super) fn of(arch: &Arch) -> Result<Self> {
        let family = arch.family;
        let Some(gguf) = family.gguf else { return Err(refuse(family.model_type, "this family", HINT)) };
        check(arch, &gguf)?;
        Ok(Self(gguf))
    }

    pub(super) const fn name(&self) -> &'static str {
        self.0.name
    }

    /// Writes the sizes of the model to the header.
    pub(super) fn describe(&self, arch: &Arch, header: &mut Header) {
        let mut put = |key: &str, value: Value| header.own(key, value);
        put("block_count", Value::count(arch.num_hidden_layers));
        put("context_length", Value::count(arch.max_position_embeddings));
        put("embedding_length", Value::count(arch.hidden_size));
        put("feed_forward_length", Value::count(arch.intermediate_size));
        if let Some(attention) = arch.uniform_attention() {
            put("attention.head_count", Value::count(attention.num_heads));
            put("attention.head_count_kv", Value::count(attention.num_kv_heads));
            put("attention.key_length", Value::count(attention.head_dim));
            put("attention.value_length", Value::count(attention.head_dim));
        }
        put("attention.layer_norm_rms_epsilon", Value::F32(arch.rms_norm_eps as f32));
        put("vocab_size", Value::count(arch.vocab_size));
        if let Some(cap) = arch.attention_softcap {
            put("attn_logit_softcapping", Value::F32(cap as f32));
        }
        if let Some(cap) = arch.logit_softcap {
            put("final_logit_softcapping", Value::F32(cap as f32));
        }
        if let Some(window) = arch.attentions().find_map(|attention| attention.window) {
            put("attention.sliding_window", Value::count(window));
        }
        if self.0.scales {
            put("attention.scale", Value::F32(arch.attention_scale as f32));
            put("embedding_scale", Value::F32(arch.embedding_scale as f32));
            put("residual_scale", Value::F32(arch.residual_scale as f32));
            put("logit_scale", Value::F32((1.0 / arch.logit_scale) as f32));
        }
        if let Some(experts) = &arch.experts {
            put("expert_count", Value::count(experts.count));
            put("expert_used_count", Value::count(experts.per_token));
            put("expert_feed_forward_length", Value::count(experts.width));
            if let Some(shared) = experts.shared {
                put("expert_shared_feed_forward_length", Value::count(shared.width));
            }
        }
        let Some(rope) = arch.ropes.first() else { return };
        put("rope.dimension_count", Value::count(rope.rotary_dim));
        put("rope.freq_base", Value::F32(rope.theta as f32));
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
        if let Some(local) = arch.ropes.get(1) {
            put("rope.freq_base_swa", Value::F32(local.theta as f32));
        }
    }

    /// Computed tensors that no model folder has: the factors of rotary frequencies.
    #[allow(clippy::unused_self, reason = "one of the layout's tables")]
    pub(super) fn extra(&self, arch: &Arch) -> Vec<(String, Vec<f32>)> {
        let Some(rope) = arch.ropes.first() else { return Vec::new() };
        let narrow = |factors: &[f64]| factors.iter().map(|&factor| factor as f32).collect();
        match &rope.scaling {
            RopeScaling::Llama3 { .. } => {
                let plain = tunesmith_config::arch::Rope { scaling: RopeScaling::None, ..rope.clone() };
                let (plain, scaled) = (plain.frequencies(1).inv_freq, rope.frequencies(1).inv_freq);
                let factors = plain.iter().zip(scaled).map(|(plain, scaled)| plain / scaled).collect();
                vec![("rope_freqs.weight".to_owned(), factors)]
            }
            RopeScaling::LongRope { short_factor, long_factor, .. } => vec![
                ("rope_factors_long.weight".to_owned(), narrow(long_factor)),
                ("rope_factors_short.weight".to_owned(), narrow(short_factor)),
            ],
            _ => Vec::new(),
        }
    }

    /// The tensors of the file in their order.
    pub(super) fn tensors(&self, arch: &Arch) -> Result<Vec<Made>> {
        let mut made: Vec<Made> = Vec::new();
        for spec in arch.tensors() {
            let name = self.rename(arch, &spec.name)?;
            // The experts of a block are one tensor.
            if spec.name.contains(".experts.") {
                if let Some((_, shape, parts)) = made.iter_mut().find(|(other, ..)| *other == name) {
                    shape[0] += 1;
                    parts.push(spec);
                    continue;
                }
                made.push((name, [&[1], spec.shape.as_slice()].concat(), vec![spec]));
            } else {
                // A matrix of one row is a vector there.
                let shape = if spec.shape.first() == Some(&1) { spec.shape[1..].to_vec() } else { spec.shape.clone() };
                made.push((name, shape, vec![spec]));
            }
        }
        Ok(made)
    }

    /// llama.cpp's name of a tensor.
    pub(super) fn rename(&self, arch: &Arch, name: &str) -> Result<String> {
        match name {
            "model.embed_tokens.weight" => return Ok("token_embd.weight".into()),
            "model.norm.weight" => return Ok("output_norm.weight".into()),
            "lm_head.weight" => return Ok("output.weight".into()),
            _ => {}
        }
        let unknown = || Error::model(format!("{name} has no name in GGUF files of the architecture {}", self.0.name));
        let (layer, rest) =
            name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')).ok_or_else(unknown)?;
        let (module, kind) = rest.rsplit_once('.').ok_or_else(unknown)?;
        let part = match module {
            "input_layernorm" => "attn_norm",
            "post_attention_layernorm" if is_before_mlp(arch, module) => "ffn_norm",
            "post_attention_layernorm" => "post_attention_norm",
            "pre_feedforward_layernorm" => "ffn_norm",
            "post_feedforward_layernorm" => "post_ffw_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.qkv_proj" => "attn_qkv",
            "self_attn.o_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
            "mlp.down_proj" => "ffn_down",
            "mlp.gate" | "block_sparse_moe.gate" => "ffn_gate_inp",
            "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
            "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
            "mlp.shared_expert.up_proj" => "ffn_up_shexp",
            "mlp.shared_expert.down_proj" => "ffn_down_shexp",
            other if other.contains(".experts.") => match other.rsplit('.').next() {
                Some("gate_proj" | "w1") => "ffn_gate_exps",
                Some("up_proj" | "w3") => "ffn_up_exps",
                Some("down_proj" | "w2") => "ffn_down_exps",
                _ => return Err(unknown()),
            },
            _ => return Err(unknown()),
        };
        Ok(format!("blk.{layer}.{part}.{kind}"))
    }

    /// Converts a tensor to llama.cpp's form: norms include the added 1, and rows of q and k are in pairs. This also applies to
    /// an adapter's B, which has the same rows.
    pub(super) fn transform(&self, arch: &Arch, name: &str, values: &mut Vec<f32>) {
        if name.ends_with("norm.weight") && arch.norm_offset != 0.0 {
            for value in values.iter_mut() {
                *value += arch.norm_offset as f32;
            }
        }
        let Some(attention) = arch.uniform_attention().filter(|_| self.0.pairs) else { return };
        let heads = match name {
            _ if name.contains(".self_attn.q_proj.") => attention.num_heads,
            _ if name.contains(".self_attn.k_proj.") => attention.num_kv_heads,
            _ => return,
        };
        let half = attention.head_dim / 2;
        let width = values.len() / (heads * attention.head_dim);
        let mut out = Vec::with_capacity(values.len());
        for head in values.chunks_exact(attention.head_dim * width) {
            for pair in 0..half {
                out.extend_from_slice(&head[pair * width..][..width]);
                out.extend_from_slice(&head[(half + pair) * width..][..width]);
            }
        }
        *values = out;
    }
}

/// Whether the norm of that name is the one before the MLP or the experts.
fn is_before_mlp(arch: &Arch, norm: &str) -> bool {
    let mut branches = arch.blocks.iter().flat_map(|block| &block.branches);
    branches.any(|branch| branch.norm == Some(norm) && !matches!(branch.part, PartSpec::Attention(_)))
}

const HINT: &str = "serve the merged folder with Transformers or vLLM instead";

fn refuse(family: &str, what: &str, hint: &str) -> Error {
    Error::model(format!("GGUF of a {family} model: llama.cpp does not compute {what}")).hint(hint)
}

/// Refuses models that differ from a fixed rule of llama.cpp.
fn check(arch: &Arch, gguf: &Gguf) -> Result<()> {
    let no = |what: &str| Err(refuse(arch.family.model_type, what, HINT));
    let wide = gguf.wide == Some(arch.num_hidden_layers);
    let Some(attention) = arch.uniform_attention() else { return no("heads that differ from block to block") };
    let side = if wide { arch.hidden_size / attention.num_heads } else { attention.head_dim };
    if !gguf.scales && (arch.attention_scale - (side as f64).powf(-0.5)).abs() > 1e-6 {
        return no(&format!("scores scaled by {}", arch.attention_scale));
    }
    if gguf.tied && !arch.tie_word_embeddings {
        return no("an output head with its own matrix");
    }
    let windows = |rule: &fn(usize) -> bool| {
        arch.attentions().enumerate().all(|(layer, attention)| attention.window.is_some() == rule(layer))
    };
    // A window at least as long as the context has no effect.
    let none = || arch.attentions().all(|it| it.window.is_none_or(|window| window >= arch.max_position_embeddings));
    if !(gguf.windows.iter().any(windows) || gguf.windows.is_empty() && none()) {
        return no("a sliding window in these blocks");
    }
    if !arch.attentions().enumerate().all(|(layer, attention)| attention.rope.is_some() == (gguf.turns)(layer)) {
        return no("positions in only some blocks");
    }
    if let Some(experts) = &arch.experts {
        if !arch.blocks.iter().all(BlockSpec::has_experts) {
            return no("dense blocks between expert blocks");
        }
        if experts.normalised != gguf.normalised {
            return no("this weighting of experts");
        }
    }
    let Some(rope) = arch.ropes.first() else { return Ok(()) };
    let lacks = |what: &str| !gguf.ropes.contains(&what);
    match &rope.scaling {
        RopeScaling::Dynamic { .. } => no("rope_type dynamic"),
        RopeScaling::Proportional { .. } => no("rope_type proportional"),
        RopeScaling::LongRope { .. } if lacks("longrope") => no("rope_type longrope"),
        RopeScaling::Llama3 { .. } if lacks("llama3") => no("rope_type llama3"),
        _ if rope.rotary_dim != attention.head_dim && lacks("partial") => no("partial rotary embeddings"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Layout;
    use tunesmith_config::arch::Arch;

    #[test]
    fn a_head_of_its_own_is_written_where_llama_cpp_has_one() {
        for (family, refused) in [("qwen2", false), ("gemma", true)] {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/a").join(family).join("model");
            let mut arch = Arch::from_dir(&dir).unwrap();
            let names =
                |arch: &Arch| Layout::of(arch)?.tensors(arch).map(|made| made.into_iter().map(|(name, ..)| name));
            assert!(names(&arch).unwrap().all(|name| name != "output.weight"), "{family}");
            arch.separate(&["lm_head".to_owned()]);
            match names(&arch) {
                Ok(mut names) => assert!(!refused && names.any(|name| name == "output.weight"), "{family}"),
                Err(error) => {
                    assert!(refused && error.to_string().contains("an output head with its own matrix"), "{error}");
                }
            }
        }
    }
}
