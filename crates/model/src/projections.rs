//! Linear modules that share an input: q, k and v, or gate and up. Each output has a module of its own, or one module
//! has all outputs side by side (Phi-3, experts).
use super::grads::Grads;
use super::linear::{self, BackwardCall, Call, Few, Input, Linear};
use super::pass::Pass;
use std::ops::Range;
use tunesmith_ops::activation::Activation;

/// The modules that make `N` outputs of one input.
#[derive(Debug)]
pub struct Projections<const N: usize> {
    linears: Vec<Linear>,
    /// Where each output is; those of a module rise.
    outputs: [Output; N],
}

/// The outputs, and what each module needs in backward.
pub type Outputs<const N: usize> = ([Activation; N], Vec<Option<linear::Saved>>);

/// An output: some columns of a module's output.
#[derive(Debug)]
struct Output {
    module: usize,
    columns: Range<usize>,
}

impl Projections<3> {
    /// One module for the first output, and one module for the two others, which lie side by side in it with these
    /// numbers of features.
    pub fn first_apart(first: Linear, rest: Linear, features: [usize; 2]) -> Self {
        let [second, third] = features;
        assert_eq!(second + third, rest.out_features, "the outputs are all of the module");
        let outputs = [
            Output { module: 0, columns: 0..first.out_features },
            Output { module: 1, columns: 0..second },
            Output { module: 1, columns: second..second + third },
        ];
        Self { linears: vec![first, rest], outputs }
    }
}

impl<const N: usize> Projections<N> {
    /// A module for each output.
    pub fn apart(linears: [Linear; N]) -> Self {
        let outputs = std::array::from_fn(|module| Output { module, columns: 0..linears[module].out_features });
        Self { linears: linears.into(), outputs }
    }

