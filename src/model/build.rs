//! Builds a [`Model`]: reads or draws every tensor, and decides which are trained.
use super::attention::{Attention, Qkv};
use super::block::{Block, Join};
use super::decoder::Model;
use super::head::Head;
use super::init;
use super::linear::{Linear, Lora};
use super::mlp::{GateUp, Mlp};
use super::norm::Norm;
use super::params::Params;
use super::targets::{Placement, place, saved_tensors};
use super::weight::Weight;
use super::weights::WeightFiles;
use crate::config::arch::{Activation, Arch, LinearSpec, QkNorm};
use crate::config::{Config, Dtype, Mode};
use crate::error::{Error, Result};
use crate::ops::attention::{Heads, Scores};
use crate::ops::gated_mlp::Gate;
use crate::ops::panel::Pool;
use half::bf16;
use std::collections::{BTreeMap, BTreeSet};

struct Builder<'a> {
    arch: &'a Arch,
    weights: Option<&'a WeightFiles>,
    config: &'a Config,
    sizes: BTreeMap<String, Vec<usize>>,
    trained: BTreeSet<String>,
    placements: BTreeMap<String, (u64, Placement)>,
    params: Params,
}

/// See [`Model::load`].
pub(super) fn model(arch: &Arch, weights: Option<&WeightFiles>, config: &Config) -> Result<Model> {
    let tensors = arch.tensors();
    let lora = &config.tuning.lora;
    let (trained, placements) = match config.tuning.mode {
        Mode::Full => (tensors.iter().map(|tensor| tensor.name.clone()).collect(), Vec::new()),
        Mode::Lora => (saved_tensors(arch, lora)?.into_iter().collect(), place(arch, lora)?),
    };
    let mut builder = Builder {
        arch,
        weights,
        config,
        sizes: tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect(),
        trained,
        placements: placements.into_iter().enumerate().map(|(i, p)| (p.module.clone(), (i as u64, p))).collect(),
        params: Params::default(),
    };
    builder.build()
}

