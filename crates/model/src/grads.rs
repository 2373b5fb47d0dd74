//! The gradients of a pass, found by their places in the flat buffer of trained values. They lie in one buffer for all,
//! or in a buffer for each segment while backward is in that segment. A [`Collector`] takes the gradients of a segment
//! when its backward is done, while backward goes on in the segments below.
use std::ops::Range;

use tunesmith_base::error::Result;
use tunesmith_device::{FloatBuffer, FloatsMut};

/// The gradients of a contiguous part of the flat buffer.
#[derive(Debug)]
pub enum Buffer<'g> {
    /// A part of the buffer for all gradients.
    Borrowed(FloatsMut<'g>),
    /// The buffer of one segment.
    Owned(FloatBuffer),
}

impl Buffer<'_> {
    /// The gradients, in the order of the flat buffer.
    pub fn values(&mut self) -> FloatsMut<'_> {
        match self {
            Self::Borrowed(values) => values.reborrow(),
            Self::Owned(values) => values.view_mut(),
        }
    }
}

/// Takes the gradients of a segment as soon as they are final, while backward goes on in the segments below.
pub trait Collector<'g> {
    /// A buffer of `length` zeros for a segment.
    fn buffer(&mut self, length: usize) -> FloatBuffer;

    /// Takes the final gradients from flat place `start` on. Segments come from the last to the first.
    ///
    /// # Errors
    /// Any error of the collector; it ends the pass.
    fn take(&mut self, start: usize, gradients: Buffer<'g>) -> Result<()>;
}

/// Gradients of trained values, indexed by ranges of the flat buffer.
pub struct Grads<'g> {
    windows: Vec<Window<'g>>,
    collector: Option<Box<dyn Collector<'g> + 'g>>,
    /// The collector has the gradients from this flat place on.
    closed: usize,
}

/// A stretch of the flat buffer from `start` on.
struct Window<'g> {
    start: usize,
    buffer: Buffer<'g>,
}

impl Window<'_> {
    const fn end(&self) -> usize {
        self.start
            + match &self.buffer {
                Buffer::Borrowed(values) => values.len(),
                Buffer::Owned(values) => values.len(),
            }
    }

    const fn covers(&self, range: &Range<usize>) -> bool {
        self.start <= range.start && range.end <= self.end()
    }
}

impl std::fmt::Debug for Grads<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grads").field("windows", &self.windows.len()).finish_non_exhaustive()
    }
}

impl<'g> Grads<'g> {
    /// Gradients in one buffer for all, without a collector.
    pub fn whole(values: impl Into<FloatsMut<'g>>) -> Self {
        Self {
            windows: vec![Window { start: 0, buffer: Buffer::Borrowed(values.into()) }],
            collector: None,
            closed: usize::MAX,
        }
    }

    /// Gradients in one buffer for all, from which `collector` takes one segment after the other.
    pub fn collected(values: FloatsMut<'g>, collector: Box<dyn Collector<'g> + 'g>) -> Self {
        Self { collector: Some(collector), ..Self::whole(values) }
    }

    /// Whether a collector takes gradients while the pass goes on.
    pub const fn is_collected(&self) -> bool {
        self.collector.is_some()
    }

    /// Gradients in buffers that `collector` provides, one for each open segment.
    pub fn by_segment(collector: Box<dyn Collector<'g> + 'g>) -> Self {
        Self { windows: Vec::new(), collector: Some(collector), closed: usize::MAX }
    }

    /// Says that backward enters the segment at `range`, or something that adds to its gradients.
    pub fn open(&mut self, range: Range<usize>) {
        if range.is_empty() || self.windows.iter().any(|window| window.covers(&range)) {
            return;
        }
        if let Some(collector) = &mut self.collector {
            let buffer = Buffer::Owned(collector.buffer(range.len()));
            self.windows.push(Window { start: range.start, buffer });
        }
    }

    /// Says that backward has left the segment at `range`: its gradients are final and go to the collector.
    ///
    /// # Errors
    /// An error of [`Collector::take`].
    pub fn close(&mut self, range: &Range<usize>) -> Result<()> {
        let at = self.windows.iter().position(|window| window.covers(range) && !range.is_empty());
        let (Some(collector), Some(at)) = (&mut self.collector, at) else { return Ok(()) };
        let Window { start, buffer } = self.windows.swap_remove(at);
        self.closed = self.closed.min(range.start);
        match buffer {
            Buffer::Borrowed(values) => {
                let (rest, done) = values.split_at(range.start - start);
                self.windows.push(Window { start, buffer: Buffer::Borrowed(rest) });
                collector.take(range.start, Buffer::Borrowed(done))
            }
            buffer @ Buffer::Owned(_) => collector.take(start, buffer),
        }
    }

    /// Closes the segment at `range` in a pass that no longer computes anything. Gradients that are missing are zero.
    /// Does nothing if the segment was closed before.
    ///
    /// # Errors
    /// An error of [`Collector::take`].
    pub fn pass_over(&mut self, range: &Range<usize>) -> Result<()> {
        if range.start >= self.closed {
            return Ok(());
        }
        self.open(range.clone());
        self.close(range)
    }

    /// Ends the pass, complete or not: gradients of open segments go to the collector, the last segment first.
    ///
    /// # Errors
    /// An error of [`Collector::take`].
    pub fn finish(mut self) -> Result<()> {
        let Some(mut collector) = self.collector.take() else { return Ok(()) };
        self.windows.retain(|window| window.end() > window.start);
        self.windows.sort_by_key(|window| std::cmp::Reverse(window.start));
        self.windows.into_iter().try_for_each(|window| collector.take(window.start, window.buffer))
    }
}

impl Grads<'_> {
    /// The gradients at a place of the flat buffer.
    ///
    /// # Panics
    /// If no open segment has them.
    pub fn at(&mut self, range: &Range<usize>) -> FloatsMut<'_> {
        let window = self.windows.iter_mut().find(|window| window.covers(range)).expect("an open segment");
        let start = window.start;
        window.buffer.values().slice(range.start - start..range.end - start)
    }
}
