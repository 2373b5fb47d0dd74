//! A head of scores in a run: which one the task asks for, its validation, and what is told of its labels.
use std::path::Path;

use super::ranks;
use super::session::{Session, Validation};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::words::count;
use tunesmith_checkpoint::loaded_adapter::score_head;
use tunesmith_config::arch::{Arch, ScoreHead};
use tunesmith_config::{Config, Labels, Task};
use tunesmith_data::{self as data, Dataset};
use tunesmith_eval::metrics::scored::{self, Bootstrap, Scored};
use tunesmith_plan::grouped;
use tunesmith_telemetry::progress::Observer;

/// Labels that are told one by one.
const TOLD: usize = 20;

/// Gives the model the head that the task asks for, and the configuration its labels: those that are named, those of the adapter
/// in `source` or of the model, or those of the training rows.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the task does not fit the model, or the labels not its head; those of reading the rows.
pub fn set_head(config: &mut Config, arch: &mut Arch, source: Option<&Path>, observer: &dyn Observer) -> Result<()> {
    let known = match source.map(score_head).transpose()?.flatten() {
        Some(head) => Some(head),
        None => arch.score.clone(),
    };
    if config.task() == Task::CausalLm {
        return match known {
            None => Ok(()),
            Some(_) => Err(Error::config("task: causal_lm, and the model has a head of scores")
                .hint("set task: classification (or regression), or use the model that it was made from")),
        };
    }
    if arch.family.classifier.is_none() {
        return Err(ScoreHead::refusal(arch.family));
    }
    if let Some(wrapper) = arch.wrapper {
        return Err(Error::model(format!("not yet: a head of scores on a multimodal model ({})", wrapper.model_type))
            .hint("take a language model alone"));
    }
    let given = std::mem::take(&mut config.data.labels.0);
    let head = match (config.task(), &known) {
        (Task::Regression, None) => ScoreHead::number(),
        (Task::Regression, Some(head)) if head.is_number() => ScoreHead::number(),
        (Task::Classification, Some(head)) if !head.is_number() => {
            // Names that only count say nothing.
            let nameless = head.labels.iter().enumerate().all(|(id, label)| *label == format!("LABEL_{id}"));
            if given.is_empty() || given == head.labels {
                head.clone()
            } else if nameless && given.len() == head.labels.len() {
                ScoreHead { labels: given }
            } else {
                return Err(Error::config(format!(
                    "data.labels are {given:?}, those of the model that training goes on from {:?}",
                    head.labels
                ))
                .hint("remove data.labels, or start from a model without a head of scores"));
            }
        }
        (Task::Classification, None) if given.is_empty() => ScoreHead { labels: data::labels::find(config, observer)? },
        (Task::Classification, None) => ScoreHead { labels: given },
        (Task::CausalLm, None) => return Ok(()),
        (task, Some(head)) => {
            let what = if head.is_number() { "a number".to_owned() } else { count(head.labels.len(), "label") };
            return Err(Error::config(format!("task: {task}, and the model that training goes on from gives {what}"))
                .hint("set the other task, or start from a model without a head of scores"));
        }
    };
    config.data.labels = Labels(head.labels.clone());
    arch.score = Some(head);
    Ok(())
}

impl Session<'_> {
    /// The loss on the validation split and the measures of the task; nothing when the run is asked to stop. Each rank
    /// scores every so many batches, and all rows' scores come together on all ranks.
    pub(super) fn validate_scores(&mut self, head: &ScoreHead) -> Result<Option<Validation>> {
        let Some(count) = self.prepared.dataset.validation.as_ref().map(data::Split::len) else { return Ok(None) };
        let (at_once, world) = (self.prepared.config.train.eval_batch_size, self.comm.world());
        let mut outputs = vec![0.0f32; count * head.outputs()];
        let (mut gave_up, mut failed) = ([0u64], None);
        for start in (0..count).step_by(at_once).skip(world.rank).step_by(world.size) {
            if self.stop.requested().is_some() {
                gave_up = [1];
                break;
            }
            let rows: Vec<usize> = (start..count.min(start + at_once)).collect();
            let found = match self.scores_within(&rows) {
                Err(error) if error.kind() == Kind::Memory => {
                    failed = Some(error);
                    break;
                }
                found => found?,
            };
            outputs[start * head.outputs()..][..found.len()].copy_from_slice(&found);
        }
        self.model.stand_by()?;
        ranks::all_have_room(&*self.comm, failed)?;
        self.comm.all_reduce(&mut gave_up)?;
        self.agree_on_passes()?;
        if gave_up != [0] {
            return Ok(None);
        }
        self.comm.all_reduce(&mut outputs)?;
        let mut scored = Scored::new(head.clone());
        for (row, outputs) in outputs.chunks_exact(head.outputs()).enumerate() {
            let labelled = self.prepared.dataset.validation.as_ref().map(|split| split.labelled(row)).transpose()?;
            let (target, weight) = labelled.flatten().ok_or_else(|| Error::data("a validation row has no label"))?;
            scored.push(outputs, target, weight);
        }
        let scores = scored.scores(Bootstrap::NONE).into_iter();
        let mut scores: super::predict::Scores = scores.map(|score| (score.name, score.value)).collect();
        let loss = scores.remove("loss").unwrap_or_default();
        Ok(Some(Validation { loss, label_tokens: count as u64, scores, confusion: scored.confusion() }))
    }

    /// Tries what a validation does on a few rows, and whether there is such a measure at all.
    pub(super) fn try_scores(&mut self, head: &ScoreHead, rows: &[usize]) -> Result<()> {
        self.scores_within(rows)?;
        let wanted = &self.prepared.config.train.metric_for_best_model;
        let (wanted, names) = (wanted.strip_prefix("eval_").unwrap_or(wanted), scored::names(head));
        if names.iter().any(|name| name == wanted) {
            return Ok(());
        }
        let names = names.join(", ");
        Err(Error::config(format!("train.metric_for_best_model = {wanted}: no such measure, evaluations have {names}")))
    }
}

/// The labels with their rows and weights: label and value.
pub fn facts(dataset: &Dataset) -> Vec<(String, String)> {
    let classes = &dataset.classes;
    let rows: u64 = classes.iter().map(|class| class.train).sum();
    let mut facts = Vec::new();
    for class in classes.iter().take(TOLD) {
        let share = 100.0 * class.train as f64 / rows.max(1) as f64;
        let held_out = match &dataset.validation {
            Some(_) => format!(", {} for validation", grouped(class.validation)),
            None => String::new(),
        };
        let text =
            format!("{} ({share:.1} %){held_out}, weight {:.4}", count(grouped(class.train), "row"), class.weight);
        facts.push((format!("label {}", class.label), text));
    }
    if classes.len() > TOLD {
        facts.push(("labels".to_owned(), format!("{} more", classes.len() - TOLD)));
    }
    facts
}
