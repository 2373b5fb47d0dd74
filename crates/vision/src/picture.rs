//! Decodes image files to pixels. The size that a file claims is checked before memory is allocated for it.
use std::borrow::Cow;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::codecs::png::PngEncoder;
use image::metadata::Orientation;
use image::{
    ColorType, DynamicImage, ExtendedColorType, ImageDecoder, ImageEncoder as _, ImageFormat, ImageReader, Limits,
    RgbImage,
};
use tunesmith_base::error::{Error, Result};
use tunesmith_config::vision::{Backend, Resample};
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

use crate::Picture;
use crate::orientation::{self, png_chunks};
use crate::resize::resize;

/// The most pixels of a picture: Pillow's `MAX_IMAGE_PIXELS`, from which on it warns of a decompression bomb.
pub const MAX_PIXELS: u64 = 89_478_485;
/// The most bytes that a decoder may allocate at a time: four channels of 16 bits.
const MAX_ALLOC: u64 = MAX_PIXELS * 8;
/// The largest image file that is read, in bytes.
pub const MAX_BYTES: u64 = 256 << 20;

/// Whether bytes begin like a file that [`Picture::decode`] can read.
pub fn is_picture(bytes: &[u8]) -> bool {
    const HEADS: [&[u8]; 6] = [b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*"];
    let webp = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP");
    webp || HEADS.iter().any(|head| bytes.starts_with(head))
}

impl Picture {
    /// Decodes a JPEG, PNG, WebP, GIF, BMP or TIFF file. The orientation of its EXIF or XMP data is applied, transparent pixels
    /// are put on white, 16-bit values become 8-bit ones, and of an animation the first frame is taken.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the bytes are no such file, are cut off, are a CMYK JPEG, or have more than [`MAX_PIXELS`]
    /// pixels.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if is_cut_off(bytes) {
            return Err(Error::data("the image is cut off"));
        }
        isolated(|| {
            let (mut picture, orientation) = if is_jpeg(bytes) { jpeg(bytes)? } else { other(bytes)? };
            picture.apply_orientation(orientation);
            let rgb = on_white(picture);
            Ok(Self { width: rgb.width(), height: rgb.height(), rgb: rgb.into_raw() })
        })
    }

    /// A PNG file of the picture, scaled down so that no side is longer than `side` pixels.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the encoder fails.
    pub fn thumbnail(&self, side: u32) -> Result<Vec<u8>> {
        let longest = self.width.max(self.height);
        let scaled = |length: u32| (u64::from(length) * u64::from(side) / u64::from(longest)).max(1) as u32;
        let small = if longest > side {
            resize(self, scaled(self.width), scaled(self.height), Resample::Bilinear, Backend::Pil)
        } else {
            Cow::Borrowed(self)
        };
        let mut png = Vec::new();
        PngEncoder::new(&mut png)
            .write_image(&small.rgb, small.width, small.height, ExtendedColorType::Rgb8)
            .map_err(|error| Error::data("a small copy cannot be made").caused_by(error))?;
        Ok(png)
    }

    /// The width and height that [`Self::decode`] would return, read from the header of a file alone.
    ///
    /// # Errors
    /// As [`Self::decode`], except that damage between the header and the end is not noticed.
    pub fn size(bytes: &[u8]) -> Result<(u32, u32)> {
        if is_cut_off(bytes) {
            return Err(Error::data("the image is cut off"));
        }
        isolated(|| {
            let (width, height, orientation) = if is_jpeg(bytes) {
                let (decoder, width, height) = jpeg_header(bytes)?;
                (width, height, jpeg_orientation(&decoder))
            } else {
                let mut decoder = reader(bytes)?.into_decoder().map_err(unreadable)?;
                let (width, height) = decoder.dimensions();
                check(width.into(), height.into())?;
                (width, height, orientation_of(bytes, &mut decoder))
            };
            Ok(if turns(orientation) { (height, width) } else { (width, height) })
        })
    }
}

/// Runs a decoder, and turns a panic into an error.
fn isolated<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(Error::data("the image's decoder failed")))
}

fn unreadable(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::data("the image cannot be read").caused_by(error)
}

/// Whether a JPEG, PNG or WebP file ends too early, judged without decoding it.
fn is_cut_off(bytes: &[u8]) -> bool {
    if is_jpeg(bytes) {
        return !reaches_end(bytes);
    }
    if bytes.starts_with(b"RIFF") {
        let size = bytes.get(4..8).and_then(|size| size.first_chunk().copied());
        return size.is_none_or(|size| u64::from(u32::from_le_bytes(size)) + 8 > bytes.len() as u64);
    }
    is_png(bytes) && !png_chunks(bytes).any(|(name, _)| name == b"IEND")
}

/// Whether a JPEG file has its end marker. What lies behind it, such as the film of a motion photo, is not looked at.
fn reaches_end(bytes: &[u8]) -> bool {
    // Behind the marker of the start.
    let mut at = 2;
    while let Some(offset) = bytes.get(at..).and_then(|rest| rest.iter().position(|&byte| byte == 0xff)) {
        at += offset + 1;
        match bytes.get(at) {
            Some(0xd9) => return true,
            // In a scan, 0 stands behind a byte 0xff that is no marker. Fill bytes and restarts have no length.
            Some(0xff) => {}
            Some(0x00 | 0x01 | 0xd0..=0xd8) => at += 1,
            _ => {
                let Some(&[high, low]) = bytes.get(at + 1..at + 3).and_then(|length| length.first_chunk()) else {
                    return false;
                };
                at += 1 + usize::from(u16::from_be_bytes([high, low]));
            }
        }
    }
    false
}

