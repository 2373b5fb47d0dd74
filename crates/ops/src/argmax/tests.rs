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

#[test]
fn of_tokens_as_of_features() {
    for tokens in [1, 15, 16, 33, 5003] {
        let mut rows = numbers(2, 7 * tokens);
        // Ties, in one lane and in two; what is not finite; nothing finite.
        for (row, wrong) in rows.chunks_exact_mut(tokens).zip([9.0, 9.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            row[tokens / 2] = wrong;
            row[tokens - 1] = wrong;
            row[(tokens / 2 + 16).min(tokens - 1)] = wrong;
        }
        rows[6 * tokens..].fill(f32::NEG_INFINITY);
        let across: Vec<f32> = (0..7 * tokens).map(|at| rows[at % 7 * tokens + at / 7]).collect();
        each_engine(|engine| {
            let pool = engine.pool();
            if pool.device() == Device::Cpu {
                let found = argmax_of_tokens(&Activation::from_rows(&pool, &across, 7));
                assert_eq!(found, argmax(&Activation::from_rows(&pool, &rows, tokens)), "{tokens} tokens");
            }
        });
    }
}
