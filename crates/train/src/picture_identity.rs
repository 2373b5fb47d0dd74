//! Identifies an image in the feature cache: by its content, and by how the processor cuts it for which encoder.
use tunesmith_base::error::Result;
use tunesmith_config::vision::{Features, VisionArch};
use tunesmith_data::{PictureFiles, PictureLook, Pictures as _, split_world};
use tunesmith_vision::Layout;

/// What the cached features of an image depend on.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    /// A hash of the file, with marks for a second encoder and for an image that is one of several in its row.
    pub content: String,
    /// The tiles that the image processor cuts the image into.
    pub layout: Layout,
    /// Whether the image is for the second encoder (`vision.world`).
    pub world: bool,
}

impl Identity {
    /// Hashes the image `file`, reads its size, and computes how the image processor cuts it.
    ///
    /// # Errors
    /// The file cannot be read, or the image processor refuses an image of this size.
    pub fn of(files: &PictureFiles, file: &str) -> Result<Self> {
        let PictureLook { content, width, height } = files.look(file)?;
        let (layout, content) = files.cut(file, width, height, content)?;
        Ok(Self { content, layout, world: split_world(file).1 })
    }

    /// Number of values in the image's features.
    pub fn numbers(&self, arch: &VisionArch, features: Features) -> usize {
        if let Some(world) = arch.world.as_ref().filter(|_| self.world) {
            return world.latents();
        }
        let tiles: Vec<_> = self.layout.tiles.iter().map(|tile| (tile.rows, tile.columns)).collect();
        arch.features_shape(features, &tiles, self.layout.joined.as_ref()).iter().product()
    }
}
