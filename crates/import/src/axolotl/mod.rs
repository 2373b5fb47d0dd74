//! Axolotl's configurations, as of version 0.18.
mod joint;
mod rows;
mod table;

use super::work::Work;
use super::{names, ranks};
pub(crate) use table::RULES;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::Node;

const TRUNCATION: &str = "data.truncation";

/// Imports a whole configuration.
pub(super) fn read(work: &mut Work) -> Result<()> {
    for key in ["rl", "reward_model", "process_reward_model"] {
        match work.get(&[key]) {
            Some((_, Node::Bool(false))) => work.not_needed(key, "off"),
            Some((_, node)) => {
                return Err(Error::config(format!(
                    "{}: {key}: found {}: this is no supervised fine-tuning",
                    work.path.display(),
                    node.describe()
                ))
                .hint(
                    "preference data would be learned as if all of it were right; tunesmith has no such training yet",
                ));
            }
            None => {}
        }
    }
    if work.get(&["base_model"]).is_none() {
        return Err(Error::config(format!("{}: base_model is not set: this trains nothing", work.path.display()))
            .hint("is it a configuration of Axolotl's training?"));
    }
    work.apply_rules()?;
    mode(work);
    precision(work);
    let kinds = rows::sets(work);
    let splits = names::validation(work, "val_set_size");
    let validates = splits || work.written("data.val_path").is_some();
    lengths(work, &kinds);
    batches(work);
    schedule(work);
    names::moments(work, "no", "epoch", validates);
    moments(work, validates);
    joint::rates(work);
    joint::answers(work, validates);
    ranks::fsdp(work, true);
    Ok(())
}

/// The training mode (`adapter`), and the precision of the base model.
fn mode(work: &mut Work) {
    let quantized = work.is_on("load_in_4bit");
    let mode = |work: &mut Work, word: &str, why: &str| match work.get(&["adapter"]) {
        Some((key, _)) => work.put(&key, "tuning.mode", Node::Str(word.into()), why),
        None => work.default("tuning.mode", Node::Str(word.into()), "no adapter: every weight is trained"),
    };
    match (work.word("adapter").as_deref(), work.get(&["unfrozen_parameters"])) {
        (Some("lora"), _) if quantized => mode(work, "qlora", "adapter: lora with load_in_4bit"),
        (Some(word), _) => mode(work, word, ""),
        (None, Some((key, patterns))) => {
            work.default("tuning.mode", Node::Str("freeze".into()), "unfrozen_parameters is given");
            let slices = matches!(&patterns, Node::List(items)
                if items.iter().any(|item| matches!(item, Node::Str(text) if text.ends_with(']') && text.contains(':'))));
            if slices {
                work.unsupported(&key, "ranges of rows, as in name[:100], are not part of this version");
            } else {
                work.put(&key, "tuning.freeze.trainable_patterns", patterns, "");
            }
        }
        (None, None) => mode(work, "full", ""),
    }
    match (work.get(&["load_in_4bit"]), work.word("adapter")) {
        (Some((key, Node::Bool(true))), Some(_)) => work.not_needed(&key, "mode: qlora says so"),
        (Some((key, Node::Bool(true))), None) => work.put(&key, "model.quantization", Node::Str("nf4".into()), ""),
        (Some((key, _)), _) => work.not_needed(&key, "off"),
        (None, _) => {}
    }
    match work.get(&["load_in_8bit"]) {
        Some((key, Node::Bool(true))) => work.put(&key, "model.quantization", Node::Str("int8".into()), ""),
        Some((key, _)) => work.not_needed(&key, "off"),
        None => {}
    }
    joint::quantization(work);
    match (work.is_on("lora_target_linear"), work.get(&["lora_target_modules"])) {
        (true, modules) => {
            work.put("lora_target_linear", "tuning.lora.target_modules", Node::Str("auto".into()), "");
            if let Some((key, _)) = modules {
                work.not_needed(&key, "lora_target_linear takes them all");
            }
        }
        (false, Some((key, modules))) => work.put(&key, "tuning.lora.target_modules", modules, ""),
        (false, None) => {}
    }
    if let Some((key, Node::Bool(false))) = work.get(&["lora_target_linear"]) {
        work.not_needed(&key, "off");
    }
}

/// Compute precision. Axolotl's default is `bf16: auto`, unless `fp16` is asked for.
fn precision(work: &mut Work) {
    let bf16 = work.get(&["bf16"]);
    let auto = matches!(&bf16, Some((_, Node::Str(word))) if word == "auto");
    let bfloat = work.is_on("bfloat16") || (bf16.is_some() && !auto && !matches!(bf16, Some((_, Node::Bool(false)))));
    let mut half = false;
    for key in ["fp16", "float16"] {
        match work.get(&[key]) {
            Some((_, Node::Bool(true))) if bfloat => work.not_needed(key, "bfloat16 wins"),
            Some((_, Node::Bool(true))) => {
                half = true;
                work.put(key, "train.fp16", Node::Bool(true), "");
                if auto {
                    work.put("bf16", "train.bf16", Node::Bool(false), "float16 is asked for");
                }
            }
            Some(_) => work.not_needed(key, "off"),
            None => {}
        }
    }
    let other = ["bf16", "bfloat16", "float32"].iter().any(|key| work.get(&[key]).is_some());
    if !half && !other {
        work.default("train.bf16", Node::Bool(true), "bf16: auto is its default");
    }
}

