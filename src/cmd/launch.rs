//! `tunesmith launch`: starts the ranks of a run on this machine and shows their output with rank numbers. A signal goes to all
//! ranks. When one fails, its error is shown once and the others are ended.
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use signal_hook::consts::SIGTERM;

use super::devices::{self, Asked, Started};
use super::failure::{self, Report};
use super::paste::{AGAIN, own_again};
use super::terminal;
use crate::comm::env::{ERROR_FILE, STORE};
use crate::comm::host::Host;
use crate::comm::token::{MAKE_TOKEN, TOKEN, Token};
use crate::comm::{gloo, gloo_library, process};
use crate::config::{RankBackend, Strategy};
use crate::error::{Error, Kind, Result};
use crate::files;
use crate::files::temporary::{self, TemporaryFolder};
use crate::signals::{self, Requests};
use crate::words::count;

/// The arguments of `tunesmith launch`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Ranks on this machine: a number, or `auto`: as `--gpu-ids`, `NUM_GPUS` or `num_processes` of Accelerate's file
    /// say; 2 if none of these is set
    #[arg(long, default_value = "auto")]
    nproc: String,
    /// Machines that take part; each runs this command (`num_machines` of Accelerate's file, else 1)
    #[arg(long)]
    nnodes: Option<usize>,
    /// This machine's number, from 0 (`machine_rank` of Accelerate's file, else 0)
    #[arg(long)]
    node_rank: Option<usize>,
    /// The first machine's name or address
    #[arg(long)]
    master_addr: Option<String>,
    /// The port on it where the ranks meet (on one machine a free one is found)
    #[arg(long)]
    master_port: Option<u16>,
    /// Seconds that an operation between ranks may take (`train.ddp_timeout`)
    #[arg(long)]
    timeout: Option<f64>,
    /// How often a run whose rank is lost starts again from its newest checkpoint
    #[arg(long, default_value_t = 0)]
    max_restarts: usize,
    /// The GPUs to use, such as 0,1: a rank each (this version computes on the CPU; NCCL between ranks uses them)
    #[arg(long, value_delimiter = ',')]
    gpu_ids: Vec<usize>,
    /// What each rank runs: `train CONFIG …`
    #[arg(last = true, required = true, value_name = "train CONFIG")]
    command: Vec<String>,
}

/// After the first rank has failed, the others may take so long to notice and to say so.
const GRACE: Duration = Duration::from_secs(3);
/// How often ranks are looked after.
const TICK: Duration = Duration::from_millis(10);

/// Launches.
///
/// # Errors
/// That of the rank which failed first; [`crate::Kind::Preempted`] when the run was stopped by a signal after saving.
pub fn run(args: &Args) -> Result<()> {
    let job = match Job::plan(args)? {
        Way::Processes(job) => job,
        Way::Threads(mut command) => {
            use std::os::unix::process::CommandExt as _;
            // Only a failure comes back.
            let failure = command.exec();
            return Err(Error::io("start", command.get_program(), &failure));
        }
    };
    let asked = Arc::new(AtomicUsize::new(0));
    let (count, requests) = (Arc::clone(&asked), Requests::default());
    // A second one ends this process, and with it the ranks, which are tied to it.
    let _listening = signals::handle(move |_| {
        count.store(1, Ordering::Relaxed);
        requests.is_first()
    })?;
    let mut restarts = 0;
    loop {
        let Some(failure) = job.attempt(restarts, &asked)? else { return Ok(()) };
        // What a configuration, the data or the numbers do wrong they would do again.
        let passing = failure.kind() == Kind::Peer && asked.load(Ordering::Relaxed) == 0;
        if !passing || restarts == args.max_restarts {
            return Err(failure);
        }
        restarts += 1;
        terminal::print_error(&failure);
        terminal::print_note(&format!("restart {restarts} of {}, from the newest checkpoint", args.max_restarts));
    }
}

/// How the ranks come about.
enum Way {
    Processes(Job),
    /// One process, which takes the place of this one.
    Threads(Command),
}

/// What is to be started.
struct Job {
    program: PathBuf,
    command: Vec<String>,
    nproc: usize,
    nnodes: usize,
    node_rank: usize,
    /// Where the ranks meet, if they are on several machines.
    master: Option<(String, u16)>,
    timeout: Option<f64>,
    /// `CUDA_VISIBLE_DEVICES` of the ranks, where GPUs were chosen.
    visible: Option<String>,
}

