//! Where the tensors of image encoders and connectors come from: the decoder's checkpoint, folders of their own, or the
//! seed.
use crate::init::{Stream, is_norm_or_bias};
use crate::weights::WeightFiles;
use half::bf16;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, TensorSpec};
use tunesmith_config::vision::{VisionArch, WORLD_ENCODER, WORLD_PROJECTOR, WORLD_WEIGHTS};

/// The files that hold encoder and connector.
#[derive(Debug)]
pub struct VisionFiles {
    files: Option<Arc<WeightFiles>>,
    /// The files of a second encoder.
    world: Option<Arc<WeightFiles>>,
    /// The name in the files for each name in the whole model; `None` for a tensor that is drawn.
    stored: BTreeMap<String, Option<String>>,
    /// The number of inputs of each linear module that may be drawn.
    inputs: BTreeMap<String, usize>,
    initializer_range: f64,
    seed: u64,
}

impl VisionFiles {
    /// Opens the files of `arch.vision`; `None` where the model has no images. `weights` are the decoder's; without
    /// them, a multimodal model is drawn from `seed`.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: files that cannot be read, a tensor that is not there or has another shape.
    pub fn open(arch: &Arch, weights: Option<&WeightFiles>, seed: u64) -> Result<Option<Self>> {
        let Some(vision) = &arch.vision else { return Ok(None) };
        let files = match &vision.folder {
            Some(folder) => Some(Arc::new(WeightFiles::open_at(folder)?)),
            None => weights.map(|weights| weights.beside().ok_or_else(|| no_vision(arch))).transpose()?,
        };
        let encoded = vision.features.is_none();
        // A merged model has the projector of its second encoder too.
        let projects = vision.world.as_ref().is_some_and(|world| world.projector.stored);
        let world = vision.world.as_ref().filter(|_| encoded || projects);
        let world = world.map(|world| open_latents(&world.folder).map(Arc::new)).transpose()?;
        let projector = vision.world.iter().flat_map(|world| world.projector.linears());
        let projector: Vec<_> = projector.map(|linear| (linear.name.clone(), linear.in_features)).collect();
        let mut stored = BTreeMap::new();
        for spec in vision.tensors() {
            let drawn = spec.name.starts_with(WORLD_PROJECTOR) && !projects;
            let files = if is_of_world(&spec.name) { &world } else { &files };
            let files = files.as_deref().filter(|_| !drawn);
            let name = files.map(|files| find(files, vision, &spec)).transpose()?;
            stored.insert(spec.name, name.flatten());
        }
        let connector = vision.connector.linears().map(|linear| (linear.name.clone(), linear.in_features));
        let inputs = connector.chain(projector).collect();
        let initializer_range = vision.encoder.initializer_range;
        Ok(Some(Self { files, world, stored, inputs, initializer_range, seed }))
    }

    /// Whether a tensor belongs to an encoder or a connector.
    pub fn has(&self, name: &str) -> bool {
        self.stored.contains_key(name)
    }

    fn place(&self, name: &str) -> Option<(&WeightFiles, &str)> {
        let files = if is_of_world(name) { &self.world } else { &self.files };
        Some((files.as_deref()?, self.stored.get(name)?.as_deref()?))
    }

    /// The values of a tensor.
    ///
    /// # Errors
    /// The tensor cannot be read, as in [`WeightFiles::read_into`].
    pub fn values(&self, name: &str, count: usize) -> Result<Vec<f32>> {
        let Some((files, stored)) = self.place(name) else { return Ok(self.drawn(name, count)) };
        let mut values = vec![0.0; count];
        files.read_into(stored, &mut values)?;
        Ok(values)
    }

    /// The initial values of a tensor that no file has. A linear module of a connector starts as `torch.nn.Linear`
    /// does: uniform within one over the root of its inputs, bias included. Otherwise norms have a gain of one, biases
    /// are zero, and the rest is normal.
    fn drawn(&self, name: &str, count: usize) -> Vec<f32> {
        let stream = Stream::new(self.seed, name);
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        if let Some(&inputs) = self.inputs.get(module) {
            return stream.uniforms(1.0 / (inputs as f64).sqrt(), count);
        }
        let last = name.rsplit('.').next();
        match name {
            _ if last == Some("bias") => vec![0.0; count],
            _ if name.ends_with("mm_soft_emb_norm.weight") => vec![0.0; count],
            // Gemma 4: what clips nothing, and changes no row.
            _ if name.ends_with("put_min") => vec![f32::NEG_INFINITY; count],
            _ if name.ends_with("put_max") => vec![f32::INFINITY; count],
            _ if name.ends_with(".std_bias") => vec![0.0; count],
            _ if name.ends_with(".std_scale") || name.ends_with(".position_embedding_table") => vec![1.0; count],
            _ if is_norm_or_bias(name) || name.contains(".lambda") => vec![1.0; count],
            _ => stream.normals(self.initializer_range, count),
        }
    }

    /// Whether a tensor is stored as bfloat16.
    pub fn is_bf16(&self, name: &str) -> bool {
        self.place(name).is_some_and(|(files, stored)| files.is_bf16(stored))
    }

    /// The values of a tensor in bfloat16, where the files have it.
    ///
    /// # Errors
    /// The tensor cannot be read, as in [`WeightFiles::read_into`].
    pub fn read_bf16(&self, name: &str, count: usize) -> Result<Option<Vec<bf16>>> {
        let Some((files, stored)) = self.place(name) else { return Ok(None) };
        let mut values = vec![bf16::ZERO; count];
        files.read_bf16_to(stored, values.as_mut_slice().into())?;
        Ok(Some(values))
    }
}

fn is_of_world(name: &str) -> bool {
    name.starts_with(WORLD_ENCODER) || name.starts_with(WORLD_PROJECTOR)
}

/// The weights of a second encoder: those that diffusers writes into a folder, or a merged model's file.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: the file cannot be read.
pub fn open_latents(folder: &Path) -> Result<WeightFiles> {
    let file = folder.join("diffusion_pytorch_model.safetensors");
    WeightFiles::open_file(if folder.ends_with(WORLD_WEIGHTS) { folder } else { &file })
}

/// The name of a tensor in the files; `None` for one that no checkpoint has.
fn find(files: &WeightFiles, vision: &VisionArch, spec: &TensorSpec) -> Result<Option<String>> {
    let names = vision.stored_names(&spec.name);
    let origin = || files.paths().next().unwrap_or(Path::new("")).display().to_string();
    let found = names.iter().find_map(|name| Some((name, files.shape(name)?)));
    match found {
        Some((name, shape)) if shape == spec.shape => Ok(Some(name.clone())),
        Some((name, shape)) => {
            let found = format!("{}: tensor {name:?} is {shape:?}, expected {:?}", origin(), spec.shape);
            Err(Error::model(found).hint("config.json and the weights must belong to one model"))
        }
        None if !vision.connector.stored && vision.connector.tensors().contains(spec) => Ok(None),
        None => Err(Error::model(format!("{}: no tensor {:?}, expected {:?}", origin(), spec.name, spec.shape))
            .hint("config.json and the weights must belong to one model")),
    }
}

fn no_vision(arch: &Arch) -> Error {
    Error::model(format!("this {} checkpoint has a language model alone, and no image encoder", arch.family.model_type))
        .hint("set vision.encoder to the folder of an encoder, or use the whole checkpoint")
}
