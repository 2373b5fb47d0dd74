//! Arguments shared by subcommands that read a configuration: its file, and `KEY=VALUE` overrides.
use super::shell_quote::quoted;
use crate::checkpoint::peft;
use crate::config::{self, Flag, Resolved};
use crate::error::{Error, Kind, Result};
use crate::import;
use crate::registry::{COMPRESSED, EXTENSIONS};
use crate::train::output;
use std::path::{Path, PathBuf};

/// A configuration file and words that override it. Flatten it into a subcommand's arguments.
#[derive(Debug, Clone, clap::Args)]
pub struct ConfigArgs {
    /// Read this YAML file; KEY=VALUE overrides its values
    ///
    /// An override is a word such as `train.batch_size=1` or `TRAIN_BATCH_SIZE=1`; the second form also works as an environment
    /// variable. The file may also be given as the word CONFIG=FILE or in the environment variable CONFIG.
    #[arg(value_name = "CONFIG|KEY=VALUE")]
    pub words: Vec<String>,
}

/// A configuration file, or `--model` and `--data` in its place. Flatten it into a subcommand that trains or predicts a run.
#[derive(Debug, Clone, clap::Args)]
pub struct JobArgs {
    // The file and words.
    #[command(flatten)]
    #[allow(missing_docs, reason = "a documentation comment would be the help of the arguments below it")]
    pub config: ConfigArgs,
    /// Start from this model (`model.name`): a folder, or OWNER/NAME on the hub. With --data, no configuration file is needed
    #[arg(long, value_name = "DIR|OWNER/NAME")]
    pub model: Option<String>,
    /// Train on these rows (`data.train_path`): a file, or a pattern such as 'rows/*.jsonl'; may be given more than once
    #[arg(long, value_name = "FILE")]
    pub data: Vec<String>,
}

impl JobArgs {
    /// Reads the configuration, which must have a model and rows.
    ///
    /// # Errors
    /// As [`ConfigArgs::load`].
    pub fn load(&self, flags: &[Flag]) -> Result<Resolved> {
        self.load_silently(flags).inspect(print_notes)
    }

    /// As [`JobArgs::load`], without printing notes: other ranks would repeat them.
    ///
    /// # Errors
    /// As [`ConfigArgs::load`].
    pub fn load_silently(&self, flags: &[Flag]) -> Result<Resolved> {
        let resolved = self.load_partial(flags)?;
        resolved.check_runnable()?;
        Ok(resolved)
    }

    /// As [`JobArgs::load_silently`], where the model or the rows may be missing.
    ///
    /// # Errors
    /// As [`ConfigArgs::load`].
    pub fn load_partial(&self, flags: &[Flag]) -> Result<Resolved> {
        let (file, words) = self.config.files()?;
        let about_a_job = |word: &String| {
            let key = word.to_lowercase().replace('.', "_");
            key.starts_with("model_") || key.starts_with("data_")
        };
        if file.is_none() && self.model.is_none() && self.data.is_empty() && !words.iter().any(about_a_job) {
            return Err(no_file());
        }
        let mut given = Vec::new();
        if let Some(model) = &self.model {
            check_model_folder("--model", model)?;
            given.push(Flag { name: "--model", key: "model.name", value: model.clone() });
            given.push(Flag { name: "--model", key: "model.local_dir", value: "null".to_owned() });
        }
        match &self.data[..] {
            [] => {}
            [one] => given.push(Flag { name: "--data", key: "data.train_path", value: one.clone() }),
            several => given.push(Flag {
                name: "--data",
                key: "data.train_path",
                value: serde_json::json!(several).to_string(),
            }),
        }
        given.extend_from_slice(flags);
        let resolved = config::load_optional(file.as_deref(), &words, &environment()?, &given);
        resolved.map_err(|error| of_another_toolkit(file.as_deref(), error))
    }
}

