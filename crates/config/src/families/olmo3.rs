//! OLMo 3: OLMo 2 with a sliding window in three of four blocks. Only those have rotary positions without scaling.
use crate::arch::{Arch, NormPlacement, QkNorm};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "olmo3",
    class_name: "Olmo3ForCausalLM",
    models: "OLMo 3 and 3.1 7B and 32B",
    features: "norms after attention and MLP only, norms over the whole width of q and k, a sliding window and rotary positions without scaling in three of four blocks",
    sparse: false,
    classifier: Some("Olmo3ForSequenceClassification"),
    gguf: Some(Gguf { windows: &[|block| block % 4 != 3], ..Gguf::named("olmo2") }),
};

const THETA: f64 = 5e5;

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults =
        Defaults { context: 2048, theta: THETA, two_ropes: true, eps: 1e-5, pad: Some(1), ..Defaults::default() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.set_norms(NormPlacement::Post);
    arch.qk_norm = QkNorm::Whole;
    let window = source.window(Some(4096))?;
    source.layer_windows(&mut arch, window, |block| block % 4 != 3)?;
    arch.ropes.push(source.local_rope(&arch, THETA)?);
    for attention in arch.attentions_mut() {
        attention.rope = Some(usize::from(attention.window.is_some()));
    }
    Ok(arch)
}
