//! Decodes and preprocesses images for vision encoders, bit for bit as the image processors of Transformers do.
//!
//! ```text
//! bytes of a file -> Picture (picture) -> Processor (resize, crop, normalize, cut) -> Pixels
//! ```
mod any_res;
mod orientation;
mod picture;
mod processor;
mod resize;

use tunesmith_config::vision::Joined;

pub use picture::{MAX_BYTES, MAX_PIXELS, is_picture};
pub use processor::{Layout, Processor};
pub use resize::resize;

/// A decoded picture: 8-bit RGB, row after row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Red, green and blue of each pixel, `[height, width, 3]`.
    pub rgb: Vec<u8>,
}

/// The size of a tile, a part of a picture that the encoder reads as one image, in patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// Rows of patches.
    pub rows: usize,
    /// Columns of patches.
    pub columns: usize,
}

/// The encoder's input for one picture: normalized pixel values, cut into patches.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pixels {
    /// `[patches, channels * temporal * patch * patch]`: tile after tile, and in a tile row after row. The numbers of a
    /// patch have the order of the patch embedding's weight: channel, (frame,) row, column.
    pub patches: Vec<f32>,
    /// The size of each tile, in the order of `patches`.
    pub tiles: Vec<Tile>,
    /// How all tiles but the first are put together to lines of rows for the decoder, if the picture is cut into a grid
    /// that fits its shape (`AnyRes`).
    pub joined: Option<Joined>,
    /// Whether the pixels are for the model's second encoder, for which every pixel is a patch.
    pub world: bool,
}

#[cfg(test)]
mod tests;
