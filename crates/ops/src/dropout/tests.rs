//! The mask follows counters alone.
use super::*;
use crate::testing::each_engine;

#[test]
fn a_mask_follows_its_row_and_keeps_the_mean() {
    each_engine(|engine| {
        let pool = engine.pool();
        let ones = Activation::from_rows(&pool, &vec![1.0; 100 * 50], 50);
        let whole = Dropout { rate: 0.3, key: key(1, 2, 3), first_row: 0, rows: None };
        let mask = whole.apply(&ones).to_rows();
        let kept = mask.iter().filter(|&&value| value > 0.0).count();
        assert!((3400..3600).contains(&kept), "{kept} of 5000 kept");
        assert!(mask.iter().all(|&value| value == 0.0 || (value - 1.0 / 0.7).abs() < 1e-6));
        let tail = Dropout { first_row: 37, ..whole }.apply(&Activation::from_rows(&pool, &vec![1.0; 63 * 50], 50));
        assert_eq!(tail.to_rows(), mask[37 * 50..]);
        let picked =
            Dropout { rows: Some(&[3, 98]), ..whole }.apply(&Activation::from_rows(&pool, &vec![1.0; 2 * 50], 50));
        assert_eq!(picked.to_rows(), [&mask[3 * 50..4 * 50], &mask[98 * 50..99 * 50]].concat());
        let other = Dropout { key: key(1, 3, 3), ..whole }.apply(&ones).to_rows();
        assert_ne!(other, mask);
    });
}
