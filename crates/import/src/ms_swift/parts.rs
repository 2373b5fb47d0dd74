//! Functions that import single keys of ms-swift, where the value needs more than another name.
use crate::import::Import;
use crate::nodes::{entries, joined, texts};
use crate::ranks;
use std::path::Path;
use tunesmith_config::{Node, is_hub_name};

/// Our value of `tuning.lora.target_modules`; `None` for words such as `all-embedding`, for which there is none.
pub(super) fn targets(node: &Node) -> Option<Node> {
    let words = texts(node);
    match &words[..] {
        [all] if all == "all-linear" => Some(Node::Str("auto".into())),
        words if words.iter().any(|word| word.starts_with("all-")) => None,
        _ => Some(node.clone()),
    }
}

pub(super) fn model(import: &mut Import, key: &str, node: &Node) {
    let Node::Str(name) = node else { return import.unsupported(key, "expected a name or a folder") };
    let there = crate::source_file::beside(&import.path, name).is_some();
    let scope = is_hub_name(name) && !there && !import.is_on("use_hf");
    import.put(
        key,
        "model.name",
        node.clone(),
        if scope { "of the Hugging Face Hub, there of ModelScope" } else { "" },
    );
}

pub(super) fn tokens(import: &mut Import, key: &str, node: &Node) {
    if texts(node).iter().any(|token| Path::new(token).extension().is_some_and(|end| end == "txt")) {
        return import.unsupported(key, "write the tokens themselves into tuning.new_tokens");
    }
    import.put(key, "tuning.new_tokens", joined(node), "");
}

pub(super) fn adapters(import: &mut Import, key: &str, node: &Node) {
    match &texts(node)[..] {
        [] => import.not_needed(key, "empty"),
        [one] => import.put(key, "tuning.adapter", Node::Str(one.clone()), ""),
        _ => import.unsupported(key, "one adapter is trained on: tuning.adapter; others lie below it: tuning.adapters"),
    }
}

pub(super) fn init_weights(import: &mut Import, key: &str, node: &Node) {
    let ours = match node {
        Node::Str(word) if word == "true" => Node::Bool(true),
        Node::Str(word) if word == "false" => Node::Bool(false),
        other => other.clone(),
    };
    import.put(key, "tuning.lora.init_lora_weights", ours, "");
}

/// Imports `model_kwargs` and `ENV`, which hold environment variables. Some of them limit the size of images.
pub(super) fn environment(import: &mut Import, key: &str, node: &Node) {
    let Some(entries) = entries(node) else { return import.unsupported(key, "expected a mapping") };
    import.not_needed(key, "each of its keys has a line of its own");
    for (name, value) in entries {
        let from = format!("{key}.{name}");
        match name.to_uppercase().as_str() {
            "MAX_PIXELS" => import.put(&from, "vision.max_pixels", value, ""),
            "MIN_PIXELS" => import.put(&from, "vision.min_pixels", value, ""),
            "IMAGE_MAX_TOKEN_NUM" | "IMAGE_MIN_TOKEN_NUM" => {
                import.unsupported(
                    &from,
                    "tokens of an image: set vision.max_pixels and min_pixels (Qwen3-VL: 1,024 pixels a token)",
                );
            }
            "CUDA_VISIBLE_DEVICES" | "NPROC_PER_NODE" | "NNODES" | "NODE_RANK" | "MASTER_ADDR" | "MASTER_PORT" => {
                import.not_needed(&from, ranks::LAUNCHED);
            }
            "PYTORCH_CUDA_ALLOC_CONF" | "OMP_NUM_THREADS" | "USE_HF" => {
                import.not_needed(&from, "it is about Python's programs");
            }
            _ => import.unsupported(&from, "a variable of the environment that nothing reads here"),
        }
    }
}

pub(super) fn shuffle(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Bool(false) => import.put(key, "data.shuffle", Node::Bool(false), ""),
        _ => import.not_needed(key, "the default here too"),
    }
}

pub(super) fn chat_template(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Bool(false) => import.unsupported(key, "rows of raw text have the field text: data.format: text"),
        _ => import.not_needed(key, "the default here too"),
    }
}

/// Imports `loss_scale`, which reads `STRATEGY+WORDS`: which turns carry the loss, and weights for parts of them.
pub(super) fn loss_scale(import: &mut Import, key: &str, node: &Node) {
    let Node::Str(word) = node else { return import.unsupported(key, "expected a word") };
    let (first, rest) = word.split_once('+').unwrap_or((word, ""));
    let ours = match first {
        "default" => "assistant",
        "last_round" => "completion",
        "all" => "all",
        _ => return import.unsupported(key, "parts of a turn have one weight; rows may have weights of their own"),
    };
    let why = if rest.is_empty() { "" } else { "without what follows the +: parts of a turn have one weight" };
    import.put(key, "data.loss_on", Node::Str(ours.into()), why);
}

pub(super) fn packing_length(import: &mut Import, key: &str, node: &Node) {
    match import.get(&["max_length"]) {
        Some((_, length)) if length == *node => import.not_needed(key, "packed rows are as long as model.max_seq_len"),
        _ => import.unsupported(key, "packed rows are as long as model.max_seq_len"),
    }
}

/// Imports an optimizer of ms-swift's plugins.
pub(super) fn plugin(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Str(word) if word == "muon" => import.put(key, "train.optim", node.clone(), ""),
        Node::Str(word) if ["default", "lorap", "multimodal"].contains(&word.as_str()) => {
            import.not_needed(key, "the rates say it");
        }
        _ => import.unsupported(key, "this optimizer is not part of this version"),
    }
}

pub(super) fn best(import: &mut Import, key: &str, node: &Node) {
    let ours = match node {
        Node::Str(word) if word == "rouge-l" => Node::Str("rougeL".into()),
        Node::Str(word) if word == "loss" => Node::Str("eval_loss".into()),
        other => other.clone(),
    };
    import.put(key, "train.metric_for_best_model", ours, "");
}

pub(super) fn fsdp(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Str(word) if word == "fsdp2" => import.put(key, "train.strategy", Node::Str("fsdp".into()), ""),
        _ => import.unsupported(key, "set train.strategy: fsdp, or train.fsdp and train.fsdp_config"),
    }
}
