//! `report.html`: the settings of a run, its curves, and generations before and after, on one self-contained page. It
//! has inline styles and SVG, and no scripts. Everything from data, model or configuration is escaped.
pub mod answers;
mod chart;
mod confusion;
mod html;

use std::fmt::Write as _;

use self::chart::{ChartMarks, Series, number, smooth};
pub use self::confusion::Confusion;
use self::html::{clipped, escape, pairs};
use super::machine::MachineInfo;
use super::metrics::MetricsLine;
use tunesmith_base::words::count;
use tunesmith_eval::exact_match;

/// The most characters of a sample's text.
const SAMPLE_CHARACTERS: usize = 4_000;

/// Samples that are visible at first; the others unfold.
const SAMPLES_OPEN: usize = 8;

/// How the run ended, for the pill beside the title.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunOutcome {
    /// Every planned step was done.
    Completed,
    /// Early stopping: the metric of the best checkpoint did not improve for `train.early_stopping_patience` evaluations.
    StoppedEarly,
}

impl RunOutcome {
    /// The text of the pill, such as `completed`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::StoppedEarly => "stopped early",
        }
    }
}

/// A held-out row with generations before and after training.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// The rendered prompt, as the model saw it.
    pub prompt: String,
    /// The user's last question in it ([`tunesmith_data::question::questions`]).
    pub question: String,
    /// Thumbnails of its images, as `data:` URIs.
    pub pictures: Vec<String>,
    /// The answer that the row expects.
    pub reference: String,
    /// The answer that was generated before training.
    pub before: String,
    /// The answer that was generated after training.
    pub after: String,
}

impl Sample {
    /// Whether the generation after training equals the reference, except for surrounding white space.
    pub fn after_matches(&self) -> bool {
        self.matches(&self.after)
    }

    fn matches(&self, answer: &str) -> bool {
        exact_match(answer, &self.reference)
    }
}

/// Exact matches among `samples`, except for surrounding white space: `(before, after)`.
pub fn exact_matches(samples: &[Sample]) -> (usize, usize) {
    let count = |answer: fn(&Sample) -> &str| samples.iter().filter(|sample| sample.matches(answer(sample))).count();
    (count(|sample| &sample.before), count(|sample| &sample.after))
}

/// A share in whole percent, the same in the terminal and in the report.
pub fn whole_percent(part: usize, whole: usize) -> u64 {
    (100.0 * part as f64 / whole.max(1) as f64).round() as u64
}

/// A configuration key as the run used it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingRow {
    /// The dotted name, such as `train.learning_rate`.
    pub key: String,
    /// The value that the run used, as JSON.
    pub value: String,
    /// Where the value came from: a file and line, a flag, or `default`.
    pub source: String,
    /// Whether that is the built-in default.
    pub default: bool,
}

/// The content of the page.
#[derive(Debug, Clone)]
pub struct RunReport {
    /// The run's name, the title of the page.
    pub title: String,
    /// One line below it: model, mode, size.
    pub subtitle: String,
    /// How the run ended, shown beside the title.
    pub outcome: RunOutcome,
    /// The key figures: name, value, remark.
    pub cards: Vec<(String, String, String)>,
    /// The lines of `metrics.jsonl`, for the curves.
    pub lines: Vec<MetricsLine>,
    /// Facts about the data, such as row and token counts: label and text.
    pub data: Vec<(String, String)>,
    /// Tokens of each training row.
    pub lengths: Vec<usize>,
    /// Held-out rows, before and after.
    pub samples: Vec<Sample>,
    /// For classification, the confusion matrix.
    pub confusion: Option<Confusion>,
    /// How rows become steps and epochs, and the learning rate at its turning points: label and text.
    pub plan: Vec<(String, String)>,
    /// Every configuration key, including defaults.
    pub settings: Vec<SettingRow>,
    /// The machine that the run was on.
    pub machine: MachineInfo,
    /// Wall time by phase, and file locations.
    pub facts: Vec<(String, String)>,
}

