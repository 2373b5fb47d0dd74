//! `tunesmith launch`: starts the ranks of a run on this machine and shows their output with rank numbers. A signal goes to all
//! ranks. When one fails, its error is shown once and the others are ended.
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use signal_hook::consts::SIGTERM;

use super::devices::{self, RankRequest, Started};
use super::numbers::{number, whole};
use super::paste::{AGAIN, own_again};
use super::rank_processes::{Rank, Reports, outcome, pass_on};
use super::terminal;
use crate::comm::env::{ERROR_FILE, STORE};
use crate::comm::host::Host;
use crate::comm::token::{MAKE_TOKEN, RunToken, TOKEN};
use crate::comm::{gloo, gloo_library, process};
use crate::config::{DeviceChoice, Range, RankBackend, Strategy};
use crate::error::{Error, Kind, Result};
use crate::signals::{self, Requests};
use crate::words::count;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Start this many ranks on this machine; `auto` takes --gpu-ids, `NUM_GPUS` or Accelerate's `num_processes`, else one for
    /// each GPU that `model.device` chooses, else 2
    #[arg(long, default_value = "auto")]
    nproc: String,
    /// Train on this many machines, each of which runs this command (default: Accelerate's `num_machines`, else 1)
    #[arg(long, value_parser = whole::<usize>(Range::at_least(1.0)))]
    nnodes: Option<usize>,
    /// Number this machine, from 0 (default: Accelerate's `machine_rank`, else 0)
    #[arg(long, value_parser = whole::<usize>(Range::at_least(0.0)))]
    node_rank: Option<usize>,
    /// Meet at this machine: the name or address of the one with --node-rank 0
    #[arg(long)]
    master_addr: Option<String>,
    /// Meet at this port (default on one machine: any free port)
    #[arg(long, value_parser = whole::<u16>(Range::within(0.0, 65_535.0)))]
    master_port: Option<u16>,
    /// Give up after an operation between ranks takes this many seconds (`train.ddp_timeout`)
    #[arg(long, value_parser = number(Range { above: Some(0.0), max: Some(1e9), ..Range::ANY }))]
    timeout: Option<f64>,
    /// Restart from the newest checkpoint this many times after a rank is lost
    #[arg(long, default_value_t = 0, value_parser = whole::<usize>(Range::at_least(0.0)))]
    max_restarts: usize,
    /// Start a rank for each of these GPUs, such as 0,1, which become the ranks' `CUDA_VISIBLE_DEVICES`
    #[arg(long, value_delimiter = ',', allow_hyphen_values = true, value_parser = whole::<usize>(Range::at_least(0.0)))]
    gpu_ids: Vec<usize>,
    /// Run this command on every rank: `train CONFIG …`
    #[arg(last = true, required = true, value_name = "train CONFIG")]
    command: Vec<String>,
}

/// Whether ranks can exchange data over NCCL here.
#[cfg(feature = "cuda")]
fn has_nccl() -> bool {
    crate::comm::nccl::probe().is_ok()
}

/// Whether ranks can exchange data over NCCL here: never, because this program was built without it.
#[cfg(not(feature = "cuda"))]
const fn has_nccl() -> bool {
    false
}

/// How long the other ranks may take to report the failure of the first one.
const GRACE: Duration = Duration::from_secs(3);
/// Interval between checks of the ranks.
const TICK: Duration = Duration::from_millis(10);

/// Starts the ranks, and restarts them up to `--max-restarts` times.
///
/// # Errors
/// The error of the rank that failed first; [`crate::Kind::Preempted`] when a signal stopped the run after saving.
pub fn run(args: &Args) -> Result<()> {
    let job = match ProcessLaunch::plan(args)? {
        RankLaunch::Processes(job) => job,
        RankLaunch::Threads(mut command) => {
            use std::os::unix::process::CommandExt as _;
            // `exec` returns only on failure.
            let failure = command.exec();
            return Err(Error::io("start", command.get_program(), &failure));
        }
    };
    let asked = Arc::new(AtomicUsize::new(0));
    let (count, requests) = (Arc::clone(&asked), Requests::default());
    // A second signal ends this process, and with it the ranks, which are tied to it.
    let _listening = signals::handle(move |_| {
        count.store(1, Ordering::Relaxed);
        requests.is_first()
    })?;
    let mut restarts = 0;
    loop {
        let Some(failure) = job.attempt(restarts, &asked)? else { return Ok(()) };
        // Only a lost peer is worth a restart: other errors would repeat.
        let passing = failure.kind() == Kind::Peer && asked.load(Ordering::Relaxed) == 0;
        if !passing || restarts == args.max_restarts {
            return Err(failure);
        }
        restarts += 1;
        terminal::print_error(&failure);
        terminal::print_note(&format!("restart {restarts} of {}, from the newest checkpoint", args.max_restarts));
    }
}

/// How the ranks of this machine are started.
enum RankLaunch {
    Processes(ProcessLaunch),
    /// Threads of one process, which replaces this one.
    Threads(Command),
}

