//! Checks before step 1 that the disk has room for the run.
use crate::model_source::ModelSource;
use crate::{output, trainable};
use tunesmith_base::error::Result;
use tunesmith_checkpoint as checkpoint;
use tunesmith_config::{Config, Mode, SaveStrategy};
use tunesmith_model::adapters::{self, Method};
use tunesmith_plan::batches::Batches;
use tunesmith_plan::bytes;

/// Refuses a disk that has no room for the run. With `reuses`, the files of earlier runs in the output directory count as
/// free.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`]: too few bytes or files are free.
pub fn check(config: &Config, source: &ModelSource, steps: &Batches, reuses: bool) -> Result<()> {
    let train = &config.train;
    let held = if reuses { output::bytes_of_runs(&train.output_dir) } else { 0 };
    let trained = source.trained_parameters();
    // If averages are published, a checkpoint contains the trained values in addition.
    let optimizer = source.optimizer;
    let state = optimizer.state + optimizer.average + optimizer.publishing;
    let saves = match train.save_strategy {
        SaveStrategy::No => 1,
        SaveStrategy::Steps => steps.total_steps.div_ceil(train.save_steps.steps(steps.total_steps)),
        SaveStrategy::Epoch => steps.epochs().ceil() as u64,
    };
    let best = u64::from(train.load_best_model_at_end);
    let keep = train.save_total_limit.map(|limit| limit as u64 + best);
    let tokenizer = output::size_of(&output::tokenizer_files(&source.dir));
    let needed = bytes::run(trained, state, tokenizer, saves, keep);
    // Values of the final weights besides the trained ones.
    let beside = match config.tuning.mode {
        Mode::Full | Mode::Freeze => trainable::parameters(&source.arch).saturating_sub(trained),
        _ if adapters::of(&config.tuning).is_some_and(Method::takes_from_base) => trained,
        _ => 0,
    };
    let folders = keep.map_or(saves, |keep| saves.min(keep + 1)) + 2;
    let needed = needed + 4 * beside + folders * source.untouched.bytes();
    checkpoint::preflight(&train.output_dir, needed.saturating_sub(held), folders * checkpoint::FILES)
}
