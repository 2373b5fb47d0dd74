//! Maps each tensor of a model to the tensors of a GGUF file that it becomes: their names, shapes, and changes of values.
use super::names::{in_block, name_of};
use super::rows::{Step, of_each, paired, tiled};
use tunesmith_config::arch::{
    Arch, AttentionSpec, DeltaNetNames, DeltaNetSpec, Gguf, LatentSpec, PER_LAYER_EMBEDDING, PartSpec, QkNorm, Rope,
    RopeScaling, TensorSpec,
};

/// A tensor of the file that is made from a tensor of the model, or from a part of one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Output {
    pub(super) name: String,
    /// Row-major; the last dimension is contiguous.
    pub(super) shape: Vec<usize>,
    pub(super) steps: Vec<Step>,
}

impl Output {
    /// The values of this tensor, computed from the `values` of the model's tensor `source`.
    pub(super) fn values(&self, source: &TensorSpec, values: Vec<f32>) -> Vec<f32> {
        let width = source.shape.iter().skip(1).product();
        self.steps.iter().fold((values, width), |(values, width), step| step.apply(values, width)).0
    }
}

/// What a tensor of the model becomes; `None` if llama.cpp has no name for it.
pub(super) fn outputs(arch: &Arch, gguf: &Gguf, spec: &TensorSpec) -> Option<Vec<Output>> {
    if let Some(outputs) = split(arch, spec) {
        return Some(outputs);
    }
    let name = name_of(arch, gguf, &spec.name)?;
    let steps = steps(arch, gguf, spec);
    Some(vec![Output { name, shape: shape(arch, spec), steps }])
}

/// The shape that a tensor which is not split has in the file.
fn shape(arch: &Arch, spec: &TensorSpec) -> Vec<usize> {
    let part = in_block(&spec.name).and_then(|(layer, rest)| Some((&arch.blocks.get(layer)?.branches, rest)));
    let mamba = part.and_then(|(branches, rest)| {
        branches.iter().find_map(|branch| match &branch.part {
            PartSpec::Mamba(mamba) => Some((mamba, rest)),
            _ => None,
        })
    });
    if let Some((mamba, rest)) = mamba {
        let own = rest.strip_prefix(arch.module_names.mamba);
        match own {
            Some(".A_log" | ".D") => return vec![mamba.heads, 1],
            Some(".norm.weight") => return vec![mamba.groups, mamba.inner_size() / mamba.groups],
            _ => {}
        }
    }
    match spec.shape.as_slice() {
        // The kernels of a depthwise convolution.
        &[channels, 1, kernel] => vec![channels, kernel],
        _ if spec.name == PER_LAYER_EMBEDDING => vec![arch.vocab_size, spec.shape[1]],
        // A matrix of one row is a vector in the file.
        &[1, width] => vec![width],
        other => other.to_vec(),
    }
}

/// The steps that change the values of a tensor which is not split.
fn steps(arch: &Arch, gguf: &Gguf, spec: &TensorSpec) -> Vec<Step> {
    if spec.name == PER_LAYER_EMBEDDING {
        let rows = arch.per_layer.as_ref().map_or(0, |table| table.vocab_size);
        // Tokens beyond the end of the table get its first row.
        return if rows == arch.vocab_size {
            Vec::new()
        } else {
            vec![Step::Rows((0..arch.vocab_size).map(|token| if token < rows { token } else { 0 }).collect())]
        };
    }
    let mut steps = Vec::new();
    if spec.name.ends_with("norm.weight") && arch.norm_offset != 0.0 && counts_from_one(arch, &spec.name) {
        steps.push(Step::Added(arch.norm_offset as f32));
    }
    let Some((layer, rest)) = in_block(&spec.name) else { return steps };
    for branch in arch.blocks.get(layer).into_iter().flat_map(|block| &block.branches) {
        match &branch.part {
            PartSpec::Attention(attention) => steps.extend(in_pairs(arch, gguf, attention, rest)),
            PartSpec::DeltaNet(spec) => steps.extend(in_tiles(spec, rest)),
            _ => {}
        }
    }
    if rest.ends_with(".A_log") {
        steps.push(Step::NegativeExp);
    }
    steps
}

