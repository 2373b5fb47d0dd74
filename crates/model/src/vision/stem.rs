//! The stem of an image encoder, before its blocks: patches become tokens, class and register tokens join them, and
//! position embeddings are added.
use super::interpolation::{interpolated, taps};
use super::tiles::Tiles;
use crate::grads::Grads;
use crate::linear::{self, Input, Linear};
use crate::norm::Norm;
use crate::pass::Pass;
use crate::weight::Weight;
use tunesmith_config::vision::{Encoder as Spec, Interpolation};
use tunesmith_device::Array;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::embedding;
use tunesmith_ops::gemm::{Target, Transposed, outer};
use tunesmith_vision::Tile;

/// The patch embedding, the extra tokens, and the position embeddings.
#[derive(Debug)]
pub struct Stem {
    pub patch: Linear,
    /// The class token's embedding, `[hidden]`.
    pub class_token: Option<Weight>,
    /// The register tokens' embeddings, `[registers, hidden]`.
    pub registers: Option<Weight>,
    /// The position embeddings `[positions, hidden]`: the class token's, then those of patches, row by row.
    pub positions: Option<Weight>,
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
        let mut tables = [&self.class_token, &self.registers, &self.positions].into_iter().flatten();
        self.patch.trains() || tables.any(Weight::trains) || self.norm.as_ref().is_some_and(Norm::trains)
    }

    /// From `patches [patches, channels * frames * patch * patch]` to `[tokens, hidden]`.
    pub fn forward(&self, pass: &Pass<'_>, spec: &Spec, tiles: &Tiles, patches: Activation) -> (Activation, Saved) {
        let (embedded, extra) = self.patch.forward(pass, &patches, None);
        let prefix = spec.prefix_tokens();
        let mut x =
            if prefix == 0 { embedded } else { embedded.scatter(&tiles.patch_rows(prefix), tiles.tokens(prefix)) };
        if let Some(table) = &self.positions {
            add_positions(pass, table, spec, tiles, &mut x);
        }
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
        let Some(norm) = &self.norm else { return (x, Saved { patches, extra, norm: None }) };
        let (normed, stats) = norm.forward(pass, &x, 1);
        (normed, Saved { patches, extra, norm: Some((x, stats)) })
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
        if let Some(table) = self.positions.as_ref().filter(|table| table.trains()) {
            positions_backward(table, spec, tiles, &dx, grads);
        }
        let mut add = |table: &Weight, rows: &[usize], ids: &[u32]| {
            if table.trains() {
                table.add_embedding_gradient(&dx.gather(rows), ids, 1.0, None, grads);
            }
        };
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

/// Whether position embeddings are taken from the table as they are, without interpolation.
fn picks(spec: &Spec, tiles: &Tiles) -> bool {
    spec.interpolation == Some(Interpolation::Nearest) || tiles.all(spec.grid)
}

/// Adds its position embedding to each token.
fn add_positions(pass: &Pass<'_>, table: &Weight, spec: &Spec, tiles: &Tiles, x: &mut Activation) {
    let hidden = spec.hidden_size;
    let table = table.view(pass.values);
    if spec.interpolation == Some(Interpolation::Axes) {
        for ids in tiles.axes(spec) {
            elementwise::add(x, &embedding::forward(pass.pool, table.store(), hidden, &ids, 1.0));
        }
        return;
    }
    if picks(spec, tiles) {
        let (rows, ids) = tiles.positions(spec);
        let part = embedding::forward(pass.pool, table.store(), hidden, &ids, 1.0);
        if rows.len() == x.tokens() {
            elementwise::add(x, &part);
        } else {
            elementwise::add(x, &part.scatter(&rows, x.tokens()));
        }
        return;
    }
    let mut stored = vec![0.0; spec.positions() * hidden];
    table.store().widen(0, &mut stored);
    // A table of the positions that this batch needs, tile after tile; equal tiles share theirs.
    let (mut values, mut found, mut ids): (Vec<f32>, Vec<(Tile, u32)>, Vec<u32>) = (Vec::new(), Vec::new(), Vec::new());
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
    elementwise::add(x, &if rows.len() == x.tokens() { part } else { part.scatter(&rows, x.tokens()) });
}

/// Adds the gradient of the table of position embeddings, given that of the tokens. Where they are interpolated, it is
/// the transposed interpolation matrix times the gradient.
fn positions_backward(table: &Weight, spec: &Spec, tiles: &Tiles, dx: &Activation, grads: &mut Grads<'_>) {
    if spec.interpolation == Some(Interpolation::Axes) {
        for ids in tiles.axes(spec) {
            table.add_embedding_gradient(dx, &ids, 1.0, None, grads);
        }
        return;
    }
    if picks(spec, tiles) {
        let (rows, ids) = tiles.positions(spec);
        return table.add_embedding_gradient(&dx.gather(&rows), &ids, 1.0, None, grads);
    }
    let Some(range) = table.trained() else { return };
    let dx = dx.gather(&tiles.position_rows(spec));
    let mut weights = Vec::with_capacity(dx.tokens() * spec.positions());
    tiles.iter().for_each(|&tile| weights.extend(taps(spec, tile)));
    let weights = Activation::from_rows(dx.pool(), &weights, spec.positions());
    outer(Target::Rows(grads.at(range)), &weights, &Transposed::new(&dx));
}
