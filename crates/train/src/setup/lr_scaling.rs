//! Scales the learning rate with the rows of a step: `train.lr_scaling`.
//!
//! The gradient of more rows has less noise, which allows a larger step. Linear scaling with a warm-up is that of Goyal et
//! al. (2017, <https://arxiv.org/abs/1706.02677>). Square-root scaling follows the standard deviation of the noise.
use std::fmt::Write as _;

use tunesmith_base::words::count;
use tunesmith_config::{LrScaling, LrScheduler, TrainConfig};

/// The warm-up, as a share of all steps, of a rate that was scaled up without a configured warm-up.
const WARMUP: f64 = 0.05;

/// The factor for steps of `rows` rows if the rate is meant for steps of `reference` rows.
fn factor(scaling: LrScaling, rows: f64, reference: f64) -> f64 {
    match scaling {
        LrScaling::None => 1.0,
        LrScaling::Linear => rows / reference,
        LrScaling::Sqrt => (rows / reference).sqrt(),
    }
}

/// Scales every learning rate of `train` to the `rows` of a step, `own` of which are those of one rank. If the rate grows and
/// no warm-up is configured (`has_warmup`), sets one.
///
/// Returns the changed settings and a description of the change; `None` without `train.lr_scaling`.
pub fn scaled(train: &TrainConfig, rows: usize, own: usize, has_warmup: bool) -> Option<(TrainConfig, String)> {
    if train.lr_scaling == LrScaling::None {
        return None;
    }
    let reference = train.lr_scaling_batch.unwrap_or(own);
    let factor = factor(train.lr_scaling, rows as f64, reference as f64);
    let mut scaled = TrainConfig { learning_rate: train.learning_rate * factor, ..train.clone() };
    scaled.learning_rates.0.iter_mut().for_each(|(_, rate)| *rate *= factor);
    let rises = !matches!(train.lr_scheduler_type, LrScheduler::Constant);
    let mut text = format!(
        "{} scaling: {:e} is meant for {} per step; {rows} make it {:.4e} (x {factor:.4})",
        train.lr_scaling,
        train.learning_rate,
        count(reference, "row"),
        scaled.learning_rate
    );
    if factor > 1.0 && !has_warmup && rises {
        scaled.warmup_ratio = WARMUP;
        let share = 100.0 * WARMUP;
        let _ = write!(text, "; no warm-up is set, so it rises in {share} % of the steps (train.warmup_ratio)");
    }
    Some((scaled, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_config::Patterns;

    fn train(scaling: LrScaling, reference: Option<usize>) -> TrainConfig {
        TrainConfig {
            lr_scaling: scaling,
            lr_scaling_batch: reference,
            learning_rate: 1e-3,
            learning_rates: Patterns(vec![("lm_head".to_owned(), 1e-4)]),
            ..TrainConfig::default()
        }
    }

    #[test]
    fn the_rate_follows_the_rows_of_a_step() {
        for (scaling, reference, ranks, expected) in [
            (LrScaling::None, None, 8, 1e-3),
            (LrScaling::Linear, None, 1, 1e-3),
            (LrScaling::Linear, None, 4, 4e-3),
            (LrScaling::Sqrt, None, 4, 2e-3),
            (LrScaling::Linear, Some(16), 1, 5e-4),
            (LrScaling::Linear, Some(16), 4, 2e-3),
            (LrScaling::Sqrt, Some(2), 1, 2e-3),
        ] {
            let given = train(scaling, reference);
            let (config, text) = scaled(&given, 8 * ranks, 8, false).unzip();
            let config = config.unwrap_or(given);
            assert!(
                (config.learning_rate - expected).abs() < 1e-12,
                "{scaling} {reference:?} {ranks}: {}",
                config.learning_rate
            );
            assert!(
                (config.learning_rates.0[0].1 - expected / 10.0).abs() < 1e-12,
                "rates by pattern keep their ratio"
            );
            assert_eq!(text.is_some(), scaling != LrScaling::None);
            assert_eq!(config.warmup_ratio > 0.0, expected > 1e-3, "a rate that has grown rises");
        }
    }

    #[test]
    fn a_warm_up_is_set_only_if_none_is_configured() {
        let (config, text) = scaled(&train(LrScaling::Linear, None), 32, 8, true).unwrap();
        assert!(!text.contains("warm-up") && config.warmup_ratio == 0.0, "{text}");
        let constant = TrainConfig { lr_scheduler_type: LrScheduler::Constant, ..train(LrScaling::Linear, None) };
        let (config, _) = scaled(&constant, 32, 8, false).unwrap();
        assert_eq!(config.warmup_ratio, 0.0, "a constant rate has no warm-up");
    }
}
