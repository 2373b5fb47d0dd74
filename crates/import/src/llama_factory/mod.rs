//! LLaMA-Factory's configurations, as of version 0.9.5.
mod rows;
mod table;

use super::import::{Import, is_off_or_zero};
use super::{names, ranks};
pub(crate) use table::RULES;
use table::listed;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Node;

pub(super) fn read(import: &mut Import) -> Result<()> {
    let pretrains = match import.word("stage").as_deref() {
        Some("sft") | None => false,
        Some("pt") => true,
        Some(other) => {
            return Err(Error::config(format!(
                "{}: stage: {other:?}: this is no supervised fine-tuning",
                import.path.display()
            ))
            .hint("stages sft and pt can be imported; preference data would be learned as if all of it were right"));
        }
    };
    if import.get(&["model_name_or_path"]).is_none() {
        let error = Error::config(format!("{}: model_name_or_path is not set", import.path.display()));
        return Err(if import.get(&["train_dataset", "dist_config"]).is_some() {
            error.hint("this is the form of its new trainer (v1), which is not read")
        } else {
            error.hint("is it a configuration of LLaMA-Factory's training?")
        });
    }
    if import.get(&["do_train", "dataset", "stage"]).is_none() {
        return Err(Error::config(format!(
            "{}: no do_train, stage or dataset: this trains nothing",
            import.path.display()
        ))
        .hint("evaluation, prediction and export are not configured so"));
    }
    if let Some((key, Node::Bool(false))) = import.get(&["do_train"]) {
        return Err(Error::config(format!("{}: {key}: false: there is nothing to train", import.path.display()))
            .hint("`tunesmith eval`, `infer`, `merge` and `export` do the rest"));
    }
    if import.get(&["do_train"]).is_some() {
        import.not_needed("do_train", "`tunesmith train` trains");
    }
    import.apply_rules()?;
    mode(import);
    rows::sets(import, pretrains);
    objective(import, pretrains);
    let splits = names::validation(import, "val_size");
    let validates = splits || import.written("data.val_path").is_some();
    names::schedule(import, "linear");
    names::moments(import, "no", "steps", validates);
    defaults(import);
    answers(import);
    ranks::fsdp(import, false);
    Ok(())
}

fn mode(import: &mut Import) {
    let bits = match import.get(&["quantization_bit"]) {
        Some((_, Node::Int(bits))) => bits,
        _ => 0,
    };
    let kind = import.word("finetuning_type").unwrap_or_else(|| "lora".to_owned());
    let why = if bits == 4 && kind == "lora" { "with quantization_bit: 4" } else { "" };
    let ours = if why.is_empty() { kind.as_str() } else { "qlora" };
    if import.get(&["finetuning_type"]).is_some() {
        import.put("finetuning_type", "tuning.mode", Node::Str(ours.into()), why);
    } else {
        import.default("tuning.mode", Node::Str(ours.into()), "its default");
    }
    match (bits, ours) {
        (4, "qlora") => import.not_needed("quantization_bit", "mode: qlora implies it"),
        (4, "oft") => import.put("quantization_bit", "model.quantization", Node::Str("nf4".into()), ""),
        (8, _) => import.put("quantization_bit", "model.quantization", Node::Str("int8".into()), ""),
        (0, _) => {}
        _ => import.put("quantization_bit", "model.quantization", Node::Int(bits), ""),
    }
    for key in ["quantization_method", "quantization_type", "double_quantization"] {
        match (import.get(&[key]), key) {
            (None, _) => {}
            (Some(_), _) if bits == 0 => import.not_needed(key, "the base is not quantized"),
            (Some(_), "quantization_method") => import.not_needed(key, "weights are quantized as in bitsandbytes"),
            (Some(_), _) if bits != 4 => import.not_needed(key, "it belongs to 4 bits"),
            (Some((_, node)), "quantization_type") => import.put(key, "model.quantization", node, ""),
            (Some((_, node)), _) => import.put(key, "model.double_quant", node, ""),
        }
    }
    match kind.as_str() {
        "lora" => lora(import),
        "oft" => adapter(import, "oft"),
        "freeze" => freeze(import),
        _ => {}
    }
}

/// Target modules, modules that are trained in full, and existing adapters.
fn adapter(import: &mut Import, kind: &str) {
    let to = format!("tuning.{kind}.target_modules");
    match import.get(&[format!("{kind}_target").as_str()]) {
        Some((key, Node::Str(all))) if all == "all" => import.put(&key, &to, Node::Str("auto".into()), ""),
        Some((key, node)) => import.put(&key, &to, listed(&node), ""),
        None => import.default(&to, Node::Str("auto".into()), "its default"),
    }
    if let Some((key, node)) = import.get(&["additional_target"]) {
        import.put(&key, &format!("tuning.{kind}.modules_to_save"), listed(&node), "");
    }
    existing(import);
}

fn lora(import: &mut Import) {
    adapter(import, "lora");
    let rank = if let Some(Node::Int(rank)) = import.written("tuning.lora.r") {
        *rank
    } else {
        import.default("tuning.lora.r", Node::Int(8), "its default");
        8
    };
    if import.written("tuning.lora.lora_alpha").is_none() {
        import.default("tuning.lora.lora_alpha", Node::Int(2 * rank), "twice the rank");
    }
    if import.is_on("pissa_init") {
        let start = match import.get(&["pissa_iter"]) {
            Some((_, Node::Int(-1))) => "pissa".to_owned(),
            Some((_, Node::Int(rounds))) => format!("pissa_niter_{rounds}"),
            _ => "pissa_niter_16".to_owned(),
        };
        import.put("pissa_init", "tuning.lora.init_lora_weights", Node::Str(start), "");
        if import.get(&["pissa_iter"]).is_some() {
            import.not_needed("pissa_iter", "in init_lora_weights");
        }
    }
}

