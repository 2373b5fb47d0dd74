//! OLMo Hybrid: three of four blocks have linear attention by the gated delta rule, the others OLMo 2's attention.
use crate::arch::{Arch, DeltaNetNames, DeltaNetSpec, NormPlacement, PartSpec, QkNorm};
use crate::decoder_json::Defaults;
use crate::family::Family;
use crate::hf_json::Source;
use crate::mixers_json::{MAX_KERNEL, MAX_ROWS};
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "olmo_hybrid",
    class_name: "OlmoHybridForCausalLM",
    models: "OLMo Hybrid 7B",
    features: "in three of four blocks linear attention by a gated delta rule whose states may change their sign; in \
               the others norms after attention and MLP, norms over the whole width of q and k, and mostly no \
               positions",
    sparse: false,
    classifier: None,
    gguf: None,
};

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let rotary = !source.has_null_base()?;
    let defaults = Defaults { context: 65_536, pad: Some(100_277), rotary, ..Defaults::default() };
    if !rotary && source.rope_kind()?.is_some_and(|kind| kind != "default") {
        return Err(source.not_yet("a rope_type other than \"default\" with rope_theta null"));
    }
    // How a new model's decays begin, of which its class wants sensible ranges.
    source.positive("linear_dt_min", 0.001)?;
    source.positive("linear_dt_max", 0.1)?;
    if source.number_or("linear_a_log_max", 16.0)? < source.number_or("linear_a_log_min", 0.0)? {
        return Err(source.mismatch("linear_a_log_max", "no less than linear_a_log_min"));
    }
    let bare;
    let rules = if rotary {
        source
    } else {
        bare = source.without("rope_parameters").without("rope_scaling").without("rope_theta");
        &bare
    };
    let mut arch = rules.decoder(&FAMILY, &defaults)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.qk_norm = QkNorm::Whole;
    let heads = arch.attentions().next().map_or(1, |attention| attention.num_heads);
    let key_heads = source.size_or("linear_num_key_heads", heads)?;
    let key = "linear_key_head_dim";
    let usual = 3 * arch.hidden_size / 4 / key_heads;
    let key_dim = if source.is_null(key) { usual } else { source.size_up_to(key, Some(usual), MAX_ROWS)? };
    if !(1..=MAX_ROWS).contains(&key_dim) {
        return Err(source.error(format!("{key} is {key_dim}, expected at most {MAX_ROWS}")));
    }
    let mixer = PartSpec::DeltaNet(source.checked_delta_net(
        arch.activation,
        DeltaNetSpec {
            names: DeltaNetNames::Olmo,
            key_heads,
            value_heads: source.size_or("linear_num_value_heads", heads)?,
            key_dim,
            value_dim: source.size_or("linear_value_head_dim", 2 * key_dim)?,
            kernel: source.size_up_to("linear_conv_kernel_dim", Some(4), MAX_KERNEL)?,
            beta_max: if source.flag("linear_allow_neg_eigval", true)? { 2.0 } else { 1.0 },
            // Its class does not take the key's.
            norm_eps: 1e-5,
        },
    )?);
    let kinds = source.layer_list("layer_types", &arch, |kind| match kind.as_str() {
        Some("linear_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    })?;
    let last = arch.num_hidden_layers - 1;
    for (layer, block) in arch.blocks.iter_mut().enumerate() {
        if kinds.as_ref().map_or(layer % 4 != 3 && (last >= 3 || layer < last), |kinds| kinds[layer]) {
            block.set_mixer(&mixer);
            for branch in &mut block.branches {
                branch.norm = Some(match branch.part {
                    PartSpec::DeltaNet(_) => "attention_layer_norm",
                    _ => "feedforward_layer_norm",
                });
            }
        } else {
            block.set_norms(NormPlacement::Post);
        }
    }
    Ok(arch)
}
