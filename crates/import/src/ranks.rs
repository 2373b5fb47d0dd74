//! Distributed training as Transformers' trainer configures it: DeepSpeed files, `fsdp` and `fsdp_config`.
use super::import::{Import, is_off_or_zero};
use super::refusal::{DEEPSPEED, FSDP, FSDP_CONFIG, refusal};
use super::source_file::beside;
use std::path::Path;
use tunesmith_config::Node;

/// Why tensor, pipeline and sequence parallelism are not supported.
pub(super) const SPLIT: &str =
    "tensor, pipeline and sequence parallelism are not supported; train.strategy says how ranks share a model";
/// Why keys about starting processes are not imported.
pub(super) const LAUNCHED: &str =
    "ranks are started by torchrun, mpirun, srun, Kubernetes or `tunesmith launch` (docs/distributed.md)";
/// Why a key that asks for DDP needs no setting.
pub(super) const DDP: &str = "train.strategy: auto is ddp where several ranks are started";
const PINNED: &str = "host memory is pinned";

/// Imports `deepspeed`: the path of a file, or the mapping itself.
pub(super) fn deepspeed(import: &mut Import, key: &str, node: &Node) {
    match node {
        off if is_off_or_zero(off) => import.not_needed(key, "off"),
        Node::Str(name) => match (file(import, name), stage(name)) {
            (Some((path, why)), _) => import.put(key, DEEPSPEED, path, why),
            (None, Some(strategy)) => {
                let why = "the file is missing, its name says this; train.deepspeed reads the file unchanged";
                import.put(key, "train.strategy", Node::Str(strategy.to_owned()), why);
            }
            (None, None) => import.unsupported(key, "the file is missing; train.deepspeed reads it unchanged"),
        },
        Node::Map(_) => import.put(key, DEEPSPEED, node.clone(), ""),
        _ => import.unsupported(key, "expected a file or a mapping"),
    }
}

/// The path of a file that the source names, and a comment if it is next to the source.
fn file(import: &Import, name: &str) -> Option<(Node, &'static str)> {
    let path = beside(&import.path, name).filter(|path| path.is_file())?;
    let why = if path == Path::new(name) { "" } else { "found next to the source" };
    Some((Node::Str(path.to_str()?.to_owned()), why))
}

/// The strategy that a file name such as `ds_z3_config.json`, `zero2.json` or `stage1.json` asks for.
fn stage(name: &str) -> Option<&'static str> {
    let name = Path::new(name).file_name()?.to_str()?.to_lowercase();
    name.split(|c: char| !c.is_ascii_alphanumeric())
        .find_map(|word| {
            let number = ["zero", "stage", "z"].into_iter().find_map(|start| word.strip_prefix(start))?;
            ["ddp", "zero1", "zero2", "zero3"].into_iter().zip(["0", "1", "2", "3"]).find(|(_, n)| *n == number)
        })
        .map(|(strategy, _)| strategy)
}

