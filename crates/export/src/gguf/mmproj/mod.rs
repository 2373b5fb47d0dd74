//! Writes `mmproj`, the second file of a multimodal model for llama.cpp: the image encoder and its connector. Names, keys and
//! types of numbers are those of llama.cpp's converter (`conversion/` there). `tools/mtmd` there computes with them.
mod check;
mod keys;
mod tensors;

use std::path::Path;
use std::sync::Arc;

use super::container::{Entry, Header, Value};
use super::{GgufFormat, Merged, Source, write};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::Arch;
use tunesmith_config::vision::{Encoder, PIXTRAL_TOKENS, Processing, Size, VisionArch};
use tunesmith_data::Tokenizer;
use tunesmith_model::vision_files::VisionFiles;
use tunesmith_model::weights::WeightFiles;

/// Which connector llama.cpp computes after the encoder: its `clip.projector_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Projector {
    Gemma3,
    Gemma4,
    Idefics3,
    InternVl,
    Llava,
    Pixtral,
    Qwen2,
    Qwen25,
    Qwen3,
}

impl Projector {
    /// The projector of a multimodal model, by its `model_type` and its encoder; `None` if llama.cpp has none.
    fn of(model_type: &str, encoder: &Encoder) -> Option<Self> {
        Some(match model_type {
            "llava" | "mistral3" if encoder.family == "pixtral" => Self::Pixtral,
            "gemma3" => Self::Gemma3,
            "gemma4" => Self::Gemma4,
            "idefics3" | "smolvlm" => Self::Idefics3,
            "internvl" => Self::InternVl,
            "llava" => Self::Llava,
            "qwen2_vl" => Self::Qwen2,
            "qwen2_5_vl" => Self::Qwen25,
            "qwen3_vl" | "qwen3_5" | "qwen3_5_moe" => Self::Qwen3,
            _ => return None,
        })
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Gemma3 => "gemma3",
            Self::Gemma4 => "gemma4v",
            Self::Idefics3 => "idefics3",
            Self::InternVl => "internvl",
            Self::Llava => "mlp",
            Self::Pixtral => "pixtral",
            Self::Qwen2 => "qwen2vl_merger",
            Self::Qwen25 => "qwen2.5vl_merger",
            Self::Qwen3 => "qwen3vl_merger",
        }
    }

    /// The kinds of encoders that it may follow.
    const fn encoders(self) -> &'static [&'static str] {
        match self {
            Self::Gemma3 => &["siglip_vision_model"],
            Self::Gemma4 => &["gemma4_vision"],
            Self::Idefics3 => &["idefics3_vision"],
            Self::InternVl => &["internvl_vision"],
            Self::Llava => &["clip_vision_model", "siglip_vision_model"],
            Self::Pixtral => &["pixtral"],
            Self::Qwen2 => &["qwen2_vl_vision"],
            Self::Qwen25 => &["qwen2_5_vl_vision"],
            Self::Qwen3 => &["qwen3_vl_vision", "qwen3_5_vision", "qwen3_5_moe_vision"],
        }
    }
}

/// The image encoder and the connector of a model, checked to be computed alike in llama.cpp.
#[derive(Debug, Clone)]
pub struct Mmproj {
    /// The encoder and the connector.
    pub vision: Arc<VisionArch>,
    processing: Processing,
    projector: Projector,
    /// For Pixtral: the token after each line of an image's rows. The file contains its embedding too.
    line_end: Option<u32>,
}

