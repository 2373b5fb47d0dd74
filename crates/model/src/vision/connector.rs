//! Connectors: from the encoder's rows to rows of the decoder's width.
use super::tiles::Tiles;
use crate::grads::Grads;
use crate::linear::{self, Input, Linear};
use crate::norm::Norm;
use crate::pass::Pass;
use crate::plain_mlp::{self, PlainMlp};
use crate::weight::Weight;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::dropout::Dropout;
use tunesmith_ops::elementwise;
use tunesmith_ops::gemm::{Init, Matrix, Target, Term, Transposed, matmul, outer};

/// A connector, as [`tunesmith_config::vision::ConnectorKind`] describes it.
#[derive(Debug)]
pub enum Connector {
    Linear(Linear),
    Mlp(PlainMlp),
    PixelShuffle { linear: Linear, factor: usize },
    AveragePool(AveragePool),
    Merger(Merger),
}

/// Qwen-VL's: neighbouring patches side by side, with a norm before or after, then a plain MLP.
#[derive(Debug)]
pub struct Merger {
    pub factor: usize,
    pub norm: Norm,
    /// Whether the norm is over the patches side by side.
    pub norm_of_merged: bool,
    pub mlp: PlainMlp,
}

/// Gemma 3's: the mean of neighbouring patches, a norm, a product with a matrix `[in, out]`.
#[derive(Debug)]
pub struct AveragePool {
    pub kernel: usize,
    pub norm: Norm,
    pub projection: Weight,
    pub out_features: usize,
}

/// What forward keeps for backward, beside the connector's input.
#[derive(Debug)]
pub enum Saved {
    Linear(Option<linear::Saved>),
    /// With what the second module took and kept.
    Mlp(plain_mlp::Saved, Activation, Option<linear::Saved>),
    PixelShuffle(Activation, Option<linear::Saved>),
    /// The pooled rows, the norm's statistics, and the normed rows.
    AveragePool(Activation, Activation, Activation),
    Merger(Box<MergerSaved>),
}

/// What a [`Merger`] keeps for backward.
#[derive(Debug)]
pub struct MergerSaved {
    /// The norm's input, where that is not the connector's, and its statistics.
    raw: Option<Activation>,
    stats: Activation,
    /// What the MLP's first module took.
    input: Activation,
    mlp: plain_mlp::Saved,
    /// What its second module took and kept.
    middle: Activation,
    extra: Option<linear::Saved>,
}

/// Neighbouring rows side by side, those of a square row by row: `[squares, side * side * features]`.
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

/// Token `rows[i]` becomes token i of `x`, others are zero.
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

impl Connector {
    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        match self {
            Self::Linear(linear) | Self::PixelShuffle { linear, .. } => linear.trains(),
            Self::Mlp(mlp) => mlp.linears().any(Linear::trains),
            Self::AveragePool(pool) => pool.norm.trains() || pool.projection.trains(),
            Self::Merger(merger) => merger.norm.trains() || merger.mlp.linears().any(Linear::trains),
        }
    }

    /// From `x [rows of the encoder, encoder_size]` to `[rows of the decoder, decoder_size]`.
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        x: &Activation,
        dropped: Option<Dropout<'_>>,
    ) -> (Activation, Saved) {
        match self {
            Self::Linear(linear) => {
                let (y, extra) = linear.forward(pass, x, None);
                (y, Saved::Linear(extra))
            }
            Self::Mlp(mlp) => {
                let (middle, saved) = mlp.forward(pass, x);
                let middle = match dropped {
                    Some(dropout) => dropout.apply(&middle),
                    None => middle,
                };
                let (y, extra) = mlp.fc2.forward(pass, &middle, None);
                (y, Saved::Mlp(saved, middle, extra))
            }
            Self::PixelShuffle { linear, factor } => {
                let input = shuffled(x, &tiles.squares(*factor));
                let (y, extra) = linear.forward(pass, &input, None);
                (y, Saved::PixelShuffle(input, extra))
            }
            Self::AveragePool(pool) => pool.forward(pass, tiles, x),
            Self::Merger(merger) => merger.forward(pass, tiles, x),
        }
    }

    /// Adds the gradients of what is trained, and gives that of `x`, if `want_dx`.
    ///
    /// # Panics
    /// If `saved` is another connector's.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        x: &Activation,
        (saved, dropped): (Saved, Option<Dropout<'_>>),
        dy: &Activation,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        match (self, saved) {
            (Self::Linear(linear), Saved::Linear(extra)) => {
                let mut dx = want_dx.then(|| x.like());
                linear.backward(pass, &Input::new(x), extra.as_ref(), dy, dx.as_mut().map(|dx| (dx, false)), grads);
                dx
            }
            (Self::Mlp(mlp), Saved::Mlp(saved, middle, extra)) => {
                let mut d_middle = middle.like();
                let to = Some((&mut d_middle, false));
                mlp.fc2.backward(pass, &Input::new(&middle), extra.as_ref(), dy, to, grads);
                let d_middle = match dropped {
                    Some(dropout) => dropout.apply(&d_middle),
                    None => d_middle,
                };
                mlp.backward(pass, x, saved, &d_middle, want_dx, grads)
            }
            (Self::PixelShuffle { linear, factor }, Saved::PixelShuffle(input, extra)) => {
                let mut d_input = want_dx.then(|| input.like());
                let to = d_input.as_mut().map(|dx| (dx, false));
                linear.backward(pass, &Input::new(&input), extra.as_ref(), dy, to, grads);
                d_input.map(|d_input| unshuffled(&d_input, &tiles.squares(*factor), x.tokens()))
            }
            (Self::AveragePool(pool), Saved::AveragePool(pooled, stats, normed)) => {
                pool.backward(pass, tiles, [&pooled, &stats, &normed], (dy, x.tokens()), want_dx, grads)
            }
            (Self::Merger(merger), Saved::Merger(saved)) => merger.backward(pass, tiles, x, *saved, dy, want_dx, grads),
            _ => unreachable!("a connector keeps its own kind"),
        }
    }
}

