//! ms-swift's configurations (`swift sft their.yaml`), as of version 4.6.
mod parts;
mod rows;
mod table;

use super::import::{Import, is_off_or_zero};
use super::names;
use super::nodes::texts;
pub(crate) use table::RULES;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Node;

/// A pattern for the tensors of connectors in all families, and below one for image encoders, to give them learning rates.
const CONNECTORS: &str = "(multi_modal_projector|connector|merger|deepstack_merger_list).*";
const ENCODERS: &str = "(vision_tower|vision_model|visual).*";

pub(super) fn read(import: &mut Import) -> Result<()> {
    let refuse = |import: &Import, key: &str, word: &str, hint: &str| {
        let message = format!("{}: {key}: {word:?}: this is no supervised fine-tuning", import.path.display());
        Err(Error::config(message).hint(hint))
    };
    if let Some(word) = import.word("rlhf_type") {
        let hint = "preference data would be learned as if all of it were right; tunesmith has no such training yet";
        return refuse(import, "rlhf_type", &word, hint);
    }
    match import.word("task_type").as_deref() {
        None => {}
        Some("causal_lm") => import.not_needed("task_type", "this is what tunesmith does"),
        Some(word) => {
            let hint = "for classes, write a configuration with task: classification (docs/guides/classification.md)";
            return refuse(import, "task_type", word, hint);
        }
    }
    for key in ["num_labels", "problem_type"] {
        if import.get(&[key]).is_some() {
            import.not_needed(key, "nothing is classified");
        }
    }
    for (key, what) in [("model", "this trains nothing"), ("dataset", "there are no rows")] {
        let cached = key == "dataset" && import.get(&["cached_dataset"]).is_some();
        if import.get(&[key]).is_none() && !cached {
            return Err(Error::config(format!("{}: {key} is not set: {what}", import.path.display()))
                .hint("is it a configuration of `swift sft` or `swift pt`?"));
        }
    }
    import.apply_rules()?;
    let full = mode(import);
    pictures(import, full);
    precision(import);
    let splits = rows::sets(import);
    let validates = splits || import.written("data.val_path").is_some();
    lengths(import);
    batches(import);
    names::schedule(import, "cosine");
    moments(import, validates);
    answers(import);
    defaults(import, full);
    Ok(())
}

