//! What is trained: all trainable tensors end to end in one flat buffer, with their names and places.
use std::ops::Range;
use tunesmith_device::{Device, FloatBuffer, Floats, FloatsMut};

/// One trainable tensor's place in the flat buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Hugging Face's tensor name, or `<module>.lora_A.weight` / `<module>.lora_B.weight`.
    pub name: String,
    /// The tensor's sizes; its values lie row-major.
    pub shape: Vec<usize>,
    /// Where it starts, in floats.
    pub offset: usize,
    /// Whether weight decay applies to it.
    pub decay: bool,
    /// The factor on the run's learning rate.
    pub lr_scale: f64,
    /// Whether it belongs to an image encoder or a connector, which a step without images does not update.
    pub vision: bool,
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
    values: FloatBuffer,
    grads: FloatBuffer,
    start: Option<FloatBuffer>,
    /// The first flat place of each segment.
    segments: Vec<usize>,
    /// On a rank that keeps only a share: the flat ranges of the values that it keeps, rising, and the number of values
    /// that it does not keep.
    kept: Vec<Range<usize>>,
    elsewhere: usize,
}

impl Params {
    /// No tensors yet; their values and gradients will be on `device`.
    pub fn on(device: Device) -> Self {
        Self { values: FloatBuffer::zeros(device, 0), ..Self::default() }
    }

    /// The device of the values and of their gradients.
    pub const fn device(&self) -> Device {
        self.values.device()
    }

    /// Appends a tensor to the last segment, and returns its place in the flat buffer.
    ///
    /// # Panics
    /// If there is not one value for each element of `shape`.
    pub fn push(&mut self, name: String, shape: Vec<usize>, decay: bool, values: Floats<'_>) -> Range<usize> {
        let spec = ParamSpec { name, shape, offset: self.len(), decay, lr_scale: 1.0, vision: false };
        let range = spec.range();
        assert_eq!(values.len(), range.len(), "{}: a value for each element", spec.name);
        self.values.append(values);
        self.specs.push(spec);
        range
    }

    /// Where the last `count` values lie among [`Params::values`].
    pub(super) const fn last(&self, count: usize) -> Range<usize> {
        self.values.len() - count..self.values.len()
    }

    /// Begins the next segment: tensors that are pushed from here on belong to it.
    pub fn begin_segment(&mut self) {
        self.segments.push(self.len());
    }

    /// Where segments begin in the flat buffer (embedding, blocks, head), and the end.
    pub fn segments(&self) -> Vec<usize> {
        self.segments.iter().copied().chain([self.len()]).collect()
    }

    /// A segment's place in the flat buffer.
    pub fn segment(&self, index: usize) -> Range<usize> {
        self.segments[index]..self.segments.get(index + 1).copied().unwrap_or(self.len())
    }

    /// Where the last segment begins.
    pub fn last_segment(&self) -> usize {
        self.segments.last().copied().unwrap_or_default()
    }

    /// Writes values from the host to a place of the flat buffer. On a rank that keeps a share, only the values that it
    /// keeps are written.
    pub fn put(&mut self, place: &Range<usize>, values: &[f32]) {
        let Some(kept) = self.kept() else {
            self.values.slice_mut(place.clone()).write(values);
            return;
        };
        let (mut packed, kept) = (0, kept.to_vec());
        for range in kept {
            let (low, high) = (range.start.max(place.start), range.end.min(place.end));
            if low < high {
                let from = &values[low - place.start..high - place.start];
                let to = packed + low - range.start;
                self.values.slice_mut(to..to + from.len()).write(from);
            }
            packed += range.len();
        }
    }

    /// The values at a place of the flat buffer, copied to the host. On a rank that keeps a share, only the values that
    /// it keeps.
    pub fn get(&self, place: &Range<usize>) -> Vec<f32> {
        let (mut packed, mut values) = (0, Vec::new());
        for range in self.ranges() {
            let (low, high) = (range.start.max(place.start), range.end.min(place.end));
            if low < high {
                let from = packed + low - range.start;
                values.extend(self.values().slice(from..from + high - low).read());
            }
            packed += range.len();
        }
        values
    }

    /// Gives back room that is not needed.
    pub fn shrink(&mut self) {
        self.values.shrink_to_fit();
    }

    /// Makes room for exactly `floats` more, so that a large model's buffer is never copied while it grows.
    pub fn reserve(&mut self, floats: usize) {
        self.values.reserve(floats);
    }

    /// Keeps a copy of the values as they are now, as those before training ([`Params::start`]).
    pub fn keep_start(&mut self) {
        self.start = Some(self.values.clone());
    }

    /// The values before training, where the initialization took something out of the base (`PiSSA`); else `None`.
    pub fn start(&self) -> Option<Floats<'_>> {
        self.start.as_ref().map(FloatBuffer::view)
    }

    /// Of the values from flat place `start` to the end, keeps only those in `own`, which counts from `start`. Returns
    /// where these now lie among the values of this rank.
    pub fn keep(&mut self, start: usize, own: Range<usize>) -> usize {
        let (all, packed) = (self.len(), start - self.elsewhere);
        self.values.keep(packed, &own);
        if !own.is_empty() {
            self.kept.push(start + own.start..start + own.end);
        }
        self.elsewhere = all - self.values.len();
        packed
    }

    /// The flat ranges of the values that this rank keeps; `None` if it keeps all.
    pub fn kept(&self) -> Option<&[Range<usize>]> {
        (self.elsewhere > 0).then_some(&self.kept)
    }

    /// The flat ranges of the values that this rank has, in the order in which they lie end to end.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        self.kept().map_or_else(|| std::iter::once(0..self.len()).collect(), <[Range<usize>]>::to_vec)
    }

    /// How many values are trained, over all ranks.
    pub const fn len(&self) -> usize {
        self.values.len() + self.elsewhere
    }

    /// Whether no value is trained.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All values. On a rank that keeps a share, those of the share, end to end.
    pub fn values(&self) -> Floats<'_> {
        self.values.view()
    }

    /// As [`Params::values`], for writing.
    pub fn values_mut(&mut self) -> FloatsMut<'_> {
        self.values.view_mut()
    }

    /// All gradients; empty before the first [`Params::zero_grads`].
    pub fn grads(&self) -> Floats<'_> {
        self.grads.view()
    }

    /// The buffer of gradients, to lend and to bring back with [`Params::put_grads`].
    pub fn take_grads(&mut self) -> FloatBuffer {
        std::mem::take(&mut self.grads)
    }

    /// Brings back what [`Params::take_grads`] lent.
    pub fn put_grads(&mut self, grads: FloatBuffer) {
        self.grads = grads;
    }

    /// The values and the gradients, both for writing, for an optimizer step.
    pub fn split_mut(&mut self) -> (FloatsMut<'_>, FloatsMut<'_>) {
        (self.values.view_mut(), self.grads.view_mut())
    }

    /// Sets every gradient to zero; makes the buffer if there is none yet.
    pub fn zero_grads(&mut self) {
        self.grads.reset(self.device(), self.len());
    }

    /// The spec with that name.
    pub fn find(&self, name: &str) -> Option<&ParamSpec> {
        self.specs.iter().find(|spec| spec.name == name)
    }
}
