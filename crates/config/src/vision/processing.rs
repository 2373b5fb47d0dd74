//! How an image is prepared for a vision encoder, read from `preprocessor_config.json` or from `image_processor` in
//! `processor_config.json`, as the image processors of Transformers read them.
use std::path::Path;

use serde_json::Value;

use super::image_processors::{CLASSES, Class, Resample, SOFT_TOKENS, Size};
use crate::hf_json::{Source, read_text};
use tunesmith_base::error::{Error, Result};

/// The largest side in pixels after resizing.
const MOST: usize = 1 << 14;

/// The most tiles or crops into which an image may be cut.
const MOST_TILES: usize = 64;

/// How images are prepared for an encoder. The steps follow in the order of the fields.
#[derive(Debug, Clone, PartialEq)]
pub struct Processing {
    /// The class of Transformers, such as `SiglipImageProcessor`.
    pub class: &'static str,
    /// First the image is put on a square of this color; `None` if it is not.
    pub square: Option<[u8; 3]>,
    /// Whether an oblong picture is also cut into crops, which follow the whole (Gemma 3).
    pub pan_and_scan: Option<PanAndScan>,
    /// The size to which the image is resized, and each crop.
    pub size: Size,
    /// The filter that weighs pixels when a picture is resized.
    pub resample: Resample,
    /// The library whose rounding resizing follows.
    pub backend: Backend,
    /// Then its middle is kept, `[height, width]`. Where the image is smaller, the rest is black.
    pub crop: Option<[u32; 2]>,
    /// Each value is multiplied by this factor.
    pub rescale: Option<f64>,
    /// Then the mean of its channel is subtracted, and the rest is divided by the channel's standard deviation.
    pub normalize: Option<[[f32; 3]; 2]>,
    /// Whether a patch has the channels of each pixel next to each other, instead of all pixels of one channel after
    /// another (SigLIP 2 NaFlex, Gemma 4).
    pub channels_last: bool,
    /// With [`Size::AnyRes`]: the heights and widths to one of which the image is resized before it is cut.
    pub grids: Vec<[u32; 2]>,
    /// How often each channel of a patch is repeated, because the encoder reads videos and the image stands for as many
    /// equal frames (Qwen-VL).
    pub frames: usize,
}

/// Cuts an oblong image into crops along its longer side. As `pan_and_scan` of
/// `transformers.models.gemma3.image_processing_gemma3`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PanAndScan {
    /// An image is not cut if a side of its crops would be shorter than this.
    pub min_crop_size: u32,
    /// The most crops of a picture.
    pub max_num_crops: u32,
    /// An image is cut if its longer side is at least this many times as long as the shorter one.
    pub min_ratio_to_activate: f64,
}

/// The library whose rounding resizing follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backend {
    /// torchvision's, which Transformers takes where it is installed.
    #[default]
    Torchvision,
    /// Pillow's, which older versions and `use_fast=False` take.
    Pil,
}

impl Processing {
    /// Reads the files of a model folder.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Model`]: neither file exists, or it names an image processor that is not supported; the
    /// message names it.
    pub fn open(dir: &Path) -> Result<Self> {
        let processing = Self::of_file(dir)?;
        let Size::Within { most, .. } = processing.size else { return Ok(processing) };
        let unit = super::pixtral::unit(dir, MOST)?;
        Ok(unit.map_or(processing.clone(), |unit| Self { size: Size::Within { most, unit }, ..processing }))
    }

    /// Reads only the file that describes the image processor. If both do, `processor_config.json` counts, as in Transformers 5.
    fn of_file(dir: &Path) -> Result<Self> {
        let path = dir.join("processor_config.json");
        if let Some(text) = read_text(&path)? {
            let whole = Source::parse(&text, &path)?;
            if let Some(Value::Object(map)) = whole.get("image_processor") {
                let prefix = "image_processor.".to_owned();
                return read(&nulls(Source { origin: &path, map: map.clone(), prefix })?);
            }
        }
        let path = dir.join("preprocessor_config.json");
        if let Some(text) = read_text(&path)? {
            return read(&nulls(Source::parse(&text, &path)?)?);
        }
        Err(Error::model(format!("{} has no preprocessor_config.json", dir.display()))
            .hint("copy it from the image encoder's repository: it says how images are resized and normalised"))
    }
}

