//! MiniMax-M2: norms over the whole width of q and k, a part of each head rotated, experts chosen by sigmoids and a bias in every block.
use crate::arch::{Arch, BlockSpec, ExpertNames, Experts, QkNorm, RouterSpec};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "minimax_m2",
    class_name: "MiniMaxM2ForCausalLM",
    models: "MiniMax-M2, M2.1 and M2.5 229B",
    features: "norms over the whole width of q and k, a part of each head rotated, experts chosen by sigmoids and a bias",
    sparse: true,
    classifier: None,
    gguf: Some(Gguf { ropes: &["partial"], bare: true, untied: true, ..Gguf::named("minimax-m2") }),
};

const HEAD_DIM: usize = 128;

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let head_dim = source.size("head_dim", Some(HEAD_DIM))?;
    let rotary = source.size("rotary_dim", Some(head_dim))?;
    let defaults = Defaults {
        kv_heads: Some(8),
        head_dim: Some(HEAD_DIM),
        context: 196_608,
        theta: 5e6,
        partial_rotary: Some(rotary as f64 / head_dim as f64),
        ..Defaults::default()
    };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    source.refuse_window()?;
    arch.qk_norm = QkNorm::Whole;
    // Keys of the makers' own class, whose other values Transformers' does not compute.
    source.refuse_others("scoring_func", "sigmoid")?;
    source.refuse_others("qk_norm_type", "per_layer")?;
    for key in ["use_qk_norm", "use_routing_bias"] {
        if !source.flag(key, true)? {
            return Err(source.not_yet(format!("{key} false")));
        }
    }
    if source.count("shared_intermediate_size", 0)? != 0 {
        return Err(source.not_yet("shared_intermediate_size other than 0"));
    }
    // 1 is attention over all keys.
    source.layer_list("attn_type_list", &arch, |kind| (kind.as_u64() == Some(1)).then_some(()))?;
    arch.predicts_ahead = true;
    let defaults = ExpertDefaults { count: 256, per_token: 8, width: 1536 };
    let key = if source.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    arch.experts = Some(Experts {
        router: RouterSpec::SIGMOID,
        names: ExpertNames::MiniMax,
        ..source.experts(key, "intermediate_size", defaults)?
    });
    arch.blocks.iter_mut().for_each(BlockSpec::set_experts);
    Ok(arch)
}
