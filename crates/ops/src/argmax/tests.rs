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
        assert_eq!(argmax(&Activation::from_rows(&pool, &rows, features)), places);
    });
}
