//! What the configuration leaves to measurement: `train.batch_size`, `train.grad_accum` and
//! `train.gradient_checkpointing: auto`.
//!
//! Memory depends on the largest pass, speed on how full passes are. So the largest pass that the data can make is
//! measured first ([`Gauge`]), as it is and, where it does not fit, shorter or with blocks that keep less; then shorter
//! ones, for the bytes and the time of any length. Rows of a micro-batch follow by arithmetic: the fewest whose passes are
//! as fast as any. How many rows a step has is settled before, from the configuration and the data alone: what was measured
//! decides how a step is cut, and never what it learns from. Every rank measures, and all go by the worst of them. The
//! choice is kept on disk by a fingerprint of all that it depends on, and in the checkpoints.
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

use super::measure_pass::{Gauge, LEAST, Line, Measured};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::{self, atomic};
use tunesmith_base::memory;
use tunesmith_base::words::{self, are};
use tunesmith_config::arch::Arch;
use tunesmith_config::{Auto, Checkpointing, Config, ConfigValue as _, Node};
use tunesmith_model::weights::WeightFiles;
use tunesmith_plan::{grouped, human_bytes};

/// A speed counts as better from so much on: less is noise.
const BETTER: f64 = 1.02;
/// Random micro-batches whose passes are added up for each number of rows.
const DRAWS: usize = 64;

/// What was asked, and how much a step shall hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Asked {
    /// `train.batch_size`.
    pub batch_size: Auto<usize>,
    /// `train.grad_accum`.
    pub grad_accum: Auto<usize>,
    /// `train.gradient_checkpointing`.
    pub checkpointing: Checkpointing,
    /// `train.max_tokens_per_pass`.
    pub max_tokens_per_pass: Option<usize>,
    /// `train.effective_batch`.
    pub effective_batch: Option<usize>,
    /// `train.target_tokens_per_device_step`.
    pub target_tokens: usize,
    /// What a step learns depends on how its rows are put into micro-batches: rows are grouped by length, or experts have a
    /// loss of their own for each.
    pub cuts_count: bool,
    /// Ranks.
    pub world: usize,
}

/// The numbers that a run goes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of a micro-batch.
    pub batch_size: usize,
    /// Micro-batches of a step.
    pub grad_accum: usize,
    /// What blocks keep.
    pub checkpointing: Checkpointing,
    /// The most tokens of a pass.
    pub max_tokens_per_pass: Option<usize>,
}

impl Asked {
    /// What a configuration asks of a model, in a world of so many ranks.
    pub fn of(config: &Config, arch: &Arch, world: usize) -> Self {
        let train = &config.train;
        let balanced = arch.experts.as_ref().is_some_and(|experts| experts.balance.is_some());
        Self {
            batch_size: train.batch_size,
            grad_accum: train.grad_accum,
            checkpointing: train.gradient_checkpointing,
            max_tokens_per_pass: train.max_tokens_per_pass,
            effective_batch: train.effective_batch,
            target_tokens: train.target_tokens_per_device_step,
            cuts_count: train.group_by_length || balanced,
            world,
        }
    }

    /// The numbers, if none is left open.
    pub fn given(&self) -> Option<Sizes> {
        let sizes = Sizes {
            batch_size: self.batch_size.given()?,
            grad_accum: self.grad_accum.given()?,
            checkpointing: self.checkpointing,
            max_tokens_per_pass: self.max_tokens_per_pass,
        };
        (self.checkpointing != Checkpointing::Auto).then_some(sizes)
    }

    /// Rows of a step on one rank, where there are `count` rows of so many tokens on average; with `effective_batch` exactly
    /// so many. It depends on nothing that is measured.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the ranks, or what is given of batch size and accumulation, do not divide `effective_batch`.
    pub fn rows_of_step(&self, mean_tokens: f64, count: usize) -> Result<usize> {
        let Some(rows) = self.effective_batch else {
            let most = (count / self.world.max(1)).max(1);
            let rows = ((self.target_tokens as f64 / mean_tokens.max(1.0)).round() as usize).clamp(1, most);
            let open = self.batch_size == Auto::Auto && self.grad_accum == Auto::Auto;
            return Ok(if open { divisible(rows, most) } else { rows });
        };
        let given = self.batch_size.or(1) * self.grad_accum.or(1);
        if !rows.is_multiple_of(self.world * given) {
            let world = self.world;
            return Err(Error::config(format!(
                "train.effective_batch = {rows} is not a multiple of {} (train.batch_size and train.grad_accum, \
                 where they are given) x {}",
                words::count(given, "row"),
                words::count(world, "rank")
            ))
            .hint(format!("set train.effective_batch: {}", rows.div_ceil(self.world * given) * self.world * given)));
        }
        Ok(rows / self.world)
    }

