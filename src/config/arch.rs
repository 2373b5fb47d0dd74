//! A model folder's `config.json` as a checked description of the decoder: what is run, in which sizes.
//!
//! Both spellings are read: Transformers 4 (`rope_theta`, `rope_scaling`) and Transformers 5 (`rope_parameters`).
//! Whatever would change the numbers and is not implemented is refused by name; nothing is half-run.
use std::path::Path;

use super::hf_json::{MAX_SIZE, Source, read_text};
use crate::error::{Error, Result};

/// Bound of the number of decoder blocks.
const MAX_LAYERS: usize = 4096;

/// The decoder families that are implemented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `model_type: llama` (also `SmolLM2`, `TinyLlama` and others in the same form).
    Llama,
    /// `model_type: qwen2` (Qwen2, Qwen2.5): biases on q, k and v.
    Qwen2,
    /// `model_type: qwen3`: RMS norms on each head of q and k.
    Qwen3,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];

    /// The `model_type` of `config.json`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The entry of `architectures` that this family has as a causal language model.
    pub const fn class_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// How rotary frequencies are stretched for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// `rope_type: default`.
    None,
    /// `rope_type: llama3`: low frequencies divided by `factor`, a smooth ramp between the two wavelengths.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// `original_max_position_embeddings / low_freq_factor` is the wavelength above which all is divided.
        low_freq_factor: f64,
        /// `original_max_position_embeddings / high_freq_factor` is the wavelength below which nothing changes.
        high_freq_factor: f64,
        /// Context length of the pretraining.
        original_max_position_embeddings: usize,
    },
}

/// Rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Long-context rule.
    pub scaling: RopeScaling,
}

impl Rope {
    /// The `head_dim / 2` inverse frequencies, with every step in f32 and in the order in which Transformers takes it.
    pub fn inv_freq(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2).map(|pair| self.scaled((2 * pair) as f32 / head_dim as f32)).collect()
    }

    /// `1 / theta^exponent`, stretched.
    fn scaled(&self, exponent: f32) -> f32 {
        let inv_freq = 1.0 / f64::from(self.theta as f32).powf(f64::from(exponent)) as f32;
        let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } =
            self.scaling
        else {
            return inv_freq;
        };
        let original = original_max_position_embeddings as f64;
        // PyTorch computes `scalar / tensor` as `tensor.reciprocal() * scalar`; so do we.
        let wavelength = (1.0 / inv_freq) * (2.0 * std::f64::consts::PI) as f32;
        if wavelength > (original / low_freq_factor) as f32 {
            inv_freq / factor as f32
        } else if wavelength < (original / high_freq_factor) as f32 {
            inv_freq
        } else {
            let above = (1.0 / wavelength) * original as f32 - low_freq_factor as f32;
            let smooth = above / (high_freq_factor - low_freq_factor) as f32;
            (1.0 - smooth) * inv_freq / factor as f32 + smooth * inv_freq
        }
    }
}

/// A tensor that a model folder must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Hugging Face's name, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Row-major sizes.
    pub shape: Vec<usize>,
}

/// A linear module of the model: its weight is `[out_features, in_features]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearSpec {
    /// Module name, such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// Rows of the weight.
    pub out_features: usize,
    /// Columns of the weight.
    pub in_features: usize,
    /// Whether the module adds a bias.
    pub bias: bool,
    /// Number of the decoder block; none for `lm_head`.
    pub layer: Option<usize>,
}

/// A decoder's family and sizes, all checked.
#[allow(clippy::struct_excessive_bools)] // each is a fact of the architecture of its own
#[derive(Debug, Clone, PartialEq)]
pub struct Arch {
    /// Which family.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of decoder blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: Rope,
    /// The head uses the embedding's matrix.
    pub tie_word_embeddings: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on o.
    pub o_bias: bool,
    /// Biases in the MLP.
    pub mlp_bias: bool,
    /// RMS norms on each head of q and k.
    pub qk_norm: bool,
    /// Longest context that the model was made for.
    pub max_position_embeddings: usize,
    /// Standard deviation of a fresh weight.
    pub initializer_range: f64,
    /// Beginning of text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Padding. Its embedding row takes no gradient from the input side in Transformers.
    pub pad_token_id: Option<u32>,
    /// The rows of the embedding that `tuning.new_tokens` fills; none in a `config.json`.
    pub new_tokens: Vec<u32>,
}

