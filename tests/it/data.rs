//! Data, from files to labels, compared with what Transformers makes of the same rows.
mod clearing;
mod columns;
mod control;
mod families;
mod golden;
mod hostile;
mod masks;
mod sets;
mod sources;
mod styles;
mod turns;

use std::path::{Path, PathBuf};

use tunesmith::config::Config;
use tunesmith::data::{Dataset, Example, Silent, Split, Tokenizer, load};
use tunesmith::{Error, Kind};

/// The vocabulary of the larger golden tokenizer.
const VOCABULARY: usize = 1000;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/c").join(name)
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::load(&golden(&format!("tokenizer_{name}"))).unwrap()
}

/// A configuration that reads one file and keeps no cache.
fn config(train: &Path) -> Config {
    let mut config = Config::default();
    config.data.train_path = vec![train.to_owned()];
    config.data.use_cache = false;
    config
}

fn load_with(config: &Config) -> Result<Dataset, Error> {
    load(config, &golden("tokenizer_bpe_llama3"), VOCABULARY.into(), &Silent, None)
}

/// Writes `content` under `name` and loads it.
fn load_text(name: &str, content: impl AsRef<[u8]>) -> Result<Dataset, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    load_with(&config(&path))
}

/// The error must be of class data (exit 3) and its message must hold every part.
fn assert_refused(outcome: Result<Dataset, Error>, parts: &[&str]) {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), Kind::Data, "{error}");
    for part in parts {
        assert!(error.to_string().contains(part), "{error:?} lacks {part:?}");
    }
}

fn examples(split: &Split) -> Vec<Example> {
    (0..split.len()).map(|index| split.example(index).unwrap()).collect()
}

/// The texts of an example: everything, and what carries a loss.
fn texts(data: &Dataset, index: usize) -> (String, String) {
    let example = data.train.example(index).unwrap();
    let supervised: Vec<u32> =
        example.labels.iter().filter(|&&label| label != -100).map(|&label| label as u32).collect();
    let text = |ids: &[u32]| data.tokenizer.decode(ids, false).unwrap();
    (text(&example.input_ids), text(&supervised))
}