    /// The numbers of rows that a micro-batch may have in steps of `rows` rows, of `count` that there are, rising. Where both
    /// it and the accumulation are open, each divides the step.
    fn candidates(&self, rows: usize, count: usize) -> Vec<usize> {
        match (self.batch_size, self.grad_accum) {
            (Auto::Given(batch), _) => vec![batch],
            (Auto::Auto, Auto::Given(accum)) => vec![rounded(rows, accum)],
            (Auto::Auto, Auto::Auto) if self.cuts_count => vec![rows],
            (Auto::Auto, Auto::Auto) => {
                let low = (1..).take_while(|&one| one * one <= rows).filter(|&one| rows.is_multiple_of(one));
                let mut all: Vec<usize> = low.flat_map(|one| [one, rows / one]).collect();
                all.retain(|&one| one <= count.max(1));
                all.sort_unstable();
                all.dedup();
                all
            }
        }
    }
}

/// `rows / parts`, rounded, at least 1.
const fn rounded(rows: usize, parts: usize) -> usize {
    let whole = (rows + parts / 2) / parts;
    if whole == 0 { 1 } else { whole }
}

/// About `rows`, at most `most`, with four significant bits: so that a step can be cut evenly in several ways.
const fn divisible(rows: usize, most: usize) -> usize {
    let unit = 1 << rows.ilog2().saturating_sub(3);
    let near = (rows + unit / 2) / unit * unit;
    if near > most { most / unit * unit } else { near }
}

/// What was measured and chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// The choice.
    pub sizes: Sizes,
    /// Every pass that was tried.
    pub passes: Vec<Measured>,
    /// Why the choice is this one, a line each.
    pub reasons: Vec<String>,
    /// The most bytes that the largest pass held.
    pub bytes: u64,
}

/// Measures and chooses, on every rank the same. `model` is what was asked of it, and its files, where it is not drawn.
///
/// # Errors
/// [`tunesmith_base::Kind::Memory`]: not even one row fits; [`tunesmith_base::Kind::Config`]: `effective_batch` cannot be made up.
pub fn choose(gauge: &mut Gauge<'_>, asked: &Asked, model: (&Config, Option<&WeightFiles>)) -> Result<Found> {
    let lengths = gauge.lengths();
    if lengths.is_empty() {
        return Err(Error::data("there is no row to measure"));
    }
    let longest = gauge.longest();
    let mean = lengths.iter().sum::<usize>() as f64 / lengths.len() as f64;
    let rows_of_step = asked.rows_of_step(mean, lengths.len())?;
    let candidates = asked.candidates(rows_of_step, lengths.len());
    let most_rows = candidates.last().copied().unwrap_or(1);
    // The largest pass that any micro-batch of so many rows can come to.
    let whole: usize = lengths.iter().cycle().take(most_rows).sum();
    let largest = asked.max_tokens_per_pass.map_or(whole, |limit| whole.min(limit.max(longest)));

    let mut reasons = Vec::new();
    if asked.grad_accum == Auto::Auto || asked.batch_size == Auto::Auto {
        let why = match asked.effective_batch {
            Some(_) => "as train.effective_batch says".to_owned(),
            None => format!("for train.target_tokens_per_device_step = {}", grouped(asked.target_tokens as u64)),
        };
        let tokens = grouped((rows_of_step as f64 * mean).round() as u64);
        reasons.push(format!(
            "a step is to have {} a rank, about {tokens} tokens, {why}",
            words::count(rows_of_step, "row")
        ));
    }
    let (checkpointing, limit) = fitting(gauge, asked, model, (longest, largest), &mut reasons)?;
    let bytes = gauge.pass(limit, checkpointing)?.bytes.unwrap_or(0);
    // Shorter passes: the bytes and the time of any length.
    let mut shorter = limit / 2;
    while shorter >= LEAST && shorter * 8 >= limit {
        gauge.pass(shorter, checkpointing)?;
        shorter /= 2;
    }
    let times: Vec<Measured> =
        gauge.passes.iter().filter(|pass| pass.checkpointing == checkpointing && pass.fits()).copied().collect();
    if let Some(line) = Line::through(&times) {
        reasons.push(format!(
            "memory is {} and {} a token of the largest pass",
            human_bytes(line.fixed.max(0.0) as u64),
            human_bytes(line.per_token as u64)
        ));
    }
    let cut = if limit < largest { Some(limit) } else { asked.max_tokens_per_pass };
    let speeds: Vec<(usize, f64)> =
        candidates.iter().map(|&rows| (rows, expected_speed(&lengths, rows, cut, &times))).collect();
    let best = speeds.iter().map(|&(_, speed)| speed).fold(0.0, f64::max);
    let (batch_size, speed) =
        speeds.iter().copied().find(|&(_, speed)| speed * BETTER >= best).unwrap_or((most_rows, best));
    if candidates.len() > 1 {
        let show = |&(rows, speed): &(usize, f64)| format!("{rows}: {}", grouped(speed.round() as u64));
        let speeds: Vec<String> = speeds.iter().map(show).collect();
        reasons.push(format!("rows of a micro-batch, and about how many tokens/s: {}", speeds.join(", ")));
        reasons.push(format!(
            "{} already as fast as more: about {} tokens/s, {} at best",
            are(batch_size, "row"),
            grouped(speed.round() as u64),
            grouped(best.round() as u64)
        ));
    }
    let grad_accum = asked.grad_accum.or(rounded(rows_of_step, batch_size));
    let sizes = Sizes { batch_size, grad_accum, checkpointing, max_tokens_per_pass: cut };
    Ok(Found { sizes, passes: gauge.passes.clone(), reasons, bytes })
}

