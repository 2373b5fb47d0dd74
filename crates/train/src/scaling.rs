//! The learning rate by the rows of a step: `train.lr_scaling`. More rows make a gradient with less noise, which bears a larger step;
//! linear as Goyal et al. (2017) do it, with a warm-up, or by the square root, as the noise itself falls.
use std::fmt::Write as _;

use tunesmith_base::words::count;
use tunesmith_config::{LrScaling, LrScheduler, TrainConfig};

/// The share of steps in which a rate rises that was scaled up and has no warm-up of its own.
const WARMUP: f64 = 0.05;

/// By what a rate that is meant for `reference` rows is multiplied for steps of `rows`.
pub fn factor(scaling: LrScaling, rows: f64, reference: f64) -> f64 {
    match scaling {
        LrScaling::None => 1.0,
        LrScaling::Linear => rows / reference,
        LrScaling::Sqrt => (rows / reference).sqrt(),
    }
}

/// Scales every learning rate of `train` to the rows of a step of `ranks` ranks, and sets a warm-up where the rate grows and nobody has said
/// anything of one (`warms`: somebody has). Says what was done, where anything was asked for.
pub fn scale(train: &mut TrainConfig, ranks: usize, warms: bool) -> Option<String> {
    if train.lr_scaling == LrScaling::None {
        return None;
    }
    let own = train.batch_size.or(1) * train.grad_accum.or(1);
    let rows = own * ranks;
    let reference = train.lr_scaling_batch.unwrap_or(own);
    let factor = factor(train.lr_scaling, rows as f64, reference as f64);
    let before = train.learning_rate;
    train.learning_rate *= factor;
    train.learning_rates.0.iter_mut().for_each(|(_, rate)| *rate *= factor);
    let rises = !matches!(train.lr_scheduler_type, LrScheduler::Constant);
    let mut text = format!(
        "{} scaling: {before:e} is meant for {} a step; {rows} make it {:.4e} (x {factor:.4})",
        train.lr_scaling,
        count(reference, "row"),
        train.learning_rate
    );
    if factor > 1.0 && !warms && rises {
        train.warmup_ratio = WARMUP;
        let share = 100.0 * WARMUP;
        let _ = write!(text, "; no warm-up is set, so it rises in {share} % of the steps (train.warmup_ratio)");
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_config::{Auto, Patterns};

    fn train(scaling: LrScaling, reference: Option<usize>) -> TrainConfig {
        TrainConfig {
            lr_scaling: scaling,
            lr_scaling_batch: reference,
            batch_size: Auto::Given(4),
            grad_accum: Auto::Given(2),
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
            let mut config = train(scaling, reference);
            let text = scale(&mut config, ranks, false);
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
    fn a_warm_up_is_set_only_where_nobody_has_said_anything() {
        let mut config = train(LrScaling::Linear, None);
        assert!(scale(&mut config, 4, true).is_some_and(|text| !text.contains("warm-up")));
        assert_eq!(config.warmup_ratio, 0.0);
        config = TrainConfig { lr_scheduler_type: LrScheduler::Constant, ..train(LrScaling::Linear, None) };
        scale(&mut config, 4, false);
        assert_eq!(config.warmup_ratio, 0.0, "a constant rate has no warm-up");
    }
}