impl Mmproj {
    /// Opens the encoder and the connector of the model in the folder `base`, whose files are `weights`. Reads their shape from
    /// the folder unless `arch` has it already ([`Arch::vision`]).
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`], by name: a model that llama.cpp does not know, or computes otherwise, or whose encoder is not
    /// known here, or a folder without its image processor or the encoder's tensors.
    pub fn of(arch: &Arch, base: &Path, weights: &WeightFiles) -> Result<Self> {
        let family = arch.wrapper.map_or(arch.family.model_type, |wrapper| wrapper.model_type);
        let unknown = |what: &str| {
            Err(Error::model(format!("llama.cpp has no file (mmproj) for {what}"))
                .hint("answer about images with tunesmith, or serve the merged folder with Transformers or vLLM"))
        };
        let vision = match &arch.vision {
            Some(vision) => Arc::clone(vision),
            None => Arc::new(VisionArch::of_model(base, arch.hidden_size).map_err(|error| {
                Error::model(format!("the image encoder of a {family} model is not read: {}", error.message()))
                    .hint("llama.cpp's convert_hf_to_gguf.py --mmproj writes it from the base's folder, if it knows the model")
            })?),
        };
        if vision.world.is_some() {
            return unknown("a model with a second encoder (vision.world)");
        }
        if vision.folder.is_some() {
            return Err(Error::model("llama.cpp cannot see images with a text model paired with an image encoder (vision.encoder): it has no file (mmproj) for pairs")
                .hint("use all of it in tunesmith (tunesmith infer --image), or write it for Transformers (--hf)"));
        }
        let Some(projector) = Projector::of(family, &vision.encoder) else {
            return unknown(&format!("the image encoder of a {family} model"));
        };
        let processing = Processing::open(base)?;
        if let Some(what) = check::lacks(projector, &vision, &processing) {
            return Err(super::check::refuse(family, &what));
        }
        // Fails if the checkpoint contains only the language model.
        let seeing = Arch { vision: Some(Arc::clone(&vision)), ..arch.clone() };
        VisionFiles::open(&seeing, Some(weights), 0)?;
        let line_end = match projector {
            Projector::Pixtral => Some(line_end(base)?),
            _ => None,
        };
        Ok(Self { vision, processing, projector, line_end })
    }

    /// A remark for the user on a difference that llama.cpp has nevertheless; `None` if there is none.
    pub fn remark(&self) -> Option<&'static str> {
        match self.projector {
            Projector::Llava if self.vision.encoder.class_token => Some(
                "llama.cpp takes CLIP's class token for the last patch and shifts all patches by one place: its answers about images differ",
            ),
            Projector::InternVl => {
                Some("llama.cpp shifts the patches' positions by one place: its answers about images may differ")
            }
            Projector::Pixtral => Some(
                "llama.cpp gives an image 8 to 1,024 rows, and sides of the nearest multiple of a row: its answers about images may differ",
            ),
            Projector::Gemma4 => {
                Some("llama.cpp gives an image 70 to 1,120 rows by its size: its answers about images may differ")
            }
            Projector::Gemma3 if self.processing.pan_and_scan.is_some() => {
                Some("llama.cpp shows an oblong image as a whole alone, without pan and scan")
            }
            Projector::Idefics3 if matches!(self.processing.size, Size::Tiles { split: false, .. }) => {
                Some("llama.cpp shows an image that is not cut into tiles twice")
            }
            _ => None,
        }
    }
}

/// The id of the token after each line of an image's rows.
fn line_end(base: &Path) -> Result<u32> {
    let token = PIXTRAL_TOKENS[0];
    Tokenizer::load_with(base, &[])?.id(token).ok_or_else(|| {
        Error::model(format!("the tokenizer has no token {token}, whose embedding llama.cpp's file holds"))
            .hint("config.json and tokenizer.json must belong to one model")
    })
}

impl GgufFormat {
    /// The format of encoder and connector if the language model has this one. 4 bits are too coarse for them, so they get 8.
    #[must_use]
    pub const fn beside(self) -> Self {
        match self {
            Self::Q4_0 => Self::Q8_0,
            format => format,
        }
    }
}

/// Writes the encoder and the connector of a merged model to the file `path`, and returns its size in bytes. The model's
/// [`Arch::vision`] must be that of `mmproj`. `name` becomes `general.name`.
///
/// # Errors
/// [`tunesmith_base::Kind::Numeric`]: a number that the type does not hold; [`tunesmith_base::Kind::Io`]: the disk.
pub fn write_mmproj(path: &Path, merged: &Merged, mmproj: &Mmproj, name: &str, format: GgufFormat) -> Result<u64> {
    let Mmproj { vision, processing, projector, line_end } = mmproj;
    let mut header = Header::new("clip");
    header.put("general.type", Value::text("mmproj"));
    header.put("general.name", Value::text(name));
    header.put("general.file_type", Value::U32(format.file_type()));
    header.put("general.quantization_version", Value::U32(2));
    keys::describe(*projector, vision, processing, &mut header);
    let mut sources = Vec::new();
    let line_end = line_end.map(|token| tensors::line_end(&merged.arch, token as usize));
    for (spec, output) in tensors::outputs(*projector, vision).into_iter().chain(line_end) {
        let format = tensors::format(*projector, &output.name, &output.shape, format);
        header.tensors.push(Entry { name: output.name.clone(), format, shape: output.shape.clone() });
        sources.push(Source::Merged(vec![(spec, output)]));
    }
    write(path, &header, &|index| sources[index].values(merged))
}
