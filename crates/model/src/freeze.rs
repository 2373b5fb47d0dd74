//! `tuning.mode: freeze`: which tensors of the model are trained, by blocks, names and patterns.
use super::names::peft_name;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words;
use tunesmith_config::arch::{Arch, SCORE};
use tunesmith_config::{FreezeConfig, Pattern, nearest};

const EMBEDDING: &str = "model.embed_tokens.weight";

/// The names of the trained tensors, in model order.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: nothing is asked for, or an entry matches nothing.
pub fn trained_tensors(arch: &Arch, freeze: &FreezeConfig) -> Result<Vec<String>> {
    let layers = freeze.trainable_layers;
    if layers == 0 && freeze.trainable_modules.is_empty() && freeze.trainable_patterns.is_empty() {
        return Err(Error::config("tuning.mode: freeze, and tuning.freeze names nothing to train").hint(
            "set tuning.freeze.trainable_layers: 2 (the last two blocks), trainable_modules: [norms, head], or trainable_patterns",
        ));
    }
    let total = arch.num_hidden_layers;
    let count = usize::try_from(layers.unsigned_abs()).unwrap_or(usize::MAX);
    if count > total {
        return Err(Error::config(format!(
            "tuning.freeze.trainable_layers: {layers}, the model has {}",
            words::count(total, "block")
        ))
        .hint(format!("expected -{total} to {total}")));
    }
    let blocks = if layers > 0 { total - count..total } else { 0..count };
    let names: Vec<String> = arch.parameters().into_iter().map(|spec| spec.name).collect();
    let seconds: Vec<Option<String>> = names.iter().map(|name| second_name(arch, name)).collect();
    let block_of = |name: &str| -> Option<usize> {
        name.strip_prefix("model.layers.")
            .and_then(|rest| rest.split('.').next())
            .and_then(|number| number.parse().ok())
    };
    let in_blocks = |name: &str| layers == 0 || block_of(name).is_none_or(|block| blocks.contains(&block));
    let mut chosen = vec![false; names.len()];

    let mut narrows = false;
    for entry in &freeze.trainable_modules {
        let mut found = false;
        for ((name, second), chosen) in names.iter().zip(&seconds).zip(&mut chosen) {
            let known = arch.names(name);
            if known.iter().any(|name| matches(arch, name, entry))
                || second.as_ref().is_some_and(|second| matches(arch, second, entry))
            {
                found = true;
                narrows |= block_of(name).is_some();
                *chosen |= in_blocks(name);
            }
        }
        if !found {
            return Err(unknown(entry, &names));
        }
    }
    if layers != 0 && !narrows {
        for (name, chosen) in names.iter().zip(&mut chosen) {
            *chosen |= block_of(name).is_some_and(|block| blocks.contains(&block));
        }
    }
    for pattern in &freeze.trainable_patterns {
        let regex = Pattern::new("tuning.freeze.trainable_patterns", pattern, &format!("^(?:{pattern})"))?;
        let mut found = false;
        for ((name, second), chosen) in names.iter().zip(&seconds).zip(&mut chosen) {
            let known = arch.names(name).into_iter().chain(second.clone());
            let hit = known.into_iter().any(|name| regex.is_match(&name));
            found |= hit;
            *chosen |= hit;
        }
        if !found {
            return Err(Error::config(format!("tuning.freeze.trainable_patterns: {pattern:?} matches no tensor"))
                .hint(format!("a tensor's name is such as {}", names[names.len() / 2])));
        }
    }
    // A head of scores is new: without it nothing is learned.
    let chosen = chosen.into_iter().zip(&names).map(|(chosen, name)| chosen || name == SCORE).collect::<Vec<_>>();
    let names: Vec<String> =
        names.into_iter().zip(chosen).filter_map(|(name, chosen)| chosen.then_some(name)).collect();
    refuse_halves(arch, &names)?;
    Ok(names)
}

/// The name of a tensor in Transformers 5, where a checkpoint names it differently: an expert's part of a block's
/// stacked matrices, or the router of Mixtral or Granite 4.
fn second_name(arch: &Arch, name: &str) -> Option<String> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let experts = arch.experts_of(layer.parse().ok()?)?;
    let own = peft_name(&format!(".{rest}")).split_off(1);
    let inside = own.strip_prefix(experts.module()).and_then(|rest| rest.strip_prefix('.'));
    let Some((_, matrix)) = inside.and_then(|rest| rest.split_once('.')) else {
        return (own != rest).then(|| format!("model.layers.{layer}.{own}"));
    };
    let [before, down] = experts.parameters();
    let stacked = match matrix.strip_suffix(".bias") {
        Some("down_proj") => "down_proj_bias",
        Some(_) => "gate_up_proj_bias",
        None if experts.names(0).last().is_some_and(|last| last.ends_with(matrix)) => down,
        None => before,
    };
    Some(format!("model.layers.{layer}.{}.{stacked}", experts.module()))
}

/// Refuses to train only one of an expert's gate and up: they are one matrix here, as in Transformers 5.
fn refuse_halves(arch: &Arch, trained: &[String]) -> Result<()> {
    for layer in 0..arch.num_hidden_layers {
        let Some(experts) = arch.experts_of(layer).filter(|experts| experts.gated) else { continue };
        for expert in 0..experts.count {
            let names = experts.names(expert).into_iter().map(|name| format!("model.layers.{layer}.{name}"));
            let [gate, up]: [String; 2] = names.take(2).collect::<Vec<_>>().try_into().unwrap_or_default();
            let has = |name: &String| trained.contains(name);
            if has(&gate) != has(&up) {
                let (one, other) = if has(&gate) { (gate, up) } else { (up, gate) };
                return Err(Error::config(format!(
                    "tuning.freeze trains {one} and not {other}: an expert's gate and up are one matrix"
                ))
                .hint(format!("name both, as {}.gate_up_proj, or neither", experts.module())));
            }
        }
    }
    Ok(())
}

/// Whether an entry of `trainable_modules` names this tensor. It is one of the words `norms`, `embeddings` and `head`,
/// or consecutive dotted parts of the name.
fn matches(arch: &Arch, name: &str, entry: &str) -> bool {
    let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
    match entry {
        // Gemma 4 numbers some.
        "norms" if arch.layer_norms => module.rsplit('.').next().is_some_and(|own| own.starts_with("ln_")),
        "norms" => module.trim_end_matches(['1', '2', '_']).ends_with("norm") || name == arch.final_norm(),
        "embeddings" => name == EMBEDDING,
        // A model that shares its embedding with its head has one matrix for both.
        "head" | "lm_head" => name == arch.head_tensor(),
        _ => format!(".{name}.").contains(&format!(".{}.", entry.trim_matches('.'))),
    }
}

fn unknown(entry: &str, names: &[String]) -> Error {
    let error = Error::config(format!("tuning.freeze.trainable_modules: {entry:?} names nothing in the model"));
    let parts = names.iter().flat_map(|name| name.split('.')).filter(|part| part.parse::<usize>().is_err());
    match nearest(entry, parts.chain(["norms", "embeddings", "head"])) {
        Some(name) => error.hint(format!("did you mean {name}?")),
        None => error.hint("norms, embeddings, head, or a part of a tensor's name such as q_proj or self_attn"),
    }
}
