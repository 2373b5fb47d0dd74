//! Dropout whose mask is a function of counters alone (seed, step, module, row, feature): running a segment again,
//! resuming, or splitting a step into other micro-batches gives the same mask.
use super::panel::{Act, LANES};
use super::par;

/// The mask of one module in one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout<'a> {
    /// Probability that a value is dropped, in 0..1.
    pub rate: f32,
    /// Mixed from seed, step and module by [`key`].
    pub key: u64,
    /// Row number of the first token within the step.
    pub first_row: u64,
    /// Which tokens the rows are; none means all, in order.
    pub rows: Option<&'a [usize]>,
}

/// `SplitMix64`'s finalizer (Steele, Lea and Flood, 2014).
pub(super) const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The key of `module` in `step` of a run with `seed`.
pub const fn key(seed: u64, step: u64, module: u64) -> u64 {
    mix(mix(mix(seed).wrapping_add(step)).wrapping_add(module))
}

impl Dropout<'_> {
    /// `x / (1 - rate)` where kept, 0 where dropped. Applied to a gradient it is its own backward pass.
    #[must_use]
    pub fn apply(&self, x: &Act) -> Act {
        let mut out = x.pool().act(x.tokens(), x.features());
        if x.is_meta() {
            return out;
        }
        let (to, stride) = (out.shared(), out.stride());
        let scale = 1.0 / (1.0 - self.rate);
        let threshold = (f64::from(self.rate) * 4_294_967_296.0) as u64;
        par::run(x.panels(), |panel| {
            let from = x.panel(panel);
            let row = |lane: usize| {
                let at = panel * LANES + lane;
                // Lanes past the last row are padding: any mask will do.
                let token = self.rows.map_or(at, |rows| rows.get(at).copied().unwrap_or(at));
                mix(self.key.wrapping_add(self.first_row + token as u64))
            };
            let rows: [u64; LANES] = std::array::from_fn(row);
            for feature in 0..x.features() {
                for (lane, row) in rows.iter().enumerate() {
                    let dropped = mix(row.wrapping_add(feature as u64)) >> 32 < threshold;
                    let at = feature * LANES + lane;
                    // SAFETY: `out` has the shape of `x`, so that `at` lies within the panel; no other task has this
                    // panel.
                    unsafe { *to.get().add(panel * stride + at) = if dropped { 0.0 } else { from[at] * scale } };
                }
            }
        });
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::Pool;

    #[test]
    fn a_mask_follows_its_row_and_keeps_the_mean() {
        let pool = Pool::new();
        let ones = Act::from_rows(&pool, &vec![1.0; 100 * 50], 50);
        let whole = Dropout { rate: 0.3, key: key(1, 2, 3), first_row: 0, rows: None };
        let mask = whole.apply(&ones).to_rows();
        let kept = mask.iter().filter(|&&value| value > 0.0).count();
        assert!((3400..3600).contains(&kept), "{kept} of 5000 kept");
        assert!(mask.iter().all(|&value| value == 0.0 || (value - 1.0 / 0.7).abs() < 1e-6));
        let tail = Dropout { first_row: 37, ..whole }.apply(&Act::from_rows(&pool, &vec![1.0; 63 * 50], 50));
        assert_eq!(tail.to_rows(), mask[37 * 50..]);
        let picked = Dropout { rows: Some(&[3, 98]), ..whole }.apply(&Act::from_rows(&pool, &vec![1.0; 2 * 50], 50));
        assert_eq!(picked.to_rows(), [&mask[3 * 50..4 * 50], &mask[98 * 50..99 * 50]].concat());
        let other = Dropout { key: key(1, 3, 3), ..whole }.apply(&ones).to_rows();
        assert_ne!(other, mask);
    }
}
