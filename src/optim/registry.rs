//! Which optimizer a configuration names, with its arguments: the one place where optimizers are registered.
use super::adafactor::Adafactor;
use super::adamw::{AdamW, Betas};
use super::adamw_8bit::AdamW8bit;
use super::lion::Lion;
use super::muon::{AdjustLr, Muon};
use super::optimizer::Rule;
use super::schedule_free::ScheduleFree;
use super::sgd::Sgd;
use crate::config::arguments::Reader;
use crate::config::{Optim, TrainConfig};
use crate::error::{Error, Result};

/// The rule of `train.optim` with `train.optim_args`.
///
/// # Errors
/// [`crate::Kind::Config`]: an argument that the optimizer does not have, or a value that it cannot have.
pub fn rule(train: &TrainConfig) -> Result<Box<dyn Rule>> {
    let owner = format!("optim = {}", train.optim);
    let mut args = train.optim_args.reader("train.optim_args", &owner);
    let rule: Box<dyn Rule> = match train.optim {
        Optim::AdamW => Box::new(AdamW(betas(train))),
        Optim::Sgd => Box::new(sgd(train, &mut args)?),
        Optim::Adafactor => Box::new(adafactor(train, &mut args)?),
        Optim::Lion => Box::new(Lion(betas(train))),
        Optim::AdamW8bit => Box::new(AdamW8bit::new(betas(train))),
        Optim::Muon => Box::new(muon(train, &mut args)?),
        Optim::ScheduleFreeAdamW => Box::new(schedule_free(train, &mut args)?),
    };
    args.finish()?;
    Ok(rule)
}

fn betas(train: &TrainConfig) -> Betas {
    Betas {
        beta1: train.adam_beta1,
        beta2: train.adam_beta2,
        epsilon: train.adam_epsilon,
        weight_decay: train.weight_decay,
    }
}

/// A share from 0 to below 1.
fn share(args: &mut Reader<'_>, name: &'static str) -> Result<Option<f64>> {
    args.number(name, "a number from 0 to below 1", |number| (0.0..1.0).contains(&number))
}

fn sgd(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Sgd> {
    let rule = Sgd {
        momentum: share(args, "momentum")?.unwrap_or(0.0),
        dampening: args.number("dampening", "a number from 0 to 1", |it| (0.0..=1.0).contains(&it))?.unwrap_or(0.0),
        nesterov: args.flag("nesterov")?.unwrap_or(false),
        weight_decay: train.weight_decay,
    };
    if rule.nesterov && (rule.momentum == 0.0 || rule.dampening != 0.0) {
        return Err(Error::config("train.optim_args: nesterov needs a momentum and no dampening")
            .hint("set momentum=0.9,nesterov=true"));
    }
    Ok(rule)
}

fn adafactor(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Adafactor> {
    Ok(Adafactor {
        decay_rate: args.number("decay_rate", "a number below 0", |number| number < 0.0)?.unwrap_or(-0.8),
        clip_threshold: args.number("clip_threshold", "a number above 0", |number| number > 0.0)?.unwrap_or(1.0),
        beta1: share(args, "beta1")?,
        scale_parameter: args.flag("scale_parameter")?.unwrap_or(false),
        weight_decay: train.weight_decay,
    })
}

fn muon(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Muon> {
    let ns_steps =
        args.number("ns_steps", "an integer from 1 to 99", |it| it.fract() == 0.0 && (1.0..100.0).contains(&it))?;
    Ok(Muon {
        momentum: share(args, "momentum")?.unwrap_or(0.95),
        nesterov: args.flag("nesterov")?.unwrap_or(true),
        ns_steps: ns_steps.unwrap_or(5.0) as usize,
        adjust_lr: args.word(
            "adjust_lr_fn",
            &[
                ("original", AdjustLr::Original),
                ("match_rms_adamw", AdjustLr::MatchRmsAdamw),
                ("spectral_unclamped", AdjustLr::SpectralUnclamped),
            ],
        )?,
        rest: betas(train),
    })
}

fn schedule_free(train: &TrainConfig, args: &mut Reader<'_>) -> Result<ScheduleFree> {
    if train.adam_beta1 == 0.0 {
        return Err(Error::config("train.adam_beta1 = 0 contradicts train.optim = schedule_free_adamw")
            .hint("it says how the average and the steps are mixed; the usual value is 0.9"));
    }
    let at_least_0 = |number: f64| number >= 0.0;
    let power = args.number("r", "a number of at least 0", at_least_0)?.unwrap_or(0.0);
    let rate_power = args.number("weight_lr_power", "a number of at least 0", at_least_0)?.unwrap_or(2.0);
    Ok(ScheduleFree::new(betas(train), power, rate_power))
}
