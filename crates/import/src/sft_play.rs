//! SFT-Play's configurations, which have our sections and includes.
use super::import::{Import, Rules};
use super::names::{NO_LOADER, REACHED};
use super::source_file::{beside, entries};
use super::{names, ranks};
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::foreign::rules::Action::{NotNeeded, To, ToBut, Together, Unsupported, With};
use tunesmith_config::{Node, rules};

const ENGINE: &str = "there is one engine";
const WINDOWS: &str =
    "texts are cut into pieces of model.max_seq_len tokens, without overlap, and blocks filled with them";
/// The most bytes of a template that are read.
const MAX_TEMPLATE: u64 = 1 << 20;
/// The deepest chain of includes.
const MAX_DEPTH: usize = 16;

/// Every key of SFT-Play that this import knows, by its full path, and the sections, by which a file is recognised.
pub(super) const RULES: Rules = rules! {
    "include" | "model" | "tuning" | "train" | "data" | "logging" | "gen" | "eval" => Together,
    "seed" => To("train.seed"),
    "run_name" => To("logging.run_name"),
    "deepspeed" => With(ranks::deepspeed),
    "model.name" => To("model.name"),
    "model.local_dir" => With(|import, key, node| match node {
        Node::Str(folder) if !Path::new(folder).is_dir() => {
            import.changed(key, "", "a place to download to; here the hub's cache is used, or `tunesmith download --dir`");
        }
        node => import.put(key, "model.local_dir", node.clone(), ""),
    }),
    "model.revision" => To("model.revision"),
    "model.type" => Together,
    "model.max_seq_len" => To("model.max_seq_len"),
    "model.trust_remote_code" => With(names::trust_remote_code),
    "tuning.mode" => To("tuning.mode"),
    "tuning.backend" => NotNeeded(ENGINE),
    "tuning.lora.r" => To("tuning.lora.r"),
    "tuning.lora.alpha" | "tuning.lora.lora_alpha" => To("tuning.lora.lora_alpha"),
    "tuning.lora.dropout" | "tuning.lora.lora_dropout" => To("tuning.lora.lora_dropout"),
    "tuning.lora.target_modules" => To("tuning.lora.target_modules"),
    "tuning.lora.bias" => To("tuning.lora.bias"),
    "train.epochs" | "train.num_train_epochs" => To("train.num_train_epochs"),
    "train.steps" => ToBut("train.max_steps", "read here"),
    "train.max_steps" => To("train.max_steps"),
    "train.learning_rate" | "train.lr" => To("train.learning_rate"),
    "train.weight_decay" => To("train.weight_decay"),
    "train.max_grad_norm" => To("train.max_grad_norm"),
    "train.lr_scheduler_type" | "train.warmup_ratio" | "train.warmup_steps" => Together,
    "train.optim" => With(names::optimizer),
    "train.bf16" => To("train.bf16"),
    "train.fp16" => With(|import, key, node| match node {
        Node::Bool(true) if import.is_on("train.bf16") => import.not_needed(key, "bfloat16 takes precedence"),
        node => import.put(key, "train.fp16", node.clone(), ""),
    }),
    "train.gradient_checkpointing" => To("train.gradient_checkpointing"),
    "train.batch_size" | "train.per_device_train_batch_size" => To("train.batch_size"),
    "train.eval_batch_size" | "train.per_device_eval_batch_size" => To("train.eval_batch_size"),
    "train.grad_accum" | "train.gradient_accumulation_steps" => To("train.grad_accum"),
    "train.target_tokens_per_device_step" => To("train.target_tokens_per_device_step"),
    "train.eval_strategy" | "train.evaluation_strategy" | "train.eval_steps" | "train.save_strategy" | "train.save_steps" => Together,
    "train.save_total_limit" => To("train.save_total_limit"),
    "train.load_best_model_at_end" => Together,
    "train.early_stopping_patience" => To("train.early_stopping_patience"),
    "train.metric_for_best_model" => With(|import, key, node| match node {
        Node::Str(word) if word == "eval_loss" || word == "loss" || import.is_on("train.predict_with_generate") => {
            import.put(key, "train.metric_for_best_model", node.clone(), "");
        }
        _ => import.changed(key, "train.metric_for_best_model: eval_loss", "answers are scored with predict_with_generate only"),
    }),
    "train.greater_is_better" => NotNeeded("known of every measure"),
    "train.output_dir" => To("train.output_dir"),
    "train.overwrite_output_dir" => With(names::overwrite),
    "train.logging_steps" => To("train.logging_steps"),
    "train.report_to" => NotNeeded("see logging.backend; TensorBoard is the default"),
    "train.run_name" => To("logging.run_name"),
    "train.seed" => To("train.seed"),
    "train.resume_from_checkpoint" => With(|import, key, node| match node {
        Node::Str(word) if word == "auto" => import.changed(key, "", "say --resume when you go on"),
        node => import.put(key, "train.resume_from_checkpoint", node.clone(), ""),
    }),
    "train.ddp_find_unused_parameters" => NotNeeded(REACHED),
    "train.ddp_broadcast_buffers" => NotNeeded("models have no buffers that training changes"),
    "train.ddp_bucket_cap_mb" => To("train.ddp_bucket_cap_mb"),
    "train.deepspeed" => With(ranks::deepspeed),
    "train.ddp_timeout" => To("train.ddp_timeout"),
    "train.ddp_backend" => To("train.ddp_backend"),
    "train.dataloader_num_workers" | "train.dataloader_pin_memory" => NotNeeded(NO_LOADER),
    "train.predict_with_generate" => To("train.predict_with_generate"),
    "train.generation_num_beams" => To("train.generation_num_beams"),
    "train.generation_max_new_tokens" => To("train.generation_max_new_tokens"),
    "train.eval_do_concat_batches" => NotNeeded("validation keeps no logits"),
    "train.eval_accumulation_steps" => To("train.eval_accumulation_steps"),
    "data.format" => With(|import, key, node| match node {
        Node::Str(word) if ["jsonl", "json", "csv"].contains(&word.as_str()) => import.not_needed(key, "the file's name says it"),
        Node::Str(word) if word == "chat" => import.not_needed(key, "recognised by the fields of the rows"),
        node => import.put(key, "data.format", node.clone(), ""),
    }),
    "data.template_path" => With(template),
    "data.train_path" => To("data.train_path"),
    "data.val_path" => To("data.val_path"),
    "data.test_path" => To("data.test_path"),
    "data.cache_dir" => To("data.cache_dir"),
    "data.packing" => To("data.packing"),
    "data.split" | "data.split.train_ratio" | "data.split.val_ratio" | "data.split.test_ratio" => Together,
    "logging.backend" => With(|import, key, node| match node {
        Node::Str(word) if word == "tensorboard" => import.put(key, "logging.tensorboard", Node::Bool(true), ""),
        _ => import.unsupported(key, "TensorBoard and report.html are written; others are not yet part of this version"),
    }),
    "logging.log_interval" => Together,
    "gen.max_new_tokens" => To("gen.max_new_tokens"),
    "gen.temperature" => To("gen.temperature"),
    "gen.top_p" => To("gen.top_p"),
    "gen.top_k" => To("gen.top_k"),
    "gen.do_sample" => To("gen.do_sample"),
    "gen.num_beams" => To("gen.num_beams"),
    "task_mode" | "mode" | "block_size" => Together,
    "stride" => Unsupported(WINDOWS),
    "pack_factor" => With(|import, key, _| import.changed(key, "", WINDOWS)),
    "datasets" => Together,
};

