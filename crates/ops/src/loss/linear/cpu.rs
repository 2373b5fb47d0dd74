//! Corrects a chunk's gradients on the CPU, in a single task, so that each row's sum is added token by token.
use crate::activation::{Activation, LANES};
use crate::gemm::Store;
use crate::loss::TokenLoss;

/// As [`super::Projection::correct`].
pub(super) fn correct(
    weight: Store<'_>,
    d_part: &mut Activation,
    mut h_over_s: Option<&mut Activation>,
    losses: &[TokenLoss],
    targets: &[u32],
    scale: f32,
) {
    let hidden = d_part.features();
    let mut row = vec![0.0; hidden];
    for panel in 0..d_part.panels() {
        let mut factor = [0.0f32; LANES];
        for (lane, loss) in losses[panel * LANES..].iter().take(LANES).enumerate() {
            factor[lane] = scale / loss.sum;
        }
        let values = d_part.panel_mut(panel);
        for lanes in values.chunks_exact_mut(LANES) {
            lanes.iter_mut().zip(factor).for_each(|(value, factor)| *value *= factor);
        }
        for (lane, &target) in targets[panel * LANES..].iter().take(LANES).enumerate() {
            weight.widen(target as usize * hidden, &mut row);
            for (feature, w) in row.iter().enumerate() {
                values[feature * LANES + lane] -= scale * w;
            }
        }
        if let Some(h) = &mut h_over_s {
            // Lanes past the last token become zero.
            for lanes in h.panel_mut(panel).chunks_exact_mut(LANES) {
                lanes.iter_mut().zip(factor).for_each(|(value, factor)| *value *= factor);
            }
        }
    }
}

/// `columns[t, i] = d[t, ids[i]]`.
pub(super) fn pick_columns(d: &Activation, ids: &[u32], columns: &mut Activation) {
    for token in 0..d.tokens() {
        let row: Vec<f32> = ids.iter().map(|&id| d.at(token, id as usize)).collect();
        columns.set_row(token, &row);
    }
}

/// As [`super::subtract_targets`].
pub(super) fn subtract_targets(
    gradients: &mut [f32],
    ids: Option<&[u32]>,
    targets: &[u32],
    h: &Activation,
    first: usize,
    scale: f32,
) {
    let hidden = h.features();
    for (token, target) in targets.iter().enumerate() {
        let at = ids.map_or(Some(*target as usize), |ids| ids.iter().position(|id| id == target));
        if let Some(at) = at {
            subtract_row(&mut gradients[at * hidden..][..hidden], scale, h, first + token);
        }
    }
}

/// `out -= scale h[token]`.
fn subtract_row(out: &mut [f32], scale: f32, h: &Activation, token: usize) {
    let from = &h.panel(token / LANES)[token % LANES..];
    for (feature, value) in out.iter_mut().enumerate() {
        *value -= scale * from[feature * LANES];
    }
}
