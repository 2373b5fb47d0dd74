//! The mask follows counters alone.
use super::*;
use crate::activation::Number;
use crate::testing::{each_engine, numbers};
use half::{bf16, f16};

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

#[test]
fn every_engine_drops_the_same_and_has_the_same_bits() {
    // Rows and keys beyond 32 bits, and a row that wraps around.
    let keys = [(key(1, 2, 3), 0), (key(5, 6, 7), 1 << 33), (u64::MAX - 20, 7)];
    let found = std::sync::Mutex::new(Vec::new());
    each_engine(|engine| {
        let mut bits = Vec::new();
        for (tokens, features) in [(1, 1), (17, 33), (40, 64)] {
            for (key, first_row) in keys {
                for rate in [0.0, 0.1, 0.3, 0.999] {
                    let rows: Vec<usize> = (0..tokens).map(|token| (token * 7 + 3) % 90).collect();
                    for rows in [None, Some(&rows[..])] {
                        let dropout = Dropout { rate, key, first_row, rows };
                        let x = numbers(1, tokens * features);
                        let out = |number, x: &[f32]| {
                            let pool = engine.pool();
                            pool.set_number(number);
                            dropout.apply(&Activation::from_rows(&pool, x, features)).to_rows()
                        };
                        let wide = out(Number::F32, &x);
                        for number in [Number::Bf16, Number::F16].into_iter().filter(|_| !engine.is_cpu()) {
                            let round = |value: &f32| match number {
                                Number::Bf16 => bf16::from_f32(*value).to_f32(),
                                _ => f16::from_f32(*value).to_f32(),
                            };
                            let x: Vec<f32> = x.iter().map(round).collect();
                            let expected: Vec<f32> = out(Number::F32, &x).iter().map(round).collect();
                            assert_eq!(out(number, &x), expected, "{number:?}, rate {rate}");
                        }
                        bits.extend(wide.into_iter().map(f32::to_bits));
                    }
                }
            }
        }
        found.lock().unwrap().push(bits);
    });
    let found = found.into_inner().unwrap();
    assert!(found.len() > 1 && found.windows(2).all(|two| two[0] == two[1]));
}
