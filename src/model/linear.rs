//! A linear module: base x adapter in one type.
//!
//! With LoRA (Hu et al., 2021) the output is `y = W x + b + B (s A x)`, `s = alpha / r` or, rank-stabilised,
//! `alpha / sqrt(r)`. Given `dy`: `dz = s B^T dy`, `dB = dy (s A x)^T`, `dA = dz x^T`, `dx = W^T dy + A^T dz`; the
//! base gets `dW = dy x^T` only where it is trained. Dropout acts on the adapter's input alone, as in PEFT.
//!
//! With `DoRA` ([`super::dora`]) the output is `y = b + W (x - x') + g ⊙ v`, `v = W x' + B (s A x')`, `g = m / n`, where
//! x' is the adapter's input after dropout; without dropout `x' = x`, and one product of the base is enough.
//!
//! With (IA)³ (Liu et al., 2022) a factor l is trained for each output, `y = l ⊙ (W x + b)`, or for each input,
//! `y = W (l ⊙ x) + b`.
use super::dora::{Magnitude, Update};
use super::grads::Grads;
use super::pass::Pass;
use super::targets::Side;
use super::values::Values;
use super::weight::Weight;
use crate::ops::gain;
use crate::ops::gemm::{Init, Matrix, Target, Term, Transposed, matmul, outer};
use crate::ops::panel::{Act, LANES};
use std::cell::OnceCell;
use std::ops::Range;

/// A low-rank adapter's place among the trained values.
#[derive(Debug, Clone)]
pub struct Lora {
    /// `[rank, in_features]`.
    pub a: Range<usize>,
    /// `[out_features, rank]`, or of all experts `[out_features, rank * experts]`.
    pub b: Range<usize>,
    /// Rows of A.
    pub rank: usize,
    /// What `A x` is multiplied by.
    pub scale: f32,
    /// The number that tells this module's dropout mask from the others'.
    pub module: u64,
    /// `DoRA`'s magnitudes.
    pub magnitude: Option<Magnitude>,
    /// Of an expert its number and how many there are: column i of its B is column `i * experts + expert` of the stored one.
    pub expert: Option<(usize, usize)>,
}

/// The factors of (IA)³ of one module.
#[derive(Debug, Clone)]
pub struct Factors {
    /// Their place among the trained values, `[in_features]` or `[out_features]`.
    pub range: Range<usize>,
    /// What they multiply.
    pub side: Side,
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
    /// The factors, in the place of an adapter.
    pub factors: Option<Factors>,
}

/// What an adapter keeps from forward for backward.
#[derive(Debug)]
pub enum Low<T = Act> {
    /// Of LoRA `s A x`, `[tokens, rank]`, and what `DoRA` keeps beside it.
    Update(T, Option<Direction<T>>),
    /// Of factors on outputs `W x + b`, `[tokens, out_features]`.
    Output(T),
}

/// What `DoRA` keeps.
#[derive(Debug)]
pub struct Direction<T> {
    /// `(W + s B A) x`, `[tokens, out_features]`.
    v: T,
    /// Row norms of `W + s B A`.
    norm: Vec<f32>,
    /// Magnitudes over norms.
    gain: Vec<f32>,
}

