//! Shards weights over ranks, as FSDP and `ZeRO` 3 do. Each rank keeps a part of every segment. A segment is gathered
//! while the pass computes the segment before it, and its memory is freed afterwards. Frozen weights are in the
//! segment. Trained weights are in [`Params`], which then have only this rank's part of them, end to end.
//!
//! The frozen weights that a rank keeps may be in the host's memory ([`Shards::offloaded`]), whether ranks share
//! weights or a rank is alone.
//!
//! All ranks must gather the same segments in the same order, or some would wait forever. So a pass follows a fixed
//! route. A pass that fails goes to the end of its route without computing ([`Shards::end`]). A rank that has no pass
//! of its own takes part in those of the others (`Model::stand_by`).
use super::params::{ParamSpec, Params};
use super::pass::Pass;
pub use super::segment::{Flat, Held};
use super::segment::{Place, Segment, Shared, Trained};
use super::values::Values;
use super::weight::{View, Weight};
use std::fmt;
use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tunesmith_base::error::{Error, Result};
use tunesmith_device::{Array, Device, Element, Floats, Slice};
use tunesmith_ops::gemm::Store;

/// What a pass is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Forward alone, for an evaluation.
    Forward,
    /// Forward and backward, for a training step.
    Train,
}

/// The other ranks, as a model sees them: how values are cut, gathered, and which pass comes next.
pub trait Peers: fmt::Debug + Send + Sync {
    /// This rank's part of `length` numbers.
    fn part(&self, length: usize) -> Range<usize>;

    /// This rank's index among those that share trained values.
    fn rank(&self) -> usize;

    /// Every rank's part of the trained values of the last segment of `specs`, as ranges that count from flat place
    /// `start`, where that segment begins. `None` where every rank keeps all of them.
    fn cuts(&self, specs: &[ParamSpec], start: usize) -> Option<Vec<Range<usize>>>;

    /// Starts an all-gather of `numbers`, in which this rank has filled in its part of each type. The result arrives at
    /// the receiver.
    fn begin(&self, numbers: Flat) -> Receiver<Result<Flat>>;

    /// Tells the other ranks which pass this rank makes next, if any, and waits until all have told theirs. Returns the
    /// pass that all make now; `None` if no rank has one.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone, or ranks make different passes.
    fn next(&self, own: Option<Kind>) -> Result<Option<Kind>>;
}

/// Which of `count` numbers are in `part`. The first of them is number `start` of its kind.
fn cut(count: usize, start: usize, part: &Range<usize>) -> Range<usize> {
    let cut = |at: usize| at.clamp(start, start + count) - start;
    cut(part.start)..cut(part.end)
}

/// Copies those of `numbers` that are in `part` (see [`cut`]) to their places in `own`, whose places are those of the
/// part.
fn keep<T: Element>(own: &mut Array<T>, numbers: Slice<'_, T>, start: usize, part: &Range<usize>) {
    let kept = cut(numbers.len(), start, part);
    if !kept.is_empty() {
        let at = start + kept.start - part.start;
        own.slice_mut(at..at + kept.len()).copy_from(numbers.slice(kept));
    }
}

/// The peers of a rank that shares its weights with no other: it gathers only from its host's memory.
#[derive(Debug)]
struct Alone;

impl Peers for Alone {
    fn part(&self, length: usize) -> Range<usize> {
        0..length
    }

    fn rank(&self) -> usize {
        0
    }

    fn cuts(&self, _: &[ParamSpec], _: usize) -> Option<Vec<Range<usize>>> {
        None
    }

    fn begin(&self, numbers: Flat) -> Receiver<Result<Flat>> {
        let (give, take) = channel();
        // The receiver is here.
        let _ = give.send(Ok(numbers));
        take
    }

    fn next(&self, own: Option<Kind>) -> Result<Option<Kind>> {
        Ok(own)
    }
}

