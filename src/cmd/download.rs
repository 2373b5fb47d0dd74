//! `tunesmith download`: fetches a model or data set of the hub and prints its path. Also shows the progress of all downloads.
use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::terminal;
use crate::error::shown::shown;
use crate::error::{Error, Result};
use crate::hub::{Destination, DownloadProgress, Hub, HubSettings, Part};
use crate::plan::{human_bytes, human_seconds};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Download this repository, OWNER/NAME (also as the word MODEL=OWNER/NAME or the environment variable MODEL)
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Download a branch, tag or commit (default: `main`)
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Download a data set instead of a model
    #[arg(long)]
    dataset: bool,
    /// Choose the data set's configuration
    #[arg(long, value_name = "CONFIG", requires = "dataset")]
    config: Option<String>,
    /// Choose the data set's split, such as `train`
    #[arg(long, value_name = "SPLIT", requires = "dataset")]
    split: Option<String>,
    /// Write the files to this folder instead of the cache
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of the hub: no such repository, no access, no network, no room.
pub fn run(args: &Args) -> Result<()> {
    let named = args.name.clone().or_else(|| std::env::var("MODEL").ok()).unwrap_or_default();
    let name = named.strip_prefix("MODEL=").unwrap_or(&named);
    if name.is_empty() {
        return Err(Error::config("no repository is named")
            .hint("`tunesmith download owner/name`, or `just download-model MODEL=owner/name`"));
    }
    let settings = HubSettings::from_env()?;
    let downloads = Downloads::default();
    let place = args.dir.clone().map_or(Destination::Cache, Destination::Folder);
    let hub = Hub::new(settings, &downloads);
    let revision = args.revision.as_deref();
    let (snapshot, files) = if args.dataset {
        hub.dataset_at(name, args.config.as_deref(), args.split.as_deref(), revision, place)?
    } else {
        (hub.model(name, revision, Part::Whole, place)?, Vec::new())
    };
    let mut text = format!("{} is in {}\n", snapshot.label(), snapshot.dir.display());
    for file in &files {
        let _ = writeln!(text, "  {}", file.display()); // a String never fails
    }
    let how = match (args.dataset, &args.dir) {
        (false, Some(dir)) => format!("model.local_dir={}", dir.display()),
        (false, None) => format!("model.name={name} model.revision={}", snapshot.commit),
        (true, _) => "data.train_path=FILE".to_owned(),
    };
    terminal::print(&format!("{text}use it with {how}\n"))
}

/// Shows downloads on standard error: a bar on a terminal, elsewhere a line at the beginning and one at the end.
#[derive(Default)]
pub(super) struct Downloads(Mutex<Option<Running>>);

struct Running {
    what: String,
    total: u64,
    arrived: u64,
    began: Instant,
    bar: Option<ProgressBar>,
}

impl Downloads {
    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn line(text: &str) {
    terminal::print_text(&format!("{text}\n"));
}

impl DownloadProgress for Downloads {
    fn begin(&self, what: &str, total: u64) {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
            let bar = ProgressBar::new(total).with_message(shown(what).into_owned());
            style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)
        });
        if bar.is_none() {
            line(&format!("{what}: {}", human_bytes(total)));
        }
        *self.running() = Some(Running { what: what.to_owned(), total, arrived: 0, began: Instant::now(), bar });
    }

    fn advance(&self, by: u64) {
        let mut running = self.running();
        let Some(running) = running.as_mut() else { return };
        running.arrived += by;
        running.bar.iter().for_each(|bar| bar.inc(by));
    }

    fn end(&self) {
        let Some(Running { what, total, arrived, began, bar }) = self.running().take() else { return };
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        let took = human_seconds(began.elapsed().as_secs_f64());
        let of = if arrived < total { format!(" of {}", human_bytes(total)) } else { String::new() };
        line(&format!("{what}: {}{of} in {took}", human_bytes(arrived)));
    }

    fn notice(&self, text: &str) {
        match &*self.running() {
            Some(Running { bar: Some(bar), .. }) => bar.suspend(|| line(text)),
            _ => line(text),
        }
    }
}
