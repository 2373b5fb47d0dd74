//! What comes before an encoder's blocks: patches become tokens, class and register tokens join them, positions are added.
use super::tiles::Tiles;
use crate::grads::Grads;
use crate::linear::{self, Input, Linear};
use crate::norm::Norm;
use crate::pass::Pass;
use crate::weight::Weight;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::vision::{Encoder as Spec, Interpolation};
use tunesmith_device::Array;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::embedding;
use tunesmith_vision::Tile;

#[derive(Debug)]
pub struct Stem {
    pub patch: Linear,
    /// `[hidden]`.
    pub class_token: Option<Weight>,
    /// `[registers, hidden]`.
    pub registers: Option<Weight>,
    /// `[positions, hidden]`: the class token's, then those of patches, row by row.
    pub positions: Weight,
    pub norm: Option<Norm>,
}

/// What forward keeps for backward.
#[derive(Debug)]
pub struct Saved {
    patches: Activation,
    extra: Option<linear::Saved>,
    /// The norm's input, and its statistics.
    norm: Option<(Activation, Activation)>,
}

impl Stem {
    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let tables = [&self.class_token, &self.registers].into_iter().flatten();
        self.patch.trains()
            || tables.chain([&self.positions]).any(Weight::trains)
            || self.norm.as_ref().is_some_and(Norm::trains)
    }

    /// From `patches [patches, channels * patch * patch]` to `[tokens, hidden]`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: positions would have to be interpolated while they are trained.
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        spec: &Spec,
        tiles: &Tiles,
        patches: Activation,
    ) -> Result<(Activation, Saved)> {
        let (embedded, extra) = self.patch.forward(pass, &patches, None);
        let prefix = spec.prefix_tokens();
        let mut x =
            if prefix == 0 { embedded } else { embedded.scatter(&tiles.patch_rows(prefix), tiles.tokens(prefix)) };
        self.add_positions(pass, spec, tiles, &mut x)?;
        let mut add = |table: &Weight, rows: &[usize], ids: &[u32]| {
            let values = table.view(pass.values);
            let part = embedding::forward(pass.pool, values.store(), spec.hidden_size, ids, 1.0);
            elementwise::add(&mut x, &part.scatter(rows, tiles.tokens(prefix)));
        };
        if let Some(table) = &self.class_token {
            add(table, &tiles.class_rows(prefix), &vec![0; tiles.count()]);
        }
        if let Some(table) = &self.registers {
            let (rows, ids) = tiles.register_rows(spec);
            add(table, &rows, &ids);
        }
        let Some(norm) = &self.norm else { return Ok((x, Saved { patches, extra, norm: None })) };
        let (normed, stats) = norm.forward(pass, &x, 1);
        Ok((normed, Saved { patches, extra, norm: Some((x, stats)) }))
    }

    /// Adds to each token its position.
    fn add_positions(&self, pass: &Pass<'_>, spec: &Spec, tiles: &Tiles, x: &mut Activation) -> Result<()> {
        let (prefix, hidden) = (spec.prefix_tokens(), spec.hidden_size);
        let table = self.positions.view(pass.values);
        if spec.interpolation == Interpolation::Nearest || tiles.all(spec.grid) {
            let (rows, ids) = tiles.positions(spec);
            let part = embedding::forward(pass.pool, table.store(), hidden, &ids, 1.0);
            if rows.len() == x.tokens() {
                elementwise::add(x, &part);
            } else {
                elementwise::add(x, &part.scatter(&rows, x.tokens()));
            }
            return Ok(());
        }
        if self.positions.trains() {
            return Err(Error::data(format!(
                "a picture of other than {} x {} patches, and the encoder's positions are trained",
                spec.grid[0], spec.grid[1]
            ))
            .hint("train the last blocks with tuning.vision_unfreeze_layers, or give pictures of the encoder's size"));
        }
        let mut stored = vec![0.0; spec.positions() * hidden];
        table.store().widen(0, &mut stored);
        // A table of the positions that this batch needs, tile after tile; equal tiles share theirs.
        let (mut values, mut found, mut ids): (Vec<f32>, Vec<(Tile, u32)>, Vec<u32>) =
            (Vec::new(), Vec::new(), Vec::new());
        for &tile in tiles.iter() {
            let known = found.iter().find(|(other, _)| *other == tile).map(|(_, first)| *first);
            let first = known.unwrap_or_else(|| {
                let first = (values.len() / hidden) as u32;
                values.extend(interpolated(&stored, spec, tile));
                found.push((tile, first));
                first
            });
            let positions = spec.class_token as usize + tile.rows * tile.columns;
            ids.extend(first..first + positions as u32);
        }
        let table = Array::of(x.device(), &values);
        let part = embedding::forward(pass.pool, table.view().into(), hidden, &ids, 1.0);
        let rows = tiles.position_rows(spec);
        elementwise::add(x, &if prefix == 0 { part } else { part.scatter(&rows, x.tokens()) });
        Ok(())
    }

    /// Adds the gradients of what is trained, given that of the output `[tokens, hidden]`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        spec: &Spec,
        tiles: &Tiles,
        saved: Saved,
        dy: Activation,
        grads: &mut Grads<'_>,
    ) {
        let Saved { patches, extra, norm } = saved;
        let dx = match (&self.norm, norm) {
            (Some(norm), Some((x, stats))) => {
                let mut dx = dy.like();
                norm.backward(pass, &x, &stats, &dy, Some((&mut dx, false)), grads);
                dx
            }
            _ => dy,
        };
        let prefix = spec.prefix_tokens();
        let (rows, ids) = tiles.positions(spec);
        let mut add = |table: &Weight, rows: &[usize], ids: &[u32]| {
            if table.trains() {
                table.add_embedding_gradient(&dx.gather(rows), ids, 1.0, None, grads);
            }
        };
        add(&self.positions, &rows, &ids);
        if let Some(table) = &self.class_token {
            add(table, &tiles.class_rows(prefix), &vec![0; tiles.count()]);
        }
        if let Some(table) = &self.registers {
            let (rows, ids) = tiles.register_rows(spec);
            add(table, &rows, &ids);
        }
        if self.patch.trains() {
            let dy = if prefix == 0 { dx } else { dx.gather(&tiles.patch_rows(prefix)) };
            self.patch.backward(pass, &Input::new(&patches), extra.as_ref(), &dy, None, grads);
        }
    }
}

