//! # tunesmith: fine-tuning of large language models, one Rust binary
//!
//! This page is the architecture guide. The layers are crates of one workspace, and the compiler keeps them apart. A crate depends
//! only on crates above it in this table:
//!
//! ```text
//! crates/       owns
//! base          errors and exit codes, files, memory and its budget, signals, the registry
//! config        typed settings: YAML, includes, environment, KEY=VALUE overrides; Hugging Face config.json, DeepSpeed and Accelerate files
//! hub           models and data sets of the Hugging Face Hub: names, cache, transfers
//! import        configurations of other toolkits, turned into ours
//! vision        images: decoding and preprocessing
//! data          sources, chat templates, loss masks, packing, sampler state
//! cpu-slice     access to numbers on the CPU as a slice, for the crates with kernels
//! device        where tensors are (CPU, NVIDIA GPU, or meta: counted and not computed), their buffers; CUDA's libraries
//! comm          the trait Collectives; engines single, threads, Gloo, NCCL; launchers' environment, rendezvous
//! ops           kernels, forward and backward side by side: reference, portable, AVX2, AVX-512, NEON, CUDA
//! plan          batch arithmetic, learning rates, predictions of memory and time
//! optim         optimizers as pure updates of tensors, schedules, clipping
//! model         decoder segments from parts (norms, attention, MLP or experts), weights, adapters
//! checkpoint    atomic state, stamp, PEFT adapters
//! eval          generation (greedy, sampling, beams), metrics
//! export        merged models, blends of adapters, GGUF, model cards
//! telemetry     metrics, TensorBoard, the report, progress, what the machine has
//! parallel      gradients summed over ranks; optimizer state, gradients or weights sharded among them (DDP, ZeRO, FSDP)
//! train         from a configuration to a RunPlan; the loop; one step on one screen; batch sizes by measured memory
//! bench         benchmarks, and the measured rates that plans use
//! src/cmd       a file or folder per subcommand, and their helpers; only `cmd` and `main` print
//! ```
//!
//! ## The engine
//!
//! A model is a list of **segments** (embedding, block 0..L-1, head). A segment has `forward(x) -> (y, saved)` and
//! `backward(saved, dy) -> dx`, composed by hand from [`ops`] that come in the same pairs; there is no tape. Weights
//! are arrays in a device's memory. Activations are [`ops::activation::Activation`]s: on the CPU, panels of 16 tokens
//! in memory from a pool. Batches are padding-free: a flat token stream with `cu_seqlens`. A thread shares its work with
//! others inside [`ops::par::within`], where every command runs, and computes alone elsewhere.
#![warn(missing_docs)]

pub mod cmd;

pub use tunesmith_base::{Error, Kind, Result, error, files, memory, registry, signals, threads, words};
pub use tunesmith_bench as bench;
pub use tunesmith_checkpoint as checkpoint;
pub use tunesmith_comm as comm;
pub use tunesmith_config as config;
pub use tunesmith_data as data;
pub use tunesmith_device as device;
pub use tunesmith_eval as eval;
pub use tunesmith_export as export;
pub use tunesmith_hub as hub;
pub use tunesmith_import as import;
pub use tunesmith_model as model;
pub use tunesmith_ops as ops;
pub use tunesmith_optim as optim;
pub use tunesmith_parallel as parallel;
pub use tunesmith_plan as plan;
pub use tunesmith_telemetry as telemetry;
pub use tunesmith_train as train;
pub use tunesmith_vision as vision;
