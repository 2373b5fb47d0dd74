//! The processes that `launch` starts: their output, how they end, and the error reports that they leave.
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::thread::JoinHandle;
use std::time::Instant;

use super::failure::{self, Report};
use crate::comm::process;
use crate::comm::token::RunToken;
use crate::error::{Error, Kind, Result};
use crate::files;
use crate::files::temporary::{self, TemporaryFolder};

/// Shows each line of `from` behind `prefix`.
pub(super) fn pass_on(
    from: impl Read + Send + 'static,
    prefix: String,
    show: impl Fn(&str) + Send + 'static,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let text = String::from_utf8_lossy(&line);
            show(&format!("{prefix}{}\n", text.trim_end_matches(['\n', '\r'])));
            line.clear();
        }
    })
}

/// A rank's process. Dropping this kills the process if it still runs.
pub(super) struct Rank {
    pub number: usize,
    pub child: Child,
    /// The threads that show its output.
    pub output: Vec<JoinHandle<()>>,
    pub ended: Option<(ExitStatus, Instant)>,
    /// Whether the launcher has killed it because another rank failed.
    pub killed: bool,
}

impl Rank {
    /// Notes the exit status if the process has ended.
    pub fn poll(&mut self) {
        if self.ended.is_none()
            && let Ok(Some(status)) = self.child.try_wait()
        {
            self.ended = Some((status, Instant::now()));
        }
    }

    /// Whether it ended, neither successfully nor by a requested stop.
    pub fn has_failed(&self) -> bool {
        let preempted = i32::from(Kind::Preempted.exit_code());
        self.ended.is_some_and(|(status, _)| !matches!(status.code(), Some(code) if code == 0 || code == preempted))
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.ended.is_none() {
            process::signal(&self.child, libc::SIGKILL);
            // Reaps the process; its status is no longer of interest.
            let _ = self.child.wait();
        }
    }
}

/// The error that ended the run; `None` if all ranks succeeded.
pub(super) fn outcome(ranks: &[Rank], reports: &Reports) -> Option<Error> {
    let mut failed: Vec<&Rank> = ranks.iter().filter(|rank| rank.has_failed() && !rank.killed).collect();
    let peer = Some(i32::from(Kind::Peer.exit_code()));
    // A rank that failed because of a peer is not the cause, even if it ended first.
    failed.sort_by_key(|rank| rank.ended.map(|(status, at)| (status.code() == peer, at)));
    let Some(first) = failed.first() else {
        let stopped = ranks.iter().find(|rank| rank.ended.is_some_and(|(status, _)| !status.success()))?;
        let missing = || Error::preempted("stopped by a signal");
        return Some(reports.read(stopped.number).map_or_else(missing, Report::into_error));
    };
    let (status, _) = first.ended?;
    if let Some(report) = reports.read(first.number) {
        return Some(report.into_error());
    }
    let number = first.number;
    let mut message = match status.signal() {
        Some(signal) => format!("rank {number} was killed by signal {signal}"),
        None => format!("rank {number} ended with exit code {}", status.code().unwrap_or(-1)),
    };
    for report in failed[1..].iter().filter_map(|rank| reports.read(rank.number)) {
        let _ = write!(message, "\n    seen by {}", report.message);
    }
    // A rank may be unable to write a report: its exit code still tells the kind.
    let error = Error::new(status.code().map_or(Kind::Peer, failure::class), message);
    Some(match status.signal() {
        Some(libc::SIGKILL) => {
            error.hint("the system may have killed it for lack of memory (see `dmesg`); --max-restarts restarts it")
        }
        _ => error,
    })
}

/// The folder in which ranks leave their last error.
pub(super) struct Reports {
    folder: PathBuf,
    /// Its lock shows other launchers that this one still runs.
    _watched: TemporaryFolder,
}

/// Removes folders that killed launchers of this user have left beside `own`.
fn sweep(own: &Path) {
    use std::os::unix::fs::MetadataExt as _;
    let user = |path: &Path| std::fs::symlink_metadata(path).map(|metadata| (metadata.is_dir(), metadata.uid())).ok();
    for entry in own.parent().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let parts: Vec<&str> = name.strip_prefix("tunesmith-").map_or(Vec::new(), |rest| rest.split('-').collect());
        let ours = matches!(parts[..], [process, token] if process.parse::<u32>().is_ok() && token.len() == 12);
        let path = entry.path();
        if ours && path != own && user(&path) == user(own) {
            temporary::remove_abandoned(&path);
        }
    }
}

impl Reports {
    pub fn new() -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        loop {
            let token = RunToken::fresh()?;
            let folder = std::env::temp_dir().join(format!("tunesmith-{}-{}", std::process::id(), &token.text()[..12]));
            let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
            made.map_err(|error| Error::io("create", &folder, &error))?;
            if let Some(watched) = TemporaryFolder::new(folder.clone()) {
                sweep(&folder);
                return Ok(Self { folder, _watched: watched });
            }
        }
    }

    pub fn of(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("{rank}.json"))
    }

    fn read(&self, rank: usize) -> Option<Report> {
        serde_json::from_str(&files::read_own_text(&self.of(rank), files::SMALL).ok()?).ok()
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        // A remaining temporary folder does no harm.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
