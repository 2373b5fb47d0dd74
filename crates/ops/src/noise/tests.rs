//! The noise follows counters alone, within its bound.
use super::*;
use crate::activation::Number;
use crate::dropout::key;
use crate::testing::{each_engine, numbers};
use half::{bf16, f16};

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

#[test]
fn every_engine_adds_the_same_bits() {
    let found = std::sync::Mutex::new(Vec::new());
    each_engine(|engine| {
        let mut bits = Vec::new();
        for (cu_seqlens, features) in [(&[0, 1][..], 1), (&[0, 5, 5, 17], 33), (&[0, 31, 40], 64)] {
            let tokens = *cu_seqlens.last().unwrap();
            // Rows and keys beyond 32 bits, and a row that wraps around.
            for (key, first_row) in [(key(1, 2, 3), 0), (key(5, 6, 7), 1 << 33), (u64::MAX - 20, 7)] {
                let x = numbers(1, tokens * features);
                let sum = |number, x: &[f32]| {
                    let pool = engine.pool();
                    pool.set_number(number);
                    let mut x = Activation::from_rows(&pool, x, features);
                    add(&mut x, cu_seqlens, 5.0, key, first_row);
                    x.to_rows()
                };
                for number in [Number::Bf16, Number::F16].into_iter().filter(|_| !engine.is_cpu()) {
                    let round = |value: &f32| match number {
                        Number::Bf16 => bf16::from_f32(*value).to_f32(),
                        _ => f16::from_f32(*value).to_f32(),
                    };
                    let x: Vec<f32> = x.iter().map(round).collect();
                    let expected: Vec<f32> = sum(Number::F32, &x).iter().map(round).collect();
                    assert_eq!(sum(number, &x), expected, "{number:?}");
                }
                bits.extend(sum(Number::F32, &x).into_iter().map(f32::to_bits));
            }
        }
        found.lock().unwrap().push(bits);
    });
    let found = found.into_inner().unwrap();
    assert!(found.len() > 1 && found.windows(2).all(|two| two[0] == two[1]));
}
