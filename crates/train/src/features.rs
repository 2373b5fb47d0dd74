//! Images whose features a run computes once: a frozen image encoder encodes each image before training, and the
//! features are cached on disk ([`FeatureCache`]). The model is then loaded without it.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rayon::prelude::*;

use super::ahead::{Ahead, ReadPixels};
use super::engine;
use super::model_source::{Described, ModelSource};
use super::run_pictures::{Computed, Identity, PictureSource};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::{self, disk};
use tunesmith_base::memory::human_bytes;
use tunesmith_base::words::count;
use tunesmith_config::vision::{Features, VisionArch};
use tunesmith_config::{Config, ConfigValue as _, Resolved};
use tunesmith_data::{self as data, Dataset, PictureFiles, Pictures as _, Split, split_world};
use tunesmith_device::memory::{self, Budget};
use tunesmith_model::feature_cache::FeatureCache;
use tunesmith_model::{PictureEncoder, device};
use tunesmith_ops::simd;
use tunesmith_telemetry::progress::{Event, Observer};

/// The parts that pictures are encoded in, so that ranks share the work.
const PARTS: usize = 32;
/// The most bytes of features of a part: a file of the cache.
const PART_BYTES: usize = 128 << 20;
/// How long a rank sleeps before it looks again what others have encoded.
const OTHERS: Duration = Duration::from_millis(100);

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

/// Computes the features of all pictures of a run, and trains nothing.
///
/// # Errors
/// Those of opening model and data, of the pictures, the disk and the encoder's weights; [`tunesmith_base::Kind::Config`]: the run shows no
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