    /// One module for all outputs, which lie side by side in it with these numbers of features.
    pub fn fused(linear: Linear, features: [usize; N]) -> Self {
        let mut end = 0;
        let outputs = features.map(|features| {
            let start = end;
            end += features;
            Output { module: 0, columns: start..end }
        });
        assert_eq!(end, linear.out_features, "the outputs are all of the module");
        Self { linears: vec![linear], outputs }
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.linears.iter()
    }

    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.linears.iter_mut()
    }

    /// Whether the first output has a module of its own, which can be computed on fewer rows.
    fn first_is_apart(&self) -> bool {
        self.outputs.iter().skip(1).all(|output| output.module != self.outputs[0].module)
    }

    /// The outputs for `x [tokens, in_features]`, each `[tokens, features]`, and what the modules need in backward.
    /// With `picked`, the first output is computed for these rows only.
    pub fn forward(&self, pass: &Pass<'_>, x: &Activation, picked: Option<&[usize]>) -> Outputs<N> {
        let fewer = picked.filter(|_| self.first_is_apart()).map(|picked| x.gather(picked));
        let input = |module| fewer.as_ref().filter(|_| module == 0).unwrap_or(x);
        let calls = self.linears.iter().enumerate();
        let calls: Few<Call<'_>> =
            calls.map(|(module, linear)| Call { linear, x: input(module), residual: None }).collect();
        let (mut outputs, saved) = self.split(linear::forward_grouped(pass, &calls));
        if let (Some(picked), None) = (picked, &fewer) {
            outputs[0] = outputs[0].gather(picked);
        }
        (outputs, saved)
    }

    /// Whether each output has a module of its own that can multiply vectors ([`Linear::takes_vectors`]).
    pub fn takes_vectors(&self, pass: &Pass<'_>) -> bool {
        self.linears.len() == N && self.linears.iter().all(|linear| linear.takes_vectors(pass))
    }

    /// The outputs for a vector `x [in_features, 1]`, each a vector `[features, 1]`, if [`Projections::takes_vectors`].
    pub fn forward_vector(&self, pass: &Pass<'_>, x: &Activation) -> [Activation; N] {
        let outputs: Vec<Activation> = linear::forward_vector(pass, &self.linears, x).into_vec();
        outputs.try_into().expect("each output has a module")
    }

    /// As [`Projections::forward`], for several projections together, each on its own input.
    pub fn forward_grouped(pass: &Pass<'_>, each: &[(&Self, &Activation)]) -> Few<Outputs<N>> {
        let modules = each.iter().flat_map(|&(it, x)| it.linears.iter().map(move |linear| (linear, x)));
        let calls: Few<Call<'_>> = modules.map(|(linear, x)| Call { linear, x, residual: None }).collect();
        let mut computed = linear::forward_grouped(pass, &calls).into_iter();
        each.iter().map(|(it, _)| it.split(computed.by_ref().take(it.linears.len()).collect())).collect()
    }

    /// Splits the outputs of the modules into the `N` outputs.
    fn split(&self, modules: Few<(Activation, Option<linear::Saved>)>) -> Outputs<N> {
        let (mut whole, saved): (Few<_>, Vec<_>) = modules.into_iter().map(|(y, saved)| (Some(y), saved)).unzip();
        let outputs = self.outputs.each_ref().map(|Output { module, columns }| {
            let all = whole[*module].as_ref().is_some_and(|y| columns.len() == y.features());
            let y = if all { whole[*module].take() } else { None };
            y.unwrap_or_else(|| whole[*module].as_ref().expect("shared columns").columns(columns.clone()))
        });
        (outputs, saved)
    }

    /// From the gradients of the outputs to that of `x`, or none if `want_dx` is false. Adds to `grads`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        saved: &[Option<linear::Saved>],
        d_outputs: [Activation; N],
        picked: Option<&[usize]>,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        let (mut d_outputs, mut dx, mut done) = (d_outputs.map(Some), None, 0);
        if let Some(picked) = picked {
            let first = d_outputs[0].take().expect("all are there");
            if self.first_is_apart() {
                let fewer = x.gather(picked);
                let mut d_fewer = fewer.like();
                let to = want_dx.then_some((&mut d_fewer, false));
                self.linears[0].backward(pass, &Input::new(&fewer), saved[0].as_ref(), &first, to, grads);
                dx = want_dx.then(|| d_fewer.scatter(picked, x.tokens()));
                done = 1;
            } else {
                d_outputs[0] = Some(first.scatter(picked, x.tokens()));
            }
        }
        let mut gradient = |module: usize| {
            let own = self.outputs.iter().zip(&mut d_outputs).filter(|(output, _)| output.module == module);
            let mut own: Few<Activation> = own.filter_map(|(_, d)| d.take()).collect();
            if own.len() == 1 { own.remove(0) } else { Activation::side_by_side(&own.iter().collect::<Few<_>>()) }
        };
        let gradients: Few<Activation> = (done..self.linears.len()).map(&mut gradient).collect();
        let modules = self.linears[done..].iter().zip(&saved[done..]).zip(&gradients);
        let calls: Few<BackwardCall<'_>> =
            modules.map(|((linear, saved), dy)| BackwardCall { linear, saved: saved.as_ref(), dy }).collect();
        let add = dx.is_some();
        dx = dx.or_else(|| want_dx.then(|| x.like()));
        linear::backward_grouped(pass, &Input::new(x), &calls, dx.as_mut().map(|dx| (dx, add)), grads);
        dx
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapters::dora::{self, Dora, Magnitude};
    use crate::adapters::low_rank::Matrices;
    use crate::linear::Formula;
    use crate::pass::Drops;
    use crate::weight::Weight;
    use tunesmith_device::Device;
    use tunesmith_ops::activation::Pool;
    use tunesmith_ops::testing::numbers;

    const TOKENS: usize = 21;
    const IN: usize = 19;
    const OUT: [usize; 3] = [13, 7, 5];
    const RANK: usize = 3;

    /// Everything that is trained: for each module its weight, A, B and magnitudes.
    fn values() -> Vec<f32> {
        numbers(1, OUT.iter().map(|out| out * IN + RANK * IN + out * RANK + out).sum())
    }

    /// A module of this kind, 0: none, 1: LoRA, 2: `DoRA`; with the first of its values, and its weight trained if `full`.
    fn linear(out: usize, kind: usize, at: usize, full: bool) -> Linear {
        let values = values();
        let weight = at..at + out * IN;
        let a = weight.end..weight.end + RANK * IN;
        let b = a.end..a.end + out * RANK;
        let magnitude = b.end..b.end + out;
        let frozen = Weight::frozen(values[weight.clone()].to_vec(), Device::Cpu);
        let squares = dora::row_squares(&frozen, [].as_slice().into(), IN);
        let matrices = Matrices { a, b, rank: RANK, scale: 0.75, module: at as u64, expert: None };
        let adapter: Option<Box<dyn Formula>> = match kind {
            0 => None,
            1 => Some(Box::new(matrices)),
            _ => Some(Box::new(Dora { matrices, magnitude: Magnitude::new(magnitude, squares.into()) })),
        };
        let bias = Some(Weight::frozen(numbers(9, out), Device::Cpu));
        let weight = if full { Weight::Trained(weight) } else { frozen };
        Linear { weight, bias, out_features: out, in_features: IN, adapter }
    }

    fn modules(kinds: [usize; 3], full: bool) -> [Linear; 3] {
        let mut at = 0;
        std::array::from_fn(|module| {
            let out = OUT[module];
            at += out * IN + RANK * IN + out * RANK + out;
            linear(out, kinds[module], at - (out * IN + RANK * IN + out * RANK + out), full)
        })
    }

    #[test]
    fn modules_together_have_the_bits_that_each_has_alone() {
        let (pool, values) = (Pool::new(), values());
        let x = Activation::from_rows(&pool, &numbers(2, TOKENS * IN), IN);
        let rows: Vec<usize> = (0..TOKENS).step_by(4).collect();
        for kinds in [[0, 0, 0], [1, 1, 1], [0, 1, 0], [2, 1, 0], [1, 0, 2]] {
            for (rate, full, picked) in [
                (0.0f32, false, None),
                (0.0, true, None),
                (0.4, false, None),
                (0.0, true, Some(&rows[..])),
                (0.4, false, Some(&rows[..])),
            ] {
                let drops = Drops { rate, seed: 1, step: 2, first_row: 3, picked: &rows };
                let pass = Pass {
                    values: (&values).into(),
                    pool: &pool,
                    balance: None,
                    dropout: (rate > 0.0).then_some(drops),
                };
                let tokens = |index: usize| if index == 0 { picked.map_or(TOKENS, <[_]>::len) } else { TOKENS };
                let gradients: [Activation; 3] = std::array::from_fn(|index| {
                    Activation::from_rows(&pool, &numbers(3, tokens(index) * OUT[index]), OUT[index])
                });
                // One by one.
                let linears = modules(kinds, full);
                let (mut grads, mut dx) = (vec![0.0; values.len()], x.like());
                let mut outputs = Vec::new();
                for (index, linear) in linears.iter().enumerate() {
                    let fewer = picked.filter(|_| index == 0).map(|picked| x.gather(picked));
                    let own = fewer.as_ref().unwrap_or(&x);
                    let (y, saved) = linear.forward(&pass, own, None);
                    outputs.push(y.to_rows());
                    let (input, dy, grads) = (Input::new(own), &gradients[index], &mut Grads::whole(&mut grads));
                    if let (Some(picked), 0) = (picked, index) {
                        let mut d = own.like();
                        linear.backward(&pass, &input, saved.as_ref(), dy, Some((&mut d, false)), grads);
                        dx = d.scatter(picked, TOKENS);
                    } else {
                        let to = Some((&mut dx, index > 0));
                        linear.backward(&pass, &input, saved.as_ref(), dy, to, grads);
                    }
                }
                let what = format!("{kinds:?}, dropout {rate}, full {full}, picked {}", picked.is_some());
                let together = Projections::apart(modules(kinds, full));
                let (found, saved) = together.forward(&pass, &x, picked);
                assert!(found.iter().map(Activation::to_rows).eq(outputs), "{what}");
                let mut d_values = vec![0.0; values.len()];
                let found =
                    together.backward(&pass, &x, &saved, gradients, picked, true, &mut Grads::whole(&mut d_values));
                assert!(found.is_some_and(|found| found.to_rows() == dx.to_rows()), "{what}");
                assert!(d_values == grads, "{what}");
            }
        }
    }

    #[test]
    fn columns_of_one_module_are_those_of_several() {
        let (pool, values) = (Pool::new(), values());
        let pass = Pass { values: (&values).into(), pool: &pool, balance: None, dropout: None };
        let x = Activation::from_rows(&pool, &numbers(2, TOKENS * IN), IN);
        let rows: Vec<usize> = (1..TOKENS).step_by(3).collect();
        let apart = Projections::apart(modules([0; 3], false));
        let weights: Vec<f32> = apart
            .linears()
            .flat_map(|linear| {
                let mut values = vec![0.0; linear.out_features * IN];
                linear.weight.view(pass.values).store().widen(0, &mut values);
                values
            })
            .collect();
        let out = OUT.iter().sum();
        let fused = Linear {
            weight: Weight::frozen(weights, Device::Cpu),
            bias: Some(Weight::frozen(OUT.map(|out| numbers(9, out)).concat(), Device::Cpu)),
            out_features: out,
            in_features: IN,
            adapter: None,
        };
        let fused = Projections::fused(fused, OUT);
        for picked in [None, Some(&rows[..])] {
            let [apart, fused] = [&apart, &fused].map(|it| it.forward(&pass, &x, picked).0.map(|y| y.to_rows()));
            assert_eq!(apart, fused);
        }
        let gradients = || OUT.map(|out| Activation::from_rows(&pool, &numbers(3, TOKENS * out), out));
        let mut none = Grads::whole([].as_mut_slice());
        let mut dx = |it: &Projections<3>, saved: usize| {
            let saved: Vec<_> = (0..saved).map(|_| None).collect();
            it.backward(&pass, &x, &saved, gradients(), None, true, &mut none).unwrap().to_rows()
        };
        let (apart, fused) = (dx(&apart, 3), dx(&fused, 1));
        assert!(apart.iter().zip(&fused).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}
