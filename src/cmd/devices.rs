//! How many ranks a machine gets, from what is asked and what is there.
use crate::error::{Error, Result};

/// What the user asks for.
#[derive(Debug, Clone, Default)]
pub struct Asked<'a> {
    /// `--nproc`.
    pub nproc: &'a str,
    /// `--gpu-ids`.
    pub gpu_ids: &'a [usize],
    /// The variable `NUM_GPUS`.
    pub num_gpus: Option<String>,
    /// The variable `CUDA_VISIBLE_DEVICES`, also where it is empty.
    pub visible: Option<String>,
    /// What a file of Accelerate's says: ranks in all, machines, and where.
    pub file: Option<(usize, usize, String)>,
    /// Processors of this machine.
    pub cores: usize,
}

/// The GPUs of this machine that NVIDIA's driver knows.
pub fn gpus() -> usize {
    std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, Iterator::count)
}

/// The most ranks a core that `NUM_GPUS` gets where there is no GPU: more was meant for another machine.
const RANKS_A_CORE: usize = 2;

/// The number of ranks on this machine, and what to tell the user of devices; `found` GPUs are there. This version computes on the
/// CPU: ranks that are asked for as GPUs are ranks on the CPU, and it says so.
///
/// # Errors
/// [`crate::Kind::Config`]: more GPUs are asked for than there are, or what is no number.
pub fn ranks(asked: &Asked<'_>, found: usize) -> Result<(usize, String)> {
    const LATER: &str = "training on GPUs is not yet part of this version; --nproc N starts N ranks on the CPU";
    let visible = match asked.visible.as_deref() {
        None => found,
        // A list that names one that is not there ends there, as CUDA reads it.
        Some(list) => {
            let there = |id: &&str| id.trim().parse::<usize>().map_or(id.starts_with("GPU-"), |id| id < found);
            list.split(',').take_while(there).count().min(found)
        }
    };
    let here = match (found, visible) {
        (0, _) => "there is no GPU here".to_owned(),
        (_, visible) if visible == found => format!("{found} GPUs here are not used by this version"),
        _ => format!("{visible} of {found} GPUs here are visible, and not used by this version"),
    };
    if let Some(id) = asked.gpu_ids.iter().find(|&&id| found > 0 && id >= visible) {
        return Err(Error::config(format!("--gpu-ids {id}: {here}")).hint(LATER));
    }
    let explicit = match asked.nproc {
        "auto" => None,
        text => match text.parse() {
            Ok(number @ 1..=4096) => Some(number),
            _ => return Err(Error::config(format!("--nproc {text}: expected a number up to 4096, or auto"))),
        },
    };
    let plural = |count: usize| if count == 1 { "1 rank".to_owned() } else { format!("{count} ranks") };
    if !asked.gpu_ids.is_empty() {
        let ids = asked.gpu_ids.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let number = asked.gpu_ids.len();
        if explicit.is_some_and(|explicit| explicit != number) {
            return Err(Error::config(format!("--gpu-ids {ids} contradicts --nproc {}", asked.nproc)));
        }
        if (1..number).any(|at| asked.gpu_ids[..at].contains(&asked.gpu_ids[at])) {
            return Err(Error::config(format!("--gpu-ids {ids}: a GPU is named twice")));
        }
        if found == 0 && number > RANKS_A_CORE * asked.cores {
            return Err(Error::config(format!("--gpu-ids {ids}: {here}, and {} cores", asked.cores)).hint(LATER));
        }
        return Ok((number, format!("--gpu-ids {ids}: {} on the CPU; {here}", plural(number))));
    }
    if let Some(text) = &asked.num_gpus {
        let number: usize = text
            .parse()
            .ok()
            .filter(|number| (1..=4096).contains(number))
            .ok_or_else(|| Error::config(format!("env NUM_GPUS={text}: expected a number up to 4096")))?;
        if explicit.is_some_and(|explicit| explicit != number) {
            return Err(Error::config(format!("env NUM_GPUS={number} contradicts --nproc {}", asked.nproc)));
        }
        let most = if found > 0 { visible } else { RANKS_A_CORE * asked.cores };
        if number > most {
            let cores = if found > 0 { String::new() } else { format!(", and {} cores", asked.cores) };
            return Err(Error::config(format!("env NUM_GPUS={number}: {here}{cores}")).hint(LATER));
        }
        return Ok((number, format!("NUM_GPUS={number}: {} on the CPU; {here}", plural(number))));
    }
    if let Some(explicit) = explicit {
        return Ok((explicit, here));
    }
    if let Some((processes, machines, source)) = &asked.file {
        if !processes.is_multiple_of(*machines) {
            let message = format!("{source}: {processes} processes on {machines} machines, as many on each");
            return Err(Error::config(message).hint("num_processes counts those of all machines"));
        }
        let number = processes / machines;
        return Ok((number, format!("{source}: {} on the CPU; {here}", plural(number))));
    }
    Ok((1, format!("{here}: one rank on all cores, --nproc N divides them")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_held_against_what_is_there() {
        let asked = |nproc, gpu_ids, num_gpus: Option<&str>, visible: Option<&str>| Asked {
            nproc,
            gpu_ids,
            num_gpus: num_gpus.map(str::to_owned),
            visible: visible.map(str::to_owned),
            file: None,
            cores: 2,
        };
        let number = |asked: &Asked<'_>, found| ranks(asked, found).unwrap().0;
        assert_eq!(number(&asked("auto", &[], None, None), 0), 1);
        assert_eq!(number(&asked("3", &[], Some("3"), Some("")), 0), 3);
        let said = |asked: &Asked<'_>, found| ranks(asked, found).unwrap().1;
        assert!(said(&asked("2", &[], None, None), 0).contains("no GPU here"));
        assert!(said(&asked("2", &[], None, Some("0,1,7,2")), 4).starts_with("2 of 4 GPUs"));
        assert!(said(&asked("2", &[], None, Some("GPU-5a,GPU-6b")), 2).starts_with("2 GPUs"));
        let refused = |asked: &Asked<'_>, found| ranks(asked, found).unwrap_err().message().to_owned();
        let refusal = refused(&asked("auto", &[], Some("9"), None), 0);
        assert_eq!(refusal, "env NUM_GPUS=9: there is no GPU here, and 2 cores");
        assert!(refused(&asked("auto", &[], Some("2"), Some("0")), 4).contains("1 of 4 GPUs here are visible"));
        assert!(refused(&asked("auto", &[], Some("0"), None), 4).contains("expected a number"));
        assert_eq!(refused(&asked("3", &[], Some("2"), None), 0), "env NUM_GPUS=2 contradicts --nproc 3");
        assert_eq!(number(&asked("auto", &[], Some("2"), None), 0), 2);
        assert_eq!(number(&asked("auto", &[], Some("4"), None), 4), 4);
        let text = said(&asked("auto", &[], Some("2"), None), 0);
        assert_eq!(text, "NUM_GPUS=2: 2 ranks on the CPU; there is no GPU here");
        let file = |nproc, processes, machines| Asked {
            file: Some((processes, machines, "acc.yaml:3 num_processes".to_owned())),
            ..asked(nproc, &[], None, None)
        };
        assert_eq!((number(&file("auto", 6, 2), 0), number(&file("2", 6, 2), 0)), (3, 2));
        assert!(said(&file("auto", 2, 1), 0).starts_with("acc.yaml:3 num_processes: 2 ranks on the CPU"));
        assert!(refused(&file("auto", 5, 2), 0).contains("5 processes on 2 machines"));
        assert_eq!(
            refused(&asked("auto", &[0, 3], None, None), 2),
            "--gpu-ids 3: 2 GPUs here are not used by this version"
        );
        assert_eq!(number(&asked("auto", &[0, 1], None, None), 4), 2);
        assert_eq!(
            said(&asked("auto", &[0, 1], None, None), 0),
            "--gpu-ids 0,1: 2 ranks on the CPU; there is no GPU here"
        );
        assert_eq!(refused(&asked("3", &[0, 1], None, None), 0), "--gpu-ids 0,1 contradicts --nproc 3");
        assert!(refused(&asked("auto", &[1, 1], None, None), 0).contains("named twice"));
        assert!(refused(&asked("auto", &[0, 1, 2, 3, 4], None, None), 0).contains("2 cores"));
        assert!(refused(&asked("0", &[], None, None), 0).contains("--nproc 0"));
        assert!(refused(&asked("many", &[], None, None), 0).contains("--nproc many"));
    }
}