/// Keys that the image processor needs: it fails if one of them is null. With each key: the switch of the step that
/// reads it, if there is one, and how the names of the classes begin that need it (empty: all classes).
const NEEDED: [(&str, Option<&str>, &[&str]); 13] = [
    (
        "size",
        Some("do_resize"),
        &["Bit", "CLIP", "Gemma3", "GotOcr2", "Idefics3", "Llava", "Pixtral", "SiglipI", "SmolVLM", "ViT"],
    ),
    ("resample", Some("do_resize"), &[]),
    ("rescale_factor", Some("do_rescale"), &[]),
    ("image_mean", Some("do_normalize"), &[]),
    ("image_std", Some("do_normalize"), &[]),
    ("max_image_size", None, &["Idefics3", "SmolVLM"]),
    ("image_grid_pinpoints", None, &["LlavaOnevision"]),
    ("merge_size", None, &["Qwen2VL"]),
    ("temporal_patch_size", None, &["Qwen2VL"]),
    ("patch_size", None, &["Gemma4", "Pixtral", "Qwen2VL", "Siglip2"]),
    ("max_soft_tokens", None, &["Gemma4"]),
    ("pooling_kernel_size", None, &["Gemma4"]),
    ("max_num_patches", None, &["Siglip2"]),
];

/// Handles keys that are null: a step that is null is left out, and any other key counts as absent, unless the class
/// needs it.
fn nulls(mut source: Source<'_>) -> Result<Source<'_>> {
    let class = source.text("image_processor_type").ok().flatten().unwrap_or_default().to_owned();
    for (key, step, classes) in NEEDED {
        let reads = classes.is_empty() || classes.iter().any(|begin| class.starts_with(begin));
        let runs = step.is_none_or(|step| !source.is_null(step) && source.get(step) != Some(&Value::Bool(false)));
        // Crops are always resized.
        let runs = runs || key == "size" && source.get("do_pan_and_scan") == Some(&Value::Bool(true));
        if source.is_null(key) && reads && runs {
            return Err(source.mismatch(key, "a value, which the image processor needs"));
        }
    }
    source.map.retain(|key, value| {
        let step = value.is_null() && key.starts_with("do_");
        if step {
            *value = Value::Bool(false);
        }
        // If the middle is kept, its size must not be null.
        !value.is_null() || key == "crop_size"
    });
    Ok(source)
}

fn read(source: &Source<'_>) -> Result<Processing> {
    let key = if source.has("image_processor_type") { "image_processor_type" } else { "feature_extractor_type" };
    let found = source.text(key)?.ok_or_else(|| source.mismatch("image_processor_type", "the name of a class"))?;
    let bare = ["Fast", "Pil"].iter().find_map(|end| found.strip_suffix(end)).unwrap_or(found);
    let class = CLASSES.iter().find(|class| class.name == bare || (class.older == bare && !bare.is_empty()));
    let class = class.ok_or_else(|| {
        let known: Vec<_> = CLASSES.iter().map(|class| class.name).collect();
        source
            .not_yet(format!("{}{key} {found:?}", source.prefix))
            .hint(format!("image processors in this version: {}", known.join(", ")))
    })?;
    let pan_and_scan = pan_and_scan(source, class)?;
    let resample = resample(source, class.resample)?;
    // The class asks torchvision for the nearest pixel by the rule of older versions, which is not implemented.
    if matches!(class.size, Size::MostRows { .. }) && resample == Resample::Nearest {
        return Err(source.not_yet(format!("resample: 0 (nearest) for {}", class.name)));
    }
    let normalize = source.flag("do_normalize", !matches!(class.size, Size::MostRows { .. }))?;
    let mean = channels(source, "image_mean", class.normal[0])?;
    let normal = [mean, channels(source, "image_std", class.normal[1])?];
    // With these bounds, every normalized value is finite in f32.
    if !normal[1].iter().all(|deviation| (1e-6..=1e6).contains(deviation)) {
        return Err(source.mismatch("image_std", "numbers from 1e-6 to 1e6"));
    }
    let rescale = source.number_or("rescale_factor", 1.0 / 255.0)?;
    if !(1e-9..=1e9).contains(&rescale) {
        return Err(source.mismatch("rescale_factor", "a number from 1e-9 to 1e9"));
    }
    let squared = class.name == "LlavaImageProcessor" && source.flag("do_pad", false)?;
    // The margins have the color of the mean, so the mean must be a color.
    let colors =
        source.get("image_mean").is_none_or(Value::is_array) && mean.iter().all(|mean| (0.0..=1.0).contains(mean));
    if squared && !colors {
        return Err(source.mismatch("image_mean", "three numbers from 0 to 1 beside do_pad"));
    }
    let any_res = matches!(class.size, Size::AnyRes { .. });
    let cuts = matches!(
        class.size,
        Size::Tiles { .. }
            | Size::Pixels { .. }
            | Size::MostPatches { .. }
            | Size::MostRows { .. }
            | Size::Canvas { .. }
            | Size::Within { .. }
    );
    if cuts && !source.flag("do_resize", true)? {
        return Err(source.not_yet(format!("do_resize: false for {}", class.name)));
    }
    let crops = source.flag("do_center_crop", class.crops.unwrap_or(false))?;
    if any_res && (!source.flag("do_resize", true)? || crops || source.get("crop_size").is_some()) {
        return Err(source.not_yet("do_resize: false or a crop_size for LlavaOnevisionImageProcessor"));
    }
    let pads = ["Bit", "CLIP", "SiglipI", "ViT"].iter().any(|name| class.name.starts_with(name));
    // Without a size, pictures are padded to the largest of those that are processed together.
    if pads && source.flag("do_pad", false)? && source.get("pad_size").is_some() {
        return Err(source.not_yet(format!("do_pad: true with a pad_size for {}", class.name)));
    }
    // No class crops without a size, and some never do.
    if crops && class.crops != Some(true) && source.get("crop_size").is_none() {
        return Err(source.mismatch("crop_size", "a size beside do_center_crop: true"));
    }
    if matches!(class.size, Size::Within { .. }) && crops {
        return Err(source.not_yet("do_center_crop for PixtralImageProcessor"));
    }
    let size = if source.flag("do_resize", true)? || pan_and_scan.is_some() {
        // Crops are always resized, and so is the whole image then.
        size(source, class)?
    } else {
        Size::Kept
    };
    if pan_and_scan.is_some() && !matches!(size, Size::Exact(_)) {
        return Err(source.mismatch("size", "{height, width} beside do_pan_and_scan"));
    }
    let grids = if any_res { grids(source)?.unwrap_or_else(super::joined::usual_grids) } else { Vec::new() };
    Ok(Processing {
        class: class.name,
        square: (squared || any_res).then(|| mean.map(|mean| (mean * 255.0) as u8)),
        size,
        pan_and_scan,
        resample,
        backend: Backend::default(),
        crop: if crops && class.crops.is_some() { Some(crop(source)?) } else { None },
        rescale: source.flag("do_rescale", true)?.then_some(rescale),
        normalize: normalize.then_some(normal),
        channels_last: matches!(class.size, Size::MostPatches { .. } | Size::MostRows { .. }),
        grids,
        frames: match class.size {
            Size::Pixels { .. } => source.size_up_to("temporal_patch_size", Some(2), 64)?,
            _ => 1,
        },
    })
}

/// The settings of `pan_and_scan`, with the defaults of `Gemma3ImageProcessor` for absent keys.
fn pan_and_scan(source: &Source<'_>, class: &Class) -> Result<Option<PanAndScan>> {
    if class.name != "Gemma3ImageProcessor" || !source.flag("do_pan_and_scan", false)? {
        return Ok(None);
    }
    let count = |key: &str, default, most| source.size_up_to(key, Some(default), most).map(|count| count as u32);
    Ok(Some(PanAndScan {
        min_crop_size: count("pan_and_scan_min_crop_size", 256, MOST)?,
        max_num_crops: count("pan_and_scan_max_num_crops", 4, MOST_TILES)?,
        min_ratio_to_activate: source.positive("pan_and_scan_min_ratio_to_activate", 1.2)?,
    }))
}

/// `image_grid_pinpoints` as heights and widths; `None` if the key is absent.
pub(super) fn grids(source: &Source<'_>) -> Result<Option<Vec<[u32; 2]>>> {
    let key = "image_grid_pinpoints";
    let Some(value) = source.get(key) else { return Ok(None) };
    let side = |value: &Value| value.as_u64().filter(|side| (1..=MOST as u64).contains(side)).map(|side| side as u32);
    let pair = |pair: &Value| match pair.as_array().map(Vec::as_slice) {
        Some([height, width]) => Some([side(height)?, side(width)?]),
        _ => None,
    };
    let list = value.as_array().filter(|list| (1..=MOST).contains(&list.len()));
    let found = list.and_then(|list| list.iter().map(pair).collect());
    found.map(Some).ok_or_else(|| source.mismatch(key, "a list of [height, width]"))
}

fn channels(source: &Source<'_>, key: &str, default: [f32; 3]) -> Result<[f32; 3]> {
    let number = |value: &Value| value.as_f64().filter(|value| value.abs() < 1e6).map(|value| value as f32);
    match source.get(key) {
        None => Ok(default),
        Some(value) => value
            .as_array()
            .filter(|list| list.len() == 3)
            .and_then(|list| Some([number(&list[0])?, number(&list[1])?, number(&list[2])?]))
            .or_else(|| number(value).map(|one| [one; 3]))
            .ok_or_else(|| source.mismatch(key, "three numbers")),
    }
}

fn resample(source: &Source<'_>, default: Resample) -> Result<Resample> {
    Ok(match source.get("resample") {
        None => default,
        Some(value) => match value.as_u64() {
            Some(0) => Resample::Nearest,
            Some(1) => Resample::Lanczos,
            Some(2) => Resample::Bilinear,
            Some(3) => Resample::Bicubic,
            _ => {
                return Err(source.mismatch("resample", "0 (nearest), 1 (Lanczos), 2 (bilinear) or 3 (bicubic)"));
            }
        },
    })
}

/// The object under `key`, such as `size`; `None` if there is no object.
fn sizes<'a>(source: &Source<'a>, key: &str) -> Option<Source<'a>> {
    let Some(Value::Object(map)) = source.get(key) else { return None };
    let mut map = map.clone();
    map.retain(|_, value| !value.is_null());
    Some(Source { origin: source.origin, map, prefix: format!("{}{key}.", source.prefix) })
}

