//! Chooses `train.batch_size`, `train.grad_accum` and `train.gradient_checkpointing` where they are `auto`.
//!
//! Memory depends on the largest pass, speed on how full passes are. So the largest pass that the data can make is measured
//! first ([`PassMeasurer`]). If it does not fit, shorter passes are tried, then recomputed blocks. A few shorter passes then
//! give the memory and the time of any length. The choice is the smallest micro-batch that is as fast as any.
//!
//! The rows of a step depend only on the configuration and the data. Measuring decides how a step is split, never which rows
//! it trains on. Every rank measures, and all use the worst figures. The choice is cached on disk under a fingerprint of
//! everything it depends on, and saved in checkpoints.
use super::batch_plan::{BatchPlan, BatchRequest, rounded};
use super::measure_pass::{Line, MIN_TOKENS, Measured, PassMeasurer};
use crate::memory_prediction::MemoryModel;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::words::are;
use tunesmith_config::{Auto, Checkpointing};
use tunesmith_plan::{grouped, human_bytes};

/// The smallest speed-up that counts; less is noise.
const MIN_SPEEDUP: f64 = 1.02;
/// Number of random micro-batches to estimate a speed from, if each has 8 rows. Larger ones need fewer, smaller ones more.
const DRAWS: usize = 64;

/// The chosen sizes with the measurements behind them.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The split of an optimizer step that was chosen.
    pub sizes: BatchPlan,
    /// Every pass that was tried.
    pub passes: Vec<Measured>,
    /// The reasons for the choice, one line each.
    pub reasons: Vec<String>,
    /// Peak bytes of the process in the largest pass.
    pub bytes: u64,
}

/// Measures passes and chooses the sizes; all ranks choose the same. `memory` predicts what single settings would save, for
/// the error.
///
/// # Errors
/// [`tunesmith_base::Kind::Memory`]: not even one row fits; [`tunesmith_base::Kind::Config`]: `effective_batch` cannot be split
/// over the ranks and the configured sizes.
pub fn choose(measurer: &mut PassMeasurer<'_>, request: &BatchRequest, memory: &MemoryModel<'_>) -> Result<Choice> {
    let lengths = measurer.lengths();
    if lengths.is_empty() {
        return Err(Error::data("no row to measure"));
    }
    let longest = measurer.longest();
    let mean = lengths.iter().sum::<usize>() as f64 / lengths.len() as f64;
    let rows_of_step = request.rows_of_step(mean, lengths.len())?;
    let candidates = request.candidates(rows_of_step, lengths.len());
    let most_rows = candidates.last().copied().unwrap_or(1);
    measurer.limit_rows(most_rows);
    // The largest pass that any micro-batch of `most_rows` rows can lead to.
    let whole: usize = lengths.iter().cycle().take(most_rows).sum();
    let largest = request.max_tokens_per_pass.map_or(whole, |limit| whole.min(limit.max(longest)));

    let mut reasons = Vec::new();
    if request.grad_accum == Auto::Auto || request.batch_size == Auto::Auto {
        let why = match request.effective_batch {
            Some(_) => "from train.effective_batch".to_owned(),
            None => format!("for train.target_tokens_per_device_step = {}", grouped(request.target_tokens as u64)),
        };
        let tokens = grouped((rows_of_step as f64 * mean).round() as u64);
        reasons.push(format!("rows per step and rank: {rows_of_step}, about {tokens} tokens, {why}"));
    }
    let (checkpointing, limit) = fit_largest_pass(measurer, request, memory, longest, largest, &mut reasons)?;
    let bytes = measurer.pass(limit, checkpointing)?.bytes.unwrap_or(0);
    // Shorter passes give the memory and the time of any length.
    let mut shorter = limit / 2;
    while shorter >= MIN_TOKENS && shorter * 8 >= limit {
        measurer.pass(shorter, checkpointing)?;
        shorter /= 2;
    }
    let times: Vec<Measured> =
        measurer.passes.iter().filter(|pass| pass.checkpointing == checkpointing && pass.fits()).copied().collect();
    if let Some(line) = Line::through(&times) {
        reasons.push(format!(
            "memory is {} and {} per token of the largest pass",
            human_bytes(line.fixed.max(0.0) as u64),
            human_bytes(line.per_token as u64)
        ));
    }
    let cut = if limit < largest { Some(limit) } else { request.max_tokens_per_pass };
    let speeds: Vec<(usize, f64)> =
        candidates.iter().map(|&rows| (rows, expected_speed(&lengths, rows, cut, &times))).collect();
    let best = speeds.iter().map(|&(_, speed)| speed).fold(0.0, f64::max);
    let (batch_size, speed) =
        speeds.iter().copied().find(|&(_, speed)| speed * MIN_SPEEDUP >= best).unwrap_or((most_rows, best));
    if candidates.len() > 1 {
        let show = |&(rows, speed): &(usize, f64)| format!("{rows}: {}", grouped(speed.round() as u64));
        let speeds: Vec<String> = speeds.iter().map(show).collect();
        reasons.push(format!("estimated tokens/s by rows of a micro-batch: {}", speeds.join(", ")));
        reasons.push(format!(
            "{} already as fast as more: about {} tokens/s, {} at best",
            are(batch_size, "row"),
            grouped(speed.round() as u64),
            grouped(best.round() as u64)
        ));
    }
    let grad_accum = request.grad_accum.or(rounded(rows_of_step, batch_size));
    let sizes = BatchPlan { batch_size, grad_accum, checkpointing, max_tokens_per_pass: cut };
    Ok(Choice { sizes, passes: measurer.passes.clone(), reasons, bytes })
}

