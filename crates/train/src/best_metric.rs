//! The metric that decides which checkpoint is best, and the count of evaluations without improvement.
use super::predict::Scores;
use super::run_plan::MetricPlan;
use tunesmith_base::error::{Error, Result};
use tunesmith_checkpoint::TrainState;

/// The metric's value in an evaluation.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the evaluation has no metric of this name.
pub fn value(metric: &MetricPlan, loss: f64, scores: &Scores) -> Result<f64> {
    if metric.name == "loss" {
        return Ok(loss);
    }
    scores.get(&metric.name).copied().ok_or_else(|| {
        let known: Vec<&str> = ["loss"].into_iter().chain(scores.keys().map(String::as_str)).collect();
        Error::config(format!(
            "train.metric_for_best_model = {}: no such metric; evaluations have {}",
            metric.name,
            known.join(", ")
        ))
        .hint("set train.predict_with_generate: true for the metrics that eval.metrics names")
    })
}

/// Updates the best metric and the count of evaluations without improvement. Returns whether this evaluation is the best so
/// far. The count restarts only if `value` is better than the best by more than `threshold`.
pub fn update(state: &mut TrainState, metric: &MetricPlan, value: f64, threshold: f64) -> bool {
    state.evaluated_step = state.step;
    if state.best_metric_name.as_deref().unwrap_or("loss") != metric.name {
        // A run that is resumed with another metric has no best value yet.
        (state.best_metric, state.best_step) = (None, None);
        state.evaluations_without_improvement = 0;
    }
    state.best_metric_name = Some(metric.name.clone());
    let better = |margin: f64| {
        value.is_finite()
            && state
                .best_metric
                .is_none_or(|best| if metric.greater_is_better { value > best + margin } else { value < best - margin })
    };
    let (improved, best) = (better(threshold), better(0.0));
    state.evaluations_without_improvement = if improved { 0 } else { state.evaluations_without_improvement + 1 };
    if best {
        (state.best_metric, state.best_step) = (Some(value), Some(state.step));
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_evaluations_without_enough_improvement() {
        let mut state = TrainState::default();
        let metric = MetricPlan { name: "loss".into(), greater_is_better: false };
        let mut evaluate = |step, loss| {
            state.step = step;
            let best = update(&mut state, &metric, loss, 0.1);
            (best, state.evaluations_without_improvement, state.best_step)
        };
        assert_eq!(evaluate(10, 1.0), (true, 0, Some(10)));
        assert_eq!(evaluate(20, 0.95), (true, 1, Some(20)), "lower, but not by the threshold");
        assert_eq!(evaluate(30, 0.97), (false, 2, Some(20)));
        assert_eq!(evaluate(40, f64::NAN), (false, 3, Some(20)));
        assert_eq!(evaluate(50, 0.5), (true, 0, Some(50)));
    }

    #[test]
    fn scores_rise_and_another_metric_starts_anew() {
        let mut state = TrainState { best_metric: Some(0.3), best_step: Some(5), ..TrainState::default() };
        let metric = MetricPlan { name: "exact_match".into(), greater_is_better: true };
        let mut evaluate = |step, score| {
            state.step = step;
            let best = update(&mut state, &metric, score, 0.0);
            (best, state.best_step)
        };
        assert_eq!(evaluate(10, 0.1), (true, Some(10)), "0.3 was a loss");
        assert_eq!(evaluate(20, 0.4), (true, Some(20)));
        assert_eq!(evaluate(30, 0.4), (false, Some(20)));
        assert!(value(&metric, 1.0, &Scores::new()).unwrap_err().message().contains("exact_match"));
    }
}
