//! Builds a [`Model`]: reads each tensor from the checkpoint or draws it, attaches adapters, and puts the blocks
//! together. The files `build_*` add the parts of blocks.
use super::adapters::{self, Method, Placement};
use super::attach::Module;
use super::block::Block;
use super::branch::{Branch, Join, Part};
use super::decoder::{Model, Segments, narrow};
use super::device::{device, expert_pools, logits_pool, number};
use super::freeze;
use super::head::Head;
use super::learned_positions::LearnedPositions;
use super::linear::Linear;
use super::mlp::Mlp;
use super::names::peft_name;
use super::norm::Norm;
use super::offload;
use super::params::Params;
use super::per_layer::PerLayer;
use super::plain_mlp::{PlainMlp, function_of};
use super::projections::Projections;
use super::quantize::Quantizer;
use super::quantized_cache::Cache;
use super::shards::Shards;
use super::source::{Source, Tensors};
use super::stack::Stack;
use super::targets::{Targets, placed};
use super::vision_files::VisionFiles;
use super::weight::Weight;
use super::weights::WeightFiles;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, BranchSpec, EMBEDDING, HiddenAct, LinearSpec, POSITIONS, PartSpec, ScoreHead};
use tunesmith_config::{Config, Mode};
use tunesmith_device::{CountedGpu, Device};
use tunesmith_ops::activation::{Number, Pool};
use tunesmith_ops::gated_mlp::Gate;
use tunesmith_ops::pointwise::Function;

/// Builds a model, segment by segment.
pub(super) struct Builder<'a> {
    pub(super) tensors: Tensors<'a>,
    pub(super) arch: &'a Arch,
    /// The adapters that are still to be attached, by module, each with its number.
    pub(super) placements: BTreeMap<String, (u64, Placement)>,
    shards: Shards,
    /// For inference on the CPU: the type to which products round their operands. Matrices of blocks and of the head
    /// are rearranged for it ([`Builder::linear`]), those of an image encoder are not. `None`: nothing is rearranged.
    pub(super) interleaves: Option<Number>,
    /// Whether the head is quantized (`gen.quantize_head`); a trained head never is.
    quantizes_head: bool,
    /// The pools of experts' activations, which [`expert_pools`] makes.
    pub(super) expert_pools: [Arc<Pool>; 2],
}

/// How a model is loaded, other than for training.
#[derive(Default)]
struct Load<'a> {
    /// The names of tensors that are float32 on a device that only counts ([`Model::on_counted`]).
    float32: Option<&'a BTreeSet<String>>,
    /// The type for which matrices are rearranged ([`Builder::interleaves`]).
    interleaves: Option<Number>,
    /// Whether the head is quantized ([`Builder::quantizes_head`]).
    quantizes_head: bool,
}

impl Model {
    /// Reads the base from `weights`, or draws it from `config.train.seed` if there are none, and puts fresh adapters
    /// where the configuration says, all on the device that it chooses.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`] for weights that cannot be read, [`tunesmith_base::Kind::Config`] for targets that do not exist, or
    /// a device that this build does not compute on.
    pub fn load(arch: &Arch, weights: Option<&WeightFiles>, config: &Config) -> Result<Self> {
        Self::load_on(arch, weights, config, &Stack::default())
    }

    /// As [`Model::load`], with finished adapters merged into the base.
    ///
    /// # Errors
    /// As [`Model::load`]; [`tunesmith_base::Kind::Checkpoint`] for an adapter that does not fit.
    pub fn load_on(arch: &Arch, weights: Option<&WeightFiles>, config: &Config, stack: &Stack) -> Result<Self> {
        Self::load_with(arch, weights, config, stack, None, Shards::default())
    }

    /// As [`Model::load_on`], for inference alone: on the CPU, matrices are rearranged so that products read them from end to end
    /// ([`tunesmith_ops::gemm::Interleaved`]). Results are the same to the bit, and within rounding where matrices are
    /// quantized. `gen.quantize_head` quantizes the head too. A backward pass is not possible.
    ///
    /// # Errors
    /// As [`Model::load_on`].
    pub fn load_for_inference(
        arch: &Arch,
        weights: Option<&WeightFiles>,
        config: &Config,
        stack: &Stack,
    ) -> Result<Self> {
        let source = Source { arch, weights, config, stack };
        let device = device(config.model.device)?;
        Self::load_to(
            device,
            source,
            None,
            Shards::default(),
            Load {
                interleaves: (device == Device::Cpu).then(|| number(config)),
                quantizes_head: config.generation.quantize_head && arch.score.is_none(),
                float32: None,
            },
        )
    }

