//! The state of a run between two optimizer steps, with functions for stopping and for saving in the background.
use std::path::Path;
use std::time::{Duration, Instant};

use super::lock::DirLock;
use super::model_source::ModelSource;
use super::run_plan::RunPlan;
use super::signals::Stop;
use super::step::UnsettledStep;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_checkpoint::{Background, Stamp, TrainState, Written, store};
use tunesmith_comm::Collectives;
use tunesmith_config::Checkpointing;
use tunesmith_data::{Dataset, Sampler};
use tunesmith_device::Device;
use tunesmith_model::Model;
use tunesmith_optim::{Ema, Optimizer};
use tunesmith_parallel::ddp_zero::Sharing;
use tunesmith_parallel::fsdp::Gatherer;
use tunesmith_telemetry::metrics::{MetricsLine, MetricsWriter};
use tunesmith_telemetry::progress::{Event, Observer, Throughput};
use tunesmith_telemetry::tensorboard::EventWriter;

/// How an error names the checkpoint that a resume would take.
const NEWEST: &str = "the newest intact checkpoint";

/// The state of a run between two optimizer steps.
pub struct Session<'a> {
    pub stop: &'a Stop,
    pub observer: &'a dyn Observer,
    pub plan: RunPlan,
    /// The base model's files and adapters.
    pub source: ModelSource,
    pub dataset: Dataset,
    pub sampler: Sampler,
    /// The lock of the output directory, on the first rank.
    pub lock: Option<DirLock>,
    pub comm: Box<dyn Collectives>,
    /// Gathers frozen weights from other ranks; `None` if they are not sharded.
    pub gatherer: Option<Gatherer>,
    /// The model with its trained values.
    pub model: Model,
    /// What blocks save for the backward pass: as planned, or less once memory has run out.
    pub checkpointing: Checkpointing,
    /// The optimizer with its state.
    pub optimizer: Optimizer,
    /// With `train.ema_decay`, the moving average of the weights whose state this rank holds.
    pub ema: Option<Ema>,
    /// Which rank holds which values, gradients, and optimizer state.
    pub sharing: Sharing,
    /// Step, epoch, position in the data, and best metric, as saved in checkpoints.
    pub state: TrainState,
    /// Writes checkpoints in the background.
    pub saver: Background,
    /// The step of the last checkpoint that is durable.
    pub saved: u64,
    /// The step of the last checkpoint whose writing has started.
    pub begun: u64,
    /// The last step, until its results are recorded ([`Session::settle`]).
    pub unsettled: Option<UnsettledStep>,
    /// Steps in a row that overflowed and lowered the loss scale.
    pub overflows_in_a_row: u64,
    /// Whether a checkpoint was due while steps were skipped. It is written after the next step that is not skipped.
    pub save_is_owed: bool,
    /// `metrics.jsonl`, once writing has begun.
    pub metrics: Option<MetricsWriter>,
    /// The file of the run that was removed or replaced, in words.
    pub replaced_file: Option<String>,
    pub events: Option<EventWriter>,
    /// Rows with a correct prediction, and all rows, since the last logged step of a classification.
    pub right_of_rows: [u64; 2],
    pub pace: Throughput,
    /// Work and times of this process.
    pub done: Done,
    /// The stamp of the checkpoints.
    pub stamp: Stamp,
}

/// Work and times of this process, without the steps before a resume.
#[derive(Debug, Clone, Copy, Default)]
pub struct Done {
    /// The device that the model was loaded on.
    pub device: Device,
    pub steps: u64,
    pub tokens: u64,
    /// Wall time before step 1.
    pub preparing: Duration,
    /// Wall time of the steps.
    pub stepping: Duration,
    pub evaluating: Duration,
    /// Wall time that saving checkpoints took from the steps.
    pub saving: Duration,
    /// Time of writing checkpoints, in the background or not.
    pub writing: Duration,
    /// Time of hashing checkpoints, the base weights, and the checkpoint to resume from.
    pub hashing: Duration,
}

