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

#[test]
fn a_gpu_finds_the_factor_of_clipping_and_what_is_not_finite() {
    crate::testing::each_engine(|engine| {
        if engine.is_cpu() {
            return;
        }
        let x = numbers(3, 2 * 16_384 + 13);
        let norm = reference::sum(&f64s(&x)).sqrt();
        let totals = |loss: f64| engine.array(&[loss, 7.0]);
        let narrow: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        let narrow = engine.array(&narrow);
        for (most, scale) in [(1.0, 1.0), (1e6, 1.0), (0.0, 1.0), (1.0, 1024.0)] {
            let totals = totals(3.5);
            let limits = Limits { totals: totals.view(), other: 0.5, most, scale };
            let expected = if most > 0.0 { (most / (norm / scale + 1e-6)).min(1.0) } else { 1.0 } / scale;
            let x = engine.array(&x);
            let found = verdict(Gradients::F32(x.view()), limits);
            let Factor::Found(factor) = found.factor() else { panic!("it is on the GPU") };
            assert!((f64::from(factor.read()[0]) / expected - 1.0).abs() < 1e-6, "{most} {scale}");
            let [found, loss, right] = found.read();
            assert!((found * scale / norm - 1.0).abs() < 1e-12 && (loss, right) == (3.5, 7.0));
            let [rounded, ..] = verdict(Gradients::Bf16(narrow.view()), limits).read();
            assert!((rounded * scale / norm - 1.0).abs() < 1e-3 && rounded != found);
        }
        let skips = |x: &[f32], loss: f64, other: f64| {
            let (x, totals) = (engine.array(x), totals(loss));
            let found =
                verdict(Gradients::F32(x.view()), Limits { totals: totals.view(), other, most: 1.0, scale: 1.0 });
            let Factor::Found(factor) = found.factor() else { panic!("it is on the GPU") };
            factor.read()[0].is_nan()
        };
        assert!(!skips(&x, 1.0, 0.0));
        assert!(skips(&[1.0, f32::NAN], 1.0, 0.0) && skips(&[f32::INFINITY; 40], 1.0, 0.0));
        assert!(skips(&x, f64::NAN, 0.0) && skips(&x, f64::INFINITY, 0.0) && skips(&x, 1.0, f64::NAN));
    });
}
