//! A trained model in the form in which it will serve: merged into one folder ([`merge`]), several adapters blended into
//! one ([`blend`]), a file for llama.cpp ([`gguf`]), and what a reader should know of it ([`card`]).
pub mod blend;
pub mod card;
pub mod folder;
pub mod gguf;
pub mod merge;
pub mod requantize;
