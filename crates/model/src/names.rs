//! Names of modules and tensors, as Transformers 5 and PEFT have them.
use tunesmith_config::arch::{EMBEDDING, LM_HEAD};

/// The name by which Transformers 5, and so PEFT, knows a tensor: Mixtral's checkpoints have an older one.
pub fn peft_name(tensor: &str) -> String {
    tensor.replace(".block_sparse_moe.", ".mlp.")
}

/// Whether a tensor has a row for each token of the vocabulary.
pub fn is_vocabulary(name: &str) -> bool {
    [EMBEDDING, LM_HEAD].contains(&name)
}

/// PEFT's name for the trained rows of such a tensor.
pub fn token_rows(name: &str) -> String {
    format!("{}.token_adapter.trainable_tokens_delta", name.trim_end_matches(".weight"))
}

/// PEFT's list rule: the name itself, or its end behind a dot.
pub fn ends_with_module(name: &str, entry: &str) -> bool {
    name.strip_suffix(entry).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}
