//! Axolotl's configurations, as of version 0.18.
mod joint;
mod rows;
mod table;

use super::import::Import;
use super::{names, ranks};
pub(crate) use table::RULES;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Node;

const TRUNCATION: &str = "data.truncation";

pub(super) fn read(import: &mut Import) -> Result<()> {
    for key in ["rl", "reward_model", "process_reward_model"] {
        match import.get(&[key]) {
            Some((_, Node::Bool(false))) => import.not_needed(key, "off"),
            Some((_, node)) => {
                return Err(Error::config(format!(
                    "{}: {key}: found {}: this is no supervised fine-tuning",
                    import.path.display(),
                    node.describe()
                ))
                .hint(
                    "preference data would be learned as if all of it were right; tunesmith has no such training yet",
                ));
            }
            None => {}
        }
    }
    if import.get(&["base_model"]).is_none() {
        return Err(Error::config(format!("{}: base_model is not set: this trains nothing", import.path.display()))
            .hint("is it a configuration of Axolotl's training?"));
    }
    import.apply_rules()?;
    mode(import);
    precision(import);
    let kinds = rows::sets(import);
    let splits = names::validation(import, "val_set_size");
    let validates = splits || import.written("data.val_path").is_some();
    lengths(import, &kinds);
    batches(import);
    schedule(import);
    names::moments(import, "no", "epoch", validates);
    moments(import, validates);
    joint::rates(import);
    joint::answers(import, validates);
    ranks::fsdp(import, true);
    Ok(())
}

/// The training mode (`adapter`), and the precision of the base model.
fn mode(import: &mut Import) {
    let quantized = import.is_on("load_in_4bit");
    let mode = |import: &mut Import, word: &str, why: &str| match import.get(&["adapter"]) {
        Some((key, _)) => import.put(&key, "tuning.mode", Node::Str(word.into()), why),
        None => import.default("tuning.mode", Node::Str(word.into()), "no adapter: every weight is trained"),
    };
    match (import.word("adapter").as_deref(), import.get(&["unfrozen_parameters"])) {
        (Some("lora"), _) if quantized => mode(import, "qlora", "adapter: lora with load_in_4bit"),
        (Some(word), _) => mode(import, word, ""),
        (None, Some((key, patterns))) => {
            import.default("tuning.mode", Node::Str("freeze".into()), "unfrozen_parameters is given");
            let slices = matches!(&patterns, Node::List(items)
                if items.iter().any(|item| matches!(item, Node::Str(text) if text.ends_with(']') && text.contains(':'))));
            if slices {
                import.unsupported(&key, "ranges of rows, as in name[:100], are not part of this version");
            } else {
                import.put(&key, "tuning.freeze.trainable_patterns", patterns, "");
            }
        }
        (None, None) => mode(import, "full", ""),
    }
    match (import.get(&["load_in_4bit"]), import.word("adapter")) {
        (Some((key, Node::Bool(true))), Some(_)) => import.not_needed(&key, "mode: qlora implies it"),
        (Some((key, Node::Bool(true))), None) => import.put(&key, "model.quantization", Node::Str("nf4".into()), ""),
        (Some((key, _)), _) => import.not_needed(&key, "off"),
        (None, _) => {}
    }
    match import.get(&["load_in_8bit"]) {
        Some((key, Node::Bool(true))) if quantized => {
            import.unsupported(&key, "load_in_4bit is on too: keep one of them");
        }
        Some((key, Node::Bool(true))) => import.put(&key, "model.quantization", Node::Str("int8".into()), ""),
        Some((key, _)) => import.not_needed(&key, "off"),
        None => {}
    }
    joint::quantization(import);
    match (import.is_on("lora_target_linear"), import.get(&["lora_target_modules"])) {
        (true, modules) => {
            import.put("lora_target_linear", "tuning.lora.target_modules", Node::Str("auto".into()), "");
            if let Some((key, _)) = modules {
                import.not_needed(&key, "lora_target_linear takes them all");
            }
        }
        (false, Some((key, modules))) => import.put(&key, "tuning.lora.target_modules", modules, ""),
        (false, None) => {}
    }
    if let Some((key, Node::Bool(false))) = import.get(&["lora_target_linear"]) {
        import.not_needed(&key, "off");
    }
}

/// Compute precision. Axolotl's default is `bf16: auto`, unless `fp16` is asked for.
fn precision(import: &mut Import) {
    let bf16 = import.get(&["bf16"]);
    let auto = matches!(&bf16, Some((_, Node::Str(word))) if word == "auto");
    let bfloat = import.is_on("bfloat16") || (bf16.is_some() && !auto && !matches!(bf16, Some((_, Node::Bool(false)))));
    let mut half = false;
    for key in ["fp16", "float16"] {
        match import.get(&[key]) {
            Some((_, Node::Bool(true))) if bfloat => import.not_needed(key, "bfloat16 takes precedence"),
            Some((_, Node::Bool(true))) => {
                half = true;
                import.put(key, "train.fp16", Node::Bool(true), "");
                if auto {
                    import.put("bf16", "train.bf16", Node::Bool(false), "float16 is asked for");
                }
            }
            Some(_) => import.not_needed(key, "off"),
            None => {}
        }
    }
    let other = ["bf16", "bfloat16", "float32"].iter().any(|key| import.get(&[key]).is_some());
    if !half && !other {
        import.default("train.bf16", Node::Bool(true), "bf16: auto is its default");
    }
}

