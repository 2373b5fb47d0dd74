//! Builds a [`Model`]: reads or draws every tensor, and decides which are trained.
use super::block::{Block, Norm};
use super::decoder::Model;
use super::head::Head;
use super::init;
use super::linear::{Linear, Lora};
use super::params::Params;
use super::targets::{Placement, place, saved_tensors};
use super::weight::Weight;
use super::weights::WeightFiles;
use crate::config::arch::{Arch, LinearSpec};
use crate::config::{Config, Mode};
use crate::error::{Error, Result};
use crate::ops::attention::Heads;
use crate::ops::panel::Pool;
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
            Weight::frozen(self.values(embedding_name, shape.iter().product())?, shape)?
        } else {
            embedding.clone()
        };
        Ok(Model::new(
            arch.clone(),
            std::mem::take(&mut self.params),
            embedding,
            blocks,
            Head { norm, weight: head, vocabulary: arch.vocab_size, pool: Pool::new() },
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
            None => Ok(init::base(self.config.train.seed, name, count, self.arch.initializer_range)),
        }
    }

    fn weight(&mut self, name: &str) -> Result<Weight> {
        let head = [self.arch.vocab_size, self.arch.hidden_size];
        let shape = match self.sizes.get(name) {
            Some(shape) => shape.clone(),
            None if name == "lm_head.weight" => head.to_vec(),
            None => return Err(Error::model(format!("the architecture has no tensor {name:?}"))),
        };
        let values = self.values(name, shape.iter().product())?;
        if self.trained.contains(name) {
            let decay = !init::is_norm_or_bias(name) || self.config.train.decay_norms_and_bias;
            Ok(Weight::Trained(self.params.push(name.to_owned(), shape, decay, &values)))
        } else {
            Weight::frozen(values, &shape)
        }
    }

    fn norm(&mut self, name: &str) -> Result<Norm> {
        Ok(Norm { weight: self.weight(name)?, eps: self.arch.rms_norm_eps as f32 })
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
        let prefix = format!("model.layers.{layer}");
        let mut linear = |this: &mut Self, name: &str| {
            let name = format!("{prefix}.{name}");
            let spec = linears.remove(&name).ok_or_else(|| Error::model(format!("the architecture has no {name}")))?;
            this.linear(&spec)
        };
        let input_norm = self.norm(&format!("{prefix}.input_layernorm.weight"))?;
        let (q, k) = (linear(self, "self_attn.q_proj")?, linear(self, "self_attn.k_proj")?);
        let (v, o) = (linear(self, "self_attn.v_proj")?, linear(self, "self_attn.o_proj")?);
        let qk_norm = if self.arch.qk_norm {
            let mut norm = |name: &str| self.norm(&format!("{prefix}.self_attn.{name}.weight"));
            Some((norm("q_norm")?, norm("k_norm")?))
        } else {
            None
        };
        let post_norm = self.norm(&format!("{prefix}.post_attention_layernorm.weight"))?;
        let (gate, up) = (linear(self, "mlp.gate_proj")?, linear(self, "mlp.up_proj")?);
        let down = linear(self, "mlp.down_proj")?;
        let arch = self.arch;
        let heads = Heads { query: arch.num_attention_heads, kv: arch.num_key_value_heads, dim: arch.head_dim };
        Ok(Block { input_norm, q, k, v, o, qk_norm, post_norm, gate, up, down, heads })
    }
}