impl Merger {
    fn forward(&self, pass: &Pass<'_>, tiles: &Tiles, x: &Activation) -> (Activation, Saved) {
        let squares = tiles.squares(self.factor);
        let (raw, stats, input) = if self.norm_of_merged {
            let raw = shuffled(x, &squares);
            let (input, stats) = self.norm.forward(pass, &raw, 1);
            (Some(raw), stats, input)
        } else {
            let (normed, stats) = self.norm.forward(pass, x, 1);
            (None, stats, shuffled(&normed, &squares))
        };
        let (middle, mlp) = self.mlp.forward(pass, &input);
        let (y, extra) = self.mlp.fc2.forward(pass, &middle, None);
        (y, Saved::Merger(Box::new(MergerSaved { raw, stats, input, mlp, middle, extra })))
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        x: &Activation,
        saved: MergerSaved,
        dy: &Activation,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let MergerSaved { raw, stats, input, mlp, middle, extra } = saved;
        let mut d_middle = middle.like();
        self.mlp.fc2.backward(pass, &Input::new(&middle), extra.as_ref(), dy, Some((&mut d_middle, false)), grads);
        let wanted = want_dx || self.norm.trains();
        let d_input = self.mlp.backward(pass, &input, mlp, &d_middle, wanted, grads)?;
        let squares = tiles.squares(self.factor);
        let (norm_input, d_normed) = match &raw {
            Some(raw) => (raw, d_input),
            None => (x, unshuffled(&d_input, &squares, x.tokens())),
        };
        let mut dx = want_dx.then(|| norm_input.like());
        self.norm.backward(pass, norm_input, &stats, &d_normed, dx.as_mut().map(|dx| (dx, false)), grads);
        let dx = dx?;
        Some(if raw.is_some() { unshuffled(&dx, &squares, x.tokens()) } else { dx })
    }
}

impl AveragePool {
    fn share(&self) -> f32 {
        1.0 / (self.kernel * self.kernel) as f32
    }

    fn forward(&self, pass: &Pass<'_>, tiles: &Tiles, x: &Activation) -> (Activation, Saved) {
        let mut pooled = sum(tiles.squares(self.kernel).iter().map(|rows| x.gather(rows)));
        elementwise::scale(&mut pooled, self.share());
        let (normed, stats) = self.norm.forward(pass, &pooled, 1);
        let weight = self.projection.view(pass.values);
        let mut y = normed.pool().blank(normed.tokens(), self.out_features);
        let matrix = Matrix::transposed(weight.store(), self.out_features);
        matmul(&mut y, Init::Zero, &[Term { matrix, x: &normed }]);
        (y, Saved::AveragePool(pooled, stats, normed))
    }

    fn backward(
        &self,
        pass: &Pass<'_>,
        tiles: &Tiles,
        [pooled, stats, normed]: [&Activation; 3],
        (dy, tokens): (&Activation, usize),
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        if let Some(range) = self.projection.trained() {
            outer(Target::Transposed(grads.at(range)), dy, &Transposed::new(normed));
        }
        if !want_dx && !self.norm.trains() {
            return None;
        }
        let weight = self.projection.view(pass.values);
        let mut d_normed = normed.like();
        let matrix = Matrix::rows(weight.store(), self.out_features);
        matmul(&mut d_normed, Init::Zero, &[Term { matrix, x: dy }]);
        let mut d_pooled = want_dx.then(|| pooled.like());
        self.norm.backward(pass, pooled, stats, &d_normed, d_pooled.as_mut().map(|dx| (dx, false)), grads);
        let mut d_pooled = d_pooled?;
        elementwise::scale(&mut d_pooled, self.share());
        Some(sum(tiles.squares(self.kernel).iter().map(|rows| scattered(&d_pooled, rows, tokens))))
    }
}