/// What blocks keep, and the most tokens of a pass, such that passes of up to `largest` tokens fit, or else at least a
/// row of `longest`. Shorter passes cost nearly nothing and running blocks again a third of the time, so the former come
/// first.
fn fitting(
    gauge: &mut Gauge<'_>,
    asked: &Asked,
    model: (&Config, Option<&WeightFiles>),
    (longest, largest): (usize, usize),
    reasons: &mut Vec<String>,
) -> Result<(Checkpointing, usize)> {
    let auto = asked.checkpointing == Checkpointing::Auto;
    let first = if auto { Checkpointing::CHEAP } else { asked.checkpointing };
    if gauge.pass(largest, first)?.fits() {
        reasons.push(format!("the largest pass, {} tokens, fits", grouped(largest as u64)));
        let checkpointing = if auto { keep_more(gauge, largest, reasons)? } else { first };
        return Ok((checkpointing, largest));
    }
    if largest > longest && gauge.pass(longest, first)?.fits() {
        gauge.pass((longest / 2).max(1), first)?;
        let line = Line::through(&gauge.passes);
        let limit = line.map_or(longest, |line| line.tokens_within(gauge.limit())).clamp(longest, largest - 1);
        let limit = if gauge.pass(limit, first)?.fits() { limit } else { longest };
        reasons.push(format!(
            "a pass of {} tokens does not fit; passes are cut to {}",
            grouped(largest as u64),
            grouped(limit as u64)
        ));
        return Ok((first, limit));
    }
    if auto && gauge.pass(longest, Checkpointing::FULL)?.fits() {
        let checkpointing = run_fewer_again(gauge, longest)?;
        reasons.push(format!(
            "the longest row, {} tokens, does not fit unless blocks are run again: gradient_checkpointing: {checkpointing}",
            grouped(longest as u64)
        ));
        return Ok((checkpointing, longest));
    }
    Err(gauge.too_long(longest, first, model)?)
}

/// Lets as many of the last blocks keep everything as fit, if that is any faster.
fn keep_more(gauge: &mut Gauge<'_>, tokens: usize, reasons: &mut Vec<String>) -> Result<Checkpointing> {
    let blocks = gauge.blocks();
    let short = (tokens / 2).max(LEAST).min(tokens);
    let (cheap, none) = (gauge.pass(short, Checkpointing::CHEAP)?, gauge.pass(short, Checkpointing::NONE)?);
    if !(none.fits() && none.speed() > BETTER * cheap.speed()) {
        reasons.push("keeping more than products of matrices is no faster".to_owned());
        return Ok(Checkpointing::CHEAP);
    }
    let grows = |one: Measured, other: Measured| one.bytes.unwrap_or(0).saturating_sub(other.bytes.unwrap_or(0));
    let each = grows(none, cheap) as f64 / blocks as f64 * tokens as f64 / short as f64;
    let room = gauge.limit().saturating_sub(gauge.pass(tokens, Checkpointing::CHEAP)?.bytes.unwrap_or(0));
    let mut count = ((room as f64 / each.max(1.0)) as usize).min(blocks);
    while count > 0 {
        let more = if count == blocks { Checkpointing::NONE } else { Checkpointing::Blocks { full: 0, none: count } };
        if gauge.pass(tokens, more)?.fits() {
            reasons.push(format!("{count} of {blocks} blocks keep everything, which is faster"));
            return Ok(more);
        }
        count = count * 3 / 4;
    }
    Ok(Checkpointing::CHEAP)
}

