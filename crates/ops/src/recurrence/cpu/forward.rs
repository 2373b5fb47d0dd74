//! The forward pass: short sequences token by token, longer ones chunk by chunk.
use super::chunk::{Chunk, Gates};
use super::{Place, Scan, chunks, step};
use crate::activation::{Activation, LANES};
use crate::par::{self, Shared};
use crate::recurrence::State;
use crate::scratch::{Cutter, with_scratch};
use std::ops::Range;
use tunesmith_cpu_slice::CpuSlice as _;

/// Writes the outputs `[tokens, heads * columns]` to `out`, as `gated_delta_rule::forward` and `mamba2::forward` say.
pub(crate) fn forward(
    scan: &Scan<'_>,
    sequences: &[Range<usize>],
    states: Option<&mut [&mut State]>,
    out: &mut Activation,
) {
    let (shape, columns, to) = (scan.shape, scan.shape.columns, Place::of(out));
    let states: Option<Vec<Shared<f32>>> = states.map(|states| {
        states.iter_mut().map(|state| Shared(state.floats.view_mut().cpu_slice().as_mut_ptr())).collect()
    });
    par::run(sequences.len() * scan.tasks(), |task| {
        let (sequence, _, heads) = scan.task(task);
        let given = states.as_ref().map(|states| states[sequence]);
        let sequence = &sequences[sequence];
        let own = if given.is_some() { 0 } else { heads.len() * shape.floats() };
        with_scratch(Chunk::floats(shape) + own, |scratch| {
            let mut scratch = Cutter(scratch);
            let mut of_heads: Vec<&mut [f32]> = heads
                .clone()
                .map(|head| match given {
                    // SAFETY: a state has the floats of each head, and no other task has this sequence and head.
                    Some(state) => unsafe {
                        std::slice::from_raw_parts_mut(state.get().add(head * shape.floats()), shape.floats())
                    },
                    None => scratch.cut(shape.floats()),
                })
                .collect();
            let features = |head: usize| head * columns..(head + 1) * columns;
            if sequence.len() < LANES {
                if given.is_none() {
                    for state in &mut of_heads {
                        state.fill(0.0);
                    }
                }
                step::forward(scan, sequence.clone(), heads.clone(), &mut of_heads, |token, head, values| {
                    for (feature, value) in features(head).zip(values) {
                        // SAFETY: `out` has the tokens and the features of all heads; no other task has these.
                        unsafe {
                            *to.at.get().add(token / LANES * to.stride + feature * LANES + token % LANES) = *value;
                        };
                    }
                });
                return;
            }
            let mut chunk = Chunk::new(scan, &mut scratch);
            for tokens in chunks(sequence) {
                let fresh = given.is_none() && tokens.start == sequence.start;
                let last = given.is_none() && tokens.end == sequence.end;
                chunk.load(tokens, heads.start / scan.group());
                for (head, state) in heads.clone().zip(&mut of_heads) {
                    let gates = Gates::of(scan, head, &chunk.tokens);
                    let before = (!fresh).then_some(&**state);
                    chunk.decay(&gates);
                    chunk.load_values(head);
                    chunk.find_u(&gates, before);
                    chunk.attend();
                    chunk.read_out(head, &gates, before);
                    // SAFETY: as above.
                    unsafe { to.store(chunk.out, chunk.width, features(head), &chunk.tokens) };
                    if !last {
                        chunk.advance(&gates, state, fresh);
                    }
                }
            }
        });
    });
}
