//! Runs that survive anything. A checkpoint is a folder that is there whole or not at all ([`atomic`]), says
//! what it belongs to ([`stamp`]) and where the run stood ([`state`]), and is at the same time what Hugging Face's
//! libraries load: a PEFT adapter ([`peft`]), or a model folder ([`folder`]). It is written while the steps go on
//! ([`background`]).
//!
//! ```text
//! checkpoint-000200/
//!   adapter_config.json  adapter_model.safetensors    LoRA: PEFT loads this folder
//!   config.json  model.safetensors  tokenizer.json …  full: Transformers loads this folder
//!   trained.safetensors                               freeze: what is trained, without the rest
//!   optimizer.safetensors                             its state: NAME.exp_avg, NAME.exp_avg_sq, … of each tensor
//!   state.json                                        step, data position, best loss, counters, seeds
//!   backend.json                                      the stamp
//!   manifest.json                                     size and BLAKE3 of each of these, written last
//! ```
pub mod adapter_config;
pub mod atomic;
pub mod background;
pub mod disk;
pub mod finished;
pub mod folder;
mod former;
pub mod origin;
pub mod ours;
pub mod peft;
pub mod pissa;
pub mod stamp;
pub mod state;
pub mod store;

use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

pub use adapter_config::AdapterConfig;
pub use atomic::{Complete, Published, verify};
pub use background::Background;
pub use stamp::Stamp;
pub use state::TrainState;
pub use store::{newest_complete, preflight};

use disk::{Disk, RealDisk};
use tunesmith_base::Kind;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_config::arch::{EMBEDDING, LM_HEAD};
use tunesmith_model::params::ParamSpec;
use tunesmith_model::weights::{Numbers, WeightFiles, Wrapping, write_numbers_by, write_numbers_to};
use tunesmith_optim::{self as optim, Ema, Optimizer, State, StateTensor};

const OPTIMIZER: &str = "optimizer.safetensors";
/// After the name of a tensor: the values that training goes on from, where averages are published.
pub const TRAINED: &str = ".trained";
/// The trained tensors, where they are a part of a model.
const PART: &str = "trained.safetensors";
const STATE: &str = "state.json";
const STAMP: &str = "backend.json";

/// What kind of weights a checkpoint holds.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// The trained tensors are an adapter with these settings.
    Adapter(&'a AdapterConfig),
    /// The trained tensors are the whole model, made from this one.
    Model(folder::Source<'a>),
    /// The trained tensors are a part of a model.
    Part,
}

/// The state tensors of an optimizer, as [`tunesmith_optim::Optimizer::tensors`] gives them: name, shape, numbers.
pub type StateTensors<'a> = Vec<(String, Vec<usize>, &'a State)>;

/// A run between two steps, as it is to be saved. The buffers are flat, in the order of `specs`.
#[derive(Debug, Clone)]
pub struct Snapshot<'a> {
    /// What it belongs to.
    pub stamp: &'a Stamp,
    /// Where the run stands.
    pub state: &'a TrainState,
    /// Adapter or model.
    pub weights: Weights<'a>,
    /// Names, shapes and places of the trained tensors.
    pub specs: &'a [ParamSpec],
    /// The values to publish.
    pub values: &'a [f32],
    /// The values that training goes on from, where they are others (averages are published).
    pub trained: Option<&'a [f32]>,
    /// The optimizer's state.
    pub optimizer: StateTensors<'a>,
    /// What several ranks hold together; `trained` and `optimizer` are then left empty.
    pub shared: Option<Shared<'a>>,
}

/// The optimizer's file where each rank holds a share of what is in it.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    /// Its tensors: all are [`Numbers::Elsewhere`].
    pub tensors: &'a [(String, Vec<usize>, Numbers<'static>)],
    /// Writes the numbers of the tensor of that name; all ranks do so at the same time, in the same order.
    pub write: &'a dyn Fn(&str, &mut dyn Write) -> io::Result<()>,
    /// The values to publish, where each rank holds a share of these too and they are no adapter's; [`Snapshot::values`] are
    /// then of no account.
    pub values: Option<&'a folder::Rest<'a>>,
}

impl std::fmt::Debug for Shared<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("tensors", &self.tensors).finish_non_exhaustive()
    }
}