/// The weights of four neighbours in a cubic convolution with `a = -0.75`, at the share `t` of the way between the second
/// and the third (Keys, 1981; `PyTorch`'s `get_cubic_upsample_coefficients`).
fn cubic(t: f64) -> [f64; 4] {
    let a = -0.75;
    let near = |x: f64| ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
    let far = |x: f64| ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a;
    [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)]
}

/// Of each of `size` places the four neighbours among `from`, and their weights: pixels' centres are half a step in.
fn neighbours(size: usize, from: usize) -> Vec<[(usize, f64); 4]> {
    let scale = from as f64 / size as f64;
    let of = |place: usize| {
        let at = scale * (place as f64 + 0.5) - 0.5;
        let first = at.floor();
        let weights = cubic(at - first);
        let within = |offset: usize| (first as i64 - 1 + offset as i64).clamp(0, from as i64 - 1) as usize;
        std::array::from_fn(|offset| (within(offset), weights[offset]))
    };
    (0..size).map(of).collect()
}

/// The positions of a tile out of those that are stored, the class token's before them: as
/// `interpolate(mode="bicubic", align_corners=False)` gives them.
fn interpolated(stored: &[f32], spec: &Spec, tile: Tile) -> Vec<f32> {
    let (hidden, [_, columns]) = (spec.hidden_size, spec.grid);
    let class = usize::from(spec.class_token) * hidden;
    let (prefix, table) = stored.split_at(class);
    let mut out = prefix.to_vec();
    let (down, across) = (neighbours(tile.rows, spec.grid[0]), neighbours(tile.columns, columns));
    for rows in &down {
        for places in &across {
            out.extend((0..hidden).map(|feature| {
                let at = |row: usize, column: usize| f64::from(table[(row * columns + column) * hidden + feature]);
                let line = |row: usize| places.iter().map(|&(column, weight)| weight * at(row, column)).sum::<f64>();
                rows.iter().map(|&(row, weight)| weight * line(row)).sum::<f64>() as f32
            }));
        }
    }
    out
}
