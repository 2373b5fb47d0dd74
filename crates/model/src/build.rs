//! Builds a [`Model`]: reads or draws every tensor, and puts blocks together.
use super::adapters::{self, Method, Placement};
use super::attach::Module;
use super::attention::{Attention, Qkv};
use super::block::{Block, Feed, Join};
use super::decoder::Model;
use super::freeze;
use super::head::Head;
use super::linear::{Formula, Linear};
use super::mlp::{GateUp, Mlp};
use super::moe::Moe;
use super::names::peft_name;
use super::params::Params;
use super::quantize::Quantizer;
use super::quantized_cache::Cache;
use super::shards::Shards;
use super::source::{Source, Tensors};
use super::stack::Stack;
use super::targets::{Targets, placed};
use super::weights::WeightFiles;
use std::collections::{BTreeMap, BTreeSet};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, Experts, HiddenAct, LinearSpec, QkNorm, ScoreHead};
use tunesmith_config::{Config, Mode};
use tunesmith_device::Device;
use tunesmith_ops::activation::Pool;
use tunesmith_ops::attention::{Heads, Scores};
use tunesmith_ops::gated_mlp::Gate;
use tunesmith_ops::spans::Window;

struct Builder<'a> {
    tensors: Tensors<'a>,
    arch: &'a Arch,
    /// By module: the adapter that it gets, and that adapter's number.
    placements: BTreeMap<String, (u64, Placement)>,
    shards: Shards,
}

impl Model {
    /// Reads the base from `weights`, or draws it from `config.train.seed` if there are none, and puts fresh adapters
    /// where the configuration says.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`] for weights that cannot be read, [`tunesmith_base::Kind::Config`] for targets that do not exist.
    pub fn load(arch: &Arch, weights: Option<&WeightFiles>, config: &Config) -> Result<Self> {
        Self::load_on(arch, weights, config, &Stack::default())
    }

    /// As [`Model::load`], with finished adapters merged into the base.
    ///
    /// # Errors
    /// As [`Model::load`]; [`tunesmith_base::Kind::Checkpoint`] for an adapter that does not fit.
    pub fn load_on(arch: &Arch, weights: Option<&WeightFiles>, config: &Config, stack: &Stack) -> Result<Self> {
        Self::load_with(arch, weights, config, stack, None, Shards::default())
    }

    /// On the meta device: tensors have shapes and no memory, and a pass counts the buffers that it takes
    /// ([`Model::buffer_counts`]).
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn on_meta(arch: &Arch, config: &Config) -> Result<Self> {
        let stack = Stack::default();
        Self::load_to(Device::Meta, arch, None, config, &stack, None, Shards::default())
    }

    /// As [`Model::load_on`]. Matrices that were quantized before are taken from `cache`, and others are kept there. Each
    /// segment goes to `shards` as soon as it is read, so that no rank holds the whole model where ranks shard it.
    ///
    /// # Errors
    /// As [`Model::load_on`].
    pub fn load_with(
        arch: &Arch,
        weights: Option<&WeightFiles>,
        config: &Config,
        stack: &Stack,
        cache: Option<Cache<'_>>,
        shards: Shards,
    ) -> Result<Self> {
        Self::load_to(Device::Cpu, arch, weights, config, stack, cache, shards)
    }

    fn load_to(
        device: Device,
        arch: &Arch,
        weights: Option<&WeightFiles>,
        config: &Config,
        stack: &Stack,
        cache: Option<Cache<'_>>,
        shards: Shards,
    ) -> Result<Self> {
        let tensors = arch.tensors();
        let (mut trained, mut renamed, mut placements) = (BTreeSet::new(), BTreeMap::new(), Vec::new());
        match config.tuning.mode {
            Mode::Full => trained.extend(tensors.iter().map(|tensor| tensor.name.clone())),
            Mode::Freeze => trained.extend(freeze::trained_tensors(arch, &config.tuning.freeze)?),
            _ => {
                let targets = Targets::of(&config.tuning);
                trained.extend(targets.saved_tensors(arch)?);
                placements = placed(arch, &config.tuning)?;
                renamed.extend(targets.renamed(arch, &placements)?);
                trained.extend(renamed.keys().cloned());
            }
        }
        let tensors = Tensors {
            source: Source { arch, weights, config, stack, device },
            quantizer: match device {
                Device::Cpu => Quantizer::new(arch, weights, config, cache)?,
                Device::Meta => Quantizer::none(),
            },
            params: Params::on(device),
            sizes: tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect(),
            trained,
            renamed,
        };
        let placements = placements.into_iter().enumerate();
        let placements = placements.map(|(i, placement)| (placement.module.clone(), (i as u64, placement))).collect();
        Builder { tensors, arch, placements, shards }.build()
    }
}

