//! What a run trains, counted and told: every value, chosen tensors, or adapters and what stands beside them.
use std::collections::BTreeSet;

use super::prepare::Prepared;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words;
use tunesmith_config::arch::{Arch, EMBEDDING, LM_HEAD};
use tunesmith_config::{Config, Mode};
use tunesmith_model::targets::{self, Placement, Targets};
use tunesmith_model::{freeze, quantize};
use tunesmith_optim::{Schedule, rates};
use tunesmith_plan::grouped;

/// How many values the whole model has.
pub fn values(arch: &Arch) -> u64 {
    arch.tensors().iter().map(|spec| size(&spec.shape)).sum()
}

/// Values of a tensor.
pub fn size(shape: &[usize]) -> u64 {
    shape.iter().map(|&size| size as u64).product()
}

/// What is trained: names and shapes.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: what is to be trained does not exist.
pub fn tensors(config: &Config, arch: &Arch, placements: &[Placement]) -> Result<Vec<(String, Vec<usize>)>> {
    let tensors = arch.tensors().into_iter().map(|spec| (spec.name, spec.shape));
    match config.tuning.mode {
        Mode::Full => Ok(tensors.collect()),
        Mode::Freeze => {
            let trained: BTreeSet<String> = freeze::trained_tensors(arch, &config.tuning.freeze)?.into_iter().collect();
            let vocabulary = tensors.clone().find(|(name, _)| targets::is_vocabulary(name) && !trained.contains(name));
            if let Some((name, _)) = vocabulary.filter(|_| !arch.new_tokens.is_empty()) {
                return Err(Error::config(format!(
                    "tuning.new_tokens with mode: freeze, which does not train {name}, where their rows are"
                ))
                .hint("add embeddings and head to tuning.freeze.trainable_modules"));
            }
            Ok(tensors.filter(|(name, _)| trained.contains(name)).collect())
        }
        _ => Targets::of(&config.tuning).tensors(arch, placements),
    }
}

/// What a user should know of an adapter that PEFT cannot run.
pub fn beyond_peft(arch: &Arch, tensors: &[(String, Vec<usize>)]) -> Option<&'static str> {
    let has = |wanted: &str| tensors.iter().any(|(name, _)| name == wanted);
    (arch.separated && has(LM_HEAD) && has(&targets::token_rows(EMBEDDING))).then_some(
        "PEFT 0.21 cannot run this adapter: rows of embed_tokens and the whole lm_head, where the model shares one matrix between \
         them; add embed_tokens to modules_to_save, or use the adapter here and after `tunesmith merge`",
    )
}

/// Refuses arguments of the schedule and the learning rates that fit nothing.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], naming the key.
pub fn check_rates(config: &Config, tensors: &[(String, Vec<usize>)]) -> Result<()> {
    Schedule::of(&config.train, 0, u64::MAX)?;
    rates::scales(&config.train, config.tuning.lora.loraplus_lr_ratio, tensors).map(drop)
}

/// What is trained: how many values of how many tensors, and the share of the model; the tensors by name where
/// `tuning.freeze` has chosen them.
pub fn facts(prepared: &Prepared) -> Vec<(String, String)> {
    let all = values(&prepared.arch);
    let share = 100.0 * prepared.trainable as f64 / all.max(1) as f64;
    let counted = format!("{} values, {share:.3} % of the model's {}", grouped(prepared.trainable), grouped(all));
    let mut facts = vec![("trained".to_owned(), counted)];
    if prepared.config.tuning.mode == Mode::Freeze
        && let Ok(names) = freeze::trained_tensors(&prepared.arch, &prepared.config.tuning.freeze)
    {
        facts.push((format!("its {}", words::count(names.len(), "tensor")), by_block(&names)));
    }
    if let Ok(Some(how)) = quantize::resolve(&prepared.config, prepared.weights.as_ref()) {
        let skip = &prepared.config.model.quantization_skip_modules;
        let count = quantize::matrices(&prepared.arch, skip).map_or(0, |matrices| matrices.len());
        facts.push(("base".to_owned(), format!("{}: {}", how.describe(), words::count(count, "matrix"))));
    }
    if !prepared.config.tuning.adapters.is_empty() {
        let below: Vec<_> = prepared.config.tuning.adapters.iter().map(|dir| dir.display().to_string()).collect();
        facts.push(("on top of".to_owned(), below.join(", ")));
    }
    if !prepared.arch.token_rows.is_empty() {
        facts.push(("trained tokens".to_owned(), format!("ids {:?}", prepared.arch.token_rows.ids())));
    }
    facts
}

/// Tensor names with the blocks in which each is found: `model.layers.{2,3}.mlp.up_proj.weight`.
fn by_block(names: &[String]) -> String {
    let mut kinds: Vec<(String, String, Vec<&str>)> = Vec::new();
    for name in names {
        let parts = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let (before, block, after) =
            parts.map_or((name.as_str(), None, ""), |(block, rest)| ("model.layers", Some(block), rest));
        match kinds.iter_mut().find(|(kind, rest, _)| kind == before && rest == after) {
            Some((_, _, blocks)) => blocks.extend(block),
            None => kinds.push((before.to_owned(), after.to_owned(), block.into_iter().collect())),
        }
    }
    let show = |(before, after, blocks): &(String, String, Vec<&str>)| match blocks.as_slice() {
        [] => before.clone(),
        [one] => format!("{before}.{one}.{after}"),
        many => format!("{before}.{{{}}}.{after}", many.join(",")),
    };
    kinds.iter().map(show).collect::<Vec<_>>().join(" ")
}
