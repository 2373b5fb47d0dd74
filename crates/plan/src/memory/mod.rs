//! The most memory that a rank needs in training, in bytes and part by part. It follows from the model's `config.json`
//! and the configuration alone.
//!
//! The engine itself counts the memory ([`CountBuffers`]). For the CPU it runs a training step on the meta device,
//! where each buffer is counted and nothing is computed. For a GPU it makes the same allocations as there, work spaces
//! included, in a device that only counts memory.
pub mod footprint;
mod gpu;
mod job;
mod pictures;
mod pool;
#[cfg(test)]
pub(super) mod testing;

pub use footprint::{Factors, Footprint, LowRank};
pub use job::{Base, CountBuffers, Job, OptimizerBytes, Pass, Policy, Storage, Trained};
pub use pictures::{ImageSize, Pictures};
pub use pool::{BufferCounts, Counts, ExpertCounts, GpuHeld, GpuWalk, VisionCounts, Walk};

use pool::{LANES, bytes};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use tunesmith_config::arch::{
    ALTUP_PROJECTIONS, ALTUP_UNEMBED_PROJECTIONS, AttentionSpec, EMBEDDING, PER_LAYER_EMBEDDING, PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
};
use tunesmith_device::gpu::WORKSPACE;
use tunesmith_ops::loss::linear::chunk_tokens;

/// Bytes of the program itself on the CPU: code, stacks of threads, and what the allocator holds unused. Measured.
pub const PROGRAM: u64 = 30 << 20;
/// Bytes that a process takes on a GPU beside its tensors: CUDA's context and kernels. Assumed. The driver counts them
/// as used before a run measures the free memory.
pub const CUDA_CONTEXT: u64 = 600 << 20;
/// Bytes of a GPU that NCCL takes for its channels. Assumed.
pub const NCCL: u64 = 200 << 20;
/// Bytes of a token in a batch: its id, target and position, and its share of the row boundaries.
const TOKEN: u64 = 64;

/// What a rank computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The CPU, in main memory.
    Cpu,
    /// An NVIDIA GPU.
    Gpu,
}

/// The most bytes that one rank holds, part by part.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Breakdown {
    /// Weights that are not trained, quantized or not.
    pub weights: u64,
    /// Trained values, and lasting copies of them.
    pub trained: u64,
    /// Gradients of the trained values.
    pub gradients: u64,
    /// The optimizer's state, and the moving average of the weights.
    pub optimizer: u64,
    /// The copy from which checkpoints are written while training continues.
    pub saving: u64,
    /// Activations that are saved for the backward pass.
    pub kept: u64,
    /// Activations of the block that is being computed.
    pub work: u64,
    /// A chunk of logits, and the other buffers of the LM head.
    pub head: u64,
    /// Scratch memory of the attention kernels.
    pub attention: u64,
    /// Buffers for what is sent between ranks, or between host and device.
    pub collectives: u64,
    /// Memory that is needed only for a moment: while weights are read, the optimizer updates, or an average of the
    /// weights is evaluated.
    pub passing: u64,
    /// The program itself, or CUDA's context.
    pub program: u64,
    /// Memory of the host that offloading uses. It is not part of [`Breakdown::total`].
    pub host: u64,
}

impl Breakdown {
    /// The bytes that the device must hold: all parts but `host`.
    pub const fn total(&self) -> u64 {
        self.weights
            + self.trained
            + self.gradients
            + self.optimizer
            + self.saving
            + self.kept
            + self.work
            + self.head
            + self.attention
            + self.collectives
            + self.passing
            + self.program
    }

