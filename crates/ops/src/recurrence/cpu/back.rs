//! The backward pass's own memory of a chunk; and the gradients of queries and keys through their products and their
//! norms.
use super::CHUNK;
use super::chunk::{Chunk, ONE, pair_block};
use super::kernels::{BLOCK, Mix, add_dot, add_times, times, turn};
use crate::activation::LANES;
use crate::recurrence::Shape;
use crate::scratch::Cutter;

/// The memory that the backward pass has for a chunk, besides [`Chunk`].
pub(super) struct Back<'a> {
    /// `[panels][rows][16]`: the gradients of queries and keys.
    pub(super) dq: &'a mut [f32],
    pub(super) dk: &'a mut [f32],
    /// `[rows][16]`.
    pub(super) read: &'a mut [f32],
    /// `[panels][width][16]`.
    pub(super) d_out: &'a mut [f32],
    pub(super) du: &'a mut [f32],
    pub(super) z: &'a mut [f32],
    /// Sums over heads of `exp(G_i - G_j) dA[i][j]`, and of `exp(G_i - G_j) dM[i][j]`, in the layout of A.
    pub(super) d_products: [&'a mut [f32]; 2],
    /// For one head `dA` or `dM`; and the gradient of its decays, `dA A + dM M`.
    pub(super) d_pairs: &'a mut [f32],
    pub(super) d_decays: &'a mut [f32],
    /// Transposed pairs, `[panels of j][CHUNK i][16 j]`.
    pub(super) turned: &'a mut [f32],
}

impl<'a> Back<'a> {
    pub(super) const fn floats(shape: Shape) -> usize {
        CHUNK * (2 * shape.rows + 5 * CHUNK + 3 * shape.panels() * LANES) + shape.rows * LANES
    }

    pub(super) fn new(shape: Shape, scratch: &mut Cutter<'a>) -> Self {
        let width = shape.panels() * LANES;
        let read = scratch.cut(shape.rows * LANES);
        let mut cut = |rows: usize| {
            let part = scratch.cut(CHUNK * rows);
            part.fill(0.0);
            part
        };
        Self {
            dq: cut(shape.rows),
            dk: cut(shape.rows),
            read,
            d_out: cut(width),
            du: cut(width),
            z: cut(width),
            d_products: [cut(CHUNK), cut(CHUNK)],
            d_pairs: cut(CHUNK),
            d_decays: cut(CHUNK),
            turned: cut(CHUNK),
        }
    }
}

/// Transposes pairs `[panels of i][CHUNK j][16 i]` to `[panels of j][CHUNK i][16 j]`, for `j <= i`.
pub(super) fn turn_pairs(from: &[f32], panels: usize, to: &mut [f32]) {
    for of in 0..panels {
        for with in 0..=of {
            turn(&from[pair_block(of, with)], &ONE, &mut to[pair_block(with, of)]);
        }
    }
}

/// Adds the gradients of queries and keys that come from their products with each other, for all heads at once.
pub(super) fn finish_keys(chunk: &Chunk<'_>, back: &mut Back<'_>) {
    let (rows, keys, panels) = (chunk.scan.shape.rows, chunk.keys(), chunk.panels);
    let sizes = [keys, rows];
    turn_pairs(back.d_products[0], panels, back.turned);
    for panel in 0..panels {
        let at = panel * keys..(panel + 1) * keys;
        let x = &back.d_products[0][panel * CHUNK * LANES..];
        Mix::one(chunk.k, sizes, x, panel + 1, true).run(&mut back.dq[at.clone()]);
        let x = &back.turned[pair_block(panel, panel).start..];
        Mix::one(&chunk.q[at.start..], sizes, x, panels - panel, true).run(&mut back.dk[at]);
    }
    if chunk.scan.corrects {
        // Both orders of a pair of keys have the same product, so their gradients are added up first.
        turn_pairs(back.d_products[1], panels, back.turned);
        for of in 0..panels {
            let diagonal = pair_block(of, of);
            let before = diagonal.start - of * BLOCK..diagonal.start;
            back.turned[before.clone()].copy_from_slice(&back.d_products[1][before]);
            add_times(&mut back.turned[diagonal.clone()], &back.d_products[1][diagonal], &ONE);
        }
        for panel in 0..panels {
            let x = &back.turned[panel * CHUNK * LANES..];
            Mix::one(chunk.k, sizes, x, panels, true).run(&mut back.dk[panel * keys..][..keys]);
        }
    }
}

/// Turns the gradients of normalized queries and keys into those of the queries and keys themselves, in place.
pub(super) fn norm_backward(chunk: &Chunk<'_>, back: &mut Back<'_>) {
    if chunk.scan.norm_eps.is_none() {
        return;
    }
    let keys = chunk.keys();
    let pairs: [(&[f32], &mut [f32]); 2] = [(chunk.q, back.dq), (chunk.k, back.dk)];
    for (which, (x, d)) in pairs.into_iter().enumerate() {
        let scale = chunk.scan.norm_scales()[which];
        let panels = x.chunks_exact(keys).zip(d.chunks_exact_mut(keys)).zip(&chunk.roots[which]);
        for ((x, d), roots) in panels.take(chunk.panels) {
            // With x̂ = scale root x: dx = scale root d - x̂ (x̂ d) root / scale.
            let mut dots = [0.0; LANES];
            add_dot(x, d, &mut dots);
            let mut factors = [0.0; LANES];
            for ((factor, dot), root) in factors.iter_mut().zip(dots).zip(roots) {
                *factor = -dot * root / scale;
            }
            times(d, &roots.map(|root| root * scale));
            add_times(d, x, &factors);
        }
    }
}
