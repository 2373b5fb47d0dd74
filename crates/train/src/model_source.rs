//! The model of a configuration: found by [`Described::find`], opened by [`Described::open`], and loaded by
//! [`ModelSource::load`].
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::adapter::{self, Start};
use super::memory_prediction::{MemoryModel, OptimizerState};
use super::run_pictures::RunPictures;
use super::shown_pictures::ShownPictures;
use super::vision::{self, Seer, Sight};
use super::{classification_head, coefficient_limits, trainable};
use tunesmith_base::error::{Error, Result};
use tunesmith_checkpoint::adapter_config::copied;
use tunesmith_checkpoint::peft::{self, Tensors};
use tunesmith_checkpoint::untouched::Untouched;
use tunesmith_checkpoint::{Checkpoint, Hashed, Manifest};
use tunesmith_config::arch::{Arch, TensorSpec};
use tunesmith_config::vision::VisionArch;
use tunesmith_config::{Config, Dtype, Init, Mode, Quantization, Resolved};
use tunesmith_data::Pictures;
use tunesmith_device::Device;
use tunesmith_hub::{self as hub, Part, Snapshot};
use tunesmith_model::adapters::{self, Method};
use tunesmith_model::device::device;
use tunesmith_model::quantize::{self, How};
use tunesmith_model::quantized_cache::Cache;
use tunesmith_model::stack::{Layer, Stack};
use tunesmith_model::targets::{self, Placement, Targets};
use tunesmith_model::weights::{Stacking, WeightFiles, Wrapping};
use tunesmith_model::{Model, Source};
use tunesmith_ops::quant::Format;
use tunesmith_parallel::fsdp::Gatherer;
use tunesmith_plan::memory::OptimizerBytes;
use tunesmith_telemetry::progress::{Downloads, Event, Observer};

/// A model whose shape is known, but whose weights are not downloaded yet.
pub struct Described {
    config: Config,
    dir: PathBuf,
    snapshot: Option<Snapshot>,
    device: Device,
    arch: Arch,
    stored: Vec<TensorSpec>,
    stack: Stack,
    stack_hashes: Vec<String>,
}

/// A model whose files are open, but not loaded.
pub struct ModelSource {
    pub dir: PathBuf,
    /// Its place on the hub, if it came from there.
    pub snapshot: Option<Snapshot>,
    /// Where it is loaded to.
    pub device: Device,
    /// Its shape, with new tokens and the classification head.
    pub arch: Arch,
    /// The shape that is loaded: `arch` without what cached features of images make unnecessary
    /// ([`ModelSource::compute_features`]).
    pub model_arch: Arch,
    /// Its weights; `None` if they are random.
    pub weights: Option<Arc<WeightFiles>>,
    /// Which experts are stored stacked in one tensor: as in the model's files, or for random weights as Transformers reads
    /// them.
    pub stacking: Stacking,
    /// The other parts of a multimodal model.
    pub wrapping: Option<Wrapping>,
    /// The adapters of `tuning.adapters`, merged in memory.
    pub stack: Arc<Stack>,
    /// Hashes of these adapters, for the stamp.
    pub stack_hashes: Vec<String>,
    /// Where adapters go; empty when weights of the model itself are trained.
    pub placements: Vec<Placement>,
    /// Names and shapes of the trained tensors.
    pub trained: Vec<(String, Vec<usize>)>,
    /// Bytes of the optimizer's state, of averages, and of the copy for saving.
    pub optimizer: OptimizerBytes,
    adapter: Option<Tensors>,
    /// Tensors of an encoder and a connector that an earlier stage has trained, and that stay as they are.
    pub kept: Arc<Tensors>,
    /// Untrained tensors of the base that an adapter's file contains too, because PEFT wants every tensor of a saved module.
    pub untouched: Arc<Untouched>,
    /// Reads the pictures of rows; `None` without an image encoder.
    pub pictures: Option<Arc<dyn Pictures>>,
    /// The reader behind `pictures`, in its own type.
    pub(super) run_pictures: Option<Arc<RunPictures>>,
    /// The images of its rows, as predictions see them; known once [`ModelSource::compute_features`] was called.
    pub(super) shown: Option<ShownPictures>,
    config: Config,
}

