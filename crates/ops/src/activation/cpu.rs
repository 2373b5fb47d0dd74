//! Copies between panels, rows and tokens in the CPU's memory.
use super::{Activation, LANES};
use crate::par;
use std::ops::Range;

pub(super) fn rows(x: &Activation, first: usize, out: &mut Activation) {
    let (start, floats) = (first / LANES * x.stride(), out.panels() * out.stride());
    out.data_mut().copy_from_slice(&x.data()[start..start + floats]);
}

pub(super) fn put_rows(x: &mut Activation, first: usize, part: &Activation) {
    let (start, floats) = (first / LANES * x.stride(), part.panels() * part.stride());
    x.data_mut()[start..start + floats].copy_from_slice(part.data());
}

pub(super) fn row(x: &Activation, token: usize) -> Vec<f32> {
    x.panel(token / LANES)[token % LANES..].iter().step_by(LANES).copied().collect()
}

pub(super) fn to_vector(x: &Activation, out: &mut Activation) {
    let features = x.panel(0).as_chunks::<LANES>().0;
    let (to, rest) = out.data_mut().split_at_mut(features.len());
    to.iter_mut().zip(features).for_each(|(to, lanes)| *to = lanes[0]);
    rest.fill(0.0);
}

pub(super) fn columns(x: &Activation, columns: Range<usize>, out: &mut Activation) {
    for panel in 0..x.panels() {
        let from = &x.panel(panel)[columns.start * LANES..columns.end * LANES];
        out.panel_mut(panel).copy_from_slice(from);
    }
}

pub(super) fn side_by_side(parts: &[&Activation], out: &mut Activation) {
    for panel in 0..out.panels() {
        let mut rest = out.panel_mut(panel);
        for part in parts {
            let (to, after) = rest.split_at_mut(part.stride());
            to.copy_from_slice(part.panel(panel));
            rest = after;
        }
    }
}

pub(super) fn split_parts(x: &Activation, widths: &[usize], parts: &mut [Activation]) {
    let group = LANES * widths.iter().sum::<usize>();
    let mut first = 0;
    for (part, width) in parts.iter_mut().zip(widths) {
        let width = width * LANES;
        let to = part.data_mut().chunks_exact_mut(width);
        to.zip(x.data().chunks_exact(group)).for_each(|(to, from)| to.copy_from_slice(&from[first..][..width]));
        first += width;
    }
}

pub(super) fn join_parts(parts: &[&Activation], widths: &[usize], out: &mut Activation) {
    let group = LANES * widths.iter().sum::<usize>();
    let mut first = 0;
    for (part, width) in parts.iter().zip(widths) {
        let width = width * LANES;
        let to = out.data_mut().chunks_exact_mut(group);
        to.zip(part.data().chunks_exact(width)).for_each(|(to, from)| to[first..][..width].copy_from_slice(from));
        first += width;
    }
}

pub(super) fn from_rows(rows: &[f32], out: &mut Activation) {
    for (token, row) in rows.chunks_exact(out.features()).enumerate() {
        out.set_row(token, row);
    }
}

pub(super) fn to_rows(x: &Activation, rows: &mut [f32]) {
    for (token, row) in rows.chunks_exact_mut(x.features().max(1)).enumerate() {
        let panel = x.panel(token / LANES);
        for (feature, value) in row.iter_mut().enumerate() {
            *value = panel[feature * LANES + token % LANES];
        }
    }
}

pub(super) fn copy(x: &Activation, out: &mut Activation) {
    let (stride, to) = (x.stride(), out.shared());
    par::run(x.panels(), |panel| {
        // SAFETY: `Activation::copy` makes `out` with the shape of `x`: both hold `panels` panels of `stride` floats.
        // Each task owns one panel of `out`.
        unsafe { std::ptr::copy_nonoverlapping(x.ptr().add(panel * stride), to.get().add(panel * stride), stride) };
    });
}

pub(super) fn gather(x: &Activation, rows: &[usize], out: &mut Activation) {
    let (stride, features, to) = (x.stride(), x.features(), out.shared());
    par::run(rows.len().div_ceil(LANES), |panel| {
        let rows = &rows[panel * LANES..rows.len().min((panel + 1) * LANES)];
        let mut tokens = [&x.data()[..0]; LANES];
        for (token, &row) in tokens.iter_mut().zip(rows) {
            *token = &x.panel(row / LANES)[row % LANES..];
        }
        // All tokens of one feature before the next feature: each cache line of the result is written once.
        for feature in 0..features {
            for (lane, token) in tokens.iter().enumerate().take(rows.len()) {
                // SAFETY: `Activation::gather_to` makes `out` with a token for each row and as many features as `x`, so
                // that the place lies within it; no other task has this panel.
                unsafe { *to.get().add(panel * stride + feature * LANES + lane) = token[feature * LANES] };
            }
        }
    });
}

pub(super) fn times(x: &mut Activation, factors: &[f32]) {
    for (panel, factors) in factors.chunks(LANES).enumerate() {
        for lanes in x.panel_mut(panel).chunks_exact_mut(LANES) {
            lanes.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
        }
    }
}

pub(super) fn dot(x: &Activation, other: &Activation) -> Vec<f32> {
    let mut sums = Vec::with_capacity(x.tokens());
    for panel in 0..x.panels() {
        let mut lanes = [0.0f32; LANES];
        let pairs = x.panel(panel).chunks_exact(LANES).zip(other.panel(panel).chunks_exact(LANES));
        for (a, b) in pairs {
            for lane in 0..LANES {
                lanes[lane] += a[lane] * b[lane];
            }
        }
        sums.extend(&lanes[..LANES.min(x.tokens() - panel * LANES)]);
    }
    sums
}

pub(super) fn scatter_add(x: &mut Activation, rows: &[usize], factors: Option<&[f32]>, from: &Activation) {
    /// How many features one task adds.
    const FEATURES: usize = 64;
    /// Below so many numbers one thread adds them all. The limit is an estimate.
    const FEW: usize = 1 << 12;
    let (stride, features) = (x.stride(), x.features());
    assert!(rows.iter().all(|row| row / LANES < x.panels()), "tokens of the activation");
    let to = x.shared();
    let step = if rows.len() * features < FEW { features } else { FEATURES };
    par::run(features.div_ceil(step.max(1)), |task| {
        for (index, &row) in rows.iter().enumerate() {
            let factor = factors.map_or(1.0, |factors| factors[index]);
            let source = &from.panel(index / LANES)[index % LANES..];
            for feature in task * step..features.min((task + 1) * step) {
                // SAFETY: the panel and the feature are some of the activation's, as asserted, which is borrowed for writing; no other task
                // has this feature.
                unsafe {
                    *to.get().add(row / LANES * stride + feature * LANES + row % LANES) +=
                        factor * source[feature * LANES];
                };
            }
        }
    });
}

pub(super) fn scatter(x: &Activation, rows: &[usize], out: &mut Activation) {
    out.data_mut().fill(0.0);
    for (index, &row) in rows.iter().enumerate() {
        let from = &x.panel(index / LANES)[index % LANES..];
        let to = &mut out.panel_mut(row / LANES)[row % LANES..];
        for feature in 0..x.features() {
            to[feature * LANES] = from[feature * LANES];
        }
    }
}