    /// As [`Model::load`], on the meta device: tensors have shapes and no memory, and a pass counts the buffers that it
    /// would take ([`Model::buffer_counts`]).
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn on_meta(arch: &Arch, config: &Config) -> Result<Self> {
        let stack = Stack::default();
        let source = Source { arch, weights: None, config, stack: &stack };
        Self::load_to(Device::Meta, source, None, Shards::default(), Load::default())
    }

    /// As [`Model::load`], on a GPU that only counts: tensors have the forms and sizes of a GPU but no values, and a
    /// pass counts the bytes that it would take there ([`Model::gpu_bytes`]). `model.dtype` and `model.quantization`
    /// say how the base is held: here `auto` means float32 and no quantization. With bfloat16, the tensors in `float32`
    /// are float32 where they are not quantized.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn on_counted(arch: &Arch, config: &Config, float32: &BTreeSet<String>, gpu: &CountedGpu) -> Result<Self> {
        let stack = Stack::default();
        let source = Source { arch, weights: None, config, stack: &stack };
        let load = Load { float32: Some(float32), ..Load::default() };
        Self::load_to(gpu.device(), source, None, Shards::default(), load)
    }

    /// As [`Model::load_on`]. Quantized matrices are read from `cache` if it has them, and written there otherwise.
    /// Each segment goes to `shards` as soon as it is read, so that no rank holds the whole model where ranks shard it.
    ///
    /// # Errors
    /// As [`Model::load_on`].
    pub fn load_with(
        arch: &Arch,
        weights: Option<&WeightFiles>,
        config: &Config,
        stack: &Stack,
        cache: Option<Cache<'_>>,
        shards: Shards,
    ) -> Result<Self> {
        let source = Source { arch, weights, config, stack };
        Self::load_to(device(config.model.device)?, source, cache, shards, Load::default())
    }

    fn load_to(
        device: Device,
        source: Source<'_>,
        cache: Option<Cache<'_>>,
        shards: Shards,
        Load { float32, interleaves, quantizes_head }: Load<'_>,
    ) -> Result<Self> {
        let Source { arch, weights, config, .. } = source;
        let offloads = config.train.offload_param && matches!(device, Device::Cuda(_));
        let shards = if offloads { shards.offloaded() } else { shards };
        let shows = arch.vision.as_ref().is_some_and(|vision| vision.per_layer_token.is_none());
        if shows && arch.per_layer.is_some() {
            return Err(Error::config(format!(
                "not yet: images in {}, whose blocks have embeddings of their own",
                arch.family.model_type
            ))
            .hint("leave out the section vision"));
        }
        if arch.reads_images_across() && arch.vision.as_ref().is_none_or(|vision| vision.start_token.is_none()) {
            return Err(Error::data("the model's decoder reads an image beside each text, and there are none")
                .hint("every row needs one image: {image, caption}; vision.load: true loads the image encoder"));
        }
        let tensors = arch.tensors();
        let (mut trained, mut renamed, mut placements) = (BTreeSet::new(), BTreeMap::new(), Vec::new());
        match config.tuning.mode {
            Mode::Full | Mode::Freeze if arch.freezes_language() => {}
            Mode::Full => trained.extend(arch.parameters().into_iter().map(|tensor| tensor.name)),
            Mode::Freeze => trained.extend(freeze::trained_tensors(arch, &config.tuning.freeze)?),
            _ => {
                let targets = Targets::of(&config.tuning);
                trained.extend(targets.saved_tensors(arch)?);
                placements = placed(arch, &config.tuning)?;
                renamed.extend(targets.renamed(arch, &placements)?);
                trained.extend(renamed.keys().cloned());
            }
        }
        let mut sizes: BTreeMap<String, Vec<usize>> =
            tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
        if let Some(vision) = &arch.vision {
            trained.extend(vision.trained_tensors().into_iter().map(|tensor| tensor.name));
            sizes.extend(vision.tensors().into_iter().map(|tensor| (tensor.name, tensor.shape)));
        }
        let files = if device == Device::Meta { None } else { weights };
        let tensors = Tensors {
            vision: VisionFiles::open(arch, files, config.train.seed)?,
            source,
            device,
            quantizer: if device == Device::Meta {
                Quantizer::none()
            } else {
                Quantizer::new(arch, weights, config, cache)?
            },
            params: Params::on(device),
            float32,
            sizes,
            offloaded: offload::tables(arch, config, &trained)?,
            trained,
            renamed,
        };
        let placements = placements.into_iter().enumerate();
        let placements = placements.map(|(i, placement)| (placement.module.clone(), (i as u64, placement))).collect();
        let expert_pools = expert_pools(tensors.device, tensors.source.config);
        Builder { tensors, arch, placements, shards, interleaves, quantizes_head, expert_pools }.build()
    }
}

