//! Which modules of a model `target_modules: auto` and `all-linear` adapt, for `tunesmith models DIR`.
use crate::config::TargetModules;
use crate::config::adapters::lora::LoraConfig;
use crate::config::arch::Arch;
use crate::error::Result;
use crate::model::targets::place;
use std::fmt::Write as _;

/// The adapted modules and parameters of a block, in model order, each with its rank as a multiple of `r`.
#[derive(Debug, Default, PartialEq)]
struct Adapted(Vec<(String, usize)>);

impl Adapted {
    fn of(arch: &Arch, target_modules: TargetModules) -> Result<Self> {
        let lora = LoraConfig { target_modules, ..LoraConfig::default() };
        let mut found = Self::default();
        for placement in place(arch, &lora)? {
            let inside = placement.key.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
            let name = inside.map_or(placement.key.as_str(), |(_, name)| name).trim_end_matches(".weight");
            let times = placement.adapter.rank().map_or(1, |rank| rank.r / lora.r.max(1));
            if !found.0.iter().any(|(known, _)| known == name) {
                found.0.push((name.to_owned(), times));
            }
        }
        Ok(found)
    }

    /// The modules and parameters that are not among `others`.
    fn without(&self, others: &Self) -> Self {
        Self(self.0.iter().filter(|one| !others.0.contains(one)).cloned().collect())
    }

    /// The names in one line, such as `self_attn.q_proj, k_proj; mlp.experts.gate_up_proj (2 r and 2 lora_alpha)`. Names within
    /// the same module follow each other.
    fn text(&self) -> String {
        let mut modules: Vec<(&str, String)> = Vec::new();
        for (name, times) in &self.0 {
            let (module, last) = name.rsplit_once('.').unwrap_or(("", name));
            let last = if *times > 1 { format!("{last} ({times} r and {times} lora_alpha)") } else { last.to_owned() };
            match modules.iter_mut().find(|(known, _)| *known == module) {
                Some((_, text)) => {
                    let _ = write!(text, ", {last}");
                }
                None if module.is_empty() => modules.push((module, last)),
                None => modules.push((module, format!("{module}.{last}"))),
            }
        }
        modules.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("; ")
    }
}

/// The lines about adapters: label and text.
///
/// # Errors
/// The model has no module that can be adapted.
pub(super) fn lines(arch: &Arch) -> Result<Vec<(&'static str, String)>> {
    let auto = Adapted::of(arch, TargetModules::Auto)?;
    let mut lines = vec![("auto adapts", auto.text())];
    let all = match Adapted::of(arch, TargetModules::AllLinear) {
        Err(error) => format!("refused, as by PEFT: {}", error.message()),
        Ok(all) => {
            let (more, fewer) = (all.without(&auto), auto.without(&all));
            let parts = [("also ", more), ("not ", fewer)].into_iter().filter(|(_, part)| !part.0.is_empty());
            let parts: Vec<String> = parts.map(|(word, part)| format!("{word}{}", part.text())).collect();
            if parts.is_empty() { "the same".to_owned() } else { parts.join("; ") }
        }
    };
    lines.push(("all-linear adapts", all));
    if let Some(experts) = &arch.experts {
        let module = experts.module();
        lines.push((
            "experts by",
            format!("tuning.lora.target_parameters: [{module}.gate_up_proj, {module}.down_proj]"),
        ));
    }
    Ok(lines)
}
