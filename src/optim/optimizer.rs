//! What all optimizers share: the tensors they update, the state they keep beside each, and how a step walks them.
//!
//! An optimizer is a [`Rule`]: it names the state of a tensor and writes the update of one tensor. Allocation, threads,
//! learning rates by tensor, saving and loading are done here, once.
use super::loss_scale::LossScaler;
use rayon::prelude::*;

/// Values in a task.
pub const TASK: usize = 1 << 16;

/// A trained tensor, as an optimizer sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Slot {
    /// Its name.
    pub name: String,
    /// Row-major sizes. Slots lie end to end in the flat buffer of values.
    pub shape: Vec<usize>,
    /// Whether weight decay applies to it.
    pub decay: bool,
    /// Its learning rate by that of the run.
    pub lr_scale: f64,
}

impl Slot {
    /// How many values it has.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How a state tensor's numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// A byte: a place in a code map.
    U8,
}

/// A state tensor that a rule asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSpec {
    /// What it is: the suffix of its name in a checkpoint.
    pub name: &'static str,
    /// Row-major sizes.
    pub shape: Vec<usize>,
    /// Its numbers.
    pub dtype: Dtype,
}

impl StateSpec {
    /// A float for each value of the tensor.
    pub fn like(name: &'static str, slot: &Slot) -> Self {
        Self::floats(name, slot.shape.clone())
    }

    /// Floats of any shape.
    pub const fn floats(name: &'static str, shape: Vec<usize>) -> Self {
        Self { name, shape, dtype: Dtype::F32 }
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        let count = self.shape.iter().product::<usize>() as u64;
        match self.dtype {
            Dtype::F32 => 4 * count,
            Dtype::U8 => count,
        }
    }
}

/// A state tensor's numbers.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// Of [`Dtype::F32`].
    F32(Vec<f32>),
    /// Of [`Dtype::U8`].
    U8(Vec<u8>),
}

impl State {
    fn zeros(spec: &StateSpec) -> Self {
        let count = spec.shape.iter().product();
        match spec.dtype {
            Dtype::F32 => Self::F32(vec![0.0; count]),
            Dtype::U8 => Self::U8(vec![0; count]),
        }
    }

    /// Its floats; none where it holds bytes.
    pub fn floats(&mut self) -> &mut [f32] {
        match self {
            Self::F32(values) => values,
            Self::U8(_) => &mut [],
        }
    }

    /// Its bytes; none where it holds floats.
    pub fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::U8(values) => values,
            Self::F32(_) => &mut [],
        }
    }
}

/// The update of one tensor.
#[derive(Debug)]
pub struct Update<'a> {
    /// Which.
    pub slot: &'a Slot,
    /// Its values.
    pub values: &'a mut [f32],
    /// Their gradients before clipping.
    pub grads: &'a [f32],
    /// What gradients are multiplied by.
    pub factor: f32,
    /// The tensor's learning rate in this step.
    pub rate: f64,
    /// Number of the update; the first is 1.
    pub step: u64,
    /// What [`Rule::state`] asked for, in that order.
    pub state: &'a mut [State],
}

/// An optimizer's formulas.
pub trait Rule: std::fmt::Debug + Send + Sync {
    /// The state kept for a tensor, zero before the first step unless [`Rule::start`] says otherwise.
    fn state(&self, slot: &Slot) -> Vec<StateSpec>;

    /// Fills fresh state from the tensor's first values.
    fn start(&self, _values: &[f32], _state: &mut [State]) {}

    /// Called once before each step's updates, with the learning rate of the run.
    fn begin(&mut self, _rate: f64, _step: u64) {}

