//! Claims of foreign files about the run as a whole: rows of a step, numbers of ranks and machines.
use crate::auto_values::Auto;
use crate::schema::Config;
use crate::source::Source;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;

/// What foreign files claim about the run as a whole, each with its source.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Claims {
    /// Rows of an optimizer step over all ranks: DeepSpeed's `train_batch_size`.
    pub rows: Option<(usize, Source)>,
    /// Whether a missing micro-batch size or accumulation count follows from `rows`, as in DeepSpeed.
    pub derives: bool,
    /// Number of ranks on all machines: `num_processes`.
    pub processes: Option<(usize, Source)>,
    /// Number of machines of the run: `num_machines`.
    pub machines: Option<(usize, Source)>,
    /// Index of this machine, from 0: `machine_rank`.
    pub machine_rank: Option<(usize, Source)>,
    /// Address of the first machine: `main_process_ip`.
    pub main_address: Option<(String, Source)>,
    /// Port on the first machine: `main_process_port`.
    pub main_port: Option<(u16, Source)>,
    /// GPUs of this machine: `gpu_ids`.
    pub gpu_ids: Option<(Vec<usize>, Source)>,
}

impl Claims {
    /// Adds the claims of another file; those that are already there stay.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: both say how many rows a step has, and differ.
    pub(super) fn merge(&mut self, other: Self) -> Result<()> {
        let Self { rows, derives, processes, machines, machine_rank, main_address, main_port, gpu_ids } = other;
        if let (Some((first, one)), Some((second, other))) = (&self.rows, &rows)
            && first != second
        {
            return Err(Error::config(format!("{one}: {first} contradicts {other}: {second}")));
        }
        self.derives |= derives;
        self.rows = self.rows.take().or(rows);
        self.processes = self.processes.take().or(processes);
        self.machines = self.machines.take().or(machines);
        self.machine_rank = self.machine_rank.take().or(machine_rank);
        self.main_address = self.main_address.take().or(main_address);
        self.main_port = self.main_port.take().or(main_port);
        self.gpu_ids = self.gpu_ids.take().or(gpu_ids);
        Ok(())
    }

