//! Checks configurations of DeepSpeed and FSDP that a setting names or holds.
use super::write;
use std::path::Path;
use tunesmith_base::error::Error;
use tunesmith_config::{self as config, Node};

pub(super) const DEEPSPEED: &str = "train.deepspeed";
pub(super) const FSDP: &str = "train.fsdp";
pub(super) const FSDP_CONFIG: &str = "train.fsdp_config";

/// Why this version refuses a configuration of DeepSpeed or FSDP under `key`; `None` if it takes it, or for any other key.
pub(super) fn refusal(key: &str, node: &Node) -> Option<Error> {
    let text = match key {
        DEEPSPEED => format!("train: {{deepspeed: {}}}\n", write::flow(node)),
        FSDP => format!("train: {{fsdp: {}}}\n", write::flow(node)),
        FSDP_CONFIG => format!("train: {{fsdp: true, fsdp_config: {}}}\n", write::flow(node)),
        _ => return None,
    };
    config::load_text(Path::new(key), &text).err()
}
