//! Gemma 3n, text: several residual streams of which a block computes one (`AltUp`), a low-rank branch beside attention (Laurel),
//! embeddings for each block, last blocks without their own keys and values, and first blocks whose MLPs keep few features.
use super::{gemma, gemma4};
use crate::arch::{AltUpSpec, Arch, NormPlacement, PartSpec, QkNorm};
use crate::decoder_json::Defaults;
use crate::family::{Family, Gguf};
use crate::hf_json::Source;
use crate::quantile::normal_quantile;
use serde_json::Value;
use tunesmith_base::error::Result;

pub(super) static FAMILY: Family = Family {
    model_type: "gemma3n_text",
    class_name: "Gemma3nForCausalLM",
    models: "the text part of Gemma 3n E2B and E4B",
    features: "GeGLU with sparse activations in the first blocks, four norms a block, norms on each head of q, k and \
               v, a sliding window in four of five blocks; four residual streams; a low-rank branch beside attention; \
               per-layer embeddings; last blocks that share keys and values",
    sparse: false,
    classifier: None,
    gguf: Some(Gguf {
        score_scale: Some(1.0),
        rooted_embedding: true,
        gelu: true,
        windows: &[|block| block % 5 != 4],
        bare: true,
        uneven: true,
        ..Gguf::named("gemma3n")
    }),
};

/// More streams than any model has.
const MOST_STREAMS: usize = 16;

pub(super) fn read(source: &Source<'_>) -> Result<Arch> {
    let defaults = Defaults { kv_heads: Some(2), context: 32_768, theta: 1e6, two_ropes: true, ..gemma::defaults() };
    let (widths, source) = widths(source)?;
    let source = &source;
    let mut arch = source.decoder(&FAMILY, &defaults)?;
    (arch.qkv_bias, arch.o_bias) = source.attention_bias()?;
    arch.embedding_scale = (arch.hidden_size as f64).sqrt();
    arch.set_norms(NormPlacement::Sandwich);
    arch.qk_norm = QkNorm::Head;
    arch.attention_scale = 1.0;
    arch.logit_softcap = Some(source.positive("final_logit_softcapping", 30.0)?);
    let window = source.window(Some(512))?;
    source.layer_windows(&mut arch, window, |layer| (layer + 1) % 5 != 0)?;
    // The window's blocks turn by a base of their own.
    arch.ropes.push(source.local_rope(&arch, 1e4)?);
    for attention in arch.attentions_mut() {
        attention.v_norm = true;
        attention.rope = Some(usize::from(attention.window.is_some()));
    }
    gemma4::shared_keys(source, &mut arch, 15)?;
    mlps(source, &mut arch, &widths)?;
    let width = source.size("hidden_size_per_layer_input", Some(256))?;
    let rows = source.size("vocab_size_per_layer_input", Some(262_144))?;
    gemma4::add_per_layer(source, &mut arch, rows, width)?;
    streams(source, &mut arch)?;
    Ok(arch)
}

/// The widths of the MLPs, if each block has its own; and the source with the first of them.
fn widths<'a>(source: &Source<'a>) -> Result<(Vec<usize>, Source<'a>)> {
    let key = "intermediate_size";
    let Some(Value::Array(list)) = source.get(key) else { return Ok((Vec::new(), source.clone())) };
    let mut widths = Vec::with_capacity(list.len());
    let mut one = source.clone();
    for width in list.iter().rev() {
        one.map.insert(key.into(), width.clone());
        widths.push(one.size(key, None)?);
    }
    widths.reverse();
    if widths.is_empty() {
        return Err(source.mismatch(key, "a number for each block, or one for all"));
    }
    Ok((widths, one))
}

/// The width of each MLP, and how much its gate keeps.
fn mlps(source: &Source<'_>, arch: &mut Arch, widths: &[usize]) -> Result<()> {
    let layers = arch.num_hidden_layers;
    if !widths.is_empty() && widths.len() != layers {
        let found = widths.len();
        return Err(source.error(format!("intermediate_size has {found} entries, num_hidden_layers is {layers}")));
    }
    let shares = source.layer_list("activation_sparsity_pattern", arch, Value::as_f64)?;
    let sparse = if layers > 10 { 10 } else { 0 };
    let shares = shares.unwrap_or_else(|| (0..layers).map(|layer| if layer < sparse { 0.95 } else { 0.0 }).collect());
    if shares.iter().any(|share| *share as f32 >= 1.0) {
        return Err(source.mismatch("activation_sparsity_pattern", "numbers below 1"));
    }
    for (layer, block) in arch.blocks.iter_mut().enumerate() {
        for branch in &mut block.branches {
            if let PartSpec::Mlp { intermediate_size, cut } = &mut branch.part {
                *intermediate_size = widths.get(layer).copied().unwrap_or(*intermediate_size);
                // Transformers has the share in float32.
                let share = f64::from(shares[layer] as f32);
                *cut = (share > 0.0).then(|| normal_quantile(share) as f32);
            }
        }
    }
    Ok(())
}

/// The residual streams, and the branch beside attention.
fn streams(source: &Source<'_>, arch: &mut Arch) -> Result<()> {
    let (streams, active) = (source.size("altup_num_inputs", Some(4))?, source.count("altup_active_idx", 0)?);
    if !(2..=MOST_STREAMS).contains(&streams) || active >= streams {
        return Err(source.error(format!(
            "altup_num_inputs is {streams} and altup_active_idx {active}, expected 2 to {MOST_STREAMS} streams and one of them"
        )));
    }
    // A limit of training alone.
    let coef_clip = source.positive("altup_coef_clip", 120.0)?;
    if !source.flag("altup_correct_scale", true)? {
        return Err(source.not_yet("altup_correct_scale false"));
    }
    let laurel_rank = source.size("laurel_rank", Some(64))?;
    arch.altup = Some(AltUpSpec { streams, active, laurel_rank, coef_clip });
    Ok(())
}