    /// Checks the claims against `world` ranks, of which `local` are on this machine, and computes the batch size or accumulation
    /// count that follows from `rows`. `launcher` is the program that started the ranks, if any.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: a claim does not hold; the error names both sides.
    pub fn check_ranks(&self, config: &mut Config, world: usize, local: usize, launcher: Option<&str>) -> Result<()> {
        let ranks = |count: usize| format!("{count} rank{}", if count == 1 { "" } else { "s" });
        if let Some((processes, source)) = &self.processes
            && *processes != world
        {
            let who = launcher.map_or_else(|| "this is".to_owned(), |launcher| format!("{launcher} has started"));
            return Err(Error::config(format!("{source}: {processes}, but {who} {}", ranks(world))).hint(
                "`tunesmith launch -- train CONFIG` starts as many as the file says; or change num_processes in it",
            ));
        }
        if let Some((machines, source)) = &self.machines
            && machines.saturating_mul(local) != world
        {
            let message = format!(
                "{source}: {machines}, but there are {} with {local} on this machine, so {}",
                ranks(world),
                count(world.div_ceil(local.max(1)), "machine")
            );
            return Err(Error::config(message).hint("every machine starts as many ranks; change num_machines"));
        }
        let Some((rows, source)) = &self.rows else { return Ok(()) };
        let train = &mut config.train;
        let exactly = |unit: usize, what: &str| {
            let divides = unit > 0 && rows.is_multiple_of(unit) && rows / unit > 0;
            let refusal = || {
                Error::config(format!(
                    "{source}: {} a step cannot be made of {what} x {}",
                    count(rows, "row"),
                    ranks(world)
                ))
            };
            divides.then(|| rows / unit).ok_or_else(refusal)
        };
        match (train.batch_size, train.grad_accum) {
            (Auto::Given(batch), Auto::Auto) if self.derives => {
                train.grad_accum = Auto::Given(exactly(
                    batch.saturating_mul(world),
                    &format!("{} of a micro-batch", count(batch, "row")),
                )?);
                train.effective_batch = None;
            }
            (Auto::Auto, Auto::Given(accum)) if self.derives => {
                train.batch_size = Auto::Given(exactly(accum.saturating_mul(world), &count(accum, "micro-batch"))?);
                train.effective_batch = None;
            }
            (Auto::Given(batch), Auto::Given(accum)) => {
                let product = batch.saturating_mul(accum).saturating_mul(world);
                if product == *rows {
                    return Ok(());
                }
                let message = format!(
                    "{source}: {rows}, but train.batch_size {batch} x train.grad_accum {accum} x {} = {product}",
                    ranks(world)
                );
                return Err(Error::config(message).hint("change one of them, or set train_batch_size: \"auto\""));
            }
            // What is measured aims at `effective_batch`, which is these rows.
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(key: &str) -> Source {
        Source::Foreign { place: "ds.json:1".to_owned(), key: key.to_owned() }
    }

    fn settled(claims: &Claims, batch: Auto<usize>, accum: Auto<usize>, world: usize) -> Result<(usize, usize)> {
        let mut config = Config::default();
        (config.train.batch_size, config.train.grad_accum) = (batch, accum);
        config.train.effective_batch = claims.rows.as_ref().map(|(rows, _)| *rows);
        claims.check_ranks(&mut config, world, world, Some("torchrun"))?;
        Ok((config.train.batch_size.or(0), config.train.grad_accum.or(0)))
    }

    #[test]
    fn rows_of_a_step_are_checked_and_divided() {
        let rows = |rows| Claims { rows: Some((rows, at("train_batch_size"))), derives: true, ..Claims::default() };
        let (given, auto) = (Auto::Given, Auto::Auto);
        assert_eq!(settled(&rows(64), given(4), given(8), 2).unwrap(), (4, 8));
        assert_eq!(settled(&rows(64), given(4), auto, 2).unwrap(), (4, 8));
        assert_eq!(settled(&rows(64), auto, given(8), 4).unwrap(), (2, 8));
        let said = settled(&rows(64), given(4), given(4), 2).unwrap_err().to_string();
        assert!(
            said.contains("ds.json:1 train_batch_size: 64, but train.batch_size 4 x train.grad_accum 4 x 2 ranks = 32"),
            "{said}"
        );
        let said = settled(&rows(10), given(4), auto, 1).unwrap_err().to_string();
        assert!(said.contains("10 rows a step cannot be made of 4 rows of a micro-batch x 1 rank"), "{said}");
        for (batch, accum) in [(given(usize::MAX), auto), (auto, given(usize::MAX)), (given(usize::MAX), given(2))] {
            assert!(settled(&rows(64), batch, accum, 2).is_err());
        }
        let claims = Claims { machines: Some((usize::MAX, at("num_machines"))), ..Claims::default() };
        assert!(settled(&claims, given(1), given(1), 2).is_err());
    }

    #[test]
    fn processes_and_machines_are_held_against_what_was_launched() {
        let claims = Claims { processes: Some((2, at("num_processes"))), ..Claims::default() };
        assert!(settled(&claims, Auto::Given(1), Auto::Given(1), 2).is_ok());
        let said = settled(&claims, Auto::Given(1), Auto::Given(1), 3).unwrap_err().to_string();
        assert!(said.contains("num_processes: 2, but torchrun has started 3 ranks"), "{said}");
        let claims = Claims { machines: Some((2, at("num_machines"))), ..Claims::default() };
        let mut config = Config::default();
        assert!(claims.check_ranks(&mut config, 4, 2, None).is_ok());
        let said = claims.check_ranks(&mut config, 4, 4, None).unwrap_err().to_string();
        assert!(said.contains("num_machines: 2, but there are 4 ranks with 4 on this machine, so 1 machine"), "{said}");
    }
}
