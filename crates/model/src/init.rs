//! Initial values, for a base model from scratch and for adapters. Every tensor draws from its own random stream, named by
//! the run's seed and the tensor's name. So adding a tensor changes no other.
use tunesmith_config::arch::{Arch, LAYER_SCALAR};

/// A stream of numbers that depends on the seed and the name only (`SplitMix64`, Steele, Lea and Flood, 2014).
#[derive(Debug)]
pub struct Stream(u64);

impl Stream {
    /// The stream of one tensor.
    pub fn new(seed: u64, name: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes()).update(name.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        Self(u64::from_le_bytes(first))
    }

    /// Uniform in `0..1`.
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// `count` numbers, uniform in `-bound..bound`.
    pub fn uniforms(mut self, bound: f64, count: usize) -> Vec<f32> {
        (0..count).map(|_| ((2.0 * self.uniform() - 1.0) * bound) as f32).collect()
    }

    /// `count` normal numbers with mean 0 (Box and Muller's transform).
    pub fn normals(mut self, deviation: f64, count: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(count + 1);
        while out.len() < count {
            let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt() * deviation;
            let (sin, cos) = (std::f64::consts::TAU * self.uniform()).sin_cos();
            out.extend([(radius * cos) as f32, (radius * sin) as f32]);
        }
        out.truncate(count);
        out
    }
}

/// Whether a tensor is a norm's weight or a bias, which Hugging Face does not draw at random. Encoders number their
/// norms.
pub fn is_norm_or_bias(name: &str) -> bool {
    let module = name.strip_suffix(".weight").and_then(|module| module.rsplit('.').next());
    let is_norm = |module: &str| module.trim_end_matches(['1', '2', '_']).contains("norm") || module.starts_with("ln_");
    module.is_some_and(is_norm) || is_bias(name)
}

/// Whether Hugging Face's `Trainer` applies weight decay to a tensor: to all but norms and biases. The norm after
/// Nemotron-H's blocks decays too: the patterns of `get_decay_parameter_names` miss its name, `norm_f`, and its class
/// is not `LayerNorm`.
pub fn decays(name: &str) -> bool {
    !is_norm_or_bias(name) || name.ends_with(".norm_f.weight")
}

/// Whether it is a bias by the rule of Hugging Face's `Trainer`, by which `dt_bias` is one.
fn is_bias(name: &str) -> bool {
    name.ends_with("bias")
}

/// The initial values of a base tensor, as `transformers` sets them: a gain of one for norms, zeros for biases, else
/// normal numbers with the model's `initializer_range` as deviation.
pub fn base(seed: u64, name: &str, count: usize, arch: &Arch) -> Vec<f32> {
    let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    let plain =
        [".linear_attn.norm.weight", ".dt_bias", ".D", LAYER_SCALAR, ".router.scale", ".router.per_expert_scale"];
    if ends(&plain) || arch.plain_final_norm && name == arch.final_norm() {
        vec![1.0; count]
    } else if ends(&["norm.weight", "layernorm_1.weight", "layernorm_2.weight"]) || name == arch.final_norm() {
        vec![1.0 - arch.norm_offset as f32; count]
    } else if arch.layer_norms && is_norm_or_bias(name) && !is_bias(name) {
        vec![1.0; count]
    } else if arch.module_names.transposed && name.ends_with(".c_proj.weight") {
        // GPT-2: the more blocks add to the stream, the less each adds at first.
        let deviation = arch.initializer_range / (2.0 * arch.num_hidden_layers as f64).sqrt();
        Stream::new(seed, name).normals(deviation, count)
    } else if name.ends_with(".A_log") && !name.ends_with(".linear_attn.A_log") {
        // Mamba 2: the rates 1, 2, 3 and so on.
        (1..=count).map(|rate| (rate as f32).ln()).collect()
    } else if name.ends_with(".A_log") {
        // The logarithm of a rate between 0.01 and 16.
        let rates = Stream::new(seed, name).uniforms(1.0, count);
        rates.into_iter().map(|rate| (0.01 + 7.995 * (rate + 1.0)).ln()).collect()
    } else if is_bias(name) {
        vec![0.0; count]
    } else {
        Stream::new(seed, name).normals(arch.initializer_range, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_as_asked_and_streams_differ() {
        let normals = Stream::new(1, "a").normals(0.02, 100_000);
        let mean = normals.iter().sum::<f32>() / 1e5;
        let deviation = (normals.iter().map(|x| x * x).sum::<f32>() / 1e5).sqrt();
        assert!(mean.abs() < 3e-4 && (deviation - 0.02).abs() < 3e-4, "{mean} {deviation}");
        let uniforms = Stream::new(1, "b").uniforms(0.5, 100_000);
        assert!(uniforms.iter().all(|x| x.abs() <= 0.5));
        assert!((uniforms.iter().map(|x| x * x).sum::<f32>() / 1e5 - 0.25 / 3.0).abs() < 2e-3);
        assert_ne!(Stream::new(1, "a").normals(1.0, 4), Stream::new(2, "a").normals(1.0, 4));
    }

    /// The patterns of Transformers' `Trainer.get_decay_parameter_names`: `bias`, `layernorm`, `rmsnorm`, `(?:^|\.)norm(?:$|\.)` and
    /// `_norm(?:$|\.)`.
    fn trainer_decays(name: &str) -> bool {
        let name = name.to_lowercase();
        let within = ["bias", "layernorm", "rmsnorm"].iter().any(|pattern| name.contains(pattern));
        !within && name.split('.').all(|part| part != "norm" && !part.ends_with("_norm"))
    }

    #[test]
    fn tensors_of_nemotron_h_decay_as_in_the_trainer() {
        let config = r#"{"model_type": "nemotron_h", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8,
            "num_attention_heads": 2, "num_key_value_heads": 1, "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2}"#;
        let arch = Arch::from_json(config, std::path::Path::new("config.json")).unwrap();
        assert!(decays("model.norm_f.weight"));
        for spec in arch.tensors() {
            assert_eq!(decays(&spec.name), trainer_decays(&spec.name), "{}", spec.name);
        }
    }
}
