//! Exports trained models: merges adapters into a folder ([`merge`]), blends adapters ([`blend`]), and writes a file
//! for llama.cpp ([`gguf`]) and a model card ([`card`]).
pub mod blend;
pub mod card;
pub mod folder;
pub mod gguf;
pub mod merge;
pub mod requantize;
