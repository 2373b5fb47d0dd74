//! Builds the parts of blocks in which tokens take from others.
use super::attention::{Attention, Qkv};
use super::build::Builder;
use super::delta_net::DeltaNet;
use super::latent::{Latent, Up};
use super::linear::Linear;
use super::norm::Norm;
use super::projections::Projections;
use super::short_conv::ShortConv;
use std::collections::BTreeMap;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{
    Arch, AttentionSpec, DeltaNetSpec, LatentSpec, LinearSpec, PartSpec, QkNorm, ShortConvSpec,
};
use tunesmith_ops::attention::{Heads, Scores};
use tunesmith_ops::gated_delta_rule;
use tunesmith_ops::latent_heads::LatentHeads;
use tunesmith_ops::spans::Window;

/// The number of the attention of a block, counted over the blocks that have one.
fn attention_number(arch: &Arch, block: usize) -> usize {
    arch.blocks[..block].iter().filter(|block| block.attention().is_some()).count()
}

/// The number of a block's mixer, counted over those that keep a state.
fn recurrent_number(arch: &Arch, block: usize) -> usize {
    let branches = arch.blocks[..block].iter().flat_map(|block| &block.branches);
    branches.filter(|branch| matches!(branch.part, PartSpec::DeltaNet(_) | PartSpec::ShortConv(_))).count()
}

