//! What all optimizers share: the tensors they update, the state of each tensor, and the loop of a step.
//!
//! An optimizer is a [`UpdateRule`]: it names the state of a tensor and writes the update of one tensor. Allocation, threads,
//! learning rates by tensor, saving and loading are done here, once.
mod offloaded;

pub use offloaded::offloaded_bytes;

use super::loss_scale::LossScaler;
pub use super::state::{Slot, State, StateDtype, StateSpec};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;
use tunesmith_base::error::Result;
use tunesmith_config::TrainConfig;
use tunesmith_config::arguments::Reader;
use tunesmith_device::{FloatBuffer, Floats, FloatsMut, Slice};
use tunesmith_ops::accumulate;
use tunesmith_ops::factor::Factor;

/// The update of one tensor, or of a part of one.
#[derive(Debug)]
pub struct TensorUpdate<'a> {
    /// Name, shape and decay of the tensor.
    pub slot: &'a Slot,
    /// Its values, or those of the part.
    pub values: FloatsMut<'a>,
    /// The gradients of `values`, before `factor`.
    pub grads: Floats<'a>,
    /// The factor of the gradients: clipping and the inverse loss scale in one.
    pub factor: Factor<'a>,
    /// The tensor's learning rate in this step.
    pub rate: f64,
    /// Number of the update, from 1: `t` of the formulas.
    pub step: u64,
    /// The state tensors of [`UpdateRule::state`], in that order.
    pub state: &'a mut [State],
}

/// The gradients of a run: of all values, or of the owned values end to end.
#[derive(Debug, Clone, Copy)]
pub enum Gradients<'a> {
    /// In float32, as the backward pass sums them.
    F32(Floats<'a>),
    /// In bfloat16: converted to float32 one tensor at a time.
    Bf16(Slice<'a, bf16>),
}

impl Gradients<'_> {
    const fn len(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }
}

impl<'a, F: Into<Floats<'a>>> From<F> for Gradients<'a> {
    fn from(values: F) -> Self {
        Self::F32(values.into())
    }
}

/// Copies a rule behind `dyn Rule`; every rule that is [`Clone`] has it.
pub trait CloneRule {
    /// A copy of the rule.
    fn boxed(&self) -> Box<dyn UpdateRule>;
}

impl<T: UpdateRule + Clone + 'static> CloneRule for T {
    fn boxed(&self) -> Box<dyn UpdateRule> {
        Box::new(self.clone())
    }
}

