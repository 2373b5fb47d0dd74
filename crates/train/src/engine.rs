//! What computes: the kernels that `tuning.backend` asks for, and the stamp that says what really ran.
use super::prepare::Prepared;
use tunesmith_base::error::Result;
use tunesmith_checkpoint::Stamp;
use tunesmith_checkpoint::stamp::{Engine, Hashes};
use tunesmith_config::{Backend, Config, Dtype, Mode, ModelConfig, Quantization};
use tunesmith_model::freeze;
use tunesmith_model::quantize::{Held, How};
use tunesmith_model::targets::Targets;
use tunesmith_ops::quant::Format;
use tunesmith_ops::simd::{self, Level};

/// The engine behind a backend's name.
pub const fn engine(backend: Backend) -> &'static str {
    match backend {
        Backend::Reference => "reference",
        Backend::Fused | Backend::Unsloth | Backend::Bnb => "fused",
    }
}

/// Sets the kernels of this process to those that the configuration asks for.
pub fn choose(config: &Config) {
    simd::force(match config.tuning.backend {
        Backend::Reference => Level::Portable,
        Backend::Fused | Backend::Unsloth | Backend::Bnb => simd::detect(),
    });
}

/// In what form the base weights are held.
fn quantization(model: &ModelConfig) -> String {
    let format = match model.quantization {
        Quantization::None | Quantization::Auto => return Held::describe(None),
        Quantization::Nf4 => Format::Nf4,
        Quantization::Fp4 => Format::Fp4,
        Quantization::Int8 => Format::Int8,
    };
    let how = How { format, double: model.double_quant };
    Held::describe(Some(&Held { how, skip: model.quantization_skip_modules.clone() }))
}

/// The kernels in a few words.
pub fn describe(config: &Config) -> String {
    format!("{}, {}", engine(config.tuning.backend), simd::level().name())
}

/// What a backend's name from another toolkit stands for.
pub fn remark(prepared: &Prepared) -> Option<String> {
    let backend = prepared.config.tuning.backend;
    if !matches!(backend, Backend::Unsloth | Backend::Bnb) {
        return None;
    }
    let held = match prepared.config.model.quantization {
        Quantization::None => format!("dense base weights ({}): nothing is quantized", prepared.base_dtype()),
        coded => format!("base weights in {coded}"),
    };
    Some(format!(
        "tuning.backend = {backend}: the name stands for fused kernels and what tuning.mode asks for, here {held}"
    ))
}

impl Prepared {
    /// What the run's checkpoints belong to. Reads all base weights once, to hash them.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn stamp(&self) -> Result<Stamp> {
        let base_model = match &self.weights {
            Some(weights) => weights.fingerprint()?,
            None => format!("random, seed {}", self.config.train.seed),
        };
        let base_model = self.stack_hashes.iter().fold(base_model, |base, adapter| format!("{base} + {adapter}"));
        let template = self.dataset.template.as_ref().map_or("", |template| template.source());
        let hashes = Hashes {
            base_model: &base_model,
            tokenizer: &self.dataset.tokenizer.hash().to_hex(),
            chat_template: &blake3::hash(template.as_bytes()).to_hex(),
            data: &self.dataset.fingerprint,
        };
        let saved = match self.config.tuning.mode {
            Mode::Freeze => freeze::trained_tensors(&self.arch, &self.config.tuning.freeze)?,
            Mode::Full => Vec::new(),
            _ => Targets::of(&self.config.tuning).names_beside(&self.arch, &self.placements)?,
        };
        let activations = match (self.config.train.bf16, self.config.train.fp16) {
            (true, _) => "bfloat16",
            (_, true) => "float16",
            _ => "float32",
        };
        let engine = Engine {
            backend: engine(self.config.tuning.backend),
            simd: simd::level().name(),
            quantization: quantization(&self.config.model),
            dtype: format!("base {}, activations {activations}", self.base_dtype()),
        };
        let stamp = Stamp::new(&self.config, &self.placements, &saved, hashes, engine);
        Ok(Stamp { world_size: self.ranks.0, ..stamp })
    }

    /// What the matrices of the base are held in, as the model's builder decides it.
    fn base_dtype(&self) -> &'static str {
        let stored = || {
            let mut matrices = self.arch.tensors().into_iter().filter(|spec| spec.shape.len() > 1);
            let untouched = self.stack.0.is_empty();
            untouched && self.weights.as_ref().is_some_and(|files| matrices.any(|spec| files.is_bf16(&spec.name)))
        };
        let narrow = self.config.tuning.mode != Mode::Full
            && match self.config.model.dtype {
                Dtype::Float32 => false,
                Dtype::Bfloat16 => true,
                Dtype::Auto => stored(),
            };
        if narrow { "bfloat16" } else { "float32" }
    }
}
