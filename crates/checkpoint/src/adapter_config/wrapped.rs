//! Writes the module names of an adapter on the language model of a multimodal model.
use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use tunesmith_config::arch::{ENCODER_DECODER, Wrapper};
use tunesmith_model::targets::Placement;

/// The module names of such an adapter. They are full paths, because a bare name would also match modules of the vision
/// tower.
#[derive(Debug, Clone, PartialEq)]
pub struct Wrapped {
    pub(super) wrapper: &'static Wrapper,
    target_modules: Value,
    modules_to_save: Vec<String>,
}

impl Wrapped {
    /// `beside` are the modules of encoder and connector that are trained as a whole, by their own names.
    pub(super) fn new(
        wrapper: &'static Wrapper,
        placements: &[Placement],
        saved: &[String],
        beside: BTreeSet<String>,
    ) -> Self {
        let named = placements.iter().filter(|placement| placement.experts.is_none());
        let names: Vec<&str> = named.map(|placement| placement.module.as_str()).collect();
        // Grouped by their names within a block. If every block has the same modules, one regular expression names them
        // all.
        let mut blocks: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for name in &names {
            let place = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
            if let Some((layer, module)) = place {
                blocks.entry(module).or_default().insert(layer);
            }
        }
        let all: BTreeSet<&str> = blocks.values().flatten().copied().collect();
        let listed: usize = blocks.values().map(BTreeSet::len).sum();
        let alike = !blocks.is_empty() && listed == names.len() && blocks.values().all(|layers| *layers == all);
        let whole = all.iter().filter_map(|layer| layer.parse::<usize>().ok()).max() == Some(all.len().wrapping_sub(1));
        let target_modules = if alike && whole {
            let modules: Vec<String> = blocks.keys().map(|module| regex::escape(module)).collect();
            let layers = regex::escape(&wrapper.module("model.layers"));
            format!(r"{layers}\.\d+\.({})", modules.join("|")).into()
        } else {
            names.iter().map(|name| wrapper.module(name)).collect::<BTreeSet<_>>().into_iter().collect()
        };
        let module =
            |tensor: &String| wrapper.module(tensor.rsplit_once('.').map_or(tensor.as_str(), |(name, _)| name));
        let modules_to_save = saved.iter().map(module).chain(beside).collect::<BTreeSet<_>>().into_iter().collect();
        Self { wrapper, target_modules, modules_to_save }
    }

    /// Replaces the module names in `fields` by full paths.
    pub(super) fn write(&self, fields: &mut Map<String, Value>) {
        for (key, value) in &mut *fields {
            match (key.as_str(), value) {
                // GPT-2's matrices are transposed, also in a multimodal model.
                ("fan_in_fan_out", value) => *value = (*self.wrapper == ENCODER_DECODER).into(),
                ("target_modules", value) => *value = self.target_modules.clone(),
                ("exclude_modules" | "layers_to_transform" | "layers_pattern", value) => *value = Value::Null,
                ("modules_to_save", value) if !self.modules_to_save.is_empty() => *value = json!(self.modules_to_save),
                ("feedforward_modules" | "target_parameters", Value::Array(names)) => {
                    for name in names {
                        *name = name.as_str().map_or(Value::Null, |name| self.wrapper.module(name).into());
                    }
                }
                ("feedforward_modules", Value::String(pattern)) => *pattern = self.wrapper.naming.pattern(pattern),
                ("rank_pattern" | "alpha_pattern", Value::Object(patterns)) => {
                    let own = std::mem::take(patterns);
                    patterns.extend(own.into_iter().map(|(key, value)| (self.wrapper.naming.pattern(&key), value)));
                }
                _ => {}
            }
        }
    }
}
