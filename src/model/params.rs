//! What is trained: all trainable tensors end to end in one flat buffer, with their names and places beside it.
use std::ops::Range;

/// One trainable tensor's place in the flat buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Hugging Face's tensor name, or `<module>.lora_A.weight` / `<module>.lora_B.weight`.
    pub name: String,
    /// Row-major sizes.
    pub shape: Vec<usize>,
    /// Where it starts, in floats.
    pub offset: usize,
    /// Whether weight decay applies to it.
    pub decay: bool,
    /// Its learning rate by that of the run.
    pub lr_scale: f64,
}

impl ParamSpec {
    /// Its part of the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.shape.iter().product::<usize>()
    }
}

/// The trainable tensors: values and gradients, each one flat buffer.
#[derive(Debug, Default)]
pub struct Params {
    /// Names and places, in the order of the buffer.
    pub specs: Vec<ParamSpec>,
    values: Vec<f32>,
    grads: Vec<f32>,
    start: Option<Vec<f32>>,
    /// Where segments begin.
    segments: Vec<usize>,
}

impl Params {
    /// Appends a tensor; returns its place.
    pub fn push(&mut self, name: String, shape: Vec<usize>, decay: bool, values: &[f32]) -> Range<usize> {
        let spec = ParamSpec { name, shape, offset: self.values.len(), decay, lr_scale: 1.0 };
        let range = spec.range();
        assert_eq!(values.len(), range.len(), "{}: a value for each element", spec.name);
        self.values.extend_from_slice(values);
        self.specs.push(spec);
        range
    }

    /// The tensors from here on belong to the next segment.
    pub fn begin_segment(&mut self) {
        self.segments.push(self.values.len());
    }

    /// Where segments begin in the flat buffer (embedding, blocks, head), and the end.
    pub fn segments(&self) -> Vec<usize> {
        self.segments.iter().copied().chain([self.values.len()]).collect()
    }

    /// A segment's place in the flat buffer.
    pub fn segment(&self, index: usize) -> Range<usize> {
        self.segments[index]..self.segments.get(index + 1).copied().unwrap_or(self.values.len())
    }

    /// Makes room for exactly `floats` more, so that a large model's buffer is never copied while it grows.
    pub fn reserve(&mut self, floats: usize) {
        self.values.reserve_exact(floats);
    }

    /// Keeps the values as they are now as those of the start.
    pub fn keep_start(&mut self) {
        self.start = Some(self.values.clone());
    }

    /// The values before training, where something of them was taken out of the base (`PiSSA`).
    pub fn start(&self) -> Option<&[f32]> {
        self.start.as_deref()
    }

    /// How many numbers are trained.
    pub const fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether nothing is trained.
    pub const fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// All values.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All values, to change.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// All gradients; empty before the first [`Params::zero_grads`].
    pub fn grads(&self) -> &[f32] {
        &self.grads
    }

    /// The buffer of gradients, to lend and to bring back with [`Params::put_grads`].
    pub fn take_grads(&mut self) -> Vec<f32> {
        std::mem::take(&mut self.grads)
    }

    /// Brings back what [`Params::take_grads`] lent.
    pub fn put_grads(&mut self, grads: Vec<f32>) {
        self.grads = grads;
    }

    /// Values to change beside gradients to change.
    pub fn split_mut(&mut self) -> (&mut [f32], &mut [f32]) {
        (&mut self.values, &mut self.grads)
    }

    /// Sets every gradient to zero.
    pub fn zero_grads(&mut self) {
        if self.grads.len() == self.values.len() {
            self.grads.fill(0.0);
        } else {
            self.grads = vec![0.0; self.values.len()];
        }
    }

    /// The spec with that name.
    pub fn find(&self, name: &str) -> Option<&ParamSpec> {
        self.specs.iter().find(|spec| spec.name == name)
    }
}
