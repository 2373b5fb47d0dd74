//! LFM2 with experts: LFM2's blocks, with experts chosen by sigmoids and a bias behind the first ones.
use super::lfm2::{defaults, mixers};
use crate::arch::{Arch, BlockSpec, ExpertNames, Experts, RouterSpec};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "lfm2_moe",
    class_name: "Lfm2MoeForCausalLM",
    models: "LFM2 8B-A1B and 24B-A2B, LFM2.5",
    features: "short convolutions between gates in most blocks, attention with norms on each head of q and k in the others, experts \
               chosen by sigmoids and a bias, dense MLPs in the first blocks",
    sparse: true,
    classifier: None,
    gguf: Some(Gguf { bare: true, dense_first: true, final_norm: "token_embd_norm", ..Gguf::named("lfm2moe") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch = source.decoder(&FAMILY, &Defaults { intermediate: Some(7168), ..defaults() })?;
    if source.get("layer_types").is_none() {
        return Err(source.mismatch("layer_types", "a list"));
    }
    mixers(source, &mut arch)?;
    let defaults = ExpertDefaults { count: 32, per_token: 4, width: 1792 };
    let experts = source.experts("num_experts", "moe_intermediate_size", defaults)?;
    source.refuse_balance(&experts)?;
    arch.experts = Some(Experts {
        normalised: source.flag("norm_topk_prob", true)?,
        router: RouterSpec {
            choice_bias: source.flag("use_expert_bias", true)?,
            eps: 1e-6,
            scale: source.positive("routed_scaling_factor", 1.0)?,
            ..RouterSpec::SIGMOID
        },
        names: ExpertNames::Lfm2,
        ..experts
    });
    let dense = source.count("num_dense_layers", 2)?;
    arch.blocks.iter_mut().skip(dense).for_each(BlockSpec::set_experts);
    Ok(arch)
}
