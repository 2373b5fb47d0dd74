//! Builds the image encoder and the connector of a model that is being built.
use super::attention::{Attention, OutputGate, Qkv};
use super::block::Block;
use super::blocks::Blocks;
use super::branch::{Branch, Gained, Join, Part};
use super::build::Builder;
use super::clipped::clipped;
use super::device::pool;
use super::linear::Linear;
use super::mlp::Mlp;
use super::norm::Norm;
use super::plain_mlp::{PlainMlp, function_of};
use super::projections::Projections;
use super::shards::Shards;
use super::vision::Vision;
use super::vision::connector::{Connector, Step};
use super::vision::encoder::{Encoder, window};
use super::vision::stem::Stem;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Checkpointing;
use tunesmith_config::arch::{Arch, LinearSpec};
use tunesmith_config::vision::{self as spec, Features, VisionArch};
use tunesmith_device::Array;
use tunesmith_ops::attention::{Heads, Scores};
use tunesmith_ops::gated_mlp::Gate;
use tunesmith_ops::narrow::Half;

impl Builder<'_> {
    /// Encoder and connector as `arch` describes them. `narrow` is the 16-bit type in which the encoder keeps
    /// activations for backward.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the decoder does not belong to this encoder's model, or a tensor cannot be
    /// read.
    pub(crate) fn vision(&mut self, arch: &VisionArch, decoder: &Arch, narrow: Option<Half>) -> Result<Vision> {
        fits(arch, decoder)?;
        let inner: Vec<usize> = arch.deepstack.iter().map(|deep| deep.block).collect();
        let encoder = arch.features.is_none().then(|| self.encoder(&arch.encoder, &inner, narrow)).transpose()?;
        let behind = arch.connectors().filter(|_| arch.features != Some(Features::Connector));
        let connectors = behind.map(|connector| self.connector(connector)).collect::<Result<_>>()?;
        let newline = arch.newline().filter(|_| arch.features != Some(Features::Connector));
        let newline = newline.map(|spec| self.tensors.weight(&spec.name)).transpose()?;
        let pool = pool(self.tensors.device, self.tensors.source.config);
        let world = arch.world.as_ref().map(|world| self.world(world, arch.features.is_some())).transpose()?;
        Ok(Vision::new(arch.clone(), encoder, connectors, newline, world, pool))
    }

    fn norm_of(&mut self, name: &str, eps: f64, rms: bool) -> Result<Norm> {
        let weight = self.tensors.weight(&format!("{name}.weight"))?;
        let bias = (!rms).then(|| self.tensors.weight(&format!("{name}.bias"))).transpose()?;
        Ok(Norm { weight, bias, offset: 0.0, eps: eps as f32 })
    }

    /// An `RMSNorm` without learned weights: its gain is one.
    fn plain_norm(&self, features: usize, eps: f64) -> Norm {
        Norm { eps: eps as f32, ..self.tensors.weightless(features) }
    }

    fn encoder_norm(&mut self, spec: &spec::Encoder, name: &str) -> Result<Norm> {
        self.norm_of(name, spec.norm_eps, spec.rms_norm)
    }

    fn encoder(&mut self, spec: &spec::Encoder, inner: &[usize], narrow: Option<Half>) -> Result<Encoder> {
        let stem = self.stem(spec)?;
        let (mut parts, mut trains_below, mut trains) = (Vec::new(), Vec::new(), stem.trains());
        let mut first = 0;
        for end in inner.iter().map(|block| block + 1).chain([spec.feature.blocks]) {
            let blocks: Vec<Block> =
                (first..end).map(|layer| self.encoder_block(spec, layer)).collect::<Result<_>>()?;
            trains_below.push(trains);
            let below = trains;
            trains |= blocks.iter().any(Block::trains);
            parts.push(Blocks::new(blocks, None, below, Checkpointing::CHEAP, narrow));
            first = end;
        }
        let final_norm = &spec.name(spec.names.stem.final_norm);
        let final_norm = spec.feature.final_norm.then(|| self.encoder_norm(spec, final_norm)).transpose()?;
        trains |= final_norm.as_ref().is_some_and(Norm::trains);
        Ok(Encoder { spec: spec.clone(), stem, parts, trains_below, final_norm, trains, shards: Shards::default() })
    }

    fn stem(&mut self, spec: &spec::Encoder) -> Result<Stem> {
        let names = &spec.names.stem;
        let class_token = spec.class_token.then(|| self.tensors.weight(&spec.name(names.class_token))).transpose()?;
        let registers = (spec.registers > 0).then(|| self.tensors.weight(&spec.name(names.registers))).transpose()?;
        let patch = self.linear(&spec.patch_embedding())?;
        let learned = spec.interpolation.is_some();
        let positions = learned.then(|| self.tensors.weight(&spec.name(names.positions))).transpose()?;
        let norm = spec.pre_norm.then(|| self.encoder_norm(spec, &spec.name(names.pre_norm))).transpose()?;
        Ok(Stem { patch, class_token, registers, positions, norm })
    }

    fn encoder_block(&mut self, spec: &spec::Encoder, layer: usize) -> Result<Block> {
        let names = spec.names.block;
        let norm = Some(self.encoder_norm(spec, &spec.block_name(layer, names.norm1))?);
        let attention = self.encoder_attention(spec, layer)?;
        let join = self.encoder_join(spec, layer, 0)?;
        let first = Branch { norm, part: Part::Attention(Box::new(attention)), join, laurel: None };
        let norm = Some(self.encoder_norm(spec, &spec.block_name(layer, names.norm2))?);
        let part = self.encoder_mlp(spec, layer)?;
        let join = self.encoder_join(spec, layer, 1)?;
        let second = Branch { norm, part, join, laurel: None };
        Ok(Block { branches: vec![first, second], scalar: None, altup: None })
    }

    fn encoder_attention(&mut self, spec: &spec::Encoder, layer: usize) -> Result<Attention> {
        let mut linears = self.linears(spec, &spec.attention_linears(layer))?;
        let mut next = || linears.next().expect("attention has these modules");
        let projections = if spec.fused_qkv {
            Projections::fused(next(), [spec.hidden_size; 3])
        } else {
            Projections::apart([next(), next(), next()])
        };
        let spec::Encoder { num_heads, num_kv_heads, head_dim, .. } = *spec;
        let heads = Heads::new(num_heads, num_kv_heads, head_dim);
        let [q_norm, k_norm] = match spec.qk_norms {
            Some(names) => {
                let mut norm = |name: &str| self.encoder_norm(spec, &spec.block_name(layer, name));
                [Some((norm(names[0])?, num_heads)), Some((norm(names[1])?, num_kv_heads))]
            }
            None => [None, None],
        };
        let v_norm = spec.qk_norms.map(|_| (self.plain_norm(head_dim, spec.norm_eps), num_kv_heads));
        let scale = if spec.qk_norms.is_some() { 1.0 } else { (head_dim as f32).powf(-0.5) };
        Ok(Attention {
            qkv: Qkv::Own(projections),
            q_norm,
            k_norm,
            v_norm,
            norms_after_rope: false,
            gate: OutputGate::None,
            sinks: None,
            o: next(),
            heads,
            how: Scores { scale, softcap: None, window: window(spec, layer) },
            rope: spec.rope_theta.map(|_| 0),
            second_rope: spec.rope_by_halves.then_some(1),
            layer,
            shares: false,
        })
    }

    fn encoder_mlp(&mut self, spec: &spec::Encoder, layer: usize) -> Result<Part> {
        let mut linears = self.linears(spec, &spec.mlp_linears(layer))?;
        let mut next = || linears.next().expect("an MLP has these modules");
        if !spec.gated_mlp {
            let mlp = PlainMlp { fc1: next(), fc2: next(), function: function_of(spec.activation) };
            return Ok(Part::Plain(Box::new(mlp)));
        }
        let gate = match spec.activation {
            spec::Pointwise::Silu => Gate::Silu,
            spec::Pointwise::Gelu => Gate::Gelu,
            spec::Pointwise::GeluTanh => Gate::GeluTanh,
            other => {
                return Err(Error::model(format!("{other:?} as the gate of an encoder's MLP"))
                    .hint("silu, gelu, and gelu_pytorch_tanh are known"));
            }
        };
        Ok(Part::Mlp(Box::new(Mlp { gate_up: Projections::apart([next(), next()]), down: next(), gate, cut: None })))
    }

    fn linears(
        &mut self,
        encoder: &spec::Encoder,
        specs: &[LinearSpec],
    ) -> Result<impl Iterator<Item = Linear> + use<>> {
        let mut one = |spec: &LinearSpec| {
            let linear = self.linear(spec)?;
            let bounds = encoder.bounds(spec);
            if bounds.is_empty() { Ok(linear) } else { Ok(clipped(linear, self.tensors.bounds(&bounds)?)) }
        };
        let linears: Vec<Linear> = specs.iter().map(&mut one).collect::<Result<_>>()?;
        Ok(linears.into_iter())
    }

    /// How branch number `branch` of a block joins the stream.
    fn encoder_join(&mut self, spec: &spec::Encoder, layer: usize, branch: usize) -> Result<Join> {
        if let Some(names) = spec.post_norms {
            return Ok(Join::Normed(self.encoder_norm(spec, &spec.block_name(layer, names[branch]))?));
        }
        if !spec.layer_scale {
            return Ok(Join::Plain);
        }
        let names = spec.names.block;
        let gain = self.tensors.weight(&spec.block_name(layer, [names.scale1, names.scale2][branch]))?;
        let ones = || Array::of(self.tensors.device, &vec![1.0; spec.hidden_size]);
        Ok(Join::Gained(Gained::new(gain, ones)))
    }

    pub(super) fn connector(&mut self, spec: &spec::Connector) -> Result<Connector> {
        spec.steps.iter().map(|step| self.connector_step(step)).collect::<Result<_>>().map(Connector)
    }

    fn connector_step(&mut self, step: &spec::Step) -> Result<Step> {
        Ok(match step {
            spec::Step::SideBySide(side) => Step::SideBySide(*side),
            spec::Step::ByFeature(side) => Step::ByFeature(*side),
            spec::Step::Mean(side) => Step::Mean(*side),
            spec::Step::Norm(norm) => {
                Step::Norm(Norm { offset: norm.offset, ..self.norm_of(&norm.name, norm.eps, norm.rms)? })
            }
            spec::Step::Linear(linear) => Step::Linear(self.linear(linear)?),
            spec::Step::Matrix { name, shape: [_, out_features] } => {
                Step::Matrix { weight: self.tensors.weight(name)?, out_features: *out_features }
            }
            spec::Step::PlainNorm { size, eps } => Step::Norm(self.plain_norm(*size, *eps)),
            spec::Step::Scale(factor) => Step::Scale(*factor),
            spec::Step::Standardize { names: [bias, scale], .. } => {
                Step::Standardize { bias: self.tensors.weight(bias)?, scale: self.tensors.weight(scale)? }
            }
            spec::Step::Function(function) => Step::Function(function_of(*function)),
            spec::Step::Dropout(_) => Step::Dropout,
        })
    }
}

/// Refuses a decoder that is not of this encoder's model.
fn fits(vision: &VisionArch, decoder: &Arch) -> Result<()> {
    if vision.deepstack.len() >= decoder.num_hidden_layers.max(1) {
        let (added, blocks) = (vision.deepstack.len(), decoder.num_hidden_layers);
        return Err(Error::model(format!(
            "a decoder of {blocks} blocks cannot take features behind its first {added}"
        ))
        .hint("vision_config.deepstack_visual_indexes must have fewer entries than the decoder has blocks"));
    }
    if vision.mrope.is_some() && decoder.ropes.is_empty() {
        return Err(Error::model("not yet: images for a decoder without a rotary embedding (partial_rotary_factor 0)")
            .hint("set vision.load: false to train on text alone"));
    }
    let turned: usize = vision.mrope.iter().flat_map(|mrope| mrope.sections).sum();
    let wrong = decoder.ropes.iter().find(|rope| vision.mrope.is_some() && rope.rotary_dim != 2 * turned);
    wrong.map_or(Ok(()), |rope| {
        Err(Error::model(format!("mrope_section has {turned} frequencies, a head turns by {}", rope.rotary_dim / 2))
            .hint("the entries of mrope_section must sum to half of the features of a head that turn"))
    })
}
