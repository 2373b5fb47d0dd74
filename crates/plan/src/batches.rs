//! Batch arithmetic: from rows to micro-batches, optimizer steps and the whole run, as Hugging Face's Trainer counts
//! them. The table is printed before step 1, because a wrong effective batch or number of steps is expensive and is
//! noticed late.
//!
//! ```text
//! effective batch         = batch_size grad_accum world
//! micro-batches per epoch = ceil(rows / (batch_size world))
//! steps per epoch         = ceil(micro-batches per epoch / grad_accum)
//! steps in all            = max_steps, or ceil(epochs steps per epoch)
//! warm-up steps           = warmup_steps, or ceil(warmup_ratio steps in all)
//! ```
use super::{grouped, table};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;

/// What the arithmetic starts from: sizes of the data set, and settings of `train`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    /// Training rows of one epoch; with packing, packed rows. All ranks together.
    pub rows: u64,
    /// Tokens of one epoch, all ranks together.
    pub tokens: u64,
    /// Tokens of one epoch that carry a loss, all ranks together.
    pub label_tokens: u64,
    /// Rows of a micro-batch on one rank.
    pub batch_size: u64,
    /// Micro-batches of an optimizer step.
    pub grad_accum: u64,
    /// How many ranks train together.
    pub world: u64,
    /// Passes over the data; may be a fraction.
    pub epochs: f64,
    /// Optimizer steps of the run; used instead of `epochs` if it is above 0.
    pub max_steps: i64,
    /// Warm-up steps; used instead of `warmup_ratio` if it is above 0.
    pub warmup_steps: u64,
    /// Warm-up as a share of all steps.
    pub warmup_ratio: f64,
}

/// The numbers of a run's schedule, derived from a [`Request`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Batches {
    /// What the numbers were derived from.
    pub request: Request,
    /// `batch_size * grad_accum * world`: rows of a full optimizer step.
    pub effective_batch: u64,
    /// Micro-batches of one epoch on one rank; the last one may have fewer rows.
    pub micro_batches_per_epoch: u64,
    /// Optimizer steps of one epoch; the last one may have fewer micro-batches.
    pub steps_per_epoch: u64,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// Steps in which the learning rate rises from 0.
    pub warmup_steps: u64,
}

impl Request {
    /// Warm-up steps of a run of `total_steps`.
    fn warmup(&self, total_steps: u64) -> u64 {
        match self.warmup_steps {
            0 => (self.warmup_ratio * total_steps as f64).ceil() as u64,
            steps => steps,
        }
    }
}

impl Batches {
    /// Warm-up steps that a run of `total_steps` would have with the same settings.
    pub fn warmup_of(&self, total_steps: u64) -> u64 {
        self.request.warmup(total_steps)
    }

    /// Derives the numbers as Hugging Face's Trainer does: partial batches at the end of an epoch count as steps, and
    /// `epochs` and the warm-up ratio are rounded up to whole steps.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: there are no rows. [`tunesmith_base::Kind::Config`]: the run would have no
    /// steps.
    pub fn new(request: Request) -> Result<Self> {
        let Request { rows, batch_size, grad_accum, world, .. } = request;
        if rows == 0 {
            return Err(Error::data("the training set has no rows")
                .hint("`tunesmith data CONFIG` shows what each file yields and what was dropped"));
        }
        let (batch_size, grad_accum, world) = (batch_size.max(1), grad_accum.max(1), world.max(1));
        let micro_batches_per_epoch = rows.div_ceil(batch_size * world);
        let steps_per_epoch = micro_batches_per_epoch.div_ceil(grad_accum);
        let total_steps = match u64::try_from(request.max_steps) {
            Ok(steps) if steps > 0 => steps,
            _ => (request.epochs * steps_per_epoch as f64).ceil() as u64,
        };
        if total_steps == 0 {
            return Err(Error::config(format!("train.num_train_epochs = {} makes a run of no steps", request.epochs))
                .hint("set num_train_epochs above 0, or max_steps"));
        }
        let warmup_steps = request.warmup(total_steps);
        let effective_batch = batch_size * grad_accum * world;
        Ok(Self { request, effective_batch, micro_batches_per_epoch, steps_per_epoch, total_steps, warmup_steps })
    }

