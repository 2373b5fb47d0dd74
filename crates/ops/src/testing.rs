//! Helpers for tests of kernels, here and in the crates above: pseudo-random numbers, a run at every SIMD level and on
//! a GPU, and comparison with finite differences.
use super::activation::Pool;
use super::simd::{self, Level};
use std::sync::Arc;
use tunesmith_device::{Array, Device, Element, gpu};

/// `count` numbers in -1..1, the same for the same `seed`.
pub fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The same numbers in f64.
pub fn f64s(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|&number| f64::from(number)).collect()
}

/// Asserts that each number is near its reference: within `limit`, or within that share of a reference above 1.
///
/// # Panics
/// If one is not.
pub fn near(what: &str, got: &[f32], expected: &[f64], limit: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: as many numbers");
    for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - expected).abs();
        assert!(error <= limit * expected.abs().max(1.0), "{what}[{index}]: {got} != {expected}");
    }
}

/// Runs `test` at each SIMD level that this processor has, on two threads of its own.
///
/// # Panics
/// If the system does not give the threads.
pub fn each_level(test: impl Fn(Level) + Sync) {
    for &level in Level::ALL {
        if level <= simd::detect() {
            at_level(level, || test(level));
        }
    }
}

/// Runs `test` at the best level of this processor's vectors without AMX tiles, on two threads of its own.
///
/// # Panics
/// If the system does not give the threads.
pub fn in_vectors(test: impl FnOnce() + Send) {
    at_level(simd::detect().vectors(), test);
}

fn at_level(level: Level, test: impl FnOnce() + Send) {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(2).start_handler(move |_| simd::use_on_thread(level));
    threads.build().expect("two threads").install(test);
}

/// Where an op runs in a test ([`each_engine`]).
#[derive(Debug, Clone, Copy)]
pub struct Engine {
    device: Device,
}

impl Engine {
    /// The device on which an op's operands have to be.
    pub const fn device(self) -> Device {
        self.device
    }

    /// Whether it is the CPU, at some SIMD level.
    pub fn is_cpu(self) -> bool {
        self.device == Device::Cpu
    }

    /// Whether it is a GPU that multiplies FP8, as the stand-in does.
    pub fn multiplies_fp8(self) -> bool {
        matches!(self.device, Device::Cuda(ordinal) if gpu::multiplies_fp8(ordinal))
    }

    /// A new pool of activations on the engine's device.
    pub fn pool(self) -> Arc<Pool> {
        Pool::on(self.device)
    }

    /// A copy of the numbers on the engine's device.
    pub fn array<T: Element>(self, values: &[T]) -> Array<T> {
        Array::of(self.device, values)
    }
}

/// Runs `test` on the CPU at each SIMD level ([`each_level`]), then on a GPU: the stand-in, or GPU 0 of this machine if
/// `TUNESMITH_TEST_GPU` is set.
///
/// # Panics
/// As [`each_level`], or if the stand-in cannot be built.
pub fn each_engine(test: impl Fn(Engine) + Sync) {
    each_level(|_| test(Engine { device: Device::Cpu }));
    tunesmith_device::cuda::testing::use_stand_in();
    let run = || {
        test(Engine { device: Device::Cuda(0) });
        Ok(())
    };
    tunesmith_device::memory::guarded(run).expect("the GPU does all that it is told");
}

/// Compares the gradient `got` of `f` at `at` with central differences in f64, for up to 40 entries.
///
/// # Panics
/// If they differ.
pub fn check_gradient(what: &str, at: &[f32], got: &[f32], f: impl Fn(&[f64]) -> f64) {
    assert_eq!(at.len(), got.len(), "{what}: a derivative for each input");
    let mut point: Vec<f64> = at.iter().map(|&value| f64::from(value)).collect();
    let largest = got.iter().fold(1e-3f64, |most, value| most.max(f64::from(value.abs())));
    for index in (0..at.len()).step_by(at.len().div_ceil(40).max(1)) {
        let (centre, h) = (point[index], 1e-5);
        point[index] = centre + h;
        let above = f(&point);
        point[index] = centre - h;
        let below = f(&point);
        point[index] = centre;
        let expected = (above - below) / (2.0 * h);
        let error = (f64::from(got[index]) - expected).abs();
        assert!(error <= 2e-5 * largest.max(1.0), "{what}[{index}]: {} != {expected}", got[index]);
    }
}
