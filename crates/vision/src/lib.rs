//! Decodes and preprocesses images, bit for bit as the image processors of Transformers do.
//!
//! ```text
//! bytes of a file -> Picture (picture) -> Processor (resize, crop, normalize, cut) -> Pixels
//! ```
mod any_res;
mod picture;
mod processor;
mod resize;

use tunesmith_config::vision::Joined;

pub use picture::{MAX_BYTES, MAX_PIXELS, is_picture};
pub use processor::{Layout, Processor};
pub use resize::resize;

/// A decoded picture: 8-bit RGB, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// Columns of pixels.
    pub width: u32,
    /// Rows of pixels.
    pub height: u32,
    /// Red, green and blue of each pixel, `[height, width, 3]`.
    pub rgb: Vec<u8>,
}

/// A tile of a picture as an encoder sees it, in patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// Rows of patches.
    pub rows: usize,
    /// Columns of patches.
    pub columns: usize,
}

/// What an encoder reads of one picture: normalised values cut into patches.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pixels {
    /// `[patches, channels * temporal * patch * patch]`: tile after tile; within a tile row by row. A patch's numbers are in the
    /// order of the patch embedding's weight: channel, (frame,) row, column.
    pub patches: Vec<f32>,
    /// Rows and columns of patches of each tile, in the order of `patches`.
    pub tiles: Vec<Tile>,
    /// How the tiles but the first become lines of rows, where the picture was cut at its own shape.
    pub joined: Option<Joined>,
    /// Whether it is for a model's second encoder, whose patches are pixels.
    pub world: bool,
}

#[cfg(test)]
mod tests;
