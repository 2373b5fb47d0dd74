//! Optimizers as pure updates of tensors in a device's memory, learning-rate schedules, gradient clipping, loss
//! scaling, and an exponential moving average of the weights.
//!
//! To add an optimizer, write a file with a [`UpdateRule`], which also reads its arguments, and a line in
//! [`tunesmith_base::registry`]. To add a schedule, write a file with a `ScheduleForm` and a line there.
pub mod clip;
pub mod ema;
pub mod loss_scale;
pub mod optimizer;
pub mod plan;
pub mod rates;
pub mod schedule;
mod state;

use tunesmith_base::error::Result;
use tunesmith_config::arguments::Reader;
use tunesmith_config::{Optim, TrainConfig};

pub use adamw::{AdamW, Betas};
pub use ema::Ema;
pub use loss_scale::LossScaler;
pub use optimizer::{Gradients, Optimizer, Slot, State, StateTensor, UpdateRule};
pub use plan::OptimizerPlan;
pub use schedule::Schedule;

macro_rules! rules {
    ($($name:ident = $module:ident, $word:literal $(| $alias:literal)*, $doc:literal $(, $trait:ident)?;)+) => {
        $( pub mod $module; )+

        fn of(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Box<dyn UpdateRule>> {
            Ok(match train.optim { $( Optim::$name => Box::new($module::$name::of(train, args)?), )+ })
        }
    };
}
tunesmith_base::registry::optimizers!(rules);

/// The rule of `train.optim` with `train.optim_args`.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: an argument that the optimizer does not have, or a value that it cannot have.
pub fn rule(train: &TrainConfig) -> Result<Box<dyn UpdateRule>> {
    let owner = format!("optim = {}", train.optim);
    let mut args = train.optim_args.reader("train.optim_args", &owner);
    let rule = of(train, &mut args)?;
    args.finish()?;
    Ok(rule)
}

/// The argument `name`, a number from 0 to below 1, such as the decay of a moment.
fn share(args: &mut Reader<'_>, name: &'static str) -> Result<Option<f64>> {
    args.number(name, "a number from 0 to below 1", |number| (0.0..1.0).contains(&number))
}
