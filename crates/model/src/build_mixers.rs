//! Builds the mixers of blocks, the parts in which a token sees others: attention, latent attention, cross-attention,
//! the gated delta rule, Mamba 2, and short convolutions.
use super::attention::{Attention, OutputGate, Qkv};
use super::build::Builder;
use super::cross_attention::CrossAttention;
use super::delta_net::{DeltaNet, InProj};
use super::latent::{Latent, Up};
use super::linear::Linear;
use super::mamba::Mamba;
use super::norm::Norm;
use super::projections::Projections;
use super::short_conv::ShortConv;
use std::collections::BTreeMap;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{
    Arch, AttentionSpec, CrossAttentionSpec, DeltaNetNames, DeltaNetSpec, GateSpec, LatentSpec, LinearSpec, MambaSpec,
    PartSpec, QkNorm, ShortConvSpec,
};
use tunesmith_ops::attention::{Heads, Scores};
use tunesmith_ops::gated_delta_rule;
use tunesmith_ops::latent_heads::LatentHeads;
use tunesmith_ops::mamba2;
use tunesmith_ops::spans::Window;

/// The number of the attention of a block, counted over the blocks that have one.
fn attention_number(arch: &Arch, block: usize) -> usize {
    arch.blocks[..block].iter().filter(|block| block.attention().is_some()).count()
}