impl Shared<'_> {
    /// Writes the file: the rank that saves to the disk, the others to nowhere.
    ///
    /// # Errors
    /// The writer's and those of [`Shared::write`].
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

/// The tensors of the optimizer's file: its state, and the values that training goes on from where they are not published.
pub fn elsewhere(
    optimizer: &Optimizer,
    specs: &[ParamSpec],
    apart: bool,
) -> Vec<(String, Vec<usize>, Numbers<'static>)> {
    let state = optimizer.state().into_iter().map(|StateTensor { name, spec, .. }| {
        let dtype = match spec.dtype {
            optim::optimizer::Dtype::F32 => "F32",
            optim::optimizer::Dtype::U8 => "U8",
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

/// Which checkpoints stay beside one that has been written.
#[derive(Debug, Clone, Default)]
pub struct Keep {
    /// So many of the newest ones; nothing: all.
    pub last: Option<usize>,
    /// The best one, which stays and gets the name `best`, if it is there.
    pub best: Option<PathBuf>,
}

/// A checkpoint that is durable.
#[derive(Debug, Clone)]
pub struct Written {
    /// Its folder.
    pub dir: PathBuf,
    /// Its step.
    pub step: u64,
    /// How long it took, all told.
    pub took: Duration,
    /// How long of that hashing took.
    pub hashing: Duration,
    /// Where files stay that are not the program's and stood in its place.
    pub kept: Option<PathBuf>,
}

/// Named tensors in flat buffers, for the safetensors writer.
pub type NamedTensors<'a> = Vec<(String, Vec<usize>, &'a [f32])>;

/// The tensors of a flat buffer by name.
pub fn named<'a>(specs: &[ParamSpec], values: &'a [f32]) -> NamedTensors<'a> {
    specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone(), &values[spec.range()])).collect()
}

impl Snapshot<'_> {
    /// About how many bytes the checkpoint takes.
    pub fn bytes(&self) -> u64 {
        let headers = 5 * 256 * self.specs.len() + (128 << 10);
        let companions = match self.weights {
            Weights::Adapter(config) if config.shares_head => {
                let embedding = self.specs.iter().find(|spec| spec.name == EMBEDDING);
                embedding.map_or(0, |spec| 4 * spec.range().len() as u64)
            }
            Weights::Adapter(_) | Weights::Part => 0,
            Weights::Model(source) => folder::companion_bytes(source.dir) + source.wrapping.map_or(0, Wrapping::bytes),
        };
        let trained = self.trained.map_or(0, <[f32]>::len);
        let state = self.optimizer.iter().map(|(_, _, state)| match state {
            State::F32(values) => 4 * values.len(),
            State::U8(values) => values.len(),
        });
        let shared = self.shared.map_or(0, |shared| shared.bytes());
        let values: usize = self.specs.iter().map(|spec| spec.range().len()).sum();
        (4 * (values + trained) + state.sum::<usize>() + shared + headers) as u64 + companions
    }

    /// The optimizer's file: its state, and the values that training goes on from where they are not published.
    fn state_tensors(&self) -> Vec<(String, Vec<usize>, Numbers<'_>)> {
        let mut tensors = Vec::new();
        for (name, shape, state) in &self.optimizer {
            let numbers = match state {
                State::F32(values) => Numbers::F32(values),
                State::U8(values) => Numbers::U8(values),
            };
            tensors.push((name.clone(), shape.clone(), numbers));
        }
        if let Some(trained) = self.trained {
            for spec in self.specs {
                let name = format!("{}{TRAINED}", spec.name);
                tensors.push((name, spec.shape.clone(), Numbers::F32(&trained[spec.range()])));
            }
        }
        tensors
    }
}

/// More than the files and folders of a checkpoint, and those that take their place for a while.
pub const FILES: u64 = 32;

/// Saves a checkpoint into `root`, lets `latest` and `best` name it or that which is best, and removes those that are
/// not to be kept. Whatever fails, those that are kept stand.
///
/// # Errors
/// [`Kind::Io`]: the disk, or too little room on it.
pub fn write(disk: &dyn Disk, root: &Path, snapshot: &Snapshot<'_>, keep: &Keep) -> Result<Written> {
    let began = Instant::now();
    store::preflight(root, snapshot.bytes(), FILES)?;
    let (dir, Published { hashing, kept }) = save_on(disk, root, snapshot)?;
    let best = keep.best.as_deref().filter(|dir| dir.is_dir());
    if best.is_some() {
        store::point(disk, root, "best", best)?;
    }
    if let Some(last) = keep.last {
        store::prune(disk, root, last, best, Some(&dir))?;
    }
    Ok(Written { dir, step: snapshot.state.step, took: began.elapsed(), hashing, kept })
}

