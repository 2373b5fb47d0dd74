//! `DeepSeek` V3: multi-head latent attention, and experts chosen by sigmoids and a bias.
use crate::arch::{Arch, LatentSpec};
use crate::decoder_json::{DeepSeekDefaults, Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::latent_json::LatentDefaults;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "deepseek_v3",
    class_name: "DeepseekV3ForCausalLM",
    models: "Moonlight 16B, DeepSeek V3 and R1 671B",
    features: "multi-head latent attention; experts chosen by sigmoids and a bias with an MLP beside them, \
               dense MLPs in the first blocks",
    sparse: true,
    classifier: Some("DeepseekV3ForSequenceClassification"),
    gguf: Some(Gguf {
        yarn_log: Some(0.1),
        router_keys: true,
        dense_first: true,
        bare: true,
        ..Gguf::named("deepseek2")
    }),
};

const LATENT: LatentDefaults = LatentDefaults {
    sizes: LatentSpec { query_rank: Some(1536), kv_rank: 512, nope_dim: 128, rope_dim: 64, value_dim: 128 },
    whole: false,
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch = source.latent_decoder(
        &FAMILY,
        &Defaults { kv_heads: Some(128), context: 4096, ..Defaults::default() },
        LATENT,
    )?;
    let experts = ExpertDefaults { count: 256, per_token: 8, width: 2048 };
    source.deepseek_experts(&mut arch, DeepSeekDefaults { experts, scale: 2.5, groups: (8, 4), dense: 3 })?;
    Ok(arch)
}