/// Adds a hint to an error if the file is a configuration of another toolkit: the command that converts it.
fn of_another_toolkit(file: Option<&Path>, error: Error) -> Error {
    let file = file.filter(|_| error.kind() == Kind::Config);
    let Some((file, toolkit)) = file.and_then(|file| Some((file, import::toolkit_of(file)?))) else { return error };
    let [from, out] =
        [file.to_owned(), file.with_extension("tunesmith.yaml")].map(|path| quoted(&path.to_string_lossy()));
    error.hint(format!(
        "this looks like a configuration of {}: `tunesmith import {from} --out {out}` turns it into one of tunesmith's",
        toolkit.title()
    ))
}

/// The subcommand that was typed.
fn typed() -> String {
    std::env::args().nth(1).unwrap_or_default()
}

/// The call of subcommand `command` without a configuration: with a model, and with rows if it takes them.
fn without_file(command: &str, model: &str, rows: &str) -> Option<String> {
    let (model, rows) = (quoted(model), quoted(rows));
    match command {
        "train" | "config" | "data" | "process" | "memory-check" => {
            Some(format!("tunesmith {command} --model {model} --data {rows}"))
        }
        "infer" => Some(format!("tunesmith infer --model {model} --in {rows} --out answers.jsonl")),
        "chat" | "plan" => Some(format!("tunesmith {command} --model {model}")),
        _ => None,
    }
}

/// The error for a missing configuration.
fn no_file() -> Error {
    let command = typed();
    let without =
        without_file(&command, "DIR", "rows.jsonl").map_or(String::new(), |call| format!("; or without one: `{call}`"));
    Error::config("no configuration file is given").hint(format!(
        "name one: `tunesmith {command} FILE.yaml`, CONFIG=FILE.yaml, or the environment variable CONFIG{without}"
    ))
}

/// The error for a folder in place of a configuration file.
fn is_folder(folder: &str, command: &str) -> Error {
    let path = Path::new(folder);
    let error = Error::config(format!("{folder} is a folder, but a configuration file is expected"));
    let resolved = path.join("config.resolved.yaml");
    if resolved.is_file() {
        return error.hint(format!(
            "name the run's configuration: `tunesmith {command} {}`",
            quoted(&resolved.to_string_lossy())
        ));
    }
    let call = without_file(command, folder, "rows.jsonl").filter(|_| path.join("config.json").is_file());
    error.hint(match call {
        Some(call) => format!("it is a model: `{call}`"),
        None => "name a YAML file".to_owned(),
    })
}

/// Refuses a `--model` or `--base` (`flag`) that names the folder of an adapter, or the output folder of a run.
///
/// # Errors
/// [`Kind::Model`], with the option to use instead.
pub(super) fn check_model_folder(flag: &str, model: &str) -> Result<()> {
    let (dir, command) = (Path::new(model), typed());
    let has = |file: &str| dir.join(file).is_file();
    let fail = |what: &str| Error::new(Kind::Model, format!("{flag} {model}: {what}, not of a model"));
    let resolved = dir.join(output::CONFIG);
    if resolved.is_file() && !has("config.json") {
        let adapter = dir.join(output::ADAPTER);
        if command == "train" && adapter.is_dir() {
            return Err(fail("the output folder of a run").hint(format!(
                "to train its adapter further, name the base model with {flag}, and set tuning.adapter={}",
                quoted(&adapter.to_string_lossy())
            )));
        }
        let call = format!("tunesmith {command} {}", quoted(&resolved.to_string_lossy()));
        return Err(fail("the output folder of a run").hint(format!("name the run's configuration: `{call}`")));
    }
    if !has(peft::CONFIG_FILE) || has("model.safetensors") || has("model.safetensors.index.json") {
        return Ok(());
    }
    let base = peft::load_adapter(dir).ok().and_then(|(config, _)| config.base_model_name_or_path);
    let base = quoted(base.as_deref().unwrap_or("BASE"));
    Err(fail("the folder of an adapter").hint(match command.as_str() {
        "infer" | "chat" | "merge" | "export" => {
            format!("name both: `tunesmith {command} {flag} {base} --adapter {}`", quoted(model))
        }
        _ => format!("name its base model, --model {base}, and set tuning.adapters to this folder"),
    }))
}

