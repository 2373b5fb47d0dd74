//! Checkpoints, and the adapters and model folders that a run leaves behind.
//!
//! - [`publish`] writes a folder completely or not at all, with a manifest of sizes and hashes.
//! - [`save`] and [`mod@load`] write and restore a run between two steps; [`background`] writes while training continues.
//! - [`stamp`] records what a checkpoint belongs to, [`state`] where the run stood. Resume compares both.
//! - [`peft`] and [`folder`] give the weights the form that PEFT and Transformers load.
//! - [`store`] finds, rotates and cleans up the checkpoints of an output directory; [`own_files`] protects files of others.
//! - [`loaded_adapter`] and [`stamp_check`] read an adapter back and check that it fits its base.
//!
//! ```text
//! checkpoint-000200/
//!   adapter_config.json  adapter_model.safetensors    LoRA: PEFT loads this folder
//!   config.json  model.safetensors  tokenizer.json …  full: Transformers loads this folder
//!   trained.safetensors                               freeze, or a pair: what is trained, without the rest
//!   optimizer.safetensors                             its state: NAME.exp_avg, NAME.exp_avg_sq, … of each tensor
//!   state.json                                        step, data position, best loss, counters, seeds
//!   backend.json                                      the stamp
//!   manifest.json                                     size and BLAKE3 of each of these, written last
//! ```
pub mod adapter_config;
mod adapter_file;
pub mod background;
mod beside;
pub mod encoders;
pub mod folder;
mod layout;
pub mod load;
pub mod loaded_adapter;
mod manifest;
mod older_formats;
pub mod own_files;
mod pair;
pub mod peft;
pub mod pissa;
pub mod publish;
pub mod save;
pub mod stamp;
pub mod stamp_check;
mod stamp_settings;
pub mod state;
pub mod store;
mod tensors;
pub mod untouched;
mod world;

pub use adapter_config::AdapterConfig;
pub use background::Background;
pub use layout::MANIFEST;
pub use load::{Checkpoint, load, open};
pub use manifest::{Hashed, Manifest, verify};
pub use save::{
    FILES, Retention, ShardedState, Snapshot, TRAINED, Weights, Written, clean_stale, elsewhere, save_on, write,
    write_pointers,
};
pub use stamp::Stamp;
pub use state::TrainState;
pub use store::{newest_complete, preflight};
pub use tensors::named;
