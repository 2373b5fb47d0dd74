//! Which tokens stand for an image in the text of a chat.

/// How a chat shows pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChatImages {
    /// The token that stands once for each row of a picture.
    pub token: u32,
    /// The tokens and the text that stand around the rows of a picture.
    pub form: ChatForm,
}

/// What stands around the rows of a picture, as the processor of Transformers writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatForm {
    /// Nothing: LLaVA, `PaliGemma`, and pairs.
    Bare,
    /// Empty lines, a token that begins a picture, and one that ends it. Templates write the first one.
    Gemma3 {
        /// The token before the rows.
        begin: u32,
        /// The token behind the rows.
        end: u32,
    },
    /// A token that begins a picture, and one that ends it (Gemma 4).
    Gemma4 {
        /// The token before the rows.
        begin: u32,
        /// The token behind the rows.
        end: u32,
    },
    /// Tokens with the row and column of each tile, a line for each row of tiles, and the whole picture behind them.
    Idefics3,
    /// Nothing. A picture that is alone in its row is cut at its own shape, others are shown as a whole (LLaVA-OneVision).
    AnyRes,
    /// `[IMG_BREAK]` behind each line of rows, and `[IMG_END]` behind the last one (Pixtral, Mistral 3).
    Pixtral,
    /// `<img>` before the rows and `</img>` behind them (`InternVL`).
    InternVl,
}