    /// How many epochs the run covers. This may be a fraction, or more than was asked for.
    pub fn epochs(&self) -> f64 {
        self.total_steps as f64 / self.steps_per_epoch as f64
    }

    /// Whether `step`, counted from 1, is the last of an epoch.
    pub fn ends_epoch(&self, step: u64) -> bool {
        step.is_multiple_of(self.steps_per_epoch)
    }

    /// The rows of the table shown before step 1.
    pub fn rows(&self) -> Vec<(String, String)> {
        let Request { rows, tokens, label_tokens, batch_size, grad_accum, world, .. } = self.request;
        let share = 100.0 * label_tokens as f64 / tokens.max(1) as f64;
        let per_step = self.request.label_tokens as f64 / self.steps_per_epoch as f64;
        [
            ("rows per epoch", grouped(rows)),
            (
                "tokens per epoch",
                format!("{}, {} of them with a label ({share:.1} %)", grouped(tokens), grouped(label_tokens)),
            ),
            (
                "effective batch",
                format!(
                    "{} x {grad_accum} accumulated x {} = {}",
                    count(batch_size, "row"),
                    count(world, "rank"),
                    grouped(self.effective_batch)
                ),
            ),
            ("micro-batches per epoch", grouped(self.micro_batches_per_epoch)),
            (
                "steps per epoch",
                format!(
                    "{}, about {} each",
                    grouped(self.steps_per_epoch),
                    count(grouped(per_step.round() as u64), "label token")
                ),
            ),
            ("steps in all", format!("{} ({:.2} epochs)", grouped(self.total_steps), self.epochs())),
            ("warm-up steps", grouped(self.warmup_steps)),
        ]
        .map(|(label, value)| (label.to_owned(), value))
        .to_vec()
    }
}

impl std::fmt::Display for Batches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&table(&self.rows()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(rows: u64, batch_size: u64, grad_accum: u64) -> Request {
        Request {
            rows,
            tokens: rows * 10,
            label_tokens: rows * 4,
            batch_size,
            grad_accum,
            world: 1,
            epochs: 3.0,
            max_steps: -1,
            warmup_steps: 0,
            warmup_ratio: 0.0,
        }
    }

    #[test]
    fn partial_batches_count_as_steps() {
        let batches = Batches::new(request(101, 4, 8)).unwrap();
        assert_eq!((batches.micro_batches_per_epoch, batches.steps_per_epoch), (26, 4));
        assert_eq!((batches.total_steps, batches.effective_batch), (12, 32));
        assert!(batches.ends_epoch(8) && !batches.ends_epoch(9));
        assert_eq!(batches.epochs(), 3.0);
    }

    #[test]
    fn fractions_of_an_epoch_and_of_warm_up_round_up() {
        let batches = Batches::new(Request { epochs: 1.5, warmup_ratio: 0.1, ..request(70, 10, 1) }).unwrap();
        assert_eq!((batches.total_steps, batches.warmup_steps), (11, 2));
    }

    #[test]
    fn max_steps_goes_before_epochs_and_warmup_steps_before_the_ratio() {
        let both = Request { max_steps: 5, warmup_steps: 3, warmup_ratio: 0.9, ..request(70, 10, 1) };
        let batches = Batches::new(both).unwrap();
        assert_eq!((batches.total_steps, batches.warmup_steps), (5, 3));
    }

    #[test]
    fn runs_of_nothing_are_refused() {
        assert_eq!(Batches::new(request(0, 4, 1)).unwrap_err().kind(), tunesmith_base::Kind::Data);
        assert_eq!(
            Batches::new(Request { epochs: 0.0, ..request(9, 4, 1) }).unwrap_err().kind(),
            tunesmith_base::Kind::Config
        );
    }
}