/// The training mode, and the precision of the base. Returns whether every weight of the language model is trained.
fn mode(import: &mut Import) -> bool {
    let found = import.get(&["tuner_type", "train_type"]);
    let kind = match &found {
        Some((_, Node::Str(word))) => word.clone(),
        _ => "lora".to_owned(),
    };
    let method = import.word("quant_method");
    let bits = match import.get(&["quant_bits"]) {
        Some((_, Node::Int(bits))) => bits,
        _ => 0,
    };
    let four = method.as_deref() == Some("bnb") && bits == 4;
    let some = full_but_frozen(import, &kind);
    let (ours, why) = match kind.as_str() {
        "lora" if four => ("qlora", "with quant_bits: 4"),
        "full" if some => ("freeze", "freeze_parameters_ratio: 1 and what is trained nevertheless"),
        word => (word, ""),
    };
    match found {
        Some((key, _)) => import.put(&key, "tuning.mode", Node::Str(ours.into()), why),
        None => import.default("tuning.mode", Node::Str(ours.into()), "its default"),
    }
    match method.as_deref() {
        None => {}
        Some("bnb") => import.not_needed("quant_method", "weights are quantized as in bitsandbytes"),
        Some("fp8") => import.put("quant_method", "model.quantization", Node::Str("fp8".into()), ""),
        Some(_) => import.unsupported("quant_method", "weights are quantized as in bitsandbytes, or to FP8"),
    }
    if import.get(&["quant_bits"]).is_some() {
        match (method.as_deref(), bits) {
            (Some("bnb"), 4) if ours == "qlora" => import.not_needed("quant_bits", "mode: qlora implies it"),
            (Some("bnb"), 4) => import.put("quant_bits", "model.quantization", Node::Str("nf4".into()), ""),
            (Some("bnb"), 8) => import.put("quant_bits", "model.quantization", Node::Str("int8".into()), ""),
            (Some("fp8"), _) => import.not_needed("quant_bits", "quant_method: fp8 says it"),
            (None, _) => import.not_needed("quant_bits", "without quant_method, the base is not quantized"),
            _ => import.unsupported("quant_bits", "weights are quantized as in bitsandbytes, or to FP8"),
        }
    }
    let kinds = [("bnb_4bit_quant_type", "model.quantization"), ("bnb_4bit_use_double_quant", "model.double_quant")];
    for (key, to) in kinds {
        match import.get(&[key]) {
            Some((_, node)) if four => import.put(key, to, node, ""),
            Some(_) => import.not_needed(key, "it belongs to 4 bits"),
            None => {}
        }
    }
    let targets = import.get(&["target_regex", "target_modules"]);
    match targets {
        Some((key, node)) if kind == "lora" => match parts::targets(&node) {
            Some(ours) => import.put(&key, "tuning.lora.target_modules", ours, ""),
            None => import.unsupported(&key, "all-embedding and all-router: name the modules"),
        },
        None if kind == "lora" => {
            import.default("tuning.lora.target_modules", Node::Str("auto".into()), "its default, all-linear");
        }
        _ => {}
    }
    if import.get(&["target_regex"]).is_some() && import.get(&["target_modules"]).is_some() {
        import.not_needed("target_modules", "target_regex takes precedence");
    }
    if kind == "lora" {
        let its = [("r", Node::Int(8)), ("lora_alpha", Node::Float(32.0)), ("lora_dropout", Node::Float(0.05))];
        for (name, value) in its {
            let key = format!("tuning.lora.{name}");
            if import.written(&key).is_none() {
                import.default(&key, value, "its default");
            }
        }
    }
    kind == "full"
}

/// Imports full training with `freeze_parameters_ratio: 1`, in which only tensors are trained that `trainable_parameters` or
/// `trainable_parameters_regex` name. Returns whether the source trains in this way.
fn full_but_frozen(import: &mut Import, kind: &str) -> bool {
    let ratio = import.get(&["freeze_parameters_ratio"]);
    let whole = matches!(ratio, Some((_, Node::Int(1)))) || matches!(ratio, Some((_, Node::Float(one))) if one == 1.0);
    let mut patterns = Vec::new();
    let mut from = None;
    for key in ["trainable_parameters", "trainable_parameters_regex"] {
        let Some((_, node)) = import.get(&[key]) else { continue };
        if kind != "full" || !whole {
            import
                .unsupported(key, "tuning.mode: freeze with tuning.freeze.trainable_patterns trains parts of a model");
            continue;
        }
        for name in texts(&node) {
            let pattern = if key.ends_with("regex") { name } else { format!("{}.*", name.replace('.', r"\.")) };
            patterns.push(Node::Str(pattern));
        }
        from = Some(key);
    }
    if let Some((key, node)) = &ratio {
        match (&from, is_off_or_zero(node)) {
            (_, true) => import.not_needed(key, "off"),
            (Some(_), _) => import.not_needed(key, "tuning.mode: freeze says it"),
            (None, _) => import.unsupported(key, "a share of the parameters: set tuning.freeze.trainable_layers"),
        }
    }
    if let Some(key) = from {
        import.put(key, "tuning.freeze.trainable_patterns", Node::List(patterns), "a pattern for each name");
    }
    from.is_some()
}

