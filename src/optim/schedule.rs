//! Learning rates over optimizer steps, equal to the schedules of `transformers.optimization`.
use crate::config::LrScheduler;

/// How the rate goes over a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Which form.
    pub form: LrScheduler,
    /// The highest rate.
    pub peak: f64,
    /// Steps in which it rises from 0 (the first has rate 0).
    pub warmup: u64,
    /// All steps.
    pub total: u64,
}

impl Schedule {
    /// The rate of the optimizer step with this number; the first is 0.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup && self.form != LrScheduler::Constant {
            return self.peak * step as f64 / self.warmup.max(1) as f64;
        }
        let span = self.total.saturating_sub(self.warmup).max(1) as f64;
        let factor = match self.form {
            LrScheduler::Constant | LrScheduler::ConstantWithWarmup => 1.0,
            LrScheduler::Linear => self.total.saturating_sub(step) as f64 / span,
            LrScheduler::Cosine => {
                let progress = step.saturating_sub(self.warmup) as f64 / span;
                (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0)
            }
        };
        self.peak * factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_start_peak_and_end_as_in_transformers() {
        let at = |form, step| Schedule { form, peak: 1.0, warmup: 4, total: 20 }.lr(step);
        for form in [LrScheduler::Linear, LrScheduler::Cosine, LrScheduler::ConstantWithWarmup] {
            assert_eq!((at(form, 0), at(form, 1), at(form, 4)), (0.0, 0.25, 1.0));
        }
        assert_eq!((at(LrScheduler::Constant, 0), at(LrScheduler::ConstantWithWarmup, 19)), (1.0, 1.0));
        assert_eq!((at(LrScheduler::Linear, 12), at(LrScheduler::Linear, 20)), (0.5, 0.0));
        assert!((at(LrScheduler::Cosine, 12) - 0.5).abs() < 1e-12 && at(LrScheduler::Cosine, 20) < 1e-12);
    }
}
