//! What stands for a picture in a chat, as the processors of Transformers write it.
use std::fmt::Write as _;

use tunesmith_config::vision::PIXTRAL_TOKENS;

/// The rows that a picture takes of the decoder's input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PictureRows {
    /// Rows of the decoder for each tile.
    pub tiles: Vec<usize>,
    /// Rows and columns of tiles, if the picture is cut; the whole picture is one more tile behind them. With crops beside it, the
    /// whole picture is the first tile.
    pub split: Option<(usize, usize)>,
    /// Rows of the decoder in a line of the first tile.
    pub columns: usize,
}

/// The text of `Gemma3Processor` for a picture, and for its crops behind it.
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
