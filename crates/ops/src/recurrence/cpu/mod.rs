//! The gated delta rule and Mamba 2 on the CPU: one recurrence over a state `S [rows, columns]` of each head.
//!
//! A token has a query q and a key k `[rows]`, which the heads of a group share. For each head it has a value v `[columns]`, a
//! scale, and a decay `exp(g)`. From the state `S` before the token follow the state `S'` after it and the output:
//! `S' = exp(g) S + k u^T`, `o = S'^T q + D v`. Under the delta rule, which corrects what the key finds in the state,
//! `u = scale (v - exp(g) S^T k)`; in Mamba 2, `u = scale v`.
//!
//! Sequences are cut into chunks of [`CHUNK`] tokens. With `G` the sum of g from the chunk's first token on, and `S` the state
//! before it, the recurrence within a chunk is (Yang et al., "Gated Delta Networks", 2024; Dao and Gu, "Transformers are SSMs",
//! 2024; `torch_chunk_gated_delta_rule` in Transformers):
//! - `A[i][j] = exp(G_i - G_j) q_i k_j` for `j <= i`, `L[i][j] = scale_i exp(G_i - G_j) k_i k_j` for `j < i`;
//! - `(1 + L) u = scale (v - exp(G) k S)`, solved 16 rows at a time, with the inverse of each block on the diagonal;
//! - `o = exp(G) q S + A u`, and the state after the chunk is `exp(G_end) S + sum_j exp(G_end - G_j) k_j u_j^T`.
//!
//! No exponent is positive, so nothing overflows; decays below about 1e-20 count as 0. The backward pass keeps the
//! state before each chunk and all u, and computes the rest again. Its gradients of g are sums of `dA A` and the like
//! over pairs of tokens on both sides of the decay, never differences of larger sums: so what has decayed has no
//! gradient.
//!
//! All work consists of products of panels, with tokens in the lanes, as in activations. One task takes some heads of a
//! group of one sequence.
mod back;
mod backward;
mod chunk;
mod forward;
mod kernels;
mod step;

pub(crate) use backward::backward;
pub(crate) use forward::forward;

use super::state::Shape;
use crate::activation::{Activation, LANES, Pool, realign, unalign};
use crate::par::Shared;
use std::ops::Range;
use std::sync::Arc;

/// How many tokens a chunk has.
pub(super) const CHUNK: usize = 64;

/// About how many tasks a sequence is divided into. If there are few groups, each is divided into parts; each part then
/// has gradients of queries and keys of its own.
const TASKS: usize = 16;

/// The gates of a head at one token.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Gate {
    /// The scale: what u is multiplied by.
    pub(crate) scale: f32,
    /// The logarithm of the decay, at most 0.
    pub(crate) g: f32,
}

/// What to run the recurrence on: where the operands are in an activation, and which rule applies.
pub(crate) struct Scan<'a> {
    pub(crate) shape: Shape,
    /// How many groups there are. The heads of a group share queries and keys.
    pub(crate) groups: usize,
    pub(crate) act: &'a Activation,
    /// The features of `act` at which the queries `[groups * rows]`, the keys `[groups * rows]` and the values
    /// `[heads * columns]` begin.
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) values: usize,
    /// If set, queries and keys are divided by the root of their sum of squares plus this; queries by the root of
    /// `rows` too.
    pub(crate) norm_eps: Option<f32>,
    /// Whether to subtract from a value what its key finds in the state: the delta rule.
    pub(crate) corrects: bool,
    /// `D` of each head; `None` for 0.
    pub(crate) through: Option<&'a [f32]>,
    /// Computes the gates of a head at a token.
    pub(crate) gate: &'a (dyn Fn(usize, usize) -> Gate + Sync),
}

/// The gradients of a head's gates at one token, and of `D`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sums {
    /// The gradient of the scale's logarithm.
    pub(crate) scale: f32,
    /// The gradient of `g`.
    pub(crate) g: f32,
    /// The gradient of `D`, for this token.
    pub(crate) through: f32,
}

/// How many parts the heads of a group are divided into.
fn parts(heads: usize, groups: usize) -> usize {
    (TASKS / groups).clamp(1, heads / groups)
}

