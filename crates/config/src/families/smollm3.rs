//! `SmolLM3`: Llama without rotary positions in every fourth block.
use crate::arch::Arch;
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "smollm3",
    class_name: "SmolLM3ForCausalLM",
    models: "SmolLM3 3B",
    features: "no rotary positions in every fourth block",
    sparse: false,
    classifier: Some("SmolLM3ForSequenceClassification"),
    gguf: Some(Gguf {
        pairs: true,
        ropes: &["llama3"],
        turns: |block, _| !(block + 1).is_multiple_of(4),
        ..Gguf::named("smollm3")
    }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults {
        kv_heads: Some(4),
        context: 32_768,
        theta: 2e6,
        tied: true,
        pad: Some(128_004),
        ..Defaults::default()
    };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.mlp_bias = source.flag("mlp_bias", false)?;
    let interval = source.size("no_rope_layer_interval", Some(4))?;
    let turned = source.layer_flags("no_rope_layers", &arch, |layer| (layer + 1) % interval != 0)?;
    for (attention, turned) in arch.attentions_mut().zip(&turned) {
        attention.rope = turned.then_some(0);
    }
    let window = if source.flag("use_sliding_window", false)? { source.window(None)? } else { None };
    source.layer_windows(&mut arch, window, |layer| window.is_some() && !turned[layer])?;
    Ok(arch)
}