/// Finds the activations that blocks save and the maximum tokens of a pass, so that passes of up to `largest` tokens fit, or
/// at least a row of `longest`. Shorter passes cost almost nothing and recomputing blocks a third of the time, so shorter
/// passes come first.
fn fit_largest_pass(
    measurer: &mut PassMeasurer<'_>,
    request: &BatchRequest,
    memory: &MemoryModel<'_>,
    longest: usize,
    largest: usize,
    reasons: &mut Vec<String>,
) -> Result<(Checkpointing, usize)> {
    let auto = request.checkpointing == Checkpointing::Auto;
    let first = if auto { Checkpointing::CHEAP } else { request.checkpointing };
    if measurer.pass(largest, first)?.fits() {
        reasons.push(format!("the largest pass, {} tokens, fits", grouped(largest as u64)));
        let checkpointing = if auto { save_more_activations(measurer, largest, reasons)? } else { first };
        return Ok((checkpointing, largest));
    }
    if largest > longest && measurer.pass(longest, first)?.fits() {
        measurer.pass((longest / 2).max(1), first)?;
        let line = Line::through(&measurer.passes);
        let limit = line.map_or(longest, |line| line.tokens_within(measurer.limit())).clamp(longest, largest - 1);
        let limit = if measurer.pass(limit, first)?.fits() { limit } else { longest };
        reasons.push(format!(
            "a pass of {} tokens does not fit; passes are limited to {}",
            grouped(largest as u64),
            grouped(limit as u64)
        ));
        return Ok((first, limit));
    }
    if auto && measurer.pass(longest, Checkpointing::FULL)?.fits() {
        let checkpointing = recompute_fewest_blocks(measurer, longest)?;
        reasons.push(format!(
            "the longest row, {} tokens, does not fit without recomputing blocks: gradient_checkpointing: {checkpointing}",
            grouped(longest as u64)
        ));
        return Ok((checkpointing, longest));
    }
    Err(measurer.too_long(longest, first, memory)?)
}

/// Lets as many of the last blocks as fit save all activations, if that is faster.
fn save_more_activations(
    measurer: &mut PassMeasurer<'_>,
    tokens: usize,
    reasons: &mut Vec<String>,
) -> Result<Checkpointing> {
    let blocks = measurer.blocks();
    let short = (tokens / 2).max(MIN_TOKENS).min(tokens);
    let (cheap, none) = (measurer.pass(short, Checkpointing::CHEAP)?, measurer.pass(short, Checkpointing::NONE)?);
    if !(none.fits() && none.speed() > MIN_SPEEDUP * cheap.speed()) {
        reasons.push("saving more than the results of matrix products is no faster".to_owned());
        return Ok(Checkpointing::CHEAP);
    }
    let grows = |one: Measured, other: Measured| one.bytes.unwrap_or(0).saturating_sub(other.bytes.unwrap_or(0));
    let each = grows(none, cheap) as f64 / blocks as f64 * tokens as f64 / short as f64;
    let room = measurer.limit().saturating_sub(measurer.pass(tokens, Checkpointing::CHEAP)?.bytes.unwrap_or(0));
    let mut count = ((room as f64 / each.max(1.0)) as usize).min(blocks);
    while count > 0 {
        let more = if count == blocks { Checkpointing::NONE } else { Checkpointing::Blocks { full: 0, none: count } };
        if measurer.pass(tokens, more)?.fits() {
            reasons.push(format!("{count} of {blocks} blocks save all activations, which is faster"));
            return Ok(more);
        }
        count = count * 3 / 4;
    }
    Ok(Checkpointing::CHEAP)
}