impl Job {
    fn plan(args: &Args) -> Result<Way> {
        if args.command.first().is_none_or(|command| command != "train") {
            return Err(Error::config(format!("launch: `{}` does not run as several ranks", args.command[0]))
                .hint("tunesmith launch --nproc N -- train CONFIG"));
        }
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let words = super::train::resolved(&args.command)?;
        let over_nccl = words.as_ref().is_some_and(|(found, _)| found.config.train.ddp_backend == RankBackend::Nccl);
        let strategy = words.as_ref().map(|(found, _)| found.config.train.strategy);
        let alone = strategy.filter(|strategy| matches!(strategy, Strategy::Single | Strategy::Dp));
        let (file, num_gpus) = words.map(|(found, number)| (found.foreign.expected, number)).unwrap_or_default();
        let nnodes = args.nnodes.or(file.machines.as_ref().map(|(count, _)| *count)).unwrap_or(1).max(1);
        let node_rank = args.node_rank.or(file.machine_rank.as_ref().map(|(rank, _)| *rank)).unwrap_or(0);
        let master_addr = args.master_addr.clone().or(file.main_address.map(|(address, _)| address));
        let master_port = args.master_port.or(file.main_port.map(|(port, _)| port));
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let listed = file.gpu_ids.map(|(ids, _)| ids).unwrap_or_default();
        let asked = Asked {
            nproc: &args.nproc,
            gpu_ids: &args.gpu_ids,
            num_gpus,
            visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            file: file.processes.map(|(count, source)| (count, nnodes, source.to_string())),
            file_gpu_ids: &listed,
            cores,
        };
        let Started { ranks: nproc, note, visible } = devices::ranks(&asked, devices::gpus())?;
        if node_rank >= nnodes {
            let message = format!("launch: --node-rank {node_rank} of --nnodes {nnodes}");
            return Err(Error::config(message).hint("machines are numbered from 0"));
        }
        let master = match (nnodes, &master_addr, master_port) {
            (0 | 1, None, None) => None,
            (0 | 1, address, port) => Some((address.clone().unwrap_or_else(|| "127.0.0.1".into()), port.unwrap_or(0))),
            (_, Some(address), Some(port)) => Some((address.clone(), port)),
            _ => {
                return Err(Error::config("launch: several machines need --master-addr and --master-port")
                    .hint("those of the machine with --node-rank 0, the same everywhere"));
            }
        };
        if nnodes > 1 && args.max_restarts > 0 {
            return Err(Error::config("launch: --max-restarts works on one machine")
                .hint("on several, torchrun restarts: torchrun --no-python --max-restarts … tunesmith train …"));
        }
        if nnodes > 1 && variable(TOKEN).is_none() {
            return Err(Error::config(format!("launch: env {TOKEN} is not set: any process could pass for a rank"))
                .hint(MAKE_TOKEN));
        }
        let program = std::env::current_exe().map_err(|error| Error::io("find", "this program", &error))?;
        let cores_each = format!("{} of its {} each", (cores / nproc).max(1), count(cores, "core"));
        if let Some(strategy) = alone.filter(|_| nproc * nnodes > 1) {
            let ranks = nproc * nnodes;
            let message = format!("train.strategy: {strategy}, but tunesmith launch has started {ranks} ranks");
            return Err(Error::config(message).hint("set train.strategy: ddp (or auto), or start one process"));
        }
        if nproc * nnodes > 1 && !over_nccl {
            match gloo::provide(&|text| terminal::print_note(text)) {
                // What the user names must be there; several machines need messages.
                Err(error) if nnodes > 1 || gloo_library::named().is_some() => return Err(error),
                Err(error) => {
                    terminal::print_text(&format!(
                        "launch: {} on this machine as threads of one process, {cores_each}: {}; {note}\n",
                        count(nproc, "rank"),
                        error.message()
                    ));
                    error.hint_text().into_iter().for_each(terminal::print_note);
                    if args.max_restarts > 0 {
                        terminal::print_note("--max-restarts has no effect: threads of one process end together");
                    }
                    let mut command = Command::new(program);
                    // What `train` alone would refuse: here it has been heard.
                    let words = args.command.iter().filter(|word| !word.starts_with("NUM_GPUS="));
                    command.args(words).arg(format!("train.dp_ranks={nproc}")).env_remove("NUM_GPUS");
                    command.env(AGAIN, own_again());
                    if matches!(strategy, Some(Strategy::Auto | Strategy::Ddp)) {
                        command.arg("train.strategy=dp");
                    }
                    args.timeout.iter().for_each(|seconds| {
                        command.env("TRAIN_DDP_TIMEOUT", seconds.to_string());
                    });
                    return Ok(Way::Threads(command));
                }
                Ok(_) => {}
            }
        }
        let timeout = args.timeout;
        let job = Self { program, command: args.command.clone(), nproc, nnodes, node_rank, master, timeout, visible };
        terminal::print_text(&format!(
            "launch: {nproc} of {} on this machine, {cores_each}; {note}\n",
            count(job.size(), "rank"),
        ));
        Ok(Way::Processes(job))
    }