    /// Updates one tensor.
    fn update(&self, update: Update<'_>);

    /// Numbers of the whole run that belong to the state.
    fn scalars(&self) -> Vec<f64> {
        Vec::new()
    }

    /// Takes them back; the caller passes as many as [`Rule::scalars`] gives.
    fn set_scalars(&mut self, _scalars: &[f64]) {}

    /// Whether the weights to evaluate and to publish are others than those that are trained.
    fn averages(&self) -> bool {
        false
    }

    /// Makes the weights to publish from the trained ones, in place, where [`Rule::averages`].
    fn publish(&self, _values: &mut [f32], _state: &[State]) {}
}

/// A rule with the state of a run.
#[derive(Debug)]
pub struct Optimizer {
    /// Updates made so far.
    pub step: u64,
    /// The loss scale, where there is one.
    pub scaler: Option<LossScaler>,
    rule: Box<dyn Rule>,
    slots: Vec<Slot>,
    state: Vec<Vec<State>>,
}

impl Optimizer {
    /// Fresh state for tensors that lie end to end in `values`.
    pub fn new(rule: Box<dyn Rule>, slots: Vec<Slot>, values: &[f32]) -> Self {
        let mut rest = values;
        let fresh = |slot: &Slot| {
            let mut state: Vec<State> = rule.state(slot).iter().map(State::zeros).collect();
            let (now, later) = rest.split_at(slot.count());
            rest = later;
            rule.start(now, &mut state);
            state
        };
        let state = slots.iter().map(fresh).collect();
        assert!(rest.is_empty(), "a slot for each value");
        Self { step: 0, scaler: None, rule, slots, state }
    }

    /// One update with gradients `grads * factor` at the learning rate `rate`.
    pub fn update(&mut self, values: &mut [f32], grads: &[f32], factor: f32, rate: f64) {
        self.step += 1;
        self.rule.begin(rate, self.step);
        let (rule, step) = (&self.rule, self.step);
        let mut updates = Vec::with_capacity(self.slots.len());
        let (mut values, mut grads) = (values, grads);
        for (slot, state) in self.slots.iter().zip(&mut self.state) {
            let (now, later) = std::mem::take(&mut values).split_at_mut(slot.count());
            let (grads_now, grads_later) = grads.split_at(slot.count());
            (values, grads) = (later, grads_later);
            let rate = rate * slot.lr_scale;
            updates.push(Update { slot, values: now, grads: grads_now, factor, rate, step, state });
        }
        updates.into_par_iter().with_max_len(1).for_each(|update| rule.update(update));
    }

    /// Whether the weights to evaluate and to publish are others than those that are trained.
    pub fn averages(&self) -> bool {
        self.rule.averages()
    }

    /// Makes the weights to publish from the trained ones, in place.
    pub fn publish(&self, values: &mut [f32]) {
        let mut rest = values;
        for (slot, state) in self.slots.iter().zip(&self.state) {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(slot.count());
            rest = later;
            self.rule.publish(now, state);
        }
    }

    /// Every state tensor with its name (`TENSOR.STATE`) and shape.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, &State)> {
        let mut out = Vec::new();
        for (slot, state) in self.slots.iter().zip(&self.state) {
            for (spec, state) in self.rule.state(slot).into_iter().zip(state) {
                out.push((format!("{}.{}", slot.name, spec.name), spec.shape, state));
            }
        }
        out
    }

    /// The same, to be filled from a checkpoint.
    pub fn tensors_mut(&mut self) -> Vec<(String, Vec<usize>, &mut State)> {
        let rule = &self.rule;
        let mut out = Vec::new();
        for (slot, state) in self.slots.iter().zip(&mut self.state) {
            for (spec, state) in rule.state(slot).into_iter().zip(state) {
                out.push((format!("{}.{}", slot.name, spec.name), spec.shape, state));
            }
        }
        out
    }

    /// Numbers of the whole run that belong to the state.
    pub fn scalars(&self) -> Vec<f64> {
        let scaler = self.scaler.iter().flat_map(LossScaler::numbers);
        self.rule.scalars().into_iter().chain(scaler).collect()
    }

    /// Takes them back; says whether they are as many as this optimizer has.
    pub fn set_scalars(&mut self, scalars: &[f64]) -> bool {
        let own = self.rule.scalars().len();
        let fits = scalars.len() == self.scalars().len();
        if fits {
            self.rule.set_scalars(&scalars[..own]);
            if let (Some(scaler), Some(numbers)) = (&mut self.scaler, scalars[own..].first_chunk()) {
                scaler.set_numbers(*numbers);
            }
        }
        fits
    }
}

/// The bytes of state that a rule keeps for these tensors.
pub fn state_bytes(rule: &dyn Rule, slots: &[Slot]) -> u64 {
    slots.iter().flat_map(|slot| rule.state(slot)).map(|spec| spec.bytes()).sum()
}