/// An optimizer's formulas, without the state they act on.
pub trait UpdateRule: CloneRule + std::fmt::Debug + Send + Sync {
    /// Reads the rule from a configuration, with the arguments of `train.optim_args`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: a value that an argument cannot have.
    fn of(train: &TrainConfig, args: &mut Reader<'_>) -> Result<Self>
    where
        Self: Sized;

    /// The state kept for a tensor, zero before the first step unless [`UpdateRule::start`] says otherwise.
    fn state(&self, slot: &Slot) -> Vec<StateSpec>;

    /// How many values, counted from a tensor's start, must stay on one rank if ranks share the tensor: 1 if each is
    /// updated independently, all of them if an update needs the whole tensor.
    fn grain(&self, _slot: &Slot) -> usize {
        1
    }

    /// Bytes of temporary memory that [`UpdateRule::update`] allocates for a tensor.
    fn scratch(&self, _slot: &Slot) -> u64 {
        0
    }

    /// Fills fresh state from the tensor's first values.
    fn start(&self, _values: Floats<'_>, _state: &mut [State]) {}

    /// Whether its updates are GPU kernels, which accept a factor that only the GPU knows.
    fn takes_found_factor(&self) -> bool {
        false
    }

    /// Called once before each step's updates, with the learning rate of the run.
    fn begin(&mut self, _rate: f64, _step: u64) {}

    /// Updates one tensor, or a part of one whose cuts [`UpdateRule::grain`] allows.
    fn update(&self, update: TensorUpdate<'_>);

    /// State of the whole run, which checkpoints save in addition to the tensors' state.
    fn scalars(&self) -> Vec<f64> {
        Vec::new()
    }

    /// Restores the numbers of [`UpdateRule::scalars`]; the caller passes the same count.
    fn set_scalars(&mut self, _scalars: &[f64]) {}

    /// Whether the weights to evaluate, save and publish differ from those that are trained: see [`UpdateRule::publish`].
    fn averages(&self) -> bool {
        false
    }

    /// Replaces trained weights by those to publish, if [`UpdateRule::averages`].
    fn publish(&self, _values: FloatsMut<'_>, _state: &[State]) {}
}

/// The part of a tensor that is updated here, with its state.
#[derive(Debug)]
struct Part {
    slot: usize,
    /// The part, in the tensor's flat values.
    range: Range<usize>,
    /// The offsets of the part in a whole buffer and in a packed one.
    whole: usize,
    packed: usize,
    state: Vec<State>,
}

/// A rule with the state of a run, or with the share of it that one rank owns.
///
/// Buffers of values and of gradients are either whole (every tensor end to end) or packed (the owned ranges end to
/// end). Their length tells which.
#[derive(Debug)]
pub struct Optimizer {
    /// The number of updates so far.
    pub step: u64,
    /// The number of those with images. Tensors of an image encoder or a connector ([`Slot::vision`]) have been updated as often.
    pub image_step: u64,
    /// Whether the next update is of rows with images. If not, it leaves tensors of encoder and connector and their state as they are, as
    /// PyTorch does with a parameter whose gradient is `None`.
    pub images: bool,
    /// The loss scale of float16 training.
    pub scaler: Option<LossScaler>,
    rule: Box<dyn UpdateRule>,
    slots: Vec<Slot>,
    parts: Vec<Part>,
    whole: usize,
    packed: usize,
}

/// A state tensor of an optimizer, by its name in a checkpoint (`TENSOR.STATE`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateTensor {
    /// Its name in a checkpoint, such as `model.norm.weight.exp_avg`.
    pub name: String,
    /// The index of the tensor's slot.
    pub slot: usize,
    /// The index in the result of [`UpdateRule::state`] for the slot.
    pub place: usize,
    /// Shape and storage of the whole tensor, even if only a part is owned here.
    pub spec: StateSpec,
}

impl Part {
    /// Whether its state is offloaded to the host's memory.
    fn is_offloaded(&self) -> bool {
        self.state.iter().any(|state| state.offloaded().is_some())
    }

    /// Its range in a buffer of all values, or of the owned ones.
    const fn place(&self, packed: bool) -> Range<usize> {
        let start = if packed { self.packed } else { self.whole };
        start..start + (self.range.end - self.range.start)
    }
}

/// What is left of a buffer of values, from which parts are split off in rising order.
struct Remaining<'a> {
    values: FloatsMut<'a>,
    at: usize,
}

impl<'a> Remaining<'a> {
    /// Splits off the range, and skips what lies before it.
    fn take(&mut self, range: Range<usize>) -> FloatsMut<'a> {
        let (_, rest) = std::mem::take(&mut self.values).split_at(range.start - self.at);
        let (taken, later) = rest.split_at(range.len());
        (self.values, self.at) = (later, range.end);
        taken
    }
}

impl Optimizer {
    /// Fresh state for tensors that lie end to end in `values`.
    pub fn new<'a>(rule: Box<dyn UpdateRule>, slots: Vec<Slot>, values: impl Into<Floats<'a>>) -> Self {
        let values = values.into();
        let everything = 0..values.len();
        Self::shared(rule, slots, values, std::slice::from_ref(&everything), false)
    }

    /// Fresh state for one rank's share: the flat ranges `owned` of tensors that lie end to end. The ranges rise, and
    /// are cut only where [`legal_cuts`] allows. `values` is a whole buffer or a packed one. With `offload`, the state
    /// of values on a GPU is in the host's memory.
    ///
    /// # Panics
    /// If `values` is neither.
    pub fn shared(
        rule: Box<dyn UpdateRule>,
        slots: Vec<Slot>,
        values: Floats<'_>,
        owned: &[Range<usize>],
        offload: bool,
    ) -> Self {
        let (mut parts, mut start, mut packed, mut first) = (Vec::new(), 0, 0, 0);
        let whole = slots.iter().map(Slot::count).sum();
        let count: usize = owned.iter().map(ExactSizeIterator::len).sum();
        assert!([whole, count].contains(&values.len()), "a slot for each value");
        for (index, slot) in slots.iter().enumerate() {
            let end = start + slot.count();
            while owned.get(first).is_some_and(|range| range.end <= start) {
                first += 1;
            }
            for range in owned[first..].iter().take_while(|range| range.start < end) {
                let (low, high) = (range.start.max(start), range.end.min(end));
                let range = low - start..high - start;
                let device = values.device();
                let zeros = |spec: StateSpec| State::zeros(device, offload, spec.dtype, spec.range(slot, &range).len());
                let mut state: Vec<State> = rule.state(slot).into_iter().map(zeros).collect();
                let first = if values.len() == whole { low } else { packed };
                rule.start(values.slice(first..first + high - low), &mut state);
                parts.push(Part { slot: index, range, whole: low, packed, state });
                packed += high - low;
            }
            start = end;
        }
        Self { step: 0, image_step: 0, images: true, scaler: None, rule, slots, parts, whole, packed }
    }

