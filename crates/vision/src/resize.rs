//! Resizing with antialiasing, to the byte as Pillow and torchvision do it.
//!
//! Both weigh the pixels under a filter that is stretched when an image shrinks, and round after each direction. They
//! differ in how precise their integer weights are, and in which direction comes first: Pillow's `src/libImaging/Resample.c`,
//! and `aten/src/ATen/native/cpu/UpSampleKernel.cpp` of PyTorch for torchvision.
use std::borrow::Cow;

use crate::Picture;
pub use tunesmith_config::vision::{Backend, Resample};

/// The weights by which the pixels of one direction are resampled.
struct Weights {
    /// For each output pixel: its first input pixel, and where its weights begin and end in `values`.
    spans: Vec<(usize, usize, usize)>,
    /// The weights as integers, where `2^bits` stands for 1.
    values: Vec<i32>,
    bits: u32,
}

const fn support(filter: Resample) -> f64 {
    match filter {
        Resample::Nearest => 0.0,
        Resample::Bilinear => 1.0,
        Resample::Bicubic => 2.0,
        Resample::Lanczos => 3.0,
    }
}

fn value(filter: Resample, x: f64) -> f64 {
    /// The parameter `a` of the bicubic filter, the same in Pillow and PyTorch.
    const A: f64 = -0.5;
    let sinc = |x: f64| {
        let x = x * std::f64::consts::PI;
        if x == 0.0 { 1.0 } else { x.sin() / x }
    };
    match filter {
        Resample::Nearest => 1.0,
        Resample::Bilinear => (1.0 - x.abs()).max(0.0),
        Resample::Bicubic => match x.abs() {
            x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
            x if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
            _ => 0.0,
        },
        Resample::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
        Resample::Lanczos => 0.0,
    }
}

impl Weights {
    fn new(filter: Resample, backend: Backend, from: usize, to: usize) -> Self {
        let scale = from as f64 / to as f64;
        let stretch = scale.max(1.0);
        let support = support(filter) * stretch;
        let (mut spans, mut exact) = (Vec::with_capacity(to), Vec::new());
        for output in 0..to {
            let center = scale * (output as f64 + 0.5);
            let first = ((center - support + 0.5) as i64).max(0) as usize;
            let end = ((center + support + 0.5) as i64).clamp(0, from as i64) as usize;
            let begins = exact.len();
            exact.extend((first..end).map(|at| value(filter, (at as f64 - center + 0.5) / stretch)));
            let sum: f64 = exact[begins..].iter().sum();
            if sum != 0.0 {
                exact[begins..].iter_mut().for_each(|weight| *weight /= sum);
            }
            spans.push((first, begins, exact.len()));
        }
        let bits = match backend {
            Backend::Pil => 22,
            Backend::Torchvision => {
                let most = exact.iter().fold(0.0f64, |most, weight| most.max(*weight));
                let fits = |bits: &u32| 0.5 + most * f64::from(1u32 << (bits + 1)) < 32768.0;
                (0..22).find(|bits| !fits(bits)).unwrap_or(22)
            }
        };
        let one = f64::from(1u32 << bits);
        let whole = |weight: &f64| (weight * one + if *weight < 0.0 { -0.5 } else { 0.5 }) as i32;
        Self { spans, values: exact.iter().map(whole).collect(), bits }
    }

    /// The weighted sum of bytes `step` apart.
    fn sum(&self, output: usize, bytes: &[u8], step: usize) -> u8 {
        let (first, begins, ends) = self.spans[output];
        let line = bytes[first * step..].iter().step_by(step);
        let sum = line.zip(&self.values[begins..ends]).map(|(&byte, &weight)| i32::from(byte) * weight).sum::<i32>();
        ((sum + (1 << (self.bits - 1))) >> self.bits).clamp(0, 255) as u8
    }
}

/// Resizes a picture. If it has this size already, it is returned unchanged.
pub fn resize(picture: &Picture, width: u32, height: u32, filter: Resample, backend: Backend) -> Cow<'_, Picture> {
    if (width, height) == (picture.width, picture.height) {
        return Cow::Borrowed(picture);
    }
    if filter == Resample::Nearest {
        return Cow::Owned(nearest(picture, width, height, backend));
    }
    let across = |from: &Picture| horizontally(from, width, filter, backend);
    let down = |from: &Picture| vertically(from, height, filter, backend);
    let vertical_first = backend == Backend::Pil && vertical_first(picture, width, height);
    Cow::Owned(if vertical_first { across(&down(picture)) } else { down(&across(picture)) })
}

/// Whether Pillow 13 resamples the vertical direction first.
fn vertical_first(picture: &Picture, width: u32, height: u32) -> bool {
    let lower = i64::from(picture.height) - i64::from(height);
    height < picture.height && lower > 2 * (i64::from(picture.width) - i64::from(width))
}

fn nearest(picture: &Picture, width: u32, height: u32, backend: Backend) -> Picture {
    let places = |to: u32, from: u32| -> Vec<usize> {
        let place = |at: f64| (at as u32).min(from - 1) as usize;
        match backend {
            Backend::Torchvision => {
                let scale = from as f32 / to as f32;
                (0..to).map(|output| place(f64::from((output as f32 + 0.5) * scale))).collect()
            }
            // Pillow adds the step repeatedly, which rounds differently from a multiplication.
            Backend::Pil => {
                let step = f64::from(from) / f64::from(to);
                let next = |at: &f64| Some(at + step);
                std::iter::successors(Some(step * 0.5), next).take(to as usize).map(place).collect()
            }
        }
    };
    let columns = places(width, picture.width);
    let line = |row: usize| {
        let start = row * picture.width as usize;
        columns.iter().flat_map(move |column| picture.rgb[(start + column) * 3..][..3].iter().copied())
    };
    Picture { width, height, rgb: places(height, picture.height).into_iter().flat_map(line).collect() }
}

fn horizontally(picture: &Picture, width: u32, filter: Resample, backend: Backend) -> Picture {
    if width == picture.width {
        return picture.clone();
    }
    let weights = Weights::new(filter, backend, picture.width as usize, width as usize);
    let mut rgb = vec![0; width as usize * picture.height as usize * 3];
    let rows = rgb.chunks_exact_mut(width as usize * 3).zip(picture.rgb.chunks_exact(picture.width as usize * 3));
    for (to, from) in rows {
        for (output, pixel) in to.as_chunks_mut::<3>().0.iter_mut().enumerate() {
            *pixel = [0, 1, 2].map(|channel| weights.sum(output, &from[channel..], 3));
        }
    }
    Picture { width, height: picture.height, rgb }
}

fn vertically(picture: &Picture, height: u32, filter: Resample, backend: Backend) -> Picture {
    if height == picture.height {
        return picture.clone();
    }
    let weights = Weights::new(filter, backend, picture.height as usize, height as usize);
    let line = picture.width as usize * 3;
    let mut rgb = vec![0; line * height as usize];
    for (output, to) in rgb.chunks_exact_mut(line).enumerate() {
        for (column, byte) in to.iter_mut().enumerate() {
            *byte = weights.sum(output, &picture.rgb[column..], line);
        }
    }
    Picture { width: picture.width, height, rgb }
}