/// The fewest first blocks that must be run again, where all of them fit and none does not.
fn run_fewer_again(gauge: &mut Gauge<'_>, tokens: usize) -> Result<Checkpointing> {
    let blocks = gauge.blocks();
    let short = (tokens / 2).max(1);
    let (cheap, full) = (gauge.pass(short, Checkpointing::CHEAP)?, gauge.pass(short, Checkpointing::FULL)?);
    let (Some(cheap), Some(full)) = (cheap.bytes, full.bytes) else { return Ok(Checkpointing::FULL) };
    // The last block is never run again: backward follows at once.
    let each =
        cheap.saturating_sub(full) as f64 / blocks.saturating_sub(1).max(1) as f64 * tokens as f64 / short as f64;
    let room = gauge.limit().saturating_sub(gauge.pass(tokens, Checkpointing::FULL)?.bytes.unwrap_or(u64::MAX));
    let kept = (room as f64 / each.max(1.0)) as usize;
    let mut count = blocks.saturating_sub(kept + 1).max(1);
    while count < blocks {
        let some = Checkpointing::Blocks { full: count, none: 0 };
        if gauge.pass(tokens, some)?.fits() {
            return Ok(some);
        }
        count += (blocks / 8).max(1);
    }
    Ok(Checkpointing::FULL)
}

/// Seconds of a pass of so many tokens, on the lines between those that were measured.
fn seconds(times: &[(f64, f64)], tokens: f64) -> f64 {
    let (first, last) = (times[0], times[times.len() - 1]);
    if tokens <= first.0 || times.len() == 1 {
        // Half of a short pass's time is taken to be there for any length.
        return first.1 * (0.5 + 0.5 * tokens / first.0).max(tokens / first.0);
    }
    let after = times.iter().position(|&(at, _)| at >= tokens).unwrap_or(times.len() - 1);
    let (low, high) = if tokens > last.0 { (first, last) } else { (times[after - 1], times[after]) };
    low.1 + (high.1 - low.1) * (tokens - low.0) / (high.0 - low.0)
}

/// Tokens per second of micro-batches of `rows` rows drawn at random, cut into passes as a run cuts them.
fn expected_speed(lengths: &[usize], rows: usize, limit: Option<usize>, passes: &[Measured]) -> f64 {
    let mut times: Vec<(f64, f64)> = passes.iter().map(|pass| (pass.tokens as f64, pass.seconds)).collect();
    times.sort_by(|one, other| one.0.total_cmp(&other.0));
    if times.is_empty() {
        return 0.0;
    }
    let (mut tokens, mut spent) = (0.0, 0.0);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    // Larger micro-batches need fewer draws: rows are what is averaged over.
    for _ in 0..(DRAWS * 8 / rows).clamp(8, DRAWS * 8) {
        let mut pass = 0;
        for _ in 0..rows {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let length = lengths[(state % lengths.len() as u64) as usize];
            if pass > 0 && limit.is_some_and(|limit| pass + length > limit) {
                spent += seconds(&times, pass as f64);
                pass = 0;
            }
            (pass, tokens) = (pass + length, tokens + length as f64);
        }
        spent += seconds(&times, pass as f64);
    }
    tokens / spent.max(1e-9)
}

/// A choice as it lies on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remembered {
    batch_size: usize,
    grad_accum: usize,
    gradient_checkpointing: serde_json::Value,
    max_tokens_per_pass: Option<usize>,
    /// The most bytes that the largest pass held.
    bytes: u64,
}

/// `true`, `"none"` or `{"full": 2}`, as [`Checkpointing`] writes itself.
pub fn read_checkpointing(json: &serde_json::Value) -> Option<Checkpointing> {
    let number = |value: &serde_json::Value| value.as_u64().map(|number| Node::Int(i128::from(number)));
    let node = match json {
        serde_json::Value::Bool(full) => Node::Bool(*full),
        serde_json::Value::String(word) => Node::Str(word.clone()),
        serde_json::Value::Object(blocks) => {
            let blocks = blocks.iter().map(|(key, value)| Some((key.clone(), number(value)?)));
            Node::Map(blocks.collect::<Option<_>>()?)
        }
        _ => return None,
    };
    Checkpointing::from_node(&node).ok()
}

