//! Sums against the definition in f64, rounded where they are kept in bfloat16.
use super::*;
use crate::par::TASK;
use crate::testing::{each_engine, f64s, near, numbers};
use tunesmith_device::Array;

const COUNT: usize = TASK + 77;

#[test]
fn gradients_are_added_and_taken_out_exactly() {
    each_engine(|engine| {
        let (start, grads) = (numbers(1, COUNT), numbers(2, COUNT));
        let mut sums = engine.array(&start);
        add(sums.view_mut(), engine.array(&grads).view());
        let expected: Vec<f64> = f64s(&start).iter().zip(f64s(&grads)).map(|(sum, grad)| sum + grad).collect();
        near("sums", &sums.read(), &expected, 1e-7);
        let mut taken = engine.array(&start);
        take(sums.view_mut(), taken.view_mut());
        let expected: Vec<f64> = expected.iter().zip(f64s(&start)).map(|(sum, start)| sum + start).collect();
        near("taken", &taken.read(), &expected, 2e-7);
        assert!(sums.view().equal(&vec![0.0; COUNT]));
    });
}

#[test]
fn sums_in_bfloat16_are_rounded_once_an_addition() {
    each_engine(|engine| {
        let grads = [numbers(1, COUNT), numbers(2, COUNT)];
        let mut sums = Array::<bf16>::zeros(engine.device(), COUNT);
        for grads in &grads {
            add(sums.view_mut(), engine.array(grads).view());
        }
        // Half of a unit in the last of 8 bits, twice, of sums under 2.
        let exact: Vec<f64> = f64s(&grads[0]).iter().zip(f64s(&grads[1])).map(|(one, other)| one + other).collect();
        let mut floats = Array::<f32>::zeros(engine.device(), COUNT);
        to_f32(sums.view(), floats.view_mut());
        let floats = floats.read();
        near("sums", &floats, &exact, 2.0f64.powi(-7));
        assert!(floats.iter().all(|&float| bf16::from_f32(float).to_f32() == float));
        let expected: f64 = floats.iter().map(|&float| f64::from(float).powi(2)).sum();
        assert!((squares(sums.view()) - expected).abs() < 1e-9 * expected);
        let mut taken = Array::<f32>::zeros(engine.device(), COUNT);
        take(sums.view_mut(), taken.view_mut());
        assert_eq!(taken.read(), floats);
        assert!(sums.view().equal(&vec![bf16::ZERO; COUNT]));
    });
}

#[test]
fn the_meta_device_sums_nothing() {
    let mut sums = Array::<bf16>::zeros(Device::Meta, 5);
    add(sums.view_mut(), Floats::meta(5));
    take(sums.view_mut(), FloatsMut::meta(5));
    assert_eq!(squares(sums.view()), 0.0);
}