impl Scan<'_> {
    /// How many heads a group has.
    const fn group(&self) -> usize {
        self.shape.heads / self.groups
    }

    /// How many tasks a sequence is divided into.
    fn tasks(&self) -> usize {
        self.groups * parts(self.shape.heads, self.groups)
    }

    /// For a task's number among those of all sequences: its sequence, its number within the sequence, and its heads.
    fn task(&self, task: usize) -> (usize, usize, Range<usize>) {
        let (tasks, parts, all) = (self.tasks(), parts(self.shape.heads, self.groups), self.group());
        let (sequence, task) = (task / tasks, task % tasks);
        let (group, part) = (task / parts, task % parts);
        (sequence, task, group * all + part * all / parts..group * all + (part + 1) * all / parts)
    }

    /// The most heads that a task has.
    fn most_heads(&self) -> usize {
        self.group().div_ceil(parts(self.shape.heads, self.groups))
    }

    /// A token's query and key, normalized if the scan says so.
    fn normed_row(&self, mut x: [Vec<f32>; 2]) -> [Vec<f32>; 2] {
        if let Some(eps) = self.norm_eps {
            for (x, scale) in x.iter_mut().zip(self.norm_scales()) {
                let root = (x.iter().map(|x| x * x).sum::<f32>() + eps).sqrt().recip();
                for x in x.iter_mut() {
                    *x *= root * scale;
                }
            }
        }
        x
    }

    /// Constant factors of normalized queries and of keys, besides their norms.
    fn norm_scales(&self) -> [f32; 2] {
        [if self.norm_eps.is_some() { (self.shape.rows as f32).sqrt().recip() } else { 1.0 }, 1.0]
    }
}

/// The temporary memory of the backward pass, in addition to its results.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The state before each chunk except the first of a sequence: for the chunk that starts at token `t` at index
    /// `t / CHUNK - 1`. `[tokens / CHUNK, heads][columns / 16][rows][16]`.
    states: Activation,
    /// u of all tokens, `[tokens, heads * columns]`.
    u: Activation,
    /// If groups are divided: the gradients of queries and keys from each task, `[tokens, tasks][q, k][rows]`.
    parts: Option<Activation>,
}

impl Memory {
    /// For so many tokens.
    pub(crate) fn new(pool: &Arc<Pool>, tokens: usize, shape: Shape, groups: usize) -> Self {
        let parts = parts(shape.heads, groups);
        // The same number of floats for each token, because a pool sizes its buffers for the most tokens.
        let states = pool.act_f32(tokens, (shape.heads * shape.floats()).div_ceil(CHUNK));
        let u = pool.act_f32(tokens, shape.heads * shape.columns);
        Self { states, u, parts: (parts > 1).then(|| pool.act_f32(tokens, groups * parts * 2 * shape.rows)) }
    }
}

/// The chunks of a sequence: up to [`CHUNK`] tokens each.
fn chunks(sequence: &Range<usize>) -> impl DoubleEndedIterator<Item = Range<usize>> {
    let Range { start, end } = *sequence;
    (start..end).step_by(CHUNK).map(move |first| first..end.min(first + CHUNK))
}

/// Copies features of tokens to panels of `width` rows. Rows beyond the features stay as they are.
fn load(act: &Activation, features: Range<usize>, tokens: &Range<usize>, to: &mut [f32], width: usize) {
    assert!(
        features.len() <= width && features.end <= act.features() && tokens.end <= act.tokens(),
        "some of an activation"
    );
    for (first, to) in tokens.clone().step_by(LANES).zip(to.chunks_exact_mut(width * LANES)) {
        let tokens = first..tokens.end.min(first + LANES);
        // SAFETY: tokens and features are some of the activation's, which is borrowed; `to` has a vector for each feature.
        unsafe { realign(act.ptr(), act.stride(), features.clone(), tokens, 1.0, to.as_mut_ptr()) };
    }
}

/// An activation on the CPU that tasks write to, each its own features or tokens.
#[derive(Debug, Clone, Copy)]
struct Place {
    at: Shared<f32>,
    stride: usize,
}

impl Place {
    fn of(act: &mut Activation) -> Self {
        Self { at: act.shared(), stride: act.stride() }
    }

    /// The reverse of [`load`]: copies panels to features of tokens.
    ///
    /// # Safety
    /// The activation has the features and tokens and lives; no other task has these.
    unsafe fn store(&self, from: &[f32], width: usize, features: Range<usize>, tokens: &Range<usize>) {
        for (first, from) in tokens.clone().step_by(LANES).zip(from.chunks_exact(width * LANES)) {
            let tokens = first..tokens.end.min(first + LANES);
            // SAFETY: as the caller says; `from` has a vector for each feature.
            unsafe { unalign(from.as_ptr(), self.at.get(), self.stride, features.clone(), tokens) };
        }
    }
}
