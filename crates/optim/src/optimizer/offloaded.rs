//! Updates with offloaded state. The state goes through the GPU piece by piece: while one piece is updated, the next is
//! copied to the GPU and the previous one back. Results are the same to the bit as with state on the GPU.
use super::{Gradients, Optimizer, Remaining, Slot, TensorUpdate, UpdateRule};
use crate::state::{FetchingState, State, StoringState};
use std::ops::Range;
use tunesmith_device::FloatBuffer;
use tunesmith_ops::accumulate;
use tunesmith_ops::factor::Factor;

/// How many values a piece has. Rules that need whole tensors have larger pieces. Smaller in tests, whose tensors are
/// small.
const PIECE: usize = if cfg!(test) { 1100 } else { 4 << 20 };
/// How many pieces' states a GPU holds at a time: those of the current, the next, and the previous piece.
const HELD: u64 = 3;

/// A piece of a part: the unit in which state goes through the GPU.
struct Piece {
    part: usize,
    /// The range of the piece in the tensor's flat values.
    range: Range<usize>,
}

/// The number of values in the largest piece of a tensor, for a rule with this grain.
fn largest(count: usize, grain: usize) -> usize {
    let grain = grain.max(1);
    (PIECE / grain * grain).max(grain).min(count)
}

/// The most bytes of state that a GPU holds while offloaded state goes through it.
pub fn offloaded_bytes(rule: &dyn UpdateRule, slots: &[Slot]) -> u64 {
    let of = |slot: &Slot| {
        let (count, piece) = (slot.count().max(1), largest(slot.count(), rule.grain(slot)));
        rule.state(slot).iter().map(|spec| (spec.bytes() * piece as u64).div_ceil(count as u64)).sum::<u64>()
    };
    HELD * slots.iter().map(of).max().unwrap_or(0)
}

impl Optimizer {
    fn pieces(&self) -> Vec<Piece> {
        let of_part = |(index, part): (usize, &super::Part)| {
            let slot = &self.slots[part.slot];
            let (whole, size) = (part.range.clone(), largest(slot.count(), self.rule.grain(slot)));
            // Pieces are cut where ranks may be cut, counted from the tensor's start.
            let first = whole.start / size.max(1);
            (first..whole.end.div_ceil(size.max(1))).filter_map(move |at| {
                let range = (at * size).max(whole.start)..((at + 1) * size).min(whole.end);
                (!range.is_empty()).then_some(Piece { part: index, range })
            })
        };
        self.parts.iter().enumerate().flat_map(of_part).collect()
    }

    /// The ranges of a piece in the state tensors of its part.
    fn places(&self, piece: &Piece) -> Vec<Range<usize>> {
        let part = &self.parts[piece.part];
        let slot: &Slot = &self.slots[part.slot];
        let of = |spec: crate::state::StateSpec| {
            let (all, own) = (spec.range(slot, &part.range), spec.range(slot, &piece.range));
            own.start - all.start..own.end - all.start
        };
        self.rule.state(slot).into_iter().map(of).collect()
    }

    fn fetch(&self, piece: &Piece) -> Vec<FetchingState> {
        let state = self.parts[piece.part].state.iter();
        state.zip(self.places(piece)).map(|(state, range)| state.fetch(range)).collect()
    }

    fn store(&mut self, piece: &Piece, states: Vec<State>) -> Vec<StoringState> {
        let places = self.places(piece);
        let own = self.parts[piece.part].state.iter_mut();
        own.zip(states).zip(places).map(|((own, state), range)| own.store(range.start, state)).collect()
    }
}

/// [`Optimizer::update`] for offloaded state, after the step has been counted. `packed` says whether the values and the
/// gradients are packed.
pub(super) fn update(
    optimizer: &mut Optimizer,
    mut rest: Remaining<'_>,
    packed: [bool; 2],
    grads: Gradients<'_>,
    factor: Factor<'_>,
    rate: f64,
) {
    let mut pieces = optimizer.pieces();
    pieces.retain(|piece| optimizer.images || !optimizer.slots[optimizer.parts[piece.part].slot].vision);
    let mut next = pieces.first().map(|piece| optimizer.fetch(piece));
    let mut storing = Vec::new();
    let mut wide = FloatBuffer::default();
    for (index, piece) in pieces.iter().enumerate() {
        let mut state: Vec<State> = next.take().into_iter().flatten().map(FetchingState::state).collect();
        next = pieces.get(index + 1).map(|piece| optimizer.fetch(piece));
        let part = &optimizer.parts[piece.part];
        let slot = &optimizer.slots[part.slot];
        let [of_values, of_grads] = packed.map(|packed| {
            let start = part.place(packed).start + piece.range.start - part.range.start;
            start..start + piece.range.len()
        });
        let values = rest.take(of_values);
        let grads = match grads {
            Gradients::F32(grads) => grads.slice(of_grads),
            Gradients::Bf16(grads) => {
                wide.reset(values.device(), of_grads.len());
                accumulate::to_f32(grads.slice(of_grads), wide.view_mut());
                wide.view()
            }
        };
        let step = if slot.vision { optimizer.image_step } else { optimizer.step };
        let (rate, state_of) = (rate * slot.lr_scale, &mut state[..]);
        optimizer.rule.update(TensorUpdate { slot, values, grads, factor, rate, step, state: state_of });
        // Replacing `storing` waits for the copy before this one, which has had the time of an update.
        storing = optimizer.store(piece, state);
    }
    drop(storing);
}
