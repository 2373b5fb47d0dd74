//! What `PixtralProcessor` reads from `processor_config.json`.
use std::path::Path;

use crate::hf_json::{Source, read_text};
use tunesmith_base::error::Result;

/// The tokens after each line of an image's rows, and after the last line.
pub const PIXTRAL_TOKENS: [&str; 2] = ["[IMG_BREAK]", "[IMG_END]"];

/// The number of pixels of which an image's sides become multiples: the side of the square of patches that becomes one
/// row. It takes precedence over `preprocessor_config.json`. `None` if the folder has no `processor_config.json`.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: the file names other tokens than [`PIXTRAL_TOKENS`], or a size is not a number.
pub(super) fn unit(dir: &Path, most: usize) -> Result<Option<u32>> {
    let path = dir.join("processor_config.json");
    let Some(text) = read_text(&path)? else { return Ok(None) };
    let source = Source::parse(&text, &path)?;
    for (key, token) in ["image_break_token", "image_end_token"].into_iter().zip(PIXTRAL_TOKENS) {
        if source.text(key)?.is_some_and(|found| found != token) {
            return Err(source.mismatch(key, &format!("{token:?}")));
        }
    }
    let patch = source.size_up_to("patch_size", Some(16), most)?;
    let merged = source.size_up_to("spatial_merge_size", Some(1), 64)?;
    Ok(Some((patch * merged) as u32))
}