/// Imports a whole configuration, with its includes.
pub(super) fn read(import: &mut Import) -> Result<()> {
    let path = import.path.clone();
    let merged = include(&path, std::mem::take(import.entries()), &mut vec![path.clone()])?;
    let mut flat = Vec::new();
    flatten("", merged, &mut flat);
    *import.entries() = flat;
    if let Some((key, Node::Str(kind))) = import.get(&["model.type"]) {
        if kind != "causal" {
            return Err(Error::config(format!(
                "{}: {key}: {kind:?}: only causal models are supported",
                path.display()
            )));
        }
        import.not_needed(&key, "the only kind");
    }
    if !import.entries().iter().any(|(key, _)| key.starts_with("model.") || key.starts_with("train.")) {
        return Err(Error::config(format!("{}: no section model or train: this trains nothing", path.display()))
            .hint("is it a configuration of SFT-Play's training?"));
    }
    import.apply_rules()?;
    defaults(import);
    pretraining(import);
    // A file that says nothing about data gets its rows elsewhere, perhaps with validation rows.
    let unsaid = !import.entries().iter().any(|(key, _)| key.starts_with("data.") || key == "datasets");
    let strategy = import.get(&["train.eval_strategy", "train.evaluation_strategy"]);
    let validates = rows(import) || (unsaid && strategy.is_some());
    names::schedule(import, "linear");
    let warms = ["train.warmup_ratio", "train.warmup_steps"];
    let constant = matches!(import.written("train.lr_scheduler_type"), Some(Node::Str(word)) if word == "constant");
    if import.get(&warms).is_none() && !constant {
        import.default("train.warmup_ratio", Node::Float(0.06), "its default");
    }
    names::moments(import, "epoch", "epoch", validates);
    for (strategy, steps, default) in
        [("train.eval_strategy", "train.eval_steps", 50), ("train.save_strategy", "train.save_steps", 100)]
    {
        let counts = matches!(import.written(strategy), Some(Node::Str(word)) if word == "steps");
        if counts && import.written(steps).is_none() {
            import.default(steps, Node::Int(default), "its default");
        }
    }
    if let Some((key, node)) = import.get(&["logging.log_interval"]) {
        if import.written("train.logging_steps").is_some() {
            import.not_needed(&key, "train.logging_steps says so");
        } else {
            import.put(&key, "train.logging_steps", node, "");
        }
    }
    Ok(())
}

