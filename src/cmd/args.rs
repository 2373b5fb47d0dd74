//! The arguments that every subcommand with a configuration shares: its file and `KEY=VALUE` words.
use crate::config::{self, Flag, Resolved};
use crate::error::{Error, Result};
use std::path::PathBuf;

/// A configuration file and words that override it. Flatten it into a subcommand's arguments.
#[derive(Debug, Clone, clap::Args)]
pub struct ConfigArgs {
    /// The configuration file, and KEY=VALUE words that override it
    ///
    /// `train.batch_size=1` and `TRAIN_BATCH_SIZE=1` say the same, as a word or (the latter) as an environment variable.
    /// The file may also be given as the word CONFIG=FILE or in the environment variable CONFIG.
    #[arg(value_name = "CONFIG|KEY=VALUE")]
    pub words: Vec<String>,
}

impl ConfigArgs {
    /// Reads the configuration that the arguments and the environment describe; `flags` win over both.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: no file or two, or anything that [`config::load`] refuses.
    pub fn load(&self, flags: &[Flag]) -> Result<Resolved> {
        self.load_silently(flags).inspect(print_notes)
    }

    /// As [`ConfigArgs::load`], for one of several ranks that say the same: without the notes.
    ///
    /// # Errors
    /// As [`ConfigArgs::load`].
    pub fn load_silently(&self, flags: &[Flag]) -> Result<Resolved> {
        let (path, words) = self.split()?;
        config::load(&path, &words, &environment()?, flags)
    }

    /// As [`ConfigArgs::load_silently`], where the number of ranks is still to be found; the ranks look whether all is there.
    ///
    /// # Errors
    /// As [`ConfigArgs::load`].
    pub fn load_for_launch(&self) -> Result<Resolved> {
        let (path, words) = self.split()?;
        let env: Vec<_> = environment()?.into_iter().filter(|(name, _)| name != "NUM_GPUS").collect();
        config::load_partial(&path, &words, &env, &[])
    }

    /// As [`ConfigArgs::load`], for a configuration that may lack the model or the data.
    ///
    /// # Errors
    /// As [`ConfigArgs::load`].
    pub fn load_partial(&self) -> Result<Resolved> {
        let (path, words) = self.split()?;
        config::load_partial(&path, &words, &environment()?, &[]).inspect(print_notes)
    }

    /// As [`ConfigArgs::load_partial`], where there may be no file either; says whether there is one.
    ///
    /// # Errors
    /// As [`ConfigArgs::load`].
    pub fn load_optional(&self, flags: &[Flag]) -> Result<(Resolved, bool)> {
        let (file, words) = self.files()?;
        let resolved = config::load_optional(file.as_deref(), &words, &environment()?, flags);
        Ok((resolved.inspect(print_notes)?, file.is_some()))
    }

    /// Tells the configuration file from the words.
    fn split(&self) -> Result<(PathBuf, Vec<String>)> {
        match self.files()? {
            (Some(file), words) => Ok((file, words)),
            (None, _) => Err(Error::config("no configuration file is given")
                .hint("name one: `tunesmith train FILE.yaml`, CONFIG=FILE.yaml, or the environment variable CONFIG")),
        }
    }

    fn files(&self) -> Result<(Option<PathBuf>, Vec<String>)> {
        let mut files: Vec<&str> = Vec::new();
        let mut words = Vec::new();
        for word in &self.words {
            match word.split_once('=') {
                None => files.push(word),
                Some(("CONFIG", "")) => {}
                Some(("CONFIG", file)) => files.push(file),
                Some(_) => words.push(word.clone()),
            }
        }
        let environment = std::env::var("CONFIG").unwrap_or_default();
        if files.is_empty() && !environment.is_empty() {
            files.push(&environment);
        }
        match files[..] {
            [file] => Ok((Some(PathBuf::from(file)), words)),
            [] => Ok((None, words)),
            [first, second, ..] => {
                Err(Error::config(format!("two configuration files are given: {first} and {second}"))
                    .hint("give one, with `include:` for what it shares; an override has the form KEY=VALUE"))
            }
        }
    }
}

fn print_notes(resolved: &Resolved) {
    resolved.notes.iter().for_each(|note| super::terminal::print_note(note));
}

/// The environment as text. Variables that are not UTF-8 cannot be ours unless their name is.
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
