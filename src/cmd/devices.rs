//! Decides how many ranks a machine gets, from the request and its devices.
use crate::error::{Error, Result};
use crate::words::count;

/// The user's request, from flags, variables and a file of Accelerate.
#[derive(Debug, Clone, Default)]
pub(super) struct RankRequest<'a> {
    pub nproc: &'a str,
    pub gpu_ids: &'a [usize],
    pub num_gpus: Option<String>,
    /// The variable `CUDA_VISIBLE_DEVICES`, even if it is empty.
    pub visible: Option<String>,
    /// Accelerate's `num_processes` and `num_machines`, and the place in its file.
    pub file: Option<(usize, usize, String)>,
    /// The `gpu_ids` of a file of Accelerate's.
    pub file_gpu_ids: &'a [usize],
    /// Number of cores of this machine.
    pub cores: usize,
    /// Whether `model.device` lets ranks compute on GPUs.
    pub on_gpus: bool,
}

/// The ranks to start on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Started {
    pub ranks: usize,
    /// The reason for this number, for the user.
    pub note: String,
    /// `CUDA_VISIBLE_DEVICES` of the ranks, if GPUs were chosen.
    pub visible: Option<String>,
}

/// The GPUs of this machine that NVIDIA's driver knows.
pub(super) fn gpus() -> usize {
    std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, Iterator::count)
}

/// The default number of ranks: two, if there are two cores. More ranks on one processor are not faster, and each holds the
/// model.
pub fn several(cores: usize) -> usize {
    cores.clamp(1, 2)
}

/// The most ranks per core that `NUM_GPUS` may request without a GPU. A larger number was meant for another machine.
const RANKS_A_CORE: usize = 2;

