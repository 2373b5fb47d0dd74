//! The classification head that a task asks for.
use std::path::Path;

use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_checkpoint::loaded_adapter::score_head;
use tunesmith_config::arch::{Arch, ScoreHead};
use tunesmith_config::{Config, Labels, Task};
use tunesmith_data as data;
use tunesmith_telemetry::progress::Observer;

/// Adds the classification head that the task asks for to the model's shape, and its labels to the configuration. The labels
/// are those of `data.labels`, of the adapter in `source`, of the model, or of the training rows.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the task does not fit the model, or the labels not its head; those of reading the rows.
pub fn set(config: &mut Config, arch: &mut Arch, source: Option<&Path>, observer: &dyn Observer) -> Result<()> {
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
