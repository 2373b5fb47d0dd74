//! The table of learning rates that is printed before step 1. It shows at a glance whether a schedule runs over the
//! wrong number of steps.
use super::table;

/// One line of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Rate {
    /// The optimizer step, counted from 1.
    pub step: u64,
    /// Why this step is shown.
    pub label: &'static str,
    /// The learning rate that the step uses.
    pub learning_rate: f64,
}

/// The learning rate at step 1, at the end of warm-up, at a quarter, half and three quarters of the run, and at the
/// last step. `rate_of(s)` is the rate of the s-th step counted from 0, as schedules count. Steps that coincide are
/// shown once.
pub fn rates(total_steps: u64, warmup_steps: u64, rate_of: impl Fn(u64) -> f64) -> Vec<Rate> {
    let mut marks = vec![(1, "first")];
    if warmup_steps > 0 && warmup_steps < total_steps {
        marks.push((warmup_steps + 1, "warm-up done"));
    }
    marks.extend([
        (total_steps / 4, "25 %"),
        (total_steps / 2, "50 %"),
        (total_steps / 4 * 3 + total_steps % 4 * 3 / 4, "75 %"),
    ]);
    marks.push((total_steps, "last"));
    marks.retain(|&(step, _)| step >= 1 && step <= total_steps);
    marks.sort_by_key(|&(step, _)| step);
    marks.dedup_by_key(|&mut (step, _)| step);
    marks.into_iter().map(|(step, label)| Rate { step, label, learning_rate: rate_of(step - 1) }).collect()
}

/// The table as text, a line for each rate.
pub fn show(rates: &[Rate]) -> String {
    let rows: Vec<_> = rates
        .iter()
        .map(|rate| (format!("step {}", rate.step), format!("{:<11.4e} {}", rate.learning_rate, rate.label)))
        .collect();
    table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_the_turning_points_once() {
        let linear = |step: u64| if step < 10 { step as f64 / 10.0 } else { 1.0 - (step - 10) as f64 / 90.0 };
        let table = rates(100, 10, linear);
        assert_eq!(table.iter().map(|rate| rate.step).collect::<Vec<_>>(), [1, 11, 25, 50, 75, 100]);
        assert_eq!((table[0].learning_rate, table[1].learning_rate), (0.0, 1.0));
        assert!(show(&table).contains("step 11   1.0000e0    warm-up done"), "{}", show(&table));
        assert_eq!(rates(1, 0, linear).len(), 1);
        assert_eq!(rates(2, 0, |_| 1.0).iter().map(|rate| rate.step).collect::<Vec<_>>(), [1, 2]);
    }
}
