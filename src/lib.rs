//! # tunesmith: fine-tuning of large language models, one Rust binary
//!
//! This page is the architecture guide. Data flows one way, and each layer imports only from layers above it
//! in this table (a test, `tests/it/tidy.rs`, reads every `use crate::` line and holds it against the table):
//!
//! ```text
//! config -> plan -> data -> model -> step -> (collectives) -> optim -> checkpoint -> eval -> report
//!
//! layer  module        owns
//! 0      error         error kinds, hints, exit codes
//! 0      files         opening of regular files, outputs that are whole and replace no input, temporary names
//! 0      registry      what is registered by a line: optimizers, schedules, adapters, families, formats, forms of rows
//! 0      words         numbers with their nouns, as messages say them
//! 1      config        typed YAML schema, includes, overrides, Hugging Face config.json (each kind of adapter has its settings in
//!                      its own file, `model::adapters`: the one thing that config takes from a layer below it)
//! 1      memory        the counting allocator, the memory budget, what the machine has
//! 1      signals       SIGHUP, SIGINT and SIGTERM: who answers them, and how the process ends
//! 2      hub           models and data sets of the Hugging Face Hub: names, cache, downloads
//! 2      import        configurations of other toolkits, turned into ours
//! 2      plan          batch maths, the learning-rate table: pure functions
//! 3      data          sources, chat templates, label masks, packing, sampler state
//! 3      comm          World, the trait Collectives; engines single, threads, gloo; launchers' environment, the store
//! 3      ops           kernels, forward and backward side by side: reference, AVX2, AVX-512, portable
//! 4      model         decoder segments from parts (norms, attention, MLP or experts), weights loading, adapters
//! 4      optim         optimizers as pure updates of tensors, schedules, clipping
//! 5      checkpoint    atomic state, stamp, PEFT adapters
//! 5      eval          answers (greedy, sampling, beams), the measures of answers
//! 6      export        merged models, blends of adapters, GGUF, model cards
//! 6      train         ONE step on one screen; the loop; signals; metrics; the report
//! 7      cmd           one file a subcommand; only `cmd` and `main` print
//! ```
//!
//! ## The engine
//!
//! A model is a list of **segments** (embedding, block 0..L-1, head). A segment has
//! `forward(x) -> (y, saved)` and `backward(saved, dy) -> dx`, composed by hand from [`ops`] that come in the
//! same pairs; there is no tape. Weights are candle tensors; activations are [`ops::panel::Act`], a layout of
//! 16-token panels in an arena. Batches are padding-free: a flat token stream with `cu_seqlens`.
#![warn(missing_docs)]

pub mod cmd;

pub use tunesmith_base::{Error, Kind, Result, error, files, memory, registry, signals, words};
pub use tunesmith_checkpoint as checkpoint;
pub use tunesmith_comm as comm;
pub use tunesmith_config as config;
pub use tunesmith_data as data;
pub use tunesmith_eval as eval;
pub use tunesmith_export as export;
pub use tunesmith_hub as hub;
pub use tunesmith_import as import;
pub use tunesmith_model as model;
pub use tunesmith_ops as ops;
pub use tunesmith_optim as optim;
pub use tunesmith_plan as plan;
pub use tunesmith_train as train;
