//! Builds a [`Model`]: reads or draws every tensor, and decides which are trained.
use super::adapters::{self, Formula, Method};
use super::attention::{Attention, Qkv};
use super::block::{Block, Feed, Join};
use super::decoder::Model;
use super::freeze;
use super::head::Head;
use super::init;
use super::init::Stream;
use super::linear::Linear;
use super::mlp::{GateUp, Mlp};
use super::moe::Moe;
use super::norm::Norm;
use super::params::Params;
use super::quantize::{How, Quantizer};
use super::quantized_cache::Cache;
use super::shards::Shards;
use super::stack::Stack;
use super::targets::{Placement, Targets, is_vocabulary, peft_name, placed, token_rows};
use super::weight::Weight;
use super::weights::WeightFiles;
use half::bf16;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Activation, Arch, Experts, LinearSpec, QkNorm, SCORE, ScoreHead};
use tunesmith_config::{Config, Dtype, Mode};
use tunesmith_ops::attention::{Heads, Scores};
use tunesmith_ops::gated_mlp::Gate;
use tunesmith_ops::panel::Pool;

/// Where base tensors come from.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The model's shape, grown by new tokens.
    pub arch: &'a Arch,
    /// Its files; without them it is drawn from the seed.
    pub weights: Option<&'a WeightFiles>,
    /// The seed.
    pub config: &'a Config,
    /// Finished adapters to merge in.
    pub stack: &'a Stack,
}

struct Builder<'a> {
    source: Source<'a>,
    arch: &'a Arch,
    config: &'a Config,
    sizes: BTreeMap<String, Vec<usize>>,
    trained: BTreeSet<String>,
    /// Trained tensors that have another name in an adapter's file.
    renamed: BTreeMap<String, String>,
    placements: BTreeMap<String, (u64, Placement)>,
    quantizer: Quantizer<'a>,
    params: Params,
    /// Takes each segment as soon as it is there, so that no rank ever holds the whole model.
    shards: Option<Shards>,
}

impl Source<'_> {
    /// The values of a base tensor, with finished adapters merged in.
    ///
    /// # Errors
    /// The files', or an adapter that does not fit.
    pub fn values(&self, name: &str, count: usize) -> Result<Vec<f32>> {
        let mut values = self.base(name, count)?;
        self.stack.apply(name, &mut values)?;
        Ok(values)
    }

    fn base(&self, name: &str, count: usize) -> Result<Vec<f32>> {
        let name = self.arch.starts_as(name);
        // A head of scores is drawn where the model is that of a language model.
        let Some(files) = self.weights.filter(|files| name != SCORE || files.shape(name).is_some()) else {
            return Ok(init::base(self.config.train.seed, name, count, self.arch));
        };
        let mut values = vec![0.0; count];
        let (tokens, hidden) = (&self.arch.new_tokens, self.arch.hidden_size);
        let stored: usize = files.shape(name).map_or(0, |shape| shape.iter().product());
        if !is_vocabulary(name) || (tokens.is_empty() && stored == count) {
            files.read_into(name, &mut values)?;
            return Ok(values);
        }
        files.read_into(name, &mut values[..stored.min(count)])?;
        // New rows start as the mean of those that are there.
        let mut mean = vec![0.0f64; hidden];
        for row in values[..stored.min(count)].chunks_exact(hidden) {
            mean.iter_mut().zip(row).for_each(|(mean, &value)| *mean += f64::from(value));
        }
        let rows = (stored / hidden).max(1) as f64;
        let mean: Vec<f32> = mean.into_iter().map(|sum| (sum / rows) as f32).collect();
        let beyond = stored / hidden..count / hidden;
        for row in beyond.chain(tokens.iter().map(|&token| token as usize)) {
            values[row * hidden..][..hidden].copy_from_slice(&mean);
        }
        Ok(values)
    }
}

/// A module of the model that is being built, for a fresh adapter.
pub struct Attach<'s, 'b> {
    builder: &'s mut Builder<'b>,
    spec: &'s LinearSpec,
    number: u64,
    /// Tensors of the adapter, and how many of them have their values.
    tensors: Vec<(String, Vec<usize>)>,
    pushed: usize,
    /// It is on a block's experts, which have weights of their own.
    experts: bool,
    /// The module's weight and bias.
    settled: Option<(Weight, Option<Weight>)>,
}

impl fmt::Debug for Attach<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attach").field("module", &self.spec.name).finish_non_exhaustive()
    }
}