impl<'a> Builder<'a> {
    /// A builder of image encoder and connector without a decoder. Nothing of them is trained.
    pub(super) fn of_vision(
        device: Device,
        arch: &'a Arch,
        weights: Option<&'a WeightFiles>,
        config: &'a Config,
        stack: &'a Stack,
    ) -> Result<Self> {
        let specs = arch.vision.iter().flat_map(|vision| vision.tensors());
        let tensors = Tensors {
            vision: VisionFiles::open(arch, weights, config.train.seed)?,
            source: Source { arch, weights, config, stack },
            device,
            quantizer: Quantizer::none(),
            params: Params::on(device),
            float32: None,
            sizes: specs.map(|spec| (spec.name, spec.shape)).collect(),
            offloaded: Vec::new(),
            trained: BTreeSet::new(),
            renamed: BTreeMap::new(),
        };
        let expert_pools = expert_pools(tensors.device, tensors.source.config);
        let shards = Shards::default();
        let (placements, interleaves, quantizes_head) = (BTreeMap::new(), None, false);
        Ok(Self { tensors, arch, placements, shards, interleaves, quantizes_head, expert_pools })
    }
}

impl Builder<'_> {
    fn build(mut self) -> Result<Model> {
        let Tensors { trained, sizes, .. } = &self.tensors;
        let trained = trained.iter().filter_map(|name| sizes.get(name)).map(|shape| shape.iter().product::<usize>());
        let adapters = self.placements.values().flat_map(|(_, placement)| placement.tensors());
        let adapters = adapters.map(|(_, shape)| shape.iter().product::<usize>());
        let floats = trained.sum::<usize>() + adapters.sum::<usize>();
        let device = self.tensors.device;
        if !self.shards.is_sharded() {
            self.tensors.params.reserve(floats);
        }
        let (arch, config) = (self.arch, self.tensors.source.config);
        self.tensors.params.begin_segment();
        let stored_rows = self.tensors.stored_rows(EMBEDDING)?;
        let mut embedding = match &stored_rows {
            Some(_) => Weight::frozen(Vec::<f32>::new(), device),
            None => self.tensors.weight(EMBEDDING)?,
        };
        let mut linears =
            arch.linear_modules().into_iter().map(|spec| (spec.name.clone(), spec)).collect::<BTreeMap<_, _>>();
        let mut positions = self.learned_positions()?;
        let mut per_layer = self.per_layer(&mut linears)?;
        let narrow = narrow(config);
        let interleaves = std::mem::take(&mut self.interleaves);
        let first_of_images = self.tensors.params.specs.len();
        let vision = arch.vision.as_ref().map(|vision| self.vision(vision, self.arch, narrow)).transpose()?;
        self.tensors.params.specs[first_of_images..].iter_mut().for_each(|spec| spec.vision = true);
        self.interleaves = interleaves;
        let tables = std::iter::once(&mut embedding)
            .filter(|_| stored_rows.is_none())
            .chain(positions.iter_mut().map(|it| &mut it.table))
            .chain(per_layer.iter_mut().flat_map(PerLayer::weights_mut));
        self.shards.push(tables.collect(), &mut self.tensors.params);
        let mut blocks = Vec::with_capacity(arch.num_hidden_layers);
        for layer in 0..arch.num_hidden_layers {
            self.tensors.params.begin_segment();
            let mut block = self.block(layer, &mut linears)?;
            self.shards.push(block.weights_mut(), &mut self.tensors.params);
            blocks.push(block);
        }
        self.tensors.params.begin_segment();
        let mut norm = self.tensors.norm(&arch.final_norm())?;
        if arch.plain_final_norm {
            norm.offset = 0.0;
        }
        let embedding_norm = arch.embedding_norm.then(|| self.tensors.weightless(arch.hidden_size));
        let head = self.head(&mut embedding)?;
        let Tensors { mut params, quantizer, .. } = self.tensors;
        params.shrink();
        if adapters::of(&config.tuning).is_some_and(Method::takes_from_base) {
            params.keep_start();
        }
        let head = Head {
            norm,
            weight: head,
            outputs: arch.outputs(),
            squared: arch.score.as_ref().is_some_and(ScoreHead::is_number),
            // What a family does to logits over the vocabulary it does not do to scores.
            scale: if arch.score.is_some() { 1.0 } else { arch.logit_scale as f32 },
            softcap: arch.logit_softcap.filter(|_| arch.score.is_none()).map(|cap| cap as f32),
            pool: logits_pool(device, config),
        };
        let keeps_all = self.shards.gathers() && !self.shards.is_sharded() && self.shards.all_bytes() == 0;
        let segments = Segments { embedding, stored_rows, embedding_norm, positions, per_layer, vision, blocks, head };
        let mut model = Model::new(arch.clone(), params, segments, config, device, self.shards);
        model.notes = quantizer.into_notes();
        if keeps_all {
            model
                .notes
                .push("train.offload_param: no weight is frozen, so that none waits in the host's memory".to_owned());
        }
        Ok(model)
    }

    /// The matrix of the head. A head that is tied to the embedding shares its numbers, and both are rearranged
    /// together; a quantized head is a copy.
    fn head(&mut self, embedding: &mut Weight) -> Result<Weight> {
        let (name, hidden) = (self.arch.head_tensor(), self.arch.hidden_size);
        let quantizes = self.quantizes_head && !self.tensors.trains(name);
        if self.arch.ties_head() {
            self.shards.push_trained(0, &mut self.tensors.params);
            if !quantizes {
                if let Some(products) = self.interleaves {
                    embedding.interleave(hidden, products);
                }
                return Ok(embedding.clone());
            }
        }
        let mut head = if quantizes {
            self.tensors.quantized_head(name)?
        } else {
            let mut head = self.tensors.weight(name)?;
            self.shards.push(vec![&mut head], &mut self.tensors.params);
            head
        };
        if let Some(products) = self.interleaves {
            head.interleave(hidden, products);
        }
        Ok(head)
    }

    fn learned_positions(&mut self) -> Result<Option<LearnedPositions>> {
        if !self.arch.learned_positions {
            return Ok(None);
        }
        let (count, hidden) = (self.arch.max_position_embeddings, self.arch.hidden_size);
        Ok(Some(LearnedPositions { table: self.tensors.weight(POSITIONS)?, count, hidden }))
    }

    pub(super) fn linear(&mut self, spec: &LinearSpec) -> Result<Linear> {
        if let Some((number, placement)) = self.placements.remove(&peft_name(&spec.name)) {
            let module = Module::new(&mut self.tensors, spec, number, &placement).attach(&placement)?;
            return Ok(self.arranged(module));
        }
        let LinearSpec { out_features, in_features, .. } = *spec;
        let (weight, bias) = self.tensors.plain(spec)?;
        Ok(self.arranged(Linear { weight, bias, out_features, in_features, adapter: None }))
    }

    /// The module, with its matrix rearranged if this model is for inference on the CPU.
    pub(super) fn arranged(&self, mut linear: Linear) -> Linear {
        if let Some(products) = self.interleaves {
            linear.weight.interleave(linear.in_features, products);
        }
        linear
    }

    /// The linear module of that name, taken out of `linears`.
    pub(super) fn named(&mut self, name: &str, linears: &mut BTreeMap<String, LinearSpec>) -> Result<Linear> {
        let spec = linears.remove(name).ok_or_else(|| Error::model(format!("the architecture has no {name}")))?;
        self.linear(&spec)
    }

    fn block(&mut self, layer: usize, linears: &mut BTreeMap<String, LinearSpec>) -> Result<Block> {
        let arch = self.arch;
        let altup = self.altup(layer, linears)?;
        // With several streams the block's own embeddings are no branch: they go to other streams.
        let inner = |spec: &&BranchSpec| arch.altup.is_none() || spec.part != PartSpec::PerLayer;
        let branches = arch.blocks[layer].branches.iter().filter(inner);
        let branches = branches.map(|spec| self.branch(layer, spec, linears)).collect::<Result<_>>()?;
        Ok(Block { branches, scalar: self.layer_scalar(layer)?, altup })
    }

    pub(super) fn norm(&mut self, layer: usize, name: &str) -> Result<Norm> {
        self.tensors.norm(&format!("model.layers.{layer}.{name}.weight"))
    }

    fn branch(
        &mut self,
        layer: usize,
        spec: &BranchSpec,
        linears: &mut BTreeMap<String, LinearSpec>,
    ) -> Result<Branch> {
        let norm = spec.norm.map(|name| self.norm(layer, name)).transpose()?;
        let part = match &spec.part {
            PartSpec::Attention(attention) => Part::Attention(Box::new(self.attention(layer, attention, linears)?)),
            PartSpec::CrossAttention(spec) => {
                Part::CrossAttention(Box::new(self.cross_attention(layer, *spec, linears)?))
            }
            PartSpec::DeltaNet(spec) => Part::DeltaNet(Box::new(self.delta_net(layer, spec, linears)?)),
            PartSpec::ShortConv(spec) => Part::ShortConv(Box::new(self.short_conv(layer, spec, linears)?)),
            PartSpec::Mamba(spec) => Part::Mamba(Box::new(self.mamba(layer, spec, linears)?)),
            PartSpec::Mlp { cut, .. } => Part::Mlp(Box::new(Mlp { cut: *cut, ..self.mlp(layer, linears)? })),
            PartSpec::PlainMlp { function, .. } => {
                Part::Plain(Box::new(self.plain_mlp(layer, function_of(*function), linears)?))
            }
            PartSpec::Experts => {
                let experts = self.arch.experts.as_ref();
                let experts = experts.ok_or_else(|| Error::model(format!("block {layer} has no experts")))?;
                Part::Experts(Box::new(self.moe(layer, experts, linears)?))
            }
            PartSpec::MlpAndExperts { .. } => Part::MlpAndExperts(Box::new(self.mlp_and_experts(layer, linears)?)),
            PartSpec::PerLayer => Part::PerLayer(Box::new(self.per_layer_gate(layer, linears)?)),
        };
        let join = match spec.post_norm {
            Some(name) => {
                let norm = self.norm(layer, name)?;
                Join::Normed(Norm { eps: self.arch.post_norm_eps.map_or(norm.eps, |eps| eps as f32), ..norm })
            }
            None if self.arch.residual_scale == 1.0 => Join::Plain,
            None => Join::Scaled(self.arch.residual_scale as f32),
        };
        let laurel = if let Part::Attention(_) = part { self.laurel(layer, linears)? } else { None };
        Ok(Branch { norm, part, join, laurel })
    }

    pub(super) fn mlp(&mut self, layer: usize, linears: &mut BTreeMap<String, LinearSpec>) -> Result<Mlp> {
        let (mlp, [to_gate, to_up, to_down]) = (self.arch.module_names.mlp, self.arch.module_names.projections);
        let mut linear =
            |this: &mut Self, name: &str| this.named(&format!("model.layers.{layer}.{mlp}.{name}"), linears);
        let gate_up = if let Some(gate_up) = self.arch.module_names.gate_up {
            let module = linear(self, gate_up)?;
            let features = [module.out_features / 2; 2];
            Projections::fused(module, features)
        } else {
            let gate = linear(self, to_gate)?;
            Projections::apart([gate, linear(self, to_up)?])
        };
        let down = linear(self, to_down)?;
        Ok(Mlp { gate_up, down, gate: gate(self.arch), cut: None })
    }

    fn plain_mlp(
        &mut self,
        layer: usize,
        function: Function,
        linears: &mut BTreeMap<String, LinearSpec>,
    ) -> Result<PlainMlp> {
        let (mlp, [_, up, down]) = (self.arch.module_names.mlp, self.arch.module_names.projections);
        let mut linear = |name: &str| self.named(&format!("model.layers.{layer}.{mlp}.{name}"), linears);
        Ok(PlainMlp { fc1: linear(up)?, fc2: linear(down)?, function })
    }
}

pub(super) fn gate(arch: &Arch) -> Gate {
    match arch.activation {
        HiddenAct::Silu => Gate::Silu,
        HiddenAct::GeluTanh => Gate::GeluTanh,
    }
}
