//! Rows looked up and added back, against the definition and finite differences.
use super::*;
use crate::testing::{check_gradient, each_engine, numbers};
use half::bf16;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn looks_rows_up_and_adds_them_back() {
    each_engine(|engine| {
        let (features, tokens) = (5, [3u32, 0, 3, 2, 1, 3, 0, 0, 1, 2, 3, 3, 1, 0, 2, 2, 1, 3]);
        let (table, seed) = (numbers(1, 4 * features), numbers(2, tokens.len() * features));
        let pool = engine.pool();
        let on_device = engine.array(&table);
        let x = forward(&pool, Store::F32(on_device.view()), features, &tokens, 2.0);
        let reference = |table: &[f64]| reference::forward(table, features, &tokens, 2.0);
        let double: Vec<f64> = table.iter().map(|&x| f64::from(x)).collect();
        assert!(x.to_rows().iter().zip(reference(&double)).all(|(got, want)| f64::from(*got) == want));
        let narrow: Vec<bf16> = table.iter().map(|&value| bf16::from_f32(value)).collect();
        let in_halves = engine.array(&narrow);
        let halves = forward(&pool, Store::Bf16(in_halves.view()), features, &tokens, 2.0).to_rows();
        assert_eq!(
            halves[features..2 * features],
            narrow[..features].iter().map(|x| 2.0 * x.to_f32()).collect::<Vec<_>>()
        );
        let [mut d_table, mut padded] = [(); 2].map(|()| engine.array(&vec![0.0f32; table.len()]));
        backward(&Activation::from_rows(&pool, &seed, features), &tokens, 2.0, None, d_table.view_mut());
        backward(&Activation::from_rows(&pool, &seed, features), &tokens, 2.0, Some(3), padded.view_mut());
        let (d_table, padded) = (d_table.read(), padded.read());
        assert_eq!((&padded[..3 * features], &padded[3 * features..]), (&d_table[..3 * features], &[0.0; 5][..]));
        check_gradient("table", &table, &d_table, |table| {
            reference(table).iter().zip(&seed).map(|(x, &s)| x * f64::from(s)).sum()
        });
    });
}

/// Whether `work` panics, without having changed what later work on the device needs.
fn refused(work: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(work)).is_err()
}

#[test]
fn a_token_that_has_no_row_is_refused() {
    each_engine(|engine| {
        let (pool, table) = (engine.pool(), engine.array(&numbers(1, 4 * 5)));
        let dx = Activation::from_rows(&pool, &[1.0; 10], 5);
        assert!(refused(|| drop(forward(&pool, Store::F32(table.view()), 5, &[3, 4], 1.0))));
        let mut d_table = engine.array(&[0.0f32; 4 * 5]);
        assert!(refused(|| backward(&dx, &[4, 4], 1.0, None, d_table.view_mut())));
        // The padding's token gets nothing and needs no row.
        backward(&dx, &[3, 4], 1.0, Some(4), d_table.view_mut());
        assert_eq!(d_table.read()[10..], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    });
}