    fn size(&self) -> usize {
        self.nproc * self.nnodes
    }

    /// Runs the ranks once. Nothing where all were well.
    fn attempt(&self, restarts: usize, asked: &AtomicUsize) -> Result<Option<Error>> {
        let token = match std::env::var(TOKEN) {
            Ok(token) if !token.is_empty() => Token::given(&token)?,
            _ => Token::fresh()?,
        };
        let meeting = self.meeting_place(&token)?;
        let reports = Reports::new()?;
        let (unwritten, failures) = mpsc::channel();
        let mut ranks = Vec::new();
        for local_rank in 0..self.nproc {
            ranks.push(self.start(local_rank, &meeting, &token, &reports, restarts, &unwritten)?);
        }
        let (mut heard, mut output_failed) = (0, None);
        let mut first_failure: Option<Instant> = None;
        while ranks.iter().any(|rank| rank.ended.is_none()) {
            std::thread::sleep(TICK);
            let now = asked.load(Ordering::Relaxed);
            let fails = output_failed.is_none();
            output_failed = output_failed.or_else(|| failures.try_recv().ok());
            if now > heard || (fails && output_failed.is_some()) {
                heard = now;
                ranks
                    .iter_mut()
                    .filter(|rank| rank.ended.is_none())
                    .for_each(|rank| process::signal(&rank.child, SIGTERM));
            }
            for rank in &mut ranks {
                rank.look();
            }
            if first_failure.is_none() && ranks.iter().any(Rank::has_failed) {
                first_failure = Some(Instant::now());
            }
            if first_failure.is_some_and(|since| since.elapsed() > GRACE) {
                for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none() && !rank.killed) {
                    rank.killed = true;
                    process::signal(&rank.child, libc::SIGKILL);
                }
            }
        }
        for rank in &mut ranks {
            rank.output.drain(..).for_each(|reader| drop(reader.join()));
        }
        match output_failed.or_else(|| failures.try_recv().ok()) {
            Some(error) => Err(error),
            None => Ok(outcome(&ranks, &reports)),
        }
    }

    /// Where the ranks meet: held here, or on the first machine.
    fn meeting_place(&self, token: &Token) -> Result<SocketAddr> {
        let Some((host, port)) = &self.master else {
            let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
            return Ok(Host::serve(any, token.clone())?.address());
        };
        let found = (host.as_str(), *port).to_socket_addrs().ok().and_then(|mut found| found.next());
        let address = found.ok_or_else(|| Error::config(format!("--master-addr {host}: no such host")))?;
        if self.node_rank == 0 { Ok(Host::serve(address, token.clone())?.address()) } else { Ok(address) }
    }

    fn start(
        &self,
        local_rank: usize,
        meeting: &SocketAddr,
        token: &Token,
        reports: &Reports,
        restarts: usize,
        unwritten: &Sender<Error>,
    ) -> Result<Rank> {
        let number = self.node_rank * self.nproc + local_rank;
        let mut command = Command::new(&self.program);
        command.args(if restarts == 0 { self.command.clone() } else { resuming(&self.command) });
        for (name, value) in [
            ("RANK", number.to_string()),
            ("WORLD_SIZE", self.size().to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", self.nproc.to_string()),
            ("MASTER_ADDR", meeting.ip().to_string()),
            ("MASTER_PORT", meeting.port().to_string()),
            (STORE, meeting.to_string()),
            (TOKEN, token.text().to_owned()),
        ] {
            command.env(name, value);
        }
        command.env(ERROR_FILE, reports.of(number)).env(AGAIN, own_again()).env_remove("NUM_GPUS");
        if let Some(seconds) = self.timeout {
            command.env("TRAIN_DDP_TIMEOUT", seconds.to_string());
        }
        if let Some(visible) = &self.visible {
            command.env("CUDA_VISIBLE_DEVICES", visible);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        process::tie(&mut command);
        let mut child = command.spawn().map_err(|error| Error::io("start", &self.program, &error))?;
        let prefix = format!("[rank {number}] ");
        let mut output = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            let unwritten = unwritten.clone();
            output.push(pass_on(stdout, prefix.clone(), move |text| {
                // The launcher hears of the first one, stops the ranks, and then no longer listens.
                terminal::print_exact(text).unwrap_or_else(|error| drop(unwritten.send(error)));
            }));
        }
        if let Some(stderr) = child.stderr.take() {
            output.push(pass_on(stderr, prefix, terminal::print_text));
        }
        Ok(Rank { number, child, output, ended: None, killed: false })
    }
}