/// The smallest number of first blocks to recompute, when recomputing all of them fits and recomputing none does not.
fn recompute_fewest_blocks(measurer: &mut PassMeasurer<'_>, tokens: usize) -> Result<Checkpointing> {
    let blocks = measurer.blocks();
    let short = (tokens / 2).max(1);
    let (cheap, full) = (measurer.pass(short, Checkpointing::CHEAP)?, measurer.pass(short, Checkpointing::FULL)?);
    let (Some(cheap), Some(full)) = (cheap.bytes, full.bytes) else { return Ok(Checkpointing::FULL) };
    // The last block is never recomputed: its backward pass follows at once.
    let each =
        cheap.saturating_sub(full) as f64 / blocks.saturating_sub(1).max(1) as f64 * tokens as f64 / short as f64;
    let room = measurer.limit().saturating_sub(measurer.pass(tokens, Checkpointing::FULL)?.bytes.unwrap_or(u64::MAX));
    let kept = (room as f64 / each.max(1.0)) as usize;
    let mut count = blocks.saturating_sub(kept + 1).max(1);
    while count < blocks {
        let some = Checkpointing::Blocks { full: count, none: 0 };
        if measurer.pass(tokens, some)?.fits() {
            return Ok(some);
        }
        count += (blocks / 8).max(1);
    }
    Ok(Checkpointing::FULL)
}

/// Seconds of a pass of `tokens` tokens, interpolated linearly between the measured ones, `(tokens, seconds)`.
fn seconds(times: &[(f64, f64)], tokens: f64) -> f64 {
    let (first, last) = (times[0], times[times.len() - 1]);
    if tokens <= first.0 || times.len() == 1 {
        // Assumes that half of a short pass's time does not depend on its length.
        return first.1 * (0.5 + 0.5 * tokens / first.0).max(tokens / first.0);
    }
    let after = times.iter().position(|&(at, _)| at >= tokens).unwrap_or(times.len() - 1);
    let (low, high) = if tokens > last.0 { (first, last) } else { (times[after - 1], times[after]) };
    low.1 + (high.1 - low.1) * (tokens - low.0) / (high.0 - low.0)
}

/// Tokens per second of random micro-batches of `rows` rows, split into passes as a run splits them.
fn expected_speed(lengths: &[usize], rows: usize, limit: Option<usize>, passes: &[Measured]) -> f64 {
    let mut times: Vec<(f64, f64)> = passes.iter().map(|pass| (pass.tokens as f64, pass.seconds)).collect();
    times.sort_by(|one, other| one.0.total_cmp(&other.0));
    if times.is_empty() {
        return 0.0;
    }
    let (mut tokens, mut spent) = (0.0, 0.0);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    // Larger micro-batches need fewer draws, since the average is over rows.
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

/// The memory budget, the measured passes, the reasons, and the choice for the user, one line each.
pub fn lines(budget: Option<u64>, passes: &[Measured], reasons: &[String], sizes: &BatchPlan) -> Vec<String> {
    let budget = budget.map_or("no limit".to_owned(), human_bytes);
    let mut lines = vec![format!("measured passes (memory budget {budget}):")];
    for pass in passes {
        let tokens = grouped(pass.tokens as u64);
        let setting = format!("gradient_checkpointing: {}", pass.checkpointing);
        lines.push(match pass.bytes {
            Some(bytes) => {
                let speed = grouped(pass.speed().round() as u64);
                format!("  {tokens:>8} tokens  {:>10}  {speed:>8} tokens/s  {setting}", human_bytes(bytes))
            }
            None => format!("  {tokens:>8} tokens  does not fit                  {setting}"),
        });
    }
    lines.extend(reasons.iter().map(|reason| format!("  {reason}")));
    lines.push(format!("chosen: {sizes}"));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuller_passes_are_faster_and_cuts_count() {
        let pass = |tokens: usize| Measured {
            tokens,
            checkpointing: Checkpointing::CHEAP,
            bytes: Some(1),
            // A tenth of a second for any pass, and a millisecond per token.
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
}
