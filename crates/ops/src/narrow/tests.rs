//! Rounding against the `half` crate.
use super::*;
use crate::activation::Pool;
use crate::testing::{each_level, numbers};
use half::{bf16, f16};

#[test]
fn rounds_every_number_and_keeps_its_place() {
    each_level(|_| {
        for (tokens, features) in [(1, 1), (19, 5), (32, 8)] {
            let x = numbers(1, tokens * features);
            let act = Activation::from_rows(&Pool::new(), &x, features);
            let rounded: Vec<f32> = x.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
            assert_eq!(Narrow::new(&act, Half::Bf16).widen().to_rows(), rounded);
            let rounded: Vec<f32> = x.iter().map(|&value| f16::from_f32(value).to_f32()).collect();
            assert_eq!(Narrow::new(&act, Half::F16).widen().to_rows(), rounded);
        }
    });
}
