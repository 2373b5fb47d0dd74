//! Where the tokens of a batch's tiles lie: each tile is a sequence of the class token, register tokens, and patches
//! row by row.
use tunesmith_config::vision::Encoder as Spec;
use tunesmith_vision::{Pixels, Tile};

/// The tiles of a batch's images, one after the other.
#[derive(Debug, Clone)]
pub struct Tiles(Vec<Tile>);

impl Tiles {
    /// The tiles of these images, in their order.
    pub fn of<'a>(pictures: impl IntoIterator<Item = &'a Pixels>) -> Self {
        Self(pictures.into_iter().flat_map(|pixels| pixels.tiles.iter().copied()).collect())
    }

    pub const fn count(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> std::slice::Iter<'_, Tile> {
        self.0.iter()
    }

    /// Whether all tiles have this many rows and columns.
    pub fn all(&self, [rows, columns]: [usize; 2]) -> bool {
        self.0.iter().all(|tile| (tile.rows, tile.columns) == (rows, columns))
    }

    /// The number of patches of each tile.
    fn patches(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().map(|tile| tile.rows * tile.columns)
    }

    /// The number of all tokens, with `prefix` tokens before the patches of each tile.
    pub fn tokens(&self, prefix: usize) -> usize {
        self.patches().sum::<usize>() + prefix * self.count()
    }

    /// Where the sequence of each tile begins, and the end.
    pub fn cu_seqlens(&self, prefix: usize) -> Vec<usize> {
        let mut end = 0;
        let ends = self.patches().map(|patches| {
            end += patches + prefix;
            end
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// The tokens that are patches.
    pub fn patch_rows(&self, prefix: usize) -> Vec<usize> {
        self.cu_seqlens(prefix).windows(2).flat_map(|ends| ends[0] + prefix..ends[1]).collect()
    }

    /// The first token of each tile, which is its class token where it has one.
    pub fn class_rows(&self, prefix: usize) -> Vec<usize> {
        let mut starts = self.cu_seqlens(prefix);
        starts.pop();
        starts
    }

    /// The register tokens, each with its number.
    pub fn register_rows(&self, spec: &Spec) -> (Vec<usize>, Vec<u32>) {
        let first = usize::from(spec.class_token);
        let starts = self.class_rows(spec.prefix_tokens());
        let of = |start: usize| (0..spec.registers).map(move |register| (start + first + register, register as u32));
        starts.into_iter().flat_map(of).unzip()
    }

    /// The tokens that have a position: all but registers.
    pub fn position_rows(&self, spec: &Spec) -> Vec<usize> {
        let prefix = spec.prefix_tokens();
        let class = usize::from(spec.class_token);
        let starts = self.cu_seqlens(prefix);
        starts.windows(2).flat_map(|ends| (ends[0]..ends[0] + class).chain(ends[0] + prefix..ends[1])).collect()
    }

    /// The tokens that have a position, and the id of that position in the table. Where the grid of a tile differs from
    /// the table's, the position is the one at the same share of the way.
    pub fn positions(&self, spec: &Spec) -> (Vec<usize>, Vec<u32>) {
        let class = usize::from(spec.class_token);
        let [rows, columns] = spec.grid;
        let mut ids = Vec::new();
        for tile in &self.0 {
            ids.extend((0..class).map(|_| 0));
            for row in 0..tile.rows {
                let row = row * rows / tile.rows;
                ids.extend(
                    (0..tile.columns).map(|column| (class + row * columns + column * columns / tile.columns) as u32),
                );
            }
        }
        (self.position_rows(spec), ids)
    }

    /// For encoders with a table for each axis, columns first, then rows: the ids of each patch's column, and those of
    /// its row.
    pub fn axes(&self, spec: &Spec) -> [Vec<u32>; 2] {
        let [rows, columns] = self.places();
        let first = spec.grid[1] as u32;
        [columns, rows.into_iter().map(|row| first + row).collect()]
    }

    /// The patches of all squares of `side * side` patches, by their place in the square: entry k lists the patch at
    /// place k of every square, squares row by row, tile after tile. Patches count over all tiles.
    pub fn squares(&self, side: usize) -> Vec<Vec<usize>> {
        let mut places = vec![Vec::new(); side * side];
        let mut first = 0;
        for tile in &self.0 {
            for (row, column) in
                (0..tile.rows / side).flat_map(|row| (0..tile.columns / side).map(move |column| (row, column)))
            {
                for (place, patches) in places.iter_mut().enumerate() {
                    let (down, across) = (place / side, place % side);
                    patches.push(first + (row * side + down) * tile.columns + column * side + across);
                }
            }
            first += tile.rows * tile.columns;
        }
        places
    }

    /// The row and the column of every patch in its tile.
    pub fn places(&self) -> [Vec<u32>; 2] {
        let of = |tile: &Tile| {
            let columns = tile.columns;
            (0..tile.rows * columns).map(move |patch| ((patch / columns) as u32, (patch % columns) as u32))
        };
        self.0.iter().flat_map(of).unzip::<u32, u32, Vec<u32>, Vec<u32>>().into()
    }

    /// The patches ordered by windows of `side * side` patches, row by row within each; and where each window begins,
    /// with the end. Windows at the edge of a tile are cut off.
    pub fn windows(&self, side: usize) -> (Vec<usize>, Vec<usize>) {
        let (mut order, mut ends, mut first) = (Vec::new(), vec![0], 0);
        for tile in &self.0 {
            let corners = (0..tile.rows)
                .step_by(side)
                .flat_map(|row| (0..tile.columns).step_by(side).map(move |column| (row, column)));
            for (top, left) in corners {
                for row in top..tile.rows.min(top + side) {
                    let columns = left..tile.columns.min(left + side);
                    order.extend(columns.map(|column| first + row * tile.columns + column));
                }
                ends.push(order.len());
            }
            first += tile.rows * tile.columns;
        }
        (order, ends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_hold_their_patches_row_by_row() {
        let tiles = Tiles(vec![Tile { rows: 2, columns: 4 }, Tile { rows: 2, columns: 2 }]);
        assert_eq!(tiles.squares(2), [[0, 2, 8], [1, 3, 9], [4, 6, 10], [5, 7, 11]]);
        assert_eq!(tiles.squares(1), [(0..12).collect::<Vec<_>>()]);
        assert_eq!(tiles.cu_seqlens(1), [0, 9, 14]);
        assert_eq!(tiles.patch_rows(1), [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13]);
        assert_eq!(tiles.class_rows(1), [0, 9]);
    }
    #[test]
    fn windows_are_cut_at_the_edges_of_a_tile() {
        let tiles = Tiles(vec![Tile { rows: 3, columns: 3 }, Tile { rows: 1, columns: 2 }]);
        assert_eq!(tiles.windows(2), (vec![0, 1, 3, 4, 2, 5, 6, 7, 8, 9, 10], vec![0, 4, 6, 8, 9, 11]));
        assert_eq!(tiles.places(), [vec![0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0], vec![0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]]);
    }
}