/// Imports `fsdp` and `fsdp_config`. With `alone`, `fsdp_config` switches FSDP on without `fsdp`. `dp_replicate_size` above 1 becomes
/// `HYBRID_SHARD`.
pub(super) fn fsdp(import: &mut Import, alone: bool) {
    let (words, config) = (import.get(&["fsdp"]), import.get(&["fsdp_config"]));
    let on = |found: Option<&(String, Node)>| found.is_some_and(|(_, node)| !is_off_or_zero(node));
    let replicas = match import.get(&["dp_replicate_size"]) {
        Some((key, Node::Int(copies))) if copies > 1 => Some(key),
        Some((key, _)) => {
            import.not_needed(&key, "off");
            None
        }
        None => None,
    };
    for key in ["fsdp_version", "fsdp_final_state_dict_type"] {
        if import.get(&[key]).is_some() {
            import.not_needed(key, "there is one FSDP, and saved weights are whole");
        }
    }
    let asked = on(words.as_ref()) || alone && on(config.as_ref());
    if !asked {
        for (key, _) in [words, config].into_iter().flatten() {
            import.not_needed(&key, "FSDP is off");
        }
        if let Some(key) = replicas {
            import.changed(&key, "", DDP);
        }
        return;
    }
    match words.filter(|(_, node)| !is_off_or_zero(node)) {
        Some((key, Node::List(items))) if replicas.is_none() => {
            let words = items.into_iter().filter_map(|item| if let Node::Str(word) = item { Some(word) } else { None });
            import.put(&key, FSDP, Node::Str(words.collect::<Vec<_>>().join(" ")), "");
        }
        Some((key, node)) if replicas.is_none() => import.put(&key, FSDP, node, ""),
        Some((key, _)) => import.put(&key, FSDP, Node::Bool(true), ""),
        None => import.default(FSDP, Node::Bool(true), "fsdp_config is given"),
    }
    let mut kept = match config {
        Some((key, Node::Str(name))) => {
            match file(import, &name) {
                Some((path, why)) => import.put(&key, FSDP_CONFIG, path, why),
                None => import.unsupported(&key, "the file is missing; train.fsdp_config reads it unchanged"),
            }
            return;
        }
        Some((key, Node::Map(entries))) => settings(import, &key, entries),
        Some((key, _)) => {
            import.unsupported(&key, "expected a file or a mapping");
            return;
        }
        None => Vec::new(),
    };
    if let Some(key) = replicas {
        kept.retain(|(name, _)| name != "sharding_strategy" && name != "reshard_after_forward");
        kept.push(("sharding_strategy".to_owned(), Node::Str("HYBRID_SHARD".to_owned())));
        import.changed(&key, "train.fsdp_config: sharding_strategy", "each machine has a copy of the frozen weights");
    }
    if kept.is_empty() {
        if import.get(&["fsdp_config"]).is_some() {
            import.not_needed("fsdp_config", "no setting is left in it");
        }
    } else {
        import.put("fsdp_config", FSDP_CONFIG, Node::Map(kept), "");
    }
}

/// The entries of `fsdp_config` that ours takes, without Accelerate's prefix `fsdp_`.
fn settings(import: &mut Import, key: &str, entries: Vec<(String, Node)>) -> Vec<(String, Node)> {
    let mut kept: Vec<(String, Node)> = Vec::new();
    for (name, node) in entries {
        let (from, plain) = (format!("{key}.{name}"), name.strip_prefix("fsdp_").unwrap_or(&name));
        match (plain, &node) {
            (_, Node::Null) => import.not_needed(&from, "empty"),
            ("cpu_offload_pin_memory", _) => import.not_needed(&from, PINNED),
            ("final_state_dict_type", _) => import.not_needed(&from, "saved weights are whole"),
            ("mixed_precision_policy", _) => import.not_needed(&from, "train.bf16 and train.fp16 decide it"),
            // It takes precedence over `gradient_checkpointing: false`.
            ("activation_checkpointing", Node::Bool(true)) => {
                import.put(&from, "train.gradient_checkpointing", node, "");
                if import.get(&["gradient_checkpointing"]).is_some() {
                    import.not_needed("gradient_checkpointing", "fsdp_config says it");
                }
            }
            _ => {
                let one = Node::Map(vec![(plain.to_owned(), node.clone())]);
                match refusal(FSDP_CONFIG, &one) {
                    _ if kept.iter().any(|(name, _)| name == plain) => import.not_needed(&from, "given twice"),
                    None => kept.push((plain.to_owned(), node)),
                    Some(error) => import.unsupported(&from, error.message()),
                }
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::stage;

    #[test]
    fn names_of_shipped_files_tell_their_stage() {
        let stages = [
            ("deepspeed_configs/zero1.json", Some("zero1")),
            ("zero3_bf16_cpuoffload_all.json", Some("zero3")),
            ("examples/deepspeed/ds_z0_config.json", Some("ddp")),
            ("ds_z2_offload_config.json", Some("zero2")),
            ("ds_config_stage3.json", Some("zero3")),
            ("zero/ds_config.json", None),
            ("zero12.json", None),
            ("", None),
        ];
        for (name, expected) in stages {
            assert_eq!(stage(name), expected, "{name}");
        }
    }
}
