//! Warns about entries of `exclude_modules` that exclude nothing. PEFT warns if no module matches at all. Here an entry
//! that only names a part of the model, such as a block, counts as well, because it leaves nothing out in PEFT either.
use super::rules::Rules;
use super::{Targets, ends_with_module, peft_name, show};
use tunesmith_base::error::Result;
use tunesmith_config::TargetModules;
use tunesmith_config::arch::Arch;

impl Targets {
    /// A warning about entries of `exclude_modules` that match no linear module and no other one with weights; `None` if all do.
    ///
    /// # Errors
    /// As [`Targets::place`].
    pub fn idle_exclusions(&self, arch: &Arch) -> Result<Option<String>> {
        let Some(excluded) = &self.exclude_modules else { return Ok(None) };
        let linears = arch.linear_modules().into_iter().map(|linear| linear.name);
        let of_vision = arch.vision.iter().flat_map(|vision| vision.adapted_linears()).map(|linear| linear.name);
        let owners = arch.tensors().into_iter().filter_map(|spec| {
            spec.name.rsplit_once('.').map(|(module, _)| peft_name(module)).filter(|name| !name.contains(".experts."))
        });
        let modules: Vec<String> = linears.chain(of_vision).chain(owners).chain(self.former_names(arch)).collect();
        let rules = Rules::compile(self, arch)?;
        let idle: Vec<String> = match excluded {
            TargetModules::List(entries) => {
                let names: Vec<String> = modules.iter().flat_map(|module| arch.names(module)).collect();
                let idle = entries.iter().filter(|entry| !names.iter().any(|name| ends_with_module(name, entry)));
                idle.map(|entry| format!("{entry:?}")).collect()
            }
            _ if modules.iter().any(|name| rules.excludes(name)) => Vec::new(),
            expression => vec![show(expression)],
        };
        if idle.is_empty() {
            return Ok(None);
        }
        Ok(Some(format!(
            "{}.exclude_modules: {} {} no linear module of the model and leaves nothing out: an entry is the end of a module's name, such as \
             mlp.down_proj; an expression matches the whole name",
            self.section,
            idle.join(" and "),
            if idle.len() > 1 { "each match" } else { "matches" }
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn exclusions_that_match_no_module_are_told() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/a/llama/model");
        let arch = Arch::from_dir(&golden).unwrap();
        let idle = |excluded: Option<TargetModules>| {
            Targets { section: "tuning.lora", exclude_modules: excluded, ..Targets::default() }
                .idle_exclusions(&arch)
                .unwrap()
        };
        let list =
            |entries: &[&str]| Some(TargetModules::List(entries.iter().map(|&entry| entry.to_owned()).collect()));
        let regex = |text: &str| Some(TargetModules::Regex(text.to_owned()));
        for used in [
            None,
            list(&["down_proj", "layers.0.mlp.up_proj", "lm_head", "norm"]),
            regex(r".*layers\.0\..*"),
            list(&[]),
        ] {
            assert_eq!(idle(used.clone()), None, "{used:?}");
        }
        for (unused, told) in [
            (list(&["down_proj", "dwon_proj"]), "\"dwon_proj\" matches"),
            (list(&["layers.0", "mlp"]), "\"layers.0\" and \"mlp\" each match"),
            (regex("down_proj"), "the expression \"down_proj\" matches"),
        ] {
            let text = idle(unused.clone()).unwrap();
            assert!(text.starts_with("tuning.lora.exclude_modules: ") && text.contains(told), "{unused:?}: {text}");
        }
    }
}
