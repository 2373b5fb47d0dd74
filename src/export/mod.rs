//! Layer 6: a trained model in the form in which it will serve: merged into one folder ([`merge`]), several adapters blended into
//! one ([`blend`]).
pub mod blend;
pub mod folder;
pub mod merge;
