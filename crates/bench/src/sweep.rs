//! `tunesmith bench --sweep`: compares the automatic split of a step with every split that a person would try. All
//! splits train the same rows, and their measurements alternate.
use std::time::Instant;

use super::training::{self, TrainingRequest};
use tunesmith_base::error::Result;
use tunesmith_comm::World;
use tunesmith_comm::single::Single;
use tunesmith_config::{Auto, Checkpointing};
use tunesmith_data::{Batch, Sampler, SamplerOptions, Split};
use tunesmith_device::memory::{self, Budget};
use tunesmith_model::Model;
use tunesmith_model::device::device;
use tunesmith_optim::{AdamW, Betas, Optimizer};
use tunesmith_parallel::ddp_zero::Sharing;
use tunesmith_parallel::optimizer::slots;
use tunesmith_train::autobatch::batch_plan::{BatchPlan, BatchRequest};
use tunesmith_train::autobatch::choose_batch::{self, Choice};
use tunesmith_train::autobatch::measure_pass::PassMeasurer;
use tunesmith_train::memory_prediction::MemoryModel;
use tunesmith_train::micro_batches;
use tunesmith_train::step::{Attempt, attempt};

/// One split of a step, and its measurements.
#[derive(Debug, Clone)]
pub struct Tried {
    /// The split into micro-batches and passes.
    pub sizes: BatchPlan,
    /// The best of all rounds; `None` if it does not fit into memory.
    pub tokens_per_second: Option<f64>,
    /// Peak memory of the process, in bytes.
    pub bytes: u64,
}

/// The result of a sweep.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// The memory budget of all splits; `None` without a limit.
    pub budget: Option<u64>,
    /// The choice of the probe, with its measurements.
    pub found: Choice,
    /// All splits; the first is the choice.
    pub tried: Vec<Tried>,
    /// Tokens per second of the choice and of the fastest other split, measured again in turns. The fastest of many
    /// measurements was partly lucky, so only this second comparison counts.
    pub duel: Option<[f64; 2]>,
}

impl Sweep {
    /// Tokens per second of the choice, divided by those of the fastest split.
    pub fn ratio(&self) -> f64 {
        self.duel.map_or(1.0, |[choice, other]| choice / other.max(choice).max(f64::MIN_POSITIVE))
    }

    /// The fastest split besides the choice.
    pub fn rival(&self) -> Option<&Tried> {
        let speed = |tried: &&Tried| tried.tokens_per_second.unwrap_or(0.0);
        let rivals = self.tried.iter().skip(1).filter(|tried| tried.tokens_per_second.is_some());
        rivals.max_by(|one, other| speed(one).total_cmp(&speed(other)))
    }
}

/// The model, optimizer, and rows that all splits share.
struct Bench<'a> {
    model: Model,
    optimizer: Optimizer,
    sharing: Sharing,
    split: &'a Split,
    step: Vec<Vec<usize>>,
}

impl Bench<'_> {
    /// Splits the rows of the step into passes.
    fn passes(&self, sizes: &BatchPlan) -> Result<Vec<Batch>> {
        let micro_batches: Vec<_> = self.step.chunks(sizes.batch_size).map(<[_]>::to_vec).collect();
        micro_batches::batches(self.split, &micro_batches, sizes.max_tokens_per_pass)
    }

    /// Runs the step twice, since the first one is slowed by fresh memory. Returns the tokens per second of the second,
    /// and the peak bytes of the process.
    fn time(&mut self, sizes: &BatchPlan) -> Result<(Option<f64>, u64)> {
        let batches = self.passes(sizes)?;
        self.model.set_checkpointing(sizes.checkpointing);
        self.model.release();
        let device = self.model.device();
        memory::reset_peak(device);
        let mut speed = None;
        for _ in 0..2 {
            let began = Instant::now();
            speed =
                match attempt(&mut self.model, &mut self.optimizer, &Single, &mut self.sharing, &batches, 1e-4, 1.0)? {
                    Attempt::Done(stats) => Some(stats.wait().tokens as f64 / began.elapsed().as_secs_f64()),
                    Attempt::TooLarge { .. } => return Ok((None, memory::peak(device))),
                };
        }
        Ok((speed, memory::peak(device)))
    }
}

