//! Gathers sharded optimizer state for a checkpoint, tensor by tensor and at most a bucket at a time. Rank 0 writes it
//! to the file; the others discard it. The file equals that of a single process, so that any number of ranks can resume
//! from it under any strategy.
use std::cell::RefCell;
use std::io::{self, Write};
use std::ops::Range;

use super::ddp_zero::Sharing;
use tunesmith_base::error::{Error, Result};
use tunesmith_checkpoint::{self as checkpoint, TRAINED};
use tunesmith_comm::{Collectives, bytes};
use tunesmith_device::{Floats, Slice};
use tunesmith_model::ParamSpec;
use tunesmith_model::weights::Numbers;
use tunesmith_optim::{Optimizer, State, StateTensor};

/// The optimizer state of all ranks, and the trained values if they are needed.
pub struct Gathered<'a> {
    /// The tensors of the file in its order: name, shape, and how numbers are stored.
    pub tensors: Vec<(String, Vec<usize>, Numbers<'static>)>,
    comm: &'a dyn Collectives,
    sharing: &'a Sharing,
    optimizer: &'a Optimizer,
    state: Vec<StateTensor>,
    specs: &'a [ParamSpec],
    /// The trained values that this rank keeps, end to end, if the file holds them too.
    trained: Option<Floats<'a>>,
    /// The error of a lost rank, which an [`io::Error`] cannot carry.
    peer_error: RefCell<Option<Error>>,
}

/// The parts of a tensor that this rank has: the range of each in the tensor's flat numbers, and these numbers.
type Own<'a> = Vec<(Range<usize>, Part<'a>)>;

/// A part of a tensor: float32 values of the optimizer's state or of a trained tensor, or 8-bit codes of the state.
enum Part<'a> {
    Floats(Floats<'a>),
    Bytes(Slice<'a, u8>),
}

impl Part<'_> {
    /// Copies its bytes `from..from + to.len()` to `to`. A number has `width` bytes, and `from` is where one begins.
    fn read(&self, from: usize, width: usize, to: &mut [u8]) {
        match self {
            Self::Floats(values) => {
                let values = values.slice(from / width..(from + to.len()) / width);
                to.copy_from_slice(bytes::of(&values.to_host()));
            }
            Self::Bytes(codes) => codes.slice(from..from + to.len()).read_into(to),
        }
    }
}

impl<'a> Gathered<'a> {
    /// Prepares to gather the state of a run between two steps. `specs` are the trained tensors. `trained` are the values that
    /// this rank keeps of them; `None` if the file does not contain them.
    pub fn new(
        comm: &'a dyn Collectives,
        sharing: &'a Sharing,
        optimizer: &'a Optimizer,
        specs: &'a [ParamSpec],
        trained: Option<Floats<'a>>,
    ) -> Self {
        let tensors = checkpoint::elsewhere(optimizer, specs, trained.is_some());
        let (state, peer_error) = (optimizer.state(), RefCell::default());
        Self { tensors, comm, sharing, optimizer, state, specs, trained, peer_error }
    }

    /// Writes the numbers of one tensor. All ranks call it together.
    ///
    /// # Errors
    /// Those of `writer`, or a lost rank: [`Gathered::cause`] then has its error.
    pub fn write(&self, name: &str, writer: &mut dyn Write) -> io::Result<()> {
        if let Some(tensor) = self.state.iter().find(|tensor| tensor.name == name) {
            let Some((slot, place)) = self.optimizer.slots().nth(tensor.slot) else {
                return Err(io::ErrorKind::NotFound.into());
            };
            let of = |state: &'a State| match state {
                State::F32(values) => Part::Floats(values.view()),
                State::U8(codes) => Part::Bytes(codes.view()),
            };
            let own: Own<'_> = self.optimizer.owned(tensor).map(|(range, state)| (range, of(state))).collect();
            let width = tensor.spec.bytes() as usize / tensor.spec.count().max(1);
            return self.gather(&place, |range| tensor.spec.range(slot, &range), width, &own, writer);
        }
        let spec = name.strip_suffix(TRAINED).and_then(|name| self.specs.iter().find(|spec| spec.name == name));
        let (Some(spec), Some(trained)) = (spec, self.trained) else { return Err(io::ErrorKind::NotFound.into()) };
        let (mut own, mut at) = (Own::new(), 0);
        for range in self.sharing.kept() {
            let (low, high) = (range.start.max(spec.offset), range.end.min(spec.range().end));
            if low < high {
                let packed = at + low - range.start..at + high - range.start;
                own.push((low - spec.offset..high - spec.offset, Part::Floats(trained.slice(packed))));
            }
            at += range.len();
        }
        self.gather(&spec.range(), |range| range, size_of::<f32>(), &own, writer)
    }

    /// Gathers the tensor at `place` of the flat buffer, segment by segment, and writes it. `numbers` maps a range of its
    /// values to the range of numbers that belong to them. A number has `width` bytes.
    fn gather(
        &self,
        place: &Range<usize>,
        numbers: impl Fn(Range<usize>) -> Range<usize>,
        width: usize,
        own: &Own<'_>,
        writer: &mut dyn Write,
    ) -> io::Result<()> {
        let partition = &self.sharing.partition;
        let at_once = (self.comm.limits().bucket / width).max(1);
        let mut buffer = Vec::new();
        for segment in 0..partition.segments() {
            let cut = |range: Range<usize>| {
                range.start.clamp(place.start, place.end)..range.end.clamp(place.start, place.end)
            };
            let of_rank = |rank| {
                let values = cut(partition.part(segment, rank));
                let values = values.start - place.start..values.end - place.start;
                if values.is_empty() { 0..0 } else { numbers(values) }
            };
            let parts: Vec<Range<usize>> =
                (0..partition.ranks()).map(of_rank).filter(|part| !part.is_empty()).collect();
            let (Some(first), Some(last)) = (parts.first(), parts.last()) else { continue };
            let all = first.start..last.end;
            for start in all.clone().step_by(at_once) {
                let message = start..all.end.min(start + at_once);
                let bytes_in = |range: &Range<usize>| {
                    let (low, high) =
                        (range.start.clamp(message.start, message.end), range.end.clamp(message.start, message.end));
                    (low - message.start) * width..(high.max(low) - message.start) * width
                };
                // A rank without a part has an empty one, where the part before it ends.
                let mut end = 0;
                let places = (0..partition.ranks()).map(|rank| {
                    let part = bytes_in(&of_rank(rank));
                    let part = if part.is_empty() { end..end } else { part };
                    end = part.end;
                    part
                });
                let places: Vec<Range<usize>> = places.collect();
                buffer.clear();
                buffer.resize(message.len() * width, 0u8);
                for (range, part) in own {
                    let to = bytes_in(range);
                    if !to.is_empty() {
                        let skipped = (range.start.max(message.start) - range.start) * width;
                        part.read(skipped, width, &mut buffer[to]);
                    }
                }
                if let Err(error) = self.comm.all_gather_bytes(&mut buffer, &places) {
                    let stopped = io::Error::other(error.message().to_owned());
                    *self.peer_error.borrow_mut() = Some(error);
                    return Err(stopped);
                }
                writer.write_all(&buffer)?;
            }
        }
        Ok(())
    }

    /// Returns `written`, with the error of a lost rank instead of the error that it caused.
    ///
    /// # Errors
    /// That of the lost rank, or that of `written`.
    pub fn cause<T>(&self, written: Result<T>) -> Result<T> {
        match self.peer_error.borrow_mut().take() {
            Some(error) => Err(error),
            None => written,
        }
    }
}
