//! The image processors of Transformers that are known here: what sizes each gives pictures, and what its class assumes where a key is
//! absent.

/// The size that a picture gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// The picture keeps its size.
    Kept,
    /// `[height, width]`, whatever its shape.
    Exact([u32; 2]),
    /// The shorter side is so long; the other one in proportion.
    ShortestEdge(u32),
    /// The longer side is first made so long; the picture is then cut into square tiles, and shown once more as a whole in the size of
    /// a tile (Idefics 3, `SmolVLM`).
    Tiles {
        /// The longer side before it is cut.
        longest_edge: u32,
        /// The side of a tile.
        tile: u32,
        /// Whether it is cut; else it is shown as a whole alone.
        split: bool,
    },
    /// The picture is resized to a grid of tiles whose shape is nearest to its own, cut, and shown once more as a whole in the size of a
    /// tile (`InternVL`).
    Canvas {
        /// Height and width of a tile.
        tile: [u32; 2],
        /// Whether it is cut; else it gets the size of a tile.
        cut: bool,
        /// The fewest tiles of a picture.
        least: u32,
        /// The most tiles of a picture.
        most: u32,
    },
    /// The picture is shown as a whole in the size of a tile. Where it is alone in its row, it is also resized within one of
    /// [`grids`](super::Processing::grids), put in its middle, and cut into square tiles (LLaVA-OneVision).
    AnyRes {
        /// The side of a tile.
        tile: u32,
    },
    /// Sides about in proportion and multiples of a patch, as large as so many patches allow (SigLIP 2 NaFlex).
    MostPatches {
        /// The most patches of a picture.
        most: u32,
        /// The side of a patch in pixels.
        patch: u32,
    },
    /// The picture is made smaller until its sides are at most so long. They then become multiples of `unit` pixels (Pixtral).
    Within {
        /// The most pixels of its height and of its width.
        most: [u32; 2],
        /// Pixels of a side that become one row of the decoder, and a column.
        unit: u32,
    },
    /// Sides about in proportion and multiples of `merge` patches, as large as so many rows of the decoder allow (Gemma 4).
    MostRows {
        /// The most rows of the decoder that a picture takes.
        most: u32,
        /// Patches of a side that become one row of the decoder.
        merge: u32,
        /// The side of a patch in pixels.
        patch: u32,
    },
    /// Sides in proportion and multiples of `merge` patches, with so many pixels (Qwen-VL).
    Pixels {
        /// The fewest pixels of a picture.
        least: u64,
        /// The most pixels of a picture.
        most: u64,
        /// Patches of a side that become one row of the decoder.
        merge: u32,
        /// The side of a patch in pixels.
        patch: u32,
    },
}

/// A filter of resizing, by the numbers that Pillow gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resample {
    /// The nearest pixel.
    Nearest,
    /// A triangle.
    Bilinear,
    /// A cubic with the parameter -0.5.
    Bicubic,
    /// The sinc function under a window of three.
    Lanczos,
}

/// What a class assumes where a key is absent.
pub(super) struct Class {
    /// Without `Fast` or `Pil` at its end.
    pub(super) name: &'static str,
    /// An older name of the class, or empty.
    pub(super) older: &'static str,
    pub(super) size: Size,
    pub(super) resample: Resample,
    pub(super) crops: bool,
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
        crops: true,
        normal: OPENAI,
    },
    Class {
        name: "CLIPImageProcessor",
        older: "CLIPFeatureExtractor",
        size: Size::ShortestEdge(224),
        resample: Resample::Bicubic,
        crops: true,
        normal: OPENAI,
    },
    Class {
        name: "Gemma3ImageProcessor",
        older: "",
        size: SQUARE,
        resample: Resample::Bilinear,
        crops: false,
        normal: HALF,
    },
    Class {
        name: "Gemma4ImageProcessor",
        older: "",
        size: Size::MostRows { most: 280, merge: 3, patch: 16 },
        resample: Resample::Bicubic,
        crops: false,
        normal: [[0.0; 3], [1.0; 3]],
    },
    Class {
        name: "GotOcr2ImageProcessor",
        older: "",
        size: Size::Canvas { tile: [384; 2], cut: false, least: 1, most: 12 },
        resample: Resample::Bicubic,
        crops: false,
        normal: OPENAI,
    },
    Class {
        name: "Idefics3ImageProcessor",
        older: "",
        size: Size::Tiles { longest_edge: 4 * 364, tile: 364, split: true },
        resample: Resample::Lanczos,
        crops: false,
        normal: HALF,
    },
    Class {
        name: "LlavaImageProcessor",
        older: "",
        size: Size::ShortestEdge(224),
        resample: Resample::Bicubic,
        crops: true,
        normal: OPENAI,
    },
    Class {
        name: "LlavaOnevisionImageProcessor",
        older: "",
        size: Size::AnyRes { tile: 384 },
        resample: Resample::Bicubic,
        crops: false,
        normal: OPENAI,
    },
    Class {
        name: "PixtralImageProcessor",
        older: "",
        size: Size::Within { most: [1024; 2], unit: 16 },
        resample: Resample::Bicubic,
        crops: false,
        normal: OPENAI,
    },
    Class {
        name: "Qwen2VLImageProcessor",
        older: "",
        size: Size::Pixels { least: 56 * 56, most: 28 * 28 * 1280, merge: 2, patch: 14 },
        resample: Resample::Bicubic,
        crops: false,
        normal: OPENAI,
    },
    Class {
        name: "Siglip2ImageProcessor",
        older: "",
        size: Size::MostPatches { most: 256, patch: 16 },
        resample: Resample::Bilinear,
        crops: false,
        normal: HALF,
    },
    Class {
        name: "SiglipImageProcessor",
        older: "",
        size: SQUARE,
        resample: Resample::Bicubic,
        crops: false,
        normal: HALF,
    },
    Class {
        name: "SmolVLMImageProcessor",
        older: "",
        size: Size::Tiles { longest_edge: 4 * 364, tile: 364, split: true },
        resample: Resample::Lanczos,
        crops: false,
        normal: HALF,
    },
    Class {
        name: "ViTImageProcessor",
        older: "ViTFeatureExtractor",
        size: SQUARE,
        resample: Resample::Bilinear,
        crops: false,
        normal: HALF,
    },
];
