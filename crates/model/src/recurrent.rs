//! The cached state of a text in a recurrent mixer: the last inputs of its convolution, and the state of a gated delta
//! rule or of Mamba 2.
use std::ops::Range;
use std::sync::Arc;
use tunesmith_device::Device;
use tunesmith_ops::activation::{Activation, Pool};
use tunesmith_ops::causal_conv1d::{self, Conv};
use tunesmith_ops::recurrence::{Shape, State};

/// The state of one text in one mixer. A clone shares memory until either of the two continues.
#[derive(Debug, Clone, Default)]
pub struct Recurrent {
    /// The last inputs of the convolution, at most one fewer than its kernel has taps: `[tokens, channels]`.
    last: Option<Arc<Activation>>,
    /// The state after the last token.
    state: Option<Arc<State>>,
}

impl Recurrent {
    /// Bytes of the convolution's last inputs and of the state.
    pub fn bytes(&self) -> usize {
        let last =
            self.last.as_ref().map_or(0, |last| last.tokens() * last.features() * last.number().bytes() as usize);
        last + self.state.as_ref().map_or(0, |state| state.bytes())
    }

    fn kept(&self) -> usize {
        self.last.as_ref().map_or(0, |last| last.tokens())
    }
}

/// The rows of texts that continue by this many tokens each, end to end.
fn sequences(counts: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut end = 0;
    let next = |count: usize| {
        end += count;
        end - count..end
    };
    counts.map(next).collect()
}

fn pool_like(x: &Activation) -> Arc<Pool> {
    let pool = Pool::on(x.device());
    pool.set_number(x.number());
    pool
}

/// The convolution of `x [tokens, channels]`, which has `counts[i]` tokens of text i. Each text continues from the
/// inputs that it keeps, and then keeps its new last ones.
pub fn convolve(
    conv: Conv<'_>,
    kernel: usize,
    x: &Activation,
    counts: &[usize],
    texts: &mut [&mut Recurrent],
) -> Activation {
    let kept: Vec<usize> = texts.iter().map(|text| text.kept()).collect();
    let whole = sequences(kept.iter().zip(counts).map(|(kept, count)| kept + count));
    let new: Vec<usize> = whole.iter().zip(&kept).flat_map(|(rows, kept)| rows.start + kept..rows.end).collect();
    let joined = kept.iter().any(|&kept| kept > 0).then(|| {
        let mut joined = pool_like(x).act(whole.last().map_or(0, |rows| rows.end), x.features());
        joined.zero();
        for (text, rows) in texts.iter().zip(&whole) {
            if let Some(last) = &text.last {
                let rows: Vec<usize> = (rows.start..rows.start + last.tokens()).collect();
                joined.scatter_add(&rows, None, last);
            }
        }
        joined.scatter_add(&new, None, x);
        joined
    });
    let inputs = joined.as_ref().unwrap_or(x);
    let y = causal_conv1d::forward(conv, inputs, &whole);
    for (text, rows) in texts.iter_mut().zip(&whole) {
        let last: Vec<usize> = (rows.end - rows.len().min(kernel - 1)..rows.end).collect();
        text.last = (!last.is_empty()).then(|| Arc::new(inputs.gather_to(&pool_like(x), &last)));
    }
    if joined.is_some() { y.gather_to(x.pool(), &new) } else { y }
}

/// Runs `step`, the gated delta rule or Mamba 2, over `counts[i]` tokens of text i, which continue from their states.
/// `step` gets the rows of each text and the states, which it updates.
pub fn go_on(
    shape: Shape,
    device: Device,
    counts: &[usize],
    texts: &mut [&mut Recurrent],
    step: impl FnOnce(&[Range<usize>], &mut [&mut State]) -> Activation,
) -> Activation {
    let new = || Arc::new(State::new(device, shape));
    let mut states: Vec<&mut State> =
        texts.iter_mut().map(|text| Arc::make_mut(text.state.get_or_insert_with(new))).collect();
    step(&sequences(counts.iter().copied()), &mut states)
}
