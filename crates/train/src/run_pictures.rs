//! The pictures of a run, which come as pixels or as features that have been computed.
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use tunesmith_base::error::Result;
use tunesmith_config::vision::{ChatImages, Features, VisionArch};
use tunesmith_data::{PictureFiles, PictureLook, PictureRows, Pictures};
use tunesmith_model::feature_cache::FeatureCache;
use tunesmith_vision::{Pixels, Tile};

/// The pictures of a run: read from their files, or the features of them that have been computed.
#[derive(Debug)]
pub struct RunPictures {
    pub(crate) files: PictureFiles,
    pub(crate) computed: OnceLock<Computed>,
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
    pub tiles: Vec<Tile>,
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

    fn thumbnail(&self, file: &str) -> Result<String> {
        self.files.thumbnail(file)
    }

    fn chat(&self) -> Option<ChatImages> {
        self.files.chat()
    }

    fn key(&self) -> String {
        self.files.key()
    }
}

impl Identity {
    pub fn of(files: &PictureFiles, file: &str) -> Result<Self> {
        let PictureLook { content, width, height } = files.look(file)?;
        Ok(Self { content, tiles: files.tiles(width, height)? })
    }

    /// How many numbers its features have.
    pub fn numbers(&self, arch: &VisionArch, features: Features) -> usize {
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
