//! A trained model on disk: the folder of an adapter, or of a whole model.
use std::path::{Path, PathBuf};

use super::provenance;
use crate::checkpoint::loaded_adapter::score_head;
use crate::checkpoint::peft;
use crate::config::arch::{Arch, ScoreHead};
use crate::config::refuse_gguf;
use crate::error::{Error, Result};
use crate::export::merge::Parts;
use crate::files::{self, temporary};
use crate::train::output;

/// The result of a run.
#[derive(Debug, Clone)]
pub(super) enum Trained {
    /// Works on top of a base model.
    Adapter(PathBuf),
    /// Merged or fully trained: needs no base.
    Model(PathBuf),
}

impl Trained {
    /// The result of the run in `output_dir`: its `adapter/`, else its `model/`.
    ///
    /// # Errors
    /// [`crate::Kind::Checkpoint`]: there is neither.
    pub fn of_run(output_dir: &Path) -> Result<Self> {
        let folders = [output::ADAPTER, output::MODEL].map(|name| output_dir.join(name));
        let found = folders.iter().find(|dir| dir.is_dir()).ok_or_else(|| {
            Error::checkpoint(format!("{}: neither adapter/ nor model/", output_dir.display())).hint(
                folders.iter().find_map(|dir| temporary::how_to_put_back(dir)).unwrap_or_else(|| {
                    "train first, name a checkpoint (--checkpoint DIR), or use the base model alone (--base)".to_owned()
                }),
            )
        })?;
        Self::at(found.clone())
    }

    /// The adapter or the model in `dir`.
    ///
    /// # Errors
    /// [`crate::Kind::Checkpoint`]: `dir` has the files of neither.
    pub fn at(dir: PathBuf) -> Result<Self> {
        refuse_gguf(&dir).map_err(|error| error.with_kind(crate::Kind::Checkpoint))?;
        if files::is_there(&dir.join(peft::CONFIG_FILE)) {
            return Ok(Self::Adapter(dir));
        }
        if files::is_there(&dir.join("config.json")) {
            return Ok(Self::Model(dir));
        }
        if !files::is_there(&dir) {
            let hint = temporary::how_to_put_back(&dir);
            return Err(Error::checkpoint(format!("{}: there is no such folder", dir.display()))
                .hint(hint.unwrap_or_else(|| "name a checkpoint, an adapter or a model folder".to_owned())));
        }
        let hint = match Self::of_run(&dir) {
            Ok(result) => format!("it is the output folder of a run: name {}", result.dir().display()),
            Err(_) => {
                "name a checkpoint, an adapter or a model folder; a checkpoint of tuning.mode: freeze, or of a model that was \
                       paired with vision.encoder, holds only the trained part, so take the run's model/"
                    .to_owned()
            }
        };
        Err(Error::checkpoint(format!("{}: neither adapter_config.json nor config.json", dir.display())).hint(hint))
    }

    pub fn dir(&self) -> &Path {
        let (Self::Adapter(dir) | Self::Model(dir)) = self;
        dir
    }

    /// The classification head.
    ///
    /// # Errors
    /// The files; [`crate::Kind::Config`]: there is no such head.
    pub fn head(&self) -> Result<ScoreHead> {
        let head = match self {
            Self::Adapter(dir) => score_head(dir)?,
            Self::Model(dir) => Arch::from_dir(dir)?.score,
        };
        head.ok_or_else(|| {
            Error::config(format!("{}: it has no classification head", self.dir().display()))
                .hint("name the result of a run with this task")
        })
    }
}

/// Opens the base model for the adapter in `adapter`, with the adapters `below` merged into it. Checks that the adapter was
/// trained on this base, unless `allow` accepts another.
///
/// # Errors
/// [`crate::Kind::Checkpoint`]: it was trained on another base; those of [`Parts::open`].
pub(super) fn open_base(base: &Path, below: &[PathBuf], adapter: &Path, allow: &[String]) -> Result<Parts> {
    let mut parts = Parts::open(base, below, &peft::vocabulary(adapter)?)?;
    provenance::check_base(&parts, adapter, allow)?;
    // An adapter's own head replaces the base's, with its labels.
    if let Some(head) = score_head(adapter)? {
        parts.arch.score = Some(head);
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_told_apart_by_its_files() {
        let root = tempfile::tempdir().unwrap();
        let [run, adapter] = ["run", "run/adapter"].map(|name| root.path().join(name));
        std::fs::create_dir_all(&adapter).unwrap();
        assert!(Trained::of_run(&run).is_err(), "an empty adapter/");
        std::fs::write(adapter.join(peft::CONFIG_FILE), "{}").unwrap();
        assert!(matches!(Trained::of_run(&run), Ok(Trained::Adapter(dir)) if dir == adapter));
        let error = Trained::at(run).unwrap_err();
        assert!(error.hint_text().unwrap().contains("name ") && error.hint_text().unwrap().ends_with("run/adapter"));
        std::fs::write(root.path().join("config.json"), "{}").unwrap();
        assert!(matches!(Trained::at(root.path().to_owned()), Ok(Trained::Model(_))));
    }
}
