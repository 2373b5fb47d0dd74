//! (IA)³ (Liu et al., 2022) trains a factor l for each output of a module: `y = l ⊙ (W x + b)`. On feed-forward modules
//! it trains a factor for each input: `y = W (l ⊙ x) + b`.
use std::ops::Range;
use std::sync::Arc;

use super::{About, Adapter, Attach, Method, Part, Placement, Site, Targets, listed};
use crate::grads::Grads;
use crate::linear::{Base, Formula, Input, Saved};
use crate::values::placed;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::adapters::ia3::{Ia3Config, PREFIX};
use tunesmith_config::{Mode, TargetModules, TuningConfig};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::feature_scale;
use tunesmith_plan::memory::{self, Footprint};

/// What all (IA)³ adapters have in common.
pub static ABOUT: About = About {
    mode: Mode::Ia3,
    title: "(IA)³",
    parts: "the factors of (IA)³",
    section: &Ia3Config::section(),
    training: &[],
    starting: &[],
    ours: &[],
    peft_type: "IA3",
    prefix: PREFIX,
    fields: r#"{"fan_in_fan_out": false, "init_ia3_weights": true}"#,
    // PEFT sets `fan_in_fan_out` by the class of the module.
    indifferent: &["fan_in_fan_out", "init_ia3_weights"],
    absent: "{}",
};

/// The modules that get factors where `target_modules` is not set: keys, values, and the last projection of the MLP, as
/// in the paper.
const TARGETS: [&str; 6] = ["k_proj", "v_proj", "qkv_proj", "c_attn", "down_proj", "mlp.c_proj"];
/// The modules whose inputs are multiplied where `feedforward_modules` is not set: the last projection of the MLP.
const INPUTS: [&str; 2] = ["down_proj", "mlp.c_proj"];

fn list(names: &[&str]) -> TargetModules {
    TargetModules::List(names.iter().map(|&name| name.to_owned()).collect())
}

/// The full names of the modules with an adapter; with `inputs_only`, of those whose inputs are multiplied.
fn named(placements: &[Placement], inputs_only: bool) -> Vec<String> {
    let inputs = |placement: &&Placement| !inputs_only || placement.adapter.describe() == Side::Input.word();
    placements.iter().filter(inputs).map(|placement| placement.module.clone()).collect()
}

impl Method for Ia3Config {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn targets(&self) -> Targets {
        Targets {
            section: Ia3Config::SECTION,
            target_modules: self.target_modules.clone().unwrap_or_else(|| list(&TARGETS)),
            exclude_modules: self.exclude_modules.clone(),
            modules_to_save: self.modules_to_save.clone(),
            feedforward: Some(self.feedforward_modules.clone().unwrap_or_else(|| list(&INPUTS))),
            // A model has either k_proj and v_proj, or qkv_proj, or c_attn.
            strict: self.target_modules.is_some(),
            ..Targets::default()
        }
    }

    fn adapter(&self, site: &Site<'_>) -> Arc<dyn Adapter> {
        let (outputs, inputs) = (site.module.out_features, site.module.in_features);
        Arc::new(Factors { outputs, inputs, side: if site.feedforward { Side::Input } else { Side::Output } })
    }

    fn list(&self, placements: &[Placement], tuning: &mut TuningConfig) {
        tuning.ia3 = Self {
            target_modules: Some(listed(named(placements, false))),
            feedforward_modules: Some(listed(named(placements, true))),
            exclude_modules: None,
            modules_to_save: self.modules_to_save.clone(),
        };
    }

    /// By full names, since PEFT wants each of `feedforward_modules` to be one of `target_modules`.
    fn write(&self, placements: &[Placement], tuning: &mut TuningConfig) {
        tuning.ia3.target_modules = Some(TargetModules::List(named(placements, false)));
        tuning.ia3.feedforward_modules = Some(TargetModules::List(named(placements, true)));
        tuning.ia3.exclude_modules = None;
    }

    fn check(&self, placements: &[Placement]) -> Result<()> {
        match &self.feedforward_modules {
            Some(TargetModules::List(modules)) if !modules.is_empty() && named(placements, true).is_empty() => {
                Err(Error::config(format!("tuning.ia3.feedforward_modules: {modules:?} is none of target_modules"))
                    .hint("name what target_modules names too, or leave it out"))
            }
            _ => Ok(()),
        }
    }
}

/// The side of a module that the factors multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Input,
    Output,
}

impl Side {
    const fn word(self) -> &'static str {
        match self {
            Self::Input => "Input",
            Self::Output => "Output",
        }
    }
}

/// The factors of a module.
#[derive(Debug)]
struct Factors {
    outputs: usize,
    inputs: usize,
    side: Side,
}

impl Adapter for Factors {
    fn tensors(&self) -> Vec<(&'static str, Vec<usize>)> {
        let shape = match self.side {
            Side::Input => vec![1, self.inputs],
            Side::Output => vec![self.outputs, 1],
        };
        vec![("ia3_l", shape)]
    }

