//! The model card, `README.md`: base model, data, settings and results, with the metadata that the Hugging Face Hub reads.
use std::fmt::Write as _;

/// The content of a model card.
#[derive(Debug, Clone, Default)]
pub struct ModelCard {
    /// The heading of the card.
    pub name: String,
    /// The base model, as the adapter or the configuration names it.
    pub base: String,
    /// The kind of adapter, such as `lora`; `None` for a whole model.
    pub adapter: Option<&'static str>,
    /// The task of the model, as the hub names it (`pipeline_tag`).
    pub task: &'static str,
    /// The sources of the rows: label and text.
    pub data: Vec<(String, String)>,
    /// Settings that differ from their defaults: key and value.
    pub settings: Vec<(String, String)>,
    /// Results of evaluations: metric and value.
    pub results: Vec<(String, String)>,
    /// Code that loads the model.
    pub usage: String,
}

/// Escapes a text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

/// The text as YAML in double quotes.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl ModelCard {
    /// Renders `README.md`: a YAML header, then Markdown.
    pub fn render(&self) -> String {
        let Self { name, base, adapter, task, data, settings, results, usage } = self;
        let mut out = String::from("---\n");
        // The hub accepts only names of models on the hub.
        let on_hub = tunesmith_config::is_hub_name(base);
        if on_hub {
            let _ = writeln!(out, "base_model: {}", quoted(base)); // a String never fails
        }
        let library = if adapter.is_some() { "peft" } else { "transformers" };
        let _ = writeln!(out, "library_name: {library}\npipeline_tag: {task}\ntags:\n- tunesmith");
        if let Some(kind) = adapter {
            let _ = writeln!(out, "- {kind}");
        }
        let what = if adapter.is_some() { "An adapter for" } else { "Made from" };
        let _ = writeln!(
            out,
            "---\n\n# {}\n\n{what} `{}`, trained with tunesmith {}.",
            cell(name),
            cell(base),
            env!("CARGO_PKG_VERSION")
        );
        if !usage.is_empty() {
            let _ = writeln!(out, "\n## Use\n\n```python\n{usage}\n```");
        }
        let mut table = |title: &str, heads: [&str; 2], rows: &[(String, String)]| {
            if rows.is_empty() {
                return;
            }
            let _ = writeln!(out, "\n## {title}\n\n| {} | {} |\n|---|---|", heads[0], heads[1]);
            for (left, right) in rows {
                let _ = writeln!(out, "| {} | {} |", cell(left), cell(right));
            }
        };
        table("Results", ["measure", "score"], results);
        table("Data", ["", ""], data);
        table("Settings", ["key", "value"], settings);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_has_its_metadata_and_no_broken_tables() {
        let card = ModelCard {
            name: "mine".into(),
            base: "owner/base".into(),
            adapter: Some("lora"),
            task: "text-generation",
            results: vec![("rouge1".into(), "0.5 | 0.6\nx".into())],
            ..ModelCard::default()
        };
        let text = card.render();
        assert!(text.starts_with("---\nbase_model: \"owner/base\"\nlibrary_name: peft\n"));
        assert!(text.contains("| rouge1 | 0.5 \\| 0.6 x |") && !text.contains("## Data"));
        assert!(!ModelCard { base: "./folder here".into(), ..card.clone() }.render().contains("base_model:"));
        assert!(text.contains("pipeline_tag: text-generation\ntags:\n- tunesmith\n- lora\n"));
    }
}
