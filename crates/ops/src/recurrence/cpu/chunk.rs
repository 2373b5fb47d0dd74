//! A chunk of tokens as both passes need it: its queries and keys, its decays, u and A. The formulas are in the
//! documentation of `recurrence::cpu`.
use super::kernels::{
    Across, BLOCK, LEAST_LOG_DECAY, Lanes, Mix, add_dot, add_times, decay, inverse, miss, set_product, set_times,
    times, turn,
};
use super::{CHUNK, Gate, Scan, load};
use crate::activation::LANES;
use crate::recurrence::Shape;
use crate::scratch::Cutter;
use std::array::from_fn;
use std::ops::Range;

/// How many panels a chunk has.
pub(super) const PANELS: usize = CHUNK / LANES;

/// One number for each token of a chunk.
pub(super) type Tokens = [Lanes; PANELS];

/// Factors of 1.
pub(super) const ONE: Lanes = [1.0; LANES];

/// The gates of a chunk's tokens for one head. Lanes after the last token have a scale of 0 and the last token's decay.
pub(super) struct Gates {
    pub(super) scale: Tokens,
    /// The share of the state before the chunk that is left at each token, `exp(G)`.
    pub(super) behind: Tokens,
    /// The share of each token's contribution that is left after the chunk.
    pub(super) ahead: Tokens,
    /// The share of the state before the chunk that is left after it.
    pub(super) whole: f32,
    /// `G`: the sum of g from the chunk's first token on.
    sums: [[f64; LANES]; PANELS],
}

impl Gates {
    pub(super) fn of(scan: &Scan<'_>, head: usize, tokens: &Range<usize>) -> Self {
        let mut gates = Self {
            scale: [[0.0; LANES]; PANELS],
            behind: [ONE; PANELS],
            ahead: [ONE; PANELS],
            whole: 1.0,
            sums: [[0.0; LANES]; PANELS],
        };
        let mut sum = 0.0;
        for (at, token) in tokens.clone().enumerate() {
            let Gate { scale, g } = (scan.gate)(head, token);
            sum += f64::from(g);
            gates.scale[at / LANES][at % LANES] = scale;
            gates.sums[at / LANES][at % LANES] = sum;
        }
        gates.sums.as_flattened_mut()[tokens.len()..].fill(sum);
        for (at, &own) in gates.sums.as_flattened().iter().enumerate().take(tokens.len()) {
            gates.behind[at / LANES][at % LANES] = decay_of(own);
            gates.ahead[at / LANES][at % LANES] = decay_of(sum - own);
        }
        gates.whole = decay_of(sum);
        gates
    }
}

/// The decay `exp(logarithm)`; 0 below [`LEAST_LOG_DECAY`].
pub(super) fn decay_of(logarithm: f64) -> f32 {
    let logarithm = logarithm as f32;
    if logarithm < LEAST_LOG_DECAY { 0.0 } else { logarithm.exp() }
}

/// `-x`, token by token.
pub(super) fn negated(x: &Tokens) -> Tokens {
    x.map(|lanes| lanes.map(|x| -x))
}

/// The chunk that a task works on, and its memory, which one chunk after the other uses.
pub(super) struct Chunk<'a> {
    pub(super) scan: &'a Scan<'a>,
    pub(super) tokens: Range<usize>,
    /// How many panels have a token.
    pub(super) panels: usize,
    /// The features of values, rounded up to whole panels of 16.
    pub(super) width: usize,
    /// Queries and keys, `[panels][rows][16]`, normalized if the scan says so.
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    /// What normalization multiplied q and k by.
    pub(super) roots: [Tokens; 2],
    /// The products `q_i k_j` and `k_i k_j`, in the layout of all pairs of tokens here: `[panels of i][CHUNK j][16 i]`.
    /// Blocks in which every `j` comes after every `i` are not computed.
    pub(super) products: [&'a mut [f32]; 2],
    /// The decays `exp(G_i - G_j)`; 0 for `j > i`.
    pub(super) decays: &'a mut [f32],
    /// `-L`.
    pub(super) lower: &'a mut [f32],
    /// `A`.
    pub(super) attention: &'a mut [f32],
    /// The inverse of `1 + L` for the tokens of each panel, `[panels][16 i][16 j]`.
    pub(super) inverse: &'a mut [f32],
    /// `[panels][width][16]`.
    pub(super) v: &'a mut [f32],
    pub(super) u: &'a mut [f32],
    pub(super) out: &'a mut [f32],
    /// Transposed values, `[panels][width / 16][16 tokens][16]`.
    turned: &'a mut [f32],
}

/// The range of a panel of `i` in memory of pairs that holds the tokens `j` up to the panel's last.
pub(super) const fn pairs(panel: usize) -> Range<usize> {
    let first = panel * CHUNK * LANES;
    first..first + (panel + 1) * BLOCK
}