    fn describe(&self) -> String {
        self.side.word().to_owned()
    }

    fn attach(&self, at: &mut dyn Attach) -> Result<Box<dyn Formula>> {
        let count = if self.side == Side::Input { self.inputs } else { self.outputs };
        at.base()?;
        Ok(Box::new(Scaled { factors: at.push(&vec![1.0; count])?, side: self.side }))
    }

    /// Multiplies each row of the weight by its factor, or each column. Factors of outputs multiply the bias too.
    fn merge(&self, tensors: &[&[f32]], part: &Part, values: &mut [f32]) {
        let &[factors, ..] = tensors else { return };
        let columns = if part.bias { 1 } else { self.inputs };
        for (row, values) in values.chunks_exact_mut(columns).enumerate() {
            match self.side {
                Side::Output => values.iter_mut().for_each(|value| *value *= factors[row]),
                Side::Input if !part.bias => {
                    values.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
                }
                Side::Input => {}
            }
        }
    }

    fn changes_bias(&self) -> bool {
        true
    }

    fn footprint(&self) -> Arc<dyn Footprint> {
        Arc::new(memory::Factors { inputs: self.side == Side::Input })
    }
}

/// The (IA)³ adapter of a module in a pass, with the place of its factors among the trained values.
#[derive(Debug)]
struct Scaled {
    factors: Range<usize>,
    side: Side,
}

impl Formula for Scaled {
    fn forward(&self, base: Base<'_>, x: &Activation, residual: Option<&Activation>) -> (Activation, Option<Saved>) {
        let factors = base.pass.values.at(&self.factors);
        if self.side == Side::Input {
            return (base.forward(&feature_scale::times(x, factors), residual), None);
        }
        let v = base.forward(x, None);
        let mut y = feature_scale::times(&v, factors);
        if let Some(residual) = residual {
            elementwise::add(&mut y, residual);
        }
        (y, Some(v.into()))
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
        let factors = base.pass.values.at(&self.factors);
        let ones = placed(vec![1.0; factors.len()], dy.device());
        if self.side == Side::Output {
            if let Some([v]) = saved.map(|saved| &saved.acts[..]) {
                feature_scale::backward(dy, v, ones.view(), grads.at(&self.factors));
            }
            return base.backward(input, &feature_scale::times(dy, factors), dx, grads);
        }
        let scaled = base.linear.weight.trained().map(|_| feature_scale::times(input.x, factors));
        let mut d_scaled = input.x.like();
        let x = Input::new(scaled.as_ref().unwrap_or(input.x));
        base.backward(&x, dy, Some((&mut d_scaled, false)), grads);
        feature_scale::backward(&d_scaled, input.x, ones.view(), grads.at(&self.factors));
        let Some((dx, add)) = dx else { return };
        if !add {
            dx.zero();
        }
        feature_scale::add(dx, &d_scaled, factors);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::Linear;
    use crate::pass::Pass;
    use crate::weight::Weight;
    use tunesmith_device::Device;
    use tunesmith_ops::activation::Pool;
    use tunesmith_ops::testing::{check_gradient, each_level, numbers};

    const TOKENS: usize = 21;
    const IN: usize = 19;
    const OUT: usize = 13;

    #[test]
    fn factors_equal_their_formula_and_their_finite_differences() {
        each_level(|level| {
            for side in [Side::Output, Side::Input] {
                let pool = Pool::new();
                let (x, w, bias) = (numbers(1, TOKENS * IN), numbers(2, OUT * IN), numbers(3, OUT));
                let (rest, seed) = (numbers(4, TOKENS * OUT), numbers(5, TOKENS * OUT));
                let factors = numbers(6, if side == Side::Input { IN } else { OUT });
                let linear = Linear {
                    weight: Weight::frozen(w.clone(), Device::Cpu),
                    bias: Some(Weight::frozen(bias.clone(), Device::Cpu)),
                    out_features: OUT,
                    in_features: IN,
                    adapter: Some(Box::new(Scaled { factors: 0..factors.len(), side })),
                };
                let pass = Pass { values: (&factors).into(), pool: &pool, balance: None, dropout: None };
                let (xa, dy) = (Activation::from_rows(&pool, &x, IN), Activation::from_rows(&pool, &seed, OUT));
                let (y, kept) = linear.forward(&pass, &xa, Some(&Activation::from_rows(&pool, &rest, OUT)));
                let mut grads = vec![0.0; factors.len()];
                // What `dx` holds is added to, or replaced.
                let mut dx = Activation::from_rows(&pool, &numbers(7, TOKENS * IN), IN);
                let before = dx.to_rows();
                linear.backward(
                    &pass,
                    &Input::new(&xa),
                    kept.as_ref(),
                    &dy,
                    Some((&mut dx, true)),
                    &mut Grads::whole(&mut grads),
                );
                let mut alone = Activation::from_rows(&pool, &before, IN);
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