/// Saves a checkpoint into `root` and lets `latest` name it. Returns its folder and what came of it.
///
/// # Errors
/// [`Kind::Io`].
pub fn save_on(disk: &dyn Disk, root: &Path, snapshot: &Snapshot<'_>) -> Result<(PathBuf, Published)> {
    let dir = store::checkpoint_dir(root, snapshot.state.step);
    let elsewhere = snapshot.shared.and_then(|shared| shared.values);
    let tensors = if elsewhere.is_some() { Vec::new() } else { named(snapshot.specs, snapshot.values) };
    let nothing = |name: &str| Err(Error::model(format!("no tensor {name:?}")));
    let nothing = folder::Rest { tensors: &[], fetch: &nothing };
    let rest = elsewhere.unwrap_or(&nothing);
    let published = atomic::publish(disk, &dir, |staging| {
        match snapshot.weights {
            Weights::Adapter(config) => peft::stage(staging, config, &tensors)?,
            Weights::Model(source) => folder::stage(staging, source, &tensors, rest)?,
            Weights::Part => folder::stage_weights(staging, PART, None, &tensors, rest)?,
        }
        staging.write(OPTIMIZER, |writer| match &snapshot.shared {
            Some(shared) => shared.write_to(writer),
            None => write_numbers_to(writer, &snapshot.state_tensors(), &[]),
        })?;
        staging.write_json(STATE, snapshot.state)?;
        staging.write_json(STAMP, snapshot.stamp)
    })?;
    store::point(disk, root, "latest", Some(&dir))?;
    Ok((dir, published))
}

/// Lets `latest` and `best` name these checkpoints, or nothing.
///
/// # Errors
/// As [`store::point`].
pub fn point(root: &Path, latest: Option<&Path>, best: Option<&Path>) -> Result<()> {
    store::point(&RealDisk, root, "latest", latest)?;
    store::point(&RealDisk, root, "best", best)
}

/// As [`store::clean_stale`], on the file system.
///
/// # Errors
/// [`Kind::Io`].
pub fn clean_stale(root: &Path) -> Result<Vec<PathBuf>> {
    store::clean_stale(&RealDisk, root)
}

/// A checkpoint that was verified, its tensors still on disk.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub dir: PathBuf,
    /// What it belongs to.
    pub stamp: Stamp,
    /// Where the run stood.
    pub state: TrainState,
    /// How long hashing its files took.
    pub hashing: Duration,
    weights: WeightFiles,
    weights_path: PathBuf,
    prefix: &'static str,
    optimizer: WeightFiles,
}

/// Verifies and opens a checkpoint: a folder, or a file such as `runs/my-run/best` that names one.
///
/// # Errors
/// [`Kind::Checkpoint`]: not complete, damaged, or no checkpoint of a run.
pub fn load(path: &Path) -> Result<Checkpoint> {
    open(verify(&store::followed(path)?)?)
}

/// Opens a checkpoint that has been verified.
///
/// # Errors
/// [`Kind::Checkpoint`]: it is no checkpoint of a run.
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
                "{}: no {name}: this is no checkpoint to go on from",
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
    Ok(Checkpoint {
        stamp: read_json(&dir.join(STAMP))?,
        state: read_json(&dir.join(STATE))?,
        hashing,
        weights: open(file)?,
        weights_path: dir.join(file),
        prefix,
        optimizer: open(OPTIMIZER)?,
        dir,
    })
}

impl Checkpoint {
    /// Fills the values and the optimizer of a run with the same `specs`, bit by bit what was saved; of an optimizer that
    /// has a share of the state, that share. `averages` are those that the run keeps beside the values, if it does.
    ///
    /// # Errors
    /// [`Kind::Checkpoint`] where names or shapes differ, with both sides.
    pub fn restore(
        &self,
        specs: &[ParamSpec],
        values: &mut [f32],
        optimizer: &mut Optimizer,
        averages: Option<&mut Ema>,
    ) -> Result<()> {
        let everything = 0..values.len();
        self.restore_kept(specs, (values, std::slice::from_ref(&everything)), optimizer, averages)
    }