    /// The parts of [`Breakdown::total`] with their names, in the order of the tables.
    pub const fn parts(&self) -> [(&'static str, u64); 12] {
        [
            ("weights", self.weights),
            ("trained", self.trained),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("saving", self.saving),
            ("kept", self.kept),
            ("work", self.work),
            ("head", self.head),
            ("attention", self.attention),
            ("collectives", self.collectives),
            ("passing", self.passing),
            ("program", self.program),
        ]
    }
}

/// The memory of a segment of the model (embedding, block or head), which `zero3` gathers as one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Segment {
    /// Bytes of frozen weights, as they are stored.
    pub frozen: u64,
    /// Bytes of trained values, in f32.
    pub trained: u64,
}

/// How the tokens of a pass are distributed over the experts. It decides how large the experts' buffers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// Each expert gets about as many tokens as any other; on a GPU, exactly as many.
    Balanced,
    /// All tokens choose the same experts.
    Worst,
}

/// The memory of a pass's activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Walked {
    /// Bytes that are saved for the backward pass when the head begins.
    pub kept: u64,
    /// Bytes of all buffers of the pass, including the saved ones.
    pub pools: u64,
    /// Bytes of a chunk of logits, and of the head's other buffers for it.
    pub head: u64,
    /// Bytes that have been moved to the host's memory when the head begins (`train.activation_offloading`).
    pub host: u64,
}

/// Predicts the memory of one job for passes of any size. It counts the buffers once for each number of experts in use.
#[derive(Debug)]
pub struct Predictor<'a> {
    /// What is trained, and how.
    pub job: Job<'a>,
    device: Device,
    /// Bytes that every rank always holds: of adapters in addition to their trained values, and of frozen weights of
    /// vision encoders.
    pub(crate) constants: u64,
    segments: Vec<Segment>,
    /// Bytes of the weights that a GPU leaves in the host's memory.
    on_host: u64,
    /// The most bytes that reading the weights takes on the CPU in addition to what is held afterwards.
    loading: u64,
    counts: RefCell<BTreeMap<[u64; 3], Rc<BufferCounts>>>,
}

impl<'a> Predictor<'a> {
    /// Reads the tensors of the job's base model.
    pub fn new(job: Job<'a>, device: Device) -> Self {
        let mut this = Self {
            constants: job.constants(),
            job,
            device,
            segments: Vec::new(),
            on_host: 0,
            loading: 0,
            counts: RefCell::default(),
        };
        this.read_base();
        this
    }

    /// A predictor for another job on the same model, such as one that saves less for the backward pass. Reuses what
    /// was read if base and number of trained values are the same.
    #[must_use]
    pub fn with_job(&self, job: Job<'a>) -> Self {
        let Self { device, constants, on_host, loading, .. } = *self;
        if job.base != self.job.base || job.trained.values != self.job.trained.values {
            return Self::new(job, device);
        }
        let segments = self.segments.clone();
        Self { job, device, constants, segments, on_host, loading, counts: RefCell::default() }
    }

