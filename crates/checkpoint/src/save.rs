//! Saves a checkpoint: its content ([`Snapshot`]), how it gets to disk ([`write()`]), and which earlier ones stay
//! ([`Retention`]).
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::adapter_config::AdapterConfig;
use super::layout::{OPTIMIZER, PART, STAMP, STATE};
use super::publish::{Published, publish_folder};
use super::stamp::Stamp;
use super::state::TrainState;
use super::tensors::named;
use super::{folder, peft, store};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::disk::{Disk, RealDisk};
use tunesmith_config::arch::EMBEDDING;
use tunesmith_device::Floats;
use tunesmith_model::params::ParamSpec;
use tunesmith_model::weights::{Numbers, Wrapping, write_numbers_by, write_numbers_to};
use tunesmith_optim::{self as optim, Optimizer, State, StateTensor};

/// The suffix of a tensor's raw values in the optimizer's file, if the published values are averages (EMA,
/// schedule-free).
pub const TRAINED: &str = ".trained";

/// The form in which the trained tensors are saved.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// As a PEFT adapter with these settings.
    Adapter(&'a AdapterConfig),
    /// A whole model, made from this source model.
    Model(folder::SourceModel<'a>),
    /// As part of a model, in `trained.safetensors`.
    Part,
}

/// The state tensors of an optimizer, as [`tunesmith_optim::Optimizer::tensors`] gives them: name, shape, numbers.
pub(crate) type StateTensors<'a> = Vec<(String, Vec<usize>, &'a State)>;

/// The state of a run between two steps. The buffers are flat, in the order of `specs`.
#[derive(Debug, Clone)]
pub struct Snapshot<'a> {
    /// What the checkpoint belongs to.
    pub stamp: &'a Stamp,
    /// Step, data position and counters of the run.
    pub state: &'a TrainState,
    /// The form of the weights.
    pub weights: Weights<'a>,
    /// Names, shapes and offsets of the trained tensors.
    pub specs: &'a [ParamSpec],
    /// The values to evaluate and publish: trained ones, or averages.
    pub values: Floats<'a>,
    /// The raw values, if `values` are averages.
    pub trained: Option<Floats<'a>>,
    /// The optimizer's state; empty if it is in `shared`.
    pub optimizer: StateTensors<'a>,
    /// The optimizer's state if each rank holds a share of it; `trained` and `optimizer` are then empty.
    pub shared: Option<ShardedState<'a>>,
}

/// Writes the optimizer's file when each rank holds a share of the state. All ranks take part.
#[derive(Clone, Copy)]
pub struct ShardedState<'a> {
    /// Names and shapes of the tensors in the optimizer's file. All are [`Numbers::Elsewhere`].
    pub tensors: &'a [(String, Vec<usize>, Numbers<'static>)],
    /// Writes the values of the tensor of that name. All ranks call it at the same time, in the same order.
    pub write: &'a dyn Fn(&str, &mut dyn Write) -> io::Result<()>,
    /// Fetches the values to publish if ranks hold shares of these too (not with adapters). [`Snapshot::values`] is
    /// then unused.
    pub values: Option<&'a folder::LazyTensors<'a>>,
}

impl std::fmt::Debug for ShardedState<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardedState").field("tensors", &self.tensors).finish_non_exhaustive()
    }
}

impl ShardedState<'_> {
    /// Writes the file. The rank that saves passes a file as `writer`, the others a sink.
    ///
    /// # Errors
    /// The errors of the writer and of [`ShardedState::write`].
    pub fn write_to(&self, writer: &mut dyn Write) -> io::Result<()> {
        write_numbers_by(writer, self.tensors, &|name, _, writer| (self.write)(name, writer), &[])
    }

    fn bytes(&self) -> usize {
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        let bytes = |(_, shape, numbers): &(String, Vec<usize>, Numbers<'_>)| match numbers {
            Numbers::Elsewhere(_, "U8") => count(shape),
            _ => 4 * count(shape),
        };
        self.tensors.iter().map(bytes).sum()
    }
}

/// Names and shapes of the tensors in the optimizer's file: its state, and with `apart` the raw values of each trained tensor.
pub fn elsewhere(
    optimizer: &Optimizer,
    specs: &[ParamSpec],
    apart: bool,
) -> Vec<(String, Vec<usize>, Numbers<'static>)> {
    let state = optimizer.state().into_iter().map(|StateTensor { name, spec, .. }| {
        let dtype = match spec.dtype {
            optim::optimizer::StateDtype::F32 => "F32",
            optim::optimizer::StateDtype::U8 => "U8",
        };
        let count = spec.count();
        (name, spec.shape, Numbers::Elsewhere(count, dtype))
    });
    let trained = specs.iter().filter(|_| apart).map(|spec| {
        let numbers = Numbers::Elsewhere(spec.range().len(), "F32");
        (format!("{}{TRAINED}", spec.name), spec.shape.clone(), numbers)
    });
    state.chain(trained).collect()
}

/// Which older checkpoints to keep after a save.
#[derive(Debug, Clone, Default)]
pub struct Retention {
    /// How many of the newest ones; `None` keeps all.
    pub last: Option<usize>,
    /// The best checkpoint, which always stays. The file `best` will name it.
    pub best: Option<PathBuf>,
}

