//! LLaMA-Factory's configurations, as of version 0.9.5.
mod rows;
mod table;

use super::work::{Work, is_off};
use super::{names, ranks};
pub(crate) use table::RULES;
use table::listed;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Node;

/// Imports a whole configuration.
pub(super) fn read(work: &mut Work) -> Result<()> {
    let pretrains = match work.word("stage").as_deref() {
        Some("sft") | None => false,
        Some("pt") => true,
        Some(other) => {
            return Err(Error::config(format!(
                "{}: stage: {other:?}: this is no supervised fine-tuning",
                work.path.display()
            ))
            .hint("stages sft and pt can be imported; preference data would be learned as if all of it were right"));
        }
    };
    if work.get(&["model_name_or_path"]).is_none() {
        let error = Error::config(format!("{}: model_name_or_path is not set", work.path.display()));
        return Err(if work.get(&["train_dataset", "dist_config"]).is_some() {
            error.hint("this is the form of its new trainer (v1), which is not read")
        } else {
            error.hint("is it a configuration of LLaMA-Factory's training?")
        });
    }
    if work.get(&["do_train", "dataset", "stage"]).is_none() {
        return Err(Error::config(format!(
            "{}: no do_train, stage or dataset: this trains nothing",
            work.path.display()
        ))
        .hint("evaluation, prediction and export are not configured so"));
    }
    if let Some((key, Node::Bool(false))) = work.get(&["do_train"]) {
        return Err(Error::config(format!("{}: {key}: false: there is nothing to train", work.path.display()))
            .hint("`tunesmith eval`, `infer`, `merge` and `export` do the rest"));
    }
    if work.get(&["do_train"]).is_some() {
        work.not_needed("do_train", "`tunesmith train` trains");
    }
    work.apply_rules()?;
    mode(work);
    rows::sets(work, pretrains);
    objective(work, pretrains);
    let splits = names::validation(work, "val_size");
    let validates = splits || work.written("data.val_path").is_some();
    names::schedule(work, "linear");
    names::moments(work, "no", "steps", validates);
    defaults(work);
    answers(work);
    ranks::fsdp(work, false);
    Ok(())
}

/// The training mode (`finetuning_type`).
fn mode(work: &mut Work) {
    let bits = match work.get(&["quantization_bit"]) {
        Some((_, Node::Int(bits))) => bits,
        _ => 0,
    };
    let kind = work.word("finetuning_type").unwrap_or_else(|| "lora".to_owned());
    let why = if bits == 4 && kind == "lora" { "with quantization_bit: 4" } else { "" };
    let ours = if why.is_empty() { kind.as_str() } else { "qlora" };
    if work.get(&["finetuning_type"]).is_some() {
        work.put("finetuning_type", "tuning.mode", Node::Str(ours.into()), why);
    } else {
        work.default("tuning.mode", Node::Str(ours.into()), "its default");
    }
    match (bits, ours) {
        (4, "qlora") => work.not_needed("quantization_bit", "mode: qlora says so"),
        (4, "oft") => work.put("quantization_bit", "model.quantization", Node::Str("nf4".into()), ""),
        (8, _) => work.put("quantization_bit", "model.quantization", Node::Str("int8".into()), ""),
        (0, _) => {}
        _ => work.put("quantization_bit", "model.quantization", Node::Int(bits), ""),
    }
    for key in ["quantization_method", "quantization_type", "double_quantization"] {
        match (work.get(&[key]), key) {
            (None, _) => {}
            (Some(_), _) if bits == 0 => work.not_needed(key, "the base is not quantized"),
            (Some(_), "quantization_method") => work.not_needed(key, "weights are coded as bitsandbytes does it"),
            (Some(_), _) if bits != 4 => work.not_needed(key, "it belongs to 4 bits"),
            (Some((_, node)), "quantization_type") => work.put(key, "model.quantization", node, ""),
            (Some((_, node)), _) => work.put(key, "model.double_quant", node, ""),
        }
    }
    match kind.as_str() {
        "lora" => lora(work),
        "oft" => adapter(work, "oft"),
        "freeze" => freeze(work),
        _ => {}
    }
}

/// Target modules, modules that are trained in full, and existing adapters.
fn adapter(work: &mut Work, kind: &str) {
    let to = format!("tuning.{kind}.target_modules");
    match work.get(&[format!("{kind}_target").as_str()]) {
        Some((key, Node::Str(all))) if all == "all" => work.put(&key, &to, Node::Str("auto".into()), ""),
        Some((key, node)) => work.put(&key, &to, listed(&node), ""),
        None => work.default(&to, Node::Str("auto".into()), "its default"),
    }
    if let Some((key, node)) = work.get(&["additional_target"]) {
        work.put(&key, &format!("tuning.{kind}.modules_to_save"), listed(&node), "");
    }
    existing(work);
}

fn lora(work: &mut Work) {
    adapter(work, "lora");
    let rank = if let Some(Node::Int(rank)) = work.written("tuning.lora.r") {
        *rank
    } else {
        work.default("tuning.lora.r", Node::Int(8), "its default");
        8
    };
    if work.written("tuning.lora.lora_alpha").is_none() {
        work.default("tuning.lora.lora_alpha", Node::Int(2 * rank), "twice the rank");
    }
    if work.is_on("pissa_init") {
        let start = match work.get(&["pissa_iter"]) {
            Some((_, Node::Int(-1))) => "pissa".to_owned(),
            Some((_, Node::Int(rounds))) => format!("pissa_niter_{rounds}"),
            _ => "pissa_niter_16".to_owned(),
        };
        work.put("pissa_init", "tuning.lora.init_lora_weights", Node::Str(start), "");
        if work.get(&["pissa_iter"]).is_some() {
            work.not_needed("pissa_iter", "in init_lora_weights");
        }
    }
}

