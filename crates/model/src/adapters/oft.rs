//! OFT (Qiu et al., 2023; on inputs: Qiu et al., 2025) rotates the inputs of a module before its weight:
//! `y = W x' + b`. Each block of x, as a row vector, is multiplied by an orthogonal matrix: `x' = x R`. R comes from a
//! skew-symmetric Q whose upper triangle is trained. It is Cayley's `R = (I - Q) (I + Q)^-1`, or as in PEFT the first
//! terms of its series, `I + 2 Q + 2 Q^2 + … + Q^k`. Nothing as large as the weight is made, so that the base may be in
//! 4 bits.
mod cayley;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;

use super::{About, Adapter, Attach, Method, Part, Placement, Site, Targets, names};
use crate::grads::Grads;
use crate::linear::{Base, Formula, Input, Saved};
use crate::values::placed;
use cayley::Blocks;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::adapters::oft::{OftConfig, PREFIX};
use tunesmith_config::{Mode, TargetModules, TuningConfig};
use tunesmith_device::{Device, FloatBuffer};
use tunesmith_ops::activation::{self, Activation};
use tunesmith_ops::block_diagonal::{outer, times};
use tunesmith_ops::floats::Floats;
use tunesmith_plan::memory::Footprint;
use tunesmith_plan::memory::footprint::Shape;

/// What all OFT adapters have in common.
pub static ABOUT: About = About {
    mode: Mode::Oft,
    title: "OFT",
    parts: "OFT's rotations",
    section: &OftConfig::section(),
    training: &[],
    starting: &["init_weights"],
    ours: &[],
    peft_type: "OFT",
    prefix: PREFIX,
    fields: r#"{"bias": "none", "coft": false, "eps": 6e-05, "fan_in_fan_out": false, "layers_pattern": null,
        "module_dropout": 0.0}"#,
    // PEFT 0.21 creates the layer that drops blocks, but does not use it.
    indifferent: &["eps", "module_dropout"],
    absent: "{}",
};

impl Method for OftConfig {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn targets(&self) -> Targets {
        Targets {
            section: OftConfig::SECTION,
            target_modules: self.target_modules.clone(),
            exclude_modules: self.exclude_modules.clone(),
            layers_to_transform: self.layers_to_transform.clone(),
            modules_to_save: self.modules_to_save.clone(),
            ..Targets::default()
        }
    }

    fn adapter(&self, site: &Site<'_>) -> Arc<dyn Adapter> {
        let inputs = site.module.in_features;
        let size =
            if self.r > 0 { inputs / divisor(inputs, self.r) } else { divisor(inputs, self.oft_block_size.max(1)) };
        let terms = self.use_cayley_neumann.then_some(self.num_cayley_neumann_terms);
        let blocks = Blocks { size, count: if self.block_share { 1 } else { inputs / size }, terms };
        Arc::new(Rotation { inputs, blocks, moved: !self.init_weights })
    }

    fn list(&self, placements: &[Placement], tuning: &mut TuningConfig) {
        let target_modules = names(placements);
        tuning.oft = Self { target_modules, exclude_modules: None, layers_to_transform: None, ..self.clone() };
    }

    fn write(&self, placements: &[Placement], tuning: &mut TuningConfig) {
        if matches!(self.target_modules, TargetModules::Auto | TargetModules::AllLinear) {
            tuning.oft.target_modules = names(placements);
        }
    }

    fn check(&self, placements: &[Placement]) -> Result<()> {
        if (self.r > 0) == (self.oft_block_size > 0) {
            let (r, size) = (self.r, self.oft_block_size);
            return Err(Error::config(format!(
                "tuning.oft: r = {r} and oft_block_size = {size}, expected one of them"
            ))
            .hint("the other follows from the inputs of a layer: set it to 0"));
        }
        match placements.iter().find(|it| it.tensors().iter().any(|(_, shape)| shape.contains(&0))) {
            Some(it) => Err(Error::config(format!(
                "tuning.oft: blocks of 1 of the {} inputs of {}, which cannot be rotated",
                it.in_features, it.module
            ))
            .hint("choose another oft_block_size, or leave the layer out with exclude_modules")),
            None => Ok(()),
        }
    }
}

