//! How a run reads images: the image encoder and connector that its settings name, and the files of its rows' images.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::run_pictures::RunPictures;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_checkpoint::peft;
use tunesmith_config::arch::Arch;
use tunesmith_config::vision::{
    Backend, ChatForm, ChatImages, PAIR_SETTINGS, Pairing, Processing, Size, VisionArch, VisionTraining,
    WORLD_SETTINGS, WORLD_TOKENS, World, WorldSettings,
};
use tunesmith_config::{
    BadImages, Config, ConnectorChoice, ImageBackend, ModelConfig, Resolved, Task, WorldConfig, schema,
};
use tunesmith_data::{PictureFiles, Pictures, Tokenizer};
use tunesmith_hub::{self as hub, DownloadProgress, Part};
use tunesmith_vision::Processor;

/// What a model needs to read images: the shape of an image encoder and connector, and a reader of image files.
#[derive(Debug, Clone)]
pub struct Sight {
    /// The image encoder and connector, for [`tunesmith_config::arch::Arch::vision`].
    pub arch: Arc<VisionArch>,
    /// Reads images and prepares them as the encoder expects.
    pub(crate) run_pictures: Arc<RunPictures>,
}

/// The language model that is to read images.
#[derive(Debug, Clone, Copy)]
pub struct Seer<'a> {
    /// The model's folder.
    pub dir: &'a Path,
    /// The folder of its tokenizer, which may be an adapter's.
    pub tokenizer: &'a Path,
    /// Features of a row of the decoder: its `hidden_size`.
    pub hidden_size: usize,
}

impl Sight {
    /// The reader of images, which prepares them as the encoder expects.
    pub fn pictures(&self) -> Arc<dyn Pictures> {
        Arc::<RunPictures>::clone(&self.run_pictures)
    }

    /// Opens the image encoder of a run and downloads `part` of it. Returns `None` if the run reads no images: `vision.load`
    /// decides, or else a named encoder, or else the first rows.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: the model sees no pictures, or the encoder is not known here; those of the hub and the files.
    pub fn of_rows(
        config: &Config,
        seer: Seer<'_>,
        part: Part,
        downloads: &dyn DownloadProgress,
    ) -> Result<Option<Self>> {
        if config.vision.load.unwrap_or_else(|| names_encoder(config)) {
            return Self::open(config, seer, part, downloads).map(Some);
        }
        let shows = if config.vision.load.is_none() { tunesmith_data::first_picture(config)? } else { None };
        let Some(row) = shows else { return Ok(None) };
        let opened = Self::open(config, seer, part, downloads);
        opened.map(Some).map_err(|error| error.context(format!("{row}: the row shows an image")))
    }

    /// The same, with those parts counted as trained that the adapter in `dir` has trained.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Checkpoint`]: its files cannot be read.
    pub fn of_adapter(self, dir: &Path) -> Result<Self> {
        let training = peft::vision_training(dir, &self.arch)?;
        Ok(Self { arch: Arc::new(VisionArch { training, ..(*self.arch).clone() }), ..self })
    }

