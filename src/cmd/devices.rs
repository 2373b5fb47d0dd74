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
}

/// The GPUs of this machine that NVIDIA's driver knows.
pub fn gpus() -> usize {
    std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, Iterator::count)
}

/// The number of ranks on this machine, and what to tell the user of devices; `found` GPUs are there.
///
/// # Errors
/// [`crate::Kind::Config`]: more GPUs are asked for than there are, GPUs at all (this version computes on the CPU), or
/// what is no number.
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
    if let Some(text) = &asked.num_gpus {
        let number: usize =
            text.parse().map_err(|_| Error::config(format!("env NUM_GPUS={text}: expected a number")))?;
        if number > 1 {
            let message = if number > visible {
                format!("env NUM_GPUS={number}: {here}")
            } else {
                format!("env NUM_GPUS={number}: not supported")
            };
            return Err(Error::config(message).hint(LATER));
        }
    }
    if let Some(id) = asked.gpu_ids.iter().find(|&&id| id >= visible).or(asked.gpu_ids.first()) {
        let message =
            if *id >= visible { format!("--gpu-ids {id}: {here}") } else { format!("--gpu-ids {id}: not supported") };
        return Err(Error::config(message).hint(LATER));
    }
    match asked.nproc {
        "auto" => Ok((1, format!("{here}: one rank on all cores, --nproc N divides them"))),
        text => match text.parse() {
            Ok(number @ 1..=4096) => Ok((number, here)),
            _ => Err(Error::config(format!("--nproc {text}: expected a number up to 4096, or auto"))),
        },
    }
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
        };
        let number = |asked: &Asked<'_>, found| ranks(asked, found).unwrap().0;
        assert_eq!(number(&asked("auto", &[], None, None), 0), 1);
        assert_eq!(number(&asked("3", &[], Some("1"), Some("")), 0), 3);
        let said = |asked: &Asked<'_>, found| ranks(asked, found).unwrap().1;
        assert!(said(&asked("2", &[], None, None), 0).contains("no GPU here"));
        assert!(said(&asked("2", &[], None, Some("0,1,7,2")), 4).starts_with("2 of 4 GPUs"));
        assert!(said(&asked("2", &[], None, Some("GPU-5a,GPU-6b")), 2).starts_with("2 GPUs"));
        let refused = |asked: &Asked<'_>, found| ranks(asked, found).unwrap_err().message().to_owned();
        assert_eq!(refused(&asked("auto", &[], Some("2"), None), 0), "env NUM_GPUS=2: there is no GPU here");
        assert!(refused(&asked("auto", &[], Some("2"), Some("0")), 4).contains("1 of 4 GPUs here are visible"));
        assert_eq!(refused(&asked("auto", &[], Some("2"), None), 4), "env NUM_GPUS=2: not supported");
        assert_eq!(
            refused(&asked("auto", &[0, 3], None, None), 2),
            "--gpu-ids 3: 2 GPUs here are not used by this version"
        );
        assert!(refused(&asked("0", &[], None, None), 0).contains("--nproc 0"));
        assert!(refused(&asked("many", &[], None, None), 0).contains("--nproc many"));
    }
}
