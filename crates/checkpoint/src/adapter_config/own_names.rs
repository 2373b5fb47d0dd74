//! Writes the module names of an adapter on a family whose names in Transformers differ from the engine's (GPT-2).
use serde_json::{Map, Value};

use tunesmith_config::arch::ModuleNames;

/// Replaces the engine's names in `fields` by those of Transformers, and sets `fan_in_fan_out` to whether the matrices
/// are transposed there.
pub(super) fn write(names: &ModuleNames, fields: &mut Map<String, Value>) {
    let Some(naming) = names.naming else { return };
    let module = |name: &str| if name == "embed_tokens" { names.embedding.to_owned() } else { naming.stored(name) };
    for (key, value) in fields {
        match (key.as_str(), value) {
            ("fan_in_fan_out", value) => *value = names.transposed.into(),
            (
                "target_modules" | "exclude_modules" | "modules_to_save" | "feedforward_modules" | "target_parameters",
                Value::Array(modules),
            ) => {
                for found in &mut *modules {
                    *found = found.as_str().map_or(Value::Null, |name| module(name).into());
                }
                modules.sort_by(|one, other| one.as_str().cmp(&other.as_str()));
            }
            ("rank_pattern" | "alpha_pattern", Value::Object(patterns)) => {
                let own = std::mem::take(patterns);
                patterns.extend(own.into_iter().map(|(key, value)| (naming.pattern(&key), value)));
            }
            ("trainable_token_indices", Value::Object(modules)) => {
                let own = std::mem::take(modules);
                modules.extend(own.into_iter().map(|(key, value)| (module(&key), value)));
            }
            _ => {}
        }
    }
}
