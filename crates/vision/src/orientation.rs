//! How a picture is to be turned before it is shown. Cameras store pixels as the sensor lies, and note the orientation in
//! EXIF data; some programs note it in XMP data instead.
//!
//! What counts is what Pillow's `ImageOps.exif_transpose` reads, since Transformers calls that: the EXIF data of a file; in
//! a PNG file without any, a text `Raw profile type exif`, as `ImageMagick` writes it; and only if neither has an orientation,
//! XMP data.
use std::io::Read as _;

use flate2::read::ZlibDecoder;
use image::metadata::Orientation;

/// The first bytes of EXIF data in a JPEG file. Some programs keep them in other files too, even twice.
const EXIF_HEAD: &[u8] = b"Exif\0\0";
/// The most bytes of an unpacked text of a PNG file: Pillow's `MAX_TEXT_CHUNK`.
const MAX_TEXT: u64 = 1 << 20;
/// The name of a PNG file's text with XMP data.
const XMP_NAME: &[u8] = b"XML:com.adobe.xmp";

/// The orientation that EXIF data or, without one there, XMP data names.
pub fn orientation(exif: Option<&[u8]>, xmp: Option<&[u8]>) -> Orientation {
    let of_exif = exif.and_then(|exif| {
        let mut data = exif;
        for _ in 0..2 {
            data = data.strip_prefix(EXIF_HEAD).unwrap_or(data);
        }
        Orientation::from_exif_chunk(data)
    });
    of_exif.or_else(|| xmp.and_then(of_xmp)).unwrap_or(Orientation::NoTransforms)
}

/// The orientation in XMP data: the first digit behind `tiff:Orientation="` or `tiff:Orientation>`.
fn of_xmp(xmp: &[u8]) -> Option<Orientation> {
    const NAME: &[u8] = b"tiff:Orientation";
    let behind = |at: usize| {
        let rest = &xmp[at + NAME.len()..];
        rest.strip_prefix(b"=\"").or_else(|| rest.strip_prefix(b">"))?.first().filter(|byte| byte.is_ascii_digit())
    };
    let mut places = xmp.windows(NAME.len()).enumerate().filter(|(_, window)| *window == NAME);
    let digit = places.find_map(|(at, _)| behind(at))?;
    Orientation::from_exif(digit - b'0')
}

/// The orientation of a PNG file. Its data may stand before or behind the pixels.
pub fn of_png(bytes: &[u8]) -> Orientation {
    let (mut exif, mut profile, mut xmp) = (None, None, None);
    for (name, data) in png_chunks(bytes).take_while(|(name, _)| *name != b"IEND") {
        match name {
            b"eXIf" => exif = Some(data.to_vec()),
            b"tEXt" | b"zTXt" => profile = raw_profile(name, data).or(profile),
            b"iTXt" => xmp = international(data).or(xmp),
            _ => {}
        }
    }
    orientation(exif.or(profile).as_deref(), xmp.as_deref())
}

/// The chunks of a PNG file: the name and the data of each.
pub fn png_chunks(bytes: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let mut rest = bytes.get(8..).unwrap_or_default();
    std::iter::from_fn(move || {
        let length = u32::from_be_bytes(*rest.first_chunk()?) as usize;
        let (name, data) = (rest.get(4..8)?, rest.get(8..length.checked_add(8)?)?);
        // A checksum ends it.
        rest = rest.get(length.checked_add(12)?..)?;
        Some((name, data))
    })
}

/// EXIF data in hexadecimal digits, as `ImageMagick` writes it: behind three ends of lines.
fn raw_profile(chunk: &[u8], data: &[u8]) -> Option<Vec<u8>> {
    let value = data.strip_prefix(b"Raw profile type exif\0")?;
    let text = if chunk == b"zTXt" { unpacked(value.strip_prefix(b"\0")?)? } else { value.to_vec() };
    let digits: Vec<u8> = text.split(|&byte| byte == b'\n').skip(3).flatten().copied().collect();
    let value = |digit: u8| char::from(digit).to_digit(16);
    let pairs = digits.chunks_exact(2).map(|pair| Some((value(pair[0])? << 4 | value(pair[1])?) as u8));
    pairs.collect()
}

/// XMP data of an international text: a name, whether and how it is packed, a language, a translated name, and the text.
fn international(data: &[u8]) -> Option<Vec<u8>> {
    let [packed, method, rest @ ..] = data.strip_prefix(XMP_NAME)?.strip_prefix(b"\0")? else { return None };
    let text = rest.splitn(3, |&byte| byte == 0).nth(2)?;
    match (packed, method) {
        (0, _) => Some(text.to_vec()),
        (_, 0) => unpacked(text),
        _ => None,
    }
}

/// What zlib unpacks, if it is no larger than [`MAX_TEXT`].
fn unpacked(data: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    ZlibDecoder::new(data).take(MAX_TEXT + 1).read_to_end(&mut text).ok()?;
    (text.len() as u64 <= MAX_TEXT).then_some(text)
}