/// Makes a segment of those of `weights` that are not trained as a whole. This rank keeps its part of their values, in
/// the host's memory if `on_host`. The weights give up their values and point to the segment.
fn share(weights: Vec<&mut Weight>, peers: &dyn Peers, device: Device, on_host: bool) -> Arc<Segment> {
    // What a GPU leaves on the host is not sharded: every rank keeps it there.
    let is_frozen = |weight: &&mut Weight| match weight {
        Weight::Frozen(frozen) => frozen.device() == device,
        Weight::Quantized(_) | Weight::Rows(_) => true,
        Weight::Interleaved(_) | Weight::Shared(_) | Weight::Trained(_) => false,
    };
    let mut weights: Vec<&mut Weight> = weights.into_iter().filter(is_frozen).collect();
    let mut lengths = [0; 4];
    let mut take = |kind: usize, count: usize| {
        lengths[kind] += count;
        lengths[kind] - count
    };
    let place = |weight: &&mut Weight| match weight.view(Values::default()).store() {
        Store::F32(values) => {
            let start = take(0, values.len());
            Place::Floats(start..start + values.len())
        }
        Store::Bf16(values) => {
            let start = take(1, values.len());
            Place::Halves(start..start + values.len())
        }
        Store::Quantized(matrix) => {
            let form = matrix.form();
            let (code, scale) = (take(2, form.bytes()), take(3, form.floats()));
            Place::Quantized(form, code, scale)
        }
        Store::Interleaved(_) => unreachable!("a model for inference is not sharded"),
    };
    let places: Vec<Place> = weights.iter().map(place).collect();
    let parts = lengths.map(|length| peers.part(length));
    let kept = parts.each_ref().map(Range::len);
    let mut own = if on_host { Flat::pinned(kept, device) } else { Flat::new(kept, &[], device) };
    for (weight, place) in weights.iter().zip(&places) {
        let view: View<'_> = weight.view(Values::default());
        match (view.store(), place) {
            (Store::F32(values), Place::Floats(range)) => {
                keep(&mut own.floats, values, range.start, &parts[0]);
            }
            (Store::Bf16(values), Place::Halves(range)) => {
                keep(&mut own.halves, values, range.start, &parts[1]);
            }
            (Store::Quantized(matrix), Place::Quantized(_, code, scale)) => {
                let ([codes, nested], scales) = matrix.parts();
                keep(&mut own.codes, codes, *code, &parts[2]);
                keep(&mut own.codes, nested, *code + codes.len(), &parts[2]);
                keep(&mut own.scales, scales, *scale, &parts[3]);
            }
            _ => unreachable!("a place is of its weight's kind"),
        }
    }
    let table = |(weight, place): (&&mut Weight, &Place)| match (&**weight, place) {
        (Weight::Rows(rows), Place::Floats(range)) => {
            let (ids, trained) = rows.trained();
            Some((range.start, ids, trained))
        }
        _ => None,
    };
    let tables = weights.iter().zip(&places).filter_map(table).collect();
    let segment = Arc::new(Segment::new(lengths, places, tables, own, parts));
    for (index, weight) in weights.iter_mut().enumerate() {
        let shared = Shared { segment: Arc::clone(&segment), index };
        match &mut **weight {
            Weight::Rows(rows) => rows.share(shared),
            weight => *weight = Weight::Shared(shared),
        }
    }
    segment
}

/// Where the current pass is on its route.
#[derive(Debug, Default)]
struct Walk {
    route: Vec<usize>,
    /// How many segments of the route the pass has reached.
    reached: usize,
    /// The segment that is being gathered.
    coming: Option<(usize, Receiver<Result<Flat>>)>,
    /// Buffers of freed segments, for reuse.
    spare: Vec<Flat>,
}

/// The segments of a model, which ranks may share. By default they do not: every segment is there, and nothing is
/// gathered.
#[derive(Debug, Default)]
pub struct Shards {
    segments: Vec<Arc<Segment>>,
    /// The trained values that are gathered with each segment; empty if every rank keeps all trained values.
    trained: Vec<Vec<Trained>>,
    /// `None` where every rank has all weights on its device.
    peers: Option<Box<dyn Peers>>,
    /// Whether what this rank keeps of the frozen weights is in the host's memory.
    on_host: bool,
    /// Whether this rank keeps all of them.
    alone: bool,
    /// Whether segments stay gathered between forward and backward.
    stays: bool,
    /// The routes of forward passes and of training passes.
    routes: [Vec<usize>; 2],
    walk: Mutex<Walk>,
}

impl Shards {
    /// Starts without segments. With `stays`, a segment stays gathered between its forward and its backward.
    pub fn new(peers: Box<dyn Peers>, stays: bool) -> Self {
        Self { peers: Some(peers), stays, ..Self::default() }
    }