impl Remembered {
    /// Of a choice.
    pub fn of(found: &Found) -> Self {
        let Sizes { batch_size, grad_accum, checkpointing, max_tokens_per_pass } = found.sizes;
        let gradient_checkpointing = checkpointing.to_json();
        Self { batch_size, grad_accum, gradient_checkpointing, max_tokens_per_pass, bytes: found.bytes }
    }

    /// A number that others with the same choice have too; never 0.
    pub fn hash(&self) -> u64 {
        let text = serde_json::to_vec(self).unwrap_or_default();
        u64::from_le_bytes(blake3::hash(&text).as_bytes()[..8].try_into().expect("a hash has 32 bytes")).max(1)
    }

    /// The choice, where it still fits: `bytes` may be held now.
    pub fn sizes(&self, bytes: u64) -> Option<Sizes> {
        let checkpointing = read_checkpointing(&self.gradient_checkpointing)?;
        (self.bytes <= bytes && self.batch_size > 0 && self.grad_accum > 0).then_some(Sizes {
            batch_size: self.batch_size,
            grad_accum: self.grad_accum,
            checkpointing,
            max_tokens_per_pass: self.max_tokens_per_pass,
        })
    }

    /// The file of a fingerprint in a cache folder.
    pub fn path(cache: &Path, fingerprint: &blake3::Hash) -> PathBuf {
        cache.join(format!("probe-{}.json", &fingerprint.to_hex()[..24]))
    }

    /// Reads a file; nothing where there is none, or none of this version.
    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&files::read_own(path, files::SMALL).ok()?).ok()
    }

    /// Writes the file. A cache that cannot be written costs the next run some seconds, no more.
    pub fn write(&self, path: &Path) {
        let _ = atomic::write(path, &serde_json::to_vec_pretty(self).unwrap_or_default());
    }
}

/// What the passes and the choice look like to a user, a line each.
pub fn lines(passes: &[Measured], reasons: &[String], sizes: &Sizes) -> Vec<String> {
    let budget = memory::budget().map_or("no limit".to_owned(), human_bytes);
    let mut lines = vec![format!("measured passes (memory budget {budget}):")];
    for pass in passes {
        let tokens = grouped(pass.tokens as u64);
        let kept = format!("gradient_checkpointing: {}", pass.checkpointing);
        lines.push(match pass.bytes {
            Some(bytes) => {
                let speed = grouped(pass.speed().round() as u64);
                format!("  {tokens:>8} tokens  {:>10}  {speed:>8} tokens/s  {kept}", human_bytes(bytes))
            }
            None => format!("  {tokens:>8} tokens  does not fit                  {kept}"),
        });
    }
    lines.extend(reasons.iter().map(|reason| format!("  {reason}")));
    lines.push(format!("chosen: {sizes}"));
    lines
}

