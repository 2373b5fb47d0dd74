//! Loads a checkpoint: verifies and opens it, and restores its tensors into a run.
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::layout::{OPTIMIZER, PART, STAMP, STATE, read_json};
use super::manifest::{Complete, verify};
use super::save::TRAINED;
use super::stamp::Stamp;
use super::state::TrainState;
use super::tensors::same_tensors;
use super::{folder, peft, store};
use tunesmith_base::Kind;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{EMBEDDING, LM_HEAD, is_beside};
use tunesmith_device::FloatsMut;
use tunesmith_model::params::ParamSpec;
use tunesmith_model::weights::{WeightFiles, Wrapping};
use tunesmith_optim::{Ema, Optimizer, State};

/// A verified checkpoint. Its tensors are still on disk.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder that it was read from.
    pub dir: PathBuf,
    /// The stamp of the run that wrote it, which resume compares.
    pub stamp: Stamp,
    /// Step, data position and counters of the run.
    pub state: TrainState,
    /// Time spent on checking hashes.
    pub hashing: Duration,
    weights: WeightFiles,
    /// The parts of a multimodal model other than its language model.
    wrapping: Option<Wrapping>,
    weights_path: PathBuf,
    prefix: &'static str,
    optimizer: WeightFiles,
}

/// Verifies and opens a checkpoint: a folder, or a file such as `runs/my-run/best` that names one.
///
/// # Errors
/// [`Kind::Checkpoint`]: the folder is not complete, is damaged, or is not a run's checkpoint.
pub fn load(path: &Path) -> Result<Checkpoint> {
    open(verify(&store::followed(path)?)?)
}

/// Opens a checkpoint that has been verified.
///
/// # Errors
/// [`Kind::Checkpoint`]: the folder is not a run's checkpoint.
pub fn open(complete: Complete) -> Result<Checkpoint> {
    let Complete { dir, manifest, hashing } = complete;
    let (file, prefix) = if manifest.lists(peft::WEIGHTS_FILE) {
        (peft::WEIGHTS_FILE, peft::PREFIX)
    } else if manifest.lists(PART) {
        (PART, "")
    } else {
        (folder::WEIGHTS_FILE, "")
    };
    for name in [file, OPTIMIZER, STATE, STAMP] {
        if !manifest.lists(name) {
            return Err(Error::checkpoint(format!(
                "{}: no {name}: this is not a checkpoint to resume from",
                dir.display()
            ))
            .hint("name a checkpoint-… folder of a run; to start from an adapter set tuning.adapter"));
        }
    }
    let open = |name: &str| {
        let path = dir.join(name);
        let files = match name {
            peft::WEIGHTS_FILE => return peft::open_weights(&dir),
            folder::WEIGHTS_FILE => WeightFiles::open_saved(&path),
            _ => WeightFiles::open_file(&path),
        };
        files.map_err(|error| error.with_kind(Kind::Checkpoint))
    };
    let weights = open(file)?;
    Ok(Checkpoint {
        stamp: read_json(&dir.join(STAMP))?,
        state: read_json(&dir.join(STATE))?,
        hashing,
        wrapping: weights.wrapping().filter(|_| file == folder::WEIGHTS_FILE),
        weights,
        weights_path: dir.join(file),
        prefix,
        optimizer: open(OPTIMIZER)?,
        dir,
    })
}