fn lengths(work: &mut Work, kinds: &rows::Kinds) {
    let excess = work.get(&["excess_length_strategy"]);
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
            Some((key, _)) => work.put(&key, TRUNCATION, Node::Str("split".into()), why),
            None => work.default(TRUNCATION, Node::Str("split".into()), why),
        }
    } else {
        match excess {
            Some((key, Node::Str(word))) if word == "raise" => {
                work.put(&key, TRUNCATION, Node::Str("drop".into()), "left out and counted, not refused");
            }
            Some((key, Node::Str(word))) if word == "truncate" => {
                work.put(&key, TRUNCATION, Node::Str("right".into()), "");
            }
            Some((key, node)) => work.put(&key, TRUNCATION, node, ""),
            None => work.default(TRUNCATION, Node::Str("drop".into()), "rows that are too long are left out"),
        }
    }
    if work.written("model.max_seq_len").is_none() {
        work.default("model.max_seq_len", Node::Int(512), "its default");
    }
    match work.get(&["train_on_inputs"]) {
        Some((key, Node::Bool(true))) => work.put(&key, "data.loss_on", Node::Str("all".into()), ""),
        Some((key, _)) => work.put(&key, "data.loss_on", Node::Str("assistant".into()), ""),
        None => {}
    }
}

fn batches(work: &mut Work) {
    if let Some((key, whole)) = work.get(&["batch_size"]) {
        let micro = work.written("train.batch_size").cloned();
        match (whole, micro) {
            (Node::Int(whole), Some(Node::Int(micro))) if micro > 0 && whole % micro == 0 => {
                work.put(&key, "train.grad_accum", Node::Int(whole / micro), "the whole batch, in micro-batches");
            }
            _ => work.unsupported(&key, "the whole batch: set train.batch_size and train.grad_accum"),
        }
    }
    let micro = work.written("train.batch_size").cloned().unwrap_or_else(|| {
        work.default("train.batch_size", Node::Int(1), "its default");
        Node::Int(1)
    });
    if work.written("train.eval_batch_size").is_none() {
        work.default("train.eval_batch_size", micro, "micro_batch_size");
    }
    if work.written("train.num_train_epochs").is_none() && work.written("train.max_steps").is_none() {
        work.default("train.num_train_epochs", Node::Int(1), "its default");
    }
}

fn schedule(work: &mut Work) {
    let floor = work.get(&["cosine_min_lr_ratio"]);
    names::schedule(work, "cosine");
    let name = match work.written("train.lr_scheduler_type") {
        Some(Node::Str(name)) => name.clone(),
        _ => String::new(),
    };
    if let Some((key, rate)) = floor {
        if name == "cosine" {
            let why = "with cosine_min_lr_ratio, the cosine ends there";
            match work.get(&["lr_scheduler"]) {
                Some((from, _)) => {
                    work.put(&from, "train.lr_scheduler_type", Node::Str("cosine_with_min_lr".into()), why);
                }
                None => work.default("train.lr_scheduler_type", Node::Str("cosine_with_min_lr".into()), why),
            }
            work.put(&key, "train.lr_scheduler_kwargs", Node::Map(vec![("min_lr_rate".into(), rate)]), "");
        } else if name == "rex" {
            work.put(&key, "train.lr_scheduler_kwargs", Node::Map(vec![("min_lr_rate".into(), rate)]), "");
        } else {
            work.not_needed(&key, "it belongs to the schedules `cosine` and `rex`");
        }
    }
    if work.get(&["warmup_steps", "warmup_ratio"]).is_none() && name != "constant" {
        work.default("train.warmup_ratio", Node::Float(0.03), "its default, there with at most 100 steps");
    }
}

fn moments(work: &mut Work, validates: bool) {
    for (key, ours) in [("saves_per_epoch", "train.save_strategy"), ("evals_per_epoch", "train.eval_strategy")] {
        let Some((_, node)) = work.get(&[key]) else { continue };
        match node {
            Node::Int(0) => work.put(key, ours, Node::Str("no".into()), ""),
            _ if ours == "train.eval_strategy" && !validates => work.not_needed(key, "there are no validation rows"),
            Node::Int(1) => work.put(key, ours, Node::Str("epoch".into()), ""),
            _ => work.put(key, ours, Node::Str("epoch".into()), "once an epoch; for more, set the strategy to steps"),
        }
    }
    if work.written("train.save_total_limit").is_none() {
        work.default("train.save_total_limit", Node::Int(4), "its default");
    }
    match work.get(&["early_stopping_patience"]) {
        Some((key, _)) if !validates => work.changed(&key, "", "there are no validation rows"),
        Some((key, node)) => work.put(&key, "train.early_stopping_patience", node, ""),
        None => {}
    }
}