/// Says which features are damaged, and that they are computed again.
fn damage(cache: &FeatureCache, pictures: usize, misses: bool) -> Option<String> {
    let files = if misses { cache.unreadable() } else { 0 };
    let what = match (pictures, files) {
        (0, 0) => return None,
        (0, files) => format!("{} that cannot be read", count(files, "file")),
        (pictures, _) => format!("damaged features of {}", count(pictures, "picture")),
    };
    Some(format!("{}: {what}: these features are computed again", cache.dir().display()))
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
        let cache = if how == Compute::Assume {
            if too_large(config, &root, bytes).is_some() && !asked {
                return Ok(None);
            }
            None
        } else {
            let mut cache = FeatureCache::open(&root, &self.features_key(config, &pictures.source.files, features)?);
            let damaged = cache.forget_damaged(&known);
            let missing: u64 =
                known.iter().filter(|(content, _)| !cache.has(content)).map(|(_, &n)| 4 * n as u64).sum();
            if let Some(why) = too_large(config, &root, missing) {
                let what = format!("the features of {}: {why}", count(pictures_known, "picture"));
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
            // Of pictures with one content the first by name, in the order of contents, which is as good as random.
            let mut one_each: BTreeMap<&str, (&str, &Identity)> = BTreeMap::new();
            for (file, identity) in &identities {
                one_each.entry(&identity.content).or_insert((file.as_str(), identity));
            }
            let one_each: Vec<_> = one_each.into_values().collect();
            kept.computed = self.encode(config, &pictures.source, features, &one_each, &mut cache, observer)?;
            cache.dir().clone_into(&mut kept.dir);
            Some(cache)
        };
        let pictures_by_name = identities.into_iter().collect();
        let computed = Computed { arch: Arc::clone(&vision), features, pictures: pictures_by_name, cache };
        if pictures.source.computed.set(computed).is_ok() {
            let behind = VisionArch { features: Some(features), ..(*vision).clone() };
            self.model_arch.vision = Some(Arc::new(behind));
        }
        Ok(Some(kept))
    }

    /// All that features depend on besides the pictures' content.
    fn features_key(&self, config: &Config, files: &PictureFiles, features: Features) -> Result<String> {
        let vision = self.arch.vision.as_ref();
        let world = vision.and_then(|vision| vision.world.as_ref()).map(|world| format!("{:?}", world.encoder));
        let parts = [
            PictureEncoder::fingerprint(&self.base(), features)?,
            files.processing(),
            format!("{:?} {features:?}", vision.map(|vision| (&vision.encoder, &vision.connector))),
            format!("{} {} {}", config.model.dtype.to_json(), config.train.bf16, config.train.fp16),
            format!("{:?} {:?} {:?}", self.device, device::kernels(self.device, config), simd::level()),
        ];
        let parts: Vec<String> = parts.into_iter().chain(world).collect();
        Ok(parts.join("\n"))
    }

    /// Encodes the pictures that the cache lacks; gives their number. Others who need them, such as further ranks of this machine,
    /// encode parts of them meanwhile. Pictures are read on all threads while others are encoded.
    fn encode(
        &self,
        config: &Config,
        source: &Arc<PictureSource>,
        features: Features,
        pictures: &[(&str, &Identity)],
        cache: &mut FeatureCache,
        observer: &dyn Observer,
    ) -> Result<usize> {
        let lacks = |cache: &FeatureCache, part: &[(&str, &Identity)]| -> Vec<String> {
            let missing = part.iter().filter(|(_, identity)| !cache.has(&identity.content));
            missing.map(|(file, _)| (*file).to_owned()).collect()
        };
        let missing = lacks(cache, pictures);
        if missing.is_empty() {
            return Ok(0);
        }
        // A picture that both encoders read is one.
        let missing = missing.iter().map(|file| split_world(file).0).collect::<BTreeSet<_>>().len();
        let contents: BTreeMap<&str, &str> =
            pictures.iter().map(|(file, identity)| (*file, identity.content.as_str())).collect();
        let mut encoder = None;
        let mut open: Vec<&[(&str, &Identity)]> = self.parts(pictures, features);
        observer.event(&Event::Phase("loading the image encoder"));
        observer.begin("encoding pictures", missing as u64);
        while !open.is_empty() {
            let mut claimed = false;
            for part in std::mem::take(&mut open) {
                if lacks(cache, part).is_empty() {
                    continue;
                }
                let names: Vec<&str> = part.iter().map(|(_, identity)| identity.content.as_str()).collect();
                let Some(_claim) = cache.claim(&names.concat())? else {
                    open.push(part);
                    continue;
                };
                claimed = true;
                cache.refresh();
                let files = lacks(cache, part);
                if files.is_empty() {
                    continue;
                }
                if encoder.is_none() {
                    let weights = self.weights.as_ref();
                    let loaded = PictureEncoder::load(&self.arch, weights, config, &self.stack, features)?;
                    encoder = Some(loaded);
                }
                let Some(encoder) = &encoder else { continue };
                let source = Arc::clone(source);
                let read: ReadPixels = Arc::new(move |file| source.files.pixels(file));
                let ahead = Ahead::of(files.clone(), rayon::current_num_threads(), Arc::clone(&read));
                for file in &files {
                    let pixels = ahead.take(file).map_or_else(|| read(file), Ok)?;
                    let encoded = encoder.encode(&pixels).map_err(|error| error.context(format!("picture {file}")))?;
                    cache.add(contents[file.as_str()].to_owned(), encoded)?;
                    observer.advance(u64::from(!split_world(file).1));
                }
                cache.flush()?;
            }
            if !open.is_empty() && !claimed {
                std::thread::sleep(OTHERS);
                cache.refresh();
            }
        }
        observer.end();
        Ok(missing)
    }

    /// The pictures in parts of about as many bytes of features, which whoever shares the cache makes alike.
    fn parts<'a>(
        &self,
        pictures: &'a [(&'a str, &'a Identity)],
        features: Features,
    ) -> Vec<&'a [(&'a str, &'a Identity)]> {
        let Some(vision) = &self.arch.vision else { return Vec::new() };
        let bytes: Vec<usize> = pictures.iter().map(|(_, identity)| 4 * identity.numbers(vision, features)).collect();
        let limit = (bytes.iter().sum::<usize>() / PARTS).clamp(1, PART_BYTES);
        let (mut parts, mut first, mut filled) = (Vec::new(), 0, 0);
        for (at, bytes) in bytes.iter().enumerate() {
            filled += bytes;
            if filled >= limit || at + 1 == pictures.len() {
                parts.push(&pictures[first..=at]);
                (first, filled) = (at + 1, 0);
            }
        }
        parts
    }
}
