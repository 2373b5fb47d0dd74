//! The gated delta rule and Mamba 2 on a GPU, chunk by chunk. First, one block for each chunk and head computes what
//! the pairs of its tokens need. Then one block for each head, sequence and slice of a state's columns walks along its
//! sequence.
//!
//! All sums have a fixed order: nothing is added by atomics.
//! one order: nothing is added up by atomics.
use super::{Shape, State};
use crate::activation::Activation;
use crate::cuda::{self, Arg, Grid, Typed};
use crate::floats::Floats;
use std::ops::Range;
use tunesmith_device::Array;

static KERNELS: Typed = Typed::new("recurrence", include_str!("recurrence.cu"));

/// Tokens of a chunk and columns of a slice, as the kernels have them.
const CHUNK: usize = 64;
const SLICE: usize = 32;
const DEPTH: usize = 32;
const PITCH: usize = 65;
const THREADS: u32 = 256;
/// How many floats of shared memory the walk forward, and that back, need besides a state.
const FORWARD: usize = 2 * CHUNK * SLICE + DEPTH * PITCH;
const BACKWARD: usize = 3 * CHUNK * SLICE + DEPTH * PITCH + CHUNK * (PITCH + CHUNK);

/// What to run the recurrence on: its operands, and which rule applies.
pub(crate) struct Scan<'a> {
    pub(crate) shape: Shape,
    /// How many groups there are. The heads of a group share queries and keys.
    pub(crate) groups: usize,
    /// The activation that holds the values, `[heads * columns]`, from feature `values` on.
    pub(crate) act: &'a Activation,
    pub(crate) values: usize,
    /// Queries and keys in float32, `[tokens, 2 * groups * rows]`.
    pub(crate) keys: &'a Activation,
    /// Four numbers for each head in float32, `[tokens, heads * 4]`: the scale, `g`, and two that the recurrence does
    /// not read.
    pub(crate) gates: &'a Activation,
    /// Whether to subtract from a value what its key finds in the state: the delta rule.
    pub(crate) corrects: bool,
    /// `D` of each head; `None` for 0.
    pub(crate) through: Option<Floats<'a>>,
}

/// The gradients from each slice of each head, which are still to be summed: of queries and keys,
/// `[tokens, heads * slices * 2 * rows]`; and of the scale's logarithm, of `g` and of `D`,
/// `[tokens, heads * slices * 3]`.
pub(crate) struct Parts {
    pub(crate) keys: Activation,
    pub(crate) gates: Activation,
}

/// Where chunks and sequences begin.
struct Bounds {
    /// The first token of each chunk, and the number of tokens at the end.
    chunks: Array<u32>,
    /// The number of the first chunk of each sequence, and the number of chunks at the end.
    sequences: Array<u32>,
    counts: [usize; 2],
}

/// What the pairs of tokens within chunks need, `[tokens, heads * 64]` each: A and, under the delta rule, M and the
/// inverse.
struct Pairs {
    attention: Activation,
    m: Option<Activation>,
    inverse: Option<Activation>,
}