/// A template file. SFT-Play's templates get the variables `system` and `user`, ours get `messages`.
fn template(import: &mut Import, key: &str, node: &Node) {
    let Node::Str(name) = node else { return import.unsupported(key, "expected a path") };
    let text = beside(&import.path, name).and_then(|path| tunesmith_base::files::read_text(&path, MAX_TEMPLATE).ok());
    if text.is_some_and(|text| text.contains("messages")) {
        import.put(key, "data.template_path", node.clone(), "");
    } else {
        let why = "a template there writes `system` and `user`, here `messages`: the model's own is used; write one, or set data.chat_template";
        import.unsupported(key, why);
    }
}

/// Defaults of SFT-Play that differ from ours.
fn defaults(import: &mut Import) {
    let adapts = !matches!(import.written("tuning.mode"), Some(Node::Str(mode)) if mode == "full");
    let usual = [
        ("tuning.lora.r", Node::Int(32), adapts),
        ("tuning.lora.lora_alpha", Node::Int(32), adapts),
        ("tuning.lora.lora_dropout", Node::Float(0.05), adapts),
        ("model.max_seq_len", Node::Int(512), import.get(&["block_size"]).is_none()),
        ("train.weight_decay", Node::Float(0.01), true),
        ("train.save_total_limit", Node::Int(2), true),
        ("train.batch_size", Node::Int(1), true),
        ("train.grad_accum", Node::Int(8), true),
    ];
    for (key, node, wanted) in usual {
        if wanted && import.written(key).is_none() {
            import.default(key, node, if key == "train.grad_accum" { "its choice with 20 GB" } else { "its default" });
        }
    }
}

/// Reads a file after its includes, which lie in the current directory or beside the file that names them.
fn include(path: &Path, own: Vec<(String, Node)>, stack: &mut Vec<PathBuf>) -> Result<Vec<(String, Node)>> {
    let mut below = Vec::new();
    let names = match own.iter().find(|(key, _)| key == "include").map(|(_, node)| node) {
        Some(Node::Str(name)) => vec![name.clone()],
        Some(Node::List(items)) => {
            items.iter().filter_map(|item| if let Node::Str(name) = item { Some(name.clone()) } else { None }).collect()
        }
        _ => Vec::new(),
    };
    for name in names {
        let fail = |why: &str| Error::config(format!("{}: include: {name}: {why}", path.display()));
        let file = beside(path, &name)
            .or_else(|| Path::new(&name).file_name().and_then(|file| beside(path, file.to_str()?)))
            .ok_or_else(|| fail("no such file, from here or beside it"))?;
        if stack.contains(&file) || stack.len() >= MAX_DEPTH {
            return Err(fail("includes itself, or more than 16 levels").hint("break the circle"));
        }
        stack.push(file.clone());
        let other = include(&file, entries(&file)?, stack)?;
        stack.pop();
        below = merge(below, other);
    }
    Ok(merge(below, own.into_iter().filter(|(key, _)| key != "include").collect()))
}

