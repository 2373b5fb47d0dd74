//! Qwen3.5, text: three of four blocks have linear attention by the gated delta rule, the others attention with a gate on its output.
use crate::arch::{Arch, DeltaNetNames, DeltaNetSpec, GateSpec, PartSpec, QkNorm};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::mixers_json::{MAX_KERNEL, MAX_ROWS};
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "qwen3_5_text",
    class_name: "Qwen3_5ForCausalLM",
    models: "Qwen3.5 0.8B to 27B, Qwen3.6 27B and Qwen3.8 27B",
    features: "linear attention by the gated delta rule in three of four blocks, a gate on the output of the other attention, \
               a quarter of each head rotated",
    sparse: false,
    classifier: Some("Qwen3_5TextForSequenceClassification"),
    gguf: Some(Gguf {
        ropes: &["partial"],
        sections: true,
        bare: true,
        ffn_norm: "post_attention_norm",
        ..Gguf::named("qwen35")
    }),
};

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
    let mixer = PartSpec::DeltaNet(source.checked_delta_net(
        arch.activation,
        DeltaNetSpec {
            names,
            key_heads: source.size("linear_num_key_heads", Some(16))?,
            value_heads: source.size("linear_num_value_heads", Some(32))?,
            key_dim: source.size_up_to("linear_key_head_dim", Some(128), MAX_ROWS)?,
            value_dim: source.size("linear_value_head_dim", Some(128))?,
            kernel: source.size_up_to("linear_conv_kernel_dim", Some(4), MAX_KERNEL)?,
            beta_max: 1.0,
            norm_eps: arch.rms_norm_eps,
        },
    )?);
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
