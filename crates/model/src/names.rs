//! Names of modules and tensors, as Transformers 5 and PEFT have them.
use tunesmith_config::arch::{EMBEDDING, LM_HEAD};

/// The name of a tensor in Transformers 5, and so in PEFT. Checkpoints of Mixtral and Granite 4 have older names.
pub fn peft_name(tensor: &str) -> String {
    match tensor.split_once(".block_sparse_moe.") {
        Some((block, rest)) if is_mixtral(rest) => format!("{block}.mlp.{rest}"),
        Some(_) => tensor.replace(".block_sparse_moe.router.layer", ".block_sparse_moe.router"),
        None => tensor.to_owned(),
    }
}

/// Whether the part of a name after `block_sparse_moe` is one of Mixtral's; otherwise it is one of Granite 4's.
fn is_mixtral(rest: &str) -> bool {
    let of_expert = rest.strip_prefix("experts.").and_then(|rest| Some(rest.split_once('.')?.1));
    let named = |part: &str| ["w1", "w2", "w3"].iter().any(|name| part.starts_with(name));
    rest.starts_with("gate") || rest.starts_with("e_score_correction_bias") || of_expert.is_some_and(named)
}

/// Whether a tensor has a row for each token of the vocabulary.
pub fn is_vocabulary(name: &str) -> bool {
    [EMBEDDING, LM_HEAD].contains(&name)
}

/// PEFT's name for the trained rows of such a tensor (`trainable_token_indices`).
pub fn token_rows(name: &str) -> String {
    format!("{}.token_adapter.trainable_tokens_delta", name.trim_end_matches(".weight"))
}

/// PEFT's rule for an entry of a list such as `target_modules`: it is the whole name, or the end of the name after a
/// dot.
pub fn ends_with_module(name: &str, entry: &str) -> bool {
    name.strip_suffix(entry).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}