/// Imports what is trained of the image encoder and the connector, and their learning rates. ms-swift can put adapters on
/// linear modules of both; here the connector itself is trained instead.
fn pictures(import: &mut Import, full: bool) {
    match import.get(&["freeze_vit"]) {
        Some((key, Node::Bool(false))) if full => {
            import.put(&key, "tuning.freeze_vision", Node::Bool(false), "");
        }
        Some((key, Node::Bool(false))) => {
            let all = Node::List(vec![Node::Str("all-linear".into())]);
            import.put(&key, "tuning.vision_target_modules", all, "adapters on the encoder's linear modules");
        }
        Some((key, _)) => import.not_needed(&key, "the image encoder of a multimodal model is frozen by default"),
        None => {}
    }
    match import.get(&["freeze_aligner"]) {
        Some((key, Node::Bool(false))) => {
            let why = if full { "" } else { "the connector itself is trained, there adapters on it" };
            import.put(&key, "tuning.freeze_connector", Node::Bool(false), why);
        }
        Some((key, _)) => import.not_needed(&key, "the connector of a multimodal model is frozen by default"),
        None => {}
    }
    let given: Vec<(String, Node)> =
        ["aligner_lr", "vit_lr"].into_iter().filter_map(|key| import.get(&[key])).collect();
    // The first pattern that matches counts, and a connector may lie within the encoder's module, so it comes first.
    let rates = given.iter().map(|(key, rate)| {
        (
            if key == "vit_lr" { ENCODERS } else { CONNECTORS }.to_owned(),
            tunesmith_config::unquoted("train.learning_rate", rate.clone()),
        )
    });
    let mut rates: Vec<(String, Node)> = rates.collect();
    if let [(key, _)] = &given[..]
        && key == "vit_lr"
        && let Some(rate) = import.written("train.learning_rate")
    {
        rates.insert(0, (CONNECTORS.to_owned(), rate.clone()));
    }
    for (key, _) in &given {
        import.put(key, "train.learning_rates", Node::Map(rates.clone()), "");
    }
}

/// Compute precision: by `torch_dtype`, unless `bf16` or `fp16` is given. Without all of them, the model's own decides, which is mostly bfloat16.
fn precision(import: &mut Import) {
    let dtype = import.word("torch_dtype");
    if import.get(&["torch_dtype"]).is_some() {
        match &dtype {
            Some(word) if word == "float16" => {
                import.changed("torch_dtype", "train.fp16", "frozen weights are kept as their files have them");
            }
            Some(word) => import.put("torch_dtype", "model.dtype", Node::Str(word.clone()), ""),
            None => import.unsupported("torch_dtype", "expected a word"),
        }
    }
    let half = matches!(dtype.as_deref(), Some("float16" | "float32"));
    let given = |import: &Import, key: &str| import.get(&[key]).map(|(_, node)| !is_off_or_zero(&node));
    let bf16 = given(import, "bf16").unwrap_or(!half && given(import, "fp16") != Some(true));
    let fp16 = given(import, "fp16").unwrap_or(half) && !bf16;
    for (key, on) in [("bf16", bf16), ("fp16", fp16)] {
        let ours = format!("train.{key}");
        match given(import, key) {
            Some(asked) if asked && !on => import.not_needed(key, "bfloat16 takes precedence"),
            Some(_) => import.put(key, &ours, Node::Bool(on), ""),
            None if on => {
                import.default(&ours, Node::Bool(true), "torch_dtype decides it, by default that of the model");
            }
            None => {}
        }
    }
}

fn lengths(import: &mut Import) {
    match import.get(&["truncation_strategy"]) {
        Some((key, Node::Str(word))) if word == "delete" => {
            import.put(&key, "data.truncation", Node::Str("drop".into()), "");
        }
        Some((key, node)) => import.put(&key, "data.truncation", node, ""),
        None => import.default("data.truncation", Node::Str("drop".into()), "rows that are too long are left out"),
    }
    if import.written("model.max_seq_len").is_none() {
        let why = "there as long as the model's context; longer rows are left out and counted";
        import.default("model.max_seq_len", Node::Int(2048), why);
    }
}

