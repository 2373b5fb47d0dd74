//! `tunesmith plan --run`: the plan of a run as `train` makes it before step 1, printed whole.
use super::terminal;
use crate::comm::env;
use crate::config::Resolved;
use crate::data;
use crate::error::{Error, Result};
use crate::plan::{self, human_bytes};
use crate::telemetry::progress::{Event, Observer};
use crate::train::run;
use serde_json::Value;

/// Makes the plan and prints it, as JSON if asked for. Started by a launcher, every rank takes part and the first one prints.
///
/// # Errors
/// Everything that `train` refuses before step 1, except for the output directory.
pub fn run(resolved: &Resolved, json: bool) -> Result<()> {
    let launch = env::read(|name| std::env::var(name).ok())?;
    let first = launch.as_ref().is_none_or(|launch| launch.world.is_first());
    let plan = run::plan(resolved, launch, &Notices)?.to_json();
    if !first {
        return Ok(());
    }
    if json {
        let text = serde_json::to_string_pretty(&plan)
            .map_err(|error| Error::config("cannot be written as JSON").caused_by(error))?;
        return terminal::print_exact(&(text + "\n"));
    }
    terminal::print(&text(&plan))
}

/// Prints notices and warnings, and shows no progress.
struct Notices;

impl data::Progress for Notices {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}

    fn warn(&self, text: &str) {
        terminal::print_warning(text);
    }
}

impl Observer for Notices {
    fn event(&self, event: &Event<'_>) {
        if let Event::Notice(text) = event {
            terminal::print_note(text);
        }
    }
}

/// The groups of a plan, each as a table under its name.
fn text(plan: &Value) -> String {
    let mut out = String::new();
    let mut alone = Vec::new();
    for (group, values) in plan.as_object().into_iter().flatten() {
        if !values.is_object() {
            flatten(group, values, false, &mut alone);
            continue;
        }
        let mut rows = Vec::new();
        flatten("", values, group == "memory", &mut rows);
        out.extend([&*group.replace('_', " "), "\n", &plan::table(&rows)]);
    }
    out + "run\n" + &plan::table(&alone)
}

/// Adds a row for every value, named by its path below the group. Numbers are shown as bytes if `bytes` is set or the name
/// says so.
fn flatten(name: &str, value: &Value, bytes: bool, rows: &mut Vec<(String, String)>) {
    let shown = match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                flatten(&format!("{name}{}{field}", if name.is_empty() { "" } else { "." }), value, bytes, rows);
            }
            return;
        }
        Value::Null => "none".to_owned(),
        Value::Number(number) if (bytes && !name.ends_with("process")) || name.ends_with("bytes") => {
            number.as_u64().map_or_else(|| number.to_string(), human_bytes)
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    rows.push((name.replace('_', " "), shown));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_a_row_under_its_group() {
        let saving = serde_json::json!({"when": {"steps": 10}});
        let plan = serde_json::json!({"batch": {"batch_size": 4, "limit": null}, "saving": saving, "seed": 1});
        let expected = "batch\n  batch size  4\n  limit       none\nsaving\n  when.steps  10\nrun\n  seed  1\n";
        assert_eq!(text(&plan), expected);
    }
}
