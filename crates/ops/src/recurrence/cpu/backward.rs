//! The backward pass: first once forward, for the state before each chunk and for u; then chunk by chunk back.
//!
//! With the gradients `do` of a chunk's outputs and `dS'` of the state after it:
//! - `du = exp(G_end - G) k dS' + A^T do`, and under the delta rule `(1 + L)^T z = du`, else `z = du`;
//! - `dv = c = scale z`; the gradient of the scale's logarithm is `z u`;
//! - `dA[i][j] = do_i u_j`, and under the delta rule `dM[i][j] = -c_i u_j`, where `L = scale M`;
//! - `dq_i = exp(G_i) S do_i + sum_j exp(G_i - G_j) dA[i][j] k_j`, `dk` likewise, from both sides of A and M;
//! - `dS = exp(G_end) dS' + sum_i exp(G_i) (q_i do_i^T - k_i c_i^T)`.
use super::back::{Back, finish_keys, norm_backward, turn_pairs};
use super::chunk::{Chunk, Gates, ONE, clear_diagonal, negated, pair_block, pairs};
use super::kernels::{
    Across, BLOCK, Lanes, Mix, add_dot, add_product, add_times, crossing, set_product, set_times, times, times_by,
};
use super::{CHUNK, Memory, Place, Scan, Sums, chunks, load};
use crate::activation::{Activation, LANES};
use crate::par;
use crate::scratch::{Cutter, with_scratch};
use std::mem::take;
use std::ops::Range;

/// Writes the gradients of queries, keys and values to `d`, which has the layout of the scan's activation, from
/// `dy [tokens, heads * columns]`, the gradient of the outputs. Every sequence has to have started with zeros. Hands
/// the gradients of the gates of each head and token to `write`.
pub(crate) fn backward(
    scan: &Scan<'_>,
    sequences: &[Range<usize>],
    dy: &Activation,
    memory: &mut Memory,
    d: &mut Activation,
    write: &(dyn Fn(usize, usize, Sums) + Sync),
) {
    let (shape, d_stride) = (scan.shape, d.stride());
    let pass = Pass {
        scan,
        dy,
        d: Place::of(d),
        states: Place::of(&mut memory.states),
        u: Place::of(&mut memory.u),
        u_act: &memory.u,
        parts: memory.parts.as_mut().map(Place::of),
        write,
    };
    par::run(sequences.len() * scan.tasks(), |task| {
        let (sequence, task, heads) = scan.task(task);
        let floats = Chunk::floats(shape) + Back::floats(shape) + scan.most_heads() * shape.floats();
        with_scratch(floats, |scratch| pass.task(&sequences[sequence], task, heads, scratch));
    });
    let (Some(parts), at) = (&memory.parts, d.shared()) else { return };
    let (rows, of_group) = (shape.rows, scan.tasks() / scan.groups);
    par::run(parts.panels(), |panel| {
        for group in 0..scan.groups {
            for (which, first) in [scan.queries, scan.keys].into_iter().enumerate() {
                let floats = rows * LANES;
                // SAFETY: the features are a group's queries or keys in a panel of `d`, which this task alone has.
                let to = unsafe {
                    let place = at.get().add(panel * d_stride + (first + group * rows) * LANES);
                    std::slice::from_raw_parts_mut(place, floats)
                };
                let part =
                    |part: usize| &parts.panel(panel)[(2 * (group * of_group + part) + which) * floats..][..floats];
                to.copy_from_slice(part(0));
                (1..of_group).for_each(|index| add_times(to, part(index), &ONE));
            }
        }
    });
}

/// The operands of the backward pass, which all tasks share.
struct Pass<'a> {
    scan: &'a Scan<'a>,
    dy: &'a Activation,
    d: Place,
    states: Place,
    u: Place,
    u_act: &'a Activation,
    parts: Option<Place>,
    write: &'a (dyn Fn(usize, usize, Sums) + Sync),
}

