//! The metrics of `task: classification` and `task: regression`, and the keys that contradict these tasks.
use super::enums::{Format, Task};
use super::labels::ClassWeights;
use super::resolved::Resolved;
use tunesmith_base::error::Result;

/// Metrics of a classification over all labels.
pub const CLASS_MEASURES: [&str; 8] =
    ["accuracy", "f1_macro", "f1_micro", "f1_weighted", "precision_macro", "recall_macro", "roc_auc", "roc_auc_ovr"];
/// Metrics of one label, which follows the name after a dot: `f1.spam`.
pub const LABEL_MEASURES: [&str; 3] = ["precision", "recall", "f1"];
/// The names of the metrics of a regression.
pub const NUMBER_MEASURES: [&str; 4] = ["mse", "mae", "r2", "pearson"];

/// Refuses keys that contradict a task other than `causal_lm`.
pub(super) fn contradictions(resolved: &Resolved) -> Result<()> {
    let config = &resolved.config;
    let (task, train, data) = (config.task(), &config.train, &config.data);
    if task == Task::CausalLm {
        return Ok(());
    }
    resolved.refuse_if(
        data.datasets.iter().any(|source| source.format.is_some_and(|format| format != Format::Auto)),
        "data.datasets",
        "task",
        "the rows of this task are {text, label} or {messages, label}; remove format",
    )?;
    let weighted = task == Task::Classification && train.class_weights != ClassWeights::None;
    resolved.refuse_if(
        train.label_smoothing_factor > 0.0 && (weighted || task == Task::Regression),
        "train.label_smoothing_factor",
        if weighted { "train.class_weights" } else { "task" },
        "label smoothing needs labels of equal weight; keep one",
    )?;
    resolved.refuse_if(
        train.z_loss > 0.0 && task == Task::Regression,
        "train.z_loss",
        "task",
        "a regression has no class probabilities; remove it",
    )?;
    let metric = train.metric_for_best_model.strip_prefix("eval_").unwrap_or(&train.metric_for_best_model);
    let of_label = metric.split_once('.').is_some_and(|(measure, label)| {
        let known = data.labels.0.is_empty() || data.labels.0.iter().any(|known| known == label);
        LABEL_MEASURES.contains(&measure) && known
    });
    let (known, names) = match task {
        Task::Classification => (of_label || CLASS_MEASURES.contains(&metric), &CLASS_MEASURES[..]),
        Task::Regression | Task::CausalLm => (NUMBER_MEASURES.contains(&metric), &NUMBER_MEASURES[..]),
    };
    resolved.refuse_if(
        metric != "loss" && !known,
        "train.metric_for_best_model",
        "task",
        &format!(
            "the metrics of this task are loss, {}; those of one label are f1.LABEL and the like",
            names.join(", ")
        ),
    )
}