/// The number of a block's recurrent mixer, counted over the mixers that keep a state.
fn recurrent_number(arch: &Arch, block: usize) -> usize {
    let branches = arch.blocks[..block].iter().flat_map(|block| &block.branches);
    let is_recurrent =
        |part: &PartSpec| matches!(part, PartSpec::DeltaNet(_) | PartSpec::ShortConv(_) | PartSpec::Mamba(_));
    branches.filter(|branch| is_recurrent(&branch.part)).count()
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
        let module = format!("model.layers.{layer}.{}", arch.module_names.attention);
        let mut linear = |this: &mut Self, name: &str| this.named(&format!("{module}.{name}"), linears);
        let heads =
            Heads { v_head_dim: spec.value_dim(), ..Heads::new(spec.num_heads, spec.num_kv_heads, spec.head_dim) };
        let qkv = match (latent, spec.kv_from) {
            (Some(latent), _) => Qkv::Latent(Box::new(latent)),
            (None, Some(block)) => {
                Qkv::Shared(Projections::apart([linear(self, "q_proj")?]), attention_number(arch, block))
            }
            (None, None) if arch.fused => {
                let features = [spec.query_size(), spec.kv_size(), spec.kv_size()];
                Qkv::Own(Projections::fused(linear(self, arch.module_names.qkv_proj)?, features))
            }
            (None, None) if spec.k_eq_v => {
                Qkv::KeysAsValues(Projections::apart([linear(self, "q_proj")?, linear(self, "k_proj")?]))
            }
            (None, None) => {
                let (q, k) = (linear(self, "q_proj")?, linear(self, "k_proj")?);
                Qkv::Own(Projections::apart([q, k, linear(self, "v_proj")?]))
            }
        };
        let groups = match arch.qk_norm {
            QkNorm::None | QkNorm::Weightless => None,
            QkNorm::Head => Some([heads.query, heads.kv]),
            QkNorm::Whole => Some([1, 1]),
        };
        let mut norm =
            |name: &str, groups| Ok::<_, Error>((self.tensors.norm(&format!("{module}.{name}.weight"))?, groups));
        let mut q_norm = groups.map(|[query, _]| norm(arch.module_names.q_norm, query)).transpose()?;
        let own_keys = groups.filter(|_| spec.kv_from.is_none());
        let mut k_norm = own_keys.map(|[_, key]| norm(arch.module_names.k_norm, key)).transpose()?;
        if arch.qk_norm == QkNorm::Weightless {
            let weightless = |groups| Some((self.tensors.weightless(spec.head_dim), groups));
            (q_norm, k_norm) = (weightless(heads.query), weightless(heads.kv));
        }
        let v_norm =
            (spec.v_norm && spec.kv_from.is_none()).then(|| (self.tensors.weightless(spec.head_dim), heads.kv));
        let divisor = if arch.scale_by_layer { (layer + 1) as f64 } else { 1.0 };
        let how = Scores {
            scale: (arch.attention_scale / divisor) as f32,
            softcap: arch.attention_softcap.map(|cap| cap as f32),
            window: spec.window.map(Window::Sliding),
        };
        let gate = match spec.gate {
            GateSpec::None => OutputGate::None,
            GateSpec::Beside => OutputGate::Beside,
            GateSpec::Own => OutputGate::Own(Projections::apart([linear(self, "gate_proj")?])),
            GateSpec::Heads => OutputGate::Heads(Projections::apart([linear(self, "g_proj")?])),
        };
        let sinks = format!("{module}.sinks");
        let sinks = arch.sinks.then(|| self.tensors.weight(&sinks)).transpose()?;
        let o = linear(self, arch.module_names.o_proj)?;
        let shares = arch.attentions().any(|other| other.kv_from == Some(layer));
        let number = attention_number(arch, layer);
        Ok(Attention {
            qkv,
            q_norm,
            k_norm,
            v_norm,
            norms_after_rope: arch.qk_norm_after_rope,
            gate,
            sinks,
            o,
            heads,
            how,
            rope: spec.rope,
            second_rope: None,
            layer: number,
            shares,
        })
    }

    pub(super) fn cross_attention(
        &mut self,
        layer: usize,
        spec: CrossAttentionSpec,
        linears: &mut BTreeMap<String, LinearSpec>,
    ) -> Result<CrossAttention> {
        let module = format!("model.layers.{layer}.{}", CrossAttentionSpec::MODULE);
        let [q, kv, o] = CrossAttentionSpec::LINEARS.map(|name| self.named(&format!("{module}.{name}"), linears));
        let divisor = if self.arch.scale_by_layer { (layer + 1) as f64 } else { 1.0 };
        let how = Scores { scale: (self.arch.attention_scale / divisor) as f32, softcap: None, window: None };
        let before = self.arch.blocks[..layer].iter();
        Ok(CrossAttention {
            q: q?,
            kv: Projections::fused(kv?, [spec.size(); 2]),
            o: o?,
            heads: Heads::new(spec.num_heads, spec.num_heads, spec.head_dim),
            how,
            number: before.filter(|block| block.cross_attention().is_some()).count(),
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
        // This matrix is not rearranged: in decoding, single queries absorb it head by head.
        let interleaves = std::mem::take(&mut self.interleaves);
        let kv = up(self, "kv_a_layernorm", "kv_b_proj")?;
        self.interleaves = interleaves;
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
        let (in_proj, out_proj) = match spec.names {
            DeltaNetNames::Qwen => {
                let (qkv, z) = (linear(self, "in_proj_qkv")?, linear(self, "in_proj_z")?);
                let (b, a) = (linear(self, "in_proj_b")?, linear(self, "in_proj_a")?);
                (InProj::Joined(Projections::apart([qkv, z, b, a])), "out_proj")
            }
            DeltaNetNames::QwenNext => {
                let qkvz = linear(self, "in_proj_qkvz")?;
                (InProj::Grouped(Projections::apart([qkvz, linear(self, "in_proj_ba")?])), "out_proj")
            }
            DeltaNetNames::Olmo => {
                let (q, k, v) = (linear(self, "q_proj")?, linear(self, "k_proj")?, linear(self, "v_proj")?);
                let (a, b, z) = (linear(self, "a_proj")?, linear(self, "b_proj")?, linear(self, "g_proj")?);
                (InProj::Apart(Projections::apart([q, k, v, z, b, a])), "o_proj")
            }
        };
        let convolutions: Vec<String> =
            spec.convolutions().iter().map(|(name, _)| format!("{mixer}.{name}.weight")).collect();
        let conv = self.tensors.end_to_end(&convolutions)?;
        let mut weight = |name: &str| self.tensors.weight(&format!("{mixer}.{name}"));
        let (a_log, dt_bias) = (weight("A_log")?, weight("dt_bias")?);
        // Its gain is the weight itself, also where those of other norms count from 1.
        let norm = self.tensors.norm(&format!("{mixer}.{}.weight", spec.names.norm()))?;
        let norm = Norm { offset: 0.0, eps: spec.norm_eps as f32, ..norm };
        let out_proj = self.of_mixer(&mixer, out_proj, linears)?;
        let &DeltaNetSpec { key_heads: key, value_heads: value, key_dim, value_dim, kernel, .. } = spec;
        Ok(DeltaNet {
            in_proj,
            conv,
            a_log,
            dt_bias,
            norm,
            out_proj,
            heads: gated_delta_rule::Heads { key, value, key_dim, value_dim },
            beta_max: spec.beta_max as f32,
            kernel,
            number: recurrent_number(self.arch, layer),
        })
    }

    pub(super) fn mamba(
        &mut self,
        layer: usize,
        spec: &MambaSpec,
        linears: &mut BTreeMap<String, LinearSpec>,
    ) -> Result<Mamba> {
        let mixer = format!("model.layers.{layer}.{}", self.arch.module_names.mamba);
        let in_proj = self.of_mixer(&mixer, "in_proj", linears)?;
        let in_proj = Projections::fused(in_proj, [spec.inner_size(), spec.conv_size(), spec.heads]);
        let mut weight = |name: &str| self.tensors.weight(&format!("{mixer}.{name}"));
        let conv = weight("conv1d.weight")?;
        let conv_bias = spec.conv_bias.then(|| weight("conv1d.bias")).transpose()?;
        let (a_log, d, dt_bias) = (weight("A_log")?, weight("D")?, weight("dt_bias")?);
        let norm = self.tensors.norm(&format!("{mixer}.norm.weight"))?;
        let out_proj = self.of_mixer(&mixer, "out_proj", linears)?;
        let &MambaSpec { heads: count, groups, dim, state, kernel, .. } = spec;
        Ok(Mamba {
            in_proj,
            conv,
            conv_bias,
            a_log,
            d,
            dt_bias,
            norm,
            out_proj,
            heads: mamba2::Heads { count, groups, dim, state },
            limits: spec.limits.map(|limit| limit as f32),
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
