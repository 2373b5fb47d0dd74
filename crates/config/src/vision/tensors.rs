//! The tensors and linear modules of encoder and connector: their names and shapes, which of them are trained, and
//! their names in files.
use super::connector::Norm;
use super::encoder::{CLIP_BOUNDS, Interpolation};
use super::{Connector, Encoder, Features, LatentEncoder, Step, VisionArch, VisionTraining, WORLD_ENCODER};
use crate::tensor_specs::{LinearSpec, TensorSpec};
use std::collections::BTreeSet;

fn tensor(name: String, shape: &[usize]) -> TensorSpec {
    TensorSpec { name, shape: shape.to_vec() }
}

fn linear(name: String, [out_features, in_features]: [usize; 2], bias: bool, layer: Option<usize>) -> LinearSpec {
    LinearSpec { name, out_features, in_features, bias, layer }
}

fn tensors_of(linear: &LinearSpec) -> Vec<TensorSpec> {
    let mut tensors = vec![tensor(format!("{}.weight", linear.name), &[linear.out_features, linear.in_features])];
    if linear.bias {
        tensors.push(tensor(format!("{}.bias", linear.name), &[linear.out_features]));
    }
    tensors
}

fn norm(name: &str, size: usize, rms: bool) -> Vec<TensorSpec> {
    let part = |part: &str| tensor(format!("{name}.{part}"), &[size]);
    if rms { vec![part("weight")] } else { vec![part("weight"), part("bias")] }
}

impl Encoder {
    /// The patch embedding: a linear module on the numbers of a patch.
    pub fn patch_embedding(&self) -> LinearSpec {
        let name = self.name(self.names.stem.patch);
        linear(name, [self.hidden_size, self.patch_values()], self.patch_bias, None)
    }

    /// The linear modules of attention in block `layer`: query, key, value (or one for all three), output.
    pub fn attention_linears(&self, layer: usize) -> Vec<LinearSpec> {
        let (names, hidden) = (&self.names.block, self.hidden_size);
        let [queries, others] = [self.num_heads, self.num_kv_heads].map(|heads| heads * self.head_dim);
        let of = |name: &str, sizes, bias| linear(self.block_name(layer, name), sizes, bias, Some(layer));
        let mut linears = if self.fused_qkv {
            vec![of(names.query, [3 * hidden, hidden], self.qkv_bias)]
        } else {
            let modules = [(names.query, queries), (names.key, others), (names.value, others)];
            modules.map(|(name, outputs)| of(name, [outputs, hidden], self.qkv_bias)).to_vec()
        };
        linears.push(of(names.out, [hidden, queries], self.bias));
        linears
    }

    /// The linear modules of the MLP in block `layer`: the first (a gate and what it is multiplied with, where there is a
    /// gate), and the last.
    pub fn mlp_linears(&self, layer: usize) -> Vec<LinearSpec> {
        let (names, hidden, inner) = (&self.names.block, self.hidden_size, self.intermediate_size);
        let of = |name: &str, sizes| linear(self.block_name(layer, name), sizes, self.bias, Some(layer));
        let mut linears = vec![of(names.fc1, [inner, hidden])];
        linears.extend(self.gated_mlp.then(|| of(names.up, [inner, hidden])));
        linears.push(of(names.fc2, [hidden, inner]));
        linears
    }

    /// Every linear module of block `layer`.
    pub fn block_linears(&self, layer: usize) -> Vec<LinearSpec> {
        [self.attention_linears(layer), self.mlp_linears(layer)].concat()
    }

    /// The clipping bounds of a linear module in a block ([`CLIP_BOUNDS`]); empty if the module does not clip.
    pub fn bounds(&self, linear: &LinearSpec) -> Vec<TensorSpec> {
        let module = linear.name.rsplit_once('.').map_or("", |(module, _)| module);
        let bounds = CLIP_BOUNDS.into_iter().filter(|_| self.clipped);
        bounds.map(|bound| tensor(format!("{module}.{bound}"), &[])).collect()
    }

