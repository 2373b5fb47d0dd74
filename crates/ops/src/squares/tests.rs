//! The sum against the definition, and the same bits on any number of threads.
use super::*;
use crate::par::TASK;
use crate::testing::{each_engine, f64s, numbers};

#[test]
fn any_length_is_summed_to_the_same_bits_on_any_number_of_threads() {
    for count in [0, 1, 7, 9, TASK, 2 * TASK + 13] {
        let x = numbers(3, count);
        let expected = reference::sum(&f64s(&x));
        let on = |threads: usize| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| sum((&x).into()))
        };
        assert!((on(1) - expected).abs() <= 1e-12 * expected, "{count}: {} != {expected}", on(1));
        assert_eq!(on(1).to_bits(), on(3).to_bits(), "{count}");
    }
}

#[test]
fn what_is_not_finite_shows_and_the_meta_device_has_no_numbers() {
    assert!(sum([1.0, f32::NAN][..].into()).is_nan() && sum([f32::INFINITY][..].into()).is_infinite());
    assert_eq!(sum(Floats::meta(5)), 0.0);
}

#[test]
fn every_engine_sums_alike() {
    each_engine(|engine| {
        for count in [1, 7, 300, TASK, 2 * TASK + 13] {
            let x = numbers(3, count);
            let (found, expected) = (sum(engine.array(&x).view()), reference::sum(&f64s(&x)));
            assert!((found - expected).abs() <= 1e-12 * expected, "{engine:?} {count}: {found} != {expected}");
        }
        assert!(sum(engine.array(&[1.0, f32::NAN]).view()).is_nan());
    });
}