    /// Fills the segments in the order in which weights are read, and finds how much more memory reading takes than
    /// what stays.
    fn read_base(&mut self) {
        let (arch, job) = (self.job.arch, &self.job);
        let mut segments = vec![Segment::default(); arch.num_hidden_layers + 2];
        let (mut held, mut most, mut on_host, mut encoders) = (0u64, 0u64, 0u64, 0u64);
        // Tensors without dimensions are bounds of modules, which the program holds as plain numbers.
        let of_vision = arch.vision.iter().flat_map(|vision| vision.tensors()).filter(|spec| !spec.shape.is_empty());
        let trained_there: BTreeSet<String> =
            arch.vision.iter().flat_map(|vision| vision.trained_tensors()).map(|spec| spec.name).collect();
        for (spec, sees) in
            arch.tensors().into_iter().map(|spec| (spec, false)).chain(of_vision.map(|spec| (spec, true)))
        {
            let at = match block_of(&spec.name) {
                _ if sees => 0,
                // The first block makes several streams, and the last one joins them.
                None if spec.name.starts_with(ALTUP_PROJECTIONS) => 1,
                None if spec.name.starts_with(ALTUP_UNEMBED_PROJECTIONS) => segments.len() - 2,
                Some(block) => block + 1,
                None if is_beside_embedding(&spec.name) => 0,
                None => segments.len() - 1,
            };
            let whole = Storage::F32.bytes(&spec.shape);
            let storage = job.storage(&spec).filter(|_| !trained_there.contains(&spec.name));
            let (bytes, through) = match storage {
                None => (whole, whole),
                Some(Storage::F32) => (whole, 0),
                Some(storage) if job.base.through_f32 || storage.is_quantized() => (storage.bytes(&spec.shape), whole),
                Some(storage) => (storage.bytes(&spec.shape), 0),
            };
            if self.device == Device::Gpu && job.offloaded.contains(&spec.name) {
                on_host += bytes;
                continue;
            }
            if self.device == Device::Cpu && job.stays_in_files(&spec.name) {
                continue;
            }
            match storage {
                None => segments[at].trained += bytes,
                Some(_) if sees => encoders += bytes,
                Some(_) => segments[at].frozen += bytes,
            }
            held += bytes;
            most = most.max(held + through);
        }
        // Adapters, rows of new tokens, and what DoRA keeps of the base's rows are counted as spread evenly over the
        // blocks.
        let whole: u64 = segments.iter().map(|segment| segment.trained).sum();
        let beside = (4 * job.trained.values).saturating_sub(whole) / arch.num_hidden_layers.max(1) as u64;
        let blocks = 1..=arch.num_hidden_layers;
        segments[blocks].iter_mut().for_each(|segment| segment.trained += beside);
        (self.loading, self.on_host) = (most.saturating_sub(held), on_host);
        self.constants += encoders;
        self.segments = segments;
    }

    /// The segments in order: embedding, blocks, head.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Bytes of the frozen weights that stay in the host's memory and that the GPU loads segment by segment.
    pub fn offloaded(&self) -> u64 {
        let brings = self.device == Device::Gpu && self.job.base.on_host;
        if brings { self.segments.iter().map(|segment| segment.frozen).sum() } else { 0 }
    }

    /// Bytes of such weights that are on the GPU at once: in the largest two adjacent segments, and in the last block with
    /// the head.
    fn brought(&self) -> (u64, u64) {
        if self.offloaded() == 0 {
            return (0, 0);
        }
        let two = |pair: &[Segment]| pair.iter().map(|segment| segment.frozen).sum::<u64>();
        let pairs = self.segments.windows(2).map(two);
        let [.., block, head] = &*self.segments else { return (0, 0) };
        let head = if self.job.arch.ties_head() { &self.segments[0] } else { head };
        (pairs.max().unwrap_or(0), block.frozen + head.frozen)
    }

    /// The memory of a pass's activations, if tokens are spread evenly over experts ([`Routing::Balanced`]).
    pub fn activations(&self, pass: &Pass) -> Walked {
        self.activations_routed(pass, Routing::Balanced)
    }

    /// The memory of a pass's activations with this routing.
    pub fn activations_routed(&self, pass: &Pass, routing: Routing) -> Walked {
        self.routed(pass, routing, routing == Routing::Balanced && self.images(pass) > 0)
    }

    /// As [`Self::activations_routed`]. `shows` says whether the pass has as many images as it can.
    fn routed(&self, pass: &Pass, routing: Routing, shows: bool) -> Walked {
        // A classification head reads one token of each row.
        let rows = if self.job.arch.score.is_some() { pass.tokens.div_ceil(pass.longest.max(1)) } else { u64::MAX };
        let pass = &Pass { labelled: pass.labelled.min(rows), ..*pass };
        if self.device == Device::Gpu {
            return self.on_gpu(pass, routing, shows);
        }
        // A single token chooses as many experts as all tokens that choose the same ones.
        let walked = match routing {
            Routing::Balanced => *pass,
            Routing::Worst => Pass { tokens: 1, longest: 1, labelled: 1 },
        };
        // The sizes of buffers follow from the tokens. Their number does not, except that experts without tokens need
        // none.
        let [tokens, labelled] = [walked.tokens, walked.labelled].map(|tokens| self.experts_in_use(tokens));
        let key = [tokens, labelled, u64::from(shows)];
        let known = self.counts.borrow().get(&key).cloned();
        let counts = known.unwrap_or_else(|| {
            let counts = Rc::new(self.job.engine.count(&self.walk(&walked, shows)));
            self.counts.borrow_mut().insert(key, Rc::clone(&counts));
            counts
        });
        self.bytes(&counts, pass, routing, shows)
    }

