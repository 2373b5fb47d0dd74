//! Work of a GPU in parallel to its ops: a second queue, such as for collectives, and marks by which one queue waits
//! for another. The host waits for neither.
//!
//! Each GPU has one stream on which ops compute. Within [`Queue::run`], a thread's launches, copies and allocations go
//! to the queue's own stream instead. Three rules keep two streams in order:
//!
//! 1. Work that uses what another queue has written must wait for a [`Mark`] first.
//! 2. Memory is freed in the order of the queue on which it was allocated. Before it is dropped, that queue must wait
//!    for a mark after the last use on any other queue.
//! 3. [`Queue::cross`] does both for work between two pieces of a thread's work.
use super::cuda::{Event, Stream};
use super::{Device, current, gpu};
use std::sync::Arc;
use tunesmith_base::error::Result;

/// A stream of a GPU besides the one on which its ops compute.
#[derive(Debug, Clone)]
pub struct Queue {
    ordinal: u8,
    stream: Arc<Stream>,
}

impl Queue {
    /// An empty queue of the GPU of this number. Opens the GPU if needed.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Device`]: no driver, no such GPU, or the driver's own.
    pub fn new(ordinal: u8) -> Result<Self> {
        gpu::open(ordinal)?;
        Ok(Self { ordinal, stream: Stream::new(&gpu::context(ordinal))? })
    }

    /// The GPU's number, as in `cuda:0`.
    pub const fn ordinal(&self) -> u8 {
        self.ordinal
    }

    /// The stream that its work runs on.
    pub const fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Runs `work`. This thread's launches, copies and allocations on this GPU go to this queue meanwhile.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        current::within(Some((self.ordinal, Arc::clone(&self.stream))), work)
    }

    /// Runs `work` on the stream of the ops, although this thread has entered a queue. So memory that it allocates is
    /// freed in the order of the ops.
    pub fn leave<T>(work: impl FnOnce() -> T) -> T {
        current::within(None, work)
    }

    /// As [`Queue::run`], for work that must come after all earlier and before all later work of this thread's queue.
    pub fn cross<T>(&self, work: impl FnOnce() -> T) -> T {
        let device = Device::Cuda(self.ordinal);
        if current::stream(self.ordinal).is_some_and(|stream| Arc::ptr_eq(&stream, &self.stream)) {
            return work();
        }
        let before = Mark::here(device);
        let (done, after) = self.run(|| {
            before.wait();
            (work(), Mark::here(device))
        });
        after.wait();
        done
    }
}

/// A place in a queue, reached when all work enqueued before is done. Without a GPU it is reached at once.
#[derive(Debug, Default)]
pub struct Mark(Option<(u8, Event)>);

impl Mark {
    /// The current end of this thread's queue of the device.
    pub fn here(device: Device) -> Self {
        match device {
            Device::Cuda(ordinal) => Self(Some((ordinal, gpu::record(ordinal)))),
            Device::Cpu | Device::Meta => Self(None),
        }
    }

    /// Makes later work of this thread's queue wait until the mark is reached.
    pub fn wait(&self) {
        if let Some((ordinal, event)) = &self.0 {
            gpu::checked(gpu::wait(*ordinal, event));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Array, cuda};
    use tunesmith_base::Kind;
    use tunesmith_base::error::Error;

    #[test]
    fn work_that_crosses_stands_between_what_comes_before_and_after() {
        cuda::testing::use_stand_in();
        let device = Device::Cuda(0);
        let queue = Queue::new(0).unwrap();
        let first: Vec<f32> = (0..100_000).map(|it| it as f32).collect();
        for turn in 0..5 {
            let values: Vec<f32> = first.iter().map(|it| it + turn as f32).collect();
            let source = Array::of(device, &values);
            let mut copy = Array::<f32>::zeros(device, values.len());
            queue.cross(|| copy.view_mut().copy_from(source.view()));
            // Memory of the ops, taken again at once by what comes next there.
            drop(source);
            let next = Array::<f32>::zeros(device, values.len());
            assert!(copy.read() == values && next.read().iter().all(|&it| it == 0.0));
        }
        // Memory that is taken on the queue is given back in its order; outside of it, in that of the ops.
        let inside = queue.run(|| {
            let of_ops = Queue::leave(|| {
                let of_ops = Array::of(device, &first);
                (of_ops, Mark::here(device))
            });
            of_ops.1.wait();
            let mut inside = Array::<f32>::zeros(device, first.len());
            inside.view_mut().copy_from(of_ops.0.view());
            (inside, Mark::here(device), of_ops)
        });
        let (inside, copied, of_ops) = inside;
        copied.wait();
        drop(of_ops);
        assert!(inside.read() == first);
        Mark::here(Device::Cpu).wait();
    }

    #[test]
    fn a_gpu_that_is_broken_off_fails_for_everybody_who_waits_with_the_first_error() {
        cuda::testing::use_stand_in();
        // Its own view of the GPU: those of other tests stay whole.
        let context = cuda::Context::new(0).unwrap();
        let stream = Stream::new(&context).unwrap();
        let event = stream.record().unwrap();
        stream.synchronize().unwrap();
        for rank in [3, 4] {
            context.break_off(Error::peer(format!("rank {rank} is gone")));
        }
        for failed in [stream.synchronize(), event.synchronize(), event.done().map(drop)] {
            let failed = failed.unwrap_err();
            assert_eq!((failed.kind(), failed.message()), (Kind::Peer, "rank 3 is gone"));
        }
    }
}
