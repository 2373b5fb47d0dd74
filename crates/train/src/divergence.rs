//! Divergence: once loss or gradients are not finite, the state is not saved any more. So earlier checkpoints stay usable,
//! and no checkpoint ever holds a NaN or an infinity.
use rayon::prelude::*;

use super::session::Session;
use tunesmith_base::error::{Error, Result};
use tunesmith_model::weights::first_non_finite;
use tunesmith_optim::{LossScaler, State};

/// Values that a thread checks in one piece.
const PIECE: usize = 1 << 16;

fn is_finite(values: &[f32]) -> bool {
    values.par_chunks(PIECE).all(|piece| first_non_finite(piece).is_none())
}

impl Session<'_> {
    /// Whether the last step was skipped because loss or gradients were NaN or infinite. Overflows that lower the loss scale
    /// count only if there are more of them in a row than its hysteresis allows, and not before the first update.
    pub fn is_diverging(&self) -> bool {
        let tolerated = self.optimizer.scaler.as_ref().map_or(0, LossScaler::hysteresis).max(1);
        self.state.nonfinite_in_a_row > 0 || (self.overflows_in_a_row > tolerated && self.optimizer.step > 0)
    }

    /// The error of a run that ends while it diverges. `stop` is the signal that ended it, if one did.
    pub fn diverged(&mut self, stop: Option<&str>) -> Error {
        let (count, step) = (self.state.nonfinite_in_a_row.max(self.overflows_in_a_row), self.state.step);
        let stopped = stop.map_or_else(String::new, |why| format!("{why}: "));
        let steps = if count == 1 { "1 step".to_owned() } else { format!("{count} steps in a row") };
        let error =
            Error::numeric(format!("{stopped}loss or gradients were NaN or infinite in {steps}, up to step {step}"))
                .hint("lower train.learning_rate, lengthen the warm-up, or look at the data with `tunesmith data`");
        self.end_on_all_ranks(error)
    }

    /// Refuses to save if weights, their moving average, or the optimizer's state are NaN or infinite. All ranks call this,
    /// each for the values it holds, and all get the same result.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Numeric`], naming what is not finite; [`tunesmith_base::Kind::Peer`].
    pub fn refuse_non_finite(&mut self) -> Result<()> {
        let found = self.comm.collect(&[self.non_finite()])?;
        let Some(code) = found.into_iter().find(|&code| code != FINITE) else { return Ok(()) };
        let step = self.state.step;
        let what = match code {
            AVERAGES => "the moving average of the weights is".to_owned(),
            OPTIMIZER => "the optimizer's state is".to_owned(),
            index => {
                let spec = self.model.params.specs.get(index as usize);
                format!("the weights ({}) are", spec.map_or("", |spec| &spec.name))
            }
        };
        let error = Error::numeric(format!("{what} NaN or infinite after step {step}: nothing is saved"))
            .hint("lower train.learning_rate, lengthen the warm-up, or set train.max_grad_norm");
        Err(self.end_on_all_ranks(error))
    }

    /// The first values of this rank that are not finite: the index of a trained tensor, [`AVERAGES`], [`OPTIMIZER`], or
    /// [`FINITE`] if all are finite.
    fn non_finite(&self) -> u64 {
        let values = self.model.params.values().to_host();
        if !is_finite(&values) {
            let first = first_non_finite(&values).unwrap_or_default();
            let mut before = 0;
            let holds = |range: &std::ops::Range<usize>| {
                before += range.len();
                first < before
            };
            let range = self.model.params.ranges().into_iter().find(holds).unwrap_or_default();
            let place = range.end + first - before;
            let index = self.model.params.specs.iter().position(|spec| spec.range().contains(&place));
            return index.unwrap_or_default() as u64;
        }
        if self.ema.as_ref().is_some_and(|ema| !is_finite(&ema.values.to_host())) {
            return AVERAGES;
        }
        let state = self.optimizer.tensors();
        let of_state = |state: &State| matches!(state, State::F32(values) if !is_finite(&values.to_host()));
        if state.iter().any(|(_, _, state)| of_state(state)) || self.optimizer.scalars().iter().any(|x| !x.is_finite())
        {
            return OPTIMIZER;
        }
        FINITE
    }
}

// Codes of `non_finite`. Any smaller number is the index of a trained tensor.
const FINITE: u64 = u64::MAX;
const AVERAGES: u64 = u64::MAX - 1;
const OPTIMIZER: u64 = u64::MAX - 2;
