//! The models that `eval` measures: which ones, under which names, and how they are loaded.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::trained::{Trained, open_base};
use super::options::Args;
use crate::checkpoint::loaded_adapter::LoadedAdapter;
use crate::checkpoint::peft;
use crate::config::arch::{Arch, ScoreHead, Vocabulary};
use crate::config::vision::{VisionArch, has_encoder};
use crate::config::{Config, Task};
use crate::error::{Error, Result};
use crate::export::merge::{Parts, plain_model};
use crate::model::Model;

/// A model as the options name it.
#[derive(Debug, Clone)]
pub(super) enum Choice {
    Base,
    Tuned,
    Dir(PathBuf),
}

impl Choice {
    fn parse(word: &str) -> Self {
        match word {
            "base" => Self::Base,
            "tuned" => Self::Tuned,
            dir => Self::Dir(dir.into()),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Base => "base".into(),
            Self::Tuned => "tuned".into(),
            Self::Dir(dir) => {
                dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
            }
        }
    }
}

pub(super) struct Candidate {
    /// Its name in the results: `base`, `tuned`, or the folder's name; the whole path if two names are equal.
    pub name: String,
    pub dir: PathBuf,
    /// `None` for the base model.
    trained: Option<Trained>,
}

/// The models that the options name; of two, the second is compared with the first.
///
/// # Errors
/// [`crate::Kind::Config`]: the base model is named, and has no head for the task.
pub(super) fn choices(args: &Args, config: &Config) -> Result<Vec<Choice>> {
    let tuned = args.checkpoint.clone().map_or(Choice::Tuned, Choice::Dir);
    let classifies = config.task() != Task::CausalLm;
    let choices = match args.compare.as_slice() {
        [first, second] => vec![Choice::parse(first), Choice::parse(second)],
        _ if args.base => vec![Choice::Base],
        _ if args.alone || classifies => vec![tuned],
        _ => vec![Choice::Base, tuned],
    };
    if classifies && choices.iter().any(|choice| matches!(choice, Choice::Base)) {
        return Err(Error::config(format!("task: {}, and the base model has no head for it", config.task()))
            .hint("leave base out; two trained models are compared with --compare A B"));
    }
    Ok(choices)
}

/// Finds the models on disk; `base` is the folder of the base model.
///
/// # Errors
/// [`crate::Kind::Config`]: both are the same model; [`crate::Kind::Checkpoint`]: a folder holds no model.
pub(super) fn candidates(choices: Vec<Choice>, config: &Config, base: &Path) -> Result<Vec<Candidate>> {
    let mut found: Vec<Candidate> =
        choices.into_iter().map(|choice| Candidate::find(choice, config, base)).collect::<Result<_>>()?;
    if let [first, second] = found.as_mut_slice() {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if real(&first.dir) == real(&second.dir) {
            return Err(Error::config(format!("--compare: both are {}", first.dir.display())).hint("name two models"));
        }
        if first.name == second.name {
            for candidate in [first, second] {
                candidate.name = candidate.dir.display().to_string();
            }
        }
    }
    Ok(found)
}

impl Candidate {
    fn find(choice: Choice, config: &Config, base: &Path) -> Result<Self> {
        let name = choice.name();
        let trained = match choice {
            Choice::Base => return Ok(Self { name, dir: base.to_owned(), trained: None }),
            Choice::Tuned => Trained::of_run(&config.train.output_dir)?,
            Choice::Dir(dir) => Trained::at(dir)?,
        };
        Ok(Self { name, dir: trained.dir().to_owned(), trained: Some(trained) })
    }

    /// Loads the model; `arch` is the shape of the base model with its new tokens. An adapter stays unmerged.
    ///
    /// # Errors
    /// The files; [`crate::Kind::Checkpoint`]: an adapter was trained on another base than `allow` accepts.
    pub fn load(&self, config: &Config, base: &Path, arch: &Arch, allow: &[String]) -> Result<Model> {
        let below = &config.tuning.adapters;
        match &self.trained {
            None => {
                let vocabulary = Vocabulary { rows: arch.token_rows.clone(), ..Vocabulary::default() };
                let mut parts = Parts::open(base, below, &vocabulary)?;
                parts.arch.vision.clone_from(&arch.vision);
                parts.bare(&config.model)
            }
            // A model that was trained as a whole has in its folder what was trained of encoders and connectors.
            Some(Trained::Model(dir)) if arch.vision.is_some() && has_encoder(dir) => {
                plain_model(dir, Some(Arc::new(VisionArch::of_model(dir, arch.hidden_size)?)), config.model.device)
            }
            Some(Trained::Model(dir)) => plain_model(dir, arch.vision.clone(), config.model.device),
            Some(Trained::Adapter(dir)) => {
                let mut parts = open_base(base, below, dir, allow)?;
                if let Some(vision) = &arch.vision {
                    let training = peft::vision_training(dir, vision)?;
                    parts.arch.vision = Some(Arc::new(VisionArch { training, ..(**vision).clone() }));
                }
                parts.adapted(&LoadedAdapter::open(dir, &parts.arch)?, &config.model)
            }
        }
    }
}

/// The classification head that all models and the configuration agree on; none for a model that generates text.
///
/// # Errors
/// [`crate::Kind::Config`]: a model has no such head, or labels differ.
pub(super) fn shared_head(candidates: &[Candidate], config: &Config) -> Result<Option<ScoreHead>> {
    if config.task() == Task::CausalLm {
        return Ok(None);
    }
    let trained = candidates.iter().filter_map(|candidate| candidate.trained.as_ref());
    let mut heads: Vec<ScoreHead> = trained.map(Trained::head).collect::<Result<_>>()?;
    heads.extend(Some(ScoreHead { labels: config.data.labels.0.clone() }).filter(|given| !given.is_number()));
    let head = heads.swap_remove(0);
    match heads.iter().find(|other| **other != head) {
        Some(other) => Err(Error::config(format!("labels differ: {:?} and {:?}", head.labels, other.labels))),
        None => Ok(Some(head)),
    }
}
