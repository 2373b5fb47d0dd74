//! Counts the memory that passes take on the CPU and on a GPU, for memory predictions. It walks the model's real code on the
//! meta device and on GPUs that need not exist, so nothing is computed and no values are held.
use std::sync::{Arc, Mutex, PoisonError};
use tunesmith_base::error::Result;
use tunesmith_config::arch::Arch;
use tunesmith_config::bitsandbytes::Bitsandbytes;
use tunesmith_config::{Config, Dtype, Quantization};
use tunesmith_device::{CountedGpu, memory};
use tunesmith_model::Model;
use tunesmith_plan::memory::{Base, BufferCounts, CountBuffers, GpuHeld, GpuWalk, Storage, Walk, Walked as GpuBytes};
use tunesmith_vision::Pixels;

/// Counts passes on the meta device and on GPUs that need not exist.
#[derive(Debug)]
pub(crate) struct MetaEngine {
    arch: Arch,
    config: Config,
    /// The largest image that rows show, one for each image encoder.
    shown: Vec<Arc<Pixels>>,
    walked: Mutex<Walked>,
    on_gpu: Mutex<CountedPasses>,
}

/// The model on the meta device, built for the first pass, and the counts so far. They are kept because plans of several
/// strategies ask for the same passes.
#[derive(Debug, Default)]
struct Walked {
    model: Option<Model>,
    passes: Vec<(Walk, BufferCounts)>,
    forward: Vec<(Walk, BufferCounts)>,
}

/// The models that were built last on a counted GPU, and the counts so far.
#[derive(Debug, Default)]
struct CountedPasses {
    models: Vec<OnGpu>,
    held: Vec<(Base, GpuHeld)>,
    passes: Vec<(Base, GpuWalk, GpuBytes)>,
}

/// A model on a counted GPU. The fields are dropped in this order: the model before its GPU.
#[derive(Debug)]
struct OnGpu {
    model: Model,
    held: GpuHeld,
    base: Base,
    experts: Option<Experts>,
    _gpu: CountedGpu,
}

/// How many experts a block has, and how many of them a token takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Experts {
    count: usize,
    per_token: usize,
}

impl Experts {
    /// One of `parts` equal parts of the experts, each of which sees as many tokens as before; `None` if they do not divide
    /// evenly.
    fn part(self, parts: usize) -> Option<Self> {
        let whole = self.count.is_multiple_of(parts) && self.per_token.is_multiple_of(parts);
        whole.then(|| Self { count: self.count / parts, per_token: self.per_token / parts })
    }
}

/// If all blocks together have more experts than this, only an eighth and a quarter of them are walked. Every expert takes
/// the same memory, so the rest can be extrapolated ([`from_parts`]).
const MANY_EXPERTS: usize = 1024;
/// Maximum number of models to keep. A plan asks for the whole model, for parts of its experts, and for other forms of the
/// base.
const MODELS: usize = 4;

impl OnGpu {
    fn new(arch: &Arch, config: &Config, base: &Base, experts: Option<Experts>) -> Result<Self> {
        let (mut arch, mut config) = (arch.clone(), config.clone());
        if let Some((of, Experts { count, per_token })) = arch.experts.as_mut().zip(experts) {
            (of.count, of.per_token) = (count, per_token);
            // Groups choose which experts a token goes to, which no size depends on; fewer experts may not divide into them.
            of.router.groups = None;
        }
        config.model.dtype = if base.matrices == Storage::F32 { Dtype::Float32 } else { Dtype::Bfloat16 };
        config.model.quantization = match (base.quantized, config.model.quantization) {
            (None, _) if !base.stored.is_empty() => Quantization::Auto,
            (None | Some(Storage::F32 | Storage::Bf16 | Storage::Stored(_)), _) => Quantization::None,
            (Some(Storage::FourBit { .. }), Quantization::Fp4) => Quantization::Fp4,
            (Some(Storage::FourBit { .. }), _) => Quantization::Nf4,
            (Some(Storage::Int8), _) => Quantization::Int8,
            (Some(Storage::Fp8), _) => Quantization::Fp8,
        };
        if let Some(Storage::FourBit { double }) = base.quantized {
            config.model.double_quant = double;
        }
        config.train.offload_param = base.on_host;
        let found =
            |it: Bitsandbytes| Bitsandbytes::of_files(it.quantization, it.double_quant, base.quantized_tensors.clone());
        arch.bitsandbytes = arch.bitsandbytes.filter(|it| it.quantization == config.model.quantization).map(found);
        // The files may hold other matrices in this format than config.json says.
        arch.stored = arch.stored.map(|format| format.with_found(base.stored.clone()));
        let gpu = CountedGpu::take();
        let model = Model::on_counted(&arch, &config, &base.float32, &gpu)?;
        let held = GpuHeld { held: memory::live(gpu.device()), most: memory::peak(gpu.device()) };
        Ok(Self { model, held, base: base.clone(), experts, _gpu: gpu })
    }
}

/// Bytes of all experts, extrapolated from those of an eighth and of a quarter of them: a quarter and six eighths more.
const fn from_parts(eighth: u64, quarter: u64) -> u64 {
    quarter + 6 * quarter.saturating_sub(eighth)
}