    /// Opens the image encoder.
    ///
    /// # Errors
    /// As [`Self::of_rows`].
    pub fn open(config: &Config, seer: Seer<'_>, part: Part, downloads: &dyn DownloadProgress) -> Result<Self> {
        if config.task() != Task::CausalLm {
            return Err(Error::config(format!("task: {} reads no images", config.task()))
                .hint("leave rows with images out, or set vision.load: false"));
        }
        let (folder, vision) = match &config.vision.encoder {
            Some(_) if files::is_there(&seer.dir.join(PAIR_SETTINGS)) => {
                let dir = seer.dir.display();
                return Err(Error::config(format!(
                    "vision.encoder: {dir} has an image encoder and a connector already"
                ))
                .hint(format!(
                    "remove vision.encoder and the keys that go with it: {PAIR_SETTINGS} describes the pair"
                )));
            }
            Some(name) => paired(config, name, seer, part, downloads)?,
            None => (seer.dir.to_owned(), VisionArch::of_model(seer.dir, seer.hidden_size)?),
        };
        let vision = with_world(config, seer, vision)?;
        if vision.start_token.is_some() && vision.world.is_some() {
            return Err(Error::config(
                "vision.world: a decoder that reads images by cross-attention reads one encoder's",
            )
            .hint("leave out vision.world"));
        }
        let backend = match config.vision.backend {
            ImageBackend::Torchvision => Backend::Torchvision,
            ImageBackend::Pil => Backend::Pil,
        };
        if vision.encoder.channels != 3 {
            let channels = vision.encoder.channels;
            return Err(Error::model(format!("{}: not yet: an encoder of {channels} colors", folder.display())));
        }
        let vision = VisionArch { training: training(config, &vision), ..vision };
        check_training(&vision)?;
        let processing = Processing { backend, ..Processing::open(&folder)? };
        let mut processing = Processing { size: size(config, &processing)?, ..processing };
        if let (Size::Canvas { cut, .. }, Some(ChatImages { form: ChatForm::InternVl, .. })) =
            (&mut processing.size, vision.chat)
        {
            // InternVL's processor cuts images into tiles, whatever the settings of its image processor say.
            *cut = true;
        }
        let frames = vision.encoder.frames.unwrap_or(1);
        if vision.encoder.channels_last != processing.channels_last || frames != processing.frames {
            return Err(Error::model(format!(
                "{}: {} does not prepare images for an encoder of {}",
                folder.display(),
                processing.class,
                vision.encoder.family
            ))
            .hint("preprocessor_config.json must be the encoder's own"));
        }
        check_unit(&folder, &processing, &vision)?;
        let cuts_alone = matches!(processing.size, Size::AnyRes { .. });
        let grids = processing.grids.clone();
        let mut processor = Processor::new(processing, vision.encoder.patch_size);
        match &vision.any_res {
            Some(any_res) if !cuts_alone || any_res.grids != grids => {
                return Err(Error::model(format!(
                    "{}: image_grid_pinpoints of config.json and preprocessor_config.json differ",
                    folder.display()
                ))
                .hint("both files must belong to one model"));
            }
            Some(any_res) => processor = processor.with_most_tiles(any_res.most_tiles),
            None if cuts_alone => {
                return Err(Error::model(format!(
                    "{}: images are cut at their own shape, which only llava_onevision reads",
                    folder.display()
                ))
                .hint("give the encoder a preprocessor_config.json of its own kind, such as SiglipImageProcessor"));
            }
            None => {}
        }
        let world = vision.world.as_ref().map(|world| Processor::new(world.processing(backend), 1));
        let files = PictureFiles::new(
            processor,
            vision.clone(),
            &image_dir(config),
            &config.data.cache_dir.clone().or_else(files::user_cache).unwrap_or_else(std::env::temp_dir),
            config.data.bad_images == BadImages::Skip,
        )?;
        let files = match world {
            Some(world) => files.with_world(world),
            None => files,
        };
        let files = if config.data.allow_image_urls { files.with_web(config.data.image_cache_size)? } else { files };
        Ok(Self { arch: Arc::new(vision), run_pictures: Arc::new(RunPictures::new(files)) })
    }
}

/// Refuses a run without images if the model's decoder reads them by cross-attention: it needs one beside each text.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`].
pub(crate) fn refuse_blind(arch: &Arch, sees: bool) -> Result<()> {
    if sees || !arch.reads_images_across() {
        return Ok(());
    }
    Err(Error::data("the model's decoder reads an image beside each text, and no row shows one")
        .hint("every row needs one image: {image, caption}"))
}

/// Keys of `tuning` that only a run with an image encoder reads. The same holds for the section `vision`.
const OF_TUNING: [&str; 5] = [
    "tuning.freeze_vision",
    "tuning.freeze_connector",
    "tuning.freeze_language",
    "tuning.vision_unfreeze_layers",
    "tuning.vision_target_modules",
];

/// Refuses settings for images in a run without an image encoder, where they would have no effect.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], naming the key and its place.
pub(crate) fn refuse_unread(resolved: &Resolved) -> Result<()> {
    let default = Config::default();
    let of_vision = |key: &str| key.starts_with("vision.") && key != "vision.load" || OF_TUNING.contains(&key);
    for option in schema::options() {
        let (key, value) = (option.path(), (option.get)(&resolved.config));
        if of_vision(&key) && value != (option.get)(&default) {
            let source = resolved.source(&key);
            return Err(Error::config(format!("{key}: {value} ({source}), but this run loads no image encoder")).hint(
                "remove the key, or load an encoder: set vision.load: true for a multimodal model, vision.encoder for a text model",
            ));
        }
    }
    Ok(())
}