impl<T> Low<T> {
    /// The same in another form.
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Low<U> {
        let direction = |Direction { v, norm, gain }| Direction { v: f(v), norm, gain };
        match self {
            Self::Update(low, kept) => Low::Update(f(low), kept.map(direction)),
            Self::Output(v) => Low::Output(f(v)),
        }
    }
}

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
    /// What it computes with, beside adapters.
    pub fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weight> {
        std::iter::once(&mut self.weight).chain(&mut self.bias)
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        self.lora.is_some()
            || self.factors.is_some()
            || self.weight.trained().is_some()
            || self.bias.as_ref().is_some_and(|bias| bias.trained().is_some())
    }

    /// `[tokens, out_features]`, plus `residual` of that shape if given.
    pub fn forward(&self, pass: &Pass<'_>, x: &Act, residual: Option<&Act>) -> (Act, Option<Low>) {
        if let Some(Factors { range, side }) = &self.factors {
            let factors = pass.values.at(range);
            if *side == Side::Input {
                return (self.plain(pass, &gain::times(x, factors), residual), None);
            }
            let v = self.plain(pass, x, None);
            let mut y = gain::times(&v, factors);
            if let Some(residual) = residual {
                y.add(residual);
            }
            return (y, Some(Low::Output(v)));
        }
        let Some(lora) = &self.lora else { return (self.plain(pass, x, residual), None) };
        let weight = self.weight.view(pass.values);
        let bias = self.bias.as_ref().map(|bias| bias.view(pass.values));
        let base = Term { matrix: Matrix::rows(weight.store(), self.in_features), x };
        let mut y = x.pool().blank(x.tokens(), self.out_features);
        let init = match (residual, bias.as_ref()) {
            (Some(residual), _) => Init::Add(residual),
            (None, Some(bias)) => Init::Bias(bias.vector()),
            (None, None) => Init::Zero,
        };
        let mut low = x.pool().blank(x.tokens(), lora.rank);
        let dropped = pass.dropout.map(|drops| drops.of(lora.module, x.tokens()).apply(x));
        let a = Matrix::rows(pass.values.at(&lora.a), self.in_features);
        let x_low = dropped.as_ref().unwrap_or(x);
        matmul(&mut low, Init::Zero, &[Term { matrix: a, x: x_low }]);
        scale(&mut low, lora.scale);
        let (b, row, col) = lora.b(pass.values);
        let b = Term { matrix: Matrix::strided(b, row, col), x: &low };
        let mut direction = None;
        if let Some(magnitude) = &lora.magnitude {
            let mut v = x.pool().blank(x.tokens(), self.out_features);
            matmul(&mut v, Init::Zero, &[Term { x: x_low, ..base }, b]);
            if let Some(dropped) = dropped {
                let rest = minus(x, &dropped);
                matmul(&mut y, init, &[Term { x: &rest, ..base }]);
            } else {
                fill(&mut y, init);
            }
            let norm = magnitude.norms(x.pool(), weight.store(), lora.update(pass), self.in_features, x.tokens());
            let magnitudes = pass.values.at(&magnitude.range);
            let gain: Vec<f32> = magnitudes.iter().zip(&norm).map(|(magnitude, norm)| magnitude / norm).collect();
            gain::add(&mut y, &v, &gain);
            direction = Some(Direction { v, norm, gain });
        } else {
            matmul(&mut y, init, &[base, b]);
        }
        if let (Some(_), Some(bias)) = (residual, bias) {
            add_bias(&mut y, bias.vector());
        }
        (y, Some(Low::Update(low, direction)))
    }

    /// The base alone, plus `residual`.
    fn plain(&self, pass: &Pass<'_>, x: &Act, residual: Option<&Act>) -> Act {
        let weight = self.weight.view(pass.values);
        let bias = self.bias.as_ref().map(|bias| bias.view(pass.values));
        let mut y = x.pool().blank(x.tokens(), self.out_features);
        let init = match (residual, bias.as_ref()) {
            (Some(residual), _) => Init::Add(residual),
            (None, Some(bias)) => Init::Bias(bias.vector()),
            (None, None) => Init::Zero,
        };
        matmul(&mut y, init, &[Term { matrix: Matrix::rows(weight.store(), self.in_features), x }]);
        if let (Some(_), Some(bias)) = (residual, bias) {
            add_bias(&mut y, bias.vector());
        }
        y
    }

    /// As [`Linear::backward`], where factors are trained.
    fn backward_factors(
        &self,
        pass: &Pass<'_>,
        input: &Input<'_>,
        kept: Option<&Low>,
        dy: &Act,
        dx: Option<(&mut Act, bool)>,
        grads: &mut Grads<'_>,
    ) {
        let Some(Factors { range, side }) = &self.factors else { return };
        let factors = pass.values.at(range);
        let ones = vec![1.0; factors.len()];
        if *side == Side::Output {
            if let Some(Low::Output(v)) = kept {
                gain::backward(dy, v, &ones, &mut grads[range.clone()]);
            }
            return self.backward_plain(pass, input, &gain::times(dy, factors), dx, grads);
        }
        let scaled = self.weight.trained().map(|_| gain::times(input.x, factors));
        let mut d_scaled = input.x.like();
        let x = Input::new(scaled.as_ref().unwrap_or(input.x));
        self.backward_plain(pass, &x, dy, Some((&mut d_scaled, false)), grads);
        gain::backward(&d_scaled, input.x, &ones, &mut grads[range.clone()]);
        let Some((dx, add)) = dx else { return };
        if !add {
            dx.zero();
        }
        gain::add(dx, &d_scaled, factors);
    }

    /// As [`Linear::backward`], of the base alone.
    fn backward_plain(
        &self,
        pass: &Pass<'_>,
        input: &Input<'_>,
        dy: &Act,
        dx: Option<(&mut Act, bool)>,
        grads: &mut Grads<'_>,
    ) {
        self.backward_base(input, dy, grads);
        let Some((dx, add)) = dx else { return };
        let weight = self.weight.view(pass.values);
        let base = Term { matrix: Matrix::transposed(weight.store(), self.in_features), x: dy };
        matmul(dx, if add { Init::Out } else { Init::Zero }, &[base]);
    }

    /// Adds the gradients of the base's weight and bias, where they are trained.
    fn backward_base(&self, input: &Input<'_>, dy: &Act, grads: &mut Grads<'_>) {
        if let Some(range) = self.weight.trained() {
            outer(Target::Rows(&mut grads[range.clone()]), dy, input.transposed());
        }
        if let Some(range) = self.bias.as_ref().and_then(Weight::trained) {
            sum_tokens(dy, &mut grads[range.clone()]);
        }
    }

    /// Adds the gradients of what is trained to `grads`, and that of the input to `dx`, replacing what it holds
    /// unless `add`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        input: &Input<'_>,
        kept: Option<&Low>,
        dy: &Act,
        dx: Option<(&mut Act, bool)>,
        grads: &mut Grads<'_>,
    ) {
        if self.factors.is_some() {
            return self.backward_factors(pass, input, kept, dy, dx, grads);
        }
        let (Some(lora), Some(Low::Update(low, direction))) = (&self.lora, kept) else {
            return self.backward_plain(pass, input, dy, dx, grads);
        };
        let (d_low, dv) = {
            let dropped = pass.dropout.map(|drops| drops.of(lora.module, input.x.tokens()).apply(input.x));
            // The gradient of `W x + B (s A x)`.
            let dv = direction.as_ref().map(|direction| {
                if let Some(magnitude) = &lora.magnitude {
                    gain::backward(dy, &direction.v, &direction.norm, &mut grads[magnitude.range.clone()]);
                }
                gain::times(dy, &direction.gain)
            });
            let dv_or_dy = dv.as_ref().unwrap_or(dy);
            let mut d_low = dy.pool().act(dy.tokens(), lora.rank);
            let (b, row, col) = lora.b(pass.values);
            let b = Matrix::strided(b, col, row);
            matmul(&mut d_low, Init::Zero, &[Term { matrix: b, x: dv_or_dy }]);
            scale(&mut d_low, lora.scale);
            let to = Target::Strided(&mut grads[lora.b.clone()][lora.first_column()..], row, col);
            outer(to, dv_or_dy, &Transposed::new(low));
            let x = dropped.as_ref().unwrap_or(input.x);
            outer(Target::Transposed(&mut grads[lora.a.clone()]), x, &Transposed::new(&d_low));
            (d_low, dv)
        };
        self.backward_base(input, dy, grads);
        let Some((dx, add)) = dx else { return };
        let weight = self.weight.view(pass.values);
        let base = Term { matrix: Matrix::transposed(weight.store(), self.in_features), x: dy };
        let init = if add { Init::Out } else { Init::Zero };
        let a = Term { matrix: Matrix::transposed(pass.values.at(&lora.a), self.in_features), x: &d_low };
        let Some(drops) = pass.dropout else {
            return matmul(dx, init, &[Term { x: dv.as_ref().unwrap_or(dy), ..base }, a]);
        };
        let mut through = dx.pool().act(dx.tokens(), self.in_features);
        if let Some(dv) = dv {
            matmul(&mut through, Init::Zero, &[Term { x: &minus(&dv, dy), ..base }, a]);
        } else {
            matmul(&mut through, Init::Zero, &[a]);
        }
        matmul(dx, init, &[base]);
        let through = drops.of(lora.module, through.tokens()).apply(&through);
        dx.data_mut().iter_mut().zip(through.data()).for_each(|(sum, value)| *sum += value);
    }
}

