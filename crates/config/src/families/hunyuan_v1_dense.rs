//! `HunYuan`, dense: Llama with norms on each head of q and k after the rotary embedding, whose base is stretched once.
use crate::arch::{Arch, ModuleNames, QkNorm, RopeScaling};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "hunyuan_v1_dense",
    class_name: "HunYuanDenseV1ForCausalLM",
    models: "HunYuan 0.5B, 1.8B, 4B and 7B",
    features: "norms on each head of q and k, behind the rotary embedding; a rotary base stretched by alpha",
    sparse: false,
    classifier: Some("HunYuanDenseV1ForSequenceClassification"),
    gguf: Some(Gguf { bare: true, ..Gguf::named("hunyuan-dense") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { context: 2048, eps: 1e-5, pad: Some(0), ..Defaults::default() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    source.refuse_window()?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.module_names = &ModuleNames::HUNYUAN;
    (arch.qk_norm, arch.qk_norm_after_rope) = (QkNorm::Head, true);
    let alpha = source.rope_number("alpha")?;
    let rope = &mut arch.ropes[0];
    if let (Some(alpha), RopeScaling::Dynamic { .. }) = (alpha, &rope.scaling) {
        let dim = rope.rotary_dim as f64;
        rope.theta *= alpha.powf(dim / (dim - 2.0));
        rope.scaling = RopeScaling::None;
    }
    Ok(arch)
}