/// The ranks to start as processes.
struct ProcessLaunch {
    program: PathBuf,
    command: Vec<String>,
    nproc: usize,
    nnodes: usize,
    node_rank: usize,
    /// The rendezvous address of several machines.
    master: Option<(String, u16)>,
    timeout: Option<f64>,
    /// `CUDA_VISIBLE_DEVICES` of the ranks, if GPUs were chosen.
    visible: Option<String>,
}

impl ProcessLaunch {
    fn plan(args: &Args) -> Result<RankLaunch> {
        if args.command.first().is_none_or(|command| command != "train") {
            return Err(Error::config(format!("launch: `{}` does not run as several ranks", args.command[0]))
                .hint("tunesmith launch --nproc N -- train CONFIG"));
        }
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let words = super::train::resolved(&args.command)?;
        let asks_for_nccl =
            words.as_ref().is_some_and(|(found, _)| found.config.train.ddp_backend == RankBackend::Nccl);
        let on_gpus = words.as_ref().is_some_and(|(found, _)| found.config.model.device != DeviceChoice::Cpu);
        // Ranks on GPUs decide between NCCL and Gloo when they meet.
        let over_nccl = asks_for_nccl || on_gpus && has_nccl();
        let strategy = words.as_ref().map(|(found, _)| found.config.train.strategy);
        let alone = strategy.filter(|strategy| matches!(strategy, Strategy::Single | Strategy::Dp));
        let (file, num_gpus) = words.map(|(found, number)| (found.foreign.claims, number)).unwrap_or_default();
        let nnodes = args.nnodes.or(file.machines.as_ref().map(|(count, _)| *count)).unwrap_or(1).max(1);
        let node_rank = args.node_rank.or(file.machine_rank.as_ref().map(|(rank, _)| *rank)).unwrap_or(0);
        let master_addr = args.master_addr.clone().or(file.main_address.map(|(address, _)| address));
        let master_port = args.master_port.or(file.main_port.map(|(port, _)| port));
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let listed = file.gpu_ids.map(|(ids, _)| ids).unwrap_or_default();
        let request = RankRequest {
            nproc: &args.nproc,
            gpu_ids: &args.gpu_ids,
            num_gpus,
            visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            file: file.processes.map(|(count, source)| (count, nnodes, source.to_string())),
            file_gpu_ids: &listed,
            cores,
            on_gpus,
        };
        let Started { ranks: nproc, note, visible } = devices::ranks(&request, devices::gpus())?;
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
                    .hint("give those of the machine with --node-rank 0 on every machine"));
            }
        };
        if nnodes > 1 && args.max_restarts > 0 {
            return Err(Error::config("launch: --max-restarts works on one machine")
                .hint("on several, torchrun restarts: torchrun --no-python --max-restarts … tunesmith train …"));
        }
        if nnodes > 1 && variable(TOKEN).is_none() {
            return Err(Error::config(format!("launch: env {TOKEN} is not set, so any process could join as a rank"))
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
                // A library that the user names must exist; several machines need it.
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
                    // `train` alone refuses this word, which is already applied here.
                    let words = args.command.iter().filter(|word| !word.starts_with("NUM_GPUS="));
                    command.args(words).arg(format!("train.dp_ranks={nproc}")).env_remove("NUM_GPUS");
                    command.env(AGAIN, own_again());
                    if matches!(strategy, Some(Strategy::Auto | Strategy::Ddp)) {
                        command.arg("train.strategy=dp");
                    }
                    args.timeout.iter().for_each(|seconds| {
                        command.env("TRAIN_DDP_TIMEOUT", seconds.to_string());
                    });
                    return Ok(RankLaunch::Threads(command));
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
        Ok(RankLaunch::Processes(job))
    }

    fn size(&self) -> usize {
        self.nproc * self.nnodes
    }

    /// Runs the ranks once, after `restarts` restarts. Returns the error that ended them, if any. `asked` counts the signals that
    /// asked the run to stop.
    fn attempt(&self, restarts: usize, asked: &AtomicUsize) -> Result<Option<Error>> {
        let token = match std::env::var(TOKEN) {
            Ok(token) if !token.is_empty() => RunToken::given(&token)?,
            _ => RunToken::fresh()?,
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
                rank.poll();
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

    /// The address at which the ranks meet. With one machine, or on the first of several, this process serves it.
    fn meeting_place(&self, token: &RunToken) -> Result<SocketAddr> {
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
        token: &RunToken,
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
                // The launcher stops the ranks at the first error, and ignores later ones.
                terminal::print_exact(text).unwrap_or_else(|error| drop(unwritten.send(error)));
            }));
        }
        if let Some(stderr) = child.stderr.take() {
            output.push(pass_on(stderr, prefix, terminal::print_text));
        }
        Ok(Rank { number, child, output, ended: None, killed: false })
    }
}

/// The command of a rank that resumes from the newest checkpoint.
fn resuming(command: &[String]) -> Vec<String> {
    let mut command: Vec<String> = command.iter().filter(|word| *word != "--overwrite").cloned().collect();
    let resumes = |word: &String| word.starts_with("--resume") || word.contains("resume_from_checkpoint=");
    if !command.iter().any(resumes) {
        command.push("--resume".to_owned());
    }
    command
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