/// A loaded model, and the gatherer of its frozen weights if ranks shard them.
pub struct Loaded {
    pub model: Model,
    /// Fetches the weights that other ranks hold.
    pub gatherer: Option<Gatherer>,
}

impl Described {
    /// Finds the model and the adapters of `tuning.adapters`. From the hub it downloads only the small files, so that an
    /// unsupported model is refused before its weights are downloaded.
    ///
    /// # Errors
    /// The folder does not exist, the hub fails, or this version does not support the model.
    pub fn find(resolved: &Resolved, observer: &dyn Observer) -> Result<Self> {
        let mut config = resolved.config.clone();
        let device = device(config.model.device)?;
        let default = *resolved.source("train.max_tokens_per_pass") == tunesmith_config::Source::Default;
        if device != Device::Cpu && default {
            // The default suits the caches of a CPU.
            config.train.max_tokens_per_pass = None;
        }
        let hub::ModelDir { dir, snapshot } = hub::model_dir(&config.model, Part::Description, &Downloads(observer))?;
        let mut arch = Arch::from_dir(&dir)?;
        arch.refuse_dropout(config.train.disable_dropout)?;
        let stored = arch.tensors();
        // Merged adapters must fit the model as it is on disk, before tokens or a head are added.
        let (stack, stack_hashes) = adapter::stack(&config.tuning.adapters, &mut arch)?;
        let (length, note) = resolved.max_seq_len(arch.reach(), false)?;
        config.model.max_seq_len = length;
        if let Some(note) = note {
            observer.event(&Event::Notice(&note));
        }
        Ok(Self { config, dir, snapshot, device, arch, stored, stack, stack_hashes })
    }

    /// The folder with `config.json` and the tokenizer.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Opens the weights and the adapter to start from. Also returns the completed configuration: with the row length, the
    /// labels, the adapter's own settings, the commit on the hub, and local paths.
    ///
    /// # Errors
    /// The weights or the adapter do not fit, or there is nothing to train.
    pub fn open(
        self,
        resolved: &Resolved,
        resume: Option<&Checkpoint>,
        observer: &dyn Observer,
    ) -> Result<(ModelSource, Config)> {
        let Self { mut config, dir, snapshot, device, mut arch, stored, mut stack, stack_hashes } = self;
        let downloads = Downloads(observer);
        if config.tuning.freeze_language {
            config.tuning.leave_language_out();
        }
        let source = adapter::source(&config, resume, &downloads, observer)?;
        adapter::grow(&config, &dir, source.as_deref(), &mut arch)?;
        arch.separate(Targets::of(&config.tuning).apart());
        hub::fetch_paths(&mut config.data, &downloads)?;
        let seer = Seer { dir: &dir, tokenizer: &dir, hidden_size: arch.hidden_size };
        let sight = Sight::of_rows(&config, seer, Part::Whole, &downloads)?;
        vision::refuse_blind(&arch, sight.is_some())?;
        if sight.is_none() {
            vision::refuse_unread(resolved)?;
        }
        arch.vision = sight.as_ref().map(|sight| Arc::clone(&sight.arch));
        classification_head::set(&mut config, &mut arch, source.as_deref(), observer)?;
        let (mut adapter, mut kept) = (None, Arc::default());
        if let Some(source) = &source {
            let Start { tuning, tensors, kept: of_source } = adapter::open(source, resolved, &arch)?;
            // The adapter may have been trained further since the run began.
            kept = Arc::new(match resume {
                Some(resume) if !of_source.is_empty() => peft::values_of(&resume.dir, of_source.keys())?,
                _ => of_source,
            });
            if !kept.is_empty() {
                stack.0.push(Layer::Kept(Arc::clone(&kept)));
            }
            if config.train.resume_from_checkpoint.is_none() {
                config.tuning.adapter = Some(source.clone());
            }
            if let Some(about) = adapters::of(&tuning).map(Method::about) {
                config.tuning = copied(about, |_| true, &tuning, &config.tuning);
            }
            adapter = Some(tensors);
        }
        let placements = targets::placed(&arch, &config.tuning)?;
        if let Some(warning) = targets::Targets::of(&config.tuning).idle_exclusions(&arch)? {
            observer.warn(&warning);
        }
        let trained = trainable::tensors(&config, &arch, &placements)?;
        trainable::check_rates(&config, &trained)?;
        if let Some(note) = trainable::peft_warning(&arch, &trained) {
            observer.event(&Event::Notice(note));
        }
        let optimizer = OptimizerState::new(trained.clone()).bytes(&config)?;
        if let Some(snapshot) = &snapshot {
            config.model.revision = Some(snapshot.commit.clone());
            if config.model.init == Init::Pretrained {
                hub::model_dir(&config.model, Part::Whole, &downloads)?;
            }
        }
        if config.model.init == Init::Pretrained {
            Manifest::check_model(&dir, Hashed::Small)?;
        }
        let weights = match (config.model.init, arch.wrapper) {
            (Init::Pretrained, _) => Some(WeightFiles::open_model(&dir, &arch, &stored)?),
            (Init::Random, None) if arch.is_renamed() && arch.naming().is_none() => {
                return Err(Error::config(format!("model.init: random: not yet for {}", arch.family.model_type))
                    .hint("set model.init: pretrained"));
            }
            (Init::Random, None) => None,
            (Init::Random, Some(wrapper)) => {
                return Err(Error::config(format!(
                    "model.init: random, but {} describes a multimodal model ({})",
                    dir.join("config.json").display(),
                    wrapper.model_type
                ))
                .hint("use a config.json of the language model only: the contents of its text_config"));
            }
        };
        let wrapping = weights.as_ref().map_or_else(|| Wrapping::drawn(&arch), WeightFiles::wrapping);
        let stacking = weights.as_ref().map_or_else(|| Stacking::drawn(&arch), |files| files.stacking().clone());
        let how = quantize::resolve(&arch, &config, weights.as_ref())?;
        quantize::matrices(&arch, &config.model.quantization_skip_modules)?;
        config.model.quantization = how.map_or(Quantization::None, How::setting);
        let mut source = ModelSource {
            dir,
            snapshot,
            device,
            model_arch: arch.clone(),
            arch,
            weights: weights.map(Arc::new),
            stacking,
            wrapping,
            stack: Arc::new(stack),
            stack_hashes,
            placements,
            trained,
            optimizer,
            adapter,
            kept,
            untouched: Arc::default(),
            pictures: sight.as_ref().map(Sight::pictures),
            run_pictures: sight.map(|sight| sight.run_pictures),
            shown: None,
            config: config.clone(),
        };
        if config.tuning.mode.adapts() {
            source.untouched = Untouched::of_base(&source.saved_arch(), source.weights.as_deref())?.into();
        }
        Ok((source, config))
    }
}

