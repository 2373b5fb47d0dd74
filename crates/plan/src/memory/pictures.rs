//! The images of a pass, as far as memory depends on them.
use super::Pass;
use super::pool::{VisionCounts, bytes};
use tunesmith_config::vision::VisionArch;

/// How many images rows show, and what the largest of them takes. All images are counted as the largest one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pictures {
    /// The most images that a row shows.
    pub per_row: u64,
    /// The most images of a micro-batch, if its rows are known.
    pub most: Option<u64>,
    /// The fewest tokens per image in any row. A pass of short rows can have more images than one of long rows.
    pub spacing: u64,
    /// Rows of the decoder's input that an image takes.
    pub rows: u64,
    /// Tokens of the vision encoder that an image takes.
    pub tokens: u64,
    /// How many numbers the encoder or the connector reads for an image. Each takes 4 bytes in the host's memory.
    pub numbers: u64,
    /// Bytes of scratch memory that a thread needs for the encoder's attention.
    pub scratch: u64,
    /// How much of an image passes through the encoder and the connector.
    pub size: ImageSize,
}

/// How much of an image passes through an encoder and a connector, in all its tiles together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImageSize {
    /// The number of patches.
    pub patches: u64,
    /// Tokens of the encoder: the patches, and the prefix tokens of each tile.
    pub tokens: u64,
    /// Pairs of tokens that attend to each other, in a block with full attention and in a block that cuts tiles into
    /// windows.
    pub pairs: [u64; 2],
    /// Tokens that the encoder passes to each connector.
    pub outputs: u64,
}

impl ImageSize {
    /// Adds up tiles of these sizes, each `(rows, columns)` of patches.
    pub fn of(vision: &VisionArch, tiles: &[(usize, usize)]) -> Self {
        let encoder = &vision.encoder;
        let prefix = encoder.prefix_tokens();
        let kept = if encoder.feature.drop_prefix { 0 } else { prefix };
        let mut size = Self::default();
        for &(rows, columns) in tiles {
            let patches = rows * columns;
            size.patches += patches as u64;
            size.tokens += (patches + prefix) as u64;
            size.outputs += (patches + kept) as u64;
            let whole = ((patches + prefix) as u64).pow(2);
            let side = encoder.windows.as_ref().map(|windows| windows.side.max(1));
            // The sum of the squares of all windows' sides in this direction.
            let squares = |length: usize, side: usize| ((length / side * side * side) + (length % side).pow(2)) as u64;
            let in_windows = side.map_or(whole, |side| squares(rows, side) * squares(columns, side));
            size.pairs[0] += whole;
            size.pairs[1] += in_windows;
        }
        size
    }
}

impl Pictures {
    /// The most images that a pass can have.
    pub fn in_pass(&self, pass: &Pass) -> u64 {
        let of_rows = pass.tokens.div_ceil(pass.longest.max(1)) * self.per_row;
        let of_short_rows = self.most.map_or(0, |most| most.min(pass.tokens / self.spacing.max(1)));
        of_rows.max(of_short_rows).min(pass.tokens / self.rows.max(1))
    }

    /// Bytes of the vision buffers of a pass: of those that are saved for the backward pass, and of all.
    pub(super) fn bytes(&self, counts: &VisionCounts, pass: &Pass) -> (u64, u64) {
        let images = self.in_pass(pass);
        if images == 0 {
            return (0, 0);
        }
        let tokens = images * self.tokens;
        (bytes(&counts.saved, tokens), bytes(&counts.all, tokens) + counts.world)
    }

    /// Bytes of what the encoder or the connector reads for the images of a pass.
    pub fn read(&self, pass: &Pass) -> u64 {
        4 * self.numbers * self.in_pass(pass)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_has_as_many_images_as_its_rows_can_show() {
        let pictures = Pictures {
            per_row: 2,
            most: Some(16),
            spacing: 40,
            rows: 16,
            tokens: 64,
            numbers: 0,
            scratch: 0,
            size: ImageSize::default(),
        };
        let of = |tokens, longest| pictures.in_pass(&Pass { tokens, longest, labelled: tokens });
        assert_eq!(of(800, 100), 16, "eight rows of two");
        assert_eq!(of(300, 100), 7, "shorter rows: one image for 40 tokens");
        assert_eq!((of(40, 40), of(20, 20), of(10, 10)), (2, 1, 0), "no more than the tokens have room for");
        let unknown = Pictures { most: None, ..pictures };
        assert_eq!(unknown.in_pass(&Pass { tokens: 300, longest: 100, labelled: 300 }), 6);
    }
}