impl Arch {
    /// Reads `dir/config.json`; the stop tokens of `dir/generation_config.json` go before its own, as in `generate`.
    ///
    /// # Errors
    /// [`crate::Kind::Model`]: a missing or malformed file, an impossible size, or an unsupported feature by name.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = read_text(&path)?.ok_or_else(|| {
            Error::model(format!("{}: no such file", path.display())).hint(
                "a model is a folder in Hugging Face's form: config.json, *.safetensors, tokenizer.json, tokenizer_config.json",
            )
        })?;
        let mut arch = Self::from_json(&text, &path)?;
        let path = dir.join("generation_config.json");
        if let Some(text) = read_text(&path)? {
            let ids = Source::parse(&text, &path)?.token_ids("eos_token_id")?;
            if !ids.is_empty() {
                arch.eos_token_ids = ids;
            }
        }
        Ok(arch)
    }

    /// Reads the text of a `config.json`; `origin` is named in errors.
    ///
    /// # Errors
    /// As [`Arch::from_dir`].
    pub fn from_json(text: &str, origin: &Path) -> Result<Self> {
        let source = Source::parse(text, origin)?;
        let family = source.family()?;
        source.refuse_unsupported(family)?;
        let hidden_size = source.size("hidden_size", None)?;
        let num_attention_heads = source.size("num_attention_heads", None)?;
        let key_value_heads = match family {
            Family::Llama => num_attention_heads,
            Family::Qwen2 | Family::Qwen3 if source.has("num_key_value_heads") => num_attention_heads,
            Family::Qwen2 | Family::Qwen3 => 32, // the default of their Transformers classes
        };
        let head_dim = source.head_dim(family, hidden_size, num_attention_heads)?;
        let num_hidden_layers = source.size("num_hidden_layers", None)?;
        let default_context = if family == Family::Llama { 2048 } else { 32_768 };
        let max_position_embeddings =
            source.size_up_to("max_position_embeddings", Some(default_context), usize::MAX >> 1)?;
        let attention_bias = family != Family::Qwen2 && source.flag("attention_bias", false)?;
        let arch = Self {
            family,
            hidden_size,
            intermediate_size: source.size("intermediate_size", None)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: source.size("num_key_value_heads", Some(key_value_heads))?,
            head_dim,
            vocab_size: source.size("vocab_size", None)?,
            rms_norm_eps: source.positive("rms_norm_eps", 1e-6)?,
            rope: source.rope(max_position_embeddings)?,
            tie_word_embeddings: source.flag("tie_word_embeddings", false)?,
            qkv_bias: family == Family::Qwen2 || attention_bias,
            o_bias: attention_bias,
            mlp_bias: family == Family::Llama && source.flag("mlp_bias", false)?,
            qk_norm: family == Family::Qwen3,
            max_position_embeddings,
            initializer_range: source.positive("initializer_range", 0.02)?,
            bos_token_id: source.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: source.token_ids("eos_token_id")?,
            pad_token_id: source.token_ids("pad_token_id")?.first().copied(),
            new_tokens: Vec::new(),
        };
        arch.check(&source)?;
        Ok(arch)
    }

    /// Holds sizes against each other.
    fn check(&self, source: &Source<'_>) -> Result<()> {
        let (heads, kv) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv) {
            return Err(
                source.error(format!("num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}"))
            );
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(source.error(format!("head_dim is {}, expected an even number", self.head_dim)));
        }
        if self.num_hidden_layers > MAX_LAYERS {
            let found = self.num_hidden_layers;
            return Err(source.error(format!("num_hidden_layers is {found}, expected at most {MAX_LAYERS}")));
        }
        if heads * self.head_dim > MAX_SIZE {
            let found = heads * self.head_dim;
            return Err(source.error(format!("num_attention_heads * head_dim is {found}, expected at most {MAX_SIZE}")));
        }
        let layer: usize = self.layer_tensors(0).iter().map(TensorSpec::len).sum();
        let rest = 2 * self.vocab_size * self.hidden_size;
        let bytes = layer.checked_mul(self.num_hidden_layers).and_then(|n| n.checked_add(rest)?.checked_mul(16));
        match bytes {
            Some(_) => Ok(()),
            None => Err(source.error("the sizes describe a model beyond what this machine can address")),
        }
    }

    /// Every tensor of the model in its order; `lm_head.weight` is absent when tied.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = vec![tensor("model.embed_tokens.weight", &[self.vocab_size, self.hidden_size])];
        tensors.extend((0..self.num_hidden_layers).flat_map(|layer| self.layer_tensors(layer)));
        tensors.push(tensor("model.norm.weight", &[self.hidden_size]));
        if !self.tie_word_embeddings {
            tensors.push(tensor("lm_head.weight", &[self.vocab_size, self.hidden_size]));
        }
        tensors
    }

    fn layer_tensors(&self, layer: usize) -> Vec<TensorSpec> {
        let prefix = format!("model.layers.{layer}");
        let mut tensors = vec![tensor(&format!("{prefix}.input_layernorm.weight"), &[self.hidden_size])];
        for linear in self.layer_linears(layer) {
            if linear.name.ends_with(".gate_proj") {
                tensors.push(tensor(&format!("{prefix}.post_attention_layernorm.weight"), &[self.hidden_size]));
            }
            tensors.push(tensor(&format!("{}.weight", linear.name), &[linear.out_features, linear.in_features]));
            if linear.bias {
                tensors.push(tensor(&format!("{}.bias", linear.name), &[linear.out_features]));
            }
            if self.qk_norm && linear.name.ends_with(".k_proj") {
                tensors.push(tensor(&format!("{prefix}.self_attn.q_norm.weight"), &[self.head_dim]));
                tensors.push(tensor(&format!("{prefix}.self_attn.k_norm.weight"), &[self.head_dim]));
            }
        }
        tensors
    }

    /// Makes room for tokens: the embedding and the head end behind the highest of them, if they ended before.
    pub fn grow(&mut self, tokens: Vec<u32>) {
        let needed = tokens.iter().max().map_or(0, |&last| last as usize + 1);
        self.vocab_size = self.vocab_size.max(needed);
        self.new_tokens = tokens;
    }

    /// Every linear module in model order: q, k, v, o, gate, up, down of each block, then `lm_head` (tied or not).
    pub fn linear_modules(&self) -> Vec<LinearSpec> {
        let mut modules: Vec<_> = (0..self.num_hidden_layers).flat_map(|layer| self.layer_linears(layer)).collect();
        modules.push(LinearSpec {
            name: "lm_head".into(),
            out_features: self.vocab_size,
            in_features: self.hidden_size,
            bias: false,
            layer: None,
        });
        modules
    }

    fn layer_linears(&self, layer: usize) -> Vec<LinearSpec> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (query, key) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        [
            ("self_attn.q_proj", query, hidden, self.qkv_bias),
            ("self_attn.k_proj", key, hidden, self.qkv_bias),
            ("self_attn.v_proj", key, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, query, self.o_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ]
        .map(|(name, out_features, in_features, bias)| LinearSpec {
            name: format!("model.layers.{layer}.{name}"),
            out_features,
            in_features,
            bias,
            layer: Some(layer),
        })
        .to_vec()
    }
}

impl TensorSpec {
    /// How many numbers the tensor holds.
    #[allow(clippy::len_without_is_empty)] // no tensor of a checked model is empty
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

fn tensor(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.to_vec() }
}
