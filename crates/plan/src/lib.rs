//! Computes what a run will do before it starts, by pure functions: its steps, memory, disk space, FLOPs and speed.
//!
//! - [`batches`]: from rows to optimizer steps; [`rates`]: the learning rate over them.
//! - [`memory`]: the bytes that a rank needs; [`strategies`]: the same for each way to share a run among ranks.
//! - [`bytes`]: the disk space that saving needs.
//! - [`flops`]: floating-point operations of a step, and [`image_flops`] those of its images; [`scaling`]: how fast many ranks are.
//! - [`platform`]: what is used of a machine by default.
use std::fmt::Write as _;

pub use tunesmith_base::memory::human_bytes;
pub use tunesmith_base::words::grouped;

pub mod batches;
pub mod bytes;
pub mod flops;
pub mod image_flops;
pub mod memory;
pub mod platform;
pub mod rates;
pub mod scaling;
pub mod strategies;

/// An aligned table of `(label, value)` rows, one line a row, each line indented by two spaces.
pub fn table(rows: &[(String, String)]) -> String {
    let width = rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
    rows.iter().fold(String::new(), |mut out, (label, value)| {
        let _ = writeln!(out, "  {label:<width$}  {value}");
        out
    })
}

/// A duration in seconds as text: `4.2s`, `3m 07s`, `2h 05m`.
pub fn human_seconds(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        _ if seconds < 59.95 => format!("{seconds:.1}s"),
        0..3600 => format!("{}m {:02}s", whole / 60, whole % 60),
        _ => format!("{}h {:02}m", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(human_seconds(4.21), "4.2s");
        assert_eq!(human_seconds(59.99), "1m 00s");
        assert_eq!(human_seconds(187.0), "3m 07s");
        assert_eq!(human_seconds(7500.0), "2h 05m");
    }
}