    /// Puts this rank's frozen weights into the host's memory, from where they come to the GPU segment by segment
    /// (`train.offload_param`).
    #[must_use]
    pub fn offloaded(self) -> Self {
        let alone = self.peers.is_none();
        Self { peers: self.peers.or_else(|| Some(Box::new(Alone))), on_host: true, alone, ..self }
    }

    /// Whether ranks shard the weights.
    pub const fn is_sharded(&self) -> bool {
        self.peers.is_some() && !self.alone
    }

    /// Whether weights are available only while a pass is in their segment.
    pub const fn gathers(&self) -> bool {
        self.peers.is_some()
    }

    /// Adds a segment. Its frozen weights are sharded from now on, and so are the trained values of the last segment of
    /// `params`.
    pub fn push(&mut self, weights: Vec<&mut Weight>, params: &mut Params) {
        let Some(peers) = &self.peers else { return };
        self.segments.push(share(weights, &**peers, params.device(), self.on_host));
        self.trained.push(Vec::new());
        self.push_trained(self.segments.len() - 1, params);
    }

    /// Gathers the trained values of the last segment of `params` together with `segment` from now on. This rank keeps
    /// its part of them.
    pub(super) fn push_trained(&mut self, segment: usize, params: &mut Params) {
        let Some(peers) = &self.peers else { return };
        let start = params.last_segment();
        let Some(parts) = peers.cuts(&params.specs, start).filter(|_| params.len() > start) else { return };
        let own = parts[peers.rank()].clone();
        let packed = params.keep(start, own.clone());
        self.trained[segment].push(Trained { start, parts, own, packed });
    }

    /// Whether ranks share trained values too.
    pub fn shares_trained(&self) -> bool {
        self.trained.iter().any(|trained| !trained.is_empty())
    }

    /// Sets the order in which passes reach segments: in forward, and after it in backward while training.
    pub fn set_route(&mut self, forward: Vec<usize>, backward: &[usize]) {
        let train = [&forward, backward].concat();
        let full = |route: Vec<usize>| route.into_iter().filter(|&at| !self.is_empty(at)).collect();
        self.routes = [full(forward), full(train)];
    }

    /// Whether nothing is gathered for this segment.
    fn is_empty(&self, segment: usize) -> bool {
        self.peers.is_none() || self.segments[segment].is_empty() && self.trained[segment].is_empty()
    }