    /// How many more bytes a pass needs than [`Predictor::activations`] says, if all tokens choose the same experts.
    /// `None` for a model without experts, or if it needs no more.
    pub fn uneven_routing(&self, pass: &Pass) -> Option<u64> {
        self.job.arch.experts.as_ref()?;
        // Images need the same memory either way, so they are left out.
        let pools = |routing| self.routed(pass, routing, false).pools;
        Some(pools(Routing::Worst).saturating_sub(pools(Routing::Balanced))).filter(|&more| more > 0)
    }

    /// How many experts get tokens, at most all.
    fn experts_in_use(&self, tokens: u64) -> u64 {
        let experts = self.job.arch.experts.as_ref();
        experts.map_or(0, |experts| (tokens * experts.per_token as u64).min(experts.count as u64))
    }

    /// The most images that a pass can have.
    fn images(&self, pass: &Pass) -> u64 {
        self.job.pictures.map_or(0, |pictures| pictures.in_pass(pass))
    }

    /// The fewest tokens that every buffer has room for, because adapters multiply rows of a matrix as if they were
    /// tokens.
    fn room(&self) -> u64 {
        self.job.trained.adapters.values().map(|adapter| adapter.rows()).max().unwrap_or(0)
    }

    /// The memory of a validation's pass on the CPU: its activations and the head's buffers.
    pub fn evaluated(&self, pass: &Pass) -> u64 {
        let trained = self.activations(pass);
        let shows = self.images(pass) > 0;
        let counts = self.job.engine.count_forward(&self.walk(pass, shows));
        self.bytes(&counts, pass, Routing::Balanced, shows).pools + trained.head
    }

    /// A small pass that uses the same buffers as `pass`, to be counted quickly.
    fn walk(&self, pass: &Pass, shows: bool) -> Walk {
        let job = &self.job;
        let few = job.arch.experts.as_ref().map_or(0, |experts| experts.count as u64).max(2 * LANES);
        // The number of buffers does not depend on the number of images, and one image needs at least its own rows.
        let images = u64::from(shows);
        let few = few.max(images * job.pictures.map_or(0, |pictures| pictures.rows + 1));
        Walk {
            images: images as usize,
            tokens: pass.tokens.min(few) as usize,
            labelled: pass.labelled.clamp(1, few) as usize,
            room: self.room() as usize,
            full: job.full,
            none: job.none,
            narrow: job.narrow,
            rounds_gradients: job.rounds_gradients,
        }
    }

    /// The memory of these buffers for `pass`.
    fn bytes(&self, counts: &BufferCounts, pass: &Pass, routing: Routing, shows: bool) -> Walked {
        let tokens = pass.tokens.max(self.room());
        let (mut kept, mut pools) = (bytes(&counts.saved, tokens), bytes(&counts.all, tokens));
        if let Some(pictures) = self.job.pictures.filter(|_| shows) {
            let (saved, all) = pictures.bytes(&counts.vision, pass);
            (kept, pools) = (kept + saved, pools + all);
        }
        for expert in &counts.experts {
            let seen = if expert.labelled { pass.labelled } else { pass.tokens };
            let (saved, all) = match routing {
                Routing::Balanced => self.experts_bytes(expert, seen),
                Routing::Worst => (bytes(&expert.saved, stepped(seen)), bytes(&expert.all, stepped(seen))),
            };
            kept += saved;
            pools += all;
        }
        let chunk =
            chunk_tokens([self.job.arch.outputs(), self.job.arch.hidden_size], tunesmith_device::Device::Cpu) as u64;
        Walked { kept, pools, head: bytes(&counts.head, chunk.min(pass.labelled)), host: 0 }
    }

