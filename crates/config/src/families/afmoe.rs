//! `AFMoE` (Trinity): a gate on the output of attention, and rotary positions only in blocks with a window. Experts are
//! chosen by sigmoids and a bias, with an MLP beside them. Both parts of a block have norms before and after.
use crate::arch::{Arch, BlockSpec, ExpertNames, Experts, GateSpec, PartSpec, QkNorm, RouterSpec, SharedExpert};
use crate::decoder_json::{Defaults, ExpertDefaults};
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "afmoe",
    class_name: "AfmoeForCausalLM",
    models: "Trinity Nano 6B and Trinity Mini 26B",
    features: "four norms a block, norms on each head of q and k, a gate on the output of attention; a sliding window \
               with rotary positions in three of four blocks, and no positions in the others; experts chosen by \
               sigmoids and a bias, with an MLP beside them; dense MLPs in the first blocks",
    sparse: true,
    classifier: None,
    gguf: Some(Gguf {
        windows: &[|block| block % 4 != 3],
        turns: |_, window| window,
        rooted_embedding: true,
        router_keys: true,
        dense_first: true,
        bare: true,
        ..Gguf::named("afmoe")
    }),
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { head_dim: Some(128), context: 16_384, eps: 1e-5, ..Defaults::default() };
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.qk_norm = QkNorm::Head;
    if source.flag("mup_enabled", false)? {
        arch.embedding_scale = (arch.hidden_size as f64).sqrt();
        arch.embedding_scaled_outside = true;
    }
    let (window, interval) = (source.window(Some(1024))?, source.size("global_attn_every_n_layers", Some(4))?);
    source.layer_windows(&mut arch, window, |layer| (layer + 1) % interval != 0)?;
    for attention in arch.attentions_mut() {
        attention.gate = GateSpec::Own;
        attention.rope = attention.window.map(|_| 0);
    }
    experts(source, &mut arch)?;
    for branch in arch.blocks.iter_mut().flat_map(|block| &mut block.branches) {
        (branch.norm, branch.post_norm) = match branch.part {
            PartSpec::Attention(_) => (Some("input_layernorm"), Some("post_attention_layernorm")),
            _ => (Some("pre_mlp_layernorm"), Some("post_mlp_layernorm")),
        };
    }
    Ok(arch)
}

fn experts(source: &Source<'_>, arch: &mut Arch) -> Result<()> {
    let defaults = ExpertDefaults { count: 64, per_token: 6, width: 1408 };
    let experts = source.experts("num_experts", "moe_intermediate_size", defaults)?;
    source.refuse_balance(&experts)?;
    // Keys of the makers' own class, whose other values Transformers' does not compute.
    source.refuse_others("score_func", "sigmoid")?;
    if !source.flag("route_norm", true)? {
        return Err(source.not_yet("route_norm false"));
    }
    if source.size("n_group", Some(1))? != 1 {
        return Err(source.not_yet("n_group other than 1"));
    }
    let shared = source.size("num_shared_experts", Some(2))? * experts.width;
    arch.experts = Some(Experts {
        router: RouterSpec { eps: 1e-20, scale: source.positive("route_scale", 1.0)?, ..RouterSpec::SIGMOID },
        shared: Some(SharedExpert { width: shared, gated: false }),
        names: ExpertNames::Afmoe,
        ..experts
    });
    let dense = source.count("num_dense_layers", 1)?;
    arch.blocks.iter_mut().skip(dense).for_each(BlockSpec::set_experts);
    Ok(())
}
