//! Which embedding tables stay off the GPU with `train.offload_embedding`: in the host's memory for a GPU, and in the
//! model's files for the CPU.
use std::collections::BTreeSet;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::{Arch, EMBEDDING, PER_LAYER_EMBEDDING};
use tunesmith_config::{Config, Init};

/// The tables of token embeddings that stay on the host with `train.offload_embedding`. A table in `trained` does not
/// stay, nor does one that the head shares, or one of which rows are trained.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the key is set, and no table can stay.
pub fn tables(arch: &Arch, config: &Config, trained: &BTreeSet<String>) -> Result<Vec<String>> {
    if !config.train.offload_embedding {
        return Ok(Vec::new());
    }
    let own = (!arch.ties_head()).then_some(EMBEDDING);
    let tables = own.into_iter().chain(arch.per_layer.as_ref().map(|_| PER_LAYER_EMBEDDING));
    let stays = |name: &&str| !trained.contains(*name) && arch.rows_of(name).is_empty();
    let tables: Vec<String> = tables.filter(stays).map(str::to_owned).collect();
    if tables.is_empty() {
        let why = if arch.ties_head() { "the model's head shares its embedding" } else { "its embedding is trained" };
        return Err(
            Error::config(format!("train.offload_embedding: true, but {why}")).hint("remove train.offload_embedding")
        );
    }
    Ok(tables)
}

/// Whether the table of token embeddings, if it is among [`tables`], stays in the model's files on the CPU. The files
/// must hold it as the run needs it: pretrained, without merged adapters, and without new tokens.
pub fn stays_in_files(arch: &Arch, config: &Config) -> bool {
    config.model.init == Init::Pretrained && config.tuning.adapters.is_empty() && arch.new_tokens.is_empty()
}