/// Renders the page as HTML.
pub fn render(report: &RunReport) -> String {
    let status = report.outcome.as_str();
    let title = escape(&report.title);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"generator\" content=\"tunesmith {version}\"><title>{title} · tunesmith</title>\n\
         <style>{style}</style></head>\n<body><main>\n\
         <header><h1>{title}</h1><span class=\"pill\">{status}</span></header>\n<p class=\"lead\">{subtitle}</p>\n",
        version = env!("CARGO_PKG_VERSION"),
        style = include_str!("style.css"),
        subtitle = escape(&report.subtitle),
    );
    cards(&mut page, report);
    curves(&mut page, &report.lines);
    samples(&mut page, &report.samples);
    if let Some(confusion) = &report.confusion {
        let _ = writeln!(page, "<h2>Labels</h2>\n{}", confusion.render());
    }
    data(&mut page, report);
    run(&mut page, report);
    configuration(&mut page, &report.settings);
    let _ = writeln!(
        page,
        "<footer>Written by tunesmith {}. The same numbers are in metrics.jsonl and in the TensorBoard log.</footer>\n</main></body></html>",
        env!("CARGO_PKG_VERSION"),
    );
    page
}

fn cards(page: &mut String, report: &RunReport) {
    page.push_str("<div class=\"cards\">");
    if !report.samples.is_empty() {
        let (before, after) = exact_matches(&report.samples);
        let of = report.samples.len();
        let class = if after > before { "card main" } else { "card" };
        let _ = write!(
            page,
            "<div class=\"{class}\"><small>exact match</small><b>{} %</b><small>{after} of {of} held-out rows, before {before}</small></div>",
            whole_percent(after, of),
        );
    }
    for (name, value, remark) in &report.cards {
        let (name, value, remark) = (escape(name), escape(value), escape(remark));
        let _ = write!(page, "<div class=\"card\"><small>{name}</small><b>{value}</b><small>{remark}</small></div>");
    }
    page.push_str("</div>\n");
}

fn curves(page: &mut String, lines: &[MetricsLine]) {
    let of_steps = |value: fn(&super::metrics::StepLine) -> Option<f64>| -> Vec<(f64, f64)> {
        let step = |line: &MetricsLine| match line {
            MetricsLine::Step(line) => Some((line.step as f64, value(line)?)),
            MetricsLine::Eval(_) => None,
        };
        lines.iter().filter_map(step).collect()
    };
    let evaluations: Vec<_> = lines
        .iter()
        .filter_map(|line| match line {
            MetricsLine::Eval(line) => Some((line.step as f64, line.eval_loss?)),
            MetricsLine::Step(_) => None,
        })
        .collect();
    let line = |name, class, points| Series { name, class, points, dots: false };
    let loss = of_steps(|line| line.loss);
    if loss.is_empty() && evaluations.is_empty() {
        return;
    }
    let smoothed = smooth(&loss);
    let loss = chart::lines(
        "Loss",
        &[
            line("each step", "raw", loss),
            line("smoothed", "smooth", smoothed),
            Series { name: "evaluation", class: "eval", points: evaluations, dots: true },
        ],
        ChartMarks::Wide,
    );
    let single = |title, points| chart::lines(title, &[line(title, "smooth", points)], ChartMarks::Small);
    // Only a classification has accuracies.
    let accuracies = of_steps(|line| line.accuracy);
    let evaluated: Vec<_> = lines
        .iter()
        .filter_map(|line| match line {
            MetricsLine::Eval(line) => Some((line.step as f64, *line.eval_scores.get("accuracy")?)),
            MetricsLine::Step(_) => None,
        })
        .collect();
    let accuracy = if accuracies.is_empty() {
        String::new()
    } else {
        let smoothed = smooth(&accuracies);
        chart::lines(
            "Accuracy",
            &[
                line("each step", "raw", accuracies),
                line("smoothed", "smooth", smoothed),
                Series { name: "evaluation", class: "eval", points: evaluated, dots: true },
            ],
            ChartMarks::Small,
        )
    };
    let rate = single("Learning rate", of_steps(|line| Some(line.learning_rate)));
    let norm = of_steps(|line| line.grad_norm);
    let smoothed = smooth(&norm);
    let norm = chart::lines(
        "Gradient norm",
        &[line("each step", "raw", norm), line("smoothed", "smooth", smoothed)],
        ChartMarks::Small,
    );
    let speed = single("Tokens per second", of_steps(|line| Some(line.tokens_per_second)));
    let memory = single("Peak memory, MiB", of_steps(|line| Some((line.peak_bytes >> 20) as f64)));
    let _ = writeln!(
        page,
        "<h2>Learning</h2>\n<div class=\"charts\"><div class=\"wide\">{loss}</div>{accuracy}{rate}{norm}{speed}{memory}</div>"
    );
}

