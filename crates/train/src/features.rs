//! Images whose features a run computes once: a frozen image encoder encodes each image before training, and the
//! features are cached on disk ([`FeatureCache`]). The model is then loaded without it.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use rayon::prelude::*;

use super::engine;
use super::feature_maker::{EncoderSource, FeatureMaker};
use super::model_source::{Described, ModelSource};
use super::picture_identity::Identity;
use super::run_pictures::Computed;
use super::shown_pictures::ShownPictures;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::{self, disk};
use tunesmith_base::memory::human_bytes;
use tunesmith_base::words::count;
use tunesmith_config::vision::{Features, VisionArch};
use tunesmith_config::{Config, Resolved};
use tunesmith_data::{self as data, Dataset, Split};
use tunesmith_device::memory::{self, Budget};
use tunesmith_model::device;
use tunesmith_model::feature_cache::FeatureCache;
use tunesmith_telemetry::progress::{Event, Observer};

/// Whether the features of images are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compute {
    /// What a run does: `vision.cache_features` and the sizes decide.
    AsConfigured,
    /// They are computed for `tunesmith encode`, even if the run would not cache them. Features that are cached already are
    /// checked here; a run checks them when it reads them.
    Always,
    /// As configured, but nothing is computed or opened: for memory predictions, which need only sizes.
    Assume,
}

/// The cached features of a run's images: how many there are, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptFeatures {
    /// Number of different pictures, by content.
    pub pictures: usize,
    /// Number of pictures whose features were computed now rather than found in the cache.
    pub computed: usize,
    /// Bytes of all features, at 4 bytes a number.
    pub bytes: u64,
    /// The folder of the cache that holds them; empty for a prediction, which opens none.
    pub dir: PathBuf,
}

impl KeptFeatures {
    /// One line that tells the user what was computed and where it is.
    pub fn described(&self) -> String {
        let (pictures, computed) = (count(self.pictures, "image"), count(self.computed, "image"));
        let (bytes, dir) = (human_bytes(self.bytes), self.dir.display());
        format!(
            "the image encoder went over {computed} and is not loaded: the features of {pictures} ({bytes}) are in {dir}"
        )
    }
}

/// Computes the features of all pictures of a run, and trains nothing.
///
/// # Errors
/// Those of opening model and data, of the pictures, the disk and the encoder's weights; [`tunesmith_base::Kind::Config`]: the run shows no
/// pictures.
pub fn encode(resolved: &Resolved, observer: &dyn Observer) -> Result<KeptFeatures> {
    let device = device::device(resolved.config.model.device)?;
    if let Some(chosen) = device::chosen(resolved.config.model.device, device) {
        observer.event(&Event::Notice(&format!("the device is {chosen}")));
    }
    let budget = resolved.config.train.memory_budget.map(|bytes| bytes.0).or_else(|| device::usable(device));
    let _budget = budget.map(|bytes| Budget::new(device, bytes));
    memory::guarded(|| {
        engine::choose(resolved.config.tuning.backend);
        let (mut source, config) = Described::find(resolved, observer)?.open(resolved, None, observer)?;
        observer.event(&Event::Phase("reading the data"));
        let dataset = data::load(&config, &source.dir, source.arch.text_ids(), observer, source.pictures.as_ref())?;
        let kept = source.compute_features(&config, &dataset, Compute::Always, observer)?;
        kept.ok_or_else(|| {
            Error::config("the rows of this run show no images").hint("tunesmith data CONFIG shows what a run reads")
        })
    })
}

/// Which features a run with these settings caches, if its rows show images; `None` if it caches none. Without
/// `vision.cache_features`, it does if `train.max_steps` or more than one epoch may show an image again.
pub fn kept_by(config: &Config, vision: &VisionArch) -> Option<Features> {
    let sees_again = config.train.max_steps > 0 || config.train.num_train_epochs > 1.0;
    let kept = config.vision.cache_features.unwrap_or(sees_again) && config.data.use_cache;
    vision.fixed_features().filter(|_| kept)
}

/// The names of the different images in a split, and how many times its rows show an image in total.
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

/// Number of epochs of the run. With `train.max_steps` an estimate, because sizes that are `auto` are not measured yet and
/// count as 1.
fn passes(config: &Config, rows: usize) -> f64 {
    let train = &config.train;
    if train.max_steps <= 0 {
        return train.num_train_epochs;
    }
    let step = train.batch_size.or(1) * train.grad_accum.or(1);
    train.max_steps as f64 * step as f64 / rows.max(1) as f64
}

