//! What foreign files come to: settings of ours, what is told of every key, and what only the start of a run can check.
use crate::auto_values::Auto;
use crate::schema::Config;
use crate::source::Source;
use crate::value::Node;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::count;

/// The longest value that a message shows, in characters.
const SHOWN: usize = 60;

/// All that was read.
#[derive(Debug, Clone, Default)]
pub struct Foreign {
    /// Each key of each file, in the files' order.
    pub told: Vec<Told>,
    /// What is checked when the ranks are known.
    pub expected: Expected,
    /// What a user should know, a sentence a key.
    pub(crate) notes: Vec<String>,
    pub(crate) lines: Vec<Line>,
    /// `deepspeed_config_file` of Accelerate's file, and where it stands.
    pub(super) nested: Option<(String, Source)>,
}

/// What one of our keys gets.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    /// Our key.
    pub key: String,
    /// Its value.
    pub node: Node,
    /// Where it stands.
    pub source: Source,
    /// It counts only where this key of ours is on.
    pub only_with: Option<&'static str>,
    /// It counts only where nothing else sets the key.
    pub soft: bool,
    /// What names the file, which tells how near it is to the user.
    pub named_by: Source,
}

/// A text of at most [`SHOWN`] characters.
pub(super) fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// What a note on a key begins with that is accepted and has no meaning here.
pub const NOT_NEEDED: &str = "not needed: ";

/// A key of another toolkit in our own configuration that is accepted and has no meaning here.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct NotNeeded {
    /// The full key.
    pub key: String,
    /// The value that was given.
    pub value: serde_json::Value,
    /// Where it stands.
    pub source: Source,
    /// Why it is not needed.
    pub note: String,
}

impl NotNeeded {
    /// The note on it.
    pub fn text(&self) -> String {
        format!("{NOT_NEEDED}{} {}: {} ({})", self.source, self.key, cut(&self.value.to_string()), self.note)
    }
}

/// One key of a foreign file and what became of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// File and line, and the key.
    pub source: Source,
    /// Its value, as JSON.
    pub value: String,
    /// What became of it.
    pub fate: Fate,
    /// Our key, if it has become one.
    pub key: Option<String>,
    /// What is said of it; of an `auto` the value that holds.
    pub text: String,
}

/// What became of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Ours says it.
    Taken,
    /// `auto`: ours decides.
    Auto,
    /// It is so anyway, or asks for nothing.
    Same,
    /// It has no meaning here.
    Warned,
    /// Another source says otherwise, nearer to the user.
    Overridden,
}

impl Fate {
    /// In a word.
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

/// What foreign files say of the run as a whole, with where.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Expected {
    /// Rows of an optimizer step, on all ranks: `train_batch_size`.
    pub rows: Option<(usize, Source)>,
    /// Whether DeepSpeed derives the size that is missing beside it.
    pub derives: bool,
    /// Ranks in all: `num_processes`.
    pub processes: Option<(usize, Source)>,
    /// Machines: `num_machines`.
    pub machines: Option<(usize, Source)>,
    /// This machine's number: `machine_rank`.
    pub machine_rank: Option<(usize, Source)>,
    /// The first machine: `main_process_ip`.
    pub main_address: Option<(String, Source)>,
    /// The port on it: `main_process_port`.
    pub main_port: Option<(u16, Source)>,
    /// GPUs of a machine: `gpu_ids`.
    pub gpu_ids: Option<(Vec<usize>, Source)>,
}

impl Expected {
    /// Holds what the files say against the ranks that there are, and makes up the size that they leave to arithmetic.
    /// `local` ranks are on this machine, and `launcher` has started them, if one has.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`], with both sides.
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