    /// The tensors before the blocks.
    fn stem_tensors(&self) -> Vec<TensorSpec> {
        let (names, hidden) = (&self.names.stem, self.hidden_size);
        let mut tensors = Vec::new();
        if self.class_token {
            let shape = [vec![1; names.class_dimensions], vec![hidden]].concat();
            tensors.push(tensor(self.name(names.class_token), &shape));
        }
        if self.registers > 0 {
            tensors.push(tensor(self.name(names.registers), &[1, self.registers, hidden]));
        }
        let patch = self.name(names.patch);
        let side = self.patch_size;
        let frames = self.frames.map(|frames| vec![frames]).unwrap_or_default();
        let shape = if self.channels_last {
            vec![hidden, self.patch_values()]
        } else {
            [vec![hidden, self.channels], frames, vec![side; 2]].concat()
        };
        tensors.push(tensor(format!("{patch}.weight"), &shape));
        if self.patch_bias {
            tensors.push(tensor(format!("{patch}.bias"), &[hidden]));
        }
        if self.interpolation.is_some() {
            let shape = match self.interpolation {
                Some(Interpolation::Axes) => vec![self.grid[0], self.grid[1], hidden],
                _ if names.positions_batched => vec![1, self.positions(), hidden],
                _ => vec![self.positions(), hidden],
            };
            tensors.push(tensor(self.name(names.positions), &shape));
        }
        if self.pre_norm {
            tensors.extend(norm(&self.name(names.pre_norm), hidden, self.rms_norm));
        }
        tensors
    }

    /// The tensors of block `layer`.
    fn block_tensors(&self, layer: usize) -> Vec<TensorSpec> {
        let (names, hidden) = (&self.names.block, self.hidden_size);
        let mut tensors = norm(&self.block_name(layer, names.norm1), hidden, self.rms_norm);
        tensors.extend(self.attention_linears(layer).iter().flat_map(tensors_of));
        let heads = |name: &str| norm(&self.block_name(layer, name), self.head_dim, self.rms_norm);
        tensors.extend(self.qk_norms.iter().flatten().flat_map(|name| heads(name)));
        let behind = |name: &str| norm(&self.block_name(layer, name), hidden, self.rms_norm);
        tensors.extend(self.post_norms.iter().flatten().flat_map(|name| behind(name)));
        let scale = |name: &str| tensor(self.block_name(layer, name), &[hidden]);
        tensors.extend(self.layer_scale.then(|| scale(names.scale1)));
        tensors.extend(norm(&self.block_name(layer, names.norm2), hidden, self.rms_norm));
        tensors.extend(self.mlp_linears(layer).iter().flat_map(tensors_of));
        tensors.extend(self.layer_scale.then(|| scale(names.scale2)));
        tensors
    }

    /// The tensors that contribute to the encoder's output, in the order of the forward pass. Clipping bounds are left
    /// out, because they are never trained.
    pub fn trainable_tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = self.stem_tensors();
        tensors.extend((0..self.feature.blocks).flat_map(|layer| self.block_tensors(layer)));
        if self.feature.final_norm {
            tensors.extend(norm(&self.name(self.names.stem.final_norm), self.hidden_size, self.rms_norm));
        }
        tensors
    }

    /// All tensors that contribute to the encoder's output, with clipping bounds.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = self.trainable_tensors();
        let linears = (0..self.feature.blocks).flat_map(|layer| self.block_linears(layer));
        tensors.extend(linears.flat_map(|linear| self.bounds(&linear)));
        tensors
    }
}

impl Step {
    /// Whether the step's tensors are trained if the connector is.
    const fn is_trainable(&self) -> bool {
        !matches!(self, Self::Standardize { .. })
    }

    /// Names and shapes of the step's tensors.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        match self {
            Self::Norm(Norm { name, size, rms, .. }) => norm(name, *size, *rms),
            Self::Linear(linear) => tensors_of(linear),
            Self::Matrix { name, shape } => vec![tensor(name.clone(), shape)],
            Self::Standardize { names, size } => names.iter().map(|name| tensor(name.clone(), &[*size])).collect(),
            Self::SideBySide(_)
            | Self::ByFeature(_)
            | Self::Mean(_)
            | Self::PlainNorm { .. }
            | Self::Scale(_)
            | Self::Function(_)
            | Self::Dropout(_) => Vec::new(),
        }
    }
}