fn check(width: u64, height: u64) -> Result<()> {
    if width == 0 || height == 0 {
        return Err(Error::data("the image has no pixels"));
    }
    if width.saturating_mul(height) > MAX_PIXELS {
        return Err(Error::data(format!("the image has {width} x {height} pixels, at most {MAX_PIXELS} are read"))
            .hint("make it smaller: encoders see a few hundred pixels a side"));
    }
    Ok(())
}

fn is_png(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x89PNG\r\n\x1a\n")
}

const fn is_jpeg(bytes: &[u8]) -> bool {
    matches!(bytes, [0xff, 0xd8, 0xff, ..])
}

/// Whether an orientation swaps width and height.
const fn turns(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

type Jpeg<'a> = JpegDecoder<ZCursor<&'a [u8]>>;

fn jpeg_header(bytes: &[u8]) -> Result<(Jpeg<'_>, u32, u32)> {
    let side = u16::MAX as usize;
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(side)
        .set_max_height(side)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(unreadable)?;
    let (width, height) = decoder.dimensions().ok_or_else(|| Error::data("the image has no header"))?;
    check(width as u64, height as u64)?;
    if matches!(decoder.input_colorspace(), Some(ColorSpace::CMYK | ColorSpace::YCCK)) {
        return Err(Error::data("a CMYK JPEG, expected RGB or grey").hint("convert it: its colors need a profile"));
    }
    Ok((decoder, width as u32, height as u32))
}

fn jpeg_orientation(decoder: &Jpeg<'_>) -> Orientation {
    orientation::orientation(decoder.exif().map(Vec::as_slice), decoder.xmp().map(Vec::as_slice))
}

fn jpeg(bytes: &[u8]) -> Result<(DynamicImage, Orientation)> {
    let (mut decoder, width, height) = jpeg_header(bytes)?;
    let rgb = decoder.decode().map_err(unreadable)?;
    let picture = RgbImage::from_raw(width, height, rgb).ok_or_else(|| Error::data("the image is cut off"))?;
    Ok((picture.into(), jpeg_orientation(&decoder)))
}

fn reader(bytes: &[u8]) -> Result<ImageReader<Cursor<&[u8]>>> {
    const KNOWN: [ImageFormat; 5] =
        [ImageFormat::Png, ImageFormat::WebP, ImageFormat::Gif, ImageFormat::Bmp, ImageFormat::Tiff];
    let wrong = || {
        let found = if bytes.is_empty() { "an empty file" } else { "no image" };
        Error::data(format!("{found}, expected a JPEG, PNG, WebP, GIF, BMP or TIFF file"))
    };
    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(unreadable)?;
    reader.format().filter(|format| KNOWN.contains(format)).ok_or_else(wrong)?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(MAX_ALLOC);
    reader.limits(limits);
    Ok(reader)
}

fn other(bytes: &[u8]) -> Result<(DynamicImage, Orientation)> {
    let mut decoder = reader(bytes)?.into_decoder().map_err(unreadable)?;
    let (width, height) = decoder.dimensions();
    check(width.into(), height.into())?;
    let orientation = orientation_of(bytes, &mut decoder);
    Ok((DynamicImage::from_decoder(decoder).map_err(unreadable)?, orientation))
}

/// The orientation of a file that is no JPEG.
fn orientation_of(bytes: &[u8], decoder: &mut impl ImageDecoder) -> Orientation {
    if is_png(bytes) {
        return orientation::of_png(bytes);
    }
    // Pillow reads none of these two.
    if bytes.starts_with(b"GIF8") || bytes.starts_with(b"BM") {
        return Orientation::NoTransforms;
    }
    // A TIFF file has the tag itself, and no EXIF data around it.
    match decoder.orientation() {
        Ok(Orientation::NoTransforms) | Err(_) => {
            let (exif, xmp) = (decoder.exif_metadata().ok().flatten(), decoder.xmp_metadata().ok().flatten());
            orientation::orientation(exif.as_deref(), xmp.as_deref())
        }
        Ok(orientation) => orientation,
    }
}

/// Puts a picture with transparency on white, as Pillow's `alpha_composite` does.
fn on_white(picture: DynamicImage) -> RgbImage {
    let alpha = matches!(picture.color(), ColorType::La8 | ColorType::La16 | ColorType::Rgba8 | ColorType::Rgba16);
    if !alpha && picture.color() != ColorType::Rgba32F {
        return picture.into_rgb8();
    }
    let rgba = picture.into_rgba8();
    let (width, height) = rgba.dimensions();
    let over = |[red, green, blue, alpha]: [u8; 4]| {
        let alpha = u32::from(alpha);
        // The backdrop is opaque, so both together are: 255 * 255.
        let own = alpha * 255 * 255 * 128 / (alpha * 255 + 255 * (255 - alpha));
        let rest = 255 * 128 - own;
        [red, green, blue].map(|value| {
            let sum = u32::from(value) * own + 255 * rest + (0x80 << 7);
            ((((sum >> 8) + sum) >> 8) >> 7) as u8
        })
    };
    let pixels = rgba.pixels().flat_map(|pixel| over(pixel.0)).collect();
    RgbImage::from_raw(width, height, pixels).unwrap_or_default()
}