impl Scan<'_> {
    /// How many slices of up to [`SLICE`] columns a state is divided into.
    pub(crate) const fn slices(&self) -> usize {
        self.shape.columns.div_ceil(SLICE)
    }

    fn bounds(&self, sequences: &[Range<usize>]) -> Bounds {
        let (mut chunks, mut firsts) = (Vec::new(), vec![0]);
        for sequence in sequences {
            chunks.extend(sequence.clone().step_by(CHUNK).map(|first| first as u32));
            firsts.push(chunks.len() as u32);
        }
        let counts = [chunks.len(), sequences.len()];
        chunks.push(self.act.tokens() as u32);
        let upload = |values: &[u32]| cuda::upload(self.act.device(), values);
        Bounds { chunks: upload(&chunks), sequences: upload(&firsts), counts }
    }

    fn sizes(&self) -> [Arg; 5] {
        let sizes = [self.shape.heads, self.groups, self.shape.rows, self.shape.columns, usize::from(self.corrects)];
        sizes.map(|size| Arg::from(size as u32))
    }

    fn by_head(&self, features: usize) -> Activation {
        self.act.pool().act_f32(self.act.tokens(), self.shape.heads * features)
    }

    fn pairs(&self, bounds: &Bounds) -> Pairs {
        let by_rule = || self.corrects.then(|| self.by_head(CHUNK));
        let mut pairs = Pairs { attention: self.by_head(CHUNK), m: by_rule(), inverse: by_rule() };
        let [heads, groups, rows, _, corrects] = self.sizes();
        let args = [
            self.keys.into(),
            self.gates.into(),
            (&bounds.chunks).into(),
            (&mut pairs.attention).into(),
            pairs.m.as_mut().map_or(Arg::NULL, Arg::from),
            pairs.inverse.as_mut().map_or(Arg::NULL, Arg::from),
            heads,
            groups,
            rows,
            corrects,
        ];
        let blocks = [self.shape.heads as u32, bounds.counts[0] as u32, 1];
        let grid = Grid { blocks, threads: THREADS, shared: floats((2 * DEPTH + 2 * CHUNK) * PITCH) };
        cuda::launch(self.act.device(), KERNELS.same(&[self.act]), "recurrence_pairs", grid, &args);
        pairs
    }

    /// The arguments that both walks read.
    fn operands(&self, bounds: &Bounds, pairs: &Pairs) -> [Arg; 8] {
        [
            self.act.into(),
            (self.act.features() as u32).into(),
            (self.values as u32).into(),
            self.keys.into(),
            self.gates.into(),
            (&bounds.chunks).into(),
            (&bounds.sequences).into(),
            (&pairs.attention).into(),
        ]
    }

    fn grid(&self, bounds: &Bounds, shared: usize) -> Grid {
        let blocks = [self.shape.heads, bounds.counts[1], self.slices()].map(|count| count as u32);
        Grid { blocks, threads: THREADS, shared: floats(self.shape.rows * SLICE + shared) }
    }

    /// Walks forward. Writes `out`, or what the backward pass needs (`kept`): the states before chunks, and u.
    fn walk(
        &self,
        bounds: &Bounds,
        pairs: &Pairs,
        states: Option<&mut [&mut State]>,
        out: Option<&mut Activation>,
        kept: Option<[&mut Activation; 2]>,
    ) {
        let device = self.act.device();
        let states = states.map(|states| {
            let addresses: Vec<u64> = states.iter_mut().map(|state| state.floats.view().address()).collect();
            cuda::upload(device, &addresses)
        });
        let source = KERNELS.same(&[self.act]);
        let [checkpoints, u] = kept.map_or([Arg::NULL; 2], |kept| kept.map(Arg::from));
        let args = [
            pairs.inverse.as_ref().map_or(Arg::NULL, Arg::from),
            self.through.map_or(Arg::NULL, Arg::from),
            states.as_ref().map_or(Arg::NULL, Arg::from),
            out.map_or(Arg::NULL, Arg::from),
            checkpoints,
            u,
        ];
        let grid = self.grid(bounds, FORWARD);
        let args = [&self.operands(bounds, pairs)[..], &args, &self.sizes()].concat();
        cuda::launch(device, source, "recurrence_forward", grid, &args);
    }

    /// Writes the outputs `[tokens, heads * columns]` to `out`, as `gated_delta_rule::forward` and `mamba2::forward`
    /// say.
    pub(crate) fn forward(&self, sequences: &[Range<usize>], states: Option<&mut [&mut State]>, out: &mut Activation) {
        if self.act.tokens() > 0 {
            let bounds = self.bounds(sequences);
            self.walk(&bounds, &self.pairs(&bounds), states, Some(out), None);
        }
    }

    /// Writes the gradients of the values to `d`, which has the layout of the activation. The other gradients are sums
    /// over slices of what it returns.
    pub(crate) fn backward(&self, sequences: &[Range<usize>], dy: &Activation, d: &mut Activation) -> Parts {
        let (slices, rows) = (self.slices(), self.shape.rows);
        let mut parts = Parts { keys: self.by_head(slices * 2 * rows), gates: self.by_head(slices * 3) };
        if self.act.tokens() == 0 {
            return parts;
        }
        let bounds = self.bounds(sequences);
        let pairs = self.pairs(&bounds);
        // The same number of floats for each token, because a pool sizes its buffers for the most tokens.
        let floats = (self.shape.heads * slices * rows * SLICE).div_ceil(CHUNK);
        let mut checkpoints = self.act.pool().act_f32(self.act.tokens(), floats);
        let mut u = self.by_head(self.shape.columns);
        self.walk(&bounds, &pairs, None, None, Some([&mut checkpoints, &mut u]));
        let source = KERNELS.same(&[self.act, dy, d]);
        let args = [
            pairs.m.as_ref().map_or(Arg::NULL, Arg::from),
            pairs.inverse.as_ref().map_or(Arg::NULL, Arg::from),
            self.through.map_or(Arg::NULL, Arg::from),
            dy.into(),
            (&checkpoints).into(),
            (&u).into(),
            d.into(),
            (&mut parts.keys).into(),
            (&mut parts.gates).into(),
        ];
        let grid = self.grid(&bounds, BACKWARD);
        let args = [&self.operands(&bounds, &pairs)[..], &args, &self.sizes()].concat();
        cuda::launch(self.act.device(), source, "recurrence_backward", grid, &args);
        parts
    }
}

/// The bytes of `count` floats.
const fn floats(count: usize) -> u32 {
    (count * size_of::<f32>()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every GPU from compute capability 8.0 on gives a block 99 KiB. Gates and sums have 2.5 KiB of these.
    #[test]
    fn states_of_256_rows_have_room_on_every_gpu() {
        assert!(floats(256 * SLICE + BACKWARD) + (5 << 9) <= 99 << 10);
    }
}