impl Session<'_> {
    /// Records the checkpoint in the background if it is written by now.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the checkpoint could not be written. Older ones stay as they were.
    pub fn poll_saving(&mut self) -> Result<()> {
        let written = self.saver.poll();
        self.record_written(written)
    }

    /// Waits for the checkpoint that is being written.
    ///
    /// # Errors
    /// As [`Session::poll_saving`].
    pub fn wait_for_saving(&mut self) -> Result<()> {
        let began = Instant::now();
        let written = self.saver.join();
        self.done.saving += began.elapsed();
        self.record_written(written)
    }

    /// Records a checkpoint that was written, if any.
    ///
    /// # Errors
    /// The error in `written`, with the newest checkpoint that exists.
    pub fn record_written(&mut self, written: Result<Option<Written>>) -> Result<()> {
        let written = written.map_err(|error| {
            error.context(format!("a checkpoint could not be written; {}", self.newest_checkpoint()))
        })?;
        if let Some(Written { dir, step, took, hashing, kept }) = written {
            self.saved = step;
            self.done.writing += took;
            self.done.hashing += hashing;
            self.observer.event(&Event::Saved(&dir));
            self.report_kept_files(&dir, kept.as_deref());
        }
        Ok(())
    }

    /// Says which checkpoint a resume would take now.
    fn newest_checkpoint(&self) -> String {
        match store::newest_whole(&self.plan.output_dir) {
            Some(dir) => format!("{NEWEST} is {}", dir.display()),
            None => "there is no checkpoint yet".to_owned(),
        }
    }

    /// Adds the newest checkpoint to an error of the disk that ends the run, unless it is named already.
    pub fn with_newest(&self, error: Error) -> Error {
        let told = error.kind() != Kind::Io || error.message().contains(NEWEST) || !self.writes();
        if told { error } else { error.with_more(&self.newest_checkpoint()) }
    }

    /// Reports that files of others in `dir` were moved to `kept`.
    pub fn report_kept_files(&self, dir: &Path, kept: Option<&Path>) {
        if let Some(kept) = kept {
            let (dir, kept) = (dir.display(), kept.display());
            let text = format!("{dir} contained files that tunesmith did not write: they are now in {kept}");
            self.observer.event(&Event::Notice(&text));
        }
    }

    /// Adds the last checkpoint to the error that ends all ranks at the same step. Waits until the checkpoint is written and
    /// all ranks get here, because a launcher ends the other ranks when one exits.
    pub fn end_on_all_ranks(&mut self, error: Error) -> Error {
        let settled = self.wait_for_saving();
        // The run ends in any case, so a lost rank does not matter.
        let _ = self.comm.barrier();
        let saved = match (settled, self.saved) {
            (Err(error), _) => error.message().to_owned(),
            (Ok(()), 0) => "no checkpoint was written".to_owned(),
            (Ok(()), saved) => format!("the last checkpoint is that of step {saved}"),
        };
        error.with_more(&saved)
    }

    /// Reports that damaged features of images were computed again.
    pub fn report_mended_features(&self) {
        if let Some(note) = self.source.run_pictures.as_ref().and_then(|pictures| pictures.take_note()) {
            self.observer.event(&Event::Notice(&note));
        }
    }

    /// Writes a line of `metrics.jsonl`, on the rank that has the file open.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn write(&mut self, line: &MetricsLine) -> Result<()> {
        self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.write(line))
    }

    /// The reason to stop, if any rank is asked to. All ranks stop after the same step.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`].
    pub fn stop_requested(&self) -> Result<Option<&'static str>> {
        let own = self.stop.requested();
        let mut requests = [u64::from(own.is_some())];
        self.comm.all_reduce(&mut requests)?;
        Ok((requests[0] > 0).then(|| own.unwrap_or("a request to another rank")))
    }

    /// Whether this rank writes the files of the run.
    pub fn writes(&self) -> bool {
        self.comm.world().is_first()
    }
}