/// A checkpoint that is safely on disk.
#[derive(Debug, Clone)]
pub struct Written {
    /// The folder of the checkpoint.
    pub dir: PathBuf,
    /// Optimizer steps that the run had done.
    pub step: u64,
    /// Time of the whole save.
    pub took: Duration,
    /// The part of `took` that was spent on hashing.
    pub hashing: Duration,
    /// The new name of an older folder in the same place that has files of someone else.
    pub kept: Option<PathBuf>,
}

impl Snapshot<'_> {
    /// The estimated size of the checkpoint in bytes.
    pub fn bytes(&self) -> u64 {
        let headers = 5 * 256 * self.specs.len() + (128 << 10);
        let companions = match self.weights {
            Weights::Adapter(config) => {
                let embedding = self.specs.iter().find(|spec| config.shares_head && spec.name == EMBEDDING);
                embedding.map_or(0, |spec| 4 * spec.range().len() as u64) + config.untouched.bytes()
            }
            Weights::Part => 0,
            Weights::Model(source) => folder::companion_bytes(source.dir) + source.wrapping.map_or(0, Wrapping::bytes),
        };
        let trained = self.trained.map_or(0, Floats::len);
        let state = self.optimizer.iter().map(|(_, _, state)| match state {
            State::F32(values) => 4 * values.len(),
            State::U8(values) => values.len(),
        });
        let shared = self.shared.map_or(0, |shared| shared.bytes());
        let values: usize = self.specs.iter().map(|spec| spec.range().len()).sum();
        (4 * (values + trained) + state.sum::<usize>() + shared + headers) as u64 + companions
    }

    /// The tensors of the optimizer's file: its state, and the raw values if averages are published.
    fn state_tensors(&self) -> Vec<(String, Vec<usize>, Numbers<'_>)> {
        let mut tensors = Vec::new();
        for (name, shape, state) in &self.optimizer {
            let numbers = match state {
                State::F32(values) => Numbers::F32(values.view()),
                State::U8(values) => Numbers::U8(values.view()),
            };
            tensors.push((name.clone(), shape.clone(), numbers));
        }
        if let Some(trained) = self.trained {
            for spec in self.specs {
                let name = format!("{}{TRAINED}", spec.name);
                tensors.push((name, spec.shape.clone(), Numbers::F32(trained.slice(spec.range()))));
            }
        }
        tensors
    }
}

/// At least as many as the files and folders that a save creates, including temporary ones.
pub const FILES: u64 = 32;

/// Saves a checkpoint into `root`, updates `latest` and `best`, and removes the checkpoints that `keep` does not keep. On an
/// error every checkpoint to keep is still there.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`]: the disk fails, or has too little room.
pub fn write(disk: &dyn Disk, root: &Path, snapshot: &Snapshot<'_>, keep: &Retention) -> Result<Written> {
    let began = Instant::now();
    store::preflight(root, snapshot.bytes(), FILES)?;
    let (dir, Published { hashing, kept }) = save_on(disk, root, snapshot)?;
    let best = keep.best.as_deref().filter(|dir| dir.is_dir());
    if best.is_some() {
        store::write_pointer(disk, root, "best", best)?;
    }
    if let Some(last) = keep.last {
        store::prune(disk, root, last, best, Some(&dir))?;
    }
    Ok(Written { dir, step: snapshot.state.step, took: began.elapsed(), hashing, kept })
}

/// Saves a checkpoint into `root` and makes `latest` name it. Returns its folder and the outcome.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`].
pub fn save_on(disk: &dyn Disk, root: &Path, snapshot: &Snapshot<'_>) -> Result<(PathBuf, Published)> {
    let dir = store::checkpoint_dir(root, snapshot.state.step);
    let elsewhere = snapshot.shared.and_then(|shared| shared.values);
    let values = snapshot.values.to_host();
    let tensors = if elsewhere.is_some() { Vec::new() } else { named(snapshot.specs, &values) };
    let nothing = |name: &str| Err(Error::model(format!("no tensor {name:?}")));
    let nothing = folder::LazyTensors { tensors: &[], fetch: &nothing };
    let rest = elsewhere.unwrap_or(&nothing);
    let published = publish_folder(disk, &dir, |staging| {
        match snapshot.weights {
            Weights::Adapter(config) => peft::stage(staging, config, &tensors)?,
            Weights::Model(source) => folder::stage(staging, source, None, &tensors, rest)?,
            Weights::Part => folder::stage_weights(staging, PART, None, &tensors, rest, &[])?,
        }
        staging.write(OPTIMIZER, |writer| match &snapshot.shared {
            Some(shared) => shared.write_to(writer),
            None => write_numbers_to(writer, &snapshot.state_tensors(), &[]),
        })?;
        staging.write_json(STATE, snapshot.state)?;
        staging.write_json(STAMP, snapshot.stamp)
    })?;
    store::write_pointer(disk, root, "latest", Some(&dir))?;
    Ok((dir, published))
}

/// Makes `latest` and `best` name these checkpoints; `None` removes the file.
///
/// # Errors
/// As [`store::write_pointer`].
pub fn write_pointers(root: &Path, latest: Option<&Path>, best: Option<&Path>) -> Result<()> {
    store::write_pointer(&RealDisk, root, "latest", latest)?;
    store::write_pointer(&RealDisk, root, "best", best)
}

/// As [`store::clean_stale`], on the file system.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`].
pub fn clean_stale(root: &Path) -> Result<Vec<PathBuf>> {
    store::clean_stale(&RealDisk, root)
}