/// Whether [`Arch::norm_offset`] must be added to the stored weights of this norm.
fn counts_from_one(arch: &Arch, name: &str) -> bool {
    !(name.contains(".linear_attn.") || arch.plain_final_norm && name == arch.final_norm())
}

/// The step that puts the rotary pairs of q and k next to each other, if llama.cpp has them so in this family and the model
/// does not.
fn in_pairs(arch: &Arch, gguf: &Gguf, attention: &AttentionSpec, rest: &str) -> Option<Step> {
    let own = rest.strip_prefix(arch.module_names.attention)?.strip_prefix('.')?;
    let (module, _) = own.rsplit_once('.')?;
    if let Some(LatentSpec { kv_rank, nope_dim, rope_dim, .. }) = attention.latent {
        return match module {
            _ if arch.ropes.first().is_none_or(|rope| rope.interleaved) => None,
            "q_proj" | "q_b_proj" => {
                Some(Step::Rows(paired(attention.num_heads, attention.head_dim, nope_dim, rope_dim)))
            }
            "kv_a_proj_with_mqa" => Some(Step::Rows(paired(1, kv_rank + rope_dim, kv_rank, rope_dim))),
            _ => None,
        };
    }
    let heads = match module {
        "q_proj" => attention.num_heads,
        "k_proj" => attention.num_kv_heads,
        _ => return None,
    };
    gguf.pairs.then(|| Step::Rows(paired(heads, attention.head_dim, 0, attention.head_dim)))
}

/// The step that puts the value heads of linear attention into llama.cpp's order, for Qwen3.5.
fn in_tiles(spec: &DeltaNetSpec, rest: &str) -> Option<Step> {
    let &DeltaNetSpec { names, key_heads, value_heads, value_dim, .. } = spec;
    if names != DeltaNetNames::Qwen || key_heads == value_heads {
        return None;
    }
    let tiles = |first: usize, size: usize| tiled(first, key_heads, value_heads, size);
    match rest.strip_prefix("linear_attn.")? {
        "in_proj_qkv.weight" | "conv1d.weight" => Some(Step::Rows(tiles(2 * spec.key_size(), value_dim))),
        "in_proj_z.weight" => Some(Step::Rows(tiles(0, value_dim))),
        "in_proj_b.weight" | "in_proj_a.weight" | "A_log" | "dt_bias" => Some(Step::Rows(tiles(0, 1))),
        "out_proj.weight" => Some(Step::Columns(tiles(0, value_dim))),
        _ => None,
    }
}

/// The parts of a tensor that becomes two in the file; `None` if it stays whole.
fn split(arch: &Arch, spec: &TensorSpec) -> Option<Vec<Output>> {
    let (layer, rest) = in_block(&spec.name)?;
    let block = arch.blocks.get(layer)?;
    let output = |name: &str, shape: &[usize], steps: Vec<Step>| Output {
        name: format!("blk.{layer}.{name}.weight"),
        shape: shape.to_vec(),
        steps,
    };
    let width = *spec.shape.last()?;
    for branch in &block.branches {
        match &branch.part {
            PartSpec::Attention(AttentionSpec { latent: Some(latent), num_heads: heads, .. })
                if rest == "self_attn.kv_b_proj.weight" =>
            {
                let (keys, values, heads) = (latent.nope_dim, latent.value_dim, *heads);
                let of = |first, count| Step::Rows(of_each(heads, keys + values, first, count));
                return Some(vec![
                    output("attn_k_b", &[heads, width, keys], vec![of(0, keys), Step::Transposed(heads)]),
                    output("attn_v_b", &[heads, values, width], vec![of(keys, values)]),
                ]);
            }
            PartSpec::DeltaNet(delta) if rest == "linear_attn.in_proj_qkvz.weight" => {
                let (key, groups) = (delta.key_dim, delta.key_heads);
                let value = delta.value_heads / groups * delta.value_dim;
                let of = |first, count| of_each(groups, 2 * key + 2 * value, first, count);
                let qkv = [of(0, key), of(key, key), of(2 * key, value)].concat();
                return Some(vec![
                    output("attn_qkv", &[qkv.len(), width], vec![Step::Rows(qkv)]),
                    output("attn_gate", &[delta.value_size(), width], vec![Step::Rows(of(2 * key + value, value))]),
                ]);
            }
            _ => {}
        }
    }
    // Granite 4's fused gate and up.
    let both = arch.module_names.gate_up.filter(|name| *name == "input_linear")?;
    if rest != format!("{}.{both}.weight", arch.module_names.mlp) {
        return None;
    }
    let half = spec.shape[0] / 2;
    let end = if block.has_experts() { "_shexp" } else { "" };
    let of = |name: &str, first: usize| {
        output(&format!("{name}{end}"), &[half, width], vec![Step::Rows((first..first + half).collect())])
    };
    Some(vec![of("ffn_gate", 0), of("ffn_up", half)])
}