impl Builder<'_> {
    pub(super) fn attention(
        &mut self,
        layer: usize,
        spec: &AttentionSpec,
        linears: &mut BTreeMap<String, LinearSpec>,
    ) -> Result<Attention> {
        let arch = self.arch;
        let latent = spec.latent.as_ref();
        let latent = latent.map(|latent| self.latent(layer, spec.num_heads, latent, linears)).transpose()?;
        let mut linear =
            |this: &mut Self, name: &str| this.named(&format!("model.layers.{layer}.self_attn.{name}"), linears);
        let heads =
            Heads { v_head_dim: spec.value_dim(), ..Heads::new(spec.num_heads, spec.num_kv_heads, spec.head_dim) };
        let qkv = match (latent, spec.kv_from) {
            (Some(latent), _) => Qkv::Latent(Box::new(latent)),
            (None, Some(block)) => {
                Qkv::Shared(Projections::apart([linear(self, "q_proj")?]), attention_number(arch, block))
            }
            (None, None) if arch.fused => {
                let features = [spec.query_size(), spec.kv_size(), spec.kv_size()];
                Qkv::Own(Projections::fused(linear(self, "qkv_proj")?, features))
            }
            (None, None) => {
                let (q, k) = (linear(self, "q_proj")?, linear(self, "k_proj")?);
                Qkv::Own(Projections::apart([q, k, linear(self, "v_proj")?]))
            }
        };
        let groups = match arch.qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some([heads.query, heads.kv]),
            QkNorm::Whole => Some([1, 1]),
        };
        let mut norm = |name: &str, groups| Ok::<_, Error>((self.norm(layer, &format!("self_attn.{name}"))?, groups));
        let q_norm = groups.map(|[query, _]| norm(arch.module_names.q_norm, query)).transpose()?;
        let own_keys = groups.filter(|_| spec.kv_from.is_none());
        let k_norm = own_keys.map(|[_, key]| norm(arch.module_names.k_norm, key)).transpose()?;
        let how = Scores {
            scale: arch.attention_scale as f32,
            softcap: arch.attention_softcap.map(|cap| cap as f32),
            window: spec.window.map(Window::Sliding),
        };
        let sinks = format!("model.layers.{layer}.self_attn.sinks");
        let sinks = arch.sinks.then(|| self.tensors.weight(&sinks)).transpose()?;
        let o = linear(self, arch.module_names.o_proj)?;
        let shares = arch.attentions().any(|other| other.kv_from == Some(layer));
        let number = attention_number(arch, layer);
        Ok(Attention {
            qkv,
            q_norm,
            k_norm,
            norms_after_rope: arch.qk_norm_after_rope,
            gated: spec.gated,
            sinks,
            o,
            heads,
            how,
            rope: spec.rope,
            layer: number,
            shares,
        })
    }

    fn latent(
        &mut self,
        layer: usize,
        heads: usize,
        spec: &LatentSpec,
        linears: &mut BTreeMap<String, LinearSpec>,
    ) -> Result<Latent> {
        let mixer = format!("model.layers.{layer}.self_attn");
        let &LatentSpec { query_rank, kv_rank, nope_dim, rope_dim, value_dim } = spec;
        let mut up = |this: &mut Self, norm: &str, proj: &str| {
            let norm = Norm { eps: LatentSpec::EPS, ..this.norm(layer, &format!("self_attn.{norm}"))? };
            Ok::<_, Error>(Up { norm, proj: this.of_mixer(&mixer, proj, linears)? })
        };
        let query = query_rank.map(|_| up(self, "q_a_layernorm", "q_b_proj")).transpose()?;
        let kv = up(self, "kv_a_layernorm", "kv_b_proj")?;
        let first = self.of_mixer(&mixer, if query.is_some() { "q_a_proj" } else { "q_proj" }, linears)?;
        let rest = self.of_mixer(&mixer, "kv_a_proj_with_mqa", linears)?;
        let heads = LatentHeads { heads, nope: nope_dim, rope: rope_dim, value: value_dim };
        Ok(Latent { down: Projections::first_apart(first, rest, [kv_rank, rope_dim]), query, kv, heads })
    }

    /// A linear module of a mixer.
    fn of_mixer(&mut self, mixer: &str, name: &str, linears: &mut BTreeMap<String, LinearSpec>) -> Result<Linear> {
        self.named(&format!("{mixer}.{name}"), linears)
    }

    pub(super) fn delta_net(
        &mut self,
        layer: usize,
        spec: &DeltaNetSpec,
        linears: &mut BTreeMap<String, LinearSpec>,
    ) -> Result<DeltaNet> {
        let mixer = format!("model.layers.{layer}.linear_attn");
        let mut linear = |this: &mut Self, name: &str| this.of_mixer(&mixer, name, linears);
        let (qkv, z) = (linear(self, "in_proj_qkv")?, linear(self, "in_proj_z")?);
        let (b, a) = (linear(self, "in_proj_b")?, linear(self, "in_proj_a")?);
        let mut weight = |name: &str| self.tensors.weight(&format!("{mixer}.{name}"));
        let (conv, a_log, dt_bias) = (weight("conv1d.weight")?, weight("A_log")?, weight("dt_bias")?);
        // Its gain is the weight itself, also where those of other norms count from 1.
        let norm = Norm { offset: 0.0, ..self.tensors.norm(&format!("{mixer}.norm.weight"))? };
        let out_proj = self.of_mixer(&mixer, "out_proj", linears)?;
        let &DeltaNetSpec { key_heads: key, value_heads: value, key_dim, value_dim, kernel } = spec;
        Ok(DeltaNet {
            in_proj: Projections::apart([qkv, z, b, a]),
            conv,
            a_log,
            dt_bias,
            norm,
            out_proj,
            heads: gated_delta_rule::Heads { key, value, key_dim, value_dim },
            kernel,
            number: recurrent_number(self.arch, layer),
        })
    }

    pub(super) fn short_conv(
        &mut self,
        layer: usize,
        spec: &ShortConvSpec,
        linears: &mut BTreeMap<String, LinearSpec>,
    ) -> Result<ShortConv> {
        let mixer = format!("model.layers.{layer}.conv");
        let in_proj = self.of_mixer(&mixer, "in_proj", linears)?;
        let weight = self.tensors.weight(&format!("{mixer}.conv.weight"))?;
        let bias = spec.bias.then(|| self.tensors.weight(&format!("{mixer}.conv.bias"))).transpose()?;
        let out_proj = self.of_mixer(&mixer, "out_proj", linears)?;
        let in_proj = Projections::fused(in_proj, [self.arch.hidden_size; 3]);
        let number = recurrent_number(self.arch, layer);
        Ok(ShortConv { in_proj, weight, bias, out_proj, kernel: spec.kernel, number })
    }
}