impl MetaEngine {
    /// Counts passes of `arch` with the settings of `config`. `shown` is the largest image for each image encoder.
    ///
    /// # Errors
    /// Those of building the model, which a run would meet as well: settings that do not go with this model; the files of an image encoder
    /// do not fit it; experts whose numbers make no whole blocks of `base`'s quantization.
    pub(crate) fn new(arch: Arch, config: &Config, shown: Vec<Arc<Pixels>>, base: &Base) -> Result<Self> {
        let config = config.clone();
        let model = Some(Model::on_meta(&arch, &config)?);
        let mut counted = CountedPasses::default();
        if let Some(it) = arch.experts.as_ref().filter(|_| base.quantized.is_some()) {
            // All experts are alike, and uneven passes are walked with these.
            let few = Experts { count: it.per_token, per_token: it.per_token };
            counted.models.push(OnGpu::new(&arch, &config, base, Some(few))?);
        }
        let walked = Mutex::new(Walked { model, ..Walked::default() });
        Ok(Self { arch, config, shown, walked, on_gpu: Mutex::new(counted) })
    }

    /// The model with `experts` of its experts and its base in the form `base`: one of `models`, or a new one, which replaces
    /// the oldest.
    fn model<'a>(&self, models: &'a mut Vec<OnGpu>, base: &Base, experts: Option<Experts>) -> &'a mut OnGpu {
        let known = models.iter().position(|known| known.experts == experts && known.base == *base);
        let at = known.unwrap_or_else(|| {
            models.truncate(MODELS - 1);
            let built = OnGpu::new(&self.arch, &self.config, base, experts);
            models.insert(0, built.expect("what a job was made of can be built without values"));
            0
        });
        &mut models[at]
    }

    /// Walks a pass on a counted GPU and returns its bytes.
    fn walk(&self, models: &mut Vec<OnGpu>, base: &Base, walk: &GpuWalk) -> GpuBytes {
        let experts = self.arch.experts.as_ref().map(|it| Experts { count: it.count, per_token: it.per_token });
        let mut of = |experts| {
            let counted = self.model(models, base, experts).model.gpu_bytes(walk, &self.shown);
            counted.expect("nothing is read, and no memory is taken")
        };
        if walk.uneven {
            return of(experts.map(|experts| Experts { count: experts.per_token, ..experts }));
        }
        let Some((eighth, quarter)) = self.parts() else { return of(experts) };
        let (less, more) = (of(Some(eighth)), of(Some(quarter)));
        let kept = from_parts(less.kept, more.kept);
        let host = from_parts(less.host, more.host);
        GpuBytes { kept, pools: from_parts(less.pools, more.pools), head: more.head, host }
    }

    /// An eighth and a quarter of the experts, if there are so many that these are counted instead of all.
    fn parts(&self) -> Option<(Experts, Experts)> {
        let experts = self.arch.experts.as_ref().map(|it| Experts { count: it.count, per_token: it.per_token });
        let many = experts.filter(|experts| experts.count * self.arch.blocks.len() > MANY_EXPERTS)?;
        many.part(8).zip(many.part(4))
    }
}

impl CountBuffers for MetaEngine {
    fn count(&self, walk: &Walk) -> BufferCounts {
        let blocks = self.arch.blocks.len();
        let walk = Walk { full: walk.full.min(blocks), none: walk.none.min(blocks), ..*walk };
        let mut walked = self.walked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, counts)) = walked.passes.iter().find(|(known, _)| *known == walk) {
            return counts.clone();
        }
        let built = walked.model.take().map_or_else(|| Model::on_meta(&self.arch, &self.config), Ok);
        let built = walked.model.insert(built.expect("what a job was made of can be built without values"));
        let counts = built.buffer_counts(&walk, &self.shown).expect("nothing is read, and no memory is taken");
        walked.passes.push((walk, counts.clone()));
        counts
    }

    fn count_forward(&self, walk: &Walk) -> BufferCounts {
        let mut walked = self.walked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, counts)) = walked.forward.iter().find(|(known, _)| known == walk) {
            return counts.clone();
        }
        let built = walked.model.take().map_or_else(|| Model::on_meta(&self.arch, &self.config), Ok);
        let built = walked.model.insert(built.expect("what a job was made of can be built without values"));
        let counts = built.forward_counts(walk, &self.shown).expect("nothing is read, and no memory is taken");
        walked.forward.push((*walk, counts.clone()));
        counts
    }

    fn held_on_gpu(&self, base: &Base) -> GpuHeld {
        let counted = &mut *self.on_gpu.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, held)) = counted.held.iter().find(|(known, _)| known == base) {
            return *held;
        }
        let mut of = |experts| self.model(&mut counted.models, base, experts).held;
        let held = match self.parts() {
            None => of(None),
            Some((eighth, quarter)) => {
                let (less, more) = (of(Some(eighth)), of(Some(quarter)));
                let held = from_parts(less.held, more.held);
                // What is held at the peak in addition is one matrix, whatever the number of experts.
                GpuHeld { held, most: held + more.most.saturating_sub(more.held) }
            }
        };
        counted.held.push((base.clone(), held));
        held
    }

    fn on_gpu(&self, base: &Base, walk: &GpuWalk) -> GpuBytes {
        let counted = &mut *self.on_gpu.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |(of, known, _): &&(Base, GpuWalk, GpuBytes)| known == walk && of == base;
        if let Some((.., bytes)) = counted.passes.iter().find(same) {
            return *bytes;
        }
        let bytes = self.walk(&mut counted.models, base, walk);
        counted.passes.push((base.clone(), *walk, bytes));
        bytes
    }
}
