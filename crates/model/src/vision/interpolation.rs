//! Interpolates learned position embeddings for an image with another grid of patches than the checkpoint's.
use tunesmith_config::vision::{Encoder as Spec, Interpolation};
use tunesmith_vision::Tile;

/// The neighbours of a place in the table, with their weights. A neighbour may be listed twice.
type Neighbours = Vec<(usize, f64)>;

/// The kernel of a cubic convolution at a distance (Keys, 1981). PyTorch has `a = -0.75`, and -0.5 with `antialias=True`.
fn cubic(a: f64, distance: f64) -> f64 {
    let x = distance.abs();
    if x < 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    } else {
        0.0
    }
}

/// The places that each of `size` places covers among `from`, with their weights under a filter of so many steps to each
/// side that widens as the grid shrinks: `antialias=True` in PyTorch.
fn covered(size: usize, from: usize, reach: f64, filter: impl Fn(f64) -> f64) -> Vec<Neighbours> {
    let scale = from as f64 / size as f64;
    let wide = scale.max(1.0);
    let support = reach * wide;
    let of = |place: usize| {
        let centre = scale * (place as f64 + 0.5);
        let first = (centre - support + 0.5).max(0.0) as usize;
        let end = ((centre + support + 0.5) as usize).min(from);
        let weight = |at: usize| filter((at as f64 - centre + 0.5) / wide);
        let total: f64 = (first..end).map(weight).sum();
        (first..end).map(|at| (at, weight(at) / total)).collect()
    };
    (0..size).map(of).collect()
}

/// The neighbours of each of `size` places among `from`. Bicubic: the centres of pixels are half a step in
/// (`align_corners=False`). Bilinear: the ends of both grids coincide (`align_corners=True`).
fn neighbours(size: usize, from: usize, rule: Interpolation) -> Vec<Neighbours> {
    match rule {
        Interpolation::AntialiasedBilinear => return covered(size, from, 1.0, |x| (1.0 - x.abs()).max(0.0)),
        Interpolation::AntialiasedBicubic => return covered(size, from, 2.0, |x| cubic(-0.5, x)),
        _ => {}
    }
    let bilinear = rule == Interpolation::Bilinear;
    let scale = if bilinear { (from - 1) as f64 / (size.max(2) - 1) as f64 } else { from as f64 / size as f64 };
    let of = |place: usize| {
        let at = if bilinear { scale * place as f64 } else { scale * (place as f64 + 0.5) - 0.5 };
        let first = at.floor();
        let t = at - first;
        let weights =
            if bilinear { [0.0, 1.0 - t, t, 0.0] } else { [1.0 + t, t, 1.0 - t, 2.0 - t].map(|x| cubic(-0.75, x)) };
        let within = |offset: usize| (first as i64 - 1 + offset as i64).clamp(0, from as i64 - 1) as usize;
        (0..4).map(|offset| (within(offset), weights[offset])).collect()
    };
    (0..size).map(of).collect()
}

/// For each patch of a tile: the neighbours of its row, and those of its column.
fn of_tile(spec: &Spec, tile: Tile) -> impl Iterator<Item = (Neighbours, Neighbours)> {
    let rule = spec.interpolation.unwrap_or(Interpolation::Bicubic);
    let (down, across) = (neighbours(tile.rows, spec.grid[0], rule), neighbours(tile.columns, spec.grid[1], rule));
    down.into_iter().flat_map(move |rows| across.clone().into_iter().map(move |columns| (rows.clone(), columns)))
}

/// The position embeddings of a tile, interpolated from the stored ones, with the class token's first: as
/// `interpolate(mode="bicubic", align_corners=False)` gives them, or what else the encoder's [`Interpolation`] says.
pub fn interpolated(stored: &[f32], spec: &Spec, tile: Tile) -> Vec<f32> {
    let (hidden, width) = (spec.hidden_size, spec.grid[1]);
    let class = usize::from(spec.class_token) * hidden;
    let (prefix, table) = stored.split_at(class);
    let mut out = prefix.to_vec();
    for (rows, columns) in of_tile(spec, tile) {
        out.extend((0..hidden).map(|feature| {
            let at = |row: usize, column: usize| f64::from(table[(row * width + column) * hidden + feature]);
            let line = |row: usize| columns.iter().map(|&(column, weight)| weight * at(row, column)).sum::<f64>();
            rows.iter().map(|&(row, weight)| weight * line(row)).sum::<f64>() as f32
        }));
    }
    out
}

/// The interpolation as a matrix, for the gradient of the stored positions:
/// `[tokens with a position, stored positions]`.
pub fn taps(spec: &Spec, tile: Tile) -> Vec<f32> {
    let (class, stored) = (usize::from(spec.class_token), spec.positions());
    let mut out = vec![0.0; (class + tile.rows * tile.columns) * stored];
    if class == 1 {
        out[0] = 1.0;
    }
    for (weights, (rows, columns)) in out.chunks_exact_mut(stored).skip(class).zip(of_tile(spec, tile)) {
        for &(row, of_row) in &rows {
            for &(column, of_column) in &columns {
                weights[class + row * spec.grid[1] + column] += (of_row * of_column) as f32;
            }
        }
    }
    out
}
