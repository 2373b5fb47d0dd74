//! Tensors and linear modules of encoder and connector: names, shapes, which are trained, and how files call them.
use super::{Connector, ConnectorKind, Encoder, Features, VisionArch, VisionTraining};
use crate::tensor_specs::{LinearSpec, TensorSpec};

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

fn norm(name: &str, size: usize) -> [TensorSpec; 2] {
    [tensor(format!("{name}.weight"), &[size]), tensor(format!("{name}.bias"), &[size])]
}

impl Encoder {
    /// The patch embedding: a linear module on the numbers of a patch.
    pub fn patch_embedding(&self) -> LinearSpec {
        let name = self.name(self.names.stem.patch);
        linear(name, [self.hidden_size, self.patch_values()], self.patch_bias, None)
    }

    /// The linear modules of block `layer`: query, key, value, output, and the MLP's two.
    pub fn block_linears(&self, layer: usize) -> [LinearSpec; 6] {
        let (names, hidden, inner) = (&self.names.block, self.hidden_size, self.intermediate_size);
        let of = |name: &str, sizes, bias| linear(self.block_name(layer, name), sizes, bias, Some(layer));
        [
            of(names.query, [hidden; 2], self.qkv_bias),
            of(names.key, [hidden; 2], self.qkv_bias),
            of(names.value, [hidden; 2], self.qkv_bias),
            of(names.out, [hidden; 2], true),
            of(names.fc1, [inner, hidden], true),
            of(names.fc2, [hidden, inner], true),
        ]
    }

    /// Tensors before the blocks.
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
        tensors.push(tensor(format!("{patch}.weight"), &[hidden, self.channels, side, side]));
        if self.patch_bias {
            tensors.push(tensor(format!("{patch}.bias"), &[hidden]));
        }
        let positions = [self.positions(), hidden];
        let shape = if names.positions_batched { vec![1, positions[0], hidden] } else { positions.to_vec() };
        tensors.push(tensor(self.name(names.positions), &shape));
        if self.pre_norm {
            tensors.extend(norm(&self.name(names.pre_norm), hidden));
        }
        tensors
    }

    /// Tensors of block `layer`.
    fn block_tensors(&self, layer: usize) -> Vec<TensorSpec> {
        let (names, hidden) = (&self.names.block, self.hidden_size);
        let [query, key, value, out, fc1, fc2] = self.block_linears(layer);
        let mut tensors: Vec<TensorSpec> = norm(&self.block_name(layer, names.norm1), hidden).into();
        tensors.extend([query, key, value, out].iter().flat_map(tensors_of));
        let scale = |name: &str| tensor(self.block_name(layer, name), &[hidden]);
        tensors.extend(self.layer_scale.then(|| scale(names.scale1)));
        tensors.extend(norm(&self.block_name(layer, names.norm2), hidden));
        tensors.extend([fc1, fc2].iter().flat_map(tensors_of));
        tensors.extend(self.layer_scale.then(|| scale(names.scale2)));
        tensors
    }

    /// The tensors that pictures come through, in that order.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = self.stem_tensors();
        tensors.extend((0..self.feature.blocks).flat_map(|layer| self.block_tensors(layer)));
        if self.feature.final_norm {
            tensors.extend(norm(&self.name(self.names.stem.final_norm), self.hidden_size));
        }
        tensors
    }
}

impl Connector {
    /// Its linear modules, in order; that of [`ConnectorKind::AveragePool`] is a product with a matrix and not among them.
    pub fn linears(&self) -> Vec<LinearSpec> {
        let (from, to) = (self.encoder_size, self.decoder_size);
        match &self.kind {
            ConnectorKind::Linear { name, bias } => vec![linear(name.clone(), [to, from], *bias, None)],
            ConnectorKind::Mlp { names: [first, second], hidden_size, bias, .. } => vec![
                linear(first.clone(), [*hidden_size, from], *bias, None),
                linear(second.clone(), [to, *hidden_size], *bias, None),
            ],
            ConnectorKind::PixelShuffle { name, factor } => {
                vec![linear(name.clone(), [to, from * factor * factor], false, None)]
            }
            ConnectorKind::AveragePool { .. } => Vec::new(),
        }
    }

    /// Its tensors, in order.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        match &self.kind {
            ConnectorKind::AveragePool { norm, projection, .. } => vec![
                tensor(format!("{norm}.weight"), &[self.encoder_size]),
                tensor(projection.clone(), &[self.encoder_size, self.decoder_size]),
            ],
            _ => self.linears().iter().flat_map(tensors_of).collect(),
        }
    }
}

