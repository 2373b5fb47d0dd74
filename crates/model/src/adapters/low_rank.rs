//! The low-rank product `B (s A x)` that LoRA and `DoRA` share, with its gradients. Given `dy`: `dz = s B^T dy`,
//! `dB = dy (s A x)^T`, `dA = dz x^T`, `dx = W^T dy + A^T dz`.
use crate::grads::Grads;
use crate::linear::{Base, Formula, Input, LowRank, Saved};
use crate::pass::Drops;
use crate::values::Values;
use std::ops::Range;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise::{self, scale, sub};
use tunesmith_ops::floats::Floats;
use tunesmith_ops::gemm::{Init, Matrix, Target, Term, Transposed, matmul, outer};

/// Where A and B of one module are among the trained values, and how they are applied.
#[derive(Debug, Clone)]
pub struct Matrices {
    /// The place of A `[rank, in_features]` among the trained values.
    pub a: Range<usize>,
    /// The place of B `[out_features, rank]`; where `expert` is set, of the B of all experts, `[rows, rank * experts]`.
    pub b: Range<usize>,
    pub rank: usize,
    /// The factor s: `alpha / r`, or `alpha / sqrt(r)` with `use_rslora`.
    pub scale: f32,
    /// Seeds this module's dropout mask, so that every module has its own.
    pub module: u64,
    /// Which part of the stored B belongs to this expert, where B holds all experts.
    pub expert: Option<OfExpert>,
}

/// An expert's part of a stored B `[rows, rank * experts]`.
#[derive(Debug, Clone, Copy)]
pub struct OfExpert {
    /// Column i of its B is column `i * experts + expert` of the stored B.
    pub expert: usize,
    pub experts: usize,
    /// Row j of its B is row `first + j * step` of the stored B.
    pub first: usize,
    pub step: usize,
}

impl Matrices {
    /// The place of B's first value in the stored B, and the strides of its rows and columns.
    fn layout(&self) -> (usize, usize, usize) {
        let Some(OfExpert { expert, experts, first, step }) = self.expert else { return (0, self.rank, 1) };
        let row = self.rank * experts;
        (first * row + expert, step * row, experts)
    }

    /// The values of B from its first one on, and the strides of its rows and columns.
    pub(super) fn b<'a>(&self, values: Values<'a>) -> (Floats<'a>, usize, usize) {
        let (first, row, col) = self.layout();
        (values.at(&self.b).slice(first..self.b.len()), row, col)
    }

    /// The adapter's input after dropout; `None` in a pass without dropout.
    pub(super) fn drop_some(&self, base: Base<'_>, x: &Activation) -> Option<Activation> {
        base.pass.dropout.map(|drops| drops.of(self.module, x.tokens()).apply(x))
    }

    /// The product `B (s A x)` in a pass over `tokens` tokens.
    pub(super) fn product<'a>(&self, base: Base<'a>, tokens: usize) -> LowRank<'a> {
        let (b, row, col) = self.b(base.pass.values);
        LowRank {
            a: Matrix::rows(base.pass.values.at(&self.a), base.linear.in_features),
            b: Matrix::strided(b, row, col),
            rank: self.rank,
            scale: self.scale,
            dropout: base.pass.dropout.map(|drops| drops.of(self.module, tokens)),
        }
    }

    /// Adds the gradients of A and B, given `dy`, that of `B (s A x)`. Returns the gradient of `A x`. `x` is the
    /// adapter's input after dropout, and `low` is `s A x`.
    pub(super) fn gradients(
        &self,
        base: Base<'_>,
        low: &Activation,
        dy: &Activation,
        x: &Activation,
        grads: &mut Grads<'_>,
    ) -> Activation {
        let mut d_low = dy.pool().act(dy.tokens(), self.rank);
        let (b, row, col) = self.b(base.pass.values);
        matmul(&mut d_low, Init::Zero, &[Term { matrix: Matrix::strided(b, col, row), x: dy }]);
        scale(&mut d_low, self.scale);
        let to = Target::Strided(grads.at(&self.b).slice(self.layout().0..self.b.len()), row, col);
        outer(to, dy, &Transposed::new(low));
        outer(Target::Transposed(grads.at(&self.a)), x, &Transposed::new(&d_low));
        d_low
    }

    /// Writes the gradient of the input to `dx`, or adds it with `add`. `dy` is the gradient of the base's product
    /// outside of the adapter, `beside` that of the product within it (`DoRA` only), and `d_low` that of `A x`.
    pub(super) fn input_gradient(
        &self,
        base: Base<'_>,
        dy: &Activation,
        beside: Option<&Activation>,
        d_low: &Activation,
        dx: &mut Activation,
        add: bool,
    ) {
        let (weight, inputs) = (base.weight(), base.linear.in_features);
        let init = if add { Init::Out } else { Init::Zero };
        let whole = Matrix::transposed(weight.store(), inputs);
        let a = Term { matrix: Matrix::transposed(base.pass.values.at(&self.a), inputs), x: d_low };
        let Some(drops) = base.pass.dropout else {
            return matmul(dx, init, &[Term { matrix: whole, x: beside.unwrap_or(dy) }, a]);
        };
        let mut through = dx.pool().act(dx.tokens(), inputs);
        if let Some(beside) = beside {
            matmul(&mut through, Init::Zero, &[Term { matrix: whole, x: &sub(beside, dy) }, a]);
        } else {
            matmul(&mut through, Init::Zero, &[a]);
        }
        matmul(dx, init, &[Term { matrix: whole, x: dy }]);
        add_dropped(dx, &through, drops, self.module);
    }
}

fn add_dropped(dx: &mut Activation, through: &Activation, drops: Drops<'_>, module: u64) {
    let through = drops.of(module, through.tokens()).apply(through);
    elementwise::add(dx, &through);
}

impl Formula for Matrices {
    fn low_rank<'a>(&self, base: Base<'a>, tokens: usize) -> Option<LowRank<'a>> {
        Some(self.product(base, tokens))
    }

    fn is_low_rank(&self) -> bool {
        self.expert.is_none()
    }

    fn backward(
        &self,
        base: Base<'_>,
        input: &Input<'_>,
        saved: Option<&Saved>,
        dy: &Activation,
        dx: Option<(&mut Activation, bool)>,
        grads: &mut Grads<'_>,
    ) {
        let Some([low]) = saved.map(|saved| &saved.acts[..]) else { return };
        let d_low = {
            let dropped = self.drop_some(base, input.x);
            self.gradients(base, low, dy, dropped.as_ref().unwrap_or(input.x), grads)
        };
        base.gradients(input, dy, grads);
        if let Some((dx, add)) = dx {
            self.input_gradient(base, dy, None, &d_low, dx, add);
        }
    }
}
