//! Seed-OSS: Llama with its own head width and biases on q, k and v.
use crate::arch::Arch;
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "seed_oss",
    class_name: "SeedOssForCausalLM",
    models: "Seed-OSS 36B",
    features: "biases on q, k and v, a head width of its own",
    sparse: false,
    classifier: Some("SeedOssForSequenceClassification"),
    gguf: Some(Gguf { ffn_norm: "post_attention_norm", ..Gguf::named("seed_oss") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    // The class drops a tenth where the file does not say otherwise.
    for key in ["attention_dropout", "residual_dropout"] {
        if !source.has(key) {
            return Err(source.not_yet(format!("{key} other than 0")).hint("set it to 0.0 in config.json"));
        }
    }
    let defaults =
        Defaults { kv_heads: Some(8), head_dim: Some(128), context: 524_288, pad: Some(1), ..Defaults::default() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    source.refuse_window()?;
    arch.qkv_bias = source.flag("attention_bias", true)?;
    arch.o_bias = source.flag("attention_out_bias", false)?;
    arch.mlp_bias = source.flag("mlp_bias", false)?;
    Ok(arch)
}