fn existing(work: &mut Work) {
    if let Some((key, node)) = work.get(&["adapter_name_or_path"]) {
        let mut folders = match listed(&node) {
            Node::List(items) => items,
            other => vec![other],
        };
        let fresh = work.is_on("create_new_adapter");
        let last = if fresh { None } else { folders.pop() };
        if !folders.is_empty() {
            work.put(&key, "tuning.adapters", Node::List(folders), "");
        }
        if let Some(last) = last {
            work.put(&key, "tuning.adapter", last, "");
        }
    }
    if work.get(&["create_new_adapter"]).is_some() {
        work.not_needed("create_new_adapter", "tuning.adapters lie below a new one, tuning.adapter is gone on with");
    }
}

fn freeze(work: &mut Work) {
    match work.get(&["freeze_trainable_layers"]) {
        Some((key, node)) => work.put(&key, "tuning.freeze.trainable_layers", node, ""),
        None => work.default("tuning.freeze.trainable_layers", Node::Int(2), "its default"),
    }
    match work.get(&["freeze_trainable_modules"]) {
        Some((key, Node::Str(all))) if all == "all" => work.not_needed(&key, "the whole blocks"),
        Some((key, node)) => work.put(&key, "tuning.freeze.trainable_modules", listed(&node), ""),
        None => {}
    }
    if let Some((key, node)) = work.get(&["freeze_extra_modules"]) {
        let Node::List(names) = listed(&node) else { return work.unsupported(&key, "expected names") };
        let pattern = |name: Node| match name {
            Node::Str(name) => Node::Str(format!(r"(.*\.)?{}(\..*)?", name.replace('.', r"\."))),
            other => other,
        };
        let patterns = names.into_iter().map(pattern).collect();
        work.put(&key, "tuning.freeze.trainable_patterns", Node::List(patterns), "a pattern for each name");
    }
}

/// Which tokens carry the loss, and packing.
fn objective(work: &mut Work, pretrains: bool) {
    if work.get(&["stage"]).is_some() {
        if pretrains {
            work.changed("stage", "data.loss_on: all", "raw text, every token is learned");
        } else {
            work.not_needed("stage", "that is what is done");
        }
    }
    if pretrains {
        work.default("data.loss_on", Node::Str("all".into()), "stage: pt");
        work.default("data.truncation", Node::Str("split".into()), "stage: pt lets long texts fill several blocks");
    }
    let learned = [("train_on_prompt", "all"), ("mask_history", "completion")];
    for (key, word) in learned {
        match work.get(&[key]) {
            Some((_, Node::Bool(true))) => work.put(key, "data.loss_on", Node::Str(word.into()), ""),
            Some(_) => work.not_needed(key, "off"),
            None => {}
        }
    }
    match (work.is_on("neat_packing"), work.get(&["packing"])) {
        (true, packing) => {
            work.put("neat_packing", "data.packing", Node::Bool(true), "");
            if packing.is_some() {
                work.not_needed("packing", "neat_packing packs");
            }
        }
        (false, Some((key, Node::Bool(true)))) => {
            work.put(&key, "data.packing", Node::Bool(true), "attention never crosses from row to row here");
        }
        (false, Some((key, node))) => work.put(&key, "data.packing", node, ""),
        (false, None) if pretrains => work.default("data.packing", Node::Bool(true), "stage: pt packs"),
        (false, None) => {}
    }
    if let Some((key, Node::Bool(false))) = work.get(&["neat_packing"]) {
        work.not_needed(&key, "off");
    }
}

/// Defaults of LLaMA-Factory that differ from ours.
fn defaults(work: &mut Work) {
    if work.written("train.learning_rate").is_none() {
        work.default("train.learning_rate", Node::Float(5e-5), "its default");
    }
    let checkpointing = ["gradient_checkpointing", "disable_gradient_checkpointing"];
    if work.get(&checkpointing).is_none() {
        work.default(
            "train.gradient_checkpointing",
            Node::Bool(true),
            "its default; off is faster and takes more memory",
        );
    }
    if work.get(&["save_total_limit"]).is_none() {
        work.default("train.save_total_limit", Node::Null, "every checkpoint is kept");
    }
}

/// Generation settings. Where answers to validation rows are generated, LLaMA-Factory's defaults differ from ours.
fn answers(work: &mut Work) {
    let predicts = work.written("train.predict_with_generate").is_some_and(|node| *node == Node::Bool(true));
    let settings = [
        ("max_new_tokens", "gen.max_new_tokens", Some(Node::Int(1024))),
        ("do_sample", "gen.do_sample", Some(Node::Bool(true))),
        ("temperature", "gen.temperature", Some(Node::Float(0.95))),
        ("top_p", "gen.top_p", Some(Node::Float(0.7))),
        ("top_k", "gen.top_k", None),
        ("num_beams", "gen.num_beams", None),
        ("repetition_penalty", "gen.repetition_penalty", None),
        ("length_penalty", "gen.length_penalty", None),
    ];
    let draws = match work.get(&["do_sample"]) {
        Some((_, node)) => !is_off(&node),
        None => predicts,
    };
    for (key, ours, default) in settings {
        let drawing = ["gen.temperature", "gen.top_p", "gen.top_k"].contains(&ours);
        match (work.get(&[key]), default) {
            (Some(_), _) if drawing && !draws => work.not_needed(key, "answers are greedy"),
            (Some((_, node)), _) => work.put(key, ours, node, ""),
            (None, Some(default)) if predicts && (draws || !drawing) => work.default(ours, default, "its default"),
            (None, _) => {}
        }
    }
}
