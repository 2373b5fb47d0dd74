//! Connectors (projectors): from the encoder's rows to rows of the decoder's width. A connector runs the steps that
//! [`tunesmith_config::vision::Step`] describes, forward in order and backward in reverse.
use super::tiles::Tiles;
use crate::grads::Grads;
use crate::linear::{self, Input, Linear};
use crate::norm::Norm;
use crate::pass::Pass;
use crate::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::dropout::Dropout;
use tunesmith_ops::elementwise;
use tunesmith_ops::feature_scale;
use tunesmith_ops::gemm::{Init, Matrix, Target, Term, Transposed, matmul, outer};
use tunesmith_ops::pointwise::{self, Function};

/// A connector's steps in order.
#[derive(Debug)]
pub struct Connector(pub Vec<Step>);

/// A step with its weights.
#[derive(Debug)]
pub enum Step {
    SideBySide(usize),
    ByFeature(usize),
    Mean(usize),
    Norm(Norm),
    Linear(Linear),
    Matrix {
        weight: Weight,
        out_features: usize,
    },
    Scale(f32),
    /// Subtracts `bias` and multiplies by `scale`, feature by feature. Neither is trained.
    Standardize {
        bias: Weight,
        scale: Weight,
    },
    Function(Function),
    Dropout,
}

/// What the steps keep for backward.
#[derive(Debug)]
pub struct Saved(Vec<Kept>);

/// What a step keeps.
#[derive(Debug)]
struct Kept {
    /// The step's input, if backward needs it; not that of the first step, which is the connector's.
    input: Option<Activation>,
    /// The number of rows of its input.
    rows: usize,
    /// A norm's statistics.
    stats: Option<Activation>,
    /// What a linear module's adapter keeps.
    extra: Option<linear::Saved>,
}

/// Puts the features of neighbouring rows side by side: a square of `side * side` patches becomes one row, patch after
/// patch, `[squares, side * side * features]`.
fn shuffled(x: &Activation, squares: &[Vec<usize>]) -> Activation {
    let parts: Vec<Activation> = squares.iter().map(|rows| x.gather(rows)).collect();
    Activation::side_by_side(&parts.iter().collect::<Vec<_>>())
}

/// Gives each row of a square its part of the gradient: the reverse of [`shuffled`].
fn unshuffled(dy: &Activation, squares: &[Vec<usize>], tokens: usize) -> Activation {
    let features = dy.features() / squares.len();
    let part = |place: usize| dy.columns(place * features..(place + 1) * features);
    sum(squares.iter().enumerate().map(|(place, rows)| scattered(&part(place), rows, tokens)))
}

/// As [`shuffled`], but feature after feature: each feature of all patches of a square, then the next,
/// `[squares, features * side * side]`.
fn by_feature(x: &Activation, squares: &[Vec<usize>]) -> Activation {
    fn join<const N: usize>(x: &Activation, squares: &[Vec<usize>]) -> Activation {
        let parts: [Activation; N] = std::array::from_fn(|place| x.gather(&squares[place]));
        Activation::join_parts(parts.each_ref(), [1; N])
    }
    match squares.len() {
        1 => join::<1>(x, squares),
        4 => join::<4>(x, squares),
        9 => join::<9>(x, squares),
        16 => join::<16>(x, squares),
        _ => unreachable!("squares of at most four patches a side"),
    }
}

/// Gives each row of a square its part of the gradient: the reverse of [`by_feature`].
fn by_patch(dy: &Activation, squares: &[Vec<usize>], tokens: usize) -> Activation {
    fn split<const N: usize>(dy: &Activation, squares: &[Vec<usize>], tokens: usize) -> Activation {
        let parts = dy.split_parts([1; N]);
        sum(parts.iter().zip(squares).map(|(part, rows)| scattered(part, rows, tokens)))
    }
    match squares.len() {
        1 => split::<1>(dy, squares, tokens),
        4 => split::<4>(dy, squares, tokens),
        9 => split::<9>(dy, squares, tokens),
        16 => split::<16>(dy, squares, tokens),
        _ => unreachable!("squares of at most four patches a side"),
    }
}