impl ConfigArgs {
    /// The number of GPUs from the word `NUM_GPUS=N`, or else from the environment variable.
    pub fn num_gpus(&self) -> Option<String> {
        let word = self.words.iter().find_map(|word| word.strip_prefix("NUM_GPUS=").map(str::to_owned));
        word.or_else(|| std::env::var("NUM_GPUS").ok()).filter(|number| !number.is_empty())
    }

    /// Reads the configuration that the arguments and the environment describe; `flags` win over both.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: no file or two, or anything that [`config::load`] refuses.
    pub fn load(&self, flags: &[Flag]) -> Result<Resolved> {
        let (path, words) = self.split()?;
        let resolved = config::load(&path, &words, &environment()?, flags);
        resolved.map_err(|error| of_another_toolkit(Some(&path), error)).inspect(print_notes)
    }

    /// As [`ConfigArgs::load`], for a configuration that may lack the model or the data.
    ///
    /// # Errors
    /// As [`ConfigArgs::load`].
    pub fn load_partial(&self) -> Result<Resolved> {
        let (path, words) = self.split()?;
        let resolved = config::load_partial(&path, &words, &environment()?, &[]);
        resolved.map_err(|error| of_another_toolkit(Some(&path), error)).inspect(print_notes)
    }

    /// As [`ConfigArgs::load_partial`], but the file is optional too. Also returns whether there is one.
    ///
    /// # Errors
    /// As [`ConfigArgs::load`].
    pub fn load_optional(&self, flags: &[Flag]) -> Result<(Resolved, bool)> {
        let (file, words) = self.files()?;
        let resolved = config::load_optional(file.as_deref(), &words, &environment()?, flags);
        let resolved = resolved.map_err(|error| of_another_toolkit(file.as_deref(), error));
        Ok((resolved.inspect(print_notes)?, file.is_some()))
    }

    /// Separates the configuration file, which is required, from the words.
    fn split(&self) -> Result<(PathBuf, Vec<String>)> {
        match self.files()? {
            (Some(file), words) => Ok((file, words)),
            (None, _) => Err(no_file()),
        }
    }

    fn files(&self) -> Result<(Option<PathBuf>, Vec<String>)> {
        let mut files: Vec<&str> = Vec::new();
        let mut words = Vec::new();
        for word in &self.words {
            match word.split_once('=') {
                None => files.push(word),
                // `launch` reads NUM_GPUS, and `train` says what it means.
                Some(("CONFIG", "") | ("NUM_GPUS", _)) => {}
                Some(("CONFIG", file)) => files.push(file),
                Some(_) => words.push(word.clone()),
            }
        }
        let environment = std::env::var("CONFIG").unwrap_or_default();
        if files.is_empty() && !environment.is_empty() {
            files.push(&environment);
        }
        match files[..] {
            [file] if is_rows(Path::new(file)) => {
                let (command, error) = (typed(), format!("{file}: these are rows, but a configuration is expected"));
                let call = without_file(&command, "DIR", file);
                let call = call.unwrap_or_else(|| format!("tunesmith train --model DIR --data {}", quoted(file)));
                Err(Error::config(error).hint(format!("without a configuration: `{call}`")))
            }
            [file] if Path::new(file).is_dir() => Err(is_folder(file, &typed())),
            [file] => Ok((Some(PathBuf::from(file)), words)),
            [] => Ok((None, words)),
            [first, second, ..] => {
                let apart = self.words.iter().any(|word| word.starts_with('='));
                Err(Error::config(format!("two configuration files are given: {first} and {second}")).hint(if apart {
                    "an override is one word, without spaces: KEY=VALUE"
                } else {
                    "give one, with `include:` for what it shares; an override has the form KEY=VALUE"
                }))
            }
        }
    }
}

/// Whether a file's name ends like a file of rows. `.json` may be either and does not count.
fn is_rows(file: &Path) -> bool {
    let end = |file: &Path| file.extension().map(|end| end.to_string_lossy().to_lowercase()).unwrap_or_default();
    let outer = end(file);
    let inner = if COMPRESSED.contains(&outer.as_str()) { end(&file.with_extension("")) } else { outer };
    inner != "json" && EXTENSIONS.iter().any(|ends| ends.contains(&inner.as_str()))
}