    /// As [`Checkpoint::restore`], of values of which the flat ranges `kept` are kept, end to end.
    ///
    /// # Errors
    /// As [`Checkpoint::restore`].
    pub fn restore_kept(
        &self,
        specs: &[ParamSpec],
        (values, kept): (&mut [f32], &[Range<usize>]),
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
                self.restore_kept_values(specs, (&mut averages.values, &owned))?;
            }
            read_ranges(&self.optimizer, &trained, specs, kept, values)?;
        } else {
            self.restore_kept_values(specs, (values, kept))?;
        }
        for (name, range, state) in optimizer.tensors_mut() {
            match state {
                State::F32(values) => self.optimizer.read_part_into(&name, range.start, values),
                State::U8(values) => self.optimizer.read_part_of_bytes_into(&name, range.start, values),
            }
            .map_err(|error| error.with_kind(Kind::Checkpoint))?;
        }
        if let Some(odd) = self.state.optimizer_scalars.iter().find(|number| !number.is_finite()) {
            let path = self.dir.join(STATE);
            return Err(Error::checkpoint(format!(
                "{}: optimizer_scalars has {odd}, expected finite numbers",
                path.display()
            ))
            .hint("the run diverged: go on from an earlier checkpoint"));
        }
        optimizer.step = self.state.optimizer_step;
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

    /// Fills only the published values: the best checkpoint's at the end of a run.
    ///
    /// # Errors
    /// As [`Checkpoint::restore`].
    pub fn restore_values(&self, specs: &[ParamSpec], values: &mut [f32]) -> Result<()> {
        let everything = 0..values.len();
        self.restore_kept_values(specs, (values, std::slice::from_ref(&everything)))
    }

    /// As [`Checkpoint::restore_values`], of values of which the flat ranges `kept` are kept, end to end.
    ///
    /// # Errors
    /// As [`Checkpoint::restore`].
    pub fn restore_kept_values(
        &self,
        specs: &[ParamSpec],
        (values, kept): (&mut [f32], &[Range<usize>]),
    ) -> Result<()> {
        let names = prefixed(specs, self.prefix, "");
        // A shared matrix that an adapter holds under both names is read once.
        let copy = format!("{}{LM_HEAD}", peft::PREFIX);
        let shared = self.prefix == peft::PREFIX && specs.iter().any(|spec| spec.name == EMBEDDING);
        let copied = (self.weights.shape(&copy).filter(|_| shared))
            .filter(|_| specs.iter().all(|spec| spec.name != LM_HEAD))
            .map(|shape| (copy.clone(), shape.to_vec()));
        let expected: Vec<_> = names.iter().cloned().chain(copied).collect();
        check(&self.weights, &self.weights_path, &expected)?;
        read_ranges(&self.weights, &names, specs, kept, values)
    }
}

/// The stored names of `specs`, with their shapes.
fn prefixed(specs: &[ParamSpec], prefix: &str, suffix: &str) -> Vec<(String, Vec<usize>)> {
    specs.iter().map(|spec| (format!("{prefix}{}{suffix}", spec.name), spec.shape.clone())).collect()
}

fn check(files: &WeightFiles, path: &Path, expected: &[(String, Vec<usize>)]) -> Result<()> {
    let found = files.names().map(|name| (name, files.shape(name).unwrap_or_default()));
    peft::same_tensors(path, found, expected.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())))
}

/// Reads flat ranges of tensors, stored under `names`, end to end.
fn read_ranges(
    files: &WeightFiles,
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
                let read = files.read_part_into(name, low - spec.offset, now);
                read.map_err(|error| error.with_kind(Kind::Checkpoint))?;
                rest = later;
            }
        }
    }
    Ok(())
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let fail = |reason: String| Error::checkpoint(format!("{}: {reason}", path.display()));
    let text = files::read_own(path, files::SMALL).map_err(|error| {
        fail(format!("cannot be read: {error}"))
            .hint("the checkpoint is incomplete or damaged; go on from an earlier one")
            .unless_of_machine(path, &error)
    })?;
    serde_json::from_slice(&text).map_err(|error| {
        fail(format!("not valid: {error}")).hint("the checkpoint may be of another version of tunesmith")
    })
}