    /// [`legal_cuts`] of its rule and tensors.
    pub fn legal_cuts(&self) -> impl Fn(usize) -> usize + use<> {
        legal_cuts(&*self.rule, &self.slots)
    }

    /// Whether a buffer of that length holds the owned ranges alone.
    fn is_packed(&self, length: usize) -> bool {
        assert!(length == self.whole || length == self.packed, "a buffer of all values, or of the owned ones");
        length != self.whole
    }

    /// Makes one update with gradients `grads * factor` at the learning rate `rate`, on all threads of the pool.
    ///
    /// # Panics
    /// If a buffer is neither whole nor packed.
    pub fn update<'v, 'g>(
        &mut self,
        values: impl Into<FloatsMut<'v>>,
        grads: impl Into<Gradients<'g>>,
        factor: impl Into<Factor<'g>>,
        rate: f64,
    ) {
        let (values, grads, factor) = (values.into(), grads.into(), factor.into());
        let packed = [self.is_packed(values.len()), self.is_packed(grads.len())];
        self.step += 1;
        self.image_step += u64::from(self.images);
        self.rule.begin(rate, self.step);
        let mut updates = Vec::with_capacity(self.parts.len());
        let mut rest = Remaining { values, at: 0 };
        let mut wide = FloatBuffer::default();
        if self.parts.iter().any(Part::is_offloaded) {
            return offloaded::update(self, rest, packed, grads, factor, rate);
        }
        let (rule, slots, steps) = (&self.rule, &self.slots, [self.step, self.image_step]);
        for part in &mut self.parts {
            let slot = &slots[part.slot];
            if slot.vision && !self.images {
                continue;
            }
            let step = steps[usize::from(slot.vision)];
            let (values, place) = (rest.take(part.place(packed[0])), part.place(packed[1]));
            let (rate, state) = (rate * slot.lr_scale, &mut part.state[..]);
            match grads {
                Gradients::F32(grads) => {
                    let grads = grads.slice(place);
                    updates.push(TensorUpdate { slot, values, grads, factor, rate, step, state });
                }
                // One tensor after the other, so that only one is in float32 at a time.
                Gradients::Bf16(grads) => {
                    wide.reset(values.device(), place.len());
                    accumulate::to_f32(grads.slice(place), wide.view_mut());
                    rule.update(TensorUpdate { slot, values, grads: wide.view(), factor, rate, step, state });
                }
            }
        }
        updates.into_par_iter().with_max_len(1).for_each(|update| rule.update(update));
    }

    /// What a checkpoint stores of [`Optimizer::image_step`]: `None` if it is [`Optimizer::step`], or if no encoder or connector is trained.
    pub fn stored_image_step(&self) -> Option<u64> {
        let updates = self.slots.iter().any(|slot| slot.vision);
        Some(self.image_step).filter(|step| updates && *step != self.step)
    }

    /// Whether its updates accept a factor that the GPU computes while the host continues ([`Factor::Found`]).
    pub fn takes_found_factor(&self) -> bool {
        self.rule.takes_found_factor()
    }

    /// Decrements the counts of updates after one that changed nothing, because its factor was NaN.
    pub const fn uncount(&mut self) {
        self.step -= 1;
        if self.images {
            self.image_step -= 1;
        }
    }

    /// Whether the weights to evaluate, save and publish differ from those that are trained.
    pub fn averages(&self) -> bool {
        self.rule.averages()
    }

