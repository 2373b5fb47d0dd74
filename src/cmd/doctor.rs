//! `tunesmith doctor`.
use crate::error::Result;

/// Say what this machine has and lacks for training.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the subcommand.
///
/// # Errors
/// None yet.
pub fn run(_args: &Args) -> Result<()> {
    Ok(())
}