impl Connector {
    /// Names and shapes of the connector's tensors, in the order of the forward pass.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.steps.iter().flat_map(Step::tensors).collect()
    }

    /// The tensors that can be trained.
    pub fn trainable_tensors(&self) -> Vec<TensorSpec> {
        self.steps.iter().filter(|step| step.is_trainable()).flat_map(Step::tensors).collect()
    }

    /// The module that has all of the connector's tensors; empty if their names have no common prefix.
    fn module(&self) -> String {
        let names: Vec<String> = self.trainable_tensors().into_iter().map(|spec| spec.name).collect();
        let first = names.first().map_or("", String::as_str);
        let shared = |end: usize| names.iter().all(|name| name.starts_with(&first[..end]));
        let end = first.match_indices('.').map(|(at, _)| at).take_while(|at| shared(at + 1)).last();
        let module = end.map_or("", |end| &first[..end]);
        // If the connector is a single linear module, that module is inside the module that Transformers calls the
        // connector.
        let with_tensors: Vec<&Step> =
            self.steps.iter().filter(|step| step.is_trainable() && !step.tensors().is_empty()).collect();
        let module = match with_tensors[..] {
            [Step::Linear(_)] => module.trim_start_matches("model.").split('.').next().unwrap_or_default(),
            _ => module,
        };
        module.to_owned()
    }
}

/// Prefixes that the encoder's tensors may have in files.
const PREFIXES: [&str; 9] = [
    "model.vision_tower.",
    "vision_tower.",
    "model.vision_model.",
    "vision_model.",
    "model.visual.",
    "visual.",
    "vit.",
    "dinov2.",
    "",
];

