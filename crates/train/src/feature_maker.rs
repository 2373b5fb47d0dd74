//! Computes the features of images with a frozen image encoder and caches them on disk. The encoder is in memory only during
//! that time.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::ahead::{Ahead, ReadPixels};
use super::picture_identity::Identity;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::Arch;
use tunesmith_config::vision::Features;
use tunesmith_config::{Config, ConfigValue as _};
use tunesmith_data::{PictureFiles, Pictures as _, split_world};
use tunesmith_device::Device;
use tunesmith_model::feature_cache::FeatureCache;
use tunesmith_model::stack::Stack;
use tunesmith_model::weights::WeightFiles;
use tunesmith_model::{PictureEncoder, Source, device};
use tunesmith_ops::simd;
use tunesmith_telemetry::progress::{Event, Observer, SilentObserver};

/// About how many parts the images are divided into, so that ranks can share the work.
const PARTS: usize = 32;
/// Maximum bytes of features in a part, which becomes one file of the cache.
const PART_BYTES: usize = 128 << 20;
/// How long a rank sleeps before it checks again what other ranks have encoded.
const OTHERS: Duration = Duration::from_millis(100);

/// The image encoder of a run: its shape, its weights, the device it runs on, and the features to compute with it.
#[derive(Debug)]
pub(crate) struct EncoderSource {
    pub arch: Arch,
    pub weights: Option<Arc<WeightFiles>>,
    pub stack: Arc<Stack>,
    pub config: Config,
    pub device: Device,
    pub features: Features,
}

/// Computes the features of a run's images.
#[derive(Debug)]
pub(crate) struct FeatureMaker {
    source: EncoderSource,
    key: String,
}

impl EncoderSource {
    /// Everything that features depend on besides the images' content, as text: the encoder and its weights, image processing,
    /// data types, device, and kernels. Reads the encoder's tensors once.
    fn key(&self, files: &PictureFiles) -> Result<String> {
        let Self { arch, config, device, features, .. } = self;
        let base = Source { arch, weights: self.weights.as_deref(), config, stack: &self.stack };
        let vision = arch.vision.as_ref();
        let world = vision.and_then(|vision| vision.world.as_ref()).map(|world| format!("{:?}", world.encoder));
        let parts = [
            PictureEncoder::fingerprint(&base, *features)?,
            files.processing(),
            format!("{:?} {features:?}", vision.map(|vision| (&vision.encoder, &vision.connector))),
            format!("{} {} {}", config.model.dtype.to_json(), config.train.bf16, config.train.fp16),
            format!("{device:?} {:?} {:?}", device::kernels(*device, config), simd::level().vectors()),
        ];
        let parts: Vec<String> = parts.into_iter().chain(world).collect();
        Ok(parts.join("\n"))
    }
}

impl FeatureMaker {
    /// Computes features with this encoder.
    ///
    /// # Errors
    /// The encoder's files cannot be read.
    pub fn new(source: EncoderSource, files: &PictureFiles) -> Result<Self> {
        let key = source.key(files)?;
        Ok(Self { source, key })
    }

    /// The key to open the cache with: everything that features depend on besides the images' content.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Encodes images again whose cached features were damaged after the run began, with the same result as before the run. Does
    /// nothing if another process that shares the cache has done so meanwhile.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the encoder's files have changed; those of [`Self::encode`].
    pub fn mend(
        &self,
        files: &Arc<PictureFiles>,
        pictures: &[(&str, &Identity)],
        cache: &mut FeatureCache,
    ) -> Result<()> {
        let Some(vision) = &self.source.arch.vision else { return Ok(()) };
        let numbers = |identity: &Identity| identity.numbers(vision, self.source.features);
        cache.refresh();
        cache.forget_damaged(&pictures.iter().map(|(_, it)| (it.content.as_str(), numbers(it))).collect());
        if pictures.iter().all(|(_, identity)| cache.has(&identity.content)) {
            return Ok(());
        }
        if self.source.key(files)? != self.key {
            return Err(Error::model("the files of the image encoder have changed since the run began")
                .hint("put the files back that the run began with"));
        }
        self.encode(files, pictures, cache, &SilentObserver).map(drop)
    }

    /// Encodes the images that the cache lacks, and returns their number. Other processes that need them, such as other ranks of
    /// this machine, encode some of the parts at the same time. All threads read images while the encoder runs.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: a picture cannot be read; [`tunesmith_base::Kind::Memory`]; those of the disk and the encoder's
    /// files.
    pub fn encode(
        &self,
        files: &Arc<PictureFiles>,
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
        // An image that both encoders read counts once.
        let missing = missing.iter().map(|file| split_world(file).0).collect::<BTreeSet<_>>().len();
        let contents: BTreeMap<&str, &str> =
            pictures.iter().map(|(file, identity)| (*file, identity.content.as_str())).collect();
        let mut encoder = None;
        let mut open: Vec<&[(&str, &Identity)]> = self.parts(pictures);
        observer.event(&Event::Phase("loading the image encoder"));
        observer.begin("encoding images", missing as u64);
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
                let lacking = lacks(cache, part);
                if lacking.is_empty() {
                    continue;
                }
                if encoder.is_none() {
                    let EncoderSource { arch, weights, config, stack, features, .. } = &self.source;
                    encoder = Some(PictureEncoder::load(arch, weights.as_deref(), config, stack, *features)?);
                }
                let Some(encoder) = &encoder else { continue };
                let from = Arc::clone(files);
                let read: ReadPixels = Arc::new(move |file| from.pixels(file));
                let ahead = Ahead::of(lacking.clone(), tunesmith_ops::par::threads(), Arc::clone(&read));
                for file in &lacking {
                    let pixels = ahead.take(file).map_or_else(|| read(file), Ok)?;
                    let encoded = encoder.encode(&pixels).map_err(|error| files.located(file, error))?;
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

    /// Divides the images into parts with about equally many bytes of features. Every process that shares the cache makes the
    /// same parts.
    fn parts<'a>(&self, pictures: &'a [(&'a str, &'a Identity)]) -> Vec<&'a [(&'a str, &'a Identity)]> {
        let EncoderSource { arch, features, .. } = &self.source;
        let Some(vision) = &arch.vision else { return Vec::new() };
        let bytes: Vec<usize> = pictures.iter().map(|(_, identity)| 4 * identity.numbers(vision, *features)).collect();
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
