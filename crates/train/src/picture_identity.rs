//! What of an image must be known to find its features.
use tunesmith_base::error::Result;
use tunesmith_config::vision::{Features, VisionArch};
use tunesmith_data::{PictureFiles, PictureLook, Pictures as _, split_world};
use tunesmith_vision::Layout;

/// An image, as its features are cached.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub content: String,
    pub layout: Layout,
    /// Whether it is for a second encoder.
    pub world: bool,
}

impl Identity {
    pub fn of(files: &PictureFiles, file: &str) -> Result<Self> {
        let PictureLook { content, width, height } = files.look(file)?;
        let (layout, content) = files.cut(file, width, height, content)?;
        Ok(Self { content, layout, world: split_world(file).1 })
    }

    /// How many numbers its features have.
    pub fn numbers(&self, arch: &VisionArch, features: Features) -> usize {
        if let Some(world) = arch.world.as_ref().filter(|_| self.world) {
            return world.latents();
        }
        let tiles: Vec<_> = self.layout.tiles.iter().map(|tile| (tile.rows, tile.columns)).collect();
        arch.features_shape(features, &tiles, self.layout.joined.as_ref()).iter().product()
    }
}