/// The height and width under a key that is one number for both, or a list of the two. `None` if the key is absent.
fn square(source: &Source<'_>, key: &str) -> Result<Option<[u32; 2]>> {
    let Some(Value::Array(list)) = source.get(key) else {
        return if source.has(key) { side(source, key).map(|side| Some([side; 2])) } else { Ok(None) };
    };
    let number = |value: &Value| value.as_u64().filter(|side| (1..=MOST as u64).contains(side)).map(|side| side as u32);
    match list.iter().map(number).collect::<Option<Vec<u32>>>().as_deref() {
        Some(&[height, width]) => Ok(Some([height, width])),
        _ => Err(source.mismatch(key, &format!("a size up to {MOST}, or [height, width]"))),
    }
}

fn side(source: &Source<'_>, key: &str) -> Result<u32> {
    source.size_up_to(key, None, MOST).map(|side| side as u32)
}

fn size(source: &Source<'_>, class: &Class) -> Result<Size> {
    if let Size::Tiles { longest_edge, tile, .. } = class.size {
        let edge = |key: &str, default| match (sizes(source, key), source.has(key)) {
            (Some(size), _) => side(&size, "longest_edge"),
            (None, false) => Ok(default),
            (None, true) => Err(source.mismatch(key, "{longest_edge}")),
        };
        let (longest_edge, tile) = (edge("size", longest_edge)?, edge("max_image_size", tile)?);
        return Ok(Size::Tiles { longest_edge, tile, split: source.flag("do_image_splitting", true)? });
    }
    if let Size::MostPatches { most, patch } = class.size {
        let most = source.size_up_to("max_num_patches", Some(most as usize), MOST)? as u32;
        let patch = source.size_up_to("patch_size", Some(patch as usize), MOST)? as u32;
        return Ok(Size::MostPatches { most, patch });
    }
    if let Size::MostRows { most, merge, patch } = class.size {
        let most = source.size("max_soft_tokens", Some(most as usize))?;
        if !SOFT_TOKENS.contains(&most) {
            return Err(source.mismatch("max_soft_tokens", "70, 140, 280, 560 or 1120"));
        }
        let merge = source.size_up_to("pooling_kernel_size", Some(merge as usize), 64)? as u32;
        let patch = source.size_up_to("patch_size", Some(patch as usize), MOST)? as u32;
        return Ok(Size::MostRows { most: most as u32, merge, patch });
    }
    if let Size::Within { most, unit } = class.size {
        return within(source, most, unit);
    }
    if let Size::AnyRes { tile } = class.size {
        let Some(size) = sizes(source, "size") else {
            return match square(source, "size")?.unwrap_or([tile; 2]) {
                [height, width] if height == width => Ok(Size::AnyRes { tile: height }),
                _ => Err(source.mismatch("size", "square tiles")),
            };
        };
        if size.has("shortest_edge") {
            return side(&size, "shortest_edge").map(|tile| Size::AnyRes { tile });
        }
        let [height, width] = [side(&size, "height")?, side(&size, "width")?];
        return if height == width {
            Ok(Size::AnyRes { tile: height })
        } else {
            Err(source.mismatch("size", "square tiles"))
        };
    }
    if let Size::Canvas { tile, least, most, .. } = class.size {
        let tile = match sizes(source, "size") {
            Some(size) => [side(&size, "height")?, side(&size, "width")?],
            None => square(source, "size")?.unwrap_or(tile),
        };
        let tiles = |key: &str, default: u32| {
            source.size_up_to(key, Some(default as usize), MOST_TILES).map(|tiles| tiles as u32)
        };
        let (least, most) = (tiles("min_patches", least)?, tiles("max_patches", most)?);
        return Ok(Size::Canvas { tile, cut: source.flag("crop_to_patches", false)?, least, most });
    }
    if let Size::Pixels { least, most, merge, patch } = class.size {
        let area = |source: &Source<'_>, key: &str, default: u64| {
            source.size_up_to(key, Some(default as usize), MOST * MOST).map(|pixels| pixels as u64)
        };
        let [least, most] = match sizes(source, "size") {
            Some(size) if size.has("shortest_edge") && size.has("longest_edge") => {
                [area(&size, "shortest_edge", least)?, area(&size, "longest_edge", most)?]
            }
            None if !source.has("size") => [least, most],
            _ => return Err(source.mismatch("size", "{shortest_edge, longest_edge}")),
        };
        // Older names of the keys. They take precedence over the newer ones.
        let (least, most) = (area(source, "min_pixels", least)?, area(source, "max_pixels", most)?);
        let merge = source.size_up_to("merge_size", Some(merge as usize), 64)? as u32;
        if least > most {
            return Err(if source.has("min_pixels") {
                source.mismatch("min_pixels", &format!("at most {most}, the largest number of pixels of an image"))
            } else {
                source.mismatch("size", "no more pixels for shortest_edge than for longest_edge")
            });
        }
        let patch = source.size_up_to("patch_size", Some(patch as usize), MOST)? as u32;
        return Ok(Size::Pixels { least, most, merge, patch });
    }
    let Some(found) = sizes(source, "size") else {
        return match (source.get("size"), class.size) {
            (None, default) => Ok(default),
            (Some(Value::Array(_)), default) => Ok(square(source, "size")?.map_or(default, Size::Exact)),
            (Some(_), Size::ShortestEdge(_)) => side(source, "size").map(Size::ShortestEdge),
            // A single number means the shorter side for this class, although its default is a square.
            (Some(_), _) if class.name == "SiglipImageProcessor" => side(source, "size").map(Size::ShortestEdge),
            (Some(_), _) => side(source, "size").map(|side| Size::Exact([side; 2])),
        };
    };
    match (found.has("shortest_edge"), found.has("longest_edge")) {
        (true, false) => side(&found, "shortest_edge").map(Size::ShortestEdge),
        (false, false) => Ok(Size::Exact([side(&found, "height")?, side(&found, "width")?])),
        _ => Err(source.mismatch("size", "{height, width} or {shortest_edge}")),
    }
}

