//! Pictures whose features a run computes once: a frozen image encoder goes over each picture before training, and what it
//! computes is kept on disk ([`FeatureCache`]). The model is then loaded without it.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use super::engine;
use super::model_source::{Described, ModelSource};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::{self, disk};
use tunesmith_base::memory::human_bytes;
use tunesmith_base::words::count;
use tunesmith_config::vision::{ChatImages, Features, VisionArch};
use tunesmith_config::{Config, ConfigValue as _, Resolved};
use tunesmith_data::{self as data, Dataset, PictureFiles, PictureLook, PictureRows, Pictures, Split};
use tunesmith_device::memory::{self, Budget};
use tunesmith_model::feature_cache::FeatureCache;
use tunesmith_model::{PictureEncoder, device};
use tunesmith_ops::simd;
use tunesmith_telemetry::progress::{Event, Observer};
use tunesmith_vision::{Pixels, Tile};

/// The pictures of a run: read from their files, or the features of them that have been computed.
#[derive(Debug)]
pub struct RunPictures {
    files: PictureFiles,
    computed: OnceLock<Computed>,
}

/// Where the features of pictures are.
#[derive(Debug)]
struct Computed {
    arch: Arc<VisionArch>,
    features: Features,
    /// By name of the picture.
    pictures: BTreeMap<String, Identity>,
    /// `None` where only sizes matter: features are then zeros.
    cache: Option<FeatureCache>,
}

/// What of a picture must be known to find its features.
#[derive(Debug)]
struct Identity {
    content: String,
    tiles: Vec<Tile>,
}

/// What is done about features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// What a run does: `vision.cache_features` and the sizes decide.
    AsConfigured,
    /// They are computed, whatever the configuration says of how often pictures are seen.
    Always,
    /// As configured, but nothing is computed: for predictions, which look at sizes alone.
    Assume,
}

/// The features of a run's pictures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptFeatures {
    /// Different pictures.
    pub pictures: usize,
    /// Those whose features were computed now.
    pub computed: usize,
    /// Of all features.
    pub bytes: u64,
    /// Where they are.
    pub dir: PathBuf,
}

impl KeptFeatures {
    /// In one line, for people.
    pub fn described(&self) -> String {
        let (pictures, computed) = (count(self.pictures, "picture"), count(self.computed, "picture"));
        let (bytes, dir) = (human_bytes(self.bytes), self.dir.display());
        format!(
            "the image encoder went over {computed} and is not loaded: the features of {pictures} ({bytes}) are in {dir}"
        )
    }
}

impl RunPictures {
    /// Of these files.
    pub const fn new(files: PictureFiles) -> Self {
        Self { files, computed: OnceLock::new() }
    }
}

impl Pictures for RunPictures {
    fn keep(&self, name: String) -> Result<String> {
        self.files.keep(name)
    }

    fn rows(&self, file: &str) -> Result<PictureRows> {
        self.files.rows(file)
    }

    fn pixels(&self, file: &str) -> Result<Arc<Pixels>> {
        match self.computed.get() {
            Some(computed) => computed.pixels(&self.files, file).map(Arc::new),
            None => self.files.pixels(file),
        }
    }

    fn look(&self, file: &str) -> Result<PictureLook> {
        self.files.look(file)
    }

    fn chat(&self) -> Option<ChatImages> {
        self.files.chat()
    }

    fn key(&self) -> String {
        self.files.key()
    }
}

impl Identity {
    fn of(files: &PictureFiles, file: &str) -> Result<Self> {
        let PictureLook { content, width, height } = files.look(file)?;
        Ok(Self { content, tiles: files.tiles(width, height)? })
    }

    /// How many numbers its features have.
    fn numbers(&self, arch: &VisionArch, features: Features) -> usize {
        let tiles: Vec<_> = self.tiles.iter().map(|tile| (tile.rows, tile.columns)).collect();
        arch.features_shape(features, &tiles).iter().product()
    }
}

impl Computed {
    fn pixels(&self, files: &PictureFiles, file: &str) -> Result<Pixels> {
        let found;
        let picture = if let Some(picture) = self.pictures.get(file) {
            picture
        } else {
            found = Identity::of(files, file)?;
            &found
        };
        let numbers = picture.numbers(&self.arch, self.features);
        let patches = match &self.cache {
            Some(cache) => cache.read(&picture.content, numbers)?,
            None => vec![0.0; numbers],
        };
        Ok(Pixels { patches, tiles: picture.tiles.clone() })
    }
}

