//! Keys that all toolkits share with Transformers: optimizers, schedules, chat templates, validation and checkpoints; and reasons that
//! several tables give.
use super::import::Import;
use super::nodes::{entries, texts};
use tunesmith_config::foreign::{is_off, one_device};
use tunesmith_config::{ConfigValue, Node, Optim};

pub(super) const REACHED: &str = "gradients of all trained parameters are reduced, used or not";
pub(super) const NO_LOADER: &str = "rows are tokenized before training, there is no data loader";
pub(super) const UPLOAD: &str = "training uploads nothing; use `tunesmith export --push`";
pub(super) const MEDIA: &str = "videos and audio are not part of this version";
pub(super) const PIXELS: &str = "the checkpoint's preprocessor_config.json says how images are resized";
pub(super) const PREFERENCES: &str = "preference and reinforcement training are not part of this version";

/// Imports a key that freezes the image encoder. That is the default of ours too, so only `false` becomes a setting.
pub(super) fn freeze_vision(import: &mut Import, key: &str, node: &Node) {
    frozen(import, key, node, &["tuning.freeze_vision"]);
}

/// As [`freeze_vision`], for the connector.
pub(super) fn freeze_connector(import: &mut Import, key: &str, node: &Node) {
    frozen(import, key, node, &["tuning.freeze_connector"]);
}

/// As [`freeze_vision`], for both the image encoder and the connector.
pub(super) fn freeze_both(import: &mut Import, key: &str, node: &Node) {
    frozen(import, key, node, &["tuning.freeze_vision", "tuning.freeze_connector"]);
}

fn frozen(import: &mut Import, key: &str, node: &Node, ours: &[&str]) {
    if *node != Node::Bool(false) {
        return import.not_needed(key, "image encoder and connector of a multimodal model are frozen by default");
    }
    for ours in ours {
        import.put(key, ours, Node::Bool(false), "");
    }
}

pub(super) fn trust_remote_code(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Bool(true) => import.changed(key, "", "code that comes with a model is never run"),
        _ => import.not_needed(key, "off"),
    }
}

/// Imports a `device_map` or a device.
pub(super) fn device(import: &mut Import, key: &str, node: &Node) {
    match one_device(node) {
        _ if is_off(node) => import.not_needed(key, "empty"),
        Some(device) => {
            let why = if *node == Node::Str(device.clone()) { "" } else { "a model is on one device" };
            import.put(key, "model.device", Node::Str(device), why);
        }
        None => {
            import.unsupported(key, "a model is on one device; train.strategy: fsdp shares a large one among ranks");
        }
    }
}

pub(super) fn overwrite(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Bool(true) => import.changed(key, "", "use `train --overwrite`"),
        _ => import.not_needed(key, "off"),
    }
}

pub(super) fn save_only_model(import: &mut Import, key: &str, _: &Node) {
    import.changed(key, "", "a checkpoint contains all that an exact resume needs");
}

/// Imports the optimizer under the source's `key`.
pub(super) fn optimizer(import: &mut Import, key: &str, node: &Node) {
    let Node::Str(word) = node else { return import.unsupported(key, "expected a word") };
    let (name, why) = match word.as_str() {
        "adamw_hf" | "adamw_apex_fused" | "adamw_torch_xla" | "adamw_torch_npu_fused" => {
            ("adamw_torch", "the same update")
        }
        "adamw_torch_8bit" | "ao_adamw_8bit" => ("adamw_8bit", "as bitsandbytes does it, not torchao"),
        "adamw_torch_4bit" | "ao_adamw_4bit" => ("adamw_8bit", "eight bits, as bitsandbytes does it, not four"),
        "paged_adamw_32bit" | "paged_adamw" => ("adamw_torch", "the same update; there is no paging here"),
        "paged_lion_32bit" => ("lion", "the same update; there is no paging here"),
        other => (other, ""),
    };
    import.put(key, "train.optim", Node::Str(name.to_owned()), why);
}

/// Imports the schedule and its warm-up. `default` is the toolkit's schedule. Schedule-free optimizers get a constant schedule.
pub(super) fn schedule(import: &mut Import, default: &str) {
    let given = import.get(&["lr_scheduler_type", "lr_scheduler", "train.lr_scheduler_type"]);
    let free = import.written("train.optim").is_some_and(|node| Optim::from_node(node).is_ok_and(Optim::averages));
    let warms: Vec<(String, Node)> = ["warmup_steps", "warmup_ratio", "train.warmup_steps", "train.warmup_ratio"]
        .into_iter()
        .filter_map(|key| import.get(&[key]))
        .filter(|(_, node)| !matches!(node, Node::Int(0)) && !matches!(node, Node::Float(zero) if *zero == 0.0))
        .collect();
    let own = match &given {
        Some((_, Node::Str(word))) => word.clone(),
        _ => default.to_owned(),
    };
    let kept = if warms.is_empty() { "constant" } else { "constant_with_warmup" };
    let name = if free && !own.starts_with("constant") { kept.to_owned() } else { own.clone() };
    let why = if name == own { "" } else { "the optimizer takes the place of a schedule" };
    match given {
        Some((key, Node::Str(_))) => import.put(&key, "train.lr_scheduler_type", Node::Str(name.clone()), why),
        Some((key, node)) => import.put(&key, "train.lr_scheduler_type", node, ""),
        None if why.is_empty() => import.default("train.lr_scheduler_type", Node::Str(name.clone()), "its default"),
        None => import.default("train.lr_scheduler_type", Node::Str(name.clone()), why),
    }
    // If both are given, Transformers uses the number of steps.
    let steps = warms.iter().any(|(key, _)| key.ends_with("warmup_steps"));
    for (key, node) in warms {
        let share = key.ends_with("warmup_ratio");
        if name == "constant" {
            import.not_needed(&key, "the schedule `constant` has no warm-up; Transformers ignores it too");
        } else if share && steps {
            import.not_needed(&key, "the number of steps takes precedence");
        } else {
            let fraction = matches!(node, Node::Float(part) if part < 1.0);
            let ours = if share || fraction { "train.warmup_ratio" } else { "train.warmup_steps" };
            import.put(&key, ours, node, if fraction && !share { "a share of all steps" } else { "" });
        }
    }
}

