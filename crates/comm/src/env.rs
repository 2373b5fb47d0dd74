//! Reads the launcher's environment variables: `tunesmith launch`, torchrun (`accelerate launch` and Kubernetes' `PyTorchJob` set
//! the same), Open MPI, MPICH and other PMI launchers, Slurm. The first that matches counts.
use super::World;
use super::slurm::{first_host, tasks_of};
use super::token::{MAKE_TOKEN, RunToken, TOKEN};
use tunesmith_base::error::{Error, Result};

/// The variable with `address:port` of the rendezvous that `tunesmith launch` hosts.
pub const STORE: &str = "TUNESMITH_STORE";
/// The variable with the file for a rank's final error, which the launcher shows once.
pub const ERROR_FILE: &str = "TUNESMITH_ERROR_FILE";
/// The default port of the rendezvous, the same as torchrun's.
const PORT: u16 = 29500;

/// The `address:port` at which the ranks of a run meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// The address of the store that the launcher serves.
    Launcher(String),
    /// The address of torchrun's store, in which rank 0 publishes the address of its own store.
    TorchStore(String),
    /// The address of the store that rank 0 serves.
    RankZero(String),
}

/// What a launcher tells a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The launcher's name, for messages.
    pub launcher: &'static str,
    /// The rank's number and the number of ranks.
    pub world: World,
    /// The `address:port` at which the ranks meet.
    pub endpoint: Endpoint,
    /// The run's token; `None` with [`Endpoint::TorchStore`], where rank 0 makes one.
    pub token: Option<RunToken>,
}

/// Reads the environment; `None` without a launcher, or with one rank only.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`], naming the variable: it is missing, no number, contradicts another, or asks for several ranks without
/// the variables that go with it.
pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>> {
    let variables = Variables(&|name| variable(name).filter(|value| !value.is_empty()));
    let Some((launcher, world)) = variables.world()? else { return Ok(None) };
    if world.rank >= world.size || world.local_rank >= world.local_size || world.local_size > world.size {
        let World { rank, size, local_rank, local_size } = world;
        return Err(Error::config(format!(
            "{launcher}: rank {rank} of {size}, {local_rank} of {local_size} on its machine: these contradict each other"
        ))
        .hint("ranks count from 0; unset RANK and WORLD_SIZE (and LOCAL_RANK, LOCAL_WORLD_SIZE) to run alone"));
    }
    if world.size == 1 {
        return Ok(None);
    }
    let endpoint = variables.endpoint(launcher, world)?;
    let token = match (variables.get(TOKEN), &endpoint) {
        (Some(token), _) => Some(RunToken::given(&token)?),
        (None, Endpoint::TorchStore(_)) => None,
        (None, _) => {
            return Err(Error::config(format!(
                "{launcher}: env {TOKEN} is not set: any process could pass for a rank"
            ))
            .hint(MAKE_TOKEN));
        }
    };
    Ok(Some(Launch { launcher, world, endpoint, token }))
}

struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