fn batches(import: &mut Import) {
    for key in ["train.batch_size", "train.eval_batch_size"] {
        if import.written(key).is_none() {
            import.default(key, Node::Int(1), "its default");
        }
    }
    if import.written("train.grad_accum").is_none() {
        match import.written("train.batch_size") {
            Some(Node::Int(rows)) if *rows > 0 && 16 % rows == 0 => {
                import.default("train.grad_accum", Node::Str("auto".into()), "16 rows a step over all ranks");
                import.default("train.effective_batch", Node::Int(16), "its default");
            }
            Some(Node::Int(rows)) if *rows > 0 => {
                let passes = (16 + rows - 1) / rows;
                import.default("train.grad_accum", Node::Int(passes), "16 rows a step or more, of one rank");
            }
            _ => {}
        }
    }
    match (import.get(&["max_epochs"]), import.get(&["num_train_epochs"])) {
        (Some((key, node)), epochs) => {
            import.put(&key, "train.num_train_epochs", node, "");
            if epochs.is_some() {
                import.not_needed("num_train_epochs", "max_epochs takes precedence");
            }
        }
        (None, Some((key, node))) => import.put(&key, "train.num_train_epochs", node, ""),
        (None, None) => {}
    }
}

/// Imports when a run validates and saves. ms-swift validates when it saves, unless the file says otherwise.
fn moments(import: &mut Import, validates: bool) {
    let save = import.word("save_strategy").unwrap_or_else(|| "steps".to_owned());
    names::moments(import, &save, "steps", validates);
    match import.get(&["early_stop_interval"]) {
        Some((key, node)) if validates => import.put(&key, "train.early_stopping_patience", node, ""),
        Some((key, _)) => import.changed(&key, "", "there are no validation rows"),
        None => {}
    }
    let strategy = import.written("train.eval_strategy").cloned();
    if strategy == Some(Node::Str("steps".into())) && import.written("train.eval_steps").is_none() {
        let steps = import.written("train.save_steps").cloned().unwrap_or(Node::Int(500));
        import.default("train.eval_steps", steps, "as often as it saves");
    }
}

/// Imports how answers to validation rows are generated: greedily, unless a temperature is given.
fn answers(import: &mut Import) {
    let predicts = import.written("train.predict_with_generate").is_some_and(|node| *node == Node::Bool(true));
    let draws = matches!(import.get(&["temperature"]), Some((_, node)) if !is_off_or_zero(&node));
    if draws {
        import.default("gen.do_sample", Node::Bool(true), "a temperature is given");
    }
    for key in ["max_new_tokens", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty"] {
        match import.get(&[key]) {
            Some(_) if ["temperature", "top_k", "top_p"].contains(&key) && !draws => {
                import.not_needed(key, "answers are greedy");
            }
            Some((_, node)) => import.put(key, &format!("gen.{key}"), node, ""),
            None => {}
        }
    }
    match import.get(&["eval_metric"]) {
        Some((key, Node::Str(word))) if word == "nlg" => {
            let metrics = ["rouge", "bleu"].map(|word| Node::Str(word.into())).to_vec();
            import.put(&key, "eval.metrics", Node::List(metrics), "words are not cut by jieba");
        }
        Some((key, Node::Str(word))) if word == "acc" => {
            import.not_needed(&key, "`tunesmith eval` tells token_accuracy");
        }
        Some((key, _)) => import.unsupported(&key, "eval.metrics lists the metrics"),
        None if predicts => {
            let metrics = ["rouge", "bleu"].map(|word| Node::Str(word.into())).to_vec();
            import.default("eval.metrics", Node::List(metrics), "its default");
        }
        None => {}
    }
}

/// Defaults of ms-swift that differ from ours.
fn defaults(import: &mut Import, full: bool) {
    let its = [
        ("train.learning_rate", Node::Float(if full { 1e-5 } else { 1e-4 })),
        ("train.weight_decay", Node::Float(0.1)),
        ("train.adam_beta2", Node::Float(0.95)),
        ("train.gradient_checkpointing", Node::Bool(true)),
        ("train.logging_steps", Node::Int(5)),
    ];
    for (key, value) in its {
        if import.written(key).is_none() {
            import.default(key, value, "its default");
        }
    }
    if import.get(&["save_total_limit"]).is_none() {
        import.default("train.save_total_limit", Node::Null, "every checkpoint is kept");
    }
}
