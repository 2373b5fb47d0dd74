//! Qwen3.5, text: three of four blocks have linear attention by the gated delta rule, the others attention with a gate on its output.
use crate::arch::{Arch, DeltaNetNames, DeltaNetSpec, GateSpec, PartSpec, QkNorm};
use crate::decoder_json::Defaults;
use crate::family::Family;
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3_5_text",
    class_name: "Qwen3_5ForCausalLM",
    models: "Qwen3.5 0.8B to 27B, Qwen3.6 27B and Qwen3.8 27B",
    features: "linear attention by the gated delta rule in three of four blocks, a gate on the output of the other attention, \
               a quarter of each head rotated",
    sparse: false,
    classifier: Some("Qwen3_5TextForSequenceClassification"),
    gguf: None,
};

/// The most tokens that a convolution looks at.
const MAX_KERNEL: usize = 16;
/// Bound of the width of a head of keys: a GPU keeps 64 columns of a state in its shared memory.
const MAX_KEY_DIM: usize = 256;

pub(super) fn defaults() -> Defaults {
    Defaults { kv_heads: Some(4), head_dim: Some(256), partial_rotary: Some(0.25), ..Defaults::default() }
}

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch = source.decoder(&FAMILY, &defaults())?;
    mixers(source, &mut arch, DeltaNetNames::Qwen)?;
    Ok(arch)
}

/// Both kinds of attention, and the norms.
pub(super) fn mixers(source: &Source<'_>, arch: &mut Arch, names: DeltaNetNames) -> Result<()> {
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.qk_norm = QkNorm::Head;
    arch.norm_offset = 1.0;
    arch.attentions_mut().for_each(|attention| attention.gate = GateSpec::Beside);
    let mixer = PartSpec::DeltaNet(DeltaNetSpec { names, ..source.delta_net()? });
    let kinds = source.layer_list("layer_types", arch, |kind| match kind.as_str() {
        Some("linear_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    })?;
    let interval = source.size("full_attention_interval", Some(4))?;
    for (layer, block) in arch.blocks.iter_mut().enumerate() {
        if kinds.as_ref().map_or((layer + 1) % interval != 0, |kinds| kinds[layer]) {
            block.set_mixer(&mixer);
        }
    }
    Ok(())
}

impl Source<'_> {
    /// The `linear_*` keys.
    fn delta_net(&self) -> Result<DeltaNetSpec> {
        let spec = DeltaNetSpec {
            names: DeltaNetNames::Qwen,
            key_heads: self.size("linear_num_key_heads", Some(16))?,
            value_heads: self.size("linear_num_value_heads", Some(32))?,
            key_dim: self.size_up_to("linear_key_head_dim", Some(128), MAX_KEY_DIM)?,
            value_dim: self.size("linear_value_head_dim", Some(128))?,
            kernel: self.size_up_to("linear_conv_kernel_dim", Some(4), MAX_KERNEL)?,
        };
        let DeltaNetSpec { key_heads, value_heads, .. } = spec;
        if !value_heads.is_multiple_of(key_heads) {
            return Err(self.error(format!(
                "linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
            )));
        }
        let most = crate::hf_json::MAX_SIZE;
        let width = [(key_heads, spec.key_dim), (value_heads, spec.value_dim)].map(|(heads, width)| heads * width);
        if width.iter().any(|&width| width > most) {
            return Err(self.error(format!("linear attention of width {width:?}, expected at most {most}")));
        }
        Ok(spec)
    }
}
