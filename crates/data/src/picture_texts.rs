//! The text that stands for a picture in a chat: image tokens and what is around them, exactly as the processors of
//! Transformers write them.
use std::fmt::Write as _;

use tunesmith_config::vision::PIXTRAL_TOKENS;

/// How many rows of the decoder's input a picture takes, and how they are arranged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PictureRows {
    /// Rows of the decoder's input for each tile.
    pub tiles: Vec<usize>,
    /// How many rows and columns of tiles the picture is cut into; `None` if it is not cut. The whole picture is one
    /// more tile after these. With crops (`pan_and_scan`), the whole picture is the first tile, and the crops follow.
    pub split: Option<(usize, usize)>,
    /// How many rows of the decoder's input make one line of the first tile.
    pub columns: usize,
}

/// The text of `Gemma3Processor` for a picture, followed by its crops if it has any.
pub(super) fn gemma3(rows: &PictureRows, image: &str, [begin, end]: [&str; 2]) -> String {
    let of_tile = |rows: &usize| format!("\n\n{begin}{}{end}\n\n", image.repeat(*rows));
    let mut tiles = rows.tiles.iter().map(of_tile);
    let whole = tiles.next().unwrap_or_default();
    let crops: Vec<String> = tiles.collect();
    if crops.is_empty() {
        return whole;
    }
    let crops = crops.join(" ");
    format!("Here is the original image {whole} and here are some crops to help you see better {crops}")
}

/// The text of `PixtralProcessor` for a picture.
pub(super) fn pixtral(rows: &PictureRows, image: &str) -> String {
    let [line_end, end] = PIXTRAL_TOKENS;
    let lines = rows.tiles.iter().sum::<usize>().checked_div(rows.columns).unwrap_or(0);
    let text = vec![image.repeat(rows.columns); lines].join(line_end);
    text + end
}

/// The text of `Idefics3Processor` for a picture.
pub(super) fn idefics3(rows: &PictureRows, image: &str) -> String {
    const AROUND: &str = "<fake_token_around_image>";
    const WHOLE: &str = "<global-img>";
    let mut tiles = rows.tiles.iter();
    let mut next = || image.repeat(tiles.next().copied().unwrap_or(0));
    let mut text = String::new();
    if let Some((down, across)) = rows.split {
        for row in 1..=down {
            for column in 1..=across {
                text += AROUND;
                let _ = write!(text, "<row_{row}_col_{column}>"); // a String never fails
                text += &next();
            }
            text.push('\n');
        }
        text.push('\n');
    }
    text + AROUND + WHOLE + &next() + AROUND
}
