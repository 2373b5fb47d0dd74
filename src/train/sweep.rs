//! `tunesmith bench --sweep`: steps of the same rows, cut in every way that a person would try and as the probe chooses,
//! in turns, so that the choice can be held against the best.
use std::time::Instant;

use super::bench::{self, Request};
use super::feed;
use super::gauge::Gauge;
use super::optimizer::slots;
use super::probe::{self, Asked, Found, Sizes};
use super::sharing::Sharing;
use super::step::{Attempt, attempt};
use crate::comm::World;
use crate::comm::single::Single;
use crate::config::Auto;
use crate::data::{Sampler, SamplerOptions, Split};
use crate::error::Result;
use crate::memory::{self, Budget};
use crate::model::Model;
use crate::optim::{AdamW, Betas, Optimizer};

/// One way to cut a step.
#[derive(Debug, Clone)]
pub struct Tried {
    /// The way.
    pub sizes: Sizes,
    /// The best of its rounds; none where it does not fit.
    pub tokens_per_second: Option<f64>,
    /// The most bytes that the process held.
    pub bytes: u64,
}

/// What a sweep found.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// The probe's choice and what it is made from.
    pub found: Found,
    /// The choice first, then what a person would try.
    pub tried: Vec<Tried>,
}

impl Sweep {
    /// The choice's tokens per second over the best of all.
    pub fn ratio(&self) -> f64 {
        let speeds = || self.tried.iter().filter_map(|tried| tried.tokens_per_second);
        let best = speeds().fold(f64::MIN_POSITIVE, f64::max);
        self.tried.first().and_then(|tried| tried.tokens_per_second).unwrap_or(0.0) / best
    }
}

/// Lets the probe choose for steps of `request.batch` rows within `budget` bytes, then times `request.steps` rounds of
/// every way.
///
/// # Errors
/// Those of [`bench::run`]; [`crate::Kind::Memory`]: not even one row fits.
pub fn run(request: &Request, budget: Option<u64>) -> Result<Sweep> {
    let _budget = budget.map(Budget::new);
    let config = &request.config;
    let arch = bench::shape(&request.shape)?;
    let mut model = Model::load(&arch, None, config)?;
    let split = Split::from_examples(&bench::rows(request, arch.vocab_size))?;
    let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
    let mut optimizer = Optimizer::new(Box::new(AdamW(betas)), slots(&model.params.specs), model.params.values());
    let mut sharing = Sharing::copies(&model.params, &optimizer, World::ALONE);
    let options =
        SamplerOptions { batch_size: 1, grad_accum: 1, seed: 1, shuffle: true, group_by_length: false, packing: None };
    let mut sampler = Sampler::new(&split.lengths(), options);
    let mean = split.tokens() as f64 / split.len() as f64;
    let asked = Asked {
        batch_size: Auto::Auto,
        grad_accum: Auto::Auto,
        target_tokens: (mean * request.batch as f64).round() as usize,
        ..Asked::of(config, 1)
    };
    let mut gauge = Gauge::new(&mut model, &split, &sampler, 0);
    let found = probe::choose(&mut gauge, &asked, config)?;
    drop(gauge);
    let rows = found.sizes.batch_size * found.sizes.grad_accum;
    sampler.resize(rows, 1);
    let step: Vec<Vec<usize>> = sampler.next_step().into_iter().flatten().collect();
    let mut tried: Vec<Tried> = ways(found.sizes, step.len())
        .into_iter()
        .map(|sizes| Tried { sizes, tokens_per_second: None, bytes: 0 })
        .collect();
    for _ in 0..request.steps {
        for tried in &mut tried {
            let micro_batches: Vec<_> = step.chunks(tried.sizes.batch_size).map(<[_]>::to_vec).collect();
            let batches = feed::batches(&split, &micro_batches, tried.sizes.max_tokens_per_pass)?;
            model.set_checkpointing(tried.sizes.checkpointing);
            model.release();
            memory::reset_peak();
            // Once for the memory, which is fresh, then for the time.
            let mut time = || -> Result<Option<f64>> {
                let began = Instant::now();
                let done = attempt(&mut model, &mut optimizer, (&Single, &mut sharing), &batches, 1e-4, 1.0)?;
                Ok(match done {
                    Attempt::Done(stats) => Some(stats.tokens as f64 / began.elapsed().as_secs_f64()),
                    Attempt::TooLarge { .. } => None,
                })
            };
            let speed = if time()?.is_some() { time()? } else { None };
            tried.bytes = tried.bytes.max(memory::peak());
            tried.tokens_per_second = match (tried.tokens_per_second, speed) {
                (Some(before), Some(now)) => Some(before.max(now)),
                (before, now) => before.or(now),
            };
        }
    }
    Ok(Sweep { found, tried })
}

/// The choice, then micro-batches of 1, 2, 4, … rows, and passes of other lengths.
fn ways(chosen: Sizes, rows: usize) -> Vec<Sizes> {
    let mut ways = vec![chosen];
    let mut batch_size = 1;
    while batch_size <= rows {
        ways.push(Sizes { batch_size, grad_accum: rows.div_ceil(batch_size), ..chosen });
        batch_size *= 2;
    }
    for max_tokens_per_pass in [Some(256), Some(512), Some(1024), Some(2048), None] {
        ways.push(Sizes { batch_size: rows, grad_accum: 1, max_tokens_per_pass, ..chosen });
    }
    let mut distinct: Vec<Sizes> = Vec::new();
    for way in ways {
        if !distinct.contains(&way) {
            distinct.push(way);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Checkpointing;

    #[test]
    fn every_way_is_tried_once_and_the_choice_first() {
        let chosen =
            Sizes { batch_size: 4, grad_accum: 2, checkpointing: Checkpointing::CHEAP, max_tokens_per_pass: Some(512) };
        let ways = ways(chosen, 8);
        assert_eq!(ways[0], chosen);
        assert_eq!(ways.iter().filter(|way| **way == chosen).count(), 1);
        assert_eq!(ways.len(), 1 + 3 + 4, "{ways:?}");
        let tried = |speed| Tried { sizes: chosen, tokens_per_second: speed, bytes: 0 };
        let found = Found { sizes: chosen, passes: Vec::new(), reasons: Vec::new(), bytes: 0 };
        let sweep = Sweep { found, tried: vec![tried(Some(95.0)), tried(Some(100.0)), tried(None)] };
        assert!((sweep.ratio() - 0.95).abs() < 1e-12);
    }
}
