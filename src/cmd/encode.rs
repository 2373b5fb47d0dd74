//! `tunesmith encode`: runs a frozen image encoder over all images of a run, ahead of training.
use super::args::JobArgs;
use super::terminal::print;
use super::train_console::Console;
use crate::error::Result;
use crate::memory::human_bytes;
use crate::train::features;
use crate::words::count;
use std::time::Instant;

/// Run a frozen image encoder over all images of a run, and keep its output for training.
///
/// A run with the same encoder, images and `data.cache_dir` then computes none of it again, and loads no encoder. `train` does the same by
/// itself where images are seen more than once (`vision.cache_features`).
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: JobArgs,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of the configuration, model and data; [`crate::Kind::Config`] where no picture is shown, or a part of the encoder is
/// trained; [`crate::Kind::Io`] where features have no room.
pub fn run(args: &Args) -> Result<()> {
    let resolved = args.job.load(&[])?;
    let console = Console::new(resolved.config.train.logging_steps);
    let began = Instant::now();
    let kept = features::encode(&resolved, &console)?;
    console.finish();
    let (pictures, computed) = (count(kept.pictures, "image"), kept.computed);
    let bytes = human_bytes(kept.bytes);
    let seconds = began.elapsed().as_secs_f64();
    print(&format!(
        "features of {pictures}, {computed} of them computed now, in {seconds:.1}s\n{bytes} in {}\n",
        kept.dir.display()
    ))
}
