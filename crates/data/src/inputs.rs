//! The files of each set of rows, from the configuration. Patterns are expanded; each source of `data.datasets` is an
//! input.
use std::path::PathBuf;

use super::row::Form;
use super::source::glob;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{Config, DatasetSpec, Format, Task, schema};

/// Files that are read one after another as one set of rows: those of a setting such as `data.train_path`, or of one
/// source of `data.datasets`.
#[derive(Debug, Clone)]
pub struct Input {
    /// The setting that names the files, for messages: `data.train_path`.
    pub setting: String,
    /// A short name for the report.
    pub name: String,
    /// The files, in the order in which they are read.
    pub paths: Vec<PathBuf>,
    /// The form of their rows; `None` for `auto`.
    pub format: Option<Form>,
    /// The weight in the mix; `None` if the configuration gives none.
    pub weight: Option<f64>,
}

/// All files of a configuration.
#[derive(Debug, Clone, Default)]
pub struct Inputs {
    /// At least one input of training rows.
    pub train: Vec<Input>,
    /// `data.val_path`; `None` if it is not set.
    pub validation: Option<Input>,
    /// `data.test_path`; `None` if it is not set.
    pub test: Option<Input>,
}

impl Inputs {
    /// Finds the files of a configuration.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: no training rows are named. [`tunesmith_base::Kind::Data`]: a pattern matches
    /// nothing.
    pub fn of(config: &Config) -> Result<Self> {
        let data = &config.data;
        let files = |setting: &str, paths: &[PathBuf]| -> Result<Option<Input>> {
            if paths.is_empty() {
                return Ok(None);
            }
            let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            Ok(Some(Input {
                setting: setting.to_owned(),
                name: names.join(", "),
                paths: glob::expand(paths, setting)?,
                format: form(config, data.format),
                weight: None,
            }))
        };
        let train = match files("data.train_path", &data.train_path)? {
            Some(input) => vec![input],
            None => data
                .datasets
                .iter()
                .zip(1..)
                .map(|(spec, number)| source(spec, number, form(config, spec.format.unwrap_or(data.format))))
                .collect::<Result<_>>()?,
        };
        if train.is_empty() {
            return Err(Error::config("data.train_path is not set")
                .hint("set data.train_path=rows.jsonl, or name the file after --data"));
        }
        let (validation, test) = (files("data.val_path", &data.val_path)?, files("data.test_path", &data.test_path)?);
        Ok(Self { train, validation, test })
    }

    /// Where the validation rows are: `data.val_path`, or the training files that `data.split` takes them from.
    pub(super) fn of_validation(&self) -> Vec<Input> {
        self.validation.clone().map_or_else(|| self.train.clone(), |input| vec![input])
    }

    /// All files, of all sets.
    pub fn files(&self) -> Vec<&PathBuf> {
        self.train.iter().chain(&self.validation).chain(&self.test).flat_map(|input| &input.paths).collect()
    }
}

/// The existing files and folders that a configuration names to be read, so that no output replaces one of them. Files
/// that come from a hub are not included.
pub fn named(config: &Config) -> Vec<PathBuf> {
    fn texts<'a>(value: &'a serde_json::Value, found: &mut Vec<&'a str>) {
        match value {
            serde_json::Value::String(text) => found.push(text),
            serde_json::Value::Array(items) => items.iter().for_each(|item| texts(item, found)),
            serde_json::Value::Object(fields) => fields.values().for_each(|item| texts(item, found)),
            _ => {}
        }
    }
    const READ: [&str; 6] =
        ["model.name", "model.local_dir", "tuning.adapter", "tuning.adapters", "data.datasets", "train.accelerate"];
    let is_read = |path: &str| READ.contains(&path) || path.ends_with("_path") || path.ends_with("json_schema");
    let mut inputs = Vec::new();
    for option in schema::options().filter(|option| is_read(&option.path())) {
        let value = (option.get)(config);
        let mut found = Vec::new();
        texts(&value, &mut found);
        for text in found.into_iter().filter(|text| !text.is_empty()) {
            let path = PathBuf::from(text);
            // Loading the data refuses a pattern that matches nothing.
            let files = if path.exists() { Ok(vec![path]) } else { glob::expand(&[path], "") };
            inputs.extend(files.unwrap_or_default().into_iter().filter(|path| path.exists()));
        }
    }
    inputs
}

/// The form of rows. A classification or regression always has labeled rows.
fn form(config: &Config, format: Format) -> Option<Form> {
    if config.task() == Task::CausalLm { Form::of(format) } else { Some(Form::Labeled) }
}

fn source(spec: &DatasetSpec, number: usize, format: Option<Form>) -> Result<Input> {
    let setting = format!("data.datasets: source {number}");
    let names: Vec<String> = spec.path.iter().map(|path| path.display().to_string()).collect();
    let name = spec.name.clone().unwrap_or_else(|| names.join(", "));
    if spec.path.is_empty() {
        return Err(Error::config(format!("{setting}: {name} was not fetched from the hub")));
    }
    let paths = glob::expand(&spec.path, &setting)?;
    Ok(Input { setting, name, paths, format, weight: spec.weight })
}