impl<'s, 'b> Attach<'s, 'b> {
    fn new(builder: &'s mut Builder<'b>, spec: &'s LinearSpec, number: u64, placement: &Placement) -> Self {
        Self {
            builder,
            spec,
            number,
            tensors: placement.tensors(),
            pushed: 0,
            experts: placement.experts.is_some(),
            settled: None,
        }
    }

    /// The module's name.
    pub fn module(&self) -> &str {
        &self.spec.name
    }

    /// A number that no other module has.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// The configuration.
    pub const fn config(&self) -> &'b Config {
        self.builder.config
    }

    /// The name of the module's weight.
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.spec.name)
    }

    /// The name of one of the adapter's tensors.
    pub fn tensor_name(&self, index: usize) -> String {
        self.tensors.get(index).map(|(name, _)| name.clone()).unwrap_or_default()
    }

    /// The numbers that a tensor of this name draws.
    pub fn stream(&self, name: &str) -> Stream {
        Stream::new(self.builder.config.train.seed, name)
    }

    /// How the module's weight is to be quantized, if it is.
    pub fn how(&self) -> Option<How> {
        self.builder.quantizer.how(&self.weight_name())
    }

    /// The module's weight `[out_features, in_features]` in f32, before it is quantized.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn values(&self) -> Result<Vec<f32>> {
        self.builder.source.values(&self.weight_name(), self.spec.out_features * self.spec.in_features)
    }

    /// The module's weight as it is kept, and the trained values, in case it is among them.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn base(&mut self) -> Result<(&Weight, &[f32])> {
        let settled = match self.settled.take() {
            Some(settled) => settled,
            None => self.builder.plain(self.spec)?,
        };
        Ok((&self.settled.insert(settled).0, self.builder.params.values()))
    }

    /// Gives the module another weight.
    ///
    /// # Errors
    /// Its bias cannot be read.
    pub fn replace(&mut self, weight: Weight) -> Result<()> {
        self.settled = Some((weight, self.builder.bias(self.spec)?));
        Ok(())
    }

    /// What the adapter's next tensor starts with; its place among the trained values.
    ///
    /// # Errors
    /// The base cannot be read, whose values come first; [`tunesmith_base::Kind::Model`]: values that are not those of a tensor.
    pub fn push(&mut self, values: &[f32]) -> Result<Range<usize>> {
        if !self.experts {
            self.base()?;
        }
        let next = self.tensors.get(self.pushed).filter(|(_, shape)| shape.iter().product::<usize>() == values.len());
        let Some((name, shape)) = next.cloned() else {
            let (count, number) = (values.len(), self.pushed);
            return Err(Error::model(format!("{}: {count} values for tensor {number} of its adapter", self.spec.name)));
        };
        self.pushed += 1;
        Ok(self.builder.params.push(name, shape, true, values))
    }
}

/// See [`Model::load_with`].
pub(super) fn model(
    arch: &Arch,
    weights: Option<&WeightFiles>,
    config: &Config,
    stack: &Stack,
    cache: Option<Cache<'_>>,
    shards: Option<Shards>,
) -> Result<Model> {
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
    let mut builder = Builder {
        source: Source { arch, weights, config, stack },
        arch,
        config,
        sizes: tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect(),
        trained,
        renamed,
        placements: placements.into_iter().enumerate().map(|(i, p)| (p.module.clone(), (i as u64, p))).collect(),
        quantizer: Quantizer::new(arch, weights, config, cache)?,
        params: Params::default(),
        shards,
    };
    let mut model = builder.build()?;
    model.notes = builder.quantizer.into_notes();
    Ok(model)
}