    /// Replaces trained weights by those to publish; in a whole buffer, the owned ones alone.
    pub fn publish<'v>(&self, values: impl Into<FloatsMut<'v>>) {
        let values = values.into();
        let packed = self.is_packed(values.len());
        let mut rest = Remaining { values, at: 0 };
        for part in &self.parts {
            let values = rest.take(part.place(packed));
            if part.is_offloaded() {
                self.rule.publish(values, &part.state.iter().map(State::fetched).collect::<Vec<_>>());
            } else {
                self.rule.publish(values, &part.state);
            }
        }
    }

    /// Every state tensor as a whole, however ranks share it.
    pub fn state(&self) -> Vec<StateTensor> {
        let of_slot = |(slot, it): (usize, &Slot)| {
            let name = it.name.clone();
            let tensor = move |(place, spec): (usize, StateSpec)| StateTensor {
                name: format!("{name}.{}", spec.name),
                slot,
                place,
                spec,
            };
            self.rule.state(it).into_iter().enumerate().map(tensor).collect::<Vec<_>>()
        };
        self.slots.iter().enumerate().filter(|(_, slot)| slot.count() > 0).flat_map(of_slot).collect()
    }

    /// The trained tensors, with the range of each in a whole buffer.
    pub fn slots(&self) -> impl Iterator<Item = (&Slot, Range<usize>)> {
        self.slots.iter().scan(0, |end, slot| {
            let start = *end;
            *end += slot.count();
            Some((slot, start..*end))
        })
    }

    /// The owned parts of a state tensor: the range of each in the tensor's flat numbers, and the numbers.
    pub fn owned(&self, tensor: &StateTensor) -> impl Iterator<Item = (Range<usize>, &State)> {
        let slot = &self.slots[tensor.slot];
        let parts = self.parts.iter().filter(|part| part.slot == tensor.slot);
        parts.map(|part| (tensor.spec.range(slot, &part.range), &part.state[tensor.place]))
    }

    /// Every owned part of a state tensor: the tensor's name and shape, and the part's numbers.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, &State)> {
        let mut out = Vec::new();
        for part in &self.parts {
            let slot = &self.slots[part.slot];
            for (spec, state) in self.rule.state(slot).into_iter().zip(&part.state) {
                out.push((format!("{}.{}", slot.name, spec.name), spec.shape, state));
            }
        }
        out
    }

    /// As [`Optimizer::tensors`], to be filled from a checkpoint: name, place in the tensor's flat numbers, and
    /// numbers.
    pub fn tensors_mut(&mut self) -> Vec<(String, Range<usize>, &mut State)> {
        let (rule, slots) = (&self.rule, &self.slots);
        let mut out = Vec::new();
        for part in &mut self.parts {
            let slot = &slots[part.slot];
            for (spec, state) in rule.state(slot).into_iter().zip(&mut part.state) {
                out.push((format!("{}.{}", slot.name, spec.name), spec.range(slot, &part.range), state));
            }
        }
        out
    }

    /// State of the run as a whole: the rule's [`UpdateRule::scalars`], then the loss scale's numbers.
    pub fn scalars(&self) -> Vec<f64> {
        let scaler = self.scaler.iter().flat_map(LossScaler::numbers);
        self.rule.scalars().into_iter().chain(scaler).collect()
    }

    /// Restores the numbers of [`Optimizer::scalars`]. Returns false, and changes nothing, if the count differs.
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

/// Bytes of the state that a rule keeps for tensors, all ranks together.
pub fn state_bytes(rule: &dyn UpdateRule, slots: &[Slot]) -> u64 {
    slots.iter().flat_map(|slot| rule.state(slot)).map(|spec| spec.bytes()).sum()
}

/// Where ranks may cut a whole buffer: maps a place to the nearest one that [`UpdateRule::grain`] allows.
pub fn legal_cuts(rule: &dyn UpdateRule, slots: &[Slot]) -> impl Fn(usize) -> usize + use<> {
    let mut end = 0;
    let grain = |slot: &Slot| {
        let start = end;
        end += slot.count();
        (start..end, rule.grain(slot).max(1))
    };
    let grains: Vec<(Range<usize>, usize)> = slots.iter().map(grain).collect();
    move |at| {
        let next = grains.partition_point(|(range, _)| range.end <= at);
        let Some((range, grain)) = grains.get(next) else { return at };
        let below = at - (at - range.start) % grain;
        let above = (below + grain).min(range.end);
        if at - below < above - at { below } else { above }
    }
}

#[cfg(test)]
mod tests;