impl Builder<'_> {
    fn build(&mut self) -> Result<Model> {
        let trained =
            self.trained.iter().filter_map(|name| self.sizes.get(name)).map(|shape| shape.iter().product::<usize>());
        let adapters = self.placements.values().map(|(_, p)| p.r * (p.in_features + p.out_features));
        let floats = trained.sum::<usize>() + adapters.sum::<usize>();
        self.params.reserve(floats);
        let arch = self.arch;
        let embedding_name = "model.embed_tokens.weight";
        let embedding = self.weight(embedding_name)?;
        let mut linears =
            arch.linear_modules().into_iter().map(|spec| (spec.name.clone(), spec)).collect::<BTreeMap<_, _>>();
        let blocks =
            (0..arch.num_hidden_layers).map(|layer| self.block(layer, &mut linears)).collect::<Result<Vec<_>>>()?;
        let norm = self.norm("model.norm.weight")?;
        let head = if !arch.tie_word_embeddings || self.trained.contains("lm_head.weight") {
            self.weight("lm_head.weight")?
        } else if self.config.tuning.mode == Mode::Lora && embedding.trained().is_some() {
            // As in PEFT: the saved copy is the input's; the tied head stays with the original.
            let shape = &self.sizes[embedding_name];
            self.frozen(embedding_name, shape)?
        } else {
            embedding.clone()
        };
        Ok(Model::new(
            arch.clone(),
            std::mem::take(&mut self.params),
            embedding,
            blocks,
            Head {
                norm,
                weight: head,
                vocabulary: arch.vocab_size,
                scale: arch.logit_scale as f32,
                softcap: arch.logit_softcap.map(|cap| cap as f32),
                pool: Pool::new(),
            },
            self.config,
        ))
    }

    /// The values of a base tensor.
    fn values(&self, name: &str, count: usize) -> Result<Vec<f32>> {
        // A tied model has no lm_head of its own: one that is trained apart starts as the embedding.
        let tied = name == "lm_head.weight" && self.arch.tie_word_embeddings;
        let name = if tied { "model.embed_tokens.weight" } else { name };
        match self.weights {
            Some(files) => {
                let mut values = vec![0.0; count];
                files.read_into(name, &mut values)?;
                Ok(values)
            }
            None => Ok(init::base(self.config.train.seed, name, count, self.arch)),
        }
    }

    fn weight(&mut self, name: &str) -> Result<Weight> {
        let head = [self.arch.vocab_size, self.arch.hidden_size];
        let shape = match self.sizes.get(name) {
            Some(shape) => shape.clone(),
            None if name == "lm_head.weight" => head.to_vec(),
            None => return Err(Error::model(format!("the architecture has no tensor {name:?}"))),
        };
        if self.trained.contains(name) {
            let values = self.values(name, shape.iter().product())?;
            let decay = !init::is_norm_or_bias(name) || self.config.train.decay_norms_and_bias;
            Ok(Weight::Trained(self.params.push(name.to_owned(), shape, decay, &values)))
        } else {
            self.frozen(name, &shape)
        }
    }

    /// A base tensor that isn't trained: a matrix in bfloat16 where the configuration or the checkpoint says so.
    fn frozen(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        let count = shape.iter().product();
        let narrow = match self.config.model.dtype {
            Dtype::Float32 => false,
            Dtype::Bfloat16 => true,
            Dtype::Auto => self.weights.is_some_and(|files| files.is_bf16(name)),
        };
        match self.weights.filter(|_| narrow && shape.len() > 1) {
            Some(files) => {
                let mut values = vec![bf16::ZERO; count];
                files.read_bf16_into(name, &mut values)?;
                Weight::frozen(values, shape)
            }
            None if narrow && shape.len() > 1 => {
                Weight::frozen(self.values(name, count)?.into_iter().map(bf16::from_f32).collect(), shape)
            }
            None => Weight::frozen(self.values(name, count)?, shape),
        }
    }

    fn norm(&mut self, name: &str) -> Result<Norm> {
        let (offset, eps) = (self.arch.norm_offset as f32, self.arch.rms_norm_eps as f32);
        Ok(Norm { weight: self.weight(name)?, offset, eps })
    }

    fn linear(&mut self, spec: &LinearSpec) -> Result<Linear> {
        let weight = self.weight(&format!("{}.weight", spec.name))?;
        let bias = if spec.bias { Some(self.weight(&format!("{}.bias", spec.name))?) } else { None };
        let lora = self.placements.remove(&spec.name).map(|(module, placement)| {
            let [(a, a_shape), (b, b_shape)] = placement.tensors();
            let (how, seed) = (self.config.tuning.lora.init_lora_weights, self.config.train.seed);
            let features = (placement.in_features, placement.out_features);
            let [a_values, b_values] = init::lora(how, seed, (&a, &b), placement.r, features);
            Lora {
                a: self.params.push(a, a_shape.to_vec(), true, &a_values),
                b: self.params.push(b, b_shape.to_vec(), true, &b_values),
                rank: placement.r,
                scale: placement.scale,
                module,
            }
        });
        Ok(Linear { weight, bias, out_features: spec.out_features, in_features: spec.in_features, lora })
    }

    fn block(&mut self, layer: usize, linears: &mut BTreeMap<String, LinearSpec>) -> Result<Block> {
        let (arch, prefix) = (self.arch, format!("model.layers.{layer}"));
        let mut linear = |this: &mut Self, name: &str| {
            let name = format!("{prefix}.{name}");
            let spec = linears.remove(&name).ok_or_else(|| Error::model(format!("the architecture has no {name}")))?;
            this.linear(&spec)
        };
        let norm = |this: &mut Self, name: &str| this.norm(&format!("{prefix}.{name}.weight"));
        let [before_attention, after_attention, before_mlp, after_mlp] = arch.norms.names();
        let join = |this: &mut Self, name: Option<&str>| match name {
            Some(name) => norm(this, name).map(Join::Normed),
            None if arch.residual_scale == 1.0 => Ok(Join::Plain),
            None => Ok(Join::Scaled(arch.residual_scale as f32)),
        };

        let attention_norm = before_attention.map(|name| norm(self, name)).transpose()?;
        let qkv = if arch.fused {
            Qkv::Fused(linear(self, "self_attn.qkv_proj")?)
        } else {
            let (q, k) = (linear(self, "self_attn.q_proj")?, linear(self, "self_attn.k_proj")?);
            Qkv::Apart(Box::new([q, k, linear(self, "self_attn.v_proj")?]))
        };
        let heads = Heads { query: arch.num_attention_heads, kv: arch.num_key_value_heads, dim: arch.head_dim };
        let groups = match arch.qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some([heads.query, heads.kv]),
            QkNorm::Whole => Some([1, 1]),
        };
        let qk_norm = match groups {
            Some([query, key]) => {
                Some([(norm(self, "self_attn.q_norm")?, query), (norm(self, "self_attn.k_norm")?, key)])
            }
            None => None,
        };
        let kind = arch.blocks[layer];
        let how = Scores {
            scale: arch.attention_scale as f32,
            softcap: arch.attention_softcap.map(|cap| cap as f32),
            window: kind.window,
        };
        let o = linear(self, "self_attn.o_proj")?;
        let attention = Attention { qkv, qk_norm, o, heads, how, rope: kind.rope };
        let attention_join = join(self, after_attention)?;

        let mlp_norm = before_mlp.map(|name| norm(self, name)).transpose()?;
        let gate_up = if arch.fused {
            GateUp::Fused(linear(self, "mlp.gate_up_proj")?)
        } else {
            let gate = linear(self, "mlp.gate_proj")?;
            GateUp::Apart(Box::new([gate, linear(self, "mlp.up_proj")?]))
        };
        let gate = match arch.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
        };
        let mlp = Mlp { gate_up, down: linear(self, "mlp.down_proj")?, gate };
        let mlp_join = join(self, after_mlp)?;
        Ok(Block { attention_norm, attention, attention_join, mlp_norm, mlp, mlp_join })
    }
}
