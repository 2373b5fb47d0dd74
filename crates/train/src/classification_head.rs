//! The classification or regression head of `task: classification` and `task: regression`.
use std::path::Path;

use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;
use tunesmith_checkpoint::loaded_adapter::score_head;
use tunesmith_config::arch::{Arch, ScoreHead};
use tunesmith_config::{Config, Labels, Task};
use tunesmith_data as data;
use tunesmith_telemetry::progress::Observer;

/// Adds the head of the task to the model's shape, and its labels to the configuration. The labels come from `data.labels`,
/// the adapter in `source`, the model, or the training rows.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the task does not fit the model, or the labels do not fit its head. Errors of reading the
/// rows.
pub fn set(config: &mut Config, arch: &mut Arch, source: Option<&Path>, observer: &dyn Observer) -> Result<()> {
    let known = match source.map(score_head).transpose()?.flatten() {
        Some(head) => Some(head),
        None => arch.score.clone(),
    };
    if config.task() == Task::CausalLm {
        return match known {
            None => Ok(()),
            Some(_) => Err(Error::config("task: causal_lm, but the model has a classification head")
                .hint("set task: classification (or regression), or use the language model that it was made from")),
        };
    }
    if arch.family.classifier.is_none() {
        return Err(ScoreHead::refusal(arch.family));
    }
    if let Some(wrapper) = arch.wrapper {
        return Err(Error::model(format!(
            "not yet: a classification head on a multimodal model ({})",
            wrapper.model_type
        ))
        .hint("use a model that is only a language model"));
    }
    let given = std::mem::take(&mut config.data.labels.0);
    let head = match (config.task(), &known) {
        (Task::Regression, None) => ScoreHead::number(),
        (Task::Regression, Some(head)) if head.is_number() => ScoreHead::number(),
        (Task::Classification, Some(head)) if !head.is_number() => {
            // The default names of Transformers can be replaced by real ones.
            let nameless = head.labels.iter().enumerate().all(|(id, label)| *label == format!("LABEL_{id}"));
            if given.is_empty() || given == head.labels {
                head.clone()
            } else if nameless && given.len() == head.labels.len() {
                ScoreHead { labels: given }
            } else {
                return Err(Error::config(format!(
                    "data.labels are {given:?}, but the labels of the starting model are {:?}",
                    head.labels
                ))
                .hint("remove data.labels, or start from a model without a classification head"));
            }
        }
        (Task::Classification, None) if given.is_empty() => ScoreHead { labels: data::labels::find(config, observer)? },
        (Task::Classification, None) => ScoreHead { labels: given },
        (Task::CausalLm, None) => return Ok(()),
        (task, Some(head)) => {
            let what = if head.is_number() { "a number".to_owned() } else { count(head.labels.len(), "label") };
            return Err(Error::config(format!("task: {task}, but the starting model predicts {what}"))
                .hint("set the other task, or start from a model without a classification head"));
        }
    };
    config.data.labels = Labels(head.labels.clone());
    arch.score = Some(head);
    Ok(())
}