fn samples(page: &mut String, samples: &[Sample]) {
    if samples.is_empty() {
        return;
    }
    page.push_str("<h2>Answers on held-out rows</h2>\n");
    for (index, sample) in samples.iter().enumerate() {
        if index == SAMPLES_OPEN {
            let _ = writeln!(page, "<details><summary>{}</summary>", count(samples.len() - SAMPLES_OPEN, "more row"));
        }
        let mark = |answer: &str| {
            if sample.matches(answer) {
                "<span class=\"yes\">✓ equal</span>"
            } else {
                "<span class=\"no\">✗ differs</span>"
            }
        };
        let _ = writeln!(
            page,
            "<div class=\"sample\"><div class=\"prompt\"><small>question</small>{}{}</div><div class=\"answers\">\
             <div><small>reference</small>{}</div><div><small>before {}</small>{}</div><div><small>after {}</small>{}</div></div></div>",
            pictures(&sample.pictures),
            question(&sample.question, &sample.prompt),
            text(&sample.reference),
            mark(&sample.before),
            text(&sample.before),
            mark(&sample.after),
            text(&sample.after),
        );
    }
    if samples.len() > SAMPLES_OPEN {
        page.push_str("</details>\n");
    }
}

/// Accepts only our own `data:` images, because a report loads nothing.
fn pictures(uris: &[String]) -> String {
    let ours = uris.iter().filter(|uri| uri.starts_with("data:image/png;base64,"));
    ours.fold(String::new(), |mut all, uri| {
        let _ = write!(all, "<img src=\"{}\" alt=\"image\">", escape(uri));
        all
    })
}

fn text(text: &str) -> String {
    match text.trim() {
        "" => "<div class=\"empty\">(nothing)</div>".to_owned(),
        text => format!("<pre>{}</pre>", escape(&clipped(text, SAMPLE_CHARACTERS))),
    }
}

/// The user's question, and the whole prompt in a part that unfolds.
fn question(question: &str, prompt: &str) -> String {
    if question.trim() == prompt.trim() {
        return text(question);
    }
    format!("{}<details><summary>whole prompt</summary>{}</details>", text(question), text(prompt))
}

fn data(page: &mut String, report: &RunReport) {
    let chart = chart::histogram("Tokens per training row", "tokens", &report.lengths, 24);
    let table = pairs(&report.data);
    let _ = writeln!(page, "<h2>Data</h2>\n<div class=\"split\"><div class=\"panel\">{table}</div>{chart}</div>");
}

fn run(page: &mut String, report: &RunReport) {
    let MachineInfo { processor, threads, memory, system } = &report.machine;
    let mut facts = report.facts.clone();
    facts.extend([
        ("processor".to_owned(), format!("{processor}, {}", count(threads, "thread"))),
        ("memory".to_owned(), tunesmith_plan::human_bytes(*memory)),
        ("system".to_owned(), system.clone()),
        ("tunesmith".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
    ]);
    let _ = writeln!(
        page,
        "<h2>Run</h2>\n<div class=\"split\"><div class=\"panel\">{}</div><div class=\"panel\">{}</div></div>",
        pairs(&report.plan),
        pairs(&facts),
    );
}

fn configuration(page: &mut String, settings: &[SettingRow]) {
    let table = |rows: &[&SettingRow]| {
        let mut out = String::from("<div class=\"panel\"><table><tr><th>key</th><th>value</th><th>source</th></tr>");
        for row in rows {
            let (key, value, source) = (escape(&row.key), escape(&row.value), escape(&row.source));
            let _ = write!(out, "<tr><td><code>{key}</code></td><td><code>{value}</code></td><td>{source}</td></tr>");
        }
        out + "</table></div>"
    };
    let (defaults, set): (Vec<_>, Vec<_>) = settings.iter().partition(|row| row.default);
    let _ = write!(page, "<h2>Configuration</h2>\n{}", table(&set));
    if !defaults.is_empty() {
        let _ = writeln!(
            page,
            "<details><summary>{} at the default</summary>{}</details>",
            count(defaults.len(), "key"),
            table(&defaults)
        );
    }
}

/// A number in the form of the cards.
pub fn figure(value: f64) -> String {
    number(value)
}

#[cfg(test)]
mod tests;