/// The command of a rank that goes on from the newest checkpoint.
fn resuming(command: &[String]) -> Vec<String> {
    let mut command: Vec<String> = command.iter().filter(|word| *word != "--overwrite").cloned().collect();
    let resumes = |word: &String| word.starts_with("--resume") || word.contains("resume_from_checkpoint=");
    if !command.iter().any(resumes) {
        command.push("--resume".to_owned());
    }
    command
}

/// Shows each line of `from` behind `prefix`.
fn pass_on(from: impl Read + Send + 'static, prefix: String, show: impl Fn(&str) + Send + 'static) -> JoinHandle<()> {
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

/// A rank's process. It is killed where this is dropped before it has ended.
struct Rank {
    number: usize,
    child: Child,
    output: Vec<JoinHandle<()>>,
    ended: Option<(ExitStatus, Instant)>,
    /// By us, because another has failed.
    killed: bool,
}

impl Rank {
    fn look(&mut self) {
        if self.ended.is_none()
            && let Ok(Some(status)) = self.child.try_wait()
        {
            self.ended = Some((status, Instant::now()));
        }
    }

    /// Ended otherwise than by finishing or by a request.
    fn has_failed(&self) -> bool {
        let preempted = i32::from(Kind::Preempted.exit_code());
        self.ended.is_some_and(|(status, _)| !matches!(status.code(), Some(code) if code == 0 || code == preempted))
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.ended.is_none() {
            process::signal(&self.child, libc::SIGKILL);
            // It cannot outlive this; how it ended is of no interest any more.
            let _ = self.child.wait();
        }
    }
}

/// What the ranks amount to: nothing where all were well, else the first cause.
fn outcome(ranks: &[Rank], reports: &Reports) -> Option<Error> {
    let mut failed: Vec<&Rank> = ranks.iter().filter(|rank| rank.has_failed() && !rank.killed).collect();
    let peer = Some(i32::from(Kind::Peer.exit_code()));
    // An exit for a peer's sake is a consequence, whenever it came.
    failed.sort_by_key(|rank| rank.ended.map(|(status, at)| (status.code() == peer, at)));
    let Some(first) = failed.first() else {
        let stopped = ranks.iter().find(|rank| rank.ended.is_some_and(|(status, _)| !status.success()))?;
        let missing = || Error::preempted("stopped by a signal, as rank 0 says");
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
    // A rank may lack what a report takes: its exit code still says the class.
    let error = Error::new(status.code().map_or(Kind::Peer, failure::class), message);
    Some(match status.signal() {
        Some(libc::SIGKILL) => {
            error.hint("where memory runs out, the system kills too (see `dmesg`); --max-restarts goes on")
        }
        _ => error,
    })
}

/// Where ranks leave their last error.
struct Reports {
    folder: PathBuf,
    /// Its lock tells other launchers that this one lives.
    _temporary: TemporaryFolder,
}

/// Removes the folders of this kind beside `own` that launchers of this user which were killed have left.
fn sweep(own: &Path) {
    use std::os::unix::fs::MetadataExt as _;
    let user = |path: &Path| std::fs::symlink_metadata(path).map(|metadata| (metadata.is_dir(), metadata.uid())).ok();
    for entry in own.parent().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let parts: Vec<&str> = name.strip_prefix("tunesmith-").map_or(Vec::new(), |rest| rest.split('-').collect());
        let ours = matches!(parts[..], [process, token] if process.parse::<u32>().is_ok() && token.len() == 12);
        let path = entry.path();
        if ours && path != own && user(&path) == user(own) && temporary::is_abandoned(&path) {
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}

impl Reports {
    fn new() -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        let folder =
            std::env::temp_dir().join(format!("tunesmith-{}-{}", std::process::id(), &Token::fresh()?.text()[..12]));
        let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|error| Error::io("create", &folder, &error))?;
        let temporary = TemporaryFolder::new(folder.clone());
        sweep(&folder);
        Ok(Self { folder, _temporary: temporary })
    }

    fn of(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("{rank}.json"))
    }

    fn read(&self, rank: usize) -> Option<Report> {
        serde_json::from_str(&files::read_own_text(&self.of(rank), files::SMALL).ok()?).ok()
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        // A folder that stays in the folder for temporary files does no harm.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_resumes_and_overwrites_nothing() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(resuming(&words("train a.yaml --overwrite")), words("train a.yaml --resume"));
        assert_eq!(resuming(&words("train a.yaml --resume=x")), words("train a.yaml --resume=x"));
        let key = words("train a.yaml train.resume_from_checkpoint=latest");
        assert_eq!(resuming(&key), key);
    }
}
