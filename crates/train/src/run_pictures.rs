//! The pictures of a run, which come as pixels or as features that have been computed.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::ahead::Ahead;
use tunesmith_base::error::Result;
use tunesmith_config::vision::{ChatImages, Features, VisionArch};
use tunesmith_data::{PictureFiles, PictureLook, PictureRows, Pictures};
use tunesmith_model::feature_cache::FeatureCache;
use tunesmith_vision::{Layout, Pixels};

/// The pictures of a run: read from their files, or the features of them that have been computed.
#[derive(Debug)]
pub struct RunPictures {
    pub(crate) source: Arc<PictureSource>,
    /// Those that the next step will ask for.
    ahead: Mutex<Option<Arc<Ahead>>>,
}

/// Where pictures come from.
#[derive(Debug)]
pub(crate) struct PictureSource {
    pub files: PictureFiles,
    pub computed: OnceLock<Computed>,
}

/// Where the features of pictures are.
#[derive(Debug)]
pub(crate) struct Computed {
    pub arch: Arc<VisionArch>,
    pub features: Features,
    /// By name of the picture.
    pub pictures: BTreeMap<String, Identity>,
    /// `None` where only sizes matter: features are then zeros.
    pub cache: Option<FeatureCache>,
}

/// What of a picture must be known to find its features.
#[derive(Debug)]
pub(crate) struct Identity {
    pub content: String,
    pub layout: Layout,
}

impl RunPictures {
    /// Of these files.
    pub fn new(files: PictureFiles) -> Self {
        let source = PictureSource { files, computed: OnceLock::new() };
        Self { source: Arc::new(source), ahead: Mutex::new(None) }
    }
}

impl PictureSource {
    fn pixels(&self, file: &str) -> Result<Arc<Pixels>> {
        match self.computed.get() {
            Some(computed) => computed.pixels(&self.files, file).map(Arc::new),
            None => self.files.pixels(file),
        }
    }
}

impl Pictures for RunPictures {
    fn keep(&self, name: String) -> Result<String> {
        self.source.files.keep(name)
    }

    fn among_others(&self, name: String) -> String {
        self.source.files.among_others(name)
    }

    fn rows(&self, file: &str) -> Result<PictureRows> {
        self.source.files.rows(file)
    }

    fn pixels(&self, file: &str) -> Result<Arc<Pixels>> {
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match ahead.and_then(|ahead| ahead.take(file)) {
            Some(pixels) => Ok(pixels),
            None => self.source.pixels(file),
        }
    }

    fn read_ahead(&self, files: Vec<String>) {
        // A step computes on all threads too: half of them keep up with it.
        let threads = rayon::current_num_threads().div_ceil(2);
        let source = Arc::clone(&self.source);
        let next = Ahead::of(files, threads, Arc::new(move |file| source.pixels(file)));
        let before = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).replace(Arc::new(next));
        drop(before);
    }

    fn look(&self, file: &str) -> Result<PictureLook> {
        self.source.files.look(file)
    }

    fn thumbnail(&self, file: &str) -> Result<String> {
        self.source.files.thumbnail(file)
    }

    fn chat(&self) -> Option<ChatImages> {
        self.source.files.chat()
    }

    fn key(&self) -> String {
        self.source.files.key()
    }
}

impl Identity {
    pub fn of(files: &PictureFiles, file: &str) -> Result<Self> {
        let PictureLook { content, width, height } = files.look(file)?;
        let (layout, content) = files.cut(file, width, height, content)?;
        Ok(Self { content, layout })
    }

    /// How many numbers its features have.
    pub fn numbers(&self, arch: &VisionArch, features: Features) -> usize {
        let tiles: Vec<_> = self.layout.tiles.iter().map(|tile| (tile.rows, tile.columns)).collect();
        arch.features_shape(features, &tiles, self.layout.joined.as_ref()).iter().product()
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
        let Layout { tiles, joined, .. } = picture.layout.clone();
        Ok(Pixels { patches, tiles, joined })
    }
}
