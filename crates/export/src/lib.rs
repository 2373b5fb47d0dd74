//! Exports trained models: merged into one folder ([`merge`]), blended adapters ([`blend`]), a file for llama.cpp ([`gguf`]),
//! with a model card ([`card`]).
pub mod blend;
pub mod card;
pub mod folder;
pub mod gguf;
pub mod merge;
mod pair;
pub mod requantize;