const OURS: &str = "tunesmith launch";
const TORCH: &str = "torchrun";
const SLURM: &str = "Slurm";

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let number = text.trim().parse();
        number.map(Some).map_err(|error| {
            Error::config(format!("env {name}={text}: expected a number"))
                .hint("the launcher sets it; unset it to run alone")
                .with_source(error)
        })
    }

    fn needed(&self, launcher: &str, name: &str) -> Result<usize> {
        let missing =
            || Error::config(format!("{launcher}: env {name} is not set")).hint("set it, or unset the others");
        self.number(name)?.ok_or_else(missing)
    }

    fn world(&self) -> Result<Option<(&'static str, World)>> {
        let launcher = if self.get(STORE).is_some() { OURS } else { TORCH };
        if self.get("RANK").is_some() && self.get("WORLD_SIZE").is_some() {
            let (rank, size) = (self.needed(launcher, "RANK")?, self.needed(launcher, "WORLD_SIZE")?);
            // `PyTorchJob` sets neither of the two variables: its pods have one rank each.
            let local_rank = self.number("LOCAL_RANK")?.unwrap_or(0);
            let local_size = self.number("LOCAL_WORLD_SIZE")?.unwrap_or(1).max(local_rank + 1);
            return Ok(Some((launcher, World { rank, size, local_rank, local_size })));
        }
        for (launcher, [rank, size, local_rank, local_size]) in [
            ("mpirun", ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"].map(|name| format!("OMPI_COMM_WORLD_{name}"))),
            ("PMI", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"].map(String::from)),
        ] {
            if self.get(&rank).is_some() && self.get(&size).is_some() {
                let (rank, size) = (self.needed(launcher, &rank)?, self.needed(launcher, &size)?);
                // If the launcher says nothing about machines, there is only one.
                let local_rank = self.number(&local_rank)?.unwrap_or(rank);
                let local_size = self.number(&local_size)?.unwrap_or(size);
                return Ok(Some((launcher, World { rank, size, local_rank, local_size })));
            }
        }
        // A batch script has SLURM_PROCID too, but is no task: only srun sets the number of a step.
        if self.get("SLURM_STEP_ID").is_some() && self.get("SLURM_PROCID").is_some() {
            let rank = self.needed(SLURM, "SLURM_PROCID")?;
            let size = match self.number("SLURM_STEP_NUM_TASKS")? {
                Some(size) => size,
                None => self.needed(SLURM, "SLURM_NTASKS")?,
            };
            let (local_rank, node) = (self.needed(SLURM, "SLURM_LOCALID")?, self.number("SLURM_NODEID")?.unwrap_or(0));
            let counts = self.get("SLURM_STEP_TASKS_PER_NODE").or_else(|| self.get("SLURM_TASKS_PER_NODE"));
            let local_size = counts.and_then(|counts| tasks_of(&counts, node)).unwrap_or(local_rank + 1);
            return Ok(Some((SLURM, World { rank, size, local_rank, local_size })));
        }
        self.refuse_lone()?;
        Ok(None)
    }

    /// Refuses variables of a rank among several where RANK or `WORLD_SIZE` is missing: a process that trained alone would
    /// pass for one of them. What fits a single process, or is no number, may mean anything.
    fn refuse_lone(&self) -> Result<()> {
        for (name, alone) in [("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0)] {
            let text = self.get(name).unwrap_or_default();
            if text.trim().parse::<usize>().is_ok_and(|number| number > alone) {
                let missing: Vec<_> = ["RANK", "WORLD_SIZE"].into_iter().filter(|it| self.get(it).is_none()).collect();
                let missing = missing.join(" and ");
                return Err(Error::config(format!(
                    "env {name}={text} names one of several ranks, but {missing} is not set"
                ))
                .hint(format!(
                    "unset {name} to run alone, set {missing} too, or start the ranks with tunesmith launch --nproc N"
                )));
            }
        }
        Ok(())
    }

    fn endpoint(&self, launcher: &'static str, world: World) -> Result<Endpoint> {
        if let Some(address) = self.get(STORE) {
            return Ok(Endpoint::Launcher(address));
        }
        let port = match self.number("MASTER_PORT")? {
            Some(port) => u16::try_from(port).map_err(|error| {
                Error::config(format!("env MASTER_PORT={port}: expected a number up to 65535")).with_source(error)
            })?,
            None => PORT,
        };
        let host = match self.get("MASTER_ADDR") {
            Some(host) => host,
            None if launcher == SLURM => {
                let list =
                    self.get("SLURM_STEP_NODELIST").or_else(|| self.get("SLURM_JOB_NODELIST")).unwrap_or_default();
                first_host(&list).ok_or_else(|| {
                    Error::config(format!("{SLURM}: no first host in SLURM_STEP_NODELIST={list:?}"))
                        .hint("set MASTER_ADDR to the first machine's name")
                })?
            }
            None if world.local_size == world.size => "127.0.0.1".to_owned(),
            None => {
                return Err(Error::config(format!("{launcher}: env MASTER_ADDR is not set"))
                    .hint("set it to the name or address of rank 0's machine"));
            }
        };
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let agent = self.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        Ok(if agent { Endpoint::TorchStore(address) } else { Endpoint::RankZero(address) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Result<Option<Launch>> {
        read(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    fn endpoint_of(variables: &[(&str, &str)]) -> (&'static str, [usize; 4], Endpoint) {
        let token = [(TOKEN, "0123456789abcdef")];
        let found = launch(&[variables, &token[..]].concat()).unwrap().unwrap();
        let World { rank, size, local_rank, local_size } = found.world;
        (found.launcher, [rank, size, local_rank, local_size], found.endpoint)
    }

    const TORCH4: [(&str, &str); 6] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("MASTER_PORT", "4000"),
    ];

    #[test]
    fn every_launcher_is_understood() {
        let first = |address: &str| Endpoint::RankZero(address.to_owned());
        assert_eq!(endpoint_of(&TORCH4), ("torchrun", [3, 4, 1, 2], first("10.0.0.1:4000")));
        let agent = [&TORCH4[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(endpoint_of(&agent).2, Endpoint::TorchStore("10.0.0.1:4000".to_owned()));
        let ours = [&TORCH4[..], &[(STORE, "127.0.0.1:9")]].concat();
        assert_eq!(
            endpoint_of(&ours),
            ("tunesmith launch", [3, 4, 1, 2], Endpoint::Launcher("127.0.0.1:9".to_owned()))
        );
        // PyTorchJob.
        assert_eq!(
            endpoint_of(&[
                ("RANK", "1"),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "job-master-0"),
                ("MASTER_PORT", "23456")
            ]),
            ("torchrun", [1, 2, 0, 1], first("job-master-0:23456"))
        );
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        assert_eq!(endpoint_of(&mpi), ("mpirun", [1, 2, 1, 2], first("127.0.0.1:29500")));
        assert_eq!(
            endpoint_of(&[("PMI_RANK", "0"), ("PMI_SIZE", "3"), ("MASTER_ADDR", "::1")]),
            ("PMI", [0, 3, 0, 3], first("[::1]:29500"))
        );
        let slurm = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "7"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "1"),
            ("SLURM_TASKS_PER_NODE", "4,3"),
            ("SLURM_JOB_NODELIST", "gpu[07-08]"),
        ];
        assert_eq!(endpoint_of(&slurm), ("Slurm", [5, 7, 1, 3], first("gpu07:29500")));
    }

    #[test]
    fn without_a_launcher_there_is_one_rank() {
        assert_eq!(launch(&[]).unwrap(), None);
        assert_eq!(launch(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), None);
        for one in ["", "0", "captain"] {
            assert_eq!(launch(&[("RANK", one)]).unwrap(), None);
        }
        assert_eq!(launch(&[("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")]).unwrap(), None);
        // A batch script of Slurm, not a task.
        assert_eq!(launch(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_LOCALID", "0")]).unwrap(), None);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let said = |variables: &[(&str, &str)]| {
            let error = launch(variables).unwrap_err();
            assert_eq!(error.kind(), tunesmith_base::Kind::Config);
            error.message().to_owned()
        };
        for (variable, value, missing) in [
            ("WORLD_SIZE", "2", "RANK is not set"),
            ("RANK", "1", "WORLD_SIZE is not set"),
            ("LOCAL_RANK", "1", "RANK and WORLD_SIZE is not set"),
            ("LOCAL_WORLD_SIZE", "4", "RANK and WORLD_SIZE is not set"),
        ] {
            let told = said(&[(variable, value)]);
            assert!(told.contains(&format!("env {variable}={value} ")) && told.contains(missing), "{told}");
        }
        // Those of another launcher count before.
        let slurm = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_LOCALID", "0")];
        assert_eq!(launch(&[&slurm[..], &[("WORLD_SIZE", "8")]].concat()).unwrap(), None);
        assert!(said(&TORCH4).contains("TUNESMITH_TOKEN is not set"));
        assert!(said(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("env RANK=x: expected a number"));
        assert!(said(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("rank 2 of 2"));
        let spread = [("RANK", "0"), ("WORLD_SIZE", "2"), (TOKEN, "0123456789abcdef")];
        assert!(said(&spread).contains("MASTER_ADDR is not set"));
        let port = [&TORCH4[..5], &[("MASTER_PORT", "70000")]].concat();
        assert!(said(&port).contains("MASTER_PORT=70000"));
        // torchrun's agent carries a token of rank 0's making.
        let agent = [&TORCH4[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(launch(&agent).unwrap().unwrap().token, None);
    }
}