/// What may stand before the names of an encoder's tensors in files.
const PREFIXES: [&str; 7] =
    ["model.vision_tower.", "vision_tower.", "model.vision_model.", "vision_model.", "vit.", "dinov2.", ""];

impl VisionArch {
    /// Every tensor that pictures come through: encoder, then connector. Not those before [`VisionArch::features`].
    pub fn tensors(&self) -> Vec<TensorSpec> {
        match self.features {
            None => [self.encoder.tensors(), self.connector.tensors()].concat(),
            Some(Features::Encoder) => self.connector.tensors(),
            Some(Features::Connector) => Vec::new(),
        }
    }

    /// Those that are trained in full.
    pub fn trained_tensors(&self) -> Vec<TensorSpec> {
        let (training, encoder) = (&self.training, &self.encoder);
        let mut tensors = Vec::new();
        if training.encoder {
            tensors.extend(encoder.tensors());
        } else {
            let first = encoder.feature.blocks.saturating_sub(training.last_blocks);
            tensors.extend((first..encoder.feature.blocks).flat_map(|layer| encoder.block_tensors(layer)));
        }
        if training.connector {
            tensors.extend(self.connector.tensors());
        }
        tensors
    }

    /// What has been trained where these tensors are, adapters' among them.
    pub fn trained_by(&self, has: &dyn Fn(&str) -> bool) -> VisionTraining {
        let all = |tensors: Vec<TensorSpec>| !tensors.is_empty() && tensors.iter().all(|spec| has(&spec.name));
        let encoder = all(self.encoder.tensors());
        let blocks = (0..self.encoder.feature.blocks).rev();
        let last_blocks = blocks.take_while(|&layer| !encoder && all(self.encoder.block_tensors(layer))).count();
        let linears = (0..self.encoder.feature.blocks).flat_map(|layer| self.encoder.block_linears(layer));
        let adapted = linears.filter(|linear| has(&format!("{}.lora_A.weight", linear.name)));
        let adapters = adapted.map(|linear| linear.name).collect();
        let connector = all(self.connector.tensors());
        VisionTraining { connector, encoder, last_blocks, adapters, ..self.training.clone() }
    }

    /// The modules that are trained in full, as PEFT's `modules_to_save` names them: by the end of their names.
    pub fn saved_modules(&self) -> Vec<String> {
        let (training, encoder) = (&self.training, &self.encoder);
        let end = |name: &str| name.trim_start_matches("model.").trim_end_matches('.').to_owned();
        let mut modules = Vec::new();
        if training.connector {
            let module = self.connector.tensors().first().map(|spec| end(&spec.name)).unwrap_or_default();
            modules.extend(module.split('.').next().map(str::to_owned));
        }
        if training.encoder {
            modules.push(end(&encoder.prefix));
        } else {
            let first = encoder.feature.blocks.saturating_sub(training.last_blocks);
            let block = |layer: usize| end(&encoder.block_name(layer, ""));
            modules.extend((first..encoder.feature.blocks).map(block));
        }
        modules
    }

    /// Linear modules of the encoder that get an adapter.
    pub fn adapted_linears(&self) -> Vec<LinearSpec> {
        let linears = (0..self.encoder.feature.blocks).flat_map(|layer| self.encoder.block_linears(layer));
        let named = |linear: &LinearSpec, entry: &String| {
            linear.name == *entry || linear.name.strip_suffix(entry.as_str()).is_some_and(|rest| rest.ends_with('.'))
        };
        linears.filter(|linear| self.training.adapters.iter().any(|entry| named(linear, entry))).collect()
    }

    /// The names that a tensor may have in the files of a checkpoint, the likeliest first.
    pub fn stored_names(&self, name: &str) -> Vec<String> {
        let mut names = vec![name.to_owned()];
        let mut add = |name: String| {
            if !names.contains(&name) {
                names.push(name);
            }
        };
        // Of the whole model, before Transformers 4.52.
        let old = name.strip_prefix("model.").unwrap_or(name);
        add(old.to_owned());
        if let Some(inner) = name.strip_prefix(&self.encoder.prefix) {
            let replace = |inner: String, (ours, stored): &(&str, &str)| inner.replace(ours, stored);
            let older = self.encoder.names.stored.iter().fold(inner.to_owned(), replace);
            for (prefix, inner) in PREFIXES.iter().flat_map(|prefix| [(prefix, inner), (prefix, &older)]) {
                add(format!("{prefix}vision_model.{inner}"));
                add(format!("{prefix}{inner}"));
            }
        }
        names
    }
}