impl Checkpoint {
    /// Restores values and optimizer of a run with the same `specs`, bit for bit. An optimizer that holds a share of the state
    /// gets its share. `averages` is the run's EMA, if it keeps one.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`]: names or shapes differ; the message has both sides.
    pub fn restore<'v>(
        &self,
        specs: &[ParamSpec],
        values: impl Into<FloatsMut<'v>>,
        optimizer: &mut Optimizer,
        averages: Option<&mut Ema>,
    ) -> Result<()> {
        let values = values.into();
        let everything = 0..values.len();
        self.restore_kept(specs, values, std::slice::from_ref(&everything), optimizer, averages)
    }

    /// As [`Checkpoint::restore`], for a rank that holds only the flat ranges `kept` of the values, one after the
    /// other.
    ///
    /// # Errors
    /// As [`Checkpoint::restore`].
    pub fn restore_kept(
        &self,
        specs: &[ParamSpec],
        values: FloatsMut<'_>,
        kept: &[Range<usize>],
        optimizer: &mut Optimizer,
        averages: Option<&mut Ema>,
    ) -> Result<()> {
        let path = self.dir.join(OPTIMIZER);
        let apart = averages.is_some() || optimizer.averages();
        let trained = if apart { prefixed(specs, "", TRAINED) } else { Vec::new() };
        let state = optimizer.state().into_iter().map(|tensor| (tensor.name, tensor.spec.shape));
        let expected: Vec<_> = state.chain(trained.iter().cloned()).collect();
        check(&self.optimizer, &path, &expected)?;
        if apart {
            if let Some(averages) = averages {
                let owned = averages.owned().to_vec();
                self.restore_kept_values(specs, averages.values.view_mut(), &owned)?;
            }
            let place = |name: &str| (&self.optimizer, name.to_owned());
            read_ranges(&place, &trained, specs, kept, &mut values.on_host())?;
        } else {
            self.restore_kept_values(specs, values, kept)?;
        }
        for (name, range, state) in optimizer.tensors_mut() {
            match state {
                State::F32(values) => {
                    self.optimizer.read_part_into(&name, range.start, &mut values.view_mut().on_host())
                }
                State::U8(values) => {
                    self.optimizer.read_part_of_bytes_into(&name, range.start, &mut values.view_mut().on_host())
                }
            }
            .map_err(|error| error.with_kind(Kind::Checkpoint))?;
        }
        if let Some(odd) = self.state.optimizer_scalars.iter().find(|number| !number.is_finite()) {
            let path = self.dir.join(STATE);
            return Err(Error::checkpoint(format!(
                "{}: optimizer_scalars has {odd}, expected finite numbers",
                path.display()
            ))
            .hint("the run diverged: resume from an earlier checkpoint"));
        }
        optimizer.step = self.state.optimizer_step;
        optimizer.image_step = self.state.optimizer_image_step.unwrap_or(optimizer.step);
        if !optimizer.set_scalars(&self.state.optimizer_scalars) {
            let found = self.state.optimizer_scalars.len();
            return Err(Error::checkpoint(format!(
                "{}: {found} numbers of an optimizer's state, expected {}",
                self.dir.join(STATE).display(),
                optimizer.scalars().len()
            ))
            .hint("the checkpoint belongs to another optimizer; set train.optim as it was"));
        }
        Ok(())
    }

    /// Restores only the published values. Used at the end of a run, with the best checkpoint.
    ///
    /// # Errors
    /// As [`Checkpoint::restore`].
    pub fn restore_values<'v>(&self, specs: &[ParamSpec], values: impl Into<FloatsMut<'v>>) -> Result<()> {
        let values = values.into();
        let everything = 0..values.len();
        self.restore_kept_values(specs, values, std::slice::from_ref(&everything))
    }

    /// As [`Checkpoint::restore_values`], for a rank that holds only the flat ranges `kept` of the values, one after
    /// the other.
    ///
    /// # Errors
    /// As [`Checkpoint::restore`].
    pub fn restore_kept_values<'v>(
        &self,
        specs: &[ParamSpec],
        values: impl Into<FloatsMut<'v>>,
        kept: &[Range<usize>],
    ) -> Result<()> {
        let names = prefixed(specs, self.prefix, "");
        // An adapter's file may have a shared matrix under both names; it is read once.
        let copy = format!("{}{LM_HEAD}", peft::PREFIX);
        let shared = self.prefix == peft::PREFIX && specs.iter().any(|spec| spec.name == EMBEDDING);
        let copied = (self.weights.shape(&copy).filter(|_| shared))
            .filter(|_| specs.iter().all(|spec| spec.name != LM_HEAD))
            .map(|shape| (copy.clone(), shape.to_vec()));
        let beside = |name: &str| self.wrapping.as_ref().filter(|_| is_beside(name));
        // An adapter's file also has the tensors of an encoder and a connector that an earlier stage has trained.
        let is_kept = |name: &str| {
            name.strip_prefix(peft::PREFIX).is_some_and(|plain| self.prefix == peft::PREFIX && is_beside(plain))
                && names.iter().all(|(own, _)| own != name)
        };
        let kept_there = self.weights.names().filter(|name| is_kept(name));
        let kept_there =
            kept_there.map(|name| (name.to_owned(), self.weights.shape(name).unwrap_or_default().to_vec()));
        let own = names.iter().filter(|(name, _)| beside(name).is_none()).cloned();
        let expected: Vec<_> = own.chain(copied).chain(kept_there).collect();
        check(&self.weights, &self.weights_path, &expected)?;
        for (name, shape) in &names {
            let Some(wrapping) = beside(name) else { continue };
            let found = wrapping.files().shape(&wrapping.stored_name(name));
            if found != Some(shape.as_slice()) {
                let path = self.weights_path.display();
                return Err(Error::checkpoint(format!("{path}: tensor {name:?} is {found:?}, expected {shape:?}"))
                    .hint("the checkpoint must belong to this model and these settings"));
            }
        }
        let place = |name: &str| match beside(name) {
            Some(wrapping) => (wrapping.files(), wrapping.stored_name(name)),
            None => (&self.weights, name.to_owned()),
        };
        read_ranges(&place, &names, specs, kept, &mut values.into().on_host())
    }
}

/// The stored names of `specs`, with their shapes.
fn prefixed(specs: &[ParamSpec], prefix: &str, suffix: &str) -> Vec<(String, Vec<usize>)> {
    specs.iter().map(|spec| (format!("{prefix}{}{suffix}", spec.name), spec.shape.clone())).collect()
}

fn check(files: &WeightFiles, path: &Path, expected: &[(String, Vec<usize>)]) -> Result<()> {
    let found = files.names().map(|name| (name, files.shape(name).unwrap_or_default()));
    same_tensors(path, found, expected.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())))
}

/// Reads flat ranges of the tensors `names` into `out`, one after the other. `place` returns the files that have a
/// tensor, and its name there.
fn read_ranges<'f>(
    place: &dyn Fn(&str) -> (&'f WeightFiles, String),
    names: &[(String, Vec<usize>)],
    specs: &[ParamSpec],
    ranges: &[Range<usize>],
    out: &mut [f32],
) -> Result<()> {
    let mut rest = out;
    for range in ranges {
        for ((name, _), spec) in names.iter().zip(specs) {
            let (low, high) = (range.start.max(spec.offset), range.end.min(spec.range().end));
            if low < high {
                let (now, later) = rest.split_at_mut(high - low);
                let (files, stored) = place(name);
                let read = files.read_part_into(&stored, low - spec.offset, now);
                read.map_err(|error| error.with_kind(Kind::Checkpoint))?;
                rest = later;
            }
        }
    }
    Ok(())
}
