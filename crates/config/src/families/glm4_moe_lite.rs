//! GLM-4.7-Flash: `DeepSeek` V3 with a list of the blocks that have experts.
use crate::arch::{Arch, LatentSpec};
use crate::decoder_json::{DeepSeekDefaults, Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::latent_json::LatentDefaults;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "glm4_moe_lite",
    class_name: "Glm4MoeLiteForCausalLM",
    models: "GLM-4.7-Flash 30B-A3B",
    features: "multi-head latent attention; experts chosen by sigmoids and a bias with an MLP beside them, \
               a dense MLP in the first block",
    sparse: true,
    classifier: None,
    gguf: Some(Gguf {
        yarn_log: Some(0.1),
        router_keys: true,
        dense_first: true,
        bare: true,
        ..Gguf::named("deepseek2")
    }),
};

const LATENT: LatentDefaults = LatentDefaults {
    sizes: LatentSpec { query_rank: Some(768), kv_rank: 512, nope_dim: 192, rope_dim: 64, value_dim: 256 },
    whole: false,
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { kv_heads: Some(20), context: 202_752, eps: 1e-5, ..Defaults::default() };
    let mut arch = source.latent_decoder(&FAMILY, &defaults, LATENT)?;
    let sparse = source.layer_list("mlp_layer_types", &arch, |kind| match kind.as_str() {
        Some("sparse") => Some(true),
        Some("dense") => Some(false),
        _ => None,
    })?;
    // The class does not read `first_k_dense_replace`.
    let experts = ExpertDefaults { count: 64, per_token: 4, width: 1536 };
    let all = arch.num_hidden_layers;
    let defaults = DeepSeekDefaults { experts, scale: 1.8, groups: (1, 1), dense: all };
    source.without("first_k_dense_replace").deepseek_experts(&mut arch, defaults)?;
    for (layer, block) in arch.blocks.iter_mut().enumerate() {
        if sparse.as_ref().map_or(layer > 0, |sparse| sparse[layer]) {
            block.set_experts();
        }
    }
    Ok(arch)
}
