//! Configuration: where values come from, what is refused and how, and that hostile files harm nobody.
mod definition;
mod foreign;
mod hostile;
mod includes;
mod program;
mod refusals;
mod sources;
mod trainer;
pub mod variants;

use proptest::prelude::*;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tunesmith::config::{self, Config, EvalStrategy, Flag, InitLora, Resolved, Resume, Source, TargetModules};
use tunesmith::{Error, Kind};

/// A folder with configuration files that is removed at the end.
struct Folder(TempDir);

impl Folder {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = Self(TempDir::new().unwrap());
        for (name, text) in files {
            folder.write(name, text);
        }
        folder
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, contents).unwrap();
        path
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn load(&self, words: &[&str], env: &[(&str, &str)]) -> Result<Resolved, Error> {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let env: Vec<(String, String)> = env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        config::load_partial(&self.path("a.yaml"), &words, &env, &[])
    }

    /// The error of loading, its paths without the folder.
    fn refusal(&self, words: &[&str], env: &[(&str, &str)]) -> String {
        let error = self.load(words, env).expect_err("the configuration must be refused");
        assert_eq!(error.kind(), Kind::Config, "{error}");
        error.to_string().replace(&format!("{}/", self.0.path().display()), "")
    }

    fn tunesmith(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tunesmith"));
        command.current_dir(self.0.path()).env_remove("CONFIG");
        command
    }
}

fn load(text: &str) -> Config {
    Folder::new(&[("a.yaml", text)]).load(&[], &[]).unwrap_or_else(|error| panic!("{error}")).config
}

fn refusal(text: &str) -> String {
    Folder::new(&[("a.yaml", text)]).refusal(&[], &[])
}

fn refused_word(word: &str) -> String {
    Folder::new(&[("a.yaml", "")]).refusal(&[word], &[])
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

const RUNNABLE: &str = "model: {name: ./models/small}\ndata: {train_path: rows.jsonl}\n";