/// Computes the features of all pictures of a run, and trains nothing.
///
/// # Errors
/// As [`ModelSource::compute_features`], and those of opening model and data; [`tunesmith_base::Kind::Config`]: the run shows no
/// pictures.
pub fn encode(resolved: &Resolved, observer: &dyn Observer) -> Result<KeptFeatures> {
    let device = device::device(resolved.config.model.device)?;
    let budget = resolved.config.train.memory_budget.map(|bytes| bytes.0).or_else(|| device::usable(device));
    let _budget = budget.map(|bytes| Budget::new(device, bytes));
    memory::guarded(|| {
        engine::choose(resolved.config.tuning.backend);
        let (mut source, config) = Described::find(resolved, observer)?.open(resolved, None, observer)?;
        observer.event(&Event::Phase("reading the data"));
        let dataset = data::load(&config, &source.dir, source.arch.vocab_size, observer, source.pictures.as_ref())?;
        let kept = source.compute_features(&config, &dataset, Compute::Always, observer)?;
        kept.ok_or_else(|| {
            Error::config("the rows of this run show no pictures").hint("tunesmith data CONFIG shows what a run reads")
        })
    })
}

/// What a run with these settings keeps of its pictures, if they are seen more than once.
pub fn kept_by(config: &Config, vision: &VisionArch) -> Option<Features> {
    let sees_again = config.train.max_steps > 0 || config.train.num_train_epochs > 1.0;
    let kept = config.vision.cache_features.unwrap_or(sees_again) && config.data.use_cache;
    vision.fixed_features().filter(|_| kept)
}

/// The pictures of a part of the data, and how often one is shown.
fn shown(split: Option<&Split>) -> (BTreeSet<String>, usize) {
    let (mut files, mut times) = (BTreeSet::new(), 0);
    if let Some(split) = split {
        for shown in (0..split.len()).flat_map(|index| split.pictures(index)).flatten() {
            times += 1;
            files.insert(shown.file.clone());
        }
    }
    (files, times)
}

/// How often training goes over its rows, as far as that is known before sizes are measured.
fn passes(config: &Config, rows: usize) -> f64 {
    let train = &config.train;
    if train.max_steps <= 0 {
        return train.num_train_epochs;
    }
    let step = train.batch_size.or(1) * train.grad_accum.or(1);
    train.max_steps as f64 * step as f64 / rows.max(1) as f64
}

/// Why so many bytes of features are not kept.
fn too_large(config: &Config, root: &Path, bytes: u64) -> Option<String> {
    let limit = config.vision.feature_cache_size.0;
    if bytes > limit {
        return Some(format!("{}, more than vision.feature_cache_size ({})", human_bytes(bytes), human_bytes(limit)));
    }
    // The folder may not exist yet.
    let there = root.ancestors().find(|folder| folder.exists())?;
    let free = disk::free_space(there).ok()?.bytes;
    (bytes > free / 10 * 9)
        .then(|| format!("{}, and {} has {} free", human_bytes(bytes), root.display(), human_bytes(free)))
}

