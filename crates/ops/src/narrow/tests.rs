//! Rounding against the `half` crate.
use super::*;
use crate::testing::{each_engine, numbers};
use half::{bf16, f16};

#[test]
fn rounds_every_number_and_keeps_its_place() {
    each_engine(|engine| {
        for (tokens, features) in [(1, 1), (19, 5), (32, 8)] {
            let mut x = numbers(1, tokens * features);
            // The largest, the smallest of either type, and what rounds to infinity in one.
            for (to, value) in x.iter_mut().zip([65_504.0, 65_520.0, 6e-8, 3e-8, 1e-40, f32::MAX, -1e-5]) {
                *to = value;
            }
            let act = Activation::from_rows(&engine.pool(), &x, features);
            let rounded: Vec<f32> = x.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
            assert_eq!(Narrow::new(&act, Half::Bf16).widen().to_rows(), rounded);
            let rounded: Vec<f32> = x.iter().map(|&value| f16::from_f32(value).to_f32()).collect();
            assert_eq!(Narrow::new(&act, Half::F16).widen().to_rows(), rounded);
        }
    });
}