/// Prints the notes of a configuration, such as keys without effect.
pub fn print_notes(resolved: &Resolved) {
    resolved.notes.iter().for_each(|note| super::terminal::print_note(note));
}

/// The environment variables that change a run: settings, `CONFIG` and `NUM_GPUS`, sorted by name.
pub fn variables() -> Vec<(String, String)> {
    let ours = |name: &str| {
        matches!(name, "CONFIG" | "NUM_GPUS")
            || config::schema::VARIABLES.iter().any(|(variable, _)| *variable == name)
            || config::schema::options().any(|def| def.env() == name)
    };
    let mut found: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, value)| !value.is_empty() && ours(name))
        .collect();
    found.sort();
    found
}

/// Whether the word after `--resume` is a checkpoint, not a configuration file or a setting.
pub fn is_checkpoint(word: &str) -> bool {
    // A run's own `latest` and `best` are files that name a checkpoint.
    let is_file = || Path::new(word).is_file() && !word.ends_with("/latest") && !word.ends_with("/best");
    let is_config =
        Path::new(word).extension().is_some_and(|end| ["yaml", "yml", "json"].iter().any(|one| end == *one));
    !word.contains('=') && !is_config && !is_file()
}

/// The environment variables that are valid UTF-8.
fn environment() -> Result<Vec<(String, String)>> {
    let mut texts = Vec::new();
    for (name, value) in std::env::vars_os() {
        let Ok(name) = name.into_string() else { continue };
        match value.into_string() {
            Ok(value) => texts.push((name, value)),
            Err(_) if config::schema::options().any(|def| def.env() == name) => {
                return Err(Error::config(format!("env {name}: not valid UTF-8")));
            }
            Err(_) => {}
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_the_place_of_a_configuration_is_told_with_the_command_that_takes_it() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().to_str().unwrap();
        let hint = |command: &str| is_folder(folder, command).hint_text().unwrap().to_owned();
        assert_eq!(hint("train"), "name a YAML file");
        std::fs::write(root.path().join("config.json"), "{}").unwrap();
        assert_eq!(hint("plan"), format!("it is a model: `tunesmith plan --model {folder}`"));
        assert_eq!(hint("eval"), "name a YAML file");
        std::fs::write(root.path().join("config.resolved.yaml"), "").unwrap();
        assert_eq!(
            hint("infer"),
            format!("name the run's configuration: `tunesmith infer {folder}/config.resolved.yaml`")
        );
    }

    #[test]
    fn a_model_flag_refuses_the_folders_of_adapters_and_runs() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().to_str().unwrap();
        let check = || check_model_folder("--model", folder);
        check().unwrap();
        std::fs::write(root.path().join(peft::CONFIG_FILE), "{}").unwrap();
        let error = check().unwrap_err();
        assert!(error.kind() == Kind::Model && error.message().contains("of an adapter"), "{error}");
        std::fs::write(root.path().join("model.safetensors"), "").unwrap();
        check().unwrap();
        std::fs::write(root.path().join(output::CONFIG), "").unwrap();
        assert!(check().unwrap_err().hint_text().unwrap().contains(output::CONFIG));
        std::fs::write(root.path().join("config.json"), "{}").unwrap();
        check().unwrap();
    }

    #[test]
    fn rows_in_the_place_of_a_configuration_are_told() {
        for (file, rows) in [
            ("a.jsonl", true),
            ("a.CSV", true),
            ("a.jsonl.gz", true),
            ("a.yaml", false),
            ("a.json", false),
            ("a", false),
        ] {
            let found = ConfigArgs { words: vec![file.to_owned()] }.files();
            assert_eq!(found.is_err(), rows, "{file}");
            if let Err(error) = found {
                assert!(
                    error.message().contains("these are rows") && error.hint_text().unwrap().contains("--data"),
                    "{error}"
                );
            }
        }
    }
}
