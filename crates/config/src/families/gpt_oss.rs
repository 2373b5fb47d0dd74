//! gpt-oss: experts with biases and a clamped activation in every block, sinks in the attention, a window in every other block.
use crate::arch::{Arch, BlockSpec, Clamp, ExpertNames, Experts};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "gpt_oss",
    class_name: "GptOssForCausalLM",
    models: "gpt-oss 20B and 120B",
    features: "experts with biases and a clamped SwiGLU, which may be stored in MXFP4; attention sinks; biases on q, k, v and o; \
               a sliding window in every other block",
    sparse: true,
    classifier: Some("GptOssForSequenceClassification"),
    gguf: Some(Gguf {
        windows: &[|block| block.is_multiple_of(2)],
        untied: true,
        ffn_norm: "post_attention_norm",
        ..Gguf::named("gpt-oss")
    }),
};

/// The rope parameters of a file without any.
const YARN: &str = r#"{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
    "original_max_position_embeddings": 4096}"#;

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults {
        kv_heads: Some(8),
        head_dim: Some(64),
        context: 131_072,
        theta: 150_000.0,
        eps: 1e-5,
        ..Defaults::default()
    };
    let source = &source.with_rope(YARN);
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    let bias = source.flag("attention_bias", true)?;
    (arch.qkv_bias, arch.o_bias, arch.sinks) = (bias, bias, true);
    let window = source.window(Some(128))?;
    source.layer_windows(&mut arch, window, |layer| layer % 2 == 0)?;
    let key = if source.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let clamp = Clamp { alpha: source.positive("swiglu_alpha", 1.702)?, limit: source.positive("swiglu_limit", 7.0)? };
    arch.experts = Some(Experts {
        names: ExpertNames::GptOss,
        clamp: Some(clamp),
        biased: true,
        mxfp4: source.get("quantization_config").is_some_and(|found| found["quant_method"] == "mxfp4"),
        ..source.experts(key, "intermediate_size", ExpertDefaults { count: 128, per_token: 4, width: 2880 })?
    });
    arch.blocks.iter_mut().for_each(BlockSpec::set_experts);
    Ok(arch)
}