impl VisionArch {
    /// All tensors that images pass through: the encoder's, then the connector's. Those before [`VisionArch::features`]
    /// are left out.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let connectors = self.connectors().flat_map(Connector::tensors);
        let behind = connectors.chain(self.newline());
        let mut tensors: Vec<TensorSpec> = match self.features {
            None => self.encoder.tensors().into_iter().chain(behind).collect(),
            Some(Features::Encoder) => behind.collect(),
            Some(Features::Connector) => Vec::new(),
        };
        if let Some(world) = &self.world {
            tensors.extend(self.features.is_none().then(|| world.encoder.tensors()).into_iter().flatten());
            tensors.extend(world.projector.tensors());
        }
        tensors
    }

    /// The vector that ends a line of an image's rows, `[width of the decoder]`; `None` without
    /// [`VisionArch::any_res`].
    pub fn newline(&self) -> Option<TensorSpec> {
        self.any_res.as_ref().map(|any_res| tensor(any_res.newline.clone(), &[self.connector.decoder_size]))
    }

    /// The connector, and those of inner blocks.
    pub fn connectors(&self) -> impl Iterator<Item = &Connector> {
        std::iter::once(&self.connector).chain(self.deepstack.iter().map(|deep| &deep.connector))
    }

    /// The tensors that are trained in full.
    pub fn trained_tensors(&self) -> Vec<TensorSpec> {
        let (training, encoder) = (&self.training, &self.encoder);
        let mut tensors = Vec::new();
        if training.encoder {
            tensors.extend(encoder.trainable_tensors());
        } else {
            let first = encoder.feature.blocks.saturating_sub(training.last_blocks);
            tensors.extend((first..encoder.feature.blocks).flat_map(|layer| encoder.block_tensors(layer)));
        }
        if training.connector {
            tensors.extend(self.connectors().flat_map(Connector::trainable_tensors));
        }
        tensors.extend(self.newline().filter(|_| training.newline));
        tensors.extend(self.world.iter().flat_map(|world| world.projector.tensors()));
        tensors
    }

    /// Derives what has been trained from the tensors that a file has, including those of adapters. `has` says whether
    /// it has a tensor.
    pub fn trained_by(&self, has: &dyn Fn(&str) -> bool) -> VisionTraining {
        let all = |tensors: Vec<TensorSpec>| !tensors.is_empty() && tensors.iter().all(|spec| has(&spec.name));
        let encoder = all(self.encoder.trainable_tensors());
        let blocks = (0..self.encoder.feature.blocks).rev();
        let last_blocks = blocks.take_while(|&layer| !encoder && all(self.encoder.block_tensors(layer))).count();
        let linears = (0..self.encoder.feature.blocks).flat_map(|layer| self.encoder.block_linears(layer));
        // A tensor of each kind of adapter: LoRA, OFT, (IA)³.
        let of_adapter = ["lora_A.weight", "oft_R.weight", "ia3_l"];
        let adapted = linears.filter(|linear| of_adapter.iter().any(|end| has(&format!("{}.{end}", linear.name))));
        let adapters = adapted.map(|linear| linear.name).collect();
        let connector = all(self.connector.trainable_tensors());
        let newline = self.newline().is_some_and(|spec| has(&spec.name));
        VisionTraining { connector, newline, encoder, last_blocks, adapters, ..self.training.clone() }
    }

    /// The modules that are trained in full, as PEFT's `modules_to_save` names them: by the ends of their names.
    pub fn saved_modules(&self) -> Vec<String> {
        let (training, encoder) = (&self.training, &self.encoder);
        let end = |name: &str| name.trim_start_matches("model.").trim_end_matches('.').to_owned();
        let mut modules = Vec::new();
        if training.connector {
            // A connector inside the encoder's module is saved with the encoder.
            let apart = |module: &String| !(training.encoder && module.starts_with(&encoder.prefix));
            // A connector may have nothing that can be trained.
            let trainable = self.connectors().filter(|connector| !connector.trainable_tensors().is_empty());
            modules.extend(trainable.map(Connector::module).filter(apart).map(|module| end(&module)));
        }
        modules.extend(self.world.iter().map(|world| end(&world.projector.module())));
        if training.encoder {
            modules.extend(self.encoder_modules().iter().map(|module| end(module)));
        } else {
            let first = encoder.feature.blocks.saturating_sub(training.last_blocks);
            let block = |layer: usize| end(&encoder.block_name(layer, ""));
            modules.extend((first..encoder.feature.blocks).map(block));
        }
        modules
    }

    /// Returns a test of whether a tensor is in one of [`VisionArch::saved_modules`].
    fn saved(&self) -> impl Fn(&str) -> bool + use<> {
        let modules = self.saved_modules();
        move |name| {
            let name = name.trim_start_matches("model.");
            let holds = |module: &String| name.strip_prefix(module.as_str()).is_some_and(|rest| rest.starts_with('.'));
            modules.iter().any(holds)
        }
    }

    /// Returns a test of whether a tensor is in a module that is trained in full, but can get no gradient itself. An
    /// adapter's file has such tensors with the values of the base, because PEFT wants every tensor of a module.
    pub fn untouched(&self) -> impl Fn(&str) -> bool + use<> {
        let connectors = self.connectors().flat_map(Connector::trainable_tensors).chain(self.newline());
        let trainable = self.encoder.trainable_tensors().into_iter().chain(connectors);
        let trainable: BTreeSet<String> = trainable.map(|spec| spec.name).collect();
        let saved = self.saved();
        move |name| saved(name) && !trainable.contains(name)
    }

    /// The tensors in a checkpoint's files that are in modules which are trained in full, but that are not trained
    /// themselves. Each has its name in the whole model and its name in the files. `stored` has the names of all
    /// tensors in the files.
    pub fn rest_of_saved<'n>(&self, stored: &BTreeSet<&'n str>) -> Vec<(String, &'n str)> {
        let trained: BTreeSet<String> = self.trained_tensors().into_iter().map(|spec| spec.name).collect();
        let (saved, start) = (self.saved(), self.start_of_stored(stored));
        let named = stored.iter().map(|&stored| (self.name_of_stored(stored, start.as_deref()), stored));
        // Position ids, which older files have, are no parameters.
        let wanted = |name: &str| !trained.contains(name) && saved(name) && !name.ends_with(".position_ids");
        named.filter(|(name, _)| wanted(name)).collect()
    }

    /// The prefix of the encoder's tensors in files with these tensors; `None` if they have none.
    fn start_of_stored(&self, stored: &BTreeSet<&str>) -> Option<String> {
        self.encoder.trainable_tensors().iter().find_map(|spec| {
            let inner = spec.name.strip_prefix(&self.encoder.prefix)?;
            let found = self.stored_names(&spec.name).into_iter().find(|name| stored.contains(name.as_str()))?;
            let start = found.strip_suffix(inner).or_else(|| found.strip_suffix(self.older(inner).as_str()))?;
            Some(start.to_owned())
        })
    }

    /// The name in the whole model of a tensor in files in which the encoder's tensors have the prefix `start`: the
    /// inverse of [`VisionArch::stored_names`].
    fn name_of_stored(&self, stored: &str, start: Option<&str>) -> String {
        if let Some(inner) = start.and_then(|start| stored.strip_prefix(start)) {
            let put_back = |inner: String, (ours, stored): &(&str, &str)| inner.replace(stored, ours);
            let inner = self.encoder.names.stored.iter().fold(inner.to_owned(), put_back);
            return self.encoder.name(&inner);
        }
        if stored.starts_with("model.") || self.start_token.is_some() {
            return stored.to_owned();
        }
        format!("model.{stored}")
    }

    /// The name after the encoder's prefix, as the files of checkpoints write it.
    fn older(&self, inner: &str) -> String {
        let replace = |inner: String, (ours, stored): &(&str, &str)| inner.replace(ours, stored);
        self.encoder.names.stored.iter().fold(inner.to_owned(), replace)
    }

    /// The modules that have all tensors of the encoder that contribute to its output. PEFT takes every module whose
    /// name ends with one of these, and everything in it. In a `VisionEncoderDecoderModel`, the encoder is called
    /// `encoder`, may have an `encoder` inside, and has a pooler. So its parts are listed one by one, with each block,
    /// since PEFT does not take a list of blocks as a module.
    fn encoder_modules(&self) -> Vec<String> {
        let Encoder { prefix, feature, .. } = &self.encoder;
        if self.start_token.is_none() {
            return vec![prefix.trim_end_matches('.').to_owned()];
        }
        let blocks: Vec<String> = (0..feature.blocks).map(|layer| self.encoder.block_name(layer, "")).collect();
        let mut modules = Vec::new();
        for spec in self.encoder.tensors() {
            let module = match blocks.iter().find(|block| spec.name.starts_with(*block)) {
                Some(block) => block.trim_end_matches('.').to_owned(),
                None => spec.name.split('.').take(2).collect::<Vec<_>>().join("."),
            };
            if !modules.contains(&module) {
                modules.push(module);
            }
        }
        modules
    }

    /// The linear modules of the encoder that get an adapter; `all-linear` means those of all its blocks. Blocks that are trained in full get
    /// none.
    pub fn adapted_linears(&self) -> Vec<LinearSpec> {
        let frozen = self.encoder.feature.blocks.saturating_sub(self.training.last_blocks);
        let linears = (0..frozen).flat_map(|layer| self.encoder.block_linears(layer));
        let named = |linear: &LinearSpec, entry: &String| {
            entry == "all-linear"
                || linear.name == *entry
                || linear.name.strip_suffix(entry.as_str()).is_some_and(|rest| rest.ends_with('.'))
        };
        linears.filter(|linear| self.training.adapters.iter().any(|entry| named(linear, entry))).collect()
    }

    /// The names that a tensor may have in the files of a checkpoint, the most likely one first.
    pub fn stored_names(&self, name: &str) -> Vec<String> {
        if let Some(inner) = name.strip_prefix(WORLD_ENCODER) {
            let names = LatentEncoder::stored_names(inner);
            // In a file of the encoder alone, or of a merged model.
            let whole = names.iter().map(|inner| format!("world_encoder.{inner}")).collect();
            return [names, whole].concat();
        }
        let mut names = vec![name.to_owned()];
        let mut add = |name: String| {
            if !names.contains(&name) {
                names.push(name);
            }
        };
        // The name in the whole model before Transformers 4.52.
        let old = name.strip_prefix("model.").unwrap_or(name);
        add(old.to_owned());
        if let Some(inner) = name.strip_prefix(&self.encoder.prefix) {
            let older = self.older(inner);
            let own = self.encoder.prefix.as_str();
            for (prefix, inner) in [own].iter().chain(&PREFIXES).flat_map(|prefix| [(prefix, inner), (prefix, &older)])
            {
                add(format!("{prefix}vision_model.{inner}"));
                add(format!("{prefix}{inner}"));
            }
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_connector_with_nothing_to_train_is_no_module_to_save() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/vision");
        let trains = |name: &str| {
            let vision = VisionArch::of_model(&golden.join(name).join("model"), 48).unwrap();
            VisionArch { training: VisionTraining { connector: true, ..VisionTraining::default() }, ..vision }
        };
        let vision = trains("across_vit");
        assert_eq!(vision.saved_modules(), ["enc_to_dec_proj"]);
        let without =
            |steps| VisionArch { connector: Connector { steps, ..vision.connector.clone() }, ..vision.clone() };
        let size = vision.connector.encoder_size;
        let fixed = vec![
            Step::Scale(2.0),
            Step::Standardize { names: ["bias", "scale"].map(str::to_owned), size },
            Step::PlainNorm { size, eps: 1e-6 },
        ];
        for steps in [Vec::new(), fixed] {
            let vision = without(steps);
            assert!(vision.saved_modules().is_empty() && vision.trained_tensors().is_empty(), "{:?}", vision.connector);
        }
        let encoder = VisionTraining { last_blocks: 1, ..vision.training.clone() };
        let vision = VisionArch { training: encoder, ..without(Vec::new()) };
        assert_eq!(vision.saved_modules().len(), 1);
    }
}
