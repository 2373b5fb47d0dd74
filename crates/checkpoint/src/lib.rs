//! Layer 5: runs that survive anything. A checkpoint is a folder that is there whole or not at all ([`atomic`]), says
//! what it belongs to ([`stamp`]) and where the run stood ([`state`]), and is at the same time what Hugging Face's
//! libraries load: a PEFT adapter ([`peft`]), or a model folder ([`folder`]). It is written while the steps go on
//! ([`background`]).
//!
//! ```text
//! checkpoint-000200/
//!   adapter_config.json  adapter_model.safetensors    LoRA: PEFT loads this folder
//!   config.json  model.safetensors  tokenizer.json …  full: Transformers loads this folder
//!   trained.safetensors                               freeze: what is trained, without the rest
//!   optimizer.safetensors                             its state: NAME.exp_avg, NAME.exp_avg_sq, … of each tensor
//!   state.json                                        step, data position, best loss, counters, seeds
//!   backend.json                                      the stamp
//!   manifest.json                                     size and BLAKE3 of each of these, written last
//! ```
pub mod adapter_config;
pub mod atomic;
pub mod background;
pub mod disk;
pub mod folder;
mod layout;
pub mod load;
pub mod loaded_adapter;
mod manifest;
mod older_formats;
pub mod own_files;
pub mod peft;
pub mod pissa;
pub mod save;
pub mod stamp;
pub mod stamp_check;
pub mod state;
pub mod store;
mod tensors;

pub use adapter_config::AdapterConfig;
pub use atomic::Published;
pub use background::Background;
pub use layout::MANIFEST;
pub use load::{Checkpoint, load, open};
pub use manifest::{Complete, Manifest, verify};
pub use save::{
    FILES, Keep, Shared, Snapshot, StateTensors, TRAINED, Weights, Written, clean_stale, elsewhere, point, save_on,
    write,
};
pub use stamp::Stamp;
pub use state::TrainState;
pub use store::{newest_complete, preflight};
pub use tensors::{NamedTensors, named};