/// Imports a chat template by its name in the toolkits.
pub(super) fn template(import: &mut Import, key: &str, node: &Node) {
    let Node::Str(word) = node else { return import.unsupported(key, "expected a word") };
    let builtin = match word.as_str() {
        "tokenizer_default" | "tokenizer" | "default_tokenizer" => {
            return import.not_needed(key, "the tokenizer's own is the default");
        }
        "chatml" | "llama3" | "gemma" => Some(word.as_str()),
        "mistral" | "mistral_v1" => Some("mistral"),
        "phi" | "phi_3" | "phi_35" | "phi3" => Some("phi"),
        _ => None,
    };
    match builtin {
        Some(name) => import.put(key, "data.chat_template", Node::Str(name.to_owned()), if name == word { "" } else { "the built-in one" }),
        None => import.changed(
            key,
            "",
            "the tokenizer's own template is used; look at the rows with `tunesmith data`, and set data.template_path to a \
             Jinja file if the model has none",
        ),
    }
}

/// Imports validation rows given as a share of the training rows; a number of rows is not supported. Returns whether there are any.
pub(super) fn validation(import: &mut Import, key: &str) -> bool {
    match import.get(&[key]) {
        Some((_, Node::Float(share))) if share > 0.0 && share < 1.0 => {
            import.put(key, "data.split", Node::Float(share), "");
            true
        }
        Some((_, Node::Int(0) | Node::Float(0.0))) => {
            import.not_needed(key, "no validation rows");
            false
        }
        Some(_) => {
            import.unsupported(key, "a number of rows: set data.split to their share, or data.val_path");
            false
        }
        None => false,
    }
}

/// Imports when a run validates and saves: `train.eval_*`, `train.save_*` and `load_best_model_at_end`. `eval` and `save` are the toolkit's
/// default strategies.
pub(super) fn moments(import: &mut Import, eval: &str, save: &str, validates: bool) {
    let eval_steps = import.get(&["eval_steps", "train.eval_steps"]);
    let strategy =
        import.get(&["eval_strategy", "evaluation_strategy", "train.eval_strategy", "train.evaluation_strategy"]);
    let off = |node: &Node| matches!(node, Node::Bool(false)) || matches!(node, Node::Str(word) if word == "no");
    let evaluates = strategy.as_ref().map_or(eval != "no", |(_, node)| !off(node));
    if let Some((key, node)) = &strategy {
        match (off(node), validates) {
            (true, _) => import.put(key, "train.eval_strategy", Node::Str("no".into()), ""),
            (false, true) => import.put(key, "train.eval_strategy", node.clone(), ""),
            (false, false) => import.changed(key, "", "there are no validation rows"),
        }
    } else if validates && eval_steps.is_some() {
        import.default("train.eval_strategy", Node::Str("steps".into()), "eval_steps is given");
    } else if validates && eval != "no" {
        import.default("train.eval_strategy", Node::Str(eval.into()), "its default");
    }
    if let Some((key, node)) = eval_steps {
        let unused = !validates || strategy.is_some() && !evaluates;
        steps(import, &key, "train.eval_steps", node, unused.then_some("nothing is validated"));
    }
    if let Some((key, node)) = import.get(&["save_strategy", "train.save_strategy"]) {
        let node = if off(&node) { Node::Str("no".into()) } else { node };
        import.put(&key, "train.save_strategy", node, "");
    } else if import.get(&["save_steps", "train.save_steps"]).is_none() && save != "steps" {
        import.default("train.save_strategy", Node::Str(save.into()), "its default");
    }
    if let Some((key, node)) = import.get(&["save_steps", "train.save_steps"]) {
        steps(import, &key, "train.save_steps", node, None);
    }
    if let Some((key, node)) = import.get(&["load_best_model_at_end", "train.load_best_model_at_end"]) {
        match node {
            Node::Bool(true) if !validates || (strategy.is_some() && !evaluates) => {
                import.changed(&key, "", "nothing is validated, so none is known to be best");
            }
            node => import.put(&key, "train.load_best_model_at_end", node, ""),
        }
    }
}

/// Imports a number of steps, or a share of all steps.
fn steps(import: &mut Import, key: &str, ours: &str, node: Node, unused: Option<&str>) {
    match (unused, node) {
        (Some(why), _) => import.not_needed(key, why),
        (None, node) => import.put(key, ours, node, ""),
    }
}

pub(super) fn scheduler_arguments(import: &mut Import, key: &str, node: &Node) {
    match entries(node) {
        Some(entries) => import.put(key, "train.lr_scheduler_kwargs", Node::Map(entries), ""),
        None => import.unsupported(key, "expected a mapping"),
    }
}

pub(super) fn report_to(import: &mut Import, key: &str, node: &Node) {
    let words = texts(node);
    let tensorboard = words.iter().any(|word| word == "tensorboard" || word == "all");
    let others = words.iter().any(|word| word != "tensorboard" && word != "none");
    let why = if others { "others are not yet part of this version; report.html is written" } else { "" };
    import.put(key, "logging.tensorboard", Node::Bool(tensorboard), why);
}