/// The largest sides of `PixtralImageProcessor`, and the side of its patches, which must be square.
fn within(source: &Source<'_>, most: [u32; 2], unit: u32) -> Result<Size> {
    let most = match sizes(source, "size") {
        Some(size) if size.has("longest_edge") => [side(&size, "longest_edge")?; 2],
        Some(size) => [side(&size, "height")?, side(&size, "width")?],
        None if source.has("size") => [side(source, "size")?; 2],
        None => most,
    };
    let unit = match sizes(source, "patch_size") {
        Some(patch) => {
            let [height, width] = [side(&patch, "height")?, side(&patch, "width")?];
            if height != width {
                return Err(source.mismatch("patch_size", "square patches"));
            }
            height
        }
        None => source.size_up_to("patch_size", Some(unit as usize), MOST)? as u32,
    };
    Ok(Size::Within { most, unit })
}

fn crop(source: &Source<'_>) -> Result<[u32; 2]> {
    if source.is_null("crop_size") {
        return Err(source.mismatch("crop_size", "a size"));
    }
    match (sizes(source, "crop_size"), source.get("crop_size")) {
        (Some(size), _) => Ok([side(&size, "height")?, side(&size, "width")?]),
        (None, None) => Ok([224; 2]),
        (None, Some(_)) => side(source, "crop_size").map(|side| [side; 2]),
    }
}