/// The number nearest to `wanted` that divides `inputs`, the smaller of two; PEFT's `adjust_oft_parameters`.
fn divisor(inputs: usize, wanted: usize) -> usize {
    if wanted >= inputs {
        return inputs;
    }
    let divides = |number: &usize| inputs.is_multiple_of(*number);
    let (below, above) = ((1..=wanted).rev().find(divides), (wanted..=inputs).find(divides));
    let (below, above) = (below.unwrap_or(1), above.unwrap_or(inputs));
    if wanted - below <= above - wanted { below } else { above }
}

/// Rows of a weight that are merged at once.
const MERGED_ROWS: usize = 512;

/// The rotation of a module's inputs.
#[derive(Debug)]
struct Rotation {
    inputs: usize,
    blocks: Blocks,
    /// Whether the rotation starts at random (`init_weights: false`), and not as the identity.
    moved: bool,
}

impl Adapter for Rotation {
    fn tensors(&self) -> Vec<(&'static str, Vec<usize>)> {
        vec![("oft_R.weight", vec![self.blocks.count, self.blocks.trained()])]
    }

    fn describe(&self) -> String {
        format!("{:?}", self.blocks)
    }

    fn attach(&self, at: &mut dyn Attach) -> Result<Box<dyn Formula>> {
        let count = self.blocks.count * self.blocks.trained();
        let name = at.tensor_name(0);
        let start = if self.moved { at.stream(&name).normals(0.1, count) } else { vec![0.0; count] };
        Ok(Box::new(Rotated { weight: at.push(&start)?, blocks: self.blocks, known: Mutex::default() }))
    }

    fn merge(&self, tensors: &[&[f32]], part: &Part, values: &mut [f32]) {
        let (&[weight, ..], false) = (tensors, part.bias) else { return };
        let (made, pool) = (self.blocks.make(weight), activation::Pool::new());
        // Rows of the weight in the place of tokens, some at a time.
        for rows in values.chunks_mut(MERGED_ROWS * self.inputs) {
            let old = Activation::from_rows(&pool, rows, self.inputs);
            let mut new = old.like();
            times(self.blocks.diagonal((&made).into()), &old, true, &mut new, false);
            rows.copy_from_slice(&new.to_rows());
        }
    }

    fn footprint(&self) -> Arc<dyn Footprint> {
        let Blocks { size, count, .. } = self.blocks;
        Arc::new(Memory { size: size as u64, matrices: (count * size * size) as u64 })
    }
}

/// What a rotation needs: `size` multiplications for each input of a token, and memory for the matrices.
#[derive(Debug)]
struct Memory {
    size: u64,
    matrices: u64,
}

impl Footprint for Memory {
    fn numbers(&self, shape: &Shape) -> u64 {
        shape.inputs * self.size
    }

    /// The matrices, and the trained values that they were made of.
    fn constants(&self, _shape: &Shape) -> u64 {
        6 * self.matrices
    }
}

/// The OFT adapter of a module in a pass, with the place of its trained values.
#[derive(Debug)]
struct Rotated {
    weight: Range<usize>,
    blocks: Blocks,
    /// The matrices of the last call, used again as long as the trained values are the same.
    known: Mutex<Option<Arc<Known>>>,
}

/// Matrices `[blocks, size, size]`, and the trained values on the host that they were made of.
#[derive(Debug)]
struct Known {
    weight: Vec<f32>,
    made: FloatBuffer,
}

impl Rotated {
    /// The matrices `[blocks, size, size]` on the device of `weight`, made once for all passes of a step. They are made
    /// on the host. So each call waits until the trained values have come from a GPU, to make the matrices or to see
    /// that the values are the same.
    fn matrices(&self, weight: Floats<'_>) -> Arc<Known> {
        let device = weight.device();
        if device == Device::Meta {
            let len = self.blocks.count * self.blocks.size * self.blocks.size;
            return Arc::new(Known { weight: Vec::new(), made: FloatBuffer::zeros(device, len) });
        }
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().as_ref().filter(|known| weight.equal(&known.weight)) {
            return Arc::clone(known);
        }
        // The lock is not held here: while a thread waits in a parallel loop, it may take up other work that calls this
        // function.
        let weight = weight.read();
        let made = placed(self.blocks.make(&weight), device);
        let known = Arc::new(Known { weight, made });
        *lock() = Some(Arc::clone(&known));
        known
    }