    /// Bytes of the saved buffers of experts for `tokens`, and of all their buffers, whatever number of tokens each
    /// expert gets.
    ///
    /// A buffer's size is a power of two panels: fewer than 2 n + 16 tokens for n. Saved buffers belong to many blocks,
    /// so their average counts: about half as much again as n, and a panel. Other buffers exist for one block at a
    /// time, so the block that needs the most counts. The buffers that only one expert has at a time may have to hold
    /// all tokens.
    fn experts_bytes(&self, counts: &ExpertCounts, tokens: u64) -> (u64, u64) {
        let (even, most) = (self.tokens_of_an_expert(tokens), stepped(tokens));
        let experts = self.experts_in_use(tokens).max(1);
        let part = |of: &dyn Fn(u64, u64) -> u64| -> Counts {
            let saved = |features| counts.saved.get(features).copied().unwrap_or(0);
            counts.all.iter().map(|(features, &all)| (*features, of(saved(features), all))).collect()
        };
        let saved = bytes(&counts.saved, ((3 * even).div_ceil(2) + LANES).min(most));
        let of_all = part(&|saved, all| all.saturating_sub(saved) / experts * experts);
        let of_one = part(&|saved, all| all.saturating_sub(saved) % experts);
        (saved, saved + bytes(&of_all, (2 * even + LANES).min(most)) + bytes(&of_one, most))
    }

    /// How many tokens an expert gets if `tokens` are spread evenly.
    fn tokens_of_an_expert(&self, tokens: u64) -> u64 {
        let experts = self.job.arch.experts.as_ref();
        experts.map_or(0, |experts| (tokens * experts.per_token as u64).div_ceil(experts.count as u64)).max(1)
    }

    /// Bytes of the gradients of a rank that trains alone. If gradients take two bytes each, those of the segment where
    /// the backward pass is take four bytes in addition. The same holds for a matrix that embedding and head share,
    /// throughout the pass.
    fn gradients(&self) -> u64 {
        let values = 4 * self.job.trained.values;
        if !self.job.narrow_gradients {
            return values;
        }
        let trained: Vec<u64> = self.segments.iter().map(|segment| segment.trained).collect();
        let (shared, rest) = trained.split_at(usize::from(self.job.arch.tie_word_embeddings));
        values / 2 + shared.iter().sum::<u64>() + rest.iter().copied().max().unwrap_or(0)
    }