/// A tensor that no model folder has: its name, its shape, and its values.
pub(super) type Computed = (String, Vec<usize>, Vec<f32>);

/// Computed tensors: the factors of rotary frequencies, and norms on q and k that have no weights elsewhere.
pub(super) fn computed(arch: &Arch) -> Vec<Computed> {
    let of = |(name, values): (String, Vec<f32>)| (name, vec![values.len()], values);
    let mut all: Vec<Computed> = rotary_factors(arch).into_iter().map(of).collect();
    if arch.altup.is_some() {
        all.extend(unread(arch));
    }
    if arch.qk_norm == QkNorm::Weightless {
        for (layer, block) in arch.blocks.iter().enumerate() {
            let Some(attention) = block.attention() else { continue };
            // llama.cpp scales scores by 1 / sqrt(head_dim) alone, so the norm on q carries the rest of the model's scale.
            let scale = arch.attention_scale * (attention.head_dim as f64).sqrt();
            for (name, value) in [("attn_q_norm", scale as f32), ("attn_k_norm", 1.0)] {
                all.push(of((format!("blk.{layer}.{name}.weight"), vec![value; attention.head_dim])));
            }
        }
    }
    all
}

/// Zeros for projections of keys and values in the blocks of Gemma 3n that share those of others. llama.cpp requires the
/// tensors but never reads them.
fn unread(arch: &Arch) -> Vec<Computed> {
    let mut all = Vec::new();
    for (layer, block) in arch.blocks.iter().enumerate() {
        let Some(attention) = block.attention().filter(|attention| attention.kv_from.is_some()) else { continue };
        let matrix = vec![attention.kv_size(), arch.hidden_size];
        for (name, shape) in [("attn_k", &matrix), ("attn_v", &matrix), ("attn_k_norm", &vec![attention.head_dim])] {
            let zeros = vec![0.0; shape.iter().product()];
            all.push((format!("blk.{layer}.{name}.weight"), shape.clone(), zeros));
        }
    }
    all
}

fn rotary_factors(arch: &Arch) -> Vec<(String, Vec<f32>)> {
    let Some(rope) = arch.ropes.first() else { return Vec::new() };
    let narrow = |factors: &[f64]| factors.iter().map(|&factor| factor as f32).collect();
    match &rope.scaling {
        RopeScaling::Llama3 { .. } => {
            let plain = Rope { scaling: RopeScaling::None, ..rope.clone() };
            let (plain, scaled) = (plain.frequencies(1).inv_freq, rope.frequencies(1).inv_freq);
            let factors = plain.iter().zip(scaled).map(|(plain, scaled)| plain / scaled).collect();
            vec![("rope_freqs.weight".to_owned(), factors)]
        }
        &RopeScaling::Proportional { pairs, factor } => {
            // A huge divisor stands for the frequency 0.
            let of = |pair| if pair < pairs { factor as f32 } else { 1e30 };
            vec![("rope_freqs.weight".to_owned(), (0..rope.rotary_dim / 2).map(of).collect())]
        }
        RopeScaling::LongRope { short_factor, long_factor, .. } => vec![
            ("rope_factors_long.weight".to_owned(), narrow(long_factor)),
            ("rope_factors_short.weight".to_owned(), narrow(short_factor)),
        ],
        _ => Vec::new(),
    }
}