/// Token i of `x` becomes token `rows[i]` of the result; all others are zero.
fn scattered(x: &Activation, rows: &[usize], tokens: usize) -> Activation {
    // `scatter` takes rows that rise. Squares of one tile row alternate with those of the next.
    let mut order: Vec<usize> = (0..rows.len()).collect();
    if rows.is_sorted() {
        return x.scatter(rows, tokens);
    }
    order.sort_by_key(|&index| rows[index]);
    let rising: Vec<usize> = order.iter().map(|&index| rows[index]).collect();
    x.gather(&order).scatter(&rising, tokens)
}

fn sum(mut parts: impl Iterator<Item = Activation>) -> Activation {
    let mut total = parts.next().expect("a square has a patch");
    parts.for_each(|part| elementwise::add(&mut total, &part));
    total
}

/// The weight of each patch in the mean of a square.
fn share(side: usize) -> f32 {
    1.0 / (side * side) as f32
}

impl Connector {
    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.0.iter().any(Step::trains)
    }

    /// From `x [rows of the encoder, encoder_size]` to `[rows of the decoder, decoder_size]`. A connector without steps
    /// returns `x`.
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        x: &Activation,
        dropped: Option<Dropout<'_>>,
    ) -> (Activation, Saved) {
        let (mut kept, mut input): (_, Option<Activation>) = (Vec::with_capacity(self.0.len()), None);
        for step in &self.0 {
            let from = input.as_ref().unwrap_or(x);
            let rows = from.tokens();
            let (y, stats, extra) = match (step, dropped) {
                (Step::Dropout, Some(dropout)) => (dropout.apply(from), None, None),
                // In an evaluation nothing is dropped: the input goes on.
                (Step::Dropout, None) => {
                    kept.push(Kept { input: None, rows, stats: None, extra: None });
                    continue;
                }
                (step, _) => step.forward(pass, tiles, from),
            };
            let input = input.replace(y).filter(|_| step.needs_input());
            kept.push(Kept { input, rows, stats, extra });
        }
        (input.unwrap_or_else(|| x.copy()), Saved(kept))
    }

    /// Adds the gradients of what is trained, and returns that of `x` if `want_dx`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        x: &Activation,
        (Saved(mut kept), dropped): (Saved, Option<Dropout<'_>>),
        dy: &Activation,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let mut gradient: Option<Activation> = self.0.is_empty().then(|| dy.copy());
        for (at, step) in self.0.iter().enumerate().rev() {
            let wanted = want_dx || self.0[..at].iter().any(Step::trains);
            let own = kept.pop()?;
            let dy = gradient.as_ref().unwrap_or(dy);
            gradient = match step {
                Step::Dropout => match dropped {
                    Some(dropout) => Some(dropout.apply(dy)),
                    None => continue,
                },
                step => step.backward(pass, tiles, (own, x), dy, wanted, grads),
            };
            gradient.as_ref()?;
        }
        gradient.filter(|_| want_dx)
    }
}

impl Step {
    fn trains(&self) -> bool {
        match self {
            Self::Norm(norm) => norm.trains(),
            Self::Linear(linear) => linear.trains(),
            Self::Matrix { weight, .. } => weight.trains(),
            Self::SideBySide(_)
            | Self::ByFeature(_)
            | Self::Mean(_)
            | Self::Scale(_)
            | Self::Standardize { .. }
            | Self::Function(_)
            | Self::Dropout => false,
        }
    }

    /// Whether backward needs the step's input.
    const fn needs_input(&self) -> bool {
        matches!(self, Self::Norm(_) | Self::Linear(_) | Self::Matrix { .. } | Self::Function(_))
    }

