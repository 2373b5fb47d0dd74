//! The report of `plan`, as JSON and as text.
use std::fmt::Write as _;

use serde::Serialize;

use super::columns::columns;
use super::scaling;
use crate::plan::memory::Breakdown;
use crate::plan::strategies::{Batch, Fit, Limit, Machine, Plan};
use crate::plan::{self, grouped, human_bytes, human_seconds};

#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Rows of the printed table: label and text.
    pub facts: Vec<(String, String)>,
    pub machine: Machine,
    pub batch: Batch,
    pub plan: Plan,
    /// Policy, activations and total of the recommended row, or else the first, in bytes.
    pub checkpointing: Vec<(String, u64, u64)>,
    pub optimizers: Vec<(String, u64)>,
    pub time: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<scaling::Report>,
    pub notes: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Time {
    /// FLOPs of an optimizer step, over all ranks.
    pub flops_per_step: f64,
    pub tokens_per_step: f64,
    pub seconds_per_step: f64,
    pub tokens_per_second: f64,
    /// Where the assumed speed comes from.
    pub basis: String,
    /// The whole run, if `train.max_steps` is set.
    pub seconds: Option<f64>,
    /// Seconds that one rank takes to encode an image, once before training; `None` if features are not cached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_per_image_ahead: Option<f64>,
}

pub(super) fn show(report: &Report) -> String {
    let Report { facts, machine, plan, checkpointing, optimizers, time, scaling, notes, .. } = report;
    let mut out = plan::table(facts);
    let largest = plan.rows.iter().map(|row| row.total).max().unwrap_or(0);
    let (unit, name) = if largest >= 2 << 30 { (f64::from(1 << 30), "GiB") } else { (f64::from(1 << 20), "MiB") };
    let figure = |bytes: u64| match bytes as f64 / unit {
        _ if bytes == 0 => "-".to_owned(),
        value if name == "MiB" || value >= 100.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    };
    let limit = |limit: Limit| match limit {
        Limit::Nothing => "none".to_owned(),
        Limit::UpTo(most) => grouped(most),
        Limit::Any => "any".to_owned(),
        Limit::Unknown => "?".to_owned(),
    };
    let parts = Breakdown::default().parts().map(|(name, _)| name);
    let used: Vec<usize> =
        (0..parts.len()).filter(|&at| plan.rows.iter().any(|row| row.rank.parts()[at].1 > 0)).collect();
    let hosted = plan.rows.iter().any(|row| row.rank.host > 0);
    let mut heads = vec!["strategy".to_owned()];
    heads.extend(["total", "", "longest row that fits", "rows that fit at once"].map(str::to_owned));
    heads.extend(hosted.then(|| "on the host".to_owned()));
    heads.extend(used.iter().map(|&at| parts[at].to_owned()));
    let mut lines = vec![heads];
    for (at, row) in plan.rows.iter().enumerate() {
        let mark = if plan.recommended == Some(at) { "* " } else { "  " };
        let mut line = vec![format!("{mark}{}", row.way.name())];
        line.extend([figure(row.total), row.fit.name().to_owned(), limit(row.longest), limit(row.rows)]);
        line.extend(hosted.then(|| figure(row.rank.host)));
        line.extend(used.iter().map(|&at| figure(row.rank.parts()[at].1)));
        lines.push(line);
    }
    let _ = writeln!(out, "\n{name} of one rank, at most:\n{}", columns(&lines));
    let _ = writeln!(out, "{}{}", if plan.recommended.is_some() { "recommended: " } else { "" }, plan.reason);
    for (text, total) in &plan.helps {
        let verdict = if *total <= machine.memory { Fit::Fits.name() } else { "not enough alone" };
        let _ = writeln!(out, "  {text}: {} ({verdict})", human_bytes(*total));
    }
    let mut lines = vec![["kept for backward", "activations", "total"].map(str::to_owned).to_vec()];
    lines.extend(checkpointing.iter().map(|(name, acts, total)| vec![name.clone(), figure(*acts), figure(*total)]));
    let _ = write!(out, "\n{}", columns(&lines));
    let states = optimizers.iter().map(|(name, bytes)| format!("{name} {}", human_bytes(*bytes)));
    let _ = writeln!(out, "\noptimizer states, unshared: {}", states.collect::<Vec<_>>().join(", "));
    if let Some(time) = time {
        let _ = writeln!(
            out,
            "time: {} a step of {} tokens, {} tokens/s ({:.3e} FLOP a step; {})",
            human_seconds(time.seconds_per_step),
            grouped(time.tokens_per_step as u64),
            grouped(time.tokens_per_second.round() as u64),
            time.flops_per_step,
            time.basis
        );
        if let Some(seconds) = time.seconds {
            let _ = writeln!(out, "      {} for train.max_steps", human_seconds(seconds));
        }
        if let Some(seconds) = time.seconds_per_image_ahead {
            let thousand = human_seconds(1000.0 * seconds);
            let _ =
                writeln!(out, "      {thousand} for each 1,000 images, once before training (vision.cache_features)");
        }
    }
    out += &scaling.as_ref().map(scaling::show).unwrap_or_default();
    for note in notes {
        let _ = writeln!(out, "note: {note}");
    }
    out
}
