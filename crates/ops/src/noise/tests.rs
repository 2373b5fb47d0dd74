//! The noise follows counters alone, within its bound.
use super::*;
use crate::dropout::key;
use crate::testing::each_engine;

#[test]
fn noise_follows_its_row_and_keeps_to_its_bound() {
    each_engine(|engine| {
        let (pool, features) = (engine.pool(), 20);
        let noise = |cu_seqlens: &[usize], key: u64, first_row: u64| {
            let tokens = *cu_seqlens.last().unwrap();
            let mut x = Activation::from_rows(&pool, &vec![0.0; tokens * features], features);
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
    });
}
