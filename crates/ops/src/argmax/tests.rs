//! The largest feature, across tasks.
use super::cpu::SPAN;
use super::*;
use crate::testing::{each_engine, numbers};

#[test]
fn the_first_of_the_largest() {
    each_engine(|engine| {
        let (pool, features) = (engine.pool(), 2 * SPAN + 7);
        let mut rows = numbers(1, 19 * features);
        let places: Vec<u32> = (0..19).map(|token| token * 433).collect();
        for (row, &place) in rows.chunks_exact_mut(features).zip(&places) {
            row[place as usize] = 9.0;
            row[features - 1] = 9.0;
        }
        let expected: Vec<Option<u32>> = places.into_iter().map(Some).collect();
        assert_eq!(argmax(&Activation::from_rows(&pool, &rows, features)), expected);
    });
}

#[test]
fn a_row_that_is_not_finite_has_none() {
    each_engine(|engine| {
        let (pool, features) = (engine.pool(), SPAN + 7);
        let wrong = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        let mut rows = numbers(1, 5 * features);
        for ((row, value), place) in rows.chunks_exact_mut(features).zip(wrong).zip([0, 3, 5, features - 1]) {
            row[place] = value;
        }
        let found = argmax(&Activation::from_rows(&pool, &rows, features));
        assert_eq!(found.iter().map(Option::is_some).collect::<Vec<bool>>(), [false, false, true, false, true]);
        let all = vec![f32::NEG_INFINITY; features];
        assert_eq!(argmax(&Activation::from_rows(&pool, &all, features)), [None]);
    });
}
