//! The outcome of foreign configurations: settings of ours, the fate of each key, and claims that only the start of a run can check.
use crate::auto_values::Auto;
use crate::schema::Config;
use crate::source::Source;
use crate::value::Node;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;

/// The longest value that a message shows, in characters.
const SHOWN: usize = 60;

/// The outcome of all foreign configurations of a run.
#[derive(Debug, Clone, Default)]
pub struct Foreign {
    /// The fate of each key of each file, in file order.
    pub told: Vec<Told>,
    /// Claims that are checked when the number of ranks is known.
    pub expected: Expected,
    /// Notes for the user, one sentence each.
    pub(crate) notes: Vec<String>,
    /// Settings of ours that the files give.
    pub(crate) lines: Vec<Line>,
    /// `deepspeed_config_file` of Accelerate's file, and where it stands.
    pub(super) nested: Option<(String, Source)>,
}

/// A setting of ours that a foreign file gives.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    /// Our key.
    pub key: String,
    /// Its value, which the key accepts.
    pub node: Node,
    /// The foreign key that gives it.
    pub source: Source,
    /// It counts only if this switch of ours is on.
    pub only_with: Option<&'static str>,
    /// It counts only if nothing else sets the key.
    pub soft: bool,
    /// The source that names the file, which decides precedence.
    pub named_by: Source,
}

/// A text of at most [`SHOWN`] characters.
pub(super) fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// How the note on a key begins that is accepted without effect.
pub const NOT_NEEDED: &str = "not needed: ";

/// A key of another toolkit in our own configuration that is accepted without effect.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct NotNeeded {
    /// The full key.
    pub key: String,
    /// Its value.
    pub value: serde_json::Value,
    /// Where it was given.
    pub source: Source,
    /// Why it has no effect.
    pub note: String,
}

impl NotNeeded {
    /// The note for the user.
    pub fn text(&self) -> String {
        format!("{NOT_NEEDED}{} {}: {} ({})", self.source, self.key, cut(&self.value.to_string()), self.note)
    }
}

/// The fate of one key of a foreign file.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// File and line, and the key.
    pub source: Source,
    /// Its value, as JSON.
    pub value: String,
    /// What became of it.
    pub fate: Fate,
    /// Our key, if it sets one.
    pub key: Option<String>,
    /// Explanation for the user; for `auto`, the value that holds.
    pub text: String,
}

/// What happened to a key of a foreign file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It sets a key of ours, or is checked against the ranks.
    Taken,
    /// `auto`: our key decides.
    Auto,
    /// It has no effect, since it asks for what holds anyway.
    Same,
    /// It has no effect; a note says why.
    Warned,
    /// A source that takes precedence says otherwise.
    Overridden,
}

impl Fate {
    /// How `tunesmith config` shows it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Auto => "auto",
            Self::Same => "no effect:",
            Self::Warned => "not needed:",
            Self::Overridden => "overridden",
        }
    }
}

/// What foreign files claim about the run as a whole, each with its source.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Expected {
    /// Rows of an optimizer step over all ranks: DeepSpeed's `train_batch_size`.
    pub rows: Option<(usize, Source)>,
    /// Whether a missing micro-batch size or accumulation count follows from `rows`, as in DeepSpeed.
    pub derives: bool,
    /// Number of ranks on all machines: `num_processes`.
    pub processes: Option<(usize, Source)>,
    /// Number of machines: `num_machines`.
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

impl Expected {
    /// Checks the claims against `world` ranks, of which `local` are on this machine, and computes the batch size or accumulation
    /// count that follows from `rows`. `launcher` is the program that started the ranks, if any.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: a claim does not hold; the error names both sides.
    pub fn settle(&self, config: &mut Config, world: usize, local: usize, launcher: Option<&str>) -> Result<()> {
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
            && (machines * local != world)
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
                train.grad_accum =
                    Auto::Given(exactly(batch * world, &format!("{} of a micro-batch", count(batch, "row")))?);
                train.effective_batch = None;
            }
            (Auto::Auto, Auto::Given(accum)) if self.derives => {
                train.batch_size = Auto::Given(exactly(accum * world, &count(accum, "micro-batch"))?);
                train.effective_batch = None;
            }
            (Auto::Given(batch), Auto::Given(accum)) if batch * accum * world != *rows => {
                let product = batch * accum * world;
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

    fn settled(expected: &Expected, batch: Auto<usize>, accum: Auto<usize>, world: usize) -> Result<(usize, usize)> {
        let mut config = Config::default();
        (config.train.batch_size, config.train.grad_accum) = (batch, accum);
        config.train.effective_batch = expected.rows.as_ref().map(|(rows, _)| *rows);
        expected.settle(&mut config, world, world, Some("torchrun"))?;
        Ok((config.train.batch_size.or(0), config.train.grad_accum.or(0)))
    }

    #[test]
    fn rows_of_a_step_are_checked_and_divided() {
        let rows = |rows| Expected { rows: Some((rows, at("train_batch_size"))), derives: true, ..Expected::default() };
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
    }

    #[test]
    fn processes_and_machines_are_held_against_what_was_launched() {
        let expected = Expected { processes: Some((2, at("num_processes"))), ..Expected::default() };
        assert!(settled(&expected, Auto::Given(1), Auto::Given(1), 2).is_ok());
        let said = settled(&expected, Auto::Given(1), Auto::Given(1), 3).unwrap_err().to_string();
        assert!(said.contains("num_processes: 2, but torchrun has started 3 ranks"), "{said}");
        let expected = Expected { machines: Some((2, at("num_machines"))), ..Expected::default() };
        let mut config = Config::default();
        assert!(expected.settle(&mut config, 4, 2, None).is_ok());
        let said = expected.settle(&mut config, 4, 4, None).unwrap_err().to_string();
        assert!(said.contains("num_machines: 2, but there are 4 ranks with 4 on this machine, so 1 machine"), "{said}");
    }
}
