//! Writes checkpoints while training continues. Between two steps the state is copied into buffers, which later saves
//! use again, and a thread writes the copy. At most one checkpoint is written at a time.
use std::io;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use super::adapter_config::AdapterConfig;
use super::folder;
use super::save::{Retention, Snapshot, StateTensors, Weights, Written, write};
use super::stamp::Stamp;
use super::state::TrainState;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::Disk;
use tunesmith_config::arch::Arch;
use tunesmith_device::Floats;
use tunesmith_model::params::ParamSpec;
use tunesmith_model::weights::{Stacking, Wrapping};
use tunesmith_optim::State;

/// A copy of a run's state.
#[derive(Debug, Default)]
struct Buffers {
    values: Vec<f32>,
    trained: Option<Vec<f32>>,
    state: Vec<(String, Vec<usize>, State)>,
}

impl Buffers {
    /// Copies the state to the host; allocates only if sizes have changed.
    fn fill(&mut self, values: Floats<'_>, trained: Option<Floats<'_>>, state: &StateTensors<'_>) {
        if self.values.len() == values.len() {
            values.read_into(&mut self.values);
        } else {
            self.values = values.read();
        }
        match (&mut self.trained, trained) {
            (Some(buffer), Some(trained)) if buffer.len() == trained.len() => trained.read_into(buffer),
            (buffer, trained) => *buffer = trained.map(Floats::read),
        }
        self.state.truncate(state.len());
        let known = self.state.len();
        for ((name, shape, buffer), (now, sizes, numbers)) in self.state.iter_mut().zip(state) {
            name.clone_from(now);
            shape.clone_from(sizes);
            match (buffer, numbers) {
                (State::F32(buffer), State::F32(values)) if buffer.len() == values.len() => {
                    buffer.view_mut().copy_from(values.view());
                }
                (State::U8(buffer), State::U8(values)) if buffer.len() == values.len() => {
                    buffer.view_mut().copy_from(values.view());
                }
                (buffer, numbers) => *buffer = numbers.read(),
            }
        }
        let more = state[known..].iter().map(|(name, shape, numbers)| (name.clone(), shape.clone(), numbers.read()));
        self.state.extend(more);
    }
}

/// [`Weights`] that own what the original only borrows.
#[derive(Debug)]
enum OwnedWeights {
    Adapter(Box<AdapterConfig>),
    Model {
        dir: PathBuf,
        grown: Option<(String, usize)>,
        template: Option<String>,
        own_head: Option<Box<Arch>>,
        wrapping: Option<Wrapping>,
        stacking: Stacking,
    },
    Part,
}

impl From<Weights<'_>> for OwnedWeights {
    fn from(weights: Weights<'_>) -> Self {
        match weights {
            Weights::Adapter(config) => Self::Adapter(Box::new(config.clone())),
            Weights::Model(source) => Self::Model {
                dir: source.dir.to_owned(),
                grown: source.grown.map(|(text, rows)| (text.to_owned(), rows)),
                template: source.template.map(str::to_owned),
                own_head: source.own_head.cloned().map(Box::new),
                wrapping: source.wrapping.cloned(),
                stacking: source.stacking.clone(),
            },
            Weights::Part => Self::Part,
        }
    }
}

impl OwnedWeights {
    fn borrow(&self) -> Weights<'_> {
        match self {
            Self::Adapter(config) => Weights::Adapter(config),
            Self::Model { dir, grown, template, own_head, wrapping, stacking } => Weights::Model(folder::SourceModel {
                dir,
                grown: grown.as_ref().map(|(text, rows)| (text.as_str(), *rows)),
                template: template.as_deref(),
                own_head: own_head.as_deref(),
                wrapping: wrapping.as_ref(),
                stacking,
            }),
            Self::Part => Weights::Part,
        }
    }
}

/// Everything that the thread needs to write one checkpoint.
struct SaveJob {
    root: PathBuf,
    stamp: Stamp,
    state: TrainState,
    weights: OwnedWeights,
    specs: Vec<ParamSpec>,
    keep: Retention,
    buffers: Buffers,
}

impl SaveJob {
    fn run(&self, disk: &dyn Disk) -> Result<Written> {
        let Buffers { values, trained, state } = &self.buffers;
        let snapshot = Snapshot {
            stamp: &self.stamp,
            state: &self.state,
            weights: self.weights.borrow(),
            specs: &self.specs,
            values: values.into(),
            trained: trained.as_ref().map(Floats::from),
            optimizer: state.iter().map(|(name, shape, state)| (name.clone(), shape.clone(), state)).collect(),
            shared: None,
        };
        write(disk, &self.root, &snapshot, &self.keep)
    }
}

/// Writes checkpoints on a thread of its own.
pub struct Background {
    disk: &'static dyn Disk,
    spare: Buffers,
    thread: Option<JoinHandle<(Buffers, Result<Written>)>>,
}

impl std::fmt::Debug for Background {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Background").field("writing", &self.thread.is_some()).finish_non_exhaustive()
    }
}

impl Background {
    /// A saver that has no buffers until the first save.
    pub fn new(disk: &'static dyn Disk) -> Self {
        Self { disk, spare: Buffers::default(), thread: None }
    }

    /// Allocates the buffers for copies of these tensors, so that lack of memory shows before the first step and not at a save.
    pub fn reserve(&mut self, values: Floats<'_>, trained: Option<Floats<'_>>, state: &StateTensors<'_>) {
        self.spare.fill(values, trained, state);
    }

    /// Copies `snapshot` and starts to write it as [`write()`] does. Waits first for an earlier save, and returns its result.
    ///
    /// # Errors
    /// Those of the earlier save.
    pub fn begin(&mut self, root: &Path, snapshot: &Snapshot<'_>, keep: Retention) -> Result<Option<Written>> {
        let before = self.join()?;
        let mut buffers = std::mem::take(&mut self.spare);
        buffers.fill(snapshot.values, snapshot.trained, &snapshot.optimizer);
        let job = SaveJob {
            root: root.to_owned(),
            stamp: snapshot.stamp.clone(),
            state: snapshot.state.clone(),
            weights: snapshot.weights.into(),
            specs: snapshot.specs.to_vec(),
            keep,
            buffers,
        };
        let disk = self.disk;
        let work = move || {
            let written = job.run(disk);
            (job.buffers, written)
        };
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(work);
        self.thread = Some(thread.map_err(|error| Error::no_thread(&error))?);
        Ok(before)
    }

    /// The result of a save that has finished since the last call.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the save failed; the older checkpoints are still there.
    pub fn poll(&mut self) -> Result<Option<Written>> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) { self.join() } else { Ok(None) }
    }

    /// Waits for the current save.
    ///
    /// # Errors
    /// As [`Background::poll`].
    pub fn join(&mut self) -> Result<Option<Written>> {
        let Some(thread) = self.thread.take() else { return Ok(None) };
        let Ok((buffers, written)) = thread.join() else {
            let source = io::Error::other("the thread that writes checkpoints has panicked");
            return Err(Error::io("write to", "the output directory", &source));
        };
        self.spare = buffers;
        written.map(Some)
    }
}

impl Drop for Background {
    /// Finishes the current save. Its error is dropped: a run that ends early has another error to report.
    fn drop(&mut self) {
        let _ = self.join();
    }
}
