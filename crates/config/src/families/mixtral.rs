//! Mixtral: Mistral with experts in every block, two of them a token.
use crate::arch::{Arch, BlockSpec, ExpertNames, Experts};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "mixtral",
    class_name: "MixtralForCausalLM",
    models: "Mixtral 8x7B and 8x22B",
    features: "experts in every block, an optional sliding window",
    sparse: true,
    classifier: Some("MixtralForSequenceClassification"),
    gguf: Some(Gguf { pairs: true, ropes: &["llama3"], ..Gguf::named("llama") }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { kv_heads: Some(8), context: 4096 * 32, theta: 1e6, eps: 1e-5, ..Defaults::default() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    let window = source.window(None)?;
    let experts = source.experts(
        "num_local_experts",
        "intermediate_size",
        ExpertDefaults { count: 8, per_token: 2, width: 14_336 },
    )?;
    arch.experts = Some(Experts { names: ExpertNames::Mixtral, ..experts });
    arch.attentions_mut().for_each(|attention| attention.window = window);
    arch.blocks.iter_mut().for_each(BlockSpec::set_experts);
    Ok(arch)
}
