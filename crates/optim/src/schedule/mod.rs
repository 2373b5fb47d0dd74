//! Learning rates over optimizer steps, equal to the schedules of `transformers.optimization`. Each form of schedule
//! has a file, which reads its arguments too, and a line in [`tunesmith_base::registry`].
//!
//! A form gives a factor of the highest rate for each step, counted from 0. In the documentation of the forms, `p` is
//! the completed share of the steps after the warm-up: `(step - warmup) / (total - warmup)`.
use std::f64::consts::PI;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arguments::Reader;
use tunesmith_config::{LrScheduler, TrainConfig};

/// The learning rate of every step of a run.
#[derive(Debug)]
pub struct Schedule {
    form: Box<dyn ScheduleForm>,
    run: ScheduleSteps,
}

/// A form's view of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ScheduleSteps {
    /// The highest learning rate, `train.learning_rate`.
    pub peak: f64,
    /// Warm-up: steps over which the rate rises, from 0 unless the form says otherwise.
    pub warmup: u64,
    /// Steps of the run, warm-up included.
    pub total: u64,
    /// Whether the optimizer averages weights instead of following a schedule (`schedule_free_adamw`).
    pub averages: bool,
}

impl ScheduleSteps {
    /// Steps after the warm-up, at least 1.
    fn span(&self) -> f64 {
        (self.total as f64 - self.warmup as f64).max(1.0)
    }

    /// `p`: the share of these steps before a step.
    fn progress(&self, step: u64) -> f64 {
        (step as f64 - self.warmup as f64) / self.span()
    }
}

/// A form of schedule. Its arguments are named as in Transformers, and its rates are factors of the highest one.
pub(crate) trait ScheduleForm: std::fmt::Debug + Send + Sync {
    /// Reads the arguments of `train.lr_scheduler_kwargs`. A form may change `run`: `constant` has no warm-up.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: a value that an argument cannot have, or one that is needed.
    fn of(args: &mut Reader<'_>, run: &mut ScheduleSteps) -> Result<Self>
    where
        Self: Sized;

    /// The factor in a step before `run.warmup`.
    fn rising(&self, step: u64, run: &ScheduleSteps) -> f64 {
        step as f64 / run.warmup as f64
    }

    /// The factor in a step from `run.warmup` on.
    fn after(&self, step: u64, run: &ScheduleSteps) -> f64;
}

macro_rules! forms {
    ($($name:ident = $module:ident, $word:literal, $doc:literal;)+) => {
        $( mod $module; )+

        fn of(form: LrScheduler, args: &mut Reader<'_>, run: &mut ScheduleSteps) -> Result<Box<dyn ScheduleForm>> {
            Ok(match form { $( LrScheduler::$name => Box::new($module::$name::of(args, run)?), )+ })
        }
    };
}
tunesmith_base::registry::schedules!(forms);

impl Schedule {
    /// A schedule with the default arguments of its form.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the form has an argument without a default.
    pub fn new(form: LrScheduler, peak: f64, warmup: u64, total: u64) -> Result<Self> {
        let train = TrainConfig { lr_scheduler_type: form, learning_rate: peak, ..TrainConfig::default() };
        Self::of(&train, warmup, total)
    }

    /// The schedule of a configuration, over `total` steps of which the first `warmup` rise.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: an argument that the form does not have, one it needs, or a value it cannot
    /// have.
    pub fn of(train: &TrainConfig, warmup: u64, total: u64) -> Result<Self> {
        let owner = format!("lr_scheduler_type = {}", train.lr_scheduler_type);
        let mut args = train.lr_scheduler_kwargs.reader("train.lr_scheduler_kwargs", &owner);
        let averages = train.optim.averages();
        let mut run = ScheduleSteps { peak: train.learning_rate, warmup, total, averages };
        let form = of(train.lr_scheduler_type, &mut args, &mut run)?;
        args.finish()?;
        Ok(Self { form, run })
    }