    fn forward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        x: &Activation,
    ) -> (Activation, Option<Activation>, Option<linear::Saved>) {
        match self {
            Self::SideBySide(side) => (shuffled(x, &tiles.squares(*side)), None, None),
            Self::ByFeature(side) => (by_feature(x, &tiles.squares(*side)), None, None),
            Self::Mean(side) => {
                let mut y = sum(tiles.squares(*side).iter().map(|rows| x.gather(rows)));
                elementwise::scale(&mut y, share(*side));
                (y, None, None)
            }
            Self::Norm(norm) => {
                let (y, stats) = norm.forward(pass, x, 1);
                (y, Some(stats), None)
            }
            Self::Linear(linear) => {
                let (y, extra) = linear.forward(pass, x, None);
                (y, None, extra)
            }
            Self::Matrix { weight, out_features } => {
                let weight = weight.view(pass.values);
                let mut y = x.pool().blank(x.tokens(), *out_features);
                let matrix = Matrix::transposed(weight.store(), *out_features);
                matmul(&mut y, Init::Zero, &[Term { matrix, x }]);
                (y, None, None)
            }
            Self::Scale(factor) => (elementwise::scaled(x, *factor), None, None),
            Self::Standardize { bias, scale } => {
                let (bias, scale) = (bias.view(pass.values), scale.view(pass.values));
                let mut y = elementwise::scaled(x, -1.0);
                elementwise::add_bias(&mut y, bias.vector());
                elementwise::scale(&mut y, -1.0);
                (feature_scale::times(&y, scale.vector()), None, None)
            }
            Self::Function(function) => (pointwise::forward(*function, x), None, None),
            Self::Dropout => unreachable!("the connector knows what is dropped"),
        }
    }

    /// Adds the gradients of what is trained in the step, and returns that of its input if `want_dx`. `first` is the
    /// connector's input, which is the step's own if it kept none.
    fn backward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        (kept, first): (Kept, &Activation),
        dy: &Activation,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let Kept { input, rows, stats, extra } = kept;
        let x = input.as_ref().unwrap_or(first);
        match self {
            Self::SideBySide(side) => want_dx.then(|| unshuffled(dy, &tiles.squares(*side), rows)),
            Self::ByFeature(side) => want_dx.then(|| by_patch(dy, &tiles.squares(*side), rows)),
            Self::Mean(side) => want_dx.then(|| {
                let mut each = dy.copy();
                elementwise::scale(&mut each, share(*side));
                sum(tiles.squares(*side).iter().map(|of_place| scattered(&each, of_place, rows)))
            }),
            Self::Norm(norm) => {
                let mut dx = want_dx.then(|| x.like());
                let stats = stats.expect("a norm keeps its statistics");
                norm.backward(pass, x, &stats, dy, dx.as_mut().map(|dx| (dx, false)), grads);
                dx
            }
            Self::Linear(linear) => {
                let mut dx = want_dx.then(|| x.like());
                linear.backward(pass, &Input::new(x), extra.as_ref(), dy, dx.as_mut().map(|dx| (dx, false)), grads);
                dx
            }
            Self::Matrix { weight, out_features } => {
                if let Some(range) = weight.trained() {
                    outer(Target::Transposed(grads.at(range)), dy, &Transposed::new(x));
                }
                want_dx.then(|| {
                    let weight = weight.view(pass.values);
                    let mut dx = x.like();
                    matmul(&mut dx, Init::Zero, &[Term { matrix: Matrix::rows(weight.store(), *out_features), x: dy }]);
                    dx
                })
            }
            Self::Scale(factor) => want_dx.then(|| elementwise::scaled(dy, *factor)),
            Self::Standardize { scale, .. } => {
                want_dx.then(|| feature_scale::times(dy, scale.view(pass.values).vector()))
            }
            Self::Function(function) => want_dx.then(|| {
                let mut dx = input.unwrap_or_else(|| first.copy());
                pointwise::backward(*function, &mut dx, dy);
                dx
            }),
            Self::Dropout => unreachable!("the connector knows what is dropped"),
        }
    }
}