/// Lets the probe choose the split for steps of `request.batch` rows within `budget` bytes. Then times `request.steps`
/// rounds of every split, and twice as many of the choice and its fastest rival.
///
/// # Errors
/// Those of [`training::run`]; [`tunesmith_base::Kind::Memory`]: not even one row fits.
pub fn run(request: &TrainingRequest, budget: Option<u64>) -> Result<Sweep> {
    let config = &request.config;
    let device = device(config.model.device)?;
    let _budget = budget.map(|bytes| Budget::new(device, bytes));
    let arch = training::shape(&request.shape)?;
    let mut model = Model::load(&arch, None, config)?;
    let split = Split::from_examples(&training::rows(request, arch.vocab_size))?;
    let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
    let optimizer = Optimizer::new(Box::new(AdamW(betas)), slots(&model.params.specs), model.params.values());
    let options =
        SamplerOptions { batch_size: 1, grad_accum: 1, seed: 1, shuffle: true, group_by_length: false, packing: None };
    let mut sampler = Sampler::new(&split.lengths(), options);
    let mean = split.tokens() as f64 / split.len() as f64;
    let batch = BatchRequest {
        batch_size: Auto::Auto,
        grad_accum: Auto::Auto,
        target_tokens: (mean * request.batch as f64).round() as usize,
        ..BatchRequest::new(&config.train, &arch, 1)
    };
    let mut measurer = PassMeasurer::new(&mut model, &split, &sampler, (budget, 0), &Single)?;
    let found = choose_batch::choose(&mut measurer, &batch, &MemoryModel::new(config, &arch, None, device))?;
    drop(measurer);
    let rows = found.sizes.batch_size * found.sizes.grad_accum;
    sampler.resize(rows, 1);
    let step: Vec<Vec<usize>> = sampler.next_step().into_iter().flatten().collect();
    let sharing = Sharing::copies(&model.params, &optimizer, World::ALONE);
    let mut bench = Bench { model, optimizer, sharing, split: &split, step };
    // Splits that lead to the same passes are measured once.
    let mut seen = Vec::new();
    let mut tried = Vec::new();
    for sizes in ways(found.sizes, bench.step.len()) {
        let passes = bench.passes(&sizes)?.into_iter().map(|batch| batch.cu_seqlens).collect::<Vec<_>>();
        let way = (sizes.checkpointing, passes);
        if !seen.contains(&way) {
            seen.push(way);
            tried.push(Tried { sizes, tokens_per_second: None, bytes: 0 });
        }
    }
    for _ in 0..request.steps {
        for tried in &mut tried {
            let (speed, bytes) = bench.time(&tried.sizes)?;
            tried.bytes = tried.bytes.max(bytes);
            tried.tokens_per_second = [tried.tokens_per_second, speed].into_iter().flatten().reduce(f64::max);
        }
    }
    let mut sweep = Sweep { budget, found, tried, duel: None };
    if let Some(rival) = sweep.rival().map(|rival| rival.sizes) {
        let mut best = [0.0f64; 2];
        for round in 0..2 * request.steps {
            // Each of the two goes first in every other round.
            for at in [round % 2, 1 - round % 2] {
                let (speed, _) = bench.time(if at == 0 { &sweep.found.sizes } else { &rival })?;
                best[at] = best[at].max(speed.unwrap_or(0.0));
            }
        }
        sweep.duel = Some(best);
    }
    Ok(sweep)
}

/// The splits to try: the choice, then other settings of `gradient_checkpointing`, micro-batches of 1, 2, 4, … rows, and
/// other pass lengths.
fn ways(chosen: BatchPlan, rows: usize) -> Vec<BatchPlan> {
    let mut ways = vec![chosen];
    for checkpointing in [Checkpointing::NONE, Checkpointing::CHEAP, Checkpointing::FULL] {
        ways.push(BatchPlan { checkpointing, ..chosen });
    }
    let mut batch_size = 1;
    while batch_size <= rows {
        ways.push(BatchPlan { batch_size, grad_accum: rows.div_ceil(batch_size), ..chosen });
        batch_size *= 2;
    }
    for max_tokens_per_pass in [Some(256), Some(512), Some(1024), Some(2048), None] {
        ways.push(BatchPlan { batch_size: rows, grad_accum: 1, max_tokens_per_pass, ..chosen });
    }
    let mut distinct: Vec<BatchPlan> = Vec::new();
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

    #[test]
    fn every_way_is_tried_once_and_the_choice_first() {
        let chosen = BatchPlan {
            batch_size: 4,
            grad_accum: 2,
            checkpointing: Checkpointing::CHEAP,
            max_tokens_per_pass: Some(512),
        };
        let ways = ways(chosen, 8);
        assert_eq!(ways[0], chosen);
        assert_eq!(ways.iter().filter(|way| **way == chosen).count(), 1);
        assert_eq!(ways.len(), 1 + 2 + 3 + 4, "{ways:?}");
        let tried = |speed| Tried { sizes: chosen, tokens_per_second: speed, bytes: 0 };
        let found = Choice { sizes: chosen, passes: Vec::new(), reasons: Vec::new(), bytes: 0 };
        let mut sweep =
            Sweep { budget: None, found, tried: vec![tried(Some(95.0)), tried(Some(100.0)), tried(None)], duel: None };
        assert_eq!(sweep.rival().unwrap().tokens_per_second, Some(100.0));
        for (duel, ratio) in [([95.0, 100.0], 0.95), ([101.0, 100.0], 1.0)] {
            sweep.duel = Some(duel);
            assert!((sweep.ratio() - ratio).abs() < 1e-12);
        }
    }
}