    /// The learning rate of an optimizer step; steps count from 0.
    pub fn lr(&self, step: u64) -> f64 {
        let rising = step < self.run.warmup;
        self.run.peak * if rising { self.form.rising(step, &self.run) } else { self.form.after(step, &self.run) }
    }
}

/// `factor`, 0 to 1, on a scale from `floor` to 1.
fn above(floor: f64, factor: f64) -> f64 {
    (factor * (1.0 - floor) + floor).max(0.0)
}

/// `cycles` periods of a cosine from 1 down to 0 and back, at `progress`: 0.5 periods fall once.
fn wave(cycles: f64, progress: f64) -> f64 {
    0.5 * (1.0 + (PI * cycles * 2.0 * progress).cos())
}

/// Reads the argument `num_cycles`, 0.5 unless given.
fn cycles(args: &mut Reader<'_>) -> Result<f64> {
    Ok(args.number("num_cycles", "a number above 0", |number| number > 0.0)?.unwrap_or(0.5))
}

/// The argument `name`, a number from 0 to 1.
fn share(args: &mut Reader<'_>, name: &'static str) -> Result<Option<f64>> {
    args.number(name, "a number from 0 to 1", |number| (0.0..=1.0).contains(&number))
}

/// `min_lr` or `min_lr_rate`, as a share of the peak, where one is given.
fn lowest(args: &mut Reader<'_>, peak: f64) -> Result<Option<f64>> {
    let rate = args.number("min_lr", "a number of at least 0", |number| number >= 0.0)?;
    match (rate, share(args, "min_lr_rate")?) {
        (None, share) => Ok(share),
        (Some(rate), None) if rate <= peak && peak > 0.0 => Ok(Some(rate / peak)),
        (Some(rate), None) => Err(Error::config(format!(
            "train.lr_scheduler_kwargs: min_lr = {rate} is not below train.learning_rate = {peak}"
        ))
        .hint("the schedule falls to it")),
        (Some(_), Some(_)) => Err(one_lowest()),
    }
}

fn one_lowest() -> Error {
    Error::config("train.lr_scheduler_kwargs: expected one of min_lr and min_lr_rate")
        .hint("for example lr_scheduler_kwargs: {min_lr_rate: 0.1}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_start_peak_and_end_as_in_transformers() {
        let at = |form, step| Schedule::new(form, 1.0, 4, 20).unwrap().lr(step);
        for form in [LrScheduler::Linear, LrScheduler::Cosine, LrScheduler::ConstantWithWarmup] {
            assert_eq!((at(form, 0), at(form, 1), at(form, 4)), (0.0, 0.25, 1.0));
        }
        assert_eq!((at(LrScheduler::Constant, 0), at(LrScheduler::ConstantWithWarmup, 19)), (1.0, 1.0));
        assert_eq!((at(LrScheduler::Linear, 12), at(LrScheduler::Linear, 20)), (0.5, 0.0));
        assert!((at(LrScheduler::Cosine, 12) - 0.5).abs() < 1e-12 && at(LrScheduler::Cosine, 20) < 1e-12);
    }

    #[test]
    fn arguments_that_a_form_needs_or_lacks_are_refused() {
        let refused = |form, arguments: &str| {
            let node = tunesmith_config::Node::Str(arguments.into());
            let lr_scheduler_kwargs = tunesmith_config::ConfigValue::from_node(&node).unwrap();
            let train = TrainConfig { lr_scheduler_type: form, lr_scheduler_kwargs, ..TrainConfig::default() };
            Schedule::of(&train, 4, 20).unwrap_err().to_string()
        };
        assert!(refused(LrScheduler::Linear, "num_cycles=2").contains("num_cycles"));
        assert!(refused(LrScheduler::CosineWithRestarts, "num_cycle=2").contains("did you mean num_cycles"));
        assert!(refused(LrScheduler::WarmupStableDecay, "decay_type=linear").contains("num_decay_steps"));
        assert!(refused(LrScheduler::WarmupStableDecay, "num_decay_steps=17").contains("20 steps"));
        assert!(refused(LrScheduler::CosineWithMinLr, "num_cycles=1").contains("min_lr"));
        assert!(refused(LrScheduler::Polynomial, "lr_end=1").contains("not below"));
    }
}
