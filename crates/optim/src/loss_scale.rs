//! The loss scale of float16 training: Micikevicius et al., "Mixed Precision Training", 2018,
//! <https://arxiv.org/abs/1710.03740>. The loss is multiplied by it, so that small gradients do not become zero;
//! gradients are divided by it before the update.
//!
//! The scale changes as in `DeepSpeed`'s `DynamicLossScaler`. A step that overflows is skipped, and once `hysteresis`
//! is used up the scale is halved. After `window` steps without overflow it is doubled.

/// How a scale starts and changes: the settings of DeepSpeed's section `fp16`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaleSettings {
    /// The scale of the first step.
    pub initial: f64,
    /// Steps without overflow before the scale is doubled.
    pub window: u64,
    /// The overflow of this number halves the scale, and so does each one after it. Counting begins anew when the scale
    /// is doubled.
    pub hysteresis: u64,
    /// The scale is never below this.
    pub least: f64,
    /// Whether the scale changes; a static scale stays at `initial`.
    pub dynamic: bool,
}

/// The scale of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct LossScaler {
    settings: LossScaleSettings,
    scale: f64,
    /// Steps so far, skipped ones included.
    step: u64,
    /// The number of the step after the last overflow, counted from 0.
    since: u64,
    hysteresis: u64,
    overflows: u64,
}

/// The largest scale: the gradients that it multiplies are float32 before they are rounded.
const MOST: f64 = (1u64 << 40) as f64;

impl LossScaler {
    /// The scale before the first step.
    pub const fn new(settings: LossScaleSettings) -> Self {
        Self { settings, scale: settings.initial, step: 0, since: 0, hysteresis: settings.hysteresis, overflows: 0 }
    }

    /// What the loss is multiplied by in the next step. It stays a power of two if the initial scale was one.
    pub const fn scale(&self) -> f64 {
        self.scale
    }

    /// Steps that were skipped so far.
    pub const fn overflows(&self) -> u64 {
        self.overflows
    }

    /// [`LossScaleSettings::hysteresis`]: this number of overflows in a row is normal.
    pub const fn hysteresis(&self) -> u64 {
        self.settings.hysteresis
    }

    /// Whether the scale can still be lowered after an overflow.
    pub fn can_fall(&self) -> bool {
        self.settings.dynamic && self.scale > self.settings.least
    }

    /// Counts a step, and adapts the scale to whether its gradients overflowed.
    pub fn update(&mut self, overflow: bool) {
        self.overflows += u64::from(overflow);
        if overflow && self.settings.dynamic {
            if self.hysteresis <= 1 {
                self.scale = (self.scale / 2.0).max(self.settings.least);
            } else {
                self.hysteresis -= 1;
            }
            self.since = self.step + 1;
        } else if self.settings.dynamic {
            let stable = self.step - self.since;
            if stable > 0 && stable.is_multiple_of(self.settings.window) {
                self.hysteresis = self.settings.hysteresis;
                self.scale = (self.scale * 2.0).min(MOST);
            }
        }
        self.step += 1;
    }

    /// The state as numbers for a checkpoint, in the order in which `set_numbers` takes them back.
    pub fn numbers(&self) -> [f64; 5] {
        [self.scale, self.step as f64, self.since as f64, self.hysteresis as f64, self.overflows as f64]
    }

    /// Restores the state from [`LossScaler::numbers`]; the settings stay.
    pub(crate) fn set_numbers(&mut self, [scale, step, since, hysteresis, overflows]: [f64; 5]) {
        (self.scale, self.step, self.since) = (scale, step as u64, since as u64);
        (self.hysteresis, self.overflows) = (hysteresis as u64, overflows as u64);
    }
}