fn existing(import: &mut Import) {
    if let Some((key, node)) = import.get(&["adapter_name_or_path"]) {
        let mut folders = match listed(&node) {
            Node::List(items) => items,
            other => vec![other],
        };
        let fresh = import.is_on("create_new_adapter");
        let last = if fresh { None } else { folders.pop() };
        if !folders.is_empty() {
            import.put(&key, "tuning.adapters", Node::List(folders), "");
        }
        if let Some(last) = last {
            import.put(&key, "tuning.adapter", last, "");
        }
    }
    if import.get(&["create_new_adapter"]).is_some() {
        import.not_needed(
            "create_new_adapter",
            "tuning.adapters lie below a new one, tuning.adapter continues an adapter",
        );
    }
}

fn freeze(import: &mut Import) {
    match import.get(&["freeze_trainable_layers"]) {
        Some((key, node)) => import.put(&key, "tuning.freeze.trainable_layers", node, ""),
        None => import.default("tuning.freeze.trainable_layers", Node::Int(2), "its default"),
    }
    match import.get(&["freeze_trainable_modules"]) {
        Some((key, Node::Str(all))) if all == "all" => import.not_needed(&key, "the whole blocks"),
        Some((key, node)) => import.put(&key, "tuning.freeze.trainable_modules", listed(&node), ""),
        None => {}
    }
    if let Some((key, node)) = import.get(&["freeze_extra_modules"]) {
        let Node::List(names) = listed(&node) else { return import.unsupported(&key, "expected names") };
        let pattern = |name: Node| match name {
            Node::Str(name) => Node::Str(format!(r"(.*\.)?{}(\..*)?", name.replace('.', r"\."))),
            other => other,
        };
        let patterns = names.into_iter().map(pattern).collect();
        import.put(&key, "tuning.freeze.trainable_patterns", Node::List(patterns), "a pattern for each name");
    }
}

/// Which tokens carry the loss, and packing.
fn objective(import: &mut Import, pretrains: bool) {
    if import.get(&["stage"]).is_some() {
        if pretrains {
            import.changed("stage", "data.loss_on: all", "raw text, every token is learned");
        } else {
            import.not_needed("stage", "this is what tunesmith does");
        }
    }
    if pretrains {
        import.default("data.loss_on", Node::Str("all".into()), "stage: pt");
        import.default("data.truncation", Node::Str("split".into()), "stage: pt lets long texts fill several blocks");
    }
    let learned = [("train_on_prompt", "all"), ("mask_history", "completion")];
    for (key, word) in learned {
        match import.get(&[key]) {
            Some((_, Node::Bool(true))) => import.put(key, "data.loss_on", Node::Str(word.into()), ""),
            Some(_) => import.not_needed(key, "off"),
            None => {}
        }
    }
    match (import.is_on("neat_packing"), import.get(&["packing"])) {
        (true, packing) => {
            import.put("neat_packing", "data.packing", Node::Bool(true), "");
            if packing.is_some() {
                import.not_needed("packing", "neat_packing packs");
            }
        }
        (false, Some((key, Node::Bool(true)))) => {
            import.put(&key, "data.packing", Node::Bool(true), "attention never crosses from row to row here");
        }
        (false, Some((key, node))) => import.put(&key, "data.packing", node, ""),
        (false, None) if pretrains => import.default("data.packing", Node::Bool(true), "stage: pt packs"),
        (false, None) => {}
    }
    if let Some((key, Node::Bool(false))) = import.get(&["neat_packing"]) {
        import.not_needed(&key, "off");
    }
}

/// Defaults of LLaMA-Factory that differ from ours.
fn defaults(import: &mut Import) {
    if import.written("train.learning_rate").is_none() {
        import.default("train.learning_rate", Node::Float(5e-5), "its default");
    }
    let checkpointing = ["gradient_checkpointing", "disable_gradient_checkpointing"];
    if import.get(&checkpointing).is_none() {
        import.default(
            "train.gradient_checkpointing",
            Node::Bool(true),
            "its default; off is faster and takes more memory",
        );
    }
    if import.get(&["save_total_limit"]).is_none() {
        import.default("train.save_total_limit", Node::Null, "every checkpoint is kept");
    }
}

/// Generation settings. Where answers to validation rows are generated, LLaMA-Factory's defaults differ from ours.
fn answers(import: &mut Import) {
    let predicts = import.written("train.predict_with_generate").is_some_and(|node| *node == Node::Bool(true));
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
    let draws = match import.get(&["do_sample"]) {
        Some((_, node)) => !is_off_or_zero(&node),
        None => predicts,
    };
    for (key, ours, default) in settings {
        let drawing = ["gen.temperature", "gen.top_p", "gen.top_k"].contains(&ours);
        match (import.get(&[key]), default) {
            (Some(_), _) if drawing && !draws => import.not_needed(key, "answers are greedy"),
            (Some((_, node)), _) => import.put(key, ours, node, ""),
            (None, Some(default)) if predicts && (draws || !drawing) => import.default(ours, default, "its default"),
            (None, _) => {}
        }
    }
}