    /// Bytes of this rank's shares of frozen weights.
    pub fn own_bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.own_bytes()).sum()
    }

    /// Bytes of all ranks' shares of frozen weights.
    pub fn all_bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.bytes()).sum()
    }

    /// Bytes of segments that are gathered now.
    pub fn held_bytes(&self) -> usize {
        let bytes = |(segment, trained): (&Arc<Segment>, &Vec<Trained>)| {
            let trained: usize = trained.iter().map(Trained::len).sum();
            if segment.is_whole() { segment.bytes() + 4 * trained } else { 0 }
        };
        self.segments.iter().zip(&self.trained).map(bytes).sum()
    }

    /// The trained values of a gathered segment; `None` if ranks do not share them.
    fn held(&self, segment: usize) -> Option<Held> {
        if self.shares_trained() { self.segments[segment].held() } else { None }
    }

    fn walk(&self) -> MutexGuard<'_, Walk> {
        self.walk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a pass, which all ranks make together.
    ///
    /// # Errors
    /// As [`Peers::next`].
    pub fn begin(&self, kind: Kind) -> Result<()> {
        let Some(peers) = &self.peers else { return Ok(()) };
        match peers.next(Some(kind))? {
            Some(agreed) if agreed == kind => {
                self.set_out(kind);
                Ok(())
            }
            other => Err(Error::peer(format!("this rank makes a {kind:?} pass, others make {other:?}"))
                .hint("start all ranks with the same version and configuration; then continue with --resume")),
        }
    }

    fn set_out(&self, kind: Kind) {
        let mut walk = self.walk();
        (walk.route, walk.reached) = (self.routes[kind as usize].clone(), 0);
    }

    /// Reaches `segment`, the next one on the route, and calls `act` with a pass that has its trained values. `values`
    /// are the trained values that this rank keeps.
    ///
    /// # Errors
    /// As [`Shards::reach`].
    pub(super) fn at<T>(
        &self,
        segment: usize,
        values: Floats<'_>,
        pass: &Pass<'_>,
        act: impl FnOnce(&Pass<'_>) -> T,
    ) -> Result<T> {
        self.reach(segment, values)?;
        let held = self.held(segment);
        let values = held.as_ref().map_or(pass.values, Held::values);
        Ok(act(&Pass { values, ..*pass }))
    }

    /// Reaches a segment, the next one on the route. It is gathered when this returns, and the one after it
    /// is on its way. `values` are the trained values that this rank keeps.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Peer`]: a rank is gone.
    ///
    /// # Panics
    /// If another segment is next on the route.
    pub fn reach(&self, segment: usize, values: Floats<'_>) -> Result<()> {
        if self.is_empty(segment) {
            return Ok(());
        }
        let mut walk = self.walk();
        let at = walk.reached;
        assert_eq!(walk.route.get(at), Some(&segment), "the route's next segment");
        walk.reached += 1;
        self.leave(&mut walk, at);
        if !self.segments[segment].is_whole() {
            let (coming, numbers) = match walk.coming.take() {
                Some(coming) => coming,
                None => (segment, self.bring(&mut walk, segment, values)),
            };
            debug_assert_eq!(coming, segment);
            let numbers = numbers.recv().map_err(|_| Error::peer("the thread that brings weights has ended"))??;
            self.segments[segment].assemble(numbers, &self.trained[segment], values);
        }
        if let Some(&next) = walk.route.get(at + 1).filter(|&&next| !self.segments[next].is_whole()) {
            walk.coming = Some((next, self.bring(&mut walk, next, values)));
        }
        Ok(())
    }

    /// Frees the segment before place `at` of the route, unless the route needs it at that place too, or it stays
    /// gathered until it is needed again.
    fn leave(&self, walk: &mut Walk, at: usize) {
        let Some(before) = at.checked_sub(1).map(|before| walk.route[before]) else { return };
        let again = walk.route[at..].iter().position(|&later| later == before);
        if again == Some(0) || (self.stays && again.is_some()) {
            return;
        }
        walk.spare.extend(self.segments[before].dissolve());
    }

    fn bring(&self, walk: &mut Walk, segment: usize, values: Floats<'_>) -> Receiver<Result<Flat>> {
        let (segment, trained) = (&self.segments[segment], &self.trained[segment]);
        let fits = walk.spare.iter().position(|spare| segment.fits(spare, trained));
        let numbers = if let Some(at) = fits {
            walk.spare.swap_remove(at)
        } else {
            // At most two segments are in memory, and no other buffers.
            walk.spare.clear();
            segment.blank(trained, values.device())
        };
        let peers = self.peers.as_ref().expect("only sharded segments are gathered");
        peers.begin(segment.give(numbers, trained, values))
    }

    /// Goes to the end of the route without computing, and frees all segments. `left` is called whenever a segment is
    /// left, from the one on in which the pass turns around. That one is the head, or the embedding where the two are
    /// tied, and is given as `None`.
    ///
    /// # Errors
    /// As [`Shards::reach`], and those of `left`.
    pub fn end(&self, values: Floats<'_>, left: &mut dyn FnMut(Option<usize>) -> Result<()>) -> Result<()> {
        let turn = self.routes[Kind::Forward as usize].len();
        loop {
            let (reached, last, next) = {
                let walk = self.walk();
                let before = walk.reached.checked_sub(1).map(|before| walk.route[before]);
                (walk.reached, before, walk.route.get(walk.reached).copied())
            };
            if reached >= turn {
                left(last.filter(|_| reached > turn))?;
            }
            match next {
                Some(segment) => self.reach(segment, values)?,
                None => break,
            }
        }
        let mut walk = self.walk();
        walk.route.clear();
        walk.reached = 0;
        walk.spare.extend(self.segments.iter().filter_map(|segment| segment.dissolve()));
        // A pass needs two at once.
        let drop = walk.spare.len().saturating_sub(2);
        walk.spare.drain(..drop);
        Ok(())
    }

    /// Takes part in the passes of other ranks, until no rank has a pass left.
    ///
    /// # Errors
    /// As [`Shards::begin`].
    pub(super) fn stand_by(&self, values: Floats<'_>) -> Result<()> {
        let Some(peers) = &self.peers else { return Ok(()) };
        while let Some(kind) = peers.next(None)? {
            self.set_out(kind);
            self.end(values, &mut |_| Ok(()))?;
        }
        Ok(())
    }

    /// Frees the memory of idle buffers.
    pub(super) fn release(&self) {
        self.walk().spare = Vec::new();
    }
}