impl Pass<'_> {
    /// Where the state before a chunk is kept. The first chunk of a sequence has none.
    ///
    /// # Safety
    /// The task has the head of the sequence, and no other borrow of this state.
    #[allow(clippy::mut_from_ref, reason = "tasks have different states")]
    unsafe fn state(&self, first: usize, head: usize) -> &mut [f32] {
        let floats = self.scan.shape.floats();
        // SAFETY: the first tokens of chunks that are no sequence's first are CHUNK apart or more, and not below CHUNK, so that each
        // has a number of its own. Those are below `(tokens - 1) / CHUNK`: `Memory` has all heads' states for as many.
        unsafe {
            let place = self.states.at.get().add(((first / CHUNK - 1) * self.scan.shape.heads + head) * floats);
            std::slice::from_raw_parts_mut(place, floats)
        }
    }

    fn task(&self, sequence: &Range<usize>, task: usize, heads: Range<usize>, scratch: &mut [f32]) {
        let (scan, shape) = (self.scan, self.scan.shape);
        let (columns, group) = (shape.columns, heads.start / scan.group());
        let mut scratch = Cutter(scratch);
        let mut chunk = Chunk::new(scan, &mut scratch);
        let mut back = Back::new(shape, &mut scratch);
        let mut states: Vec<&mut [f32]> = heads.clone().map(|_| scratch.cut(shape.floats())).collect();
        for tokens in chunks(sequence) {
            let (first, last) = (tokens.start == sequence.start, tokens.end == sequence.end);
            chunk.load_keys(tokens, group);
            for (head, state) in heads.clone().zip(&mut states) {
                let gates = Gates::of(scan, head, &chunk.tokens);
                let before = (!first).then_some(&**state);
                if let Some(before) = before {
                    // SAFETY: this task has the head of this sequence.
                    unsafe { self.state(chunk.tokens.start, head) }.copy_from_slice(before);
                }
                if scan.corrects {
                    chunk.decay(&gates);
                }
                chunk.load_values(head);
                chunk.find_u(&gates, before);
                // SAFETY: `u` has the tokens and all heads' columns; no other task has these.
                unsafe { self.u.store(chunk.u, chunk.width, head * columns..(head + 1) * columns, &chunk.tokens) };
                if !last {
                    chunk.advance(&gates, state, first);
                }
            }
        }
        for tokens in chunks(sequence).rev() {
            let (first, last) = (tokens.start == sequence.start, tokens.end == sequence.end);
            chunk.load(tokens, group);
            for sums in [&mut back.dq, &mut back.dk] {
                sums.fill(0.0);
            }
            for sums in &mut back.d_products {
                sums.fill(0.0);
            }
            for (head, d_state) in heads.clone().zip(&mut states) {
                // SAFETY: as above; nothing else borrows it.
                let before = (!first).then(|| &*unsafe { self.state(chunk.tokens.start, head) });
                self.head(&mut chunk, &mut back, head, before, d_state, last);
            }
            finish_keys(&chunk, &mut back);
            norm_backward(&chunk, &mut back);
            let to = self.parts.unwrap_or(self.d);
            let firsts = match self.parts {
                Some(_) => [0, 1].map(|which| (2 * task + which) * shape.rows),
                None => [scan.queries, scan.keys].map(|first| first + group * shape.rows),
            };
            for (from, first) in [&*back.dq, &*back.dk].into_iter().zip(firsts) {
                // SAFETY: the features are this task's: of its group, where a group is one task's, or of its own part.
                unsafe { to.store(from, shape.rows, first..first + shape.rows, &chunk.tokens) };
            }
        }
    }

    /// What one head of a chunk contributes. `d_state` holds the gradient of the state after the chunk (undefined if
    /// this is the last chunk), and becomes that of the state before it.
    fn head(
        &self,
        chunk: &mut Chunk<'_>,
        back: &mut Back<'_>,
        head: usize,
        before: Option<&[f32]>,
        d_state: &mut [f32],
        last: bool,
    ) {
        let (scan, columns, panels) = (self.scan, self.scan.shape.columns, chunk.panels);
        let (values, width) = (chunk.values(), chunk.width);
        let gates = Gates::of(scan, head, &chunk.tokens);
        chunk.decay(&gates);
        chunk.attend();
        let features = head * columns..(head + 1) * columns;
        load(self.u_act, features.clone(), &chunk.tokens, chunk.u, width);
        load(self.dy, features.clone(), &chunk.tokens, back.d_out, width);

        // Here du, z, and the gradients of the values and the scale are computed.
        if !last {
            chunk.read(chunk.k, d_state, back.du);
        }
        let sizes = [values, width];
        turn_pairs(chunk.attention, panels, back.turned);
        for panel in 0..panels {
            let du = &mut back.du[panel * values..][..values];
            if !last {
                times(du, &gates.ahead[panel]);
            }
            let x = &back.turned[pair_block(panel, panel).start..];
            Mix::one(&back.d_out[panel * values..], sizes, x, panels - panel, !last).run(du);
        }
        if scan.corrects {
            turn_pairs(chunk.lower, panels, back.turned);
            for panel in (0..panels).rev() {
                let du = &mut back.du[panel * values..][..values];
                let (z, done) = back.z[panel * values..].split_at_mut(values);
                if panel + 1 < panels {
                    let x = &back.turned[pair_block(panel, panel + 1).start..];
                    Mix::one(done, sizes, x, panels - panel - 1, true).run(du);
                }
                Mix::one(du, sizes, &chunk.inverse[panel * BLOCK..], 1, false).run(z);
            }
        } else {
            back.z[..panels * values].copy_from_slice(&back.du[..panels * values]);
        }
        let mut sums = [Sums::default(); CHUNK];
        for panel in 0..panels {
            let at = panel * values..(panel + 1) * values;
            let (z, mut dots) = (&mut back.z[at.clone()], [0.0; LANES]);
            add_dot(z, &chunk.u[at], &mut dots);
            times(z, &gates.scale[panel]);
            sums[panel * LANES..].iter_mut().zip(dots).for_each(|(sums, dot)| sums.scale = dot);
        }
        let dv = match scan.through {
            None => &*back.z,
            Some(through) => {
                chunk.load_values(head);
                for panel in 0..panels {
                    let at = panel * values..(panel + 1) * values;
                    let (d_out, mut dots) = (&back.d_out[at.clone()], [0.0; LANES]);
                    add_dot(d_out, &chunk.v[at.clone()], &mut dots);
                    set_times(&mut chunk.out[at.clone()], d_out, &[through[head]; LANES]);
                    add_times(&mut chunk.out[at.clone()], &back.z[at], &ONE);
                    sums[panel * LANES..].iter_mut().zip(dots).for_each(|(sums, dot)| sums.through = dot);
                }
                &*chunk.out
            }
        };
        let first = scan.values + features.start;
        // SAFETY: `d` is as the scan's activation, with the tokens; no other task has this head of this sequence.
        unsafe { self.d.store(dv, width, first..first + columns, &chunk.tokens) };

        self.pairs(chunk, back);
        let mut crossings = [0.0; CHUNK];
        crossing(back.d_decays, panels, &mut crossings);
        sums.iter_mut().zip(crossings).for_each(|(sums, crossing)| sums.g = crossing);

        self.states(chunk, back, &gates, before, d_state, last, &mut sums);
        for (token, sums) in chunk.tokens.clone().zip(sums) {
            (self.write)(head, token, sums);
        }
    }

    /// Adds the gradients of A, and of M under the delta rule, to those of all heads; and computes the gradients that
    /// they give the decays.
    fn pairs(&self, chunk: &Chunk<'_>, back: &mut Back<'_>) {
        let (values, panels) = (chunk.values(), chunk.panels);
        let sources: [(&[f32], f32); 2] = [(back.d_out, 1.0), (back.z, -1.0)];
        for (which, (x, sign)) in sources.into_iter().enumerate().take(1 + usize::from(self.scan.corrects)) {
            for with in 0..panels {
                let product = Across {
                    matrix: &chunk.u[with * values..][..values],
                    blocks: 1,
                    depth: chunk.width,
                    x: &x[with * values..],
                    steps: [values, CHUNK * LANES],
                    panels: panels - with,
                };
                product.run(&mut back.d_pairs[pair_block(with, with).start..]);
            }
            for of in 0..panels {
                let (pairs, diagonal) = (pairs(of), pair_block(of, of));
                let d_pairs = &mut back.d_pairs[pairs.clone()];
                times_by(d_pairs, &chunk.decays[pairs.clone()], &[sign; LANES]);
                if which == 1 {
                    clear_diagonal(&mut d_pairs[pairs.len() - BLOCK..]);
                }
                add_times(&mut back.d_products[which][pairs.clone()], d_pairs, &ONE);
                let (d_decays, products) = (&mut back.d_decays[pairs.clone()], &chunk.products[which][pairs]);
                if which == 0 {
                    set_product(d_decays, d_pairs, products, &ONE);
                } else {
                    add_product(d_decays, d_pairs, products, &ONE);
                }
                clear_diagonal(&mut back.d_decays[diagonal]);
            }
        }
    }

    /// Computes the gradients of queries, keys and g that come through the states before and after the chunk, and that
    /// of the state before it.
    fn states(
        &self,
        chunk: &mut Chunk<'_>,
        back: &mut Back<'_>,
        gates: &Gates,
        before: Option<&[f32]>,
        d_state: &mut [f32],
        last: bool,
        sums: &mut [Sums; CHUNK],
    ) {
        let (keys, values, panels) = (chunk.keys(), chunk.values(), chunk.panels);
        let (mut behind, mut ahead, mut whole) = ([0.0; CHUNK], [0.0; CHUNK], 0.0);
        let mut read = |state: &[f32], x: &[f32], factor: &Lanes, y: &[f32], d: &mut [f32], sums: &mut [f32]| {
            Mix::one(state, [keys, self.scan.shape.rows], x, values / BLOCK, false).run(back.read);
            let mut dots = [0.0; LANES];
            add_dot(back.read, y, &mut dots);
            add_times(d, back.read, factor);
            sums.iter_mut().zip(dots).zip(factor).for_each(|((sum, dot), factor)| *sum += factor * dot);
        };
        for panel in 0..panels {
            let (at, of) = (panel * keys..(panel + 1) * keys, panel * values..(panel + 1) * values);
            let lanes = panel * LANES..(panel + 1) * LANES;
            let (q, k) = (&chunk.q[at.clone()], &chunk.k[at.clone()]);
            let (dq, dk) = (&mut back.dq[at.clone()], &mut back.dk[at]);
            if let Some(state) = before {
                let factors = &gates.behind[panel];
                read(state, &back.d_out[of.clone()], factors, q, dq, &mut behind[lanes.clone()]);
                if self.scan.corrects {
                    let factors = &factors.map(|factor| -factor);
                    read(state, &back.z[of.clone()], factors, k, dk, &mut behind[lanes.clone()]);
                }
            }
            if !last {
                read(d_state, &chunk.u[of], &gates.ahead[panel], k, dk, &mut ahead[lanes]);
            }
        }
        if let Some(before) = before {
            if !last {
                let mut dots = [0.0; LANES];
                add_dot(d_state, before, &mut dots);
                whole = gates.whole * dots.iter().sum::<f32>();
                times(d_state, &[gates.whole; LANES]);
            }
            let q = take(&mut chunk.q);
            chunk.write(q, back.d_out, &gates.behind, d_state, !last);
            chunk.q = q;
            if self.scan.corrects {
                let k = take(&mut chunk.k);
                chunk.write(k, back.z, &negated(&gates.behind), d_state, true);
                chunk.k = k;
            }
        }
        // A decay affects what is read of the state at its token and at later ones, and what is kept of earlier tokens.
        let mut later = 0.0;
        for (sums, behind) in sums.iter_mut().zip(behind).rev() {
            later += behind;
            sums.g += later + whole;
        }
        let mut earlier = 0.0;
        for (sums, ahead) in sums.iter_mut().zip(ahead) {
            sums.g += earlier;
            earlier += ahead;
        }
    }
}