/// A note that damaged features are computed again; `None` without damage. `pictures` are the images with damaged features.
/// Files that cannot be read count only if the cache lacks features (`misses`).
fn damage(cache: &FeatureCache, pictures: usize, misses: bool) -> Option<String> {
    let files = if misses { cache.unreadable() } else { 0 };
    let what = match (pictures, files) {
        (0, 0) => return None,
        (0, files) => format!("{} that cannot be read", count(files, "file")),
        (pictures, _) => format!("damaged features of {}", count(pictures, "image")),
    };
    Some(format!("{}: {what}: these features are computed again", cache.dir().display()))
}

/// Why `bytes` of features cannot be cached below `root`; `None` if they can.
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
    /// Computes the features of all images that training and validation show, if `how` and the configuration ask for that. From
    /// then on, [`ModelSource::load`] and memory predictions leave the image encoder out. Returns `None` if no features are
    /// cached.
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
        let kept = self.keep_features(config, dataset, how, observer)?;
        if let (Some(vision), Some(pictures)) = (&self.model_arch.vision, &self.run_pictures) {
            self.shown = ShownPictures::of_dataset(dataset, &config.train, vision, pictures)?;
        }
        Ok(kept)
    }

    fn keep_features(
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
                    "features of images cannot be kept, as a part of the image encoder is trained",
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
        observer.event(&Event::Phase("reading the images"));
        let identities: Vec<(String, Identity)> = files
            .into_par_iter()
            .map(|file| Identity::of(&pictures.source.files, &file).map(|identity| (file, identity)))
            .collect::<Result<_>>()?;
        let mut known: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, identity) in &identities {
            known.insert(&identity.content, identity.numbers(&vision, features));
        }
        let bytes = 4 * known.values().sum::<usize>() as u64;
        let own = identities.iter().filter(|(_, identity)| !identity.world).map(|(_, identity)| &identity.content);
        let pictures_known = own.collect::<BTreeSet<_>>().len();
        let mut kept = KeptFeatures { pictures: pictures_known, computed: 0, bytes, dir: PathBuf::new() };
        let cached = if how == Compute::Assume {
            if too_large(config, &root, bytes).is_some() && !asked {
                return Ok(None);
            }
            None
        } else {
            let source = EncoderSource {
                arch: self.arch.clone(),
                weights: self.weights.clone(),
                stack: Arc::clone(&self.stack),
                config: config.clone(),
                device: self.device,
                features,
            };
            let maker = FeatureMaker::new(source, &pictures.source.files)?;
            let mut cache = FeatureCache::open(&root, maker.key());
            let damaged = if how == Compute::Always { cache.forget_damaged(&known) } else { 0 };
            let missing: u64 =
                known.iter().filter(|(content, _)| !cache.has(content)).map(|(_, &n)| 4 * n as u64).sum();
            if let Some(why) = too_large(config, &root, missing) {
                let what = format!("the features of {}: {why}", count(pictures_known, "image"));
                if asked {
                    return Err(Error::new(tunesmith_base::Kind::Io, what)
                        .hint("set vision.feature_cache_size, or data.cache_dir"));
                }
                observer.event(&Event::Notice(&format!("{what}: the image encoder runs in every step")));
                return Ok(None);
            }
            if let Some(note) = damage(&cache, damaged, missing > 0) {
                observer.event(&Event::Notice(&note));
            }
            // Of images with equal content, takes the first by name. They are in the order of content hashes, which is as good as
            // random.
            let mut one_each: BTreeMap<&str, (&str, &Identity)> = BTreeMap::new();
            for (file, identity) in &identities {
                one_each.entry(&identity.content).or_insert((file.as_str(), identity));
            }
            let one_each: Vec<_> = one_each.into_values().collect();
            kept.computed = match maker.encode(&pictures.source.files, &one_each, &mut cache, observer) {
                // A disk that is full or cannot be written costs the cache, not the run.
                Err(error) if !asked && error.kind() == tunesmith_base::Kind::Io => {
                    observer.end();
                    let why = error.message();
                    observer.event(&Event::Notice(&format!(
                        "the features of images are not cached ({why}): the image encoder runs in every step"
                    )));
                    return Ok(None);
                }
                done => done?,
            };
            cache.dir().clone_into(&mut kept.dir);
            Some((RwLock::new(cache), maker))
        };
        let pictures_by_name = identities.into_iter().collect();
        let computed = Computed { arch: Arc::clone(&vision), features, pictures: pictures_by_name, cached };
        if pictures.source.computed.set(computed).is_ok() {
            let behind = VisionArch { features: Some(features), ..(*vision).clone() };
            self.model_arch.vision = Some(Arc::new(behind));
        }
        Ok(Some(kept))
    }
}
