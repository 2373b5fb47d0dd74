//! Which optimizer a configuration names, with its arguments: the one place where optimizers are registered. A new one is a
//! file with its [`Rule`] and its arguments, its word in `config/choice.rs`, and a line here.
use super::adafactor::Adafactor;
use super::adamw::AdamW;
use super::adamw_8bit::AdamW8bit;
use super::lion::Lion;
use super::muon::Muon;
use super::optimizer::Rule;
use super::schedule_free::ScheduleFree;
use super::sgd::Sgd;
use crate::config::arguments::Reader;
use crate::config::{Optim, TrainConfig};
use crate::error::Result;

/// The rule of `train.optim` with `train.optim_args`.
///
/// # Errors
/// [`crate::Kind::Config`]: an argument that the optimizer does not have, or a value that it cannot have.
pub fn rule(train: &TrainConfig) -> Result<Box<dyn Rule>> {
    let owner = format!("optim = {}", train.optim);
    let mut args = train.optim_args.reader("train.optim_args", &owner);
    let rule: Box<dyn Rule> = match train.optim {
        Optim::AdamW => Box::new(AdamW(train.into())),
        Optim::Sgd => Box::new(Sgd::of(train, &mut args)?),
        Optim::Adafactor => Box::new(Adafactor::of(train, &mut args)?),
        Optim::Lion => Box::new(Lion(train.into())),
        Optim::AdamW8bit => Box::new(AdamW8bit::new(train.into())),
        Optim::Muon => Box::new(Muon::of(train, &mut args)?),
        Optim::ScheduleFreeAdamW => Box::new(ScheduleFree::of(train, &mut args)?),
    };
    args.finish()?;
    Ok(rule)
}

/// A share from 0 to below 1.
pub(super) fn share(args: &mut Reader<'_>, name: &'static str) -> Result<Option<f64>> {
    args.number(name, "a number from 0 to below 1", |number| (0.0..1.0).contains(&number))
}
