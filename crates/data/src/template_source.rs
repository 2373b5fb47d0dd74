//! Finds the source of a chat template: in the model folder, in a file or among the built-in ones.
use std::path::Path;

use serde_json::{Map, Value};

use super::jinja::MAX_SOURCE;
use super::model_files::{Opener, read_file, read_json};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_config::BuiltinTemplate;

/// The hint for a template that cannot be used.
pub(super) const OTHER_TEMPLATE: &str =
    "change a copy of the template and set data.template_path, or set data.chat_template: a built-in one";

/// The source of a chat template and where it is from.
pub(super) struct TemplateSource {
    pub(super) text: String,
    /// A path or the name of a built-in template, for messages.
    pub(super) origin: String,
}

/// Finds the template: `path` or `builtin` if given, else `chat_template.jinja` of the model folder, else `chat_template`
/// in its `chat_template.json`, which is that of a multimodal model's processor, else in its `tokenizer_config.json`, whose
/// content is `tokenizer_config`. `None` if there is no template.
///
/// # Errors
/// A file cannot be read, is too large or not in UTF-8; `chat_template` is not a template.
pub(super) fn find(
    model_dir: &Path,
    tokenizer_config: &Map<String, Value>,
    path: Option<&Path>,
    builtin: Option<BuiltinTemplate>,
) -> Result<Option<TemplateSource>> {
    if let Some(path) = path {
        let text = read_template(path, files::open)?
            .ok_or_else(|| Error::data(format!("{}: no such file", path.display())).hint("check data.template_path"))?;
        return Ok(Some(TemplateSource { text, origin: path.display().to_string() }));
    }
    if let Some(builtin) = builtin {
        let text = builtin_source(builtin).to_owned();
        return Ok(Some(TemplateSource { text, origin: format!("built-in {builtin}") }));
    }
    let file = |name: &str| {
        let path = model_dir.join(name);
        let origin = path.display().to_string();
        (path, origin)
    };
    let (path, origin) = file("chat_template.jinja");
    if let Some(text) = read_template(&path, files::open_member)? {
        return Ok(Some(TemplateSource { text, origin }));
    }
    let (path, origin) = file("chat_template.json");
    if let Some(text) = configured(read_json(&path)?.get("chat_template"), &origin)? {
        return Ok(Some(TemplateSource { text, origin }));
    }
    let (_, origin) = file("tokenizer_config.json");
    let text = configured(tokenizer_config.get("chat_template"), &origin)?;
    Ok(text.map(|text| TemplateSource { text, origin }))
}

fn read_template(path: &Path, open: Opener) -> Result<Option<String>> {
    let Some(bytes) = read_file(path, open)? else { return Ok(None) };
    if bytes.len() > MAX_SOURCE {
        return Err(Error::model(format!(
            "{} has {} bytes, expected at most {MAX_SOURCE}",
            path.display(),
            bytes.len()
        ))
        .hint(OTHER_TEMPLATE));
    }
    String::from_utf8(bytes).map(Some).map_err(|error| {
        Error::model(format!("{}: invalid UTF-8", path.display())).caused_by(error).hint(OTHER_TEMPLATE)
    })
}

/// The template in the field `chat_template`: a string, or a list of named templates.
fn configured(value: Option<&Value>, origin: &str) -> Result<Option<String>> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(named)) => {
            let default = named.iter().find(|entry| entry["name"] == "default").or(match named.as_slice() {
                [only] => Some(only),
                _ => None,
            });
            default.and_then(|entry| entry["template"].as_str()).map(|source| Some(source.to_owned())).ok_or_else(
                || {
                    let names: Vec<&str> = named.iter().filter_map(|entry| entry["name"].as_str()).collect();
                    Error::model(format!(
                        "{origin}: found the chat templates [{}], expected one named default",
                        names.join(", ")
                    ))
                    .hint("set data.template_path or data.chat_template")
                },
            )
        }
        Some(_) => {
            Err(Error::model(format!("{origin}: chat_template is neither a string nor a list")).hint(OTHER_TEMPLATE))
        }
    }
}

const fn builtin_source(builtin: BuiltinTemplate) -> &'static str {
    match builtin {
        BuiltinTemplate::Chatml => include_str!("templates/chatml.jinja"),
        BuiltinTemplate::Llama3 => include_str!("templates/llama3.jinja"),
        BuiltinTemplate::Gemma => include_str!("templates/gemma.jinja"),
        BuiltinTemplate::Mistral => include_str!("templates/mistral.jinja"),
        BuiltinTemplate::Phi => include_str!("templates/phi.jinja"),
        BuiltinTemplate::Paligemma => include_str!("templates/paligemma.jinja"),
    }
}
