//! The order of training rows. It depends on a seed, changes each epoch, and can be resumed at any step from three
//! numbers.
use serde::{Deserialize, Serialize};

use super::pack::pack;
use super::rng::shuffle;

/// How many micro-batches of rows `group_by_length` sorts together, as in Transformers.
const GROUP: usize = 50;
/// The random stream of packing. An epoch uses its number as its stream.
const PACKING_STREAM: u64 = u64::MAX;

/// The settings that decide the order and the size of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerOptions {
    /// Rows of a rank's micro-batch (`train.batch_size`).
    pub batch_size: usize,
    /// Micro-batches per step, of all ranks together.
    pub grad_accum: usize,
    /// The seed of every order (`train.data_seed`).
    pub seed: u64,
    /// Whether each epoch has a new random order. Without, rows keep the order of the files.
    pub shuffle: bool,
    /// Whether micro-batches have rows of similar length.
    pub group_by_length: bool,
    /// Packs examples into rows of at most this many tokens.
    pub packing: Option<usize>,
}

/// A position in the order of training rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// The seed of the order.
    pub seed: u64,
    /// The number of the epoch, from 0.
    pub epoch: u64,
    /// Steps of that epoch that are done.
    pub step: usize,
}

/// The example indices of a step: `step[micro_batch][row][part]`. Without packing, a row has one part.
pub type Step = Vec<Vec<Vec<usize>>>;

/// Draws the examples of each optimizer step, epoch after epoch.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    rows: Rows,
    /// Tokens of each row; empty unless the order depends on them.
    row_lengths: Vec<u32>,
    state: SamplerState,
    /// The rows in the order of `state.epoch`.
    order: Vec<u32>,
}

/// The examples of each row. A set may have tens of millions, so this is kept small.
#[derive(Debug, Clone)]
enum Rows {
    /// One example per row, in the order of the files.
    Single(usize),
    /// All examples in the order of packing, and where each row ends.
    Packed { examples: Vec<u32>, ends: Vec<u32> },
}

impl Rows {
    fn packed(rows: Vec<Vec<usize>>) -> Self {
        let (mut examples, mut ends) = (Vec::new(), Vec::with_capacity(rows.len()));
        for row in rows {
            examples.extend(row.into_iter().map(|example| example as u32));
            ends.push(examples.len() as u32);
        }
        Self::Packed { examples, ends }
    }

    const fn len(&self) -> usize {
        match self {
            Self::Single(rows) => *rows,
            Self::Packed { ends, .. } => ends.len(),
        }
    }

    fn examples(&self, row: usize) -> Vec<usize> {
        match self {
            Self::Single(_) => vec![row],
            Self::Packed { examples, ends } => {
                let start = if row == 0 { 0 } else { ends[row - 1] as usize };
                examples[start..ends[row] as usize].iter().map(|&example| example as usize).collect()
            }
        }
    }
}

impl Sampler {
    /// A sampler over examples of these lengths, at the start of the first epoch.
    pub fn new(lengths: &[usize], options: SamplerOptions) -> Self {
        let rows = match options.packing {
            Some(capacity) => {
                let mut examples: Vec<usize> = (0..lengths.len()).collect();
                if options.shuffle {
                    shuffle(&mut examples, options.seed, PACKING_STREAM);
                }
                Rows::packed(pack(lengths, &examples, capacity))
            }
            None => Rows::Single(lengths.len()),
        };
        let length = |row| rows.examples(row).into_iter().map(|example| lengths[example] as u32).sum();
        let row_lengths = if options.group_by_length { (0..rows.len()).map(length).collect() } else { Vec::new() };
        let state = SamplerState { seed: options.seed, epoch: 0, step: 0 };
        let mut sampler = Self { options, rows, row_lengths, state, order: Vec::new() };
        sampler.order = sampler.epoch_order(0);
        sampler
    }

