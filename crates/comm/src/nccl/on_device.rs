//! Operations on a GPU's memory: enqueued on the communicator's queue, and watched.
use std::ops::Range;

use super::library::{BYTES, Code, Comm, Functions};
use super::link::{Operation, Vigil, Why};
use super::{Nccl, PAUSE, worst};
use crate::on_device::{OnDevice, Transfer};
use tunesmith_base::error::Result;
use tunesmith_device::Queue;

impl Nccl {
    /// Enqueues one group, after all work of the caller's own queue, and has it watched.
    fn put(&self, name: &'static str, act: impl FnOnce(&Functions, Comm) -> Code) -> Result<()> {
        let link = &*self.link;
        let mut handles = link.handles();
        let mut vigil = Vigil::new(PAUSE);
        let done = link.queue.cross(|| -> std::result::Result<(), Why> {
            let began = link.queue.stream().record()?;
            link.ask(&handles, &mut vigil, act)?;
            let ended = link.queue.stream().record()?;
            link.under_way().operations.push_back(Operation { name, began, ended });
            Ok(())
        });
        link.changed.notify_all();
        done.map_err(|why| link.fail(&mut handles, name, vigil.waited(), why))
    }
}

/// The common length of the parts and the start of the first, if they lie end to end and have equal lengths. Then one
/// call of NCCL replaces a broadcast from each rank.
fn even(parts: &[Range<usize>]) -> Option<(usize, usize)> {
    let first = parts.first()?;
    let is_next = |(index, part): (usize, &Range<usize>)| {
        part.start == first.start + index * first.len() && part.len() == first.len()
    };
    parts.iter().enumerate().all(is_next).then_some((first.start, first.len()))
}

impl OnDevice for Nccl {
    fn queue(&self) -> &Queue {
        &self.link.queue
    }

    fn exchange(&self, sends: &[Transfer], receives: &[Transfer]) -> Result<()> {
        if sends.iter().chain(receives).all(|it| it.bytes == 0) {
            return Ok(());
        }
        let stream = self.link.queue.stream().handle();
        self.put("reduce_scatter", |functions, comm| {
            let some = |all: &[Transfer]| all.iter().copied().filter(|it| it.bytes > 0).collect::<Vec<_>>();
            // SAFETY: the caller says that there is memory, which lives until the queue has done this. Bytes that are sent and
            // places that receive lie apart.
            let sent = some(sends).into_iter().map(|Transfer { peer, address, bytes }| unsafe {
                (functions.send)(address as *const _, bytes, BYTES, peer as i32, comm, stream)
            });
            let codes: Vec<Code> = sent.collect();
            // SAFETY: as above.
            let received = some(receives).into_iter().map(|Transfer { peer, address, bytes }| unsafe {
                (functions.receive)(address as *mut _, bytes, BYTES, peer as i32, comm, stream)
            });
            worst(codes.into_iter().chain(received.collect::<Vec<_>>()))
        })
    }

    fn all_gather(&self, stretches: &[(u64, Vec<Range<usize>>)]) -> Result<()> {
        let is_empty = |(_, parts): &(u64, Vec<Range<usize>>)| parts.iter().all(Range::is_empty);
        if stretches.iter().all(is_empty) {
            return Ok(());
        }
        let stream = self.link.queue.stream().handle();
        let rank = self.link.world.rank;
        self.put("all_gather", |functions, comm| {
            let mut codes = Vec::new();
            for (address, parts) in stretches {
                assert_eq!(parts.len(), self.link.world.size, "a part for each rank");
                if let Some((start, length)) = even(parts) {
                    let all = address + start as u64;
                    let own = all + (rank * length) as u64;
                    if length > 0 {
                        // SAFETY: the caller says that there is memory for all parts, which lie end to end and have `length`
                        // bytes each; it lives until the queue has done this. Each rank's own part is in its place, as NCCL
                        // wants it.
                        codes.push(unsafe {
                            (functions.all_gather)(own as *const _, all as *mut _, length, BYTES, comm, stream)
                        });
                    }
                    continue;
                }
                for (root, part) in parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
                    let at = address + part.start as u64;
                    // SAFETY: as above; a broadcast may write where it reads.
                    codes.push(unsafe {
                        (functions.broadcast)(
                            at as *const _,
                            at as *mut _,
                            part.len(),
                            BYTES,
                            root as i32,
                            comm,
                            stream,
                        )
                    });
                }
            }
            worst(codes)
        })
    }

    fn broadcast(&self, address: u64, bytes: usize, root: usize) -> Result<()> {
        let size = self.link.world.size;
        assert!(root < size, "the root is one of the ranks");
        let parts = (0..size).map(|rank| if rank == root { 0..bytes } else { 0..0 }).collect();
        self.all_gather(&[(address, parts)])
    }
}