impl Lora {
    fn first_column(&self) -> usize {
        self.expert.map_or(0, |(expert, _)| expert)
    }

    /// B's values from its first on, and how far its rows and columns lie apart.
    fn b<'a>(&self, values: Values<'a>) -> (&'a [f32], usize, usize) {
        let experts = self.expert.map_or(1, |(_, experts)| experts);
        (&values.at(&self.b)[self.first_column()..], self.rank * experts, experts)
    }

    fn update<'a>(&self, pass: &Pass<'a>) -> Update<'a> {
        let values = pass.values;
        Update { a: values.at(&self.a), b: values.at(&self.b), rank: self.rank, scale: self.scale }
    }
}

/// `left - right`.
fn minus(left: &Act, right: &Act) -> Act {
    let mut out = left.copy();
    out.data_mut().iter_mut().zip(right.data()).for_each(|(out, right)| *out -= right);
    out
}

/// What a product of `out` that starts so begins with.
fn fill(out: &mut Act, init: Init<'_>) {
    match init {
        Init::Out => {}
        Init::Add(other) => out.data_mut().copy_from_slice(other.data()),
        Init::Zero => out.zero(),
        Init::Bias(bias) => {
            out.zero();
            add_bias(out, bias);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::dora;
    use crate::model::pass::Drops;
    use crate::ops::panel::Pool;
    use crate::ops::testing::{check_gradient, each_level, numbers};

    const TOKENS: usize = 21;
    const IN: usize = 19;
    const OUT: usize = 13;
    const RANK: usize = 3;
    const SCALE: f64 = 0.75;

    /// `b + W (x - x') + m / n ⊙ (W + s B A) x'` in f64, times `seed`, summed: the norms `n` given, since they count as
    /// constants.
    fn reference([x, mask, w, bias, a, b, m, seed]: [&[f64]; 8], norm: &[f64]) -> f64 {
        let mut sum = 0.0;
        for token in 0..TOKENS {
            let x = |i: usize| x[token * IN + i];
            let dropped = |i: usize| x(i) * mask[token * IN + i];
            let low: Vec<f64> = (0..RANK).map(|k| (0..IN).map(|i| a[k * IN + i] * dropped(i)).sum()).collect();
            for j in 0..OUT {
                let base = |x: &dyn Fn(usize) -> f64| (0..IN).map(|i| w[j * IN + i] * x(i)).sum::<f64>();
                let ba: f64 = (0..RANK).map(|k| b[j * RANK + k] * low[k]).sum();
                let v = base(&dropped) + SCALE * ba;
                let y = bias[j] + base(&|i| x(i) - dropped(i)) + m[j] / norm[j] * v;
                sum += y * seed[token * OUT + j];
            }
        }
        sum
    }

    #[test]
    fn dora_equals_its_formula_and_its_finite_differences() {
        each_level(|level| {
            for rate in [0.0f32, 0.4] {
                let pool = Pool::new();
                let (x, w, bias) = (numbers(1, TOKENS * IN), numbers(2, OUT * IN), numbers(3, OUT));
                let (a, b, m) = (numbers(4, RANK * IN), numbers(5, OUT * RANK), numbers(6, OUT));
                let seed = numbers(7, TOKENS * OUT);
                let values = [&a[..], &b, &m].concat();
                let (a_range, b_range) = (0..a.len(), a.len()..a.len() + b.len());
                let m_range = b_range.end..values.len();
                let weight = Weight::frozen(w.clone(), &[OUT, IN]).unwrap();
                let squares = dora::row_squares(&weight, &[], IN);
                let linear = Linear {
                    bias: Some(Weight::frozen(bias.clone(), &[OUT]).unwrap()),
                    out_features: OUT,
                    in_features: IN,
                    lora: Some(Lora {
                        a: a_range.clone(),
                        b: b_range.clone(),
                        rank: RANK,
                        scale: SCALE as f32,
                        module: 5,
                        magnitude: Some(Magnitude::new(m_range.clone(), squares.clone())),
                        expert: None,
                    }),
                    weight,
                    factors: None,
                };
                let drops = Drops { rate, seed: 1, step: 2, first_row: 3, picked: &[] };
                let pass = Pass {
                    values: (&values).into(),
                    pool: &pool,
                    balance: None,
                    dropout: (rate > 0.0).then_some(drops),
                };
                let (xa, dy) = (Act::from_rows(&pool, &x, IN), Act::from_rows(&pool, &seed, OUT));
                let (y, kept) = linear.forward(&pass, &xa, None);
                let mut grads = vec![0.0; values.len()];
                let mut dx = pool.act(TOKENS, IN);
                linear.backward(
                    &pass,
                    &Input::new(&xa),
                    kept.as_ref(),
                    &dy,
                    Some((&mut dx, false)),
                    &mut Grads::whole(&mut grads),
                );

                let ones = Act::from_rows(&pool, &vec![1.0; TOKENS * IN], IN);
                let mask =
                    pass.dropout.map_or_else(|| ones.to_rows(), |drops| drops.of(5, TOKENS).apply(&ones).to_rows());
                let update = Update { a: &a, b: &b, rank: RANK, scale: SCALE as f32 };
                let norms = dora::row_norms(&pool, (&w).into(), &squares, update, IN);
                let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|&value| f64::from(value)).collect() };
                let norms = wide(&norms);
                let (x, mask, w, bias) = (wide(&x), wide(&mask), wide(&w), wide(&bias));
                let (af, bf, mf, seed) = (wide(&a), wide(&b), wide(&m), wide(&seed));
                let expected = reference([&x, &mask, &w, &bias, &af, &bf, &mf, &seed], &norms);
                let got: f64 = y.to_rows().iter().zip(&seed).map(|(y, s)| f64::from(*y) * s).sum();
                assert!((got - expected).abs() < 1e-4, "{level:?} {rate}: {got} != {expected}");
                let narrow: Vec<f32> = x.iter().map(|&value| value as f32).collect();
                check_gradient("x", &narrow, &dx.to_rows(), |x| {
                    reference([x, &mask, &w, &bias, &af, &bf, &mf, &seed], &norms)
                });
                check_gradient("A", &a, &grads[a_range], |a| {
                    reference([&x, &mask, &w, &bias, a, &bf, &mf, &seed], &norms)
                });
                check_gradient("B", &b, &grads[b_range], |b| {
                    reference([&x, &mask, &w, &bias, &af, b, &mf, &seed], &norms)
                });
                check_gradient("magnitude", &m, &grads[m_range], |m| {
                    reference([&x, &mask, &w, &bias, &af, &bf, m, &seed], &norms)
                });
            }
        });
    }

    #[test]
    fn factors_equal_their_formula_and_their_finite_differences() {
        each_level(|level| {
            for side in [Side::Output, Side::Input] {
                let pool = Pool::new();
                let (x, w, bias) = (numbers(1, TOKENS * IN), numbers(2, OUT * IN), numbers(3, OUT));
                let (rest, seed) = (numbers(4, TOKENS * OUT), numbers(5, TOKENS * OUT));
                let factors = numbers(6, if side == Side::Input { IN } else { OUT });
                let linear = Linear {
                    weight: Weight::frozen(w.clone(), &[OUT, IN]).unwrap(),
                    bias: Some(Weight::frozen(bias.clone(), &[OUT]).unwrap()),
                    out_features: OUT,
                    in_features: IN,
                    lora: None,
                    factors: Some(Factors { range: 0..factors.len(), side }),
                };
                let pass = Pass { values: (&factors).into(), pool: &pool, balance: None, dropout: None };
                let (xa, dy) = (Act::from_rows(&pool, &x, IN), Act::from_rows(&pool, &seed, OUT));
                let (y, kept) = linear.forward(&pass, &xa, Some(&Act::from_rows(&pool, &rest, OUT)));
                let mut grads = vec![0.0; factors.len()];
                // What `dx` holds is added to, or replaced.
                let mut dx = Act::from_rows(&pool, &numbers(7, TOKENS * IN), IN);
                let before = dx.to_rows();
                linear.backward(
                    &pass,
                    &Input::new(&xa),
                    kept.as_ref(),
                    &dy,
                    Some((&mut dx, true)),
                    &mut Grads::whole(&mut grads),
                );
                let mut alone = Act::from_rows(&pool, &before, IN);
                let mut twice = grads.clone();
                linear.backward(
                    &pass,
                    &Input::new(&xa),
                    kept.as_ref(),
                    &dy,
                    Some((&mut alone, false)),
                    &mut Grads::whole(&mut twice),
                );
                let sums = dx.to_rows().into_iter().zip(before).map(|(sum, before)| sum - before);
                assert!(sums.zip(alone.to_rows()).all(|(a, b)| (a - b).abs() < 1e-4), "{level:?} {side:?}");
                assert!(twice.iter().zip(&grads).all(|(twice, once)| (twice - 2.0 * once).abs() < 1e-4));

                let formula = |x: &[f64], l: &[f64]| -> f64 {
                    let mut sum = 0.0;
                    for at in 0..TOKENS * OUT {
                        let (token, j) = (at / OUT, at % OUT);
                        let input = |i: usize| x[token * IN + i] * if side == Side::Input { l[i] } else { 1.0 };
                        let v: f64 = (0..IN).map(|i| f64::from(w[j * IN + i]) * input(i)).sum::<f64>();
                        let v = v + f64::from(bias[j]);
                        let v = if side == Side::Output { l[j] * v } else { v };
                        sum += (v + f64::from(rest[at])) * f64::from(seed[at]);
                    }
                    sum
                };
                let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|&value| f64::from(value)).collect() };
                let (x64, l64) = (wide(&x), wide(&factors));
                let got: f64 = y.to_rows().iter().zip(&seed).map(|(y, s)| f64::from(*y) * f64::from(*s)).sum();
                assert!((got - formula(&x64, &l64)).abs() < 1e-4, "{level:?} {side:?}: {got}");
                check_gradient("x", &x, &alone.to_rows(), |x| formula(x, &l64));
                check_gradient("factors", &factors, &grads, |l| formula(&x64, l));
            }
        });
    }
}
