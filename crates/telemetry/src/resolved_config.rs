//! `config.resolved.yaml`: every setting as the run used it, with its source as a comment. The file is itself a
//! configuration: `tunesmith train config.resolved.yaml` repeats the run.
use std::fmt::Write as _;

use std::path::Path;

use tunesmith_config::{Config, Setting, Source, foreign};

/// The settings with their sources as a Markdown table, for TensorBoard's text page.
pub fn settings_table(settings: &[Setting]) -> String {
    let mut text = String::from("| key | value | source |\n|---|---|---|\n");
    for setting in settings {
        let cell = |text: String| text.replace('|', "\\|").replace(['\n', '\r'], " ");
        let (value, source) = (cell(setting.value.to_string()), cell(setting.source.to_string()));
        let _ = writeln!(text, "| {} | `{value}` | {source} |", setting.key);
    }
    text
}

/// The file's text, without what `config` does not read. Files of `DeepSpeed`, `Accelerate`, and FSDP are named in comments: the
/// settings have their values already, or others that the shell gave, which such a file would contradict.
pub fn resolved_yaml(path: &Path, settings: &[Setting], config: &Config) -> String {
    let mut text =
        format!("# The configuration of a run of {}, every key that counts with its source.\n", path.display());
    let mut open: Vec<&str> = Vec::new();
    for setting in settings.iter().filter(|setting| setting.is_read(config)) {
        let parts: Vec<&str> = setting.key.split('.').collect();
        let (key, sections) = parts.split_last().expect("a split has at least one part");
        let shared = open.iter().zip(sections).take_while(|(have, want)| have == want).count();
        open.truncate(shared);
        for section in &sections[shared..] {
            let _ = writeln!(text, "{:indent$}{section}:", "", indent = 2 * open.len());
            open.push(section);
        }
        let source = setting.source.to_string().replace(['\n', '\r'], " ");
        let is_foreign = foreign::KEYS.contains(&setting.key.as_str()) && setting.source != Source::Default;
        let mark = if is_foreign { "# " } else { "" };
        let _ = writeln!(text, "{:indent$}{mark}{key}: {}  # {source}", "", setting.value, indent = 2 * open.len());
    }
    text
}