    /// Changes the size of steps and goes back to the first epoch.
    pub fn resize(&mut self, batch_size: usize, grad_accum: usize) {
        self.options = SamplerOptions { batch_size, grad_accum, ..self.options };
        self.state = SamplerState { epoch: 0, step: 0, ..self.state };
        self.order = self.epoch_order(0);
    }

    /// The examples of a row: one, or several with packing.
    pub fn row(&self, row: usize) -> Vec<usize> {
        self.rows.examples(row)
    }

    /// Optimizer steps per epoch. The last one may have fewer rows.
    pub fn steps_per_epoch(&self) -> usize {
        self.rows.len().div_ceil(self.rows_per_step())
    }

    /// Rows per epoch. With packing a row has several examples.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    fn rows_per_step(&self) -> usize {
        (self.options.batch_size * self.options.grad_accum).max(1)
    }

    /// The examples of the next step. After the last step of an epoch the next epoch begins. Empty only if there are no
    /// examples.
    pub fn next_step(&mut self) -> Step {
        if self.epoch_is_over() {
            self.state = SamplerState { epoch: self.state.epoch + 1, step: 0, ..self.state };
            self.order = self.epoch_order(self.state.epoch);
        }
        self.state.step += 1;
        self.step_of(&self.order, self.state.step - 1)
    }

    /// The step that [`Self::next_step`] will give, without moving on.
    pub fn peek(&self) -> Step {
        if self.epoch_is_over() {
            self.step_of(&self.epoch_order(self.state.epoch + 1), 0)
        } else {
            self.step_of(&self.order, self.state.step)
        }
    }

    fn epoch_is_over(&self) -> bool {
        self.state.step == self.steps_per_epoch() && self.rows.len() > 0
    }

    /// The examples of step `step`, from 0, of an epoch with this order.
    fn step_of(&self, order: &[u32], step: usize) -> Step {
        let rows_per_step = self.rows_per_step();
        let begin = (step * rows_per_step).min(order.len());
        let rows = &order[begin..(begin + rows_per_step).min(order.len())];
        rows.chunks(self.options.batch_size.max(1))
            .map(|micro_batch| micro_batch.iter().map(|&row| self.rows.examples(row as usize)).collect())
            .collect()
    }

    /// Finished epochs, including the fraction of the current one.
    pub fn epoch(&self) -> f64 {
        self.state.epoch as f64 + self.state.step as f64 / self.steps_per_epoch().max(1) as f64
    }

    /// The current position, which a checkpoint stores.
    pub const fn state(&self) -> SamplerState {
        self.state
    }

    /// Goes to a stored position and draws the order of its epoch again. Returns false if the position belongs to
    /// another sampler: its seed differs, or its step is beyond the steps of an epoch.
    #[must_use]
    pub fn restore(&mut self, state: SamplerState) -> bool {
        if state.seed != self.options.seed || state.step > self.steps_per_epoch() {
            return false;
        }
        self.state = state;
        self.order = self.epoch_order(state.epoch);
        true
    }

    fn epoch_order(&self, epoch: u64) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.rows.len() as u32).collect();
        if self.options.shuffle {
            shuffle(&mut order, self.options.seed, epoch);
        }
        if self.options.group_by_length {
            self.group(&mut order);
        }
        order
    }

    /// Sorts each group of micro-batches by length, longest first. The longest row of all comes first, so that a lack
    /// of memory shows in the first step.
    fn group(&self, order: &mut [u32]) {
        let batch = self.options.batch_size.max(1);
        let size = batch * (order.len() / (batch * 4)).clamp(1, GROUP);
        for group in order.chunks_mut(size) {
            group.sort_by_key(|&row| std::cmp::Reverse(self.row_lengths[row as usize]));
        }
        let longest = (0..order.len())
            .step_by(size)
            .max_by_key(|&at| (self.row_lengths[order[at] as usize], std::cmp::Reverse(at)));
        if let Some(longest) = longest {
            order.swap(0, longest);
        }
    }
}