/// The range of the block for the panel `of` of `i` and the panel `with` of `j` in memory of pairs.
pub(super) const fn pair_block(of: usize, with: usize) -> Range<usize> {
    let first = of * CHUNK * LANES + with * BLOCK;
    first..first + BLOCK
}

/// Sets the diagonal of a block (`j == i`) to zero.
pub(super) fn clear_diagonal(block: &mut [f32]) {
    block.iter_mut().step_by(LANES + 1).for_each(|value| *value = 0.0);
}

impl<'a> Chunk<'a> {
    /// How many floats of scratch memory [`Chunk::new`] takes.
    pub(super) const fn floats(shape: Shape) -> usize {
        CHUNK * (2 * shape.rows + 5 * CHUNK + LANES + 4 * shape.panels() * LANES)
    }

    pub(super) fn new(scan: &'a Scan<'a>, scratch: &mut Cutter<'a>) -> Self {
        let width = scan.shape.panels() * LANES;
        let mut cut = |rows: usize| {
            let part = scratch.cut(CHUNK * rows);
            part.fill(0.0);
            part
        };
        Self {
            scan,
            tokens: 0..0,
            panels: 0,
            width,
            q: cut(scan.shape.rows),
            k: cut(scan.shape.rows),
            roots: [[ONE; PANELS]; 2],
            products: [cut(CHUNK), cut(CHUNK)],
            decays: cut(CHUNK),
            lower: cut(CHUNK),
            attention: cut(CHUNK),
            inverse: cut(LANES),
            v: cut(width),
            u: cut(width),
            out: cut(width),
            turned: cut(width),
        }
    }

    /// How many floats a panel of queries (or keys) has.
    pub(super) const fn keys(&self) -> usize {
        self.scan.shape.rows * LANES
    }

    /// How many floats a panel of values has.
    pub(super) const fn values(&self) -> usize {
        self.width * LANES
    }

    /// Loads the keys of a group, and their products with each other if the scan corrects.
    pub(super) fn load_keys(&mut self, tokens: Range<usize>, group: usize) {
        (self.panels, self.tokens) = (tokens.len().div_ceil(LANES), tokens);
        self.load_rows(1, group);
        if self.scan.corrects {
            self.multiply(1);
        }
    }

    /// Loads the queries and keys of a group, and computes their products.
    pub(super) fn load(&mut self, tokens: Range<usize>, group: usize) {
        self.load_keys(tokens, group);
        self.load_rows(0, group);
        self.multiply(0);
    }

    /// Loads the queries (0) or the keys (1) of a group.
    fn load_rows(&mut self, which: usize, group: usize) {
        let (scan, rows, keys) = (self.scan, self.scan.shape.rows, self.keys());
        let (x, first) = if which == 0 { (&mut *self.q, scan.queries) } else { (&mut *self.k, scan.keys) };
        let first = first + group * rows;
        load(scan.act, first..first + rows, &self.tokens, x, rows);
        let Some(eps) = scan.norm_eps else { return };
        for (x, roots) in x.chunks_exact_mut(keys).zip(&mut self.roots[which]).take(self.panels) {
            let mut sums = [0.0; LANES];
            add_dot(x, x, &mut sums);
            *roots = sums.map(|sum| (sum + eps).sqrt().recip());
            times(x, &roots.map(|root| root * scan.norm_scales()[which]));
        }
    }

    /// Multiplies the queries (0) or the keys (1) with the keys.
    fn multiply(&mut self, which: usize) {
        let (rows, keys, x) = (self.scan.shape.rows, self.keys(), if which == 0 { &*self.q } else { &*self.k });
        for with in 0..self.panels {
            let product = Across {
                matrix: &self.k[with * keys..][..keys],
                blocks: 1,
                depth: rows,
                x: &x[with * keys..],
                steps: [keys, CHUNK * LANES],
                panels: self.panels - with,
            };
            product.run(&mut self.products[which][pair_block(with, with).start..]);
        }
    }

    /// Loads the values of a head.
    pub(super) fn load_values(&mut self, head: usize) {
        let first = self.scan.values + head * self.scan.shape.columns;
        load(self.scan.act, first..first + self.scan.shape.columns, &self.tokens, self.v, self.width);
    }

    /// Computes the decays between tokens and, if the scan corrects, `-L` and the inverses.
    pub(super) fn decay(&mut self, gates: &Gates) {
        for of in 0..self.panels {
            for with in 0..=of {
                decay(&gates.sums[of], &gates.sums[with], &mut self.decays[pair_block(of, with)]);
            }
            for (token, lanes) in self.decays[pair_block(of, of)].chunks_exact_mut(LANES).enumerate() {
                lanes[..token].fill(0.0);
            }
            if !self.scan.corrects {
                continue;
            }
            let (pairs, diagonal) = (pairs(of), pair_block(of, of));
            let scale = gates.scale[of].map(|scale| -scale);
            set_product(&mut self.lower[pairs.clone()], &self.products[1][pairs.clone()], &self.decays[pairs], &scale);
            clear_diagonal(&mut self.lower[diagonal.clone()]);
            inverse(&self.lower[diagonal], &mut self.inverse[of * BLOCK..]);
        }
    }

