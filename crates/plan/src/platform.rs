//! Decides what a run uses of a machine by default: device, engine between ranks, number types, micro-batch, threads.
//! These are pure functions of a description of the machine, so that tests can try machines which they do not run on.
use tunesmith_base::words::{are, count};

/// The operating system of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// Linux.
    Linux,
    /// Windows.
    Windows,
    /// macOS.
    MacOs,
    /// Another.
    Other,
}

impl System {
    /// The system that this program was built for.
    pub const fn current() -> Self {
        if cfg!(target_os = "linux") {
            Self::Linux
        } else if cfg!(windows) {
            Self::Windows
        } else if cfg!(target_os = "macos") {
            Self::MacOs
        } else {
            Self::Other
        }
    }

    /// The name of the system in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Linux => "Linux",
            Self::Windows => "Windows",
            Self::MacOs => "macOS",
            Self::Other => "another system",
        }
    }
}

/// An NVIDIA GPU, as its driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// Product name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability, such as `(8, 9)`; `None` if the driver does not report it.
    pub capability: Option<(u32, u32)>,
}

/// What decides how a machine is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The operating system.
    pub system: System,
    /// The GPUs that the driver reports.
    pub cards: Vec<Card>,
    /// Logical processors that the program may use.
    pub cores: usize,
}

/// What this build of the program can compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// The CPU alone.
    Cpu,
    /// CUDA devices too.
    Cuda,
}

/// How many ranks there are, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Ranks on all machines together.
    pub ranks: usize,
    /// How many ranks run on this machine.
    pub local: usize,
    /// Whether ranks are threads of one process instead of processes.
    pub in_process: bool,
}

/// One decision, with its reason and the setting that overrides it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// What is decided, as tables name it.
    pub what: &'static str,
    /// The chosen value, as tables show it.
    pub value: String,
    /// The setting or environment variable that overrides it.
    pub key: &'static str,
    /// The reason, as a clause for a message.
    pub why: String,
}

/// Threads of a rank if `train.num_threads` is not set: the machine's cores divided by its ranks, at least 1.
pub fn threads(cores: usize, local: usize) -> usize {
    (cores / local.max(1)).max(1)
}

/// How many ranks a machine has by default: one for each GPU that is used, or one on the CPU. Several ranks on one
/// processor would share its memory bandwidth and each hold the weights, so they are slower than the threads of one
/// rank.
pub fn ranks(host: &Host, engine: Engine) -> usize {
    match engine {
        Engine::Cuda => host.cards.len().max(1),
        Engine::Cpu => 1,
    }
}

/// Decides everything for one rank, in the order of the table.
pub fn choose(host: &Host, layout: Layout, engine: Engine) -> Vec<Choice> {
    let Layout { ranks, local, in_process } = layout;
    let gpu = engine == Engine::Cuda && !host.cards.is_empty() && host.system != System::MacOs;
    let name = host.cards.first().map_or("no GPU", |card| &card.name);
    let device_why = match (gpu, host.cards.len()) {
        (true, count) => format!("{count} x {name}"),
        (false, 0) if host.system == System::MacOs => "macOS has no CUDA".to_owned(),
        (false, 0) => "there is no NVIDIA GPU".to_owned(),
        (false, count) => format!("{count} x {name}, which are not used"),
    };
    let choice = |what, value: &str, key, why: String| Choice { what, value: value.to_owned(), key, why };
    let (backend, backend_why) = match (ranks, in_process, gpu) {
        (1, ..) => ("none", "one rank".to_owned()),
        (_, true, _) => ("threads", format!("{} threads of one process", are(ranks, "rank"))),
        (_, _, false) => ("gloo", "ranks compute on the CPU".to_owned()),
        _ if host.system == System::Windows => ("gloo", "NCCL is not there on Windows".to_owned()),
        _ if local > host.cards.len() => ("gloo", format!("{local} ranks share {}", count(host.cards.len(), "GPU"))),
        _ => ("nccl", "Linux, and a GPU a rank".to_owned()),
    };
    let oldest = host.cards.iter().map(|card| card.capability).min().flatten();
    let dtype_why = match (gpu, oldest) {
        (false, _) => "products are computed in float32; two bytes save memory only".to_owned(),
        (true, Some((major, minor))) if major >= 8 => {
            format!("compute capability {major}.{minor} has bfloat16: train.bf16 is faster")
        }
        (true, Some((major, minor))) => format!("compute capability {major}.{minor} has no bfloat16"),
        (true, None) => "the driver does not say whether there is bfloat16".to_owned(),
    };
    let threads = threads(host.cores, local);
    let cores = host.cores;
    vec![
        choice("device", if gpu { "cuda" } else { "cpu" }, "model.device", device_why),
        choice("between ranks", backend, "train.ddp_backend", backend_why),
        choice("activations", "float32", "train.bf16, train.fp16", dtype_why),
        choice("micro-batch", "8 rows", "train.batch_size", "`auto` measures the best".to_owned()),
        choice(
            "threads a rank",
            &threads.to_string(),
            "train.num_threads",
            format!("{} for {} here", count(cores, "core"), count(local, "rank")),
        ),
        choice(
            "threads that tokenize",
            &cores.to_string(),
            "data.num_proc",
            "the first rank of a machine tokenizes into a file, the others wait: there is no data loader".to_owned(),
        ),
    ]
}

