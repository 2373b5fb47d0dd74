//! How the tiles of an image become rows of the decoder if the image was cut into a grid that fits its shape (`AnyRes`,
//! LLaVA-OneVision).
use std::ops::Range;

/// How the decoder reads such images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnyRes {
    /// The name of the tensor `[width of the decoder]` that ends each line of patches, or an image that is not cut.
    pub newline: String,
    /// If an image has more patches than this many tiles, its rows are scaled down to about as many.
    pub most_tiles: usize,
    /// The grids, as heights and widths in pixels, to one of which an image is resized and then cut.
    pub grids: Vec<[u32; 2]>,
}

/// The grids of LLaVA-OneVision, if the configuration names none: one to six tiles of 384 pixels down and across.
pub(super) fn usual_grids() -> Vec<[u32; 2]> {
    (1..=6).flat_map(|down| (1..=6).map(move |across| [384 * down, 384 * across])).collect()
}

/// The patches of all tiles except the first one, which shows the whole image, put together as one large grid. Patches
/// that show only margin are left out. If there are too many, the rest is scaled down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joined {
    /// How many rows and columns of tiles there are.
    pub tiles: [usize; 2],
    /// How many rows and columns of patches a tile has.
    pub tile: [usize; 2],
    /// The rows of patches in the large grid that show the image.
    pub rows: Range<usize>,
    /// The columns of patches in the large grid that show the image.
    pub columns: Range<usize>,
    /// How many rows and columns the decoder gets. Fewer than `rows` and `columns` have, if the patches are scaled
    /// down.
    pub size: [usize; 2],
}

/// How a row of the decoder is computed: from up to four patches, counted over all tiles of the image, with their
/// weights.
pub type Taps = [(usize, f32); 4];

/// The two neighbours of a place in one direction, with their weights.
type Ends = [(usize, f32); 2];

/// `left // right` of two floats in Python.
fn floor_div(left: f64, right: f64) -> f64 {
    let whole = (left - left % right) / right;
    let below = whole.floor();
    if whole - below > 0.5 { below + 1.0 } else { below }
}

impl Joined {
    /// For an image of `[height, width]` pixels that was cut into `tiles`, as `pack_image_features` of
    /// `transformers.models.llava_onevision` does it. `None` if scaling down would leave nothing.
    pub fn of([height, width]: [u32; 2], tiles: [usize; 2], tile: [usize; 2], most_tiles: usize) -> Option<Self> {
        let [down, across] = [0, 1].map(|side| tiles[side] * tile[side]);
        let [height, width] = [height, width].map(f64::from);
        // As Python's `int(round(x, 7))`.
        let whole = |x: f64| ((x * 1e7).round_ties_even() / 1e7) as usize;
        let kept = |all: usize, new: usize| {
            let margin = all.saturating_sub(new) / 2;
            margin..all - margin
        };
        let (rows, columns) = if width / height > across as f64 / down as f64 {
            (kept(down, whole(height * (across as f64 / width))), 0..across)
        } else {
            (0..down, kept(across, whole(width * (down as f64 / height))))
        };
        let mut size = [rows.len(), columns.len()];
        let ratio = ((size[0] * size[1]) as f64 / (most_tiles as f64 * (tile[0] * tile[0]) as f64)).sqrt();
        if ratio > 1.1 {
            size = size.map(|side| floor_div(side as f64, ratio) as usize);
            if size.contains(&0) {
                return None;
            }
        }
        Some(Self { tiles, tile, rows, columns, size })
    }

    /// How many rows of the decoder these patches take: one for each patch that is left, and one at the end of each
    /// line.
    pub const fn decoder_rows(&self) -> usize {
        self.size[0] * (self.size[1] + 1)
    }

    /// Whether the patches are scaled down, so that a row is a mixture of several patches.
    pub fn is_resized(&self) -> bool {
        self.size != [self.rows.len(), self.columns.len()]
    }

    /// The index of the patch at this row and column of the large grid, counted over all tiles of the image.
    const fn patch(&self, row: usize, column: usize) -> usize {
        let [high, wide] = self.tile;
        let before = 1 + row / high * self.tiles[1] + column / wide;
        before * high * wide + row % high * wide + column % wide
    }

    /// The patches and weights for each place that is left, line by line: bilinear, as `interpolate(mode="bilinear")`.
    /// A weight may be zero.
    pub fn taps(&self) -> Vec<Taps> {
        let down = ends(self.size[0], &self.rows);
        let across = ends(self.size[1], &self.columns);
        let of = |(rows, columns): (&Ends, &Ends)| {
            let at = |row: usize, column: usize| {
                (self.patch(rows[row].0, columns[column].0), rows[row].1 * columns[column].1)
            };
            [at(0, 0), at(0, 1), at(1, 0), at(1, 1)]
        };
        down.iter().flat_map(|rows| across.iter().map(move |columns| (rows, columns))).map(of).collect()
    }
}

/// For each of `size` places, its two neighbours within `kept` and their weights.
fn ends(size: usize, kept: &Range<usize>) -> Vec<Ends> {
    let from = kept.len();
    if size == from {
        return kept.clone().map(|place| [(place, 1.0), (place, 0.0)]).collect();
    }
    let scale = from as f32 / size as f32;
    let of = |place: usize| {
        let at = (scale * (place as f32 + 0.5) - 0.5).max(0.0);
        let first = (at as usize).min(from - 1);
        let share = (at - first as f32).clamp(0.0, 1.0);
        let next = (first + 1).min(from - 1);
        [(kept.start + first, 1.0 - share), (kept.start + next, share)]
    };
    (0..size).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margins_are_left_out_and_large_pictures_made_smaller() {
        let whole = Joined::of([32, 32], [1, 1], [4, 4], 2).unwrap();
        assert_eq!((whole.rows.clone(), whole.columns.clone(), whole.size), (0..4, 0..4, [4, 4]));
        assert_eq!(whole.decoder_rows(), 20);
        assert_eq!(whole.taps()[5], [(16 + 5, 1.0), (16 + 5, 0.0), (16 + 5, 0.0), (16 + 5, 0.0)]);
        // Five of eight rows show it: the margins are one row each.
        let wide = Joined::of([40, 64], [2, 2], [4, 4], 2).unwrap();
        assert_eq!((wide.rows.clone(), wide.columns.clone(), wide.size), (1..7, 0..8, [4, 6]));
        // The first place is a quarter and a sixth of a patch in.
        let [near, right, below, _] = wide.taps()[0];
        assert_eq!([near.0, right.0, below.0], [16 + 4, 16 + 5, 16 + 8]);
        let close = |found: f32, wanted: f32| assert!((found - wanted).abs() < 1e-6, "{found} {wanted}");
        close(near.1, 0.75 * 5.0 / 6.0);
        close(right.1, 0.75 / 6.0);
        close(below.1, 0.25 * 5.0 / 6.0);
        // A line that crosses into the next tile.
        let long = Joined::of([20, 90], [1, 3], [4, 4], 9).unwrap();
        assert_eq!((long.rows.clone(), long.size), (1..3, [2, 12]));
        assert_eq!([3, 4].map(|column| long.taps()[column][0].0), [16 + 7, 32 + 4]);
        // Of a thread no column is left, but its lines end.
        let thread = Joined::of([50, 3], [3, 1], [4, 4], 9).unwrap();
        assert_eq!((thread.size, thread.decoder_rows()), ([12, 0], 12));
    }
}