fn lengths(import: &mut Import, kinds: &rows::Kinds) {
    let excess = import.get(&["excess_length_strategy"]);
    if kinds.text {
        let why = match (&excess, kinds.others) {
            (_, false) => "raw text is cut into pieces of sequence_len",
            (Some((_, Node::Str(word))), true) if word == "truncate" => {
                "raw text is cut into pieces of sequence_len, of other rows the end is cut off"
            }
            (_, true) => {
                "raw text is cut into pieces of sequence_len; other rows that are too long are left out there, here their end is cut off"
            }
        };
        match excess {
            Some((key, _)) => import.put(&key, TRUNCATION, Node::Str("split".into()), why),
            None => import.default(TRUNCATION, Node::Str("split".into()), why),
        }
    } else {
        match excess {
            Some((key, Node::Str(word))) if word == "raise" => {
                import.put(&key, TRUNCATION, Node::Str("drop".into()), "left out and counted, not refused");
            }
            Some((key, Node::Str(word))) if word == "truncate" => {
                import.put(&key, TRUNCATION, Node::Str("right".into()), "");
            }
            Some((key, node)) => import.put(&key, TRUNCATION, node, ""),
            None => import.default(TRUNCATION, Node::Str("drop".into()), "rows that are too long are left out"),
        }
    }
    if import.written("model.max_seq_len").is_none() {
        import.default("model.max_seq_len", Node::Int(512), "its default");
    }
    match import.get(&["train_on_inputs"]) {
        Some((key, Node::Bool(true))) => import.put(&key, "data.loss_on", Node::Str("all".into()), ""),
        Some((key, _)) => import.put(&key, "data.loss_on", Node::Str("assistant".into()), ""),
        None => {}
    }
}

fn batches(import: &mut Import) {
    if let Some((key, whole)) = import.get(&["batch_size"]) {
        let micro = import.written("train.batch_size").cloned();
        match (whole, micro) {
            (Node::Int(whole), Some(Node::Int(micro))) if micro > 0 && whole % micro == 0 => {
                import.put(&key, "train.grad_accum", Node::Int(whole / micro), "the whole batch, in micro-batches");
            }
            _ => import.unsupported(&key, "the whole batch: set train.batch_size and train.grad_accum"),
        }
    }
    let micro = import.written("train.batch_size").cloned().unwrap_or_else(|| {
        import.default("train.batch_size", Node::Int(1), "its default");
        Node::Int(1)
    });
    if import.written("train.eval_batch_size").is_none() {
        import.default("train.eval_batch_size", micro, "micro_batch_size");
    }
    if import.written("train.num_train_epochs").is_none() && import.written("train.max_steps").is_none() {
        import.default("train.num_train_epochs", Node::Int(1), "its default");
    }
}

fn schedule(import: &mut Import) {
    let floor = import.get(&["cosine_min_lr_ratio"]);
    names::schedule(import, "cosine");
    let name = match import.written("train.lr_scheduler_type") {
        Some(Node::Str(name)) => name.clone(),
        _ => String::new(),
    };
    if let Some((key, rate)) = floor {
        if name == "cosine" {
            let why = "with cosine_min_lr_ratio, the cosine ends there";
            match import.get(&["lr_scheduler"]) {
                Some((from, _)) => {
                    import.put(&from, "train.lr_scheduler_type", Node::Str("cosine_with_min_lr".into()), why);
                }
                None => import.default("train.lr_scheduler_type", Node::Str("cosine_with_min_lr".into()), why),
            }
            import.put(&key, "train.lr_scheduler_kwargs", Node::Map(vec![("min_lr_rate".into(), rate)]), "");
        } else if name == "rex" {
            import.put(&key, "train.lr_scheduler_kwargs", Node::Map(vec![("min_lr_rate".into(), rate)]), "");
        } else {
            import.not_needed(&key, "it belongs to the schedules `cosine` and `rex`");
        }
    }
    if import.get(&["warmup_steps", "warmup_ratio"]).is_none() && name != "constant" {
        import.default("train.warmup_ratio", Node::Float(0.03), "its default, there with at most 100 steps");
    }
}

fn moments(import: &mut Import, validates: bool) {
    for (key, ours) in [("saves_per_epoch", "train.save_strategy"), ("evals_per_epoch", "train.eval_strategy")] {
        let Some((_, node)) = import.get(&[key]) else { continue };
        match node {
            Node::Int(0) => import.put(key, ours, Node::Str("no".into()), ""),
            _ if ours == "train.eval_strategy" && !validates => import.not_needed(key, "there are no validation rows"),
            Node::Int(1) => import.put(key, ours, Node::Str("epoch".into()), ""),
            _ => import.put(key, ours, Node::Str("epoch".into()), "once an epoch; for more, set the strategy to steps"),
        }
    }
    if import.written("train.save_total_limit").is_none() {
        import.default("train.save_total_limit", Node::Int(4), "its default");
    }
    match import.get(&["early_stopping_patience"]) {
        Some((key, _)) if !validates => import.changed(&key, "", "there are no validation rows"),
        Some((key, node)) => import.put(&key, "train.early_stopping_patience", node, ""),
        None => {}
    }
}
