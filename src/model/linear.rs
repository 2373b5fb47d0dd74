//! A linear module: base x adapter in one type.
//!
//! With LoRA (Hu et al., 2021) the output is `y = W x + b + B (s A x)`, `s = alpha / r` or, rank-stabilised,
//! `alpha / sqrt(r)`. Given `dy`: `dz = s B^T dy`, `dB = dy (s A x)^T`, `dA = dz x^T`, `dx = W^T dy + A^T dz`; the
//! base gets `dW = dy x^T` only where it is trained. Dropout acts on the adapter's input alone, as in PEFT.
use super::pass::Pass;
use super::weight::Weight;
use crate::ops::gemm::{Init, Matrix, Target, Term, Transposed, matmul, outer};
use crate::ops::panel::{Act, LANES};
use std::cell::OnceCell;
use std::ops::Range;

/// A low-rank adapter's place among the trained values.
#[derive(Debug, Clone)]
pub struct Lora {
    /// `[rank, in_features]`.
    pub a: Range<usize>,
    /// `[out_features, rank]`.
    pub b: Range<usize>,
    /// Rows of A.
    pub rank: usize,
    /// What `A x` is multiplied by.
    pub scale: f32,
    /// The number that tells this module's dropout mask from the others'.
    pub module: u64,
}

/// `y = W x (+ bias) (+ adapter)`, `W [out_features, in_features]`.
#[derive(Debug)]
pub struct Linear {
    /// The base weight.
    pub weight: Weight,
    /// The base bias `[out_features]`.
    pub bias: Option<Weight>,
    /// Rows of the weight.
    pub out_features: usize,
    /// Columns of the weight.
    pub in_features: usize,
    /// The adapter.
    pub lora: Option<Lora>,
}

/// What the adapter keeps from forward for backward: `s A x`, `[tokens, rank]`.
pub type Low = Option<Act>;

/// A linear module's input, with its transposed copy made once for all modules that need it.
#[derive(Debug)]
pub struct Input<'a> {
    x: &'a Act,
    transposed: OnceCell<Transposed>,
}

impl<'a> Input<'a> {
    /// For one pass backwards.
    pub const fn new(x: &'a Act) -> Self {
        Self { x, transposed: OnceCell::new() }
    }

    fn transposed(&self) -> &Transposed {
        self.transposed.get_or_init(|| Transposed::new(self.x))
    }
}

fn scale(x: &mut Act, factor: f32) {
    x.data_mut().iter_mut().for_each(|value| *value *= factor);
}

impl Linear {
    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.lora.is_some()
            || self.weight.trained().is_some()
            || self.bias.as_ref().is_some_and(|bias| bias.trained().is_some())
    }

    /// `[tokens, out_features]`, plus `residual` of that shape if given.
    pub fn forward(&self, pass: &Pass<'_>, x: &Act, residual: Option<&Act>) -> (Act, Low) {
        let weight = self.weight.view(pass.values);
        let bias = self.bias.as_ref().map(|bias| bias.view(pass.values));
        let base = Term { matrix: Matrix::rows(weight.store(), self.in_features), x };
        let mut y = x.pool().act(x.tokens(), self.out_features);
        let init = match (residual, bias.as_ref()) {
            (Some(residual), _) => Init::Add(residual),
            (None, Some(bias)) => Init::Bias(bias.vector()),
            (None, None) => Init::Zero,
        };
        let low = self.lora.as_ref().map(|lora| {
            let mut low = x.pool().act(x.tokens(), lora.rank);
            let dropped = pass.dropout.map(|drops| drops.of(lora.module, x.tokens()).apply(x));
            let a = Matrix::rows(&pass.values[lora.a.clone()], self.in_features);
            matmul(&mut low, Init::Zero, &[Term { matrix: a, x: dropped.as_ref().unwrap_or(x) }]);
            scale(&mut low, lora.scale);
            low
        });
        match (&self.lora, &low) {
            (Some(lora), Some(low)) => {
                let b = Matrix::rows(&pass.values[lora.b.clone()], lora.rank);
                matmul(&mut y, init, &[base, Term { matrix: b, x: low }]);
            }
            _ => matmul(&mut y, init, &[base]),
        }
        if let (Some(_), Some(bias)) = (residual, bias) {
            add_bias(&mut y, bias.vector());
        }
        (y, low)
    }

    /// Adds the gradients of what is trained to `grads`, and that of the input to `dx`, replacing what it holds
    /// unless `add`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        input: &Input<'_>,
        low: Option<&Act>,
        dy: &Act,
        dx: Option<(&mut Act, bool)>,
        grads: &mut [f32],
    ) {
        let adapter = self.lora.as_ref().zip(low).map(|(lora, low)| {
            let dropped = pass.dropout.map(|drops| drops.of(lora.module, input.x.tokens()).apply(input.x));
            let mut d_low = dy.pool().act(dy.tokens(), lora.rank);
            let b = Matrix::transposed(&pass.values[lora.b.clone()], lora.rank);
            matmul(&mut d_low, Init::Zero, &[Term { matrix: b, x: dy }]);
            scale(&mut d_low, lora.scale);
            outer(Target::Rows(&mut grads[lora.b.clone()]), dy, &Transposed::new(low));
            let x = dropped.as_ref().unwrap_or(input.x);
            outer(Target::Transposed(&mut grads[lora.a.clone()]), x, &Transposed::new(&d_low));
            (lora, d_low)
        });
        if let Some(range) = self.weight.trained() {
            outer(Target::Rows(&mut grads[range.clone()]), dy, input.transposed());
        }
        if let Some(range) = self.bias.as_ref().and_then(Weight::trained) {
            sum_tokens(dy, &mut grads[range.clone()]);
        }
        let Some((dx, add)) = dx else { return };
        let weight = self.weight.view(pass.values);
        let base = Term { matrix: Matrix::transposed(weight.store(), self.in_features), x: dy };
        let init = if add { Init::Out } else { Init::Zero };
        let Some((lora, d_low)) = adapter else { return matmul(dx, init, &[base]) };
        let a = Term { matrix: Matrix::transposed(&pass.values[lora.a.clone()], self.in_features), x: &d_low };
        let Some(drops) = pass.dropout else { return matmul(dx, init, &[base, a]) };
        let mut through = dx.pool().act(dx.tokens(), self.in_features);
        matmul(&mut through, Init::Zero, &[a]);
        matmul(dx, init, &[base]);
        let through = drops.of(lora.module, through.tokens()).apply(&through);
        dx.data_mut().iter_mut().zip(through.data()).for_each(|(sum, value)| *sum += value);
    }
}

fn add_bias(y: &mut Act, bias: &[f32]) {
    for panel in 0..y.panels() {
        for (lanes, value) in y.panel_mut(panel).chunks_exact_mut(LANES).zip(bias) {
            for sum in lanes {
                *sum += value;
            }
        }
    }
}

/// Adds the sum over tokens of `dy [tokens, features]` to `out [features]`.
fn sum_tokens(dy: &Act, out: &mut [f32]) {
    for panel in 0..dy.panels() {
        for (lanes, total) in dy.panel(panel).chunks_exact(LANES).zip(out.iter_mut()) {
            *total += lanes.iter().sum::<f32>();
        }
    }
}
