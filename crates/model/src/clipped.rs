//! A linear module that clips its input and its output to bounds that the checkpoint has (Gemma 4's image encoder). An
//! adapter, if there is one, is within these bounds: `y = clamp(adapted(clamp(x)))`. Transformers,
//! `Gemma4ClippableLinear`.
use super::grads::Grads;
use super::linear::{Base, Formula, Input, Linear, Saved};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::{clamp, elementwise};

/// The bounds of a module around its adapter. It takes the place of an adapter in the module.
#[derive(Debug)]
struct Clipped {
    /// The least and the largest input.
    input: [f32; 2],
    /// The least and the largest output.
    output: [f32; 2],
    adapter: Option<Box<dyn Formula>>,
    /// Whether the module's own weight or bias is trained, or its adapter.
    trains: bool,
}

/// `linear` within these bounds: those of its input, then those of its output.
pub fn clipped(linear: Linear, [least, most, least_output, most_output]: [f32; 4]) -> Linear {
    let trains = linear.trains();
    let (input, output) = ([least, most], [least_output, most_output]);
    let bounds = Clipped { input, output, adapter: linear.adapter, trains };
    Linear { adapter: Some(Box::new(bounds)), ..linear }
}

impl Clipped {
    /// The output before it is clipped, given the clipped input `held`.
    fn inner(&self, base: Base<'_>, held: &Activation) -> (Activation, Option<Saved>) {
        match &self.adapter {
            Some(adapter) => adapter.forward(base, held, None),
            None => (base.forward(held, None), None),
        }
    }
}

impl Formula for Clipped {
    fn trains(&self) -> bool {
        self.trains
    }

    fn forward(&self, base: Base<'_>, x: &Activation, residual: Option<&Activation>) -> (Activation, Option<Saved>) {
        let held = clamp::forward(x, self.input);
        let (y, saved) = self.inner(base, &held);
        drop(held);
        let mut y = clamp::forward(&y, self.output);
        if let Some(residual) = residual {
            elementwise::add(&mut y, residual);
        }
        (y, saved)
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
        let held = clamp::forward(input.x, self.input);
        // The output is computed again: it is not kept.
        let mut d = dy.copy();
        clamp::backward(&self.inner(base, &held).0, self.output, &mut d);
        let held = Input::new(&held);
        let mut own = dx.is_some().then(|| input.x.like());
        let to = own.as_mut().map(|own| (own, false));
        match &self.adapter {
            Some(adapter) => adapter.backward(base, &held, saved, &d, to, grads),
            None => base.backward(&held, &d, to, grads),
        }
        let (Some((dx, add)), Some(mut own)) = (dx, own) else { return };
        clamp::backward(input.x, self.input, &mut own);
        if add {
            elementwise::add(dx, &own);
        } else {
            elementwise::assign(dx, &own);
        }
    }
}