/// A line that names the machine and what is used of it. `device` is in words.
pub fn summary(host: &Host, device: &str, threads: usize) -> String {
    let cards = match host.cards.len() {
        0 => "no GPU".to_owned(),
        cards => count(cards, "GPU"),
    };
    let (system, cores, threads) = (host.system.name(), count(host.cores, "core"), count(threads, "thread"));
    format!("{system}, {cores}, {cards}: computed on {device}, {threads} a rank")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(name: &str, capability: Option<(u32, u32)>) -> Card {
        Card { name: name.to_owned(), capability }
    }

    fn host(system: System, cards: &[Card]) -> Host {
        Host { system, cards: cards.to_vec(), cores: 16 }
    }

    fn values(host: &Host, layout: Layout, engine: Engine) -> Vec<String> {
        choose(host, layout, engine).into_iter().map(|choice| choice.value).collect()
    }

    /// System, cards, layout, build; and what is expected.
    type Case<'a> = (System, &'a [Card], Layout, Engine, [&'static str; 4]);

    #[test]
    fn simulated_machines_get_what_they_have() {
        let (h100, rtx4090, t4) =
            (card("H100", Some((9, 0))), card("RTX 4090", Some((8, 9))), card("T4", Some((7, 5))));
        let unknown = card("unknown", None);
        let processes = |ranks, local| Layout { ranks, local, in_process: false };
        let threads = |ranks| Layout { ranks, local: ranks, in_process: true };
        let (linux, windows, macos) = (System::Linux, System::Windows, System::MacOs);
        let (two, eight) = ([rtx4090.clone(), rtx4090.clone()], vec![h100.clone(); 8]);
        // system, cards, layout, build: device, between ranks, activations, threads a rank
        let table: [Case<'_>; 15] = [
            (linux, &[], processes(1, 1), Engine::Cpu, ["cpu", "none", "float32", "16"]),
            (linux, &[], processes(4, 4), Engine::Cpu, ["cpu", "gloo", "float32", "4"]),
            (linux, &[], threads(4), Engine::Cpu, ["cpu", "threads", "float32", "4"]),
            (linux, &[], processes(64, 32), Engine::Cpu, ["cpu", "gloo", "float32", "1"]),
            (linux, &two, processes(2, 2), Engine::Cpu, ["cpu", "gloo", "float32", "8"]),
            (linux, &two, processes(2, 2), Engine::Cuda, ["cuda", "nccl", "float32", "8"]),
            (linux, &eight, processes(16, 8), Engine::Cuda, ["cuda", "nccl", "float32", "2"]),
            (linux, &two, processes(4, 4), Engine::Cuda, ["cuda", "gloo", "float32", "4"]),
            (linux, &[], processes(2, 2), Engine::Cuda, ["cpu", "gloo", "float32", "8"]),
            (linux, &[t4], processes(1, 1), Engine::Cuda, ["cuda", "none", "float32", "16"]),
            (linux, &[unknown, h100], processes(2, 2), Engine::Cuda, ["cuda", "nccl", "float32", "8"]),
            (windows, &two, processes(2, 2), Engine::Cuda, ["cuda", "gloo", "float32", "8"]),
            (windows, &[], processes(1, 1), Engine::Cpu, ["cpu", "none", "float32", "16"]),
            (macos, &[], processes(2, 2), Engine::Cpu, ["cpu", "gloo", "float32", "8"]),
            (macos, &two, processes(1, 1), Engine::Cuda, ["cpu", "none", "float32", "16"]),
        ];
        for (system, cards, layout, engine, expected) in table {
            let found = values(&host(system, cards), layout, engine);
            let [device, backend, dtype, _, threads, loaders] = &found[..] else { panic!("{found:?}") };
            assert_eq!(
                [device, backend, dtype, threads],
                expected.map(str::to_owned).each_ref(),
                "{system:?} {layout:?}"
            );
            assert_eq!(loaders, "16");
        }
    }

    #[test]
    fn every_choice_says_why_and_how_to_change_it() {
        let host = host(System::Linux, &[card("H100", Some((9, 0)))]);
        for choice in choose(&host, Layout { ranks: 2, local: 2, in_process: false }, Engine::Cuda) {
            assert!(!choice.why.is_empty() && !choice.key.is_empty(), "{choice:?}");
        }
        assert_eq!(ranks(&host, Engine::Cuda), 1);
        assert_eq!(
            (ranks(&Host { cards: Vec::new(), ..host.clone() }, Engine::Cuda), ranks(&host, Engine::Cpu)),
            (1, 1)
        );
    }
}
