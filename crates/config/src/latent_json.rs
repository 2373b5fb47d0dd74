//! Multi-head latent attention in `config.json`, as the classes of `DeepSeek` read it.
use serde_json::Value;

use super::arch::{Arch, AttentionSpec, LatentSpec, Rope, RopeScaling};
use super::decoder_json::Defaults;
use super::family::Family;
use super::hf_json::Source;
use tunesmith_base::error::Result;

/// How a class computes the sizes of its heads.
#[derive(Clone, Copy)]
pub(super) struct LatentDefaults {
    /// Ranks and widths of heads, for keys that the file lacks.
    pub sizes: LatentSpec,
    /// Whether `head_dim` means a whole head of keys and not what turns of it; `partial_rotary_factor` is then the share of
    /// that.
    pub whole: bool,
}

impl Source<'_> {
    /// A decoder with latent attention in every block. A `head_dim` in the file has to be what they give.
    pub(super) fn latent_decoder(
        &self,
        family: &'static Family,
        defaults: &Defaults,
        latent: LatentDefaults,
    ) -> Result<Arch> {
        let sizes = self.latent(&latent.sizes)?;
        let key = sizes.nope_dim + sizes.rope_dim;
        let head_dim = if latent.whole { key } else { sizes.rope_dim };
        let partial = latent.whole.then_some(sizes.rope_dim as f64 / key as f64);
        if self.map.get("head_dim").is_some_and(|found| found.as_u64() != Some(head_dim as u64)) {
            return Err(self.mismatch("head_dim", &format!("{head_dim}, as the other keys give it")));
        }
        let mut map = self.map.clone();
        map.insert("head_dim".into(), Value::from(head_dim));
        let source = Source { origin: self.origin, map, prefix: self.prefix.clone() };
        let mut arch = source.decoder(family, &Defaults { partial_rotary: partial, ..*defaults })?;
        if arch.ropes[0].rotary_dim != sizes.rope_dim {
            return Err(self.error(format!(
                "partial_rotary_factor turns {} features of a head, qk_rope_head_dim is {}",
                arch.ropes[0].rotary_dim, sizes.rope_dim
            )));
        }
        for attention in arch.attentions_mut() {
            let AttentionSpec { num_heads: heads, num_kv_heads: kv, .. } = *attention;
            if heads != kv {
                return Err(self.mismatch("num_key_value_heads", &format!("num_attention_heads, {heads}")));
            }
            (attention.head_dim, attention.latent) = (key, Some(sizes));
        }
        (arch.qkv_bias, arch.o_bias) = self.attention_bias()?;
        arch.ropes[0].interleaved = self.flag("rope_interleave", true)?;
        arch.attention_scale = self.latent_scale(key, &arch.ropes[0])?;
        Ok(arch)
    }

    /// The same file without a key, which a class does not read.
    pub(super) fn without(&self, key: &str) -> Self {
        let mut map = self.map.clone();
        map.remove(key);
        Self { origin: self.origin, map, prefix: self.prefix.clone() }
    }

    fn latent(&self, defaults: &LatentSpec) -> Result<LatentSpec> {
        let sizes = LatentSpec {
            query_rank: if self.is_null("q_lora_rank") {
                None
            } else {
                Some(self.size("q_lora_rank", defaults.query_rank)?)
            },
            kv_rank: self.size("kv_lora_rank", Some(defaults.kv_rank))?,
            nope_dim: self.size("qk_nope_head_dim", Some(defaults.nope_dim))?,
            rope_dim: self.size("qk_rope_head_dim", Some(defaults.rope_dim))?,
            value_dim: self.size("v_head_dim", Some(defaults.value_dim))?,
        };
        if !sizes.rope_dim.is_multiple_of(2) {
            return Err(self.mismatch("qk_rope_head_dim", "an even number"));
        }
        Ok(sizes)
    }

    /// `key^-0.5`, times the square of yarn's factor on scores where `mscale_all_dim` is set (`yarn_apply_mscale`).
    fn latent_scale(&self, key: usize, rope: &Rope) -> Result<f64> {
        let scale = (key as f64).powf(-0.5);
        let all = match self.rope_entry("full_attention")? {
            Some(entry) => entry.number("mscale_all_dim")?.filter(|&all| all != 0.0),
            None => None,
        };
        match (all, &rope.scaling) {
            (None, _) | (_, RopeScaling::None) => Ok(scale),
            (Some(_), RopeScaling::Yarn { .. })
                if self.rope_entry("full_attention")?.is_some_and(|it| it.is_null("factor")) =>
            {
                Err(self.error("rope_parameters.factor is null beside mscale_all_dim, expected a number"))
            }
            (Some(all), RopeScaling::Yarn { factor, .. }) => {
                let mscale = if *factor <= 1.0 { 1.0 } else { 0.1 * all * factor.ln() + 1.0 };
                Ok(scale * mscale * mscale)
            }
            (Some(_), _) => Err(self.not_yet("mscale_all_dim with a rope_type other than yarn")),
        }
    }
}