impl ModelSource {
    /// The shape that counts everything as trained that the saved adapter contains: what this run trains, what an earlier stage
    /// has trained, and the tensors of [`ModelSource::untouched`].
    pub fn saved_arch(&self) -> Arch {
        let more = !self.kept.is_empty() || !self.untouched.is_empty();
        let Some(vision) = self.arch.vision.as_ref().filter(|_| more) else { return self.arch.clone() };
        let has = |name: &str| {
            let trains = self.trained.iter().any(|(trained, _)| trained == name);
            trains || self.kept.contains_key(name) || self.untouched.has(name)
        };
        let training = vision.trained_by(&has);
        Arch { vision: Some(Arc::new(VisionArch { training, ..(**vision).clone() })), ..self.arch.clone() }
    }

    /// The folder that names of pictures are relative to.
    pub fn image_dir(&self) -> PathBuf {
        vision::image_dir(&self.config)
    }

    /// Number of values that the run trains.
    pub fn trained_parameters(&self) -> u64 {
        self.trained.iter().map(|(_, shape)| trainable::size(shape)).sum()
    }

    /// Predicts the memory of this model.
    pub fn memory(&self) -> MemoryModel<'_> {
        MemoryModel::new(&self.config, &self.model_arch, self.weights.as_deref(), self.device)
            .showing(self.shown.as_ref())
    }

    /// Reads tensors of the base model, with the adapters merged.
    pub fn base(&self) -> Source<'_> {
        Source { arch: &self.arch, weights: self.weights.as_deref(), config: &self.config, stack: &self.stack }
    }

    /// How the base is quantized; `None` if it is not.
    ///
    /// # Errors
    /// The configuration and the model's files contradict each other.
    pub fn quantization(&self) -> Result<Option<How>> {
        quantize::resolve(&self.arch, &self.config, self.weights.as_deref())
    }

    /// Number of matrices of the base that quantization covers.
    pub fn quantized_matrices(&self) -> usize {
        let kept = quantize::kept(&self.arch, &self.config, self.weights.as_deref()).map_or(0, |kept| kept.len());
        match self.quantization() {
            Ok(Some(how)) if how.format.is_makers() => kept,
            _ => quantize::coded(&self.arch, &self.config, self.weights.as_deref()).map_or(0, |coded| coded.len()),
        }
    }

    /// A hash of the weights of the base and of the merged adapters, for the stamp. Reads all weights once, and before that all
    /// files of a model that tunesmith wrote, to compare them with its manifest.
    ///
    /// # Errors
    /// The weights cannot be read, or are not as they were written.
    pub fn fingerprint(&self) -> Result<String> {
        let base = match &self.weights {
            Some(weights) => {
                Manifest::check_model(&self.dir, Hashed::All)?;
                weights.fingerprint()?
            }
            None => format!("random, seed {}", self.config.train.seed),
        };
        Ok(self.stack_hashes.iter().fold(base, |base, adapter| format!("{base} + {adapter}")))
    }

    /// The type of the base's matrices in memory. Must follow the same rules as [`Model::load_with`].
    pub fn base_dtype(&self) -> &'static str {
        let stored = || {
            let mut matrices = self.arch.tensors().into_iter().filter(|spec| spec.shape.len() > 1);
            let untouched = self.stack.leaves_base();
            untouched && self.weights.as_deref().is_some_and(|files| matrices.any(|spec| files.is_bf16(&spec.name)))
        };
        let narrow = self.config.tuning.mode != Mode::Full
            && match self.config.model.dtype {
                Dtype::Float32 => false,
                Dtype::Bfloat16 => true,
                Dtype::Auto => stored(),
            };
        if narrow { "bfloat16" } else { "float32" }
    }

    /// Quantizes the base into the cache, unless it is there already or not cached. The first rank of a machine calls this, so
    /// that the others find the copy.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn quantize_ahead(&self, observer: &dyn Observer) -> Result<()> {
        let (Some(weights), Some(cache)) = (&self.weights, self.quantized_cache()?) else { return Ok(()) };
        observer.event(&Event::Phase("quantizing the base"));
        for note in quantize::keep(&self.arch, weights, &self.config, &self.stack, cache, self.device)? {
            observer.event(&Event::Notice(&note));
        }
        Ok(())
    }

    /// Loads the model as it is before step 1 of a new run.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn load(&self, gatherer: Option<&Gatherer>) -> Result<Model> {
        let (weights, cache) = (self.weights.as_deref(), self.quantized_cache()?);
        let shards = gatherer.map(Gatherer::shards).unwrap_or_default();
        let (arch, config, stack) = (&self.model_arch, &self.config, &self.stack);
        coefficient_limits::refuse(&Source { arch, weights, config, stack })?;
        let mut model = Model::load_with(&self.model_arch, weights, &self.config, &self.stack, cache, shards)?;
        if let Some(adapter) = &self.adapter {
            let specs = model.params.specs.clone();
            for spec in specs {
                // The names and shapes were compared when the adapter was opened.
                if let Some((_, values)) = adapter.get(&spec.name) {
                    model.params.put(&spec.range(), values);
                }
            }
        }
        Ok(model)
    }

    /// The cache of quantized matrices; `None` if the base is not quantized, or used as it is on disk.
    fn quantized_cache(&self) -> Result<Option<Cache<'_>>> {
        let coded = |files: &&WeightFiles| files.quantization().is_none_or(Format::is_makers);
        let dense = self.weights.as_deref().filter(|_| self.config.data.use_cache).filter(coded);
        let root = self.config.data.cache_dir.clone().or_else(tunesmith_base::files::user_cache);
        match (self.quantization()?, dense, root) {
            // FP8 is coded as fast as it is read.
            (Some(how), Some(files), Some(root)) if how.format != Format::Fp8 && !how.format.is_makers() => {
                Cache::new(&root, files, how).map(Some)
            }
            _ => Ok(None),
        }
    }
}