/// Decides the number of ranks on a machine with `found` GPUs. If the ranks still compute on the CPU, the note says so.
///
/// # Errors
/// [`crate::Kind::Config`]: more GPUs are requested than exist, numbers contradict each other, or a value is not a
/// number.
pub(super) fn ranks(request: &RankRequest<'_>, found: usize) -> Result<Started> {
    const OTHERWISE: &str =
        "--nproc N starts N ranks, which share the GPUs that are there, or compute on the CPU (model.device: cpu)";
    let listed: Vec<String> = match request.visible.as_deref() {
        None => (0..found).map(|id| id.to_string()).collect(),
        // CUDA ignores the list from the first missing device on.
        Some(list) => {
            let there = |id: &&str| id.trim().parse::<usize>().map_or(id.starts_with("GPU-"), |id| id < found);
            list.split(',').take_while(there).take(found).map(|id| id.trim().to_owned()).collect()
        }
    };
    let visible = listed.len();
    let here = match (found, visible) {
        (0, _) => "there is no GPU here".to_owned(),
        (_, visible) if visible == found => format!("{} here", count(found, "GPU")),
        _ => format!("{visible} of {found} GPUs here are visible"),
    };
    let unused = found > 0 && !request.on_gpus;
    let here = if unused { format!("{here}, not used: model.device is cpu") } else { here };
    let place = if unused || found == 0 { " on the CPU" } else { "" };
    let chosen = if request.gpu_ids.is_empty() { request.file_gpu_ids } else { request.gpu_ids };
    let ids = chosen.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    if let Some(id) = chosen.iter().find(|&&id| found > 0 && id >= visible) {
        return Err(Error::config(format!("--gpu-ids {ids}: there is no GPU {id}; {here}")).hint(OTHERWISE));
    }
    if (1..chosen.len()).any(|at| chosen[..at].contains(&chosen[at])) {
        return Err(Error::config(format!("--gpu-ids {ids}: a GPU is named twice")));
    }
    if found == 0 && request.gpu_ids.len() > RANKS_A_CORE * request.cores {
        return Err(
            Error::config(format!("--gpu-ids {ids}: {here}, and {}", count(request.cores, "core"))).hint(OTHERWISE)
        );
    }
    let cuda = chosen.iter().filter_map(|&id| listed.get(id).cloned()).collect::<Vec<_>>().join(",");
    let started =
        |ranks: usize, note: String| Ok(Started { ranks, note, visible: (!cuda.is_empty()).then(|| cuda.clone()) });
    // All sources of the number, by precedence.
    let mut said: Vec<(String, usize)> = Vec::new();
    match request.nproc {
        "auto" => {}
        text => match text.parse() {
            Ok(number @ 1..=4096) => said.push((format!("--nproc {number}"), number)),
            _ => return Err(Error::config(format!("--nproc {text}: expected a number from 1 to 4096, or auto"))),
        },
    }
    if !request.gpu_ids.is_empty() {
        said.push((format!("--gpu-ids {ids}"), chosen.len()));
    }
    if let Some(text) = &request.num_gpus {
        let number: usize = text
            .parse()
            .ok()
            .filter(|number| (1..=4096).contains(number))
            .ok_or_else(|| Error::config(format!("env NUM_GPUS={text}: expected a number from 1 to 4096")))?;
        let most = if found > 0 { visible } else { RANKS_A_CORE * request.cores };
        if number > most {
            let cores = if found > 0 { String::new() } else { format!(", and {}", count(request.cores, "core")) };
            return Err(Error::config(format!("env NUM_GPUS={number}: {here}{cores}")).hint(OTHERWISE));
        }
        said.push((format!("NUM_GPUS={number}"), number));
    }
    if let Some((one, other)) = said.iter().find_map(|other| Some((said.first()?, other)).filter(|(a, b)| a.1 != b.1)) {
        return Err(Error::config(format!("{} contradicts {}", other.0, one.0)));
    }
    if let Some((source, number)) = said.last() {
        let note = if source.starts_with("--nproc") {
            here
        } else {
            format!("{source}: {}{place}; {here}", count(*number, "rank"))
        };
        return started(*number, note);
    }
    if let Some((processes, machines, source)) = &request.file {
        if !processes.is_multiple_of(*machines) {
            let message =
                format!("{source}: {} on {}, as many on each", count(processes, "process"), count(machines, "machine"));
            return Err(Error::config(message).hint("num_processes counts those of all machines"));
        }
        let number = processes / machines;
        return started(number, format!("{source}: {}{place}; {here}", count(number, "rank")));
    }
    if !chosen.is_empty() {
        return started(chosen.len(), format!("gpu_ids: {ids}: {}{place}; {here}", count(chosen.len(), "rank")));
    }
    if request.on_gpus && visible > 0 {
        return started(visible, format!("{here}: {}, one a GPU", count(visible, "rank")));
    }
    let number = several(request.cores);
    let why = if number == 1 {
        "one core"
    } else {
        "more ranks on one processor are no faster and each holds the model; --nproc N overrides this"
    };
    started(number, format!("{here}: {}; {why}", count(number, "rank")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_held_against_what_is_there() {
        let asked = |nproc, gpu_ids, num_gpus: Option<&str>, visible: Option<&str>| RankRequest {
            nproc,
            gpu_ids,
            num_gpus: num_gpus.map(str::to_owned),
            visible: visible.map(str::to_owned),
            cores: 2,
            ..RankRequest::default()
        };
        let number = |request: &RankRequest<'_>, found| ranks(request, found).unwrap().ranks;
        assert_eq!(number(&asked("auto", &[], None, None), 0), 2, "who launches wants several");
        assert_eq!(number(&RankRequest { cores: 1, ..asked("auto", &[], None, None) }, 0), 1);
        assert_eq!(number(&asked("3", &[], Some("3"), Some("")), 0), 3);
        let said = |request: &RankRequest<'_>, found| ranks(request, found).unwrap().note;
        assert!(said(&asked("2", &[], None, None), 0).contains("no GPU here"));
        assert!(said(&asked("2", &[], None, Some("0,1,7,2")), 4).starts_with("2 of 4 GPUs"));
        assert!(said(&asked("2", &[], None, None), 4).ends_with("4 GPUs here, not used: model.device is cpu"));
        let on_gpus = RankRequest { on_gpus: true, ..asked("auto", &[], None, Some("0,2,3")) };
        assert_eq!(number(&on_gpus, 4), 3);
        assert_eq!(said(&on_gpus, 4), "3 of 4 GPUs here are visible: 3 ranks, one a GPU");
        assert_eq!(number(&on_gpus, 0), 2, "the CPU, where there is none");
        assert_eq!(
            said(&RankRequest { on_gpus: true, ..asked("auto", &[], Some("2"), None) }, 2),
            "NUM_GPUS=2: 2 ranks; 2 GPUs here"
        );
        assert!(said(&asked("2", &[], None, Some("GPU-5a,GPU-6b")), 2).starts_with("2 GPUs"));
        let refused = |request: &RankRequest<'_>, found| ranks(request, found).unwrap_err().message().to_owned();
        let refusal = refused(&asked("auto", &[], Some("9"), None), 0);
        assert_eq!(refusal, "env NUM_GPUS=9: there is no GPU here, and 2 cores");
        assert!(refused(&asked("auto", &[], Some("2"), Some("0")), 4).contains("1 of 4 GPUs here are visible"));
        assert!(refused(&asked("auto", &[], Some("0"), None), 4).contains("expected a number"));
        assert_eq!(refused(&asked("3", &[], Some("2"), None), 0), "NUM_GPUS=2 contradicts --nproc 3");
        assert_eq!(number(&asked("auto", &[], Some("2"), None), 0), 2);
        assert_eq!(number(&asked("auto", &[], Some("4"), None), 4), 4);
        let text = said(&asked("auto", &[], Some("2"), None), 0);
        assert_eq!(text, "NUM_GPUS=2: 2 ranks on the CPU; there is no GPU here");
        let file = |nproc, processes, machines| RankRequest {
            file: Some((processes, machines, "acc.yaml:3 num_processes".to_owned())),
            ..asked(nproc, &[], None, None)
        };
        assert_eq!((number(&file("auto", 6, 2), 0), number(&file("2", 6, 2), 0)), (3, 2));
        assert!(said(&file("auto", 2, 1), 0).starts_with("acc.yaml:3 num_processes: 2 ranks on the CPU"));
        assert!(refused(&file("auto", 5, 2), 0).contains("5 processes on 2 machines"));
        assert!(refused(&asked("0", &[], None, None), 0).contains("--nproc 0"));
        assert!(refused(&asked("many", &[], None, None), 0).contains("--nproc many"));
    }

    #[test]
    fn gpu_ids_say_how_many_ranks_and_which_gpus() {
        let asked = |gpu_ids, visible: Option<&str>| RankRequest {
            nproc: "auto",
            gpu_ids,
            visible: visible.map(str::to_owned),
            cores: 8,
            ..RankRequest::default()
        };
        let here = ranks(&asked(&[0, 1, 5], None), 0).unwrap();
        assert_eq!((here.ranks, here.visible), (3, None));
        assert_eq!(here.note, "--gpu-ids 0,1,5: 3 ranks on the CPU; there is no GPU here");
        assert_eq!(ranks(&asked(&[3, 1], None), 4).unwrap().visible.as_deref(), Some("3,1"));
        assert_eq!(
            ranks(&asked(&[1], Some("2,3")), 4).unwrap().visible.as_deref(),
            Some("3"),
            "of those that are visible"
        );
        let refused = |request: &RankRequest<'_>, found| ranks(request, found).unwrap_err().message().to_owned();
        assert!(refused(&asked(&[0, 3], None), 2).contains("--gpu-ids 0,3: there is no GPU 3; 2 GPUs here"));
        assert!(refused(&asked(&[1, 1], None), 2).contains("named twice"));
        assert!(refused(&RankRequest { cores: 2, ..asked(&[0, 1, 2, 3, 4], None) }, 0).contains("2 cores"));
        let contradicts = RankRequest { nproc: "3", ..asked(&[0, 1], None) };
        assert_eq!(refused(&contradicts, 4), "--gpu-ids 0,1 contradicts --nproc 3");
        // Accelerate's file: num_processes counts, gpu_ids choose.
        let file = RankRequest { file: Some((2, 1, "a:1".to_owned())), file_gpu_ids: &[2, 3], ..asked(&[], None) };
        let started = ranks(&file, 4).unwrap();
        assert_eq!((started.ranks, started.visible.as_deref()), (2, Some("2,3")));
        assert_eq!(ranks(&RankRequest { file: None, ..file }, 4).unwrap().ranks, 2);
    }
}