impl Builder<'_> {
    fn build(mut self) -> Result<Model> {
        let Tensors { trained, sizes, .. } = &self.tensors;
        let trained = trained.iter().filter_map(|name| sizes.get(name)).map(|shape| shape.iter().product::<usize>());
        let adapters = self.placements.values().flat_map(|(_, placement)| placement.tensors());
        let adapters = adapters.map(|(_, shape)| shape.iter().product::<usize>());
        let floats = trained.sum::<usize>() + adapters.sum::<usize>();
        let device = self.tensors.source.device;
        if !self.shards.is_sharded() && device == Device::Cpu {
            self.tensors.params.reserve(floats);
        }
        let (arch, config) = (self.arch, self.tensors.source.config);
        self.tensors.params.begin_segment();
        let mut embedding = self.tensors.weight("model.embed_tokens.weight")?;
        self.shards.push(vec![&mut embedding], &mut self.tensors.params);
        let mut linears =
            arch.linear_modules().into_iter().map(|spec| (spec.name.clone(), spec)).collect::<BTreeMap<_, _>>();
        let mut blocks = Vec::with_capacity(arch.num_hidden_layers);
        for layer in 0..arch.num_hidden_layers {
            self.tensors.params.begin_segment();
            let mut block = self.block(layer, &mut linears)?;
            self.shards.push(block.weights_mut(), &mut self.tensors.params);
            blocks.push(block);
        }
        self.tensors.params.begin_segment();
        let norm = self.tensors.norm("model.norm.weight")?;
        let head = if arch.ties_head() {
            self.shards.push_trained(0, &mut self.tensors.params);
            embedding.clone()
        } else {
            let mut head = self.tensors.weight(arch.head_tensor())?;
            self.shards.push(vec![&mut head], &mut self.tensors.params);
            head
        };
        let Tensors { mut params, quantizer, .. } = self.tensors;
        params.shrink();
        if adapters::of(&config.tuning).is_some_and(Method::takes_from_base) {
            params.keep_start();
        }
        let head = Head {
            norm,
            weight: head,
            outputs: arch.outputs(),
            squared: arch.score.as_ref().is_some_and(ScoreHead::is_number),
            counts: arch.score.as_ref().is_some_and(|head| !head.is_number()),
            // What a family does to logits over the vocabulary it does not do to scores.
            scale: if arch.score.is_some() { 1.0 } else { arch.logit_scale as f32 },
            softcap: arch.logit_softcap.filter(|_| arch.score.is_none()).map(|cap| cap as f32),
            pool: Pool::on(device),
        };
        let mut model = Model::new(arch.clone(), params, embedding, blocks, head, config, device, self.shards);
        model.notes = quantizer.into_notes();
        Ok(model)
    }

    fn linear(&mut self, spec: &LinearSpec) -> Result<Linear> {
        if let Some((number, placement)) = self.placements.remove(&peft_name(&spec.name)) {
            return Module::new(&mut self.tensors, spec, number, &placement).attach(&placement);
        }
        let LinearSpec { out_features, in_features, .. } = *spec;
        let (weight, bias) = self.tensors.plain(spec)?;
        Ok(Linear { weight, bias, out_features, in_features, adapter: None })
    }

    /// The adapters of all experts of a block on one of their matrices, part by part.
    fn expert_adapters(&mut self, parameter: &str) -> Result<Vec<Box<dyn Formula>>> {
        let wrapper = self.placements.iter().find(|(_, (_, placement))| placement.key == parameter);
        let Some(wrapper) = wrapper.map(|(wrapper, _)| wrapper.clone()) else { return Ok(Vec::new()) };
        let Some((number, placement)) = self.placements.remove(&wrapper) else { return Ok(Vec::new()) };
        let Placement { out_features, in_features, .. } = placement;
        let spec = LinearSpec { name: wrapper, out_features, in_features, bias: false, layer: None };
        placement.adapter.attach_experts(&mut Module::new(&mut self.tensors, &spec, number, &placement))
    }

    fn moe(&mut self, layer: usize, experts: &Experts, linears: &mut BTreeMap<String, LinearSpec>) -> Result<Moe> {
        let (prefix, hidden, gate) = (format!("model.layers.{layer}"), self.arch.hidden_size, gate(self.arch));
        let router = LinearSpec {
            name: format!("{prefix}.{}", experts.router().trim_end_matches(".weight")),
            out_features: experts.count,
            in_features: hidden,
            bias: false,
            layer: Some(layer),
        };
        let router = self.linear(&router)?;
        let module = format!("{prefix}.mlp.experts");
        let gate_up_adapters = self.expert_adapters(&format!("{module}.gate_up_proj"))?;
        let down_adapters = self.expert_adapters(&format!("{module}.down_proj"))?;
        let mut parts = Vec::with_capacity(experts.count);
        let (mut gate_up_adapters, mut down_adapters) = (gate_up_adapters.into_iter(), down_adapters.into_iter());
        for expert in 0..experts.count {
            let [to_gate, to_up, to_down] = experts.names(expert).map(|name| format!("{prefix}.{name}"));
            let width = experts.width;
            let linear = |weight, adapter, [out_features, in_features]: [usize; 2]| Linear {
                weight,
                bias: None,
                out_features,
                in_features,
                adapter,
            };
            let gate_up = self.tensors.joined([&to_gate, &to_up], &[width, hidden])?;
            let gate_up = linear(gate_up, gate_up_adapters.next(), [2 * width, hidden]);
            let down = linear(self.tensors.weight(&to_down)?, down_adapters.next(), [hidden, width]);
            parts.push(Mlp { gate_up: GateUp::Fused(Box::new(gate_up)), down, gate });
        }
        let shared = match experts.shared {
            Some(_) => {
                let mut linear = |name: &str| self.named(&format!("{prefix}.mlp.{name}"), linears);
                let (to_gate, to_up) = (linear("shared_expert.gate_proj")?, linear("shared_expert.up_proj")?);
                let down = linear("shared_expert.down_proj")?;
                let mlp = Mlp { gate_up: GateUp::Apart(Box::new([to_gate, to_up])), down, gate };
                Some((mlp, linear("shared_expert_gate")?))
            }
            None => None,
        };
        let (per_token, normalised) = (experts.per_token, experts.normalised);
        Ok(Moe {
            router,
            experts: parts,
            shared,
            per_token,
            normalised,
            pool: Pool::stepped_on(self.tensors.source.device),
        })
    }

    /// The linear module of that name, taken out of `linears`.
    fn named(&mut self, name: &str, linears: &mut BTreeMap<String, LinearSpec>) -> Result<Linear> {
        let spec = linears.remove(name).ok_or_else(|| Error::model(format!("the architecture has no {name}")))?;
        self.linear(&spec)
    }

    fn block(&mut self, layer: usize, linears: &mut BTreeMap<String, LinearSpec>) -> Result<Block> {
        let (arch, prefix) = (self.arch, format!("model.layers.{layer}"));
        let linear = |this: &mut Self, linears: &mut BTreeMap<String, LinearSpec>, name: &str| {
            this.named(&format!("{prefix}.{name}"), linears)
        };
        let norm = |this: &mut Self, name: &str| this.tensors.norm(&format!("{prefix}.{name}.weight"));
        let [before_attention, after_attention, before_mlp, after_mlp] = arch.norms.names();
        let join = |this: &mut Self, name: Option<&str>| match name {
            Some(name) => norm(this, name).map(Join::Normed),
            None if arch.residual_scale == 1.0 => Ok(Join::Plain),
            None => Ok(Join::Scaled(arch.residual_scale as f32)),
        };

        let attention_norm = before_attention.map(|name| norm(self, name)).transpose()?;
        let qkv = if arch.fused {
            Qkv::Fused(Box::new(linear(self, linears, "self_attn.qkv_proj")?))
        } else {
            let (q, k) = (linear(self, linears, "self_attn.q_proj")?, linear(self, linears, "self_attn.k_proj")?);
            Qkv::Apart(Box::new([q, k, linear(self, linears, "self_attn.v_proj")?]))
        };
        let heads = Heads::new(arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim);
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
            window: kind.window.map(Window::Sliding),
        };
        let o = linear(self, linears, "self_attn.o_proj")?;
        let attention = Attention { qkv, qk_norm, o, heads, how, rope: kind.rope };
        let attention_join = join(self, after_attention)?;

        let mlp_norm = before_mlp.map(|name| norm(self, name)).transpose()?;
        let feed = if let Some(experts) = arch.experts_of(layer) {
            Feed::Sparse(Box::new(self.moe(layer, experts, linears)?))
        } else {
            let gate_up = if arch.fused {
                GateUp::Fused(Box::new(linear(self, linears, "mlp.gate_up_proj")?))
            } else {
                let gate = linear(self, linears, "mlp.gate_proj")?;
                GateUp::Apart(Box::new([gate, linear(self, linears, "mlp.up_proj")?]))
            };
            let down = linear(self, linears, "mlp.down_proj")?;
            Feed::Dense(Box::new(Mlp { gate_up, down, gate: gate(arch) }))
        };
        let mlp_join = join(self, after_mlp)?;
        Ok(Block { attention_norm, attention, attention_join, mlp_norm, feed, mlp_join })
    }
}

fn gate(arch: &Arch) -> Gate {
    match arch.activation {
        HiddenAct::Silu => Gate::Silu,
        HiddenAct::GeluTanh => Gate::GeluTanh,
    }
}