impl std::fmt::Display for Sizes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { batch_size, grad_accum, checkpointing, max_tokens_per_pass } = self;
        let passes = max_tokens_per_pass.map_or("null".to_owned(), |most| most.to_string());
        write!(
            f,
            "batch_size: {batch_size}, grad_accum: {grad_accum}, gradient_checkpointing: {checkpointing}, \
             max_tokens_per_pass: {passes}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> Asked {
        Asked {
            batch_size: Auto::Auto,
            grad_accum: Auto::Auto,
            checkpointing: Checkpointing::Auto,
            max_tokens_per_pass: Some(768),
            effective_batch: None,
            target_tokens: 16384,
            cuts_count: false,
            world: 1,
        }
    }

    #[test]
    fn a_step_holds_the_tokens_or_exactly_the_rows_that_were_asked_for() {
        assert_eq!(asked().rows_of_step(200.0, 10_000).unwrap(), 80, "82 would be 1 x 82, 2 x 41");
        assert_eq!(asked().rows_of_step(200.0, 50).unwrap(), 48, "no more than there are");
        assert_eq!(Asked { world: 4, ..asked() }.rows_of_step(200.0, 50).unwrap(), 12, "nor than there are for each");
        assert_eq!(asked().rows_of_step(1e9, 50).unwrap(), 1);
        assert_eq!(asked().candidates(80, 10_000), [1, 2, 4, 5, 8, 10, 16, 20, 40, 80]);
        let given = Asked { grad_accum: Auto::Given(3), ..asked() };
        assert_eq!((given.rows_of_step(200.0, 10_000).unwrap(), given.candidates(82, 10_000)), (82, vec![27]));
        let rows = Asked { effective_batch: Some(24), world: 2, ..asked() };
        assert_eq!(rows.rows_of_step(1e9, 5).unwrap(), 12);
        assert_eq!(rows.candidates(12, 5), [1, 2, 3, 4], "of 5 rows no more than 5 are put together");
        let batch = Asked { batch_size: Auto::Given(3), ..rows };
        assert_eq!((batch.rows_of_step(1.0, 5).unwrap(), batch.candidates(12, 5)), (12, vec![3]));
        let accum = Asked { grad_accum: Auto::Given(4), ..rows };
        assert_eq!((accum.rows_of_step(1.0, 5).unwrap(), accum.candidates(12, 5)), (12, vec![3]));
        let error = Asked { batch_size: Auto::Given(5), ..rows }.rows_of_step(1.0, 5).unwrap_err();
        assert!(
            error.message().contains("24 is not a multiple of 5 rows") && error.message().contains("2 ranks"),
            "{error}"
        );
        assert_eq!(error.hint_text(), Some("set train.effective_batch: 30"));
    }

    #[test]
    fn whatever_was_measured_a_step_has_the_same_rows() {
        for target_tokens in (1..20_000).step_by(37) {
            for (asked, one) in [
                (Asked { target_tokens, ..asked() }, false),
                (Asked { target_tokens, cuts_count: true, ..asked() }, true),
                (Asked { target_tokens, grad_accum: Auto::Given(7), ..asked() }, true),
                (Asked { target_tokens, batch_size: Auto::Given(7), ..asked() }, true),
            ] {
                let rows = asked.rows_of_step(61.0, 300).unwrap();
                let candidates = asked.candidates(rows, 300);
                assert!(!one || candidates.len() == 1, "{asked:?}: {candidates:?}");
                let (batch, accum) = (asked.batch_size, asked.grad_accum);
                for size in candidates.iter().filter(|_| (batch, accum) == (Auto::Auto, Auto::Auto)) {
                    assert_eq!(size * rounded(rows, *size), rows, "{asked:?}");
                }
                let wished = (target_tokens as f64 / 61.0).round().clamp(1.0, 300.0);
                assert!((rows as f64 / wished - 1.0).abs() < 0.07, "{rows} for {wished}");
            }
        }
    }

    #[test]
    fn fuller_passes_are_faster_and_cuts_count() {
        let pass = |tokens: usize| Measured {
            tokens,
            checkpointing: Checkpointing::CHEAP,
            bytes: Some(1),
            // A tenth of a second for any pass, and a millisecond a token.
            seconds: 0.1 + 1e-3 * tokens as f64,
        };
        let passes = [pass(768), pass(384), pass(192), pass(96)];
        let speed = |rows| expected_speed(&[200; 40], rows, Some(768), &passes);
        // Three rows of 200 tokens fill a pass: 600 tokens in 0.7 s.
        assert!((speed(3) - 600.0 / 0.7).abs() < 1.0, "{}", speed(3));
        assert!((speed(4) - 800.0 / (0.7 + 0.3)).abs() < 1.0, "{}", speed(4));
        assert!(speed(1) < speed(2) && speed(2) < speed(3));
        assert!((seconds(&[(96.0, 0.196), (192.0, 0.292)], 768.0) - 0.868).abs() < 1e-9, "beyond what was measured");
    }

    #[test]
    fn a_choice_on_disk_reads_back_and_must_still_fit() {
        let root = tempfile::tempdir().unwrap();
        let path = Remembered::path(&root.path().join("new"), &blake3::hash(b"x"));
        assert_eq!(Remembered::read(&path), None);
        for checkpointing in [Checkpointing::FULL, Checkpointing::NONE, Checkpointing::Blocks { full: 2, none: 0 }] {
            let sizes = Sizes { batch_size: 4, grad_accum: 2, checkpointing, max_tokens_per_pass: Some(99) };
            let kept = Remembered::of(&Found { sizes, passes: Vec::new(), reasons: Vec::new(), bytes: 1000 });
            kept.write(&path);
            let read = Remembered::read(&path).unwrap();
            assert_eq!(read.sizes(1000), Some(sizes));
            assert_eq!(read.sizes(999), None, "it would not fit any more");
        }
        std::fs::write(&path, "{\"batch_size\": 4}").unwrap();
        assert_eq!(Remembered::read(&path), None);
    }
}
