//! The progress bar of a training run, on one line of a terminal of any width.
use super::terminal::{Style, width};
use crate::plan::{grouped, human_bytes, human_seconds};
use crate::telemetry::metrics::StepLine;
use crate::telemetry::progress::Throughput;

/// The least and the greatest width of the bar itself, in columns.
const NARROW: usize = 6;
const BROAD: usize = 24;

/// The parts of a step's line in display order. Each has a rank: if the line is too long, the highest rank is left out first.
fn parts(line: &StepLine, pace: &Throughput) -> Vec<(u8, String)> {
    let loss = pace.loss().map_or_else(|| "not finite".to_owned(), |loss| format!("{loss:.4}"));
    let norm = line.grad_norm.map_or_else(|| "-".to_owned(), |norm| format!("{norm:.2}"));
    vec![
        (0, format!("loss {loss}")),
        (3, format!("lr {:.1e}", line.learning_rate)),
        (5, format!("norm {norm}")),
        (2, format!("{} tok/s", grouped(pace.tokens_per_second().round() as u64))),
        (1, format!("eta {}", human_seconds(pace.eta_seconds()))),
        (4, format!("peak {}", human_bytes(line.peak_bytes))),
    ]
}

/// The line of a step: at most `columns` wide.
pub(super) fn of_step(line: &StepLine, pace: &Throughput, columns: usize, colour: bool) -> String {
    let mut parts = parts(line, pace);
    loop {
        let texts: Vec<&str> = parts.iter().map(|(_, text)| text.as_str()).collect();
        let text = texts.join("  ");
        let least = counter(pace.step, pace.total_steps).len() + 2 + width(&text) + NARROW + 1;
        let first = parts.iter().enumerate().max_by_key(|(_, (rank, _))| *rank).map(|(index, _)| index);
        match first {
            Some(index) if least > columns && parts.len() > 1 => drop(parts.remove(index)),
            _ => return with_text(pace.step, pace.total_steps, &text, columns, colour),
        }
    }
}

fn counter(step: u64, total: u64) -> String {
    let total = total.to_string();
    format!("{step:>width$}/{total}", width = total.len())
}

/// A bar at `step` of `total` with a text behind it, cut to `columns`.
pub(super) fn with_text(step: u64, total: u64, text: &str, columns: usize, colour: bool) -> String {
    let counter = counter(step, total);
    let room = columns.saturating_sub(counter.len() + 3 + width(text));
    let bar = if room < NARROW { 0 } else { room.min(BROAD) };
    let full = (bar as u64 * step.min(total) / total.max(1)) as usize;
    let (done, left) = ("█".repeat(full), "░".repeat(bar - full));
    let gap = if bar > 0 { " " } else { "" };
    let mut line = format!("{done}{left}{gap}{counter}  {text}");
    if width(&line) > columns {
        line = line.chars().take(columns).collect();
    }
    if colour { line.replacen(&done, &Style::Cyan.paint(&done, true), usize::from(full > 0)) } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn line(step: u64) -> StepLine {
        StepLine {
            step,
            epoch: 0.5,
            loss: Some(0.0417),
            learning_rate: 5.9e-3,
            grad_norm: Some(1234.5),
            label_tokens: 7,
            tokens: 4096,
            tokens_per_second: 12_345.0,
            peak_bytes: 212 << 20,
            loss_scale: None,
            accuracy: None,
        }
    }

    #[test]
    fn the_bar_fits_every_terminal() {
        for (step, total) in [(1, 2), (120, 500), (123_456, 1_000_000), (999_999_999, 999_999_999)] {
            let mut pace = Throughput::new(step - 1, total);
            pace.advance(123_456_789, Some(0.0417), Duration::from_millis(900));
            for columns in [10, 20, 40, 60, 80, 100, 200] {
                for colour in [false, true] {
                    let shown = of_step(&line(step), &pace, columns, colour);
                    assert!(width(&shown) <= columns, "{columns}: {shown}");
                    assert!(columns < 40 || shown.contains("loss 0.0417"), "{columns}: {shown}");
                }
                assert!(width(&with_text(step, total, "evaluating 1,234 rows", columns, false)) <= columns);
            }
        }
    }

    #[test]
    fn eighty_columns_hold_what_matters() {
        let mut pace = Throughput::new(119, 500);
        pace.advance(11_111, Some(0.0417), Duration::from_millis(900));
        assert_eq!(
            of_step(&line(120), &pace, 80, false),
            "█░░░░░░░ 120/500  loss 0.0417  lr 5.9e-3  12,346 tok/s  eta 5m 42s  peak 212 MiB"
        );
        assert!(of_step(&line(120), &pace, 120, false).contains("  norm 1234.50  "));
        assert_eq!(
            of_step(&line(120), &pace, 60, false),
            "███░░░░░░░░░░ 120/500  loss 0.0417  12,346 tok/s  eta 5m 42s"
        );
    }

    #[test]
    fn no_loss_is_said() {
        let mut pace = Throughput::new(0, 5);
        pace.advance(1, None, Duration::from_secs(1));
        assert!(of_step(&line(1), &pace, 80, false).contains("loss not finite"));
    }
}