    /// The gradients of the matrices, given the inputs `x` and the gradient `d` of the rotated inputs. They are summed
    /// where all blocks share one matrix (`block_share`).
    fn d_matrices(&self, x: &Activation, d: &Activation) -> Vec<f32> {
        let (length, each) = (self.blocks.size * self.blocks.size, outer(self.blocks.size, x, d));
        if self.blocks.count > 1 {
            return each;
        }
        let mut sum = vec![0.0; length];
        for one in each.chunks_exact(length) {
            sum.iter_mut().zip(one).for_each(|(sum, one)| *sum += one);
        }
        sum
    }
}

impl Formula for Rotated {
    fn forward(&self, base: Base<'_>, x: &Activation, residual: Option<&Activation>) -> (Activation, Option<Saved>) {
        let matrices = self.matrices(base.pass.values.at(&self.weight));
        let mut rotated = x.like();
        times(self.blocks.diagonal(matrices.made.view()), x, false, &mut rotated, false);
        (base.forward(&rotated, residual), None)
    }

    fn backward(
        &self,
        base: Base<'_>,
        input: &Input<'_>,
        _saved: Option<&Saved>,
        dy: &Activation,
        dx: Option<(&mut Activation, bool)>,
        grads: &mut Grads<'_>,
    ) {
        let weight = base.pass.values.at(&self.weight);
        let matrices = self.matrices(weight);
        let rotated = base.linear.weight.trained().map(|_| {
            let mut rotated = input.x.like();
            times(self.blocks.diagonal(matrices.made.view()), input.x, false, &mut rotated, false);
            rotated
        });
        let mut d_rotated = input.x.like();
        base.backward(&Input::new(rotated.as_ref().unwrap_or(input.x)), dy, Some((&mut d_rotated, false)), grads);
        if weight.device() != Device::Meta {
            self.add_gradient(&matrices.weight, input.x, &d_rotated, grads);
        }
        if let Some((dx, add)) = dx {
            times(self.blocks.diagonal(matrices.made.view()), &d_rotated, true, dx, add);
        }
    }
}

impl Rotated {
    /// Adds the gradient of the trained values, given the inputs and the gradient of the rotated ones.
    fn add_gradient(&self, weight: &[f32], x: &Activation, d_rotated: &Activation, grads: &mut Grads<'_>) {
        let d_matrices = self.d_matrices(x, d_rotated);
        let (trained, length) = (self.blocks.trained(), self.blocks.size * self.blocks.size);
        let blocks = weight.par_chunks_exact(trained).zip(d_matrices.par_chunks_exact(length));
        let each: Vec<Vec<f32>> = blocks.map(|(weight, d)| self.blocks.gradient(weight, d)).collect();
        grads.at(&self.weight).add(&each.concat());
    }
}

#[cfg(test)]
mod tests {
    use super::cayley::{add, identity, inverse, product};
    use super::*;
    use crate::linear::Linear;
    use crate::pass::Pass;
    use crate::weight::Weight;
    use tunesmith_ops::testing::{check_gradient, numbers};

    const TOKENS: usize = 21;
    const IN: usize = 12;
    const OUT: usize = 7;
    const SIZE: usize = 4;