/// The configuration to load a run's result in `dir` with. Removes `vision.encoder` if the folder contains the image encoder
/// itself, and `vision.world` if it contains the second encoder.
pub fn of_result(config: &Config, dir: &Path) -> Config {
    let mut config = config.clone();
    if files::is_there(&dir.join(PAIR_SETTINGS)) {
        config.vision.encoder = None;
    }
    if files::is_there(&dir.join(WORLD_SETTINGS)) {
        config.vision.world = WorldConfig::default();
    }
    config
}

/// Whether the settings name an encoder, whose connector is trained.
pub fn names_encoder(config: &Config) -> bool {
    config.vision.encoder.is_some() || config.vision.world.encoder.is_some()
}

/// Adds the second encoder that `vision.world` names, if it names one.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the settings do not fit the model; [`tunesmith_base::Kind::Model`]: its files cannot be read.
pub fn with_world(config: &Config, seer: Seer<'_>, vision: VisionArch) -> Result<VisionArch> {
    let settings: &WorldConfig = &config.vision.world;
    let Some(folder) = &settings.encoder else { return Ok(vision) };
    if vision.world.is_some() {
        let dir = seer.dir.display();
        return Err(Error::config(format!("vision.world: {dir} has a second encoder already"))
            .hint(format!("remove vision.world: {WORLD_SETTINGS} describes the encoder")));
    }
    let tokenizer = Tokenizer::load_with(seer.tokenizer, &new_tokens(config, seer))?;
    let token = |text: &str| {
        tokenizer.id(text).ok_or_else(|| {
            Error::config(format!("vision.world: {text:?} is not in the vocabulary"))
                .hint(format!("add the tokens around its embeddings: tuning.new_tokens: {WORLD_TOKENS:?}"))
        })
    };
    let tokens = [token(WORLD_TOKENS[0])?, token(WORLD_TOKENS[1])?];
    let form = WorldSettings {
        projection: settings.projection_mode,
        architecture: settings.projection_architecture,
        image_size: settings.image_size,
    };
    let world = World::open(folder, form, tokens, seer.hidden_size).map_err(|error| error.context("vision.world"))?;
    Ok(VisionArch { world: Some(Arc::new(world)), ..vision })
}

/// Refuses an image processor that rounds sides to multiples of another number of pixels than the model makes an embedding of.
fn check_unit(folder: &Path, processing: &Processing, vision: &VisionArch) -> Result<()> {
    let own = vision.encoder.patch_size * vision.connector.side();
    let unit = match processing.size {
        Size::MostRows { merge, patch, .. } | Size::Pixels { merge, patch, .. } => Some(merge * patch),
        Size::Within { unit, .. } => Some(unit),
        _ => None,
    };
    match unit {
        Some(unit) if unit as usize != own => Err(Error::model(format!(
            "{}: the image processor rounds sides to multiples of {unit} pixels, but an embedding of the model covers {own} x {own}",
            folder.display()
        ))
        .hint("the sides of patches and of their squares must be those of config.json")),
        _ => Ok(()),
    }
}

/// The size that images are resized to: that of the image processor, within `vision.min_pixels` and `vision.max_pixels`.
fn size(config: &Config, processing: &Processing) -> Result<Size> {
    let (min, max) = (config.vision.min_pixels, config.vision.max_pixels);
    let Size::Pixels { least, most, merge, patch } = processing.size else {
        return match [("min_pixels", min), ("max_pixels", max)].into_iter().find(|(_, pixels)| pixels.is_some()) {
            None => Ok(processing.size),
            Some((key, _)) => Err(Error::config(format!(
                "vision.{key}: {} does not size images by their number of pixels",
                processing.class
            ))
            .hint("leave it out: preprocessor_config.json has the size")),
        };
    };
    let (least, most) = (min.map_or(least, |pixels| pixels as u64), max.map_or(most, |pixels| pixels as u64));
    // If one configured bound passes the processor's other bound, it moves that bound along.
    let (least, most) = if min.is_some() { (least, most.max(least)) } else { (least.min(most), most) };
    Ok(Size::Pixels { least, most, merge, patch })
}

/// The folder that names of pictures are relative to.
pub(crate) fn image_dir(config: &Config) -> PathBuf {
    let data = &config.data;
    let first = data.train_path.first().or_else(|| data.datasets.first().and_then(|set| set.path.first()));
    let beside = first.and_then(|file| file.parent()).filter(|folder| !folder.as_os_str().is_empty());
    data.image_dir.clone().unwrap_or_else(|| beside.map_or_else(|| PathBuf::from("."), Path::to_owned))
}