    /// The most memory of a rank that trains alone, with passes as large as `pass`.
    pub fn predict(&self, pass: &Pass) -> Breakdown {
        let (job, arch) = (&self.job, self.job.arch);
        let Walked { kept, pools, head, host } = self.activations(pass);
        // The walk counts these weights too, so they are taken off.
        let (brought, at_head) = self.brought();
        let (kept, pools) = (kept.saturating_sub(at_head), pools.saturating_sub(brought));
        let values = 4 * job.trained.values;
        let frozen = self.segments.iter().map(|segment| segment.frozen).sum::<u64>() + self.constants;
        let scratch = |attention: &AttentionSpec| {
            let tasks = attention.num_kv_heads * pass.tokens.div_ceil(pass.longest) as usize;
            job.threads.min(tasks) as u64 * attention_scratch(attention, pass.longest)
        };
        let start = if job.trained.keeps_start { values } else { 0 };
        let mut breakdown = Breakdown {
            weights: frozen,
            trained: values + start,
            gradients: self.gradients(),
            optimizer: job.optimizer.state + job.optimizer.average,
            saving: job.optimizer.saving,
            kept,
            work: pools.saturating_sub(kept) + TOKEN * pass.tokens,
            head,
            collectives: brought,
            passing: job.optimizer.publishing,
            ..Breakdown::default()
        };
        let read = job.pictures.map_or(0, |pictures| pictures.read(pass));
        let loading = match self.device {
            Device::Cpu => {
                let encoder = job.pictures.filter(|pictures| pictures.in_pass(pass) > 0);
                let encoder = encoder.map_or(0, |pictures| job.threads as u64 * pictures.scratch);
                breakdown.attention = arch.attentions().map(scratch).max().unwrap_or(0).max(encoder);
                breakdown.work += read;
                if job.stays_in_files(EMBEDDING) {
                    // The rows of the embedding that a pass looks up.
                    breakdown.work += 4 * pass.tokens * arch.hidden_size as u64;
                }
                breakdown.program = PROGRAM + job.companions;
                breakdown.passing = breakdown.passing.max(job.optimizer.scratch);
                if let Some(pass) = &job.evaluation {
                    // Training returns its buffers before it takes longer ones, and a validation returns its own before
                    // training continues.
                    let more = self.evaluated(pass) + TOKEN * pass.tokens;
                    breakdown.work += more.saturating_sub(kept + breakdown.work + head);
                }
                self.loading
            }
            Device::Gpu => {
                let GpuHeld { held, most } = job.engine.held_on_gpu(&job.base);
                breakdown.weights = held.saturating_sub(breakdown.trained);
                breakdown.program = CUDA_CONTEXT + WORKSPACE as u64;
                breakdown.host = host + read + self.on_host + self.offloaded() + job.optimizer.scratch + job.companions;
                most - held
            }
        };
        let loaded = breakdown.weights + breakdown.trained + loading + breakdown.program;
        breakdown.passing = breakdown.passing.max((loaded + breakdown.passing).saturating_sub(breakdown.total()));
        breakdown
    }
}

/// How many tokens an expert's buffer for `tokens` has room for: a power of two panels.
const fn stepped(tokens: u64) -> u64 {
    tokens.div_ceil(LANES).next_power_of_two() * LANES
}

/// Whether a tensor is gathered together with the embedding: its own matrix, and those of per-layer embeddings.
fn is_beside_embedding(tensor: &str) -> bool {
    [EMBEDDING, PER_LAYER_EMBEDDING, PER_LAYER_NORM].contains(&tensor) || tensor.starts_with(PER_LAYER_PROJECTION)
}

/// The number of the block that a tensor belongs to; `None` for those of embedding and head.
pub(super) fn block_of(tensor: &str) -> Option<usize> {
    tensor.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// Bytes of scratch memory that a thread needs for an encoder's attention over `tokens` tokens with heads of `head_dim`
/// features: for both passes (`backward`), or for the forward pass alone.
pub fn encoder_scratch(head_dim: u64, tokens: u64, backward: bool) -> u64 {
    let (tokens, features) = (tokens.next_multiple_of(LANES), head_dim.next_multiple_of(2));
    // The forward pass holds keys, values, queries and outputs, and the backward pass also the gradient of each.
    let of_tokens = 4 * tokens * features;
    4 * if backward { 2 * of_tokens + 2 * tokens } else { of_tokens + tokens }
}

/// Bytes of scratch memory that a thread needs in the backward pass of attention, for rows of at most `longest` tokens
/// (`ops::attention::backward`).
fn attention_scratch(attention: &AttentionSpec, longest: u64) -> u64 {
    let tokens = longest.next_multiple_of(LANES);
    let block = 2 * 8 * LANES * LANES;
    let [keys, values] =
        [attention.head_dim, attention.value_dim()].map(|features| (features as u64).next_multiple_of(2));
    4 * (4 * tokens * (keys + values) + 2 * tokens + 3 * block + LANES * keys.max(values))
}
