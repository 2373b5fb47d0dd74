//! Uniform noise that is a function of counters alone, as the masks of [`super::dropout`]: for `NEFTune` (Jain et al., 2023).
use super::dropout::mix;
use super::panel::{Act, LANES};
use super::par;

/// Adds to each value of a sequence of `length` tokens noise from `-bound..bound`,
/// `bound = alpha / sqrt(length * features)`. Row `first_row + t` of the step has the same noise however the step is
/// cut into passes.
pub fn add(x: &mut Act, cu_seqlens: &[usize], alpha: f64, key: u64, first_row: u64) {
    if x.is_meta() {
        return;
    }
    let (features, stride, to) = (x.features(), x.stride(), x.shared());
    let bound = |length: usize| (alpha / ((length * features) as f64).sqrt()) as f32;
    let bounds: Vec<f32> = cu_seqlens
        .windows(2)
        .flat_map(|ends| std::iter::repeat_n(bound(ends[1] - ends[0]), ends[1] - ends[0]))
        .collect();
    par::run(x.panels(), |panel| {
        for (lane, bound) in bounds[panel * LANES..].iter().take(LANES).enumerate() {
            let row = mix(key.wrapping_add(first_row + (panel * LANES + lane) as u64));
            for feature in 0..features {
                // 24 bits, exact in f32.
                let bits = mix(row.wrapping_add(feature as u64)) >> 40;
                let noise = bits as f32 / (1u32 << 23) as f32 - 1.0;
                // SAFETY: `panel`, `feature` and `lane` are below those of `x`, which is borrowed for writing; no other
                // task has this panel.
                unsafe { *to.get().add(panel * stride + feature * LANES + lane) += bound * noise };
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dropout::key;
    use crate::panel::Pool;

    #[test]
    fn noise_follows_its_row_and_keeps_to_its_bound() {
        let (pool, features) = (Pool::new(), 20);
        let noise = |cu_seqlens: &[usize], key: u64, first_row: u64| {
            let tokens = *cu_seqlens.last().unwrap();
            let mut x = Act::from_rows(&pool, &vec![0.0; tokens * features], features);
            add(&mut x, cu_seqlens, 5.0, key, first_row);
            x.to_rows()
        };
        let whole = noise(&[0, 45, 50], key(1, 2, 3), 0);
        assert_eq!(noise(&[0, 5], key(1, 2, 3), 45), whole[45 * features..], "cut elsewhere");
        assert_ne!(noise(&[0, 5], key(1, 3, 3), 45), whole[45 * features..], "another step");
        for (values, length) in [(&whole[..45 * features], 45.0f32), (&whole[45 * features..], 5.0)] {
            let bound = 5.0 / (length * features as f32).sqrt();
            let largest = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            assert!(largest <= bound && largest > 0.9 * bound, "{largest} of {bound}");
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            assert!(mean.abs() < 0.2 * bound, "{mean} of {bound}");
        }
    }
}
