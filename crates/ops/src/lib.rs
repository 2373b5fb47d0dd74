//! The operations of a decoder, each with its forward and its backward, on panels of tokens.
//!
//! Every operation has a fast version, written once over [`simd::Simd`], and in its tests a plain reference in f64. A
//! test compares both at every SIMD level on odd sizes.
#![allow(clippy::inline_always, reason = "a kernel must be inlined into the function that enables its instructions")]
pub mod attention;
pub mod best;
pub mod blocks;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod floats;
pub mod gain;
pub mod gated_mlp;
pub mod gemm;
pub mod loss;
pub mod low_rank;
pub mod narrow;
pub mod noise;
pub mod norm;
pub mod panel;
pub mod par;
pub mod peak;
pub mod quant;
pub mod rope;
pub mod route;
pub mod simd;
pub mod softcap;
pub mod spans;
pub mod testing;
