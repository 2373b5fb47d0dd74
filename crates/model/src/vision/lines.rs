//! The rows of an image that is cut into tiles by its own shape ("anyres", LLaVA-OneVision). First come the rows of the
//! first tile, which shows the whole image. Then come the other tiles, line by line over all of them, where they show
//! the image. If that is too many rows, they are scaled down. A learned row (`image_newline`) ends each line.
use tunesmith_config::vision::Joined;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_vision::Pixels;

/// Which rows of the connector become which rows of the decoder, for the images of a batch.
#[derive(Debug)]
pub struct Lines {
    /// Rows of the connector, their weights, and the rows of the decoder that they are added to. Parts after the first
    /// are only for scaling down, where a row of the decoder mixes several patches. Within a part, no row occurs twice,
    /// and those of the decoder rise.
    parts: [Part; 4],
    /// The rows that end a line.
    newlines: Vec<usize>,
    /// The number of rows of the connector, and of the decoder.
    rows: [usize; 2],
}

#[derive(Debug, Default)]
struct Part {
    from: Vec<usize>,
    weights: Vec<f32>,
    to: Vec<usize>,
}

impl Part {
    fn push(&mut self, from: usize, weight: f32, to: usize) {
        self.from.push(from);
        self.weights.push(weight);
        self.to.push(to);
    }
}

impl Lines {
    /// For the images of a batch, where each patch is a row of the connector.
    pub fn of<'a>(pictures: impl IntoIterator<Item = &'a Pixels>) -> Self {
        let mut lines = Self { parts: Default::default(), newlines: Vec::new(), rows: [0; 2] };
        for pixels in pictures {
            let patches = |tile: &tunesmith_vision::Tile| tile.rows * tile.columns;
            let whole = pixels.tiles.first().map_or(0, patches);
            lines.take_as_it_is(whole);
            match &pixels.joined {
                None => lines.end_line(),
                Some(joined) => lines.join(joined, whole),
            }
            lines.rows[0] += pixels.tiles.iter().map(patches).sum::<usize>();
        }
        lines
    }

    fn take_as_it_is(&mut self, rows: usize) {
        for row in 0..rows {
            self.parts[0].push(self.rows[0] + row, 1.0, self.rows[1] + row);
        }
        self.rows[1] += rows;
    }

    fn end_line(&mut self) {
        self.newlines.push(self.rows[1]);
        self.rows[1] += 1;
    }

    fn join(&mut self, joined: &Joined, whole: usize) {
        debug_assert_eq!(whole, joined.tile[0] * joined.tile[1], "tiles are of one size");
        let first = self.rows[0];
        let kinds = if joined.is_resized() { 4 } else { 1 };
        let taps = joined.taps();
        for line in taps.chunks(joined.size[1].max(1)) {
            for taps in line {
                for (part, (patch, weight)) in self.parts.iter_mut().zip(taps).take(kinds) {
                    part.push(first + patch, *weight, self.rows[1]);
                }
                self.rows[1] += 1;
            }
            self.end_line();
        }
        if joined.size[1] == 0 {
            (0..joined.size[0]).for_each(|_| self.end_line());
        }
    }

    /// Which rows of the decoder end a line.
    pub fn newlines(&self) -> &[usize] {
        &self.newlines
    }

    /// From `x [rows of the connector, features]` to `[rows of the decoder, features]`; rows that end a line are zero.
    pub fn forward(&self, x: &Activation) -> Activation {
        let [plain, mixed @ ..] = &self.parts;
        if mixed.iter().all(|part| part.from.is_empty()) {
            return x.gather(&plain.from).scatter(&plain.to, self.rows[1]);
        }
        let mut y = x.pool().act(self.rows[1], x.features());
        y.zero();
        for part in &self.parts {
            y.scatter_add(&part.to, Some(&part.weights), &x.gather(&part.from));
        }
        y
    }

    /// The gradient of `x`, given that of the decoder's rows.
    pub fn backward(&self, dy: &Activation) -> Activation {
        let mut dx = dy.pool().act(self.rows[0], dy.features());
        dx.zero();
        for part in self.parts.iter().filter(|part| !part.from.is_empty()) {
            let mut order: Vec<usize> = (0..part.from.len()).collect();
            order.sort_unstable_by_key(|&index| part.from[index]);
            let of = |rows: &[usize]| order.iter().map(|&index| rows[index]).collect::<Vec<_>>();
            let weights: Vec<f32> = order.iter().map(|&index| part.weights[index]).collect();
            dx.scatter_add(&of(&part.from), Some(&weights), &dy.gather(&of(&part.to)));
        }
        dx
    }

    /// Adds `newline [1, features]` to the rows that end a line.
    pub fn end(&self, y: &mut Activation, newline: &Activation) {
        elementwise::add(y, &newline.gather(&vec![0; self.newlines.len()]).scatter(&self.newlines, self.rows[1]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_ops::activation::Pool;
    use tunesmith_vision::Tile;

    /// The gradient is the transpose of what forward does: `<y, A x> = <A^T y, x>`.
    #[test]
    fn backward_is_the_transpose_of_forward() {
        let tile = Tile { rows: 4, columns: 4 };
        let pixels = |size, tiles: [usize; 2]| Pixels {
            tiles: vec![tile; tiles[0] * tiles[1] + 1],
            joined: Joined::of(size, tiles, [4, 4], 2),
            ..Pixels::default()
        };
        let whole = Pixels { tiles: vec![tile], ..Pixels::default() };
        let pictures = [pixels([40, 64], [2, 2]), whole, pixels([20, 90], [1, 3]), pixels([50, 3], [3, 1])];
        let lines = Lines::of(&pictures);
        let rows = [16 + 4 * 7, 17, 16 + 2 * 13, 16 + 12];
        assert_eq!(lines.rows, [5 * 16 + 16 + 4 * 16 + 4 * 16, rows.iter().sum()]);
        assert_eq!(lines.newlines()[..5], [22, 29, 36, 43, 60]);
        let pool = Pool::new();
        let numbers = |count: usize, scale: f32| (0..count).map(|at| (at as f32 * scale).sin()).collect::<Vec<_>>();
        let x = Activation::from_rows(&pool, &numbers(lines.rows[0] * 3, 0.7), 3);
        let y = Activation::from_rows(&pool, &numbers(lines.rows[1] * 3, 1.3), 3);
        let inner = |left: &Activation, right: &Activation| {
            left.to_rows().iter().zip(right.to_rows()).map(|(a, b)| f64::from(a * b)).sum::<f64>()
        };
        let (there, back) = (inner(&y, &lines.forward(&x)), inner(&lines.backward(&y), &x));
        assert!((there - back).abs() < 1e-5, "{there} {back}");
        let mut ended = lines.forward(&x);
        lines.end(&mut ended, &Activation::from_rows(&pool, &[1.0, 2.0, 3.0], 3));
        assert_eq!(ended.row(22), [1.0, 2.0, 3.0]);
        assert_eq!(ended.row(3), x.row(3));
    }
}