    /// Computes `A`.
    pub(super) fn attend(&mut self) {
        for of in 0..self.panels {
            let pairs = pairs(of);
            set_product(
                &mut self.attention[pairs.clone()],
                &self.products[0][pairs.clone()],
                &self.decays[pairs],
                &ONE,
            );
        }
    }

    /// What queries or keys `x` read from a state: `to[panel][column][16] = sum_row S[row][column] x[panel][row][16]`.
    pub(super) fn read(&self, x: &[f32], state: &[f32], to: &mut [f32]) {
        let (rows, steps) = (self.scan.shape.rows, [self.keys(), self.values()]);
        let read = Across { matrix: state, blocks: self.width / LANES, depth: rows, x, steps, panels: self.panels };
        read.run(to);
    }

    /// Computes u of a head whose values have been loaded. `state` is that before the chunk; `None` stands for zeros.
    pub(super) fn find_u(&mut self, gates: &Gates, state: Option<&[f32]>) {
        let (values, sizes) = (self.values(), [self.values(), self.width]);
        let found = state.filter(|_| self.scan.corrects);
        if let Some(state) = found {
            let out = std::mem::take(&mut self.out);
            self.read(self.k, state, out);
            self.out = out;
        }
        for panel in 0..self.panels {
            let at = panel * values..(panel + 1) * values;
            let (scale, v) = (&gates.scale[panel], &self.v[at.clone()]);
            if !self.scan.corrects {
                set_times(&mut self.u[at], v, scale);
                continue;
            }
            let rest = &mut self.out[at.clone()];
            match found {
                Some(_) => miss(rest, v, scale, &gates.behind[panel]),
                None => set_times(rest, v, scale),
            }
            let (done, to) = self.u.split_at_mut(at.start);
            if panel > 0 {
                Mix::one(done, sizes, &self.lower[panel * CHUNK * LANES..], panel, true).run(rest);
            }
            let mut turned = [0.0; BLOCK];
            turn(&self.inverse[panel * BLOCK..], &ONE, &mut turned);
            Mix::one(rest, sizes, &turned, 1, false).run(to);
        }
    }

    /// Writes a head's outputs to `out`, from its u and the state before the chunk.
    pub(super) fn read_out(&mut self, head: usize, gates: &Gates, state: Option<&[f32]>) {
        let (width, values) = (self.width, self.values());
        if let Some(state) = state {
            let out = std::mem::take(&mut self.out);
            self.read(self.q, state, out);
            self.out = out;
        }
        for panel in 0..self.panels {
            let at = panel * values..(panel + 1) * values;
            let out = &mut self.out[at.clone()];
            if state.is_some() {
                times(out, &gates.behind[panel]);
            }
            let x = &self.attention[panel * CHUNK * LANES..];
            Mix::one(self.u, [values, width], x, panel + 1, state.is_some()).run(out);
            if let Some(through) = self.scan.through {
                add_times(out, &self.v[at], &[through[head]; LANES]);
            }
        }
    }

    /// `state (+)= sum_t factors[t] x_t y_t^T`, of `x [panels][rows][16]` and `y [panels][width][16]`.
    pub(super) fn write(&mut self, x: &[f32], y: &[f32], factors: &Tokens, state: &mut [f32], add: bool) {
        let (keys, panels) = (self.keys(), self.width / LANES);
        let turned = self.turned.chunks_exact_mut(BLOCK);
        for (at, (turned, y)) in turned.zip(y.chunks_exact(BLOCK)).enumerate().take(self.panels * panels) {
            turn(y, &factors[at / panels], turned);
        }
        let mix = Mix {
            matrix: x,
            matrix_step: keys,
            rows: self.scan.shape.rows,
            blocks: self.panels,
            x: self.turned,
            x_step: self.values(),
            steps: [BLOCK, keys],
            panels,
            add,
        };
        mix.run(state);
    }

    /// Turns the state before the chunk into that after it. If `fresh`, the state before counts as zeros, whatever
    /// `state` holds.
    pub(super) fn advance(&mut self, gates: &Gates, state: &mut [f32], fresh: bool) {
        if !fresh {
            times(state, &from_fn(|_| gates.whole));
        }
        let (k, u) = (std::mem::take(&mut self.k), std::mem::take(&mut self.u));
        self.write(k, u, &gates.ahead, state, !fresh);
        (self.k, self.u) = (k, u);
    }
}
