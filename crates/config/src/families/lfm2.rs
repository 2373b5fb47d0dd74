//! LFM2: most blocks have a convolution over three tokens, between two gates, in place of attention.
use crate::arch::{Arch, ModuleNames, PartSpec, QkNorm, ShortConvSpec};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::mixers_json::MAX_KERNEL;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "lfm2",
    class_name: "Lfm2ForCausalLM",
    models: "LFM2 350M, 700M, 1.2B and 2.6B, LFM2.5",
    features: "short convolutions between gates in most blocks, attention with norms on each head of q and k in the others",
    sparse: false,
    classifier: None,
    gguf: Some(Gguf { bare: true, final_norm: "token_embd_norm", ..Gguf::named("lfm2") }),
};

pub(super) fn defaults() -> Defaults {
    Defaults {
        kv_heads: Some(8),
        context: 128_000,
        theta: 1e6,
        // What its class has; `mlp_width` reads the key of the first files too.
        intermediate: Some(12_288),
        eps: 1e-5,
        eps_key: "norm_eps",
        // Its class has no key for it.
        activation_key: "",
        tied: true,
        pad: Some(0),
        ..Defaults::default()
    }
}

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let mut arch = source.decoder(&FAMILY, &defaults())?;
    let width = mlp_width(source)?;
    arch.intermediate_size = width;
    for branch in arch.blocks.iter_mut().flat_map(|block| &mut block.branches) {
        if let PartSpec::Mlp { intermediate_size, .. } = &mut branch.part {
            *intermediate_size = width;
        }
    }
    mixers(source, &mut arch)?;
    Ok(arch)
}

/// The convolutions and what attention has, and the names of all.
pub(super) fn mixers(source: &Source<'_>, arch: &mut Arch) -> Result<()> {
    if source.is_null("tie_embedding") {
        return Err(source.mismatch("tie_embedding", "true or false"));
    }
    arch.tie_word_embeddings = source.flag("tie_embedding", arch.tie_word_embeddings)?;
    arch.module_names = &ModuleNames::LFM2;
    arch.qk_norm = QkNorm::Head;
    let kernel = source.size_up_to("conv_L_cache", Some(3), MAX_KERNEL)?;
    let mixer = PartSpec::ShortConv(ShortConvSpec { kernel, bias: source.flag("conv_bias", false)? });
    let kinds = source.layer_list("layer_types", arch, |kind| match kind.as_str() {
        Some("conv") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    })?;
    let attends = match source.get("full_attn_idxs") {
        Some(_) => source.indexes("full_attn_idxs", &[])?,
        None => (0..arch.num_hidden_layers).collect(),
    };
    for (layer, block) in arch.blocks.iter_mut().enumerate() {
        if kinds.as_ref().map_or_else(|| !attends.contains(&layer), |kinds| kinds[layer]) {
            block.set_mixer(&mixer);
        }
        for branch in &mut block.branches {
            branch.norm = Some(match branch.part {
                PartSpec::Mlp { .. } => "ffn_norm",
                _ => "operator_norm",
            });
        }
    }
    Ok(())
}

/// The width of the MLPs, which the file gives before it is cut to two thirds and rounded up.
fn mlp_width(source: &Source<'_>) -> Result<usize> {
    let key = if source.has("block_ff_dim") { "block_ff_dim" } else { "intermediate_size" };
    let width = source.size(key, Some(12_288))?;
    if !source.flag("block_auto_adjust_ff_dim", true)? {
        return Ok(width);
    }
    let multiple = source.size("block_multiple_of", Some(256))?;
    let factor = match source.get("block_ffn_dim_multiplier") {
        None if source.has("block_ffn_dim_multiplier") => None,
        _ => Some(source.positive("block_ffn_dim_multiplier", 1.0)?),
    };
    // As the class does it: without a factor the width is not rounded.
    let width = 2 * width / 3;
    let width = factor.map_or(width, |factor| ((factor * width as f64) as usize).div_ceil(multiple) * multiple);
    if (1..=crate::hf_json::MAX_SIZE).contains(&width) {
        Ok(width)
    } else {
        Err(source.error(format!("{key} gives MLPs of width {width}, expected at most {}", crate::hf_json::MAX_SIZE)))
    }
}

#[cfg(test)]
mod tests {
    use crate::arch::Arch;
    use serde_json::json;
    use std::path::Path;

    #[test]
    fn the_width_of_mlps_is_read_from_the_first_files_too() {
        let width = |keys: serde_json::Value| {
            let mut config = json!({"model_type": "lfm2", "vocab_size": 97, "hidden_size": 56, "num_attention_heads": 4,
                "num_key_value_heads": 2, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]});
            let fields = config.as_object_mut().expect("an object");
            fields.extend(keys.as_object().expect("an object").clone());
            Arch::from_json(&config.to_string(), Path::new("config.json")).unwrap().intermediate_size
        };
        assert_eq!(width(json!({"block_ff_dim": 70, "block_auto_adjust_ff_dim": false})), 70);
        assert_eq!(width(json!({"block_ff_dim": 70, "intermediate_size": 90, "block_auto_adjust_ff_dim": false})), 70);
        assert_eq!(width(json!({"intermediate_size": 90, "block_auto_adjust_ff_dim": false})), 90);
        // The default of the class, two thirds of it.
        assert_eq!(width(json!({})), 8192);
    }
}