impl ModelSource {
    /// Computes the features of all pictures that training and evaluation show, if that is to be done, and from then on has
    /// [`ModelSource::load`] and predictions leave the encoder out. `None` if nothing is kept.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: features are asked for, but a part of the encoder is trained;
    /// [`tunesmith_base::Kind::Data`]: a picture cannot be read; those of the disk and the model's files.
    pub fn compute_features(
        &mut self,
        config: &Config,
        dataset: &Dataset,
        how: Compute,
        observer: &dyn Observer,
    ) -> Result<Option<KeptFeatures>> {
        let (Some(vision), Some(pictures)) = (self.arch.vision.clone(), self.run_pictures.clone()) else {
            return Ok(None);
        };
        let asked = config.vision.cache_features == Some(true) || how == Compute::Always;
        let Some(features) = vision.fixed_features() else {
            if asked {
                return Err(Error::config(
                    "features of pictures cannot be kept, as a part of the image encoder is trained",
                )
                .hint("leave vision.cache_features out, or set tuning.freeze_vision: true"));
            }
            return Ok(None);
        };
        if how != Compute::Always && (config.vision.cache_features == Some(false) || !config.data.use_cache) {
            return Ok(None);
        }
        let (mut files, times) = shown(Some(&dataset.train));
        let seen = times as f64 * passes(config, dataset.train.len());
        if files.is_empty() || !asked && seen < 1.5 * files.len() as f64 {
            return Ok(None);
        }
        files.extend(shown(dataset.validation.as_ref()).0);
        let root = config.data.cache_dir.clone().or_else(files::user_cache).unwrap_or_else(std::env::temp_dir);
        observer.event(&Event::Phase("reading the pictures"));
        let identities: Vec<(String, Identity)> = files
            .into_par_iter()
            .map(|file| Identity::of(&pictures.files, &file).map(|identity| (file, identity)))
            .collect::<Result<_>>()?;
        let mut known: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, identity) in &identities {
            known.insert(&identity.content, identity.numbers(&vision, features));
        }
        let bytes = 4 * known.values().sum::<usize>() as u64;
        let mut kept = KeptFeatures { pictures: known.len(), computed: 0, bytes, dir: PathBuf::new() };
        let cache = if how == Compute::Assume {
            if too_large(config, &root, bytes).is_some() && !asked {
                return Ok(None);
            }
            None
        } else {
            let mut cache = FeatureCache::open(&root, &self.features_key(config, &pictures.files, features)?);
            let missing: u64 =
                known.iter().filter(|(content, _)| !cache.has(content)).map(|(_, &n)| 4 * n as u64).sum();
            if let Some(why) = too_large(config, &root, missing) {
                let what = format!("the features of {}: {why}", count(known.len(), "picture"));
                if asked {
                    return Err(Error::new(tunesmith_base::Kind::Io, what)
                        .hint("set vision.feature_cache_size, or data.cache_dir"));
                }
                observer.event(&Event::Notice(&format!("{what}: the image encoder runs in every step")));
                return Ok(None);
            }
            kept.computed = self.encode(config, &pictures.files, features, &identities, &mut cache, observer)?;
            cache.dir().clone_into(&mut kept.dir);
            Some(cache)
        };
        let pictures_by_name = identities.into_iter().collect();
        let computed = Computed { arch: Arc::clone(&vision), features, pictures: pictures_by_name, cache };
        if pictures.computed.set(computed).is_ok() {
            let behind = VisionArch { features: Some(features), ..(*vision).clone() };
            self.model_arch.vision = Some(Arc::new(behind));
        }
        Ok(Some(kept))
    }

    /// All that features depend on besides the pictures' content.
    fn features_key(&self, config: &Config, files: &PictureFiles, features: Features) -> Result<String> {
        let parts = [
            PictureEncoder::fingerprint(&self.base(), features)?,
            files.processing(),
            format!("{:?} {features:?}", self.arch.vision.as_ref().map(|vision| (&vision.encoder, &vision.connector))),
            format!("{} {} {}", config.model.dtype.to_json(), config.train.bf16, config.train.fp16),
            format!("{:?} {:?} {:?}", self.device, device::kernels(self.device), simd::level()),
        ];
        Ok(parts.join("\n"))
    }

    /// Encodes the pictures that the cache lacks; gives their number. Pictures are decoded on all threads while others are
    /// encoded.
    fn encode(
        &self,
        config: &Config,
        files: &PictureFiles,
        features: Features,
        identities: &[(String, Identity)],
        cache: &mut FeatureCache,
        observer: &dyn Observer,
    ) -> Result<usize> {
        let mut asked = BTreeSet::new();
        let missing: Vec<_> = identities
            .iter()
            .filter(|(_, identity)| !cache.has(&identity.content) && asked.insert(&identity.content))
            .collect();
        if missing.is_empty() {
            return Ok(0);
        }
        observer.event(&Event::Phase("loading the image encoder"));
        let encoder = PictureEncoder::load(&self.arch, self.weights.as_ref(), config, &self.stack, features)?;
        observer.begin("encoding pictures", missing.len() as u64);
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let pool = rayon::current_num_threads().max(1);
        std::thread::scope(|scope| {
            let missing = &missing;
            scope.spawn(move || {
                for group in missing.chunks(4 * pool) {
                    let read: Result<Vec<Arc<Pixels>>> = group.par_iter().map(|(file, _)| files.pixels(file)).collect();
                    let failed = read.is_err();
                    if sender.send((group, read)).is_err() || failed {
                        return;
                    }
                }
            });
            for (group, read) in receiver {
                for ((file, identity), pixels) in group.iter().zip(read?) {
                    let encoded = encoder.encode(&pixels).map_err(|error| error.context(format!("picture {file}")))?;
                    cache.add(identity.content.clone(), encoded)?;
                    observer.advance(1);
                }
            }
            Ok::<_, Error>(())
        })?;
        cache.flush()?;
        observer.end();
        Ok(missing.len())
    }
}
