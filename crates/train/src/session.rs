//! The state of a run between two optimizer steps, and what every part of the loop needs: stopping, saving in the background.
use std::path::Path;
use std::time::{Duration, Instant};

use super::lock::DirLock;
use super::model_source::ModelSource;
use super::run_plan::RunPlan;
use super::signals::Stop;
use tunesmith_base::error::{Error, Result};
use tunesmith_checkpoint::{Background, Stamp, TrainState, Written};
use tunesmith_comm::Collectives;
use tunesmith_config::Checkpointing;
use tunesmith_data::{Dataset, Sampler};
use tunesmith_model::Model;
use tunesmith_optim::{Ema, Optimizer};
use tunesmith_parallel::ddp_zero::Sharing;
use tunesmith_parallel::fsdp::Gatherer;
use tunesmith_telemetry::metrics::{Line, Metrics};
use tunesmith_telemetry::progress::{Event, Observer, Pace};
use tunesmith_telemetry::tensorboard::EventWriter;

/// The state of a run between two optimizer steps.
pub struct Session<'a> {
    pub stop: &'a Stop,
    pub observer: &'a dyn Observer,
    pub plan: RunPlan,
    /// The base model's files and adapters.
    pub source: ModelSource,
    pub dataset: Dataset,
    pub sampler: Sampler,
    /// The lock of the output directory; only the first rank holds it.
    pub lock: Option<DirLock>,
    pub comm: Box<dyn Collectives>,
    /// Fetches frozen weights that other ranks hold, if they are sharded.
    pub gatherer: Option<Gatherer>,
    /// The model with its trained values.
    pub model: Model,
    /// What blocks keep for the backward pass: as planned, or less once memory has run out.
    pub checkpointing: Checkpointing,
    /// The optimizer with its state.
    pub optimizer: Optimizer,
    /// The moving average of the weights whose state this rank keeps, with `train.ema_decay`.
    pub ema: Option<Ema>,
    /// Which rank keeps which values, gradients and state.
    pub sharing: Sharing,
    /// Step, epoch, position in the data and best metric, as checkpoints save them.
    pub state: TrainState,
    /// Writes checkpoints beside the steps.
    pub saver: Background,
    /// The step of the last checkpoint that is durable.
    pub saved: u64,
    /// The step of the last checkpoint that was begun.
    pub begun: u64,
    /// Steps in a row that overflowed and lowered the loss scale.
    pub overflows_in_a_row: u64,
    /// A checkpoint was due while steps were skipped. It is written after the next step that is not.
    pub save_is_owed: bool,
    /// `metrics.jsonl`, once writing has begun.
    pub metrics: Option<Metrics>,
    /// Which of the run's files was removed or replaced by others, in words.
    pub replaced_file: Option<String>,
    pub events: Option<EventWriter>,
    /// Rows whose label was predicted right, and all rows, since the last logged step of a classification.
    pub right_of_rows: [u64; 2],
    pub pace: Pace,
    /// What this process has done.
    pub done: Done,
    /// The stamp of the checkpoints.
    pub stamp: Stamp,
}

/// Work of this process, steps before a resume not counted.
#[derive(Debug, Clone, Copy, Default)]
pub struct Done {
    pub steps: u64,
    pub tokens: u64,
    /// Wall time before step 1.
    pub preparing: Duration,
    /// Wall time of the steps.
    pub stepping: Duration,
    pub evaluating: Duration,
    /// Wall time of checkpoints in which no step was made.
    pub saving: Duration,
    /// Time of writing them, beside the steps or not.
    pub writing: Duration,
    /// Time of hashing them, the base weights, and the checkpoint that the run goes on from.
    pub hashing: Duration,
}

impl Session<'_> {
    /// Takes note of a checkpoint that was being written and is durable by now.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: it could not be written; the older ones stand.
    pub fn collect(&mut self) -> Result<()> {
        let written = self.saver.poll();
        self.note(written)
    }

    /// Waits for the checkpoint that is being written.
    ///
    /// # Errors
    /// As [`Session::collect`].
    pub fn settle(&mut self) -> Result<()> {
        let began = Instant::now();
        let written = self.saver.join();
        self.done.saving += began.elapsed();
        self.note(written)
    }

    /// Takes note of what has been written.
    ///
    /// # Errors
    /// The failure that it is, with what is there all the same.
    pub fn note(&mut self, written: Result<Option<Written>>) -> Result<()> {
        let written = written.map_err(|error| {
            error.context(match self.saved {
                0 => "a checkpoint could not be written, and there is none before it".to_owned(),
                saved => format!("a checkpoint could not be written; that of step {saved} stands"),
            })
        })?;
        if let Some(Written { dir, step, took, hashing, kept }) = written {
            self.saved = step;
            self.done.writing += took;
            self.done.hashing += hashing;
            self.observer.event(&Event::Saved(&dir));
            self.tell_kept(&dir, kept.as_deref());
        }
        Ok(())
    }

    /// Says where what stood in the way of `dir` stays.
    pub fn tell_kept(&self, dir: &Path, kept: Option<&Path>) {
        if let Some(kept) = kept {
            let (dir, kept) = (dir.display(), kept.display());
            let text = format!("{dir} held files that tunesmith did not write: they stay in {kept}");
            self.observer.event(&Event::Notice(&text));
        }
    }

    /// What ends all ranks at the same step: once the checkpoint that is being written is durable, and all have come as
    /// far; a launcher ends the others when one has left. Says what is saved.
    pub fn last_word(&mut self, error: Error) -> Error {
        let settled = self.settle();
        // Who is gone changes nothing here.
        let _ = self.comm.barrier();
        let saved = match (settled, self.saved) {
            (Err(error), _) => error.message().to_owned(),
            (Ok(()), 0) => "no checkpoint was written".to_owned(),
            (Ok(()), saved) => format!("the last checkpoint is that of step {saved}"),
        };
        error.with_more(&saved)
    }

    /// Writes a line of `metrics.jsonl`, on the rank that has it open.
    ///
    /// # Errors
    /// The disk.
    pub fn write(&mut self, line: &Line) -> Result<()> {
        self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.write(line))
    }

    /// Why the run is asked to stop, if any rank is: all stop after the same step.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`].
    pub fn asked_to_stop(&self) -> Result<Option<&'static str>> {
        let own = self.stop.requested();
        let mut asked = [u64::from(own.is_some())];
        self.comm.all_reduce(&mut asked)?;
        Ok((asked[0] > 0).then(|| own.unwrap_or("a request to another rank")))
    }

    /// Whether this rank writes what the run leaves behind.
    pub fn writes(&self) -> bool {
        self.comm.world().is_first()
    }
}
