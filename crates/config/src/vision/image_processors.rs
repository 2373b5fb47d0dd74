//! The image processors of Transformers that are supported: to which sizes each resizes images, and the defaults of its
//! class for absent keys.

/// The size to which an image is resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// The image is not resized.
    Kept,
    /// `[height, width]`, whatever the shape of the image.
    Exact([u32; 2]),
    /// The shorter side gets this length; the longer side follows in proportion.
    ShortestEdge(u32),
    /// The longer side is resized to a given length, and the image is cut into square tiles. The whole image, in the
    /// size of a tile, follows as a further tile (Idefics 3, `SmolVLM`).
    Tiles {
        /// The longer side before the image is cut.
        longest_edge: u32,
        /// The side of a tile.
        tile: u32,
        /// Whether the image is cut. Otherwise there is only the whole image as one tile.
        split: bool,
    },
    /// The image is resized to a grid of tiles whose shape is nearest to its own, and cut. The whole image, in the size
    /// of a tile, follows as a further tile (`InternVL`).
    Canvas {
        /// Height and width of a tile.
        tile: [u32; 2],
        /// Whether the image is cut. Otherwise it is resized to one tile.
        cut: bool,
        /// The fewest tiles of an image that is cut.
        least: u32,
        /// The most tiles of an image that is cut.
        most: u32,
    },
    /// The whole image, in the size of a tile, comes first. If it is the only image in its row, it is also resized to
    /// fit into one of the [`grids`](super::Processing::grids), centered there, and cut into square tiles
    /// (LLaVA-OneVision).
    AnyRes {
        /// The side of a tile.
        tile: u32,
    },
    /// The largest size that nearly keeps the proportions, with sides that are multiples of a patch, and with at most
    /// `most` patches (SigLIP 2 NaFlex).
    MostPatches {
        /// The most patches of an image.
        most: u32,
        /// The side of a patch in pixels.
        patch: u32,
    },
    /// A larger image is scaled down until its sides have at most these lengths. Then the sides are rounded up to
    /// multiples of `unit` pixels (Pixtral).
    Within {
        /// The largest height and width in pixels.
        most: [u32; 2],
        /// The side in pixels of a square that becomes one row of the decoder.
        unit: u32,
    },
    /// The largest size that nearly keeps the proportions, with sides that are multiples of `merge` patches, and with
    /// at most `most` rows of the decoder (Gemma 4).
    MostRows {
        /// The most rows of the decoder's input for an image.
        most: u32,
        /// How many patches a side of the square has that becomes one row of the decoder.
        merge: u32,
        /// The side of a patch in pixels.
        patch: u32,
    },
    /// A size that nearly keeps the proportions, with sides that are multiples of `merge` patches, and with a number of
    /// pixels between two bounds (Qwen-VL).
    Pixels {
        /// The fewest pixels of an image.
        least: u64,
        /// The most pixels of an image.
        most: u64,
        /// How many patches a side of the square has that becomes one row of the decoder.
        merge: u32,
        /// The side of a patch in pixels.
        patch: u32,
    },
}

/// The filter of a resize, by the numbers that Pillow gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resample {
    /// The nearest pixel.
    Nearest,
    /// A triangle filter (bilinear).
    Bilinear,
    /// A cubic filter with the parameter -0.5 (bicubic).
    Bicubic,
    /// The sinc function under a window of three.
    Lanczos,
}

/// The defaults of a class for absent keys.
pub(super) struct Class {
    /// The name without `Fast` or `Pil` at its end.
    pub(super) name: &'static str,
    /// An older name of the class, or empty.
    pub(super) older: &'static str,
    pub(super) size: Size,
    pub(super) resample: Resample,
    /// Whether it keeps the middle of a picture by default; `None` if it never does, whatever the file says.
    pub(super) crops: Option<bool>,
    pub(super) normal: [[f32; 3]; 2],
}

const HALF: [[f32; 3]; 2] = [[0.5; 3]; 2];
const OPENAI: [[f32; 3]; 2] = [[0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_54, 0.261_302_6, 0.275_777_1]];
const SQUARE: Size = Size::Exact([224; 2]);

/// What `max_soft_tokens` may be.
pub(super) const SOFT_TOKENS: [usize; 5] = [70, 140, 280, 560, 1120];

pub(super) const CLASSES: &[Class] = &[
    Class {
        name: "BitImageProcessor",
        older: "",
        size: Size::ShortestEdge(224),
        resample: Resample::Bicubic,
        crops: Some(true),
        normal: OPENAI,
    },
    Class {
        name: "CLIPImageProcessor",
        older: "CLIPFeatureExtractor",
        size: Size::ShortestEdge(224),
        resample: Resample::Bicubic,
        crops: Some(true),
        normal: OPENAI,
    },
    Class {
        name: "Gemma3ImageProcessor",
        older: "",
        size: SQUARE,
        resample: Resample::Bilinear,
        crops: None,
        normal: HALF,
    },
    Class {
        name: "Gemma4ImageProcessor",
        older: "",
        size: Size::MostRows { most: 280, merge: 3, patch: 16 },
        resample: Resample::Bicubic,
        crops: None,
        normal: [[0.0; 3], [1.0; 3]],
    },
    Class {
        name: "GotOcr2ImageProcessor",
        older: "",
        size: Size::Canvas { tile: [384; 2], cut: false, least: 1, most: 12 },
        resample: Resample::Bicubic,
        crops: None,
        normal: OPENAI,
    },
    Class {
        name: "Idefics3ImageProcessor",
        older: "",
        size: Size::Tiles { longest_edge: 4 * 364, tile: 364, split: true },
        resample: Resample::Lanczos,
        crops: None,
        normal: HALF,
    },
    Class {
        name: "LlavaImageProcessor",
        older: "",
        size: Size::ShortestEdge(224),
        resample: Resample::Bicubic,
        crops: Some(true),
        normal: OPENAI,
    },
    Class {
        name: "LlavaOnevisionImageProcessor",
        older: "",
        size: Size::AnyRes { tile: 384 },
        resample: Resample::Bicubic,
        crops: None,
        normal: OPENAI,
    },
    Class {
        name: "PixtralImageProcessor",
        older: "",
        size: Size::Within { most: [1024; 2], unit: 16 },
        resample: Resample::Bicubic,
        crops: None,
        normal: OPENAI,
    },
    Class {
        name: "Qwen2VLImageProcessor",
        older: "",
        size: Size::Pixels { least: 56 * 56, most: 28 * 28 * 1280, merge: 2, patch: 14 },
        resample: Resample::Bicubic,
        crops: None,
        normal: OPENAI,
    },
    Class {
        name: "Siglip2ImageProcessor",
        older: "",
        size: Size::MostPatches { most: 256, patch: 16 },
        resample: Resample::Bilinear,
        crops: None,
        normal: HALF,
    },
    Class {
        name: "SiglipImageProcessor",
        older: "",
        size: SQUARE,
        resample: Resample::Bicubic,
        crops: Some(false),
        normal: HALF,
    },
    Class {
        name: "SmolVLMImageProcessor",
        older: "",
        size: Size::Tiles { longest_edge: 4 * 364, tile: 364, split: true },
        resample: Resample::Lanczos,
        crops: None,
        normal: HALF,
    },
    Class {
        name: "ViTImageProcessor",
        older: "ViTFeatureExtractor",
        size: SQUARE,
        resample: Resample::Bilinear,
        crops: Some(false),
        normal: HALF,
    },
];