impl Builder<'_> {
    fn build(&mut self) -> Result<Model> {
        let trained =
            self.trained.iter().filter_map(|name| self.sizes.get(name)).map(|shape| shape.iter().product::<usize>());
        let adapters = self.placements.values().flat_map(|(_, placement)| placement.tensors());
        let adapters = adapters.map(|(_, shape)| shape.iter().product::<usize>());
        let floats = trained.sum::<usize>() + adapters.sum::<usize>();
        if self.shards.is_none() {
            self.params.reserve(floats);
        }
        let arch = self.arch;
        self.params.begin_segment();
        let mut embedding = self.weight("model.embed_tokens.weight")?;
        self.share(vec![&mut embedding]);
        let mut linears =
            arch.linear_modules().into_iter().map(|spec| (spec.name.clone(), spec)).collect::<BTreeMap<_, _>>();
        let mut blocks = Vec::with_capacity(arch.num_hidden_layers);
        for layer in 0..arch.num_hidden_layers {
            self.params.begin_segment();
            let mut block = self.block(layer, &mut linears)?;
            self.share(block.weights_mut());
            blocks.push(block);
        }
        self.params.begin_segment();
        let norm = self.norm("model.norm.weight")?;
        let head = if arch.ties_head() {
            if let Some(shards) = &mut self.shards {
                shards.push_trained(0, &mut self.params);
            }
            embedding.clone()
        } else {
            let mut head = self.weight(arch.head_tensor())?;
            self.share(vec![&mut head]);
            head
        };
        self.params.shrink();
        if adapters::of(&self.config.tuning).is_some_and(Method::takes_from_base) {
            self.params.keep_start();
        }
        Ok(Model::new(
            arch.clone(),
            std::mem::take(&mut self.params),
            embedding,
            blocks,
            Head {
                norm,
                weight: head,
                vocabulary: arch.outputs(),
                squared: arch.score.as_ref().is_some_and(ScoreHead::is_number),
                counts: arch.score.as_ref().is_some_and(|head| !head.is_number()),
                // What a family does to logits over the vocabulary it does not do to scores.
                scale: if arch.score.is_some() { 1.0 } else { arch.logit_scale as f32 },
                softcap: arch.logit_softcap.filter(|_| arch.score.is_none()).map(|cap| cap as f32),
                pool: Pool::new(),
            },
            self.config,
            self.shards.take(),
        ))
    }

    /// A segment is complete: its weights are shared among ranks, if this model's are.
    fn share(&mut self, weights: Vec<&mut Weight>) {
        if let Some(shards) = &mut self.shards {
            shards.push(weights);
            shards.push_trained(shards.count() - 1, &mut self.params);
        }
    }

    fn weight(&mut self, name: &str) -> Result<Weight> {
        let Some(shape) = self.sizes.get(name).cloned() else {
            return Err(Error::model(format!("the architecture has no tensor {name:?}")));
        };
        let tokens = self.arch.rows_of(name);
        if self.trained.contains(name) {
            let values = self.source.values(name, shape.iter().product())?;
            let decay = !init::is_norm_or_bias(name) || self.config.train.decay_norms_and_bias;
            let name = self.renamed.get(name).map_or(name, String::as_str).to_owned();
            Ok(Weight::Trained(self.params.push(name, shape, decay, &values)))
        } else if !tokens.is_empty() {
            let (hidden, values) = (self.arch.hidden_size, self.source.values(name, shape.iter().product())?);
            let rows: Vec<f32> =
                tokens.iter().flat_map(|&token| values[token as usize * hidden..][..hidden].iter().copied()).collect();
            let range = self.params.push(token_rows(name), vec![tokens.len(), hidden], true, &rows);
            Ok(Weight::rows(values, tokens, range))
        } else {
            self.frozen(name, &shape)
        }
    }

    /// A base tensor that isn't trained: a matrix in bfloat16 where the configuration or the checkpoint says so. What
    /// finished adapters are merged into is no longer the checkpoint's.
    fn frozen(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        if let Some(how) = self.quantizer.how(name) {
            return self.quantized(name, shape, how);
        }
        let Source { weights, stack, config, .. } = self.source;
        let (count, untouched) = (shape.iter().product(), stack.0.is_empty());
        let narrow = shape.len() > 1
            && match config.model.dtype {
                Dtype::Float32 => false,
                Dtype::Bfloat16 => true,
                Dtype::Auto => untouched && weights.is_some_and(|files| files.is_bf16(self.arch.starts_as(name))),
            };
        match weights.filter(|_| narrow && untouched) {
            Some(files) => {
                let mut values = vec![bf16::ZERO; count];
                files.read_bf16_into(self.arch.starts_as(name), &mut values)?;
                Weight::frozen(values, shape)
            }
            None if narrow => {
                Weight::frozen(self.source.values(name, count)?.into_iter().map(bf16::from_f32).collect(), shape)
            }
            None => Weight::frozen(self.source.values(name, count)?, shape),
        }
    }

    /// A base matrix in 4 or 8 bits a number. A checkpoint that is quantized keeps what it left as it was.
    fn quantized(&self, name: &str, shape: &[usize], how: How) -> Result<Weight> {
        let Source { weights, stack, .. } = self.source;
        let values = || self.source.values(name, shape.iter().product());
        let matrix = self.quantizer.matrix((name, shape), how, (weights, stack.changes(name)), values)?;
        Ok(Weight::Quantized(Arc::new(matrix)))
    }

    fn norm(&mut self, name: &str) -> Result<Norm> {
        let (offset, eps) = (self.arch.norm_offset as f32, self.arch.rms_norm_eps as f32);
        Ok(Norm { weight: self.weight(name)?, offset, eps })
    }

    fn linear(&mut self, spec: &LinearSpec) -> Result<Linear> {
        let placed = self.placements.remove(&peft_name(&spec.name));
        let (out_features, in_features) = (spec.out_features, spec.in_features);
        let Some((number, placement)) = placed else {
            let (weight, bias) = self.plain(spec)?;
            return Ok(Linear { weight, bias, out_features, in_features, adapter: None });
        };
        let mut at = Attach::new(self, spec, number, &placement);
        let adapter = Some(placement.adapter.attach(&mut at)?);
        at.base()?;
        let (weight, bias) = at.settled.ok_or_else(|| Error::model(format!("{}: no weight", spec.name)))?;
        Ok(Linear { weight, bias, out_features, in_features, adapter })
    }

    /// A module's weight and bias, as they are.
    fn plain(&mut self, spec: &LinearSpec) -> Result<(Weight, Option<Weight>)> {
        Ok((self.weight(&format!("{}.weight", spec.name))?, self.bias(spec)?))
    }

    fn bias(&mut self, spec: &LinearSpec) -> Result<Option<Weight>> {
        if spec.bias { self.weight(&format!("{}.bias", spec.name)).map(Some) } else { Ok(None) }
    }

    /// The adapters of all experts of a block on one of their matrices, part by part.
    fn expert_adapters(&mut self, parameter: &str) -> Result<Vec<Box<dyn Formula>>> {
        let wrapper = self.placements.iter().find(|(_, (_, placement))| placement.key == parameter);
        let Some(wrapper) = wrapper.map(|(wrapper, _)| wrapper.clone()) else { return Ok(Vec::new()) };
        let Some((number, placement)) = self.placements.remove(&wrapper) else { return Ok(Vec::new()) };
        let Placement { out_features, in_features, .. } = placement;
        let spec = LinearSpec { name: wrapper, out_features, in_features, bias: false, layer: None };
        placement.adapter.attach_experts(&mut Attach::new(self, &spec, number, &placement))
    }

    /// The two matrices of an expert that lie side by side in Transformers 5, as one.
    fn joined(&mut self, names: [&str; 2], shape: &[usize; 2]) -> Result<Weight> {
        let (one, both) = (shape[0] * shape[1], [2 * shape[0], shape[1]]);
        let [first, second] = names;
        if self.trained.contains(first) && self.trained.contains(second) {
            // One after the other in the flat buffer: their ranges are one.
            let (first, second) = (self.weight(first)?, self.weight(second)?);
            return match (first.trained(), second.trained()) {
                (Some(first), Some(second)) => Ok(Weight::Trained(first.start..second.end)),
                _ => Err(Error::model("an expert's gate and up are trained together")),
            };
        }
        if self.trained.contains(first) || self.trained.contains(second) {
            return Err(Error::config(format!("{first} and {second} can only be trained together")));
        }
        match (self.frozen(first, shape)?, self.frozen(second, shape)?) {
            (Weight::Frozen(first), Weight::Frozen(second)) => {
                let joined = candle_core::Tensor::cat(&[&first, &second], 0);
                let joined = joined
                    .map_err(|error| Error::model(format!("cannot join {first} and {second}")).caused_by(error))?;
                debug_assert_eq!((joined.elem_count(), joined.dims()), (2 * one, &both[..]));
                Ok(Weight::Frozen(joined))
            }
            (Weight::Quantized(above), Weight::Quantized(below)) => match above.joined(&below) {
                Some(joined) => Ok(Weight::Quantized(Arc::new(joined))),
                None => Err(Error::model(format!(
                    "{first} and {second} cannot be put into one quantized matrix: the first is {shape:?}, which is no \
                     whole number of blocks"
                ))
                .hint("name the experts in model.quantization_skip_modules")),
            },
            _ => Err(Error::model("an expert's gate and up are frozen together")),
        }
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
            let gate_up = self.joined([&to_gate, &to_up], &[width, hidden])?;
            let gate_up = linear(gate_up, gate_up_adapters.next(), [2 * width, hidden]);
            let down = linear(self.weight(&to_down)?, down_adapters.next(), [hidden, width]);
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
        Ok(Moe { router, experts: parts, shared, per_token, normalised, pool: Pool::stepped() })
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
        let norm = |this: &mut Self, name: &str| this.norm(&format!("{prefix}.{name}.weight"));
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
        Activation::Silu => Gate::Silu,
        Activation::GeluTanh => Gate::GeluTanh,
    }
}
