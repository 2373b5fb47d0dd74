//! GLM-4.5: half of each head rotated, experts chosen by sigmoids and a bias with an MLP beside them, dense MLPs in the first blocks.
use crate::arch::{Arch, QkNorm};
use crate::decoder_json::{DeepSeekDefaults, Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "glm4_moe",
    class_name: "Glm4MoeForCausalLM",
    models: "GLM-4.5 355B, GLM-4.5-Air 106B, GLM-4.6 and GLM-4.7 355B",
    features: "biases on q, k and v, optional norms on each head of q and k, half of each head rotated, experts chosen by sigmoids \
               and a bias, an MLP beside them, dense MLPs in the first blocks",
    sparse: true,
    classifier: None,
    gguf: Some(Gguf {
        ropes: &["partial"],
        router_keys: true,
        dense_first: true,
        bare: true,
        ffn_norm: "post_attention_norm",
        ..Gguf::named("glm4moe")
    }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults =
        Defaults { kv_heads: Some(8), context: 131_072, eps: 1e-5, partial_rotary: Some(0.5), ..Defaults::default() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    source.refuse_window()?;
    arch.qkv_bias = source.attention_bias()?.0;
    if source.flag("use_qk_norm", false)? {
        arch.qk_norm = QkNorm::Head;
    }
    let experts = ExpertDefaults { count: 128, per_token: 8, width: 1408 };
    source.deepseek_experts(&mut arch, DeepSeekDefaults { experts, scale: 1.0, groups: (1, 1), dense: 1 })?;
    Ok(arch)
}
