//! Mistral 4: multi-head latent attention whose queries are scaled by their position, and experts chosen by a softmax.
use crate::arch::{Arch, Experts, LatentSpec, RouterSpec};
use crate::decoder_json::{DeepSeekDefaults, Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::latent_json::LatentDefaults;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "mistral4",
    class_name: "Mistral4ForCausalLM",
    models: "Mistral Small 4 119B",
    features: "multi-head latent attention, queries scaled by their position beyond the original context, experts chosen by a softmax \
               with an MLP beside them",
    sparse: true,
    classifier: Some("Mistral4ForSequenceClassification"),
    gguf: Some(Gguf {
        yarn_log: Some(0.1),
        router_keys: true,
        dense_first: true,
        bare: true,
        ..Gguf::named("mistral4")
    }),
};

/// The rope parameters of a file without any.
const YARN: &str = r#"{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}"#;

const LATENT: LatentDefaults = LatentDefaults {
    sizes: LatentSpec { query_rank: Some(1024), kv_rank: 256, nope_dim: 64, rope_dim: 64, value_dim: 128 },
    whole: true,
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let source = &source.with_rope(YARN);
    let defaults = Defaults { kv_heads: Some(32), context: 1_048_576, pad: Some(11), ..Defaults::default() };
    let mut arch = source.latent_decoder(&FAMILY, &defaults, LATENT)?;
    arch.query_scaling = Some(source.query_scaling(&arch.ropes[0])?);
    let experts = ExpertDefaults { count: 128, per_token: 4, width: 2048 };
    source.deepseek_experts(&mut arch, DeepSeekDefaults { experts, scale: 1.0, groups: (1, 1), dense: 0 })?;
    arch.predicts_ahead = false;
    // Its router is DeepSeek V3's but for the scores.
    let softmax = |experts: Experts| Experts {
        router: RouterSpec { sigmoid: false, choice_bias: false, ..experts.router },
        ..experts
    };
    arch.experts = arch.experts.map(softmax);
    Ok(arch)
}