/// What is trained of encoder and connector.
fn training(config: &Config, vision: &VisionArch) -> VisionTraining {
    let tuning = &config.tuning;
    // The model may have no connector, or none with tensors that can be trained.
    let trainable = vision.connectors().any(|connector| !connector.trainable_tensors().is_empty());
    let connector = !tuning.freeze_connector.unwrap_or(vision.connector.stored) && trainable;
    VisionTraining {
        connector,
        newline: vision.any_res.is_some() && !tuning.mode.adapts() && connector,
        encoder: !tuning.freeze_vision,
        last_blocks: tuning.vision_unfreeze_layers,
        adapters: tuning.vision_target_modules.clone(),
        freeze_language: tuning.freeze_language,
    }
}

/// Refuses settings that name blocks or modules the encoder does not have, and settings that train nothing at all.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`].
fn check_training(vision: &VisionArch) -> Result<()> {
    let VisionTraining { connector, encoder, last_blocks, adapters, freeze_language, .. } = &vision.training;
    let blocks = vision.encoder.feature.blocks;
    if *last_blocks > blocks {
        return Err(Error::config(format!(
            "tuning.vision_unfreeze_layers: {last_blocks}, and the encoder has {blocks} blocks"
        )));
    }
    if !adapters.is_empty() && vision.adapted_linears().is_empty() {
        let names = adapters.join(", ");
        if *last_blocks > 0 {
            let none = format!("tuning.vision_target_modules: no block that stays frozen has a linear module {names}");
            return Err(
                Error::config(none).hint("lower tuning.vision_unfreeze_layers: blocks that it trains get no adapters")
            );
        }
        return Err(Error::config(format!("tuning.vision_target_modules: the encoder has no linear module {names}"))
            .hint("all-linear names all of them"));
    }
    let language = !freeze_language || vision.world.is_some();
    if !(language || *connector || *encoder || *last_blocks > 0 || !adapters.is_empty()) {
        return Err(Error::config("tuning.freeze_language: nothing is trained: encoder and connector are frozen too")
            .hint("set tuning.freeze_connector: false, tuning.freeze_vision: false, or tuning.vision_target_modules"));
    }
    Ok(())
}

/// Opens the image encoder that `vision.encoder` names and pairs it with the model.
///
/// # Errors
/// As [`Sight::open`].
pub fn of_pair(config: &Config, seer: Seer<'_>, downloads: &dyn DownloadProgress) -> Result<VisionArch> {
    let name =
        config.vision.encoder.as_deref().ok_or_else(|| Error::config("vision.encoder names no image encoder"))?;
    paired(config, name, seer, Part::Whole, downloads).map(|(_, vision)| vision)
}

/// Downloads `part` of the image encoder `name` and pairs it with the model. Returns the encoder's folder and the pair.
fn paired(
    config: &Config,
    name: &str,
    seer: Seer<'_>,
    part: Part,
    downloads: &dyn DownloadProgress,
) -> Result<(PathBuf, VisionArch)> {
    let model =
        ModelConfig { name: Some(name.to_owned()), revision: config.vision.revision.clone(), ..ModelConfig::default() };
    let dir = hub::model_dir(&model, part, downloads)
        .map_err(|error| error.of_key("model.name", "vision.encoder").of_key("model.revision", "vision.revision"))?
        .dir;
    let width = config.vision.connector_hidden_size.unwrap_or(seer.hidden_size);
    let pairing = Pairing {
        hidden_size: (config.vision.connector == ConnectorChoice::Mlp).then_some(width),
        feature_layer: config.vision.feature_layer,
        dropout: config.vision.connector_dropout,
    };
    let vision = VisionArch::pair(&dir, &pairing, seer.hidden_size)?;
    let chat = match &config.vision.image_token {
        None => None,
        Some(text) => {
            let tokenizer = Tokenizer::load_with(seer.tokenizer, &new_tokens(config, seer))?;
            let token = tokenizer.id(text).ok_or_else(|| {
                Error::config(format!("vision.image_token: {text:?} is not in the vocabulary"))
                    .hint(format!("add it: tuning.new_tokens: [{text:?}]"))
            })?;
            Some(ChatImages { token, form: ChatForm::Bare })
        }
    };
    Ok((dir, VisionArch { chat, ..vision }))
}

/// The tokens that the tokenizer still lacks: an adapter's folder has them already.
fn new_tokens(config: &Config, seer: Seer<'_>) -> Vec<String> {
    if seer.tokenizer == seer.dir { config.tuning.new_tokens.clone() } else { Vec::new() }
}
