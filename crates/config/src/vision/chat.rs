//! Which tokens and texts stand for an image in a chat.

/// How a chat shows images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChatImages {
    /// The token that stands for one row of an image. The text has as many of them as the image has rows.
    pub token: u32,
    /// What is written around these tokens.
    pub form: ChatForm,
}

/// What the processor of Transformers writes around the tokens of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatForm {
    /// Nothing: LLaVA, `PaliGemma`, and pairs.
    Bare,
    /// Empty lines, a token that begins an image, and one that ends it. Chat templates write only the first of these
    /// tokens.
    Gemma3 {
        /// The token before the rows.
        begin: u32,
        /// The token behind the rows.
        end: u32,
    },
    /// A token that begins an image, and one that ends it (Gemma 4).
    Gemma4 {
        /// The token before the rows.
        begin: u32,
        /// The token behind the rows.
        end: u32,
    },
    /// Texts with the row and column of each tile, a line break after each row of tiles, and the whole image last.
    Idefics3,
    /// Nothing. An image that is alone in its row is cut into a grid that fits its shape; others are shown only as a
    /// whole (LLaVA-OneVision).
    AnyRes,
    /// `[IMG_BREAK]` after each line of rows, and `[IMG_END]` after the last one (Pixtral, Mistral 3).
    Pixtral,
    /// `<img>` before the rows and `</img>` after them (`InternVL`).
    InternVl,
}