fn merge(mut below: Vec<(String, Node)>, above: Vec<(String, Node)>) -> Vec<(String, Node)> {
    for (key, node) in above {
        match below.iter().position(|(name, _)| *name == key) {
            Some(at) => {
                let old = std::mem::replace(&mut below[at].1, Node::Null);
                below[at].1 = match (old, node) {
                    (Node::Map(old), Node::Map(new)) => Node::Map(merge(old, new)),
                    (_, node) => node,
                };
            }
            None => below.push((key, node)),
        }
    }
    below
}

/// Flattens nested mappings to dotted keys; a DeepSpeed mapping stays one value.
fn flatten(section: &str, entries: Vec<(String, Node)>, out: &mut Vec<(String, Node)>) {
    for (key, node) in entries {
        let path = if section.is_empty() { key } else { format!("{section}.{key}") };
        match node {
            Node::Map(inner) if !inner.is_empty() && !path.ends_with("deepspeed") => flatten(&path, inner, out),
            node => out.push((path, node)),
        }
    }
}

/// Validation rows: files, or a share of the training rows.
fn rows(import: &mut Import) -> bool {
    let files = import.written("data.val_path").is_some();
    for key in ["data.split", "data.split.val_ratio", "data.split.test_ratio", "data.split.train_ratio"] {
        if import.get(&[key]).is_none() {
            continue;
        }
        match key {
            _ if files => import.not_needed(key, "the files are split already"),
            "data.split.train_ratio" => import.not_needed(key, "all rows that are not held out are trained on"),
            "data.split.test_ratio" => import.unsupported(key, "test rows come from data.test_path"),
            _ => {
                if let Some((_, node)) = import.get(&[key]) {
                    import.put(key, "data.split", node, "");
                }
            }
        }
    }
    files || import.written("data.split").is_some()
}

/// Domain-adaptive pretraining: raw text in packed blocks, possibly mixed with chats.
fn pretraining(import: &mut Import) {
    let pretrains = ["task_mode", "mode"]
        .iter()
        .any(|key| import.word(key).is_some_and(|word| word.starts_with("cpt") || word.starts_with("dapt")));
    for key in ["task_mode", "mode"] {
        if import.get(&[key]).is_some() {
            let why = if pretrains {
                "raw text is learned whole, chats as data.loss_on says"
            } else {
                "this is what tunesmith does"
            };
            import.changed(key, if pretrains { "data.packing: true" } else { "" }, why);
        }
    }
    if pretrains {
        import.default("data.packing", Node::Bool(true), "blocks are filled");
        import.default("data.truncation", Node::Str("split".into()), "long texts fill several blocks");
    }
    if let Some((key, node)) = import.get(&["block_size"]) {
        if pretrains && import.written("model.max_seq_len").is_none() {
            import.put(&key, "model.max_seq_len", node, "the length of a packed row");
        } else {
            import.changed(&key, "", WINDOWS);
        }
    }
    let Some((key, Node::List(items))) = import.get(&["datasets"]) else { return };
    let mut sets = Vec::new();
    for (number, item) in items.into_iter().enumerate() {
        let Node::Map(entries) = item else {
            import.unsupported(&format!("{key}[{number}]"), "expected a mapping with a path");
            continue;
        };
        let mut set = Vec::new();
        for (name, node) in entries {
            let from = format!("{key}[{number}].{name}");
            match (name.as_str(), &node) {
                ("path" | "weight", _) => set.push((name, node)),
                ("name", _) => import.not_needed(&from, "the path tells the set"),
                ("type", Node::Str(word)) if word == "cpt" || word == "text" => {
                    set.push(("format".to_owned(), Node::Str("text".into())));
                }
                ("type", Node::Str(word)) if word == "chat" => {
                    import.not_needed(&from, "recognised by the fields of the rows");
                }
                _ => import.unsupported(&from, "unknown to this import"),
            }
        }
        sets.push(Node::Map(set));
    }
    import.put(&key, "data.datasets", Node::List(sets), "");
    import.take_back("data.train_path", "data.train_path", "data.datasets replaces it");
}
