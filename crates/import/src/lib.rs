//! Configurations of other toolkits, turned into ours. One table a toolkit; every key of the source gets a
//! [`Note`]: taken over, changed and why, needless here, or not possible. Nothing is dropped in silence.
//!
//! A key that this version refuses is written all the same, and [`Imported::refused`] names it: the file works when
//! the key does.
mod axolotl;
mod llama_factory;
mod names;
mod ranks;
mod sft_play;
mod work;
mod write;

use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::{self as config, Node};
use work::{Act, Rule, Work};

/// A toolkit whose configurations are understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Toolkit {
    /// Axolotl.
    Axolotl,
    /// LLaMA-Factory.
    LlamaFactory,
    /// SFT-Play.
    SftPlay,
}

impl Toolkit {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Axolotl, Self::LlamaFactory, Self::SftPlay];

    /// The name as people write it.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Axolotl => "Axolotl",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::SftPlay => "SFT-Play",
        }
    }

    const fn rules(self) -> &'static [Rule] {
        match self {
            Self::Axolotl => axolotl::RULES,
            Self::LlamaFactory => llama_factory::RULES,
            Self::SftPlay => sft_play::RULES,
        }
    }

    const fn others(self) -> &'static [(Act, &'static [&'static str])] {
        match self {
            Self::Axolotl => axolotl::OTHERS,
            Self::LlamaFactory => llama_factory::OTHERS,
            Self::SftPlay => &[],
        }
    }

    /// Keys of which a configuration has at least one: many others are those of Transformers' own arguments, too.
    const fn own_keys(self) -> &'static [&'static str] {
        match self {
            Self::Axolotl => &[
                "base_model",
                "datasets",
                "pretraining_dataset",
                "sequence_len",
                "micro_batch_size",
                "num_epochs",
                "val_set_size",
                "adapter",
            ],
            Self::LlamaFactory => &[
                "stage",
                "do_train",
                "dataset",
                "dataset_dir",
                "finetuning_type",
                "template",
                "cutoff_len",
                "train_dataset",
            ],
            Self::SftPlay => &["include", "model", "tuning", "train", "data", "logging", "gen", "eval"],
        }
    }

    /// The toolkit that has the most of these keys; nothing if two have as many.
    fn recognise(entries: &[(String, Node)]) -> Option<Self> {
        let known = |toolkit: Self| {
            let own = toolkit.own_keys();
            if !entries.iter().any(|(key, _)| own.contains(&key.as_str())) {
                return 0;
            }
            let rules = toolkit.rules();
            entries.iter().filter(|(key, _)| rules.iter().any(|rule| rule.key == key)).count()
        };
        let mut ranked: Vec<(usize, Self)> = Self::ALL.into_iter().map(|toolkit| (known(toolkit), toolkit)).collect();
        ranked.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        (ranked[0].0 > ranked[1].0).then_some(ranked[0].1)
    }
}

/// What became of a key of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Ours says the same.
    Mapped,
    /// Ours says something else, or in another way.
    Changed,
    /// The toolkit's default, which is another than ours.
    Default,
    /// There is nothing to set: it is so anyway, or is empty or off.
    Needless,
    /// It has no counterpart.
    Lost,
}

/// One key of the source and what became of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Note {
    /// What became of it.
    pub outcome: Outcome,
    /// The source's key, with its value where that helps.
    pub from: String,
    /// Our key and value, as `key: value`; empty where there is none.
    pub to: String,
    /// Why, where it is not obvious.
    pub why: String,
}

/// A key that this version refuses.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// Our key and value, as `key: value`.
    pub setting: String,
    /// Why.
    pub why: String,
}

/// A configuration of ours that was made of another.
#[derive(Debug)]
pub struct Imported {
    /// Where it comes from.
    pub toolkit: Toolkit,
    /// The file's text.
    pub yaml: String,
    /// Each key of the source, in its order, then the toolkit's defaults.
    pub notes: Vec<Note>,
    /// What stands in `yaml` and is refused by this version; if empty, the file loads.
    pub refused: Vec<Refused>,
}

/// Reads a configuration of another toolkit; without `toolkit`, its keys tell which.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: no YAML, keys of no toolkit, a task that is no supervised fine-tuning, or settings that
/// contradict each other.
pub fn read(path: &Path, toolkit: Option<Toolkit>) -> Result<Imported> {
    let entries = entries(path)?;
    let Some(toolkit) = toolkit.or_else(|| Toolkit::recognise(&entries)) else {
        return Err(Error::config(format!(
            "{}: its keys are not those of Axolotl, LLaMA-Factory or SFT-Play",
            path.display()
        ))
        .hint(
            "if it is one of them, say which: --from axolotl, llama-factory or sft-play; arguments of Transformers and TRL \
             have the same names here, in the section train (`tunesmith config --docs`)",
        ));
    };
    let mut work = Work::new(path, toolkit, entries);
    let begin: fn(&mut Work) -> Result<()> = match toolkit {
        Toolkit::Axolotl => axolotl::read,
        Toolkit::LlamaFactory => llama_factory::read,
        Toolkit::SftPlay => sft_play::read,
    };
    begin(&mut work)?;
    work.finish()
}

/// Whose configuration a file is that was taken for one of ours; nothing where it may be ours, or its keys do not tell.
pub fn toolkit_of(path: &Path) -> Option<Toolkit> {
    let entries = entries(path).ok()?;
    // SFT-Play's sections have the names of ours.
    let ours = entries.iter().any(|(key, _)| Toolkit::SftPlay.own_keys().contains(&key.as_str()));
    Toolkit::recognise(&entries).filter(|_| !ours)
}

/// The mapping of a file; a key that is there twice is refused.
fn entries(path: &Path) -> Result<Vec<(String, Node)>> {
    let entries = config::read_mapping(path)?;
    let mut names = std::collections::HashSet::new();
    match entries.iter().find(|(key, _)| !names.insert(key)) {
        Some((key, _)) => Err(Error::config(format!("{}: {key:?} is given twice", path.display())).hint("keep one")),
        None => Ok(entries),
    }
}

/// A file that the source names: as it stands, or beside the source.
fn beside(source: &Path, name: &str) -> Option<PathBuf> {
    [PathBuf::from(name), source.with_file_name(name)].into_iter().find(|path| path.exists())
}
