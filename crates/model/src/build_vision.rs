//! Builds encoder and connector from the tensors of a model that is being built.
use super::attention::{Attention, Qkv};
use super::block::Block;
use super::blocks::Blocks;
use super::branch::{Branch, Gained, Join, Part};
use super::build::Builder;
use super::device::pool;
use super::linear::Linear;
use super::norm::Norm;
use super::plain_mlp::PlainMlp;
use super::projections::Projections;
use super::shards::Shards;
use super::vision::Vision;
use super::vision::connector::{AveragePool, Connector};
use super::vision::encoder::Encoder;
use super::vision::stem::Stem;
use tunesmith_base::error::Result;
use tunesmith_config::Checkpointing;
use tunesmith_config::vision::{self as spec, ConnectorKind, Features, VisionArch};
use tunesmith_device::Array;
use tunesmith_ops::attention::{Heads, Scores};
use tunesmith_ops::narrow::Half;
use tunesmith_ops::pointwise::Function;

impl Builder<'_> {
    /// Encoder and connector; `narrow` is what the encoder keeps for backward.
    pub(crate) fn vision(&mut self, arch: &VisionArch, narrow: Option<Half>) -> Result<Vision> {
        let encoder = arch.features.is_none().then(|| self.encoder(&arch.encoder, narrow)).transpose()?;
        let behind = arch.features != Some(Features::Connector);
        let connector = behind.then(|| self.connector(&arch.connector)).transpose()?;
        let pool = pool(self.tensors.device, self.tensors.source.config);
        Ok(Vision::new(arch.clone(), encoder, connector, pool))
    }

    fn layer_norm(&mut self, name: &str, eps: f64) -> Result<Norm> {
        let weight = self.tensors.weight(&format!("{name}.weight"))?;
        let bias = Some(self.tensors.weight(&format!("{name}.bias"))?);
        Ok(Norm { weight, bias, offset: 0.0, eps: eps as f32 })
    }

    fn encoder(&mut self, spec: &spec::Encoder, narrow: Option<Half>) -> Result<Encoder> {
        let stem = self.stem(spec)?;
        let blocks: Vec<Block> =
            (0..spec.feature.blocks).map(|layer| self.encoder_block(spec, layer)).collect::<Result<_>>()?;
        let final_norm = spec
            .feature
            .final_norm
            .then(|| self.layer_norm(&spec.name(spec.names.stem.final_norm), spec.norm_eps))
            .transpose()?;
        let trains = stem.trains() || blocks.iter().any(Block::trains) || final_norm.as_ref().is_some_and(Norm::trains);
        let blocks = Blocks::new(blocks, None, stem.trains(), Checkpointing::CHEAP, narrow);
        Ok(Encoder { spec: spec.clone(), stem, blocks, final_norm, trains, shards: Shards::default() })
    }

    fn stem(&mut self, spec: &spec::Encoder) -> Result<Stem> {
        let names = &spec.names.stem;
        let class_token = spec.class_token.then(|| self.tensors.weight(&spec.name(names.class_token))).transpose()?;
        let registers = (spec.registers > 0).then(|| self.tensors.weight(&spec.name(names.registers))).transpose()?;
        let patch = self.linear(&spec.patch_embedding())?;
        let positions = self.tensors.weight(&spec.name(names.positions))?;
        let norm = spec.pre_norm.then(|| self.layer_norm(&spec.name(names.pre_norm), spec.norm_eps)).transpose()?;
        Ok(Stem { patch, class_token, registers, positions, norm })
    }

    fn encoder_block(&mut self, spec: &spec::Encoder, layer: usize) -> Result<Block> {
        let names = spec.names.block;
        let [query, key, value, out, fc1, fc2] = spec.block_linears(layer);
        let norm = Some(self.layer_norm(&spec.block_name(layer, names.norm1), spec.norm_eps)?);
        let qkv = Qkv::Own(Projections::apart([self.linear(&query)?, self.linear(&key)?, self.linear(&value)?]));
        let head_dim = spec.hidden_size / spec.num_heads;
        let attention = Attention {
            qkv,
            q_norm: None,
            k_norm: None,
            o: self.linear(&out)?,
            heads: Heads::new(spec.num_heads, spec.num_heads, head_dim),
            how: Scores { scale: (head_dim as f32).powf(-0.5), softcap: None, window: None },
            rope: None,
            layer,
            shares: false,
        };
        let join = self.encoder_join(spec, layer, names.scale1)?;
        let first = Branch { norm, part: Part::Attention(Box::new(attention)), join };
        let norm = Some(self.layer_norm(&spec.block_name(layer, names.norm2), spec.norm_eps)?);
        let mlp = PlainMlp { fc1: self.linear(&fc1)?, fc2: self.linear(&fc2)?, function: function(spec.activation) };
        let join = self.encoder_join(spec, layer, names.scale2)?;
        Ok(Block { branches: vec![first, Branch { norm, part: Part::Plain(Box::new(mlp)), join }] })
    }

    fn encoder_join(&mut self, spec: &spec::Encoder, layer: usize, scale: &str) -> Result<Join> {
        if !spec.layer_scale {
            return Ok(Join::Plain);
        }
        let gain = self.tensors.weight(&spec.block_name(layer, scale))?;
        let ones = || Array::of(self.tensors.device, &vec![1.0; spec.hidden_size]);
        Ok(Join::Gained(Gained::new(gain, ones)))
    }

    fn connector(&mut self, spec: &spec::Connector) -> Result<Connector> {
        let linears: Vec<Linear> = spec.linears().iter().map(|linear| self.linear(linear)).collect::<Result<_>>()?;
        let mut linears = linears.into_iter();
        let mut next = || linears.next().expect("the kind has this many modules");
        Ok(match &spec.kind {
            ConnectorKind::Linear { .. } => Connector::Linear(next()),
            ConnectorKind::Mlp { activation, .. } => {
                Connector::Mlp(PlainMlp { fc1: next(), fc2: next(), function: function(*activation) })
            }
            ConnectorKind::PixelShuffle { factor, .. } => Connector::PixelShuffle { linear: next(), factor: *factor },
            ConnectorKind::AveragePool { kernel, norm, eps, projection } => {
                let weight = self.tensors.weight(&format!("{norm}.weight"))?;
                let norm = Norm { weight, bias: None, offset: 1.0, eps: *eps as f32 };
                let projection = self.tensors.weight(projection)?;
                let (kernel, out_features) = (*kernel, spec.decoder_size);
                Connector::AveragePool(AveragePool { kernel, norm, projection, out_features })
            }
        })
    }
}

/// The function of that description.
const fn function(function: spec::Pointwise) -> Function {
    match function {
        spec::Pointwise::Gelu => Function::Gelu,
        spec::Pointwise::GeluTanh => Function::GeluTanh,
        spec::Pointwise::QuickGelu => Function::QuickGelu,
        spec::Pointwise::Silu => Function::Silu,
        spec::Pointwise::Relu => Function::Relu,
    }
}