    /// `x R W^T` times `seed`, summed, with R in f64 from its definition.
    fn formula(blocks: Blocks, [x, w, weight, seed]: [&[f64]; 4]) -> f64 {
        let narrow: Vec<f32> = weight.iter().map(|&value| value as f32).collect();
        // The trained values in f64: a difference of 1e-4 of them must be seen.
        let exact = |block: usize| {
            let at = block.min(blocks.count - 1) * blocks.trained();
            let mut skew = blocks.skew(&narrow[at..]);
            let pairs = (0..SIZE).flat_map(|row| (row + 1..SIZE).map(move |col| (row, col)));
            for ((row, col), value) in pairs.zip(&weight[at..]) {
                (skew[row * SIZE + col], skew[col * SIZE + row]) = (*value, -value);
            }
            let one = identity(SIZE);
            if blocks.terms.is_none() {
                return product(&add(&one, -1.0, &skew), &inverse(add(&one, 1.0, &skew), SIZE), SIZE);
            }
            let two = product(&skew, &skew, SIZE);
            let (three, four) = (product(&two, &skew, SIZE), product(&two, &two, SIZE));
            add(&add(&add(&add(&one, 2.0, &skew), 2.0, &two), 2.0, &three), 1.0, &four)
        };
        let mut sum = 0.0;
        for token in 0..TOKENS {
            let turned: Vec<f64> = (0..IN)
                .map(|at| {
                    let (block, col) = (at / SIZE, at % SIZE);
                    let matrix = exact(block);
                    (0..SIZE).map(|k| x[token * IN + block * SIZE + k] * matrix[k * SIZE + col]).sum()
                })
                .collect();
            for out in 0..OUT {
                let y: f64 = (0..IN).map(|at| w[out * IN + at] * turned[at]).sum();
                sum += y * seed[token * OUT + out];
            }
        }
        sum
    }

    #[test]
    fn rotations_equal_their_formula_and_their_finite_differences() {
        for (terms, count) in [(Some(5), 3), (None, 3), (Some(5), 1)] {
            let (pool, blocks) = (activation::Pool::new(), Blocks { size: SIZE, count, terms });
            let (x, w, seed) = (numbers(1, TOKENS * IN), numbers(2, OUT * IN), numbers(3, TOKENS * OUT));
            let weight: Vec<f32> = numbers(4, count * blocks.trained()).iter().map(|value| 0.3 * value).collect();
            let linear = Linear {
                weight: Weight::frozen(w.clone(), Device::Cpu),
                bias: None,
                out_features: OUT,
                in_features: IN,
                adapter: Some(Box::new(Rotated { weight: 0..weight.len(), blocks, known: Mutex::default() })),
            };
            let pass = Pass { values: (&weight).into(), pool: &pool, balance: None, dropout: None };
            let (xa, dy) = (Activation::from_rows(&pool, &x, IN), Activation::from_rows(&pool, &seed, OUT));
            let (y, kept) = linear.forward(&pass, &xa, None);
            let (mut grads, mut dx) = (vec![0.0; weight.len()], pool.act(TOKENS, IN));
            let to = Some((&mut dx, false));
            linear.backward(&pass, &Input::new(&xa), kept.as_ref(), &dy, to, &mut Grads::whole(&mut grads));
            let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|&value| f64::from(value)).collect() };
            let (x64, w64, weight64, seed64) = (wide(&x), wide(&w), wide(&weight), wide(&seed));
            let got: f64 = y.to_rows().iter().zip(&seed64).map(|(y, seed)| f64::from(*y) * seed).sum();
            let wanted = formula(blocks, [&x64, &w64, &weight64, &seed64]);
            assert!((got - wanted).abs() < 1e-4, "{blocks:?}: {got} != {wanted}");
            check_gradient("x", &x, &dx.to_rows(), |x| formula(blocks, [x, &w64, &weight64, &seed64]));
            check_gradient("R", &weight, &grads, |weight| formula(blocks, [&x64, &w64, weight, &seed64]));
            // Merged into the weight it does the same.
            let mut merged = w.clone();
            let rotation = Rotation { inputs: IN, blocks, moved: false };
            rotation.merge(&[&weight], &Part { bias: false, expert: 0, first: 0, step: 1 }, &mut merged);
            let still = vec![0.0f64; weight.len()];
            let after = formula(blocks, [&x64, &wide(&merged), &still, &seed64]);
            assert!((after - wanted).abs() < 1e-4, "{blocks:?}: {after} != {wanted}");
        }
    }

    #[test]
    fn sizes_that_do_not_divide_give_way_to_the_nearest_that_do() {
        for (inputs, wanted, found) in
            [(576, 32, 32), (48, 32, 24), (96, 40, 32), (13, 4, 1), (8, 32, 8), (100, 22, 20)]
        {
            assert_eq!(divisor(inputs, wanted), found, "{inputs} {wanted}");
        }
    }
}
