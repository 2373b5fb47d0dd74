//! `DeepSeek` V2: multi-head latent attention, and the experts with the largest probabilities.
use crate::arch::{Arch, BlockSpec, ExpertNames, Experts, LatentSpec, RouterSpec, SharedExpert};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::latent_json::LatentDefaults;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "deepseek_v2",
    class_name: "DeepseekV2ForCausalLM",
    models: "DeepSeek V2 and Coder V2, Lite 16B and 236B",
    features: "multi-head latent attention; experts with an MLP beside them, chosen from the best groups in the \
               larger models; dense MLPs in the first blocks",
    sparse: true,
    classifier: Some("DeepseekV2ForSequenceClassification"),
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
    // Its class has no key for the pairs of the rotary embedding, and computes the width of its heads.
    let source = &source.without("rope_interleave").without("head_dim");
    let mut arch = source.latent_decoder(&FAMILY, &Defaults { context: 2048, ..Defaults::default() }, LATENT)?;
    source.refuse_others("scoring_func", "softmax")?;
    if source.flag("mlp_bias", false)? {
        return Err(source.not_yet("mlp_bias in deepseek_v2"));
    }
    if source.size("moe_layer_freq", Some(1))? != 1 {
        return Err(source.not_yet("moe_layer_freq other than 1"));
    }
    // The class has no default for how many experts a token goes to.
    let defaults = ExpertDefaults { count: 64, per_token: 0, width: 1407 };
    let experts = source.experts("n_routed_experts", "moe_intermediate_size", defaults)?;
    source.refuse_balance(&experts)?;
    let groups = match source.text("topk_method")? {
        Some("group_limited_greedy") => source.expert_groups(&experts, [None, None], true)?,
        Some("greedy") => None,
        None if !source.is_null("topk_method") => None,
        other => {
            let found = other.map_or("null".into(), |word| format!("{word:?}"));
            let error = source.not_yet(format!("topk_method {found} in deepseek_v2"));
            return Err(error.hint("supported: \"greedy\", \"group_limited_greedy\""));
        }
    };
    let shared = source.size("n_shared_experts", Some(2))? * experts.width;
    arch.experts = Some(Experts {
        // Its class does not read `norm_topk_prob`.
        normalised: false,
        router: RouterSpec { groups, scale: source.positive("routed_scaling_factor", 1.0)?, ..RouterSpec::SOFTMAX },
        shared: Some(SharedExpert { width: shared, gated: false }),
        names: ExpertNames::DeepSeek,
        ..experts
    });
    let dense = source.count("first_k_dense_replace", 0)?;
    arch.blocks.iter_mut().skip(dense).for_each(BlockSpec::set_experts);
    Ok(arch)
}
