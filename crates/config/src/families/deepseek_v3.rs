//! `DeepSeek` V3: multi-head latent attention.
use crate::arch::{Arch, LatentSpec};
use crate::decoder_json::Defaults;
use crate::family::Family;
use crate::hf_json::Source;
use crate::latent_json::LatentDefaults;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "deepseek_v3",
    class_name: "DeepseekV3ForCausalLM",
    models: "Moonlight 16B, DeepSeek V3 and R1",
    features: "multi-head latent attention: queries, keys and values from latents, one part of keys turned for all heads",
    sparse: true,
    classifier: Some("DeepseekV3ForSequenceClassification"),
    gguf: None,
};

const LATENT: LatentDefaults = LatentDefaults {
    sizes: LatentSpec { query_rank: Some(1536), kv_rank: 512, nope_dim: 128, rope_dim: 64, value_dim: 128 },
    whole: false,
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let arch = source.latent_decoder(&FAMILY, &Defaults { context: 4096, ..Defaults::default() }, LATENT)?;
    let dense = source.size("first_k_dense_replace", Some(3))?;
    if dense < arch.num_hidden_layers {
        return Err(source.not_yet("experts: first_k_dense_replace below num_hidden_layers"));
    }
    Ok(arch)
}
