//! `tunesmith eval`: what a model answers on held-out rows, measured, beside what its base or another model answers.
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::args::ConfigArgs;
use super::classify;
use super::data::Bar;
use super::download::Downloads;
use super::staged::{self, Staged};
use super::stamps;
use super::terminal::{print, print_note, print_text};
use crate::checkpoint::finished::Finished;
use crate::checkpoint::peft;
use crate::config::arch::{Arch, Vocabulary};
use crate::config::{Config, Task};
use crate::data::process::{Part as RowPart, sources};
use crate::data::{self, Dataset, Split, question};
use crate::error::{Error, Result};
use crate::eval::metrics::{Difference, Likelihood, Metrics, Row, Score};
use crate::eval::{Asked as Asking, Settings};
use crate::export::merge::{Parts, plain_model};
use crate::files;
use crate::files::output::{Existing, claim_file};
use crate::hub::{self, Part};
use crate::model::Model;
use crate::plan::{human_bytes, human_seconds};
use crate::telemetry::machine;
use crate::telemetry::report::answers::{self, Answered, Asked, Page};
use crate::train::autobatch::budget;
use crate::train::output;
use crate::words::{are, count};
use serde_json::{Map, Value, json};

/// Measure what a model answers on held-out rows.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(super) config: ConfigArgs,
    /// Ask this checkpoint, adapter or model, and the base beside it, instead of the run's result
    #[arg(long, value_name = "DIR", conflicts_with_all = ["base", "compare"])]
    pub(super) checkpoint: Option<PathBuf>,
    /// Ask the base model alone
    #[arg(long, conflicts_with = "compare")]
    pub(super) base: bool,
    /// Ask these two, the second against the first: folders, or the words `base` and `tuned`
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    pub(super) compare: Vec<String>,
    /// Do not ask the base beside the tuned model
    #[arg(long, conflicts_with_all = ["base", "compare"])]
    pub(super) alone: bool,
    /// The rows: `val` or `test` (the default is the first that there is)
    #[arg(long, value_name = "val|test")]
    pub(super) split: Option<String>,
    /// Ask only so many rows, the first ones
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) rows: Option<u64>,
    /// Accept that the adapter was trained on another base than this one, as its backend.json says (`base_model`)
    #[arg(long, value_name = "FIELD")]
    pub(super) allow: Vec<String>,
    /// The folder for metrics.json, samples.jsonl and report.html (`eval` in the output folder of the run)
    #[arg(long, value_name = "DIR")]
    pub(super) output: Option<PathBuf>,
    /// Replace these files whoever wrote them; those of an earlier `eval` are replaced anyway
    #[arg(long)]
    pub(super) overwrite: bool,
}

/// A model to ask.
pub(super) enum Which {
    Base,
    Tuned,
    Dir(PathBuf),
}

impl Which {
    pub(super) fn parse(word: &str) -> Self {
        match word {
            "base" => Self::Base,
            "tuned" => Self::Tuned,
            dir => Self::Dir(dir.into()),
        }
    }

    pub(super) fn name(&self) -> String {
        match self {
            Self::Base => "base".into(),
            Self::Tuned => "tuned".into(),
            Self::Dir(dir) => {
                dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
            }
        }
    }
}

/// What each model is called: its word, or the name of its folder; the whole folder where two would be called alike.
///
/// # Errors
/// [`crate::Kind::Config`]: they are one.
pub(super) fn names(which: &[Which], places: &[PathBuf]) -> Result<Vec<String>> {
    let names: Vec<String> = which.iter().map(Which::name).collect();
    let ([first, second], [here, there]) = (names.as_slice(), places) else { return Ok(names) };
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if real(here) == real(there) {
        return Err(Error::config(format!("--compare: both are {}", here.display())).hint("name two models"));
    }
    if first == second { Ok(places.iter().map(|dir| dir.display().to_string()).collect()) } else { Ok(names) }
}

/// Rows and what a model is asked of them.
struct Exam<'a> {
    config: &'a Config,
    dataset: &'a Dataset,
    split: &'a Split,
    rows: usize,
    stop_ids: Vec<u32>,
    /// What each row is asked by, where a measure looks at it.
    sources: Vec<String>,
}

/// What a model made of it.
struct Told {
    metrics: Metrics,
    /// Rows that were answered; the others have no question.
    answered: usize,
    /// A line a row: the answer and the scores.
    lines: Staged,
    seconds: f64,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of reading the configuration, the data and the models; [`crate::Kind::Config`]: no held-out rows.
pub fn run(args: &Args) -> Result<()> {
    stamps::check_allowed(&args.allow)?;
    let mut config = args.config.load(&[])?.config;
    if config.task() != Task::CausalLm {
        return classify::eval(args, config);
    }
    let downloads = Downloads::default();
    let base = hub::model_dir(&config.model, Part::Whole, &downloads)?.dir;
    hub::fetch_paths(&mut config.data, &downloads)?;
    let mut arch = Arch::from_dir(&base)?;
    config.model.max_seq_len = config.model.max_seq_len.min(arch.max_position_embeddings);
    if !config.tuning.new_tokens.is_empty() {
        arch.grow(data::new_token_ids(&base, &config.tuning.new_tokens)?);
    }
    let dataset = data::load(&config, &base, arch.vocab_size, &Bar::default())?;
    let (part, split) = choose(args.split.as_deref(), &dataset)?;
    let which = match (args.compare.as_slice(), &args.checkpoint) {
        ([first, second], _) => vec![Which::parse(first), Which::parse(second)],
        _ if args.base => vec![Which::Base],
        (_, Some(dir)) if args.alone => vec![Which::Dir(dir.clone())],
        (_, Some(dir)) => vec![Which::Base, Which::Dir(dir.clone())],
        _ if args.alone => vec![Which::Tuned],
        _ => vec![Which::Base, Which::Tuned],
    };
    // What cannot be asked, measured or written is refused before the first model answers for an hour.
    let places: Vec<PathBuf> = which.iter().map(|which| place(which, &config, &base)).collect::<Result<_>>()?;
    let names = names(&which, &places)?;
    let target = args.output.clone().unwrap_or_else(|| config.train.output_dir.join("eval"));
    let (inputs, existing) = (data::named_inputs(&config), existing(args.overwrite));
    for name in ["metrics.json", "report.html"] {
        claim_file(&target.join(name), existing, &inputs)?;
    }
    let mut samples = Staged::create(&target.join("samples.jsonl"), existing, &inputs)?;
    Metrics::new(&config.eval, 0)?;
    let exam = Exam {
        config: &config,
        dataset: &dataset,
        split,
        rows: args.rows.map_or(usize::MAX, |rows| rows as usize).min(split.len()),
        stop_ids: [arch.eos_token_ids.as_slice(), &dataset.stop_ids()?].concat(),
        sources: if config.eval.reads_sources() { sources(&dataset, &config, part)? } else { Vec::new() },
    };
    let mut results: Vec<Told> = Vec::new();
    for ((which, name), dir) in which.iter().zip(&names).zip(&places) {
        print_text(&format!("asking {name} ({})\n", dir.display()));
        let model = load(which, (dir, &args.allow), &config, &base, &arch)?;
        results.push(exam.ask(&model, Staged::create(&target.join("answers.jsonl"), Existing::Replace, &[])?)?);
    }
    let unanswered = results.first().map_or(0, |told| exam.rows - told.answered);
    if unanswered > 0 {
        print_note(&format!(
            "{unanswered} of {} raw text, without a question: loss and perplexity alone are measured of them",
            are(exam.rows, "row")
        ));
    }
    let differences = match results.as_slice() {
        [first, second] => first.metrics.differences(&second.metrics),
        _ => Vec::new(),
    };
    let asked: Vec<Asked> = names
        .into_iter()
        .zip(&places)
        .zip(&results)
        .map(|((name, dir), result)| Asked { name, origin: dir.display().to_string(), scores: result.metrics.scores() })
        .collect();
    let rows = exam.write_samples(&mut samples, &asked, &results)?;
    samples.publish()?;
    write_metrics((&target.join("metrics.json"), existing), part.name(), exam.rows, &config, (&asked, &differences))?;
    let seconds: f64 = results.iter().map(|result| result.seconds).sum();
    let mut facts: Vec<(String, String)> =
        asked.iter().map(|model| (model.name.clone(), model.origin.clone())).collect();
    facts.push(("rows".into(), format!("{} of {} ({})", exam.rows, split.len(), part.name())));
    facts
        .push(("answers".into(), format!("as gen says, at most {}", count(config.generation.max_new_tokens, "token"))));
    facts.push(("intervals".into(), intervals(config.eval.confidence, config.eval.bootstrap_samples)));
    let asked_of = foot(&facts);
    facts.push(("time".into(), human_seconds(seconds)));
    let peak = human_bytes(machine::peak_bytes());
    facts.push(("peak memory".into(), peak.clone()));
    let used = budget::used(&config);
    facts.extend(used.clone());
    let used = used.map_or_else(String::new, |(label, text)| format!("{label:16}{text}\n"));
    let title =
        config.train.output_dir.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned());
    let page = Page {
        title: &title,
        asked: &asked,
        differences: &differences,
        pictures: &[],
        count: exam.rows,
        rows: &rows,
        facts: &facts,
    };
    staged::write(&target.join("report.html"), existing, &answers::render(&page))?;
    let report = target.join("report.html");
    print(
        &(table(&asked, &differences)
            + &asked_of
            + &format!("peak memory     {peak}\n{used}report          {}\n", report.display())),
    )
}

/// What the ranges of scores are.
pub(super) fn intervals(confidence: f64, replicates: usize) -> String {
    match replicates {
        0 => "none (eval.bootstrap_samples: 0)".to_owned(),
        replicates => format!("{} %, by a bootstrap of {}", confidence * 100.0, count(replicates, "replicate")),
    }
}

/// How many rows were asked, and what the ranges are, below the table.
pub(super) fn foot(facts: &[(String, String)]) -> String {
    let told = facts.iter().filter(|(label, _)| ["rows", "intervals"].contains(&label.as_str()));
    told.fold(String::new(), |all, (label, text)| all + &format!("{label:16}{text}\n"))
}

/// What an earlier evaluation has left is replaced, other files only with `overwrite`.
pub(super) const fn existing(overwrite: bool) -> Existing {
    if overwrite { Existing::Replace } else { Existing::Ours(is_ours, "--overwrite") }
}

/// Whether a file is one of an evaluation.
fn is_ours(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = files::open_own(path).and_then(|file| file.take(files::SMALL).read_to_end(&mut start));
    if read.is_err() {
        return false;
    }
    let text = String::from_utf8_lossy(&start);
    let object = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap_or_default();
    match path.extension().and_then(|end| end.to_str()) {
        Some("json") => ["models", "split", "rows"].iter().all(|key| object(&text).contains_key(*key)),
        Some("jsonl") => text.lines().next().is_none_or(|line| object(line).contains_key("row")),
        _ => text.lines().take(9).any(|line| line.contains(" · evaluation</title>")),
    }
}

/// The held-out rows.
pub(super) fn choose<'a>(name: Option<&str>, dataset: &'a Dataset) -> Result<(RowPart, &'a Split)> {
    let validation = (RowPart::Validation, dataset.validation.as_ref());
    let test = (RowPart::Test, dataset.test.as_ref());
    let candidates = match name {
        None => vec![validation, test],
        Some("val" | "validation") => vec![validation],
        Some("test") => vec![test],
        Some(other) => return Err(Error::config(format!("--split {other}: expected val or test"))),
    };
    candidates
        .into_iter()
        .find_map(|(part, split)| Some((part, split?)))
        .filter(|(_, split)| !split.is_empty())
        .ok_or_else(|| {
            let (rows, key) = match name {
                Some("test") => ("test rows", "data.test_path is not set"),
                Some(_) => ("validation rows", "neither data.val_path nor data.split is set"),
                None => ("held-out rows", "none of data.val_path, data.test_path and data.split is set"),
            };
            let there = dataset.validation.iter().chain(&dataset.test).next().is_some();
            let other = match name {
                Some("test") if there => "; --split val asks the validation rows",
                Some(_) if there => "; --split test asks the test rows",
                _ => "",
            };
            Error::config(format!("there are no {rows}: {key}"))
                .hint(format!("set data.val_path, data.test_path or data.split{other}"))
        })
}

/// The folder of a model to ask.
pub(super) fn place(which: &Which, config: &Config, base: &Path) -> Result<PathBuf> {
    let dir = match which {
        Which::Base => return Ok(base.to_owned()),
        Which::Tuned => {
            let output = &config.train.output_dir;
            let found =
                [output::ADAPTER, output::MODEL].map(|name| output.join(name)).into_iter().find(|dir| dir.is_dir());
            found.ok_or_else(|| {
                Error::checkpoint(format!("{}: neither adapter/ nor model/", output.display()))
                    .hint("train first, or name a checkpoint (--checkpoint DIR), or ask the base alone (--base)")
            })?
        }
        Which::Dir(dir) => dir.clone(),
    };
    if ["adapter_config.json", "config.json"].iter().any(|file| dir.join(file).is_file()) {
        return Ok(dir);
    }
    Err(Error::checkpoint(format!("{}: neither adapter_config.json nor config.json", dir.display()))
        .hint("name a checkpoint, an adapter or a model folder"))
}

fn load(which: &Which, (dir, allow): (&Path, &[String]), config: &Config, base: &Path, arch: &Arch) -> Result<Model> {
    let below = &config.tuning.adapters;
    if matches!(which, Which::Base) {
        let vocabulary = Vocabulary { rows: arch.token_rows.clone(), ..Vocabulary::default() };
        return Parts::open(base, below, &vocabulary)?.bare(&config.model);
    }
    if !dir.join("adapter_config.json").is_file() {
        return plain_model(dir);
    }
    let parts = Parts::open(base, below, &peft::vocabulary(dir)?)?;
    stamps::check_base(&parts, dir, allow)?;
    parts.adapted(&Finished::open(dir, &parts.arch)?, &config.model)
}

impl Exam<'_> {
    /// Asks a model all rows; what it says goes into `lines`, so that memory does not grow with their number.
    fn ask(&self, model: &Model, mut lines: Staged) -> Result<Told> {
        const AT_ONCE: usize = 64;
        let began = Instant::now();
        let tokenizer = &self.dataset.tokenizer;
        let mut metrics = Metrics::new(&self.config.eval, self.config.train.seed)?.with_likelihood();
        let settings = Settings::new(self.config, model.arch.max_position_embeddings, self.stop_ids.clone());
        let asked = Asking { tokenizer, stop_strings: &self.config.generation.stop_strings };
        let mut answered = 0;
        for start in (0..self.rows).step_by(AT_ONCE) {
            let chunk = start..self.rows.min(start + AT_ONCE);
            let questions: Vec<Option<(Vec<u32>, Vec<u32>)>> =
                chunk.clone().map(|index| self.dataset.question(self.split, index)).collect::<Result<_>>()?;
            let prompts: Vec<Vec<u32>> = questions.iter().flatten().map(|(prompt, _)| prompt.clone()).collect();
            let settings = Settings { first_text: answered as u64, ..settings.clone() };
            let mut found = asked.answer(model, &prompts, &settings, &mut || true)?.unwrap_or_default().into_iter();
            answered += prompts.len();
            for (index, question) in chunk.zip(questions) {
                let likelihood = self.likelihood(model, index)?;
                let answer = question.as_ref().and_then(|_| found.next());
                let scores = match (&question, &answer) {
                    (Some((_, reference)), Some(answer)) => {
                        let reference = tokenizer.decode(reference, true)?;
                        let source = self.sources.get(index).map_or("", String::as_str);
                        metrics.add(&Row { source, answer, reference: &reference }, Some(&likelihood))?
                    }
                    _ => metrics.add_unanswered(&likelihood)?,
                };
                let scores: Map<String, Value> = scores.into_iter().map(|(name, score)| (name, json!(score))).collect();
                lines.push(&json!({ "answer": answer, "scores": scores }).to_string())?;
            }
        }
        lines.finish()?;
        Ok(Told { metrics, answered, lines, seconds: began.elapsed().as_secs_f64() })
    }

    /// How probable the model finds the row's labels.
    fn likelihood(&self, model: &Model, index: usize) -> Result<Likelihood> {
        let scored = model.token_scores(&self.split.batch([index])?)?;
        Ok(Likelihood {
            nll: scored.iter().map(|(nll, _)| f64::from(*nll)).sum(),
            tokens: scored.len() as u64,
            right: scored.iter().filter(|(_, right)| *right).count() as u64,
            bytes: self.split.label_bytes_of(index, &self.dataset.tokenizer)?,
        })
    }

    /// Writes a line a row, and returns what the page shows.
    fn write_samples(&self, samples: &mut Staged, asked: &[Asked], results: &[Told]) -> Result<Vec<Answered>> {
        let tokenizer = &self.dataset.tokenizer;
        let mut told = results.iter().map(|told| told.lines.read()).collect::<Result<Vec<_>>>()?;
        let mut rows = Vec::new();
        for index in 0..self.rows {
            let mut of_row = Vec::with_capacity(told.len());
            for lines in &mut told {
                let line = lines.next().transpose()?.unwrap_or_default();
                let line: Value = serde_json::from_str(&line).map_err(|error| {
                    Error::new(crate::Kind::Io, format!("the answers' file has changed: {error}"))
                        .hint("leave it alone until eval has ended, and start eval again")
                })?;
                of_row.push(line);
            }
            let (prompt, reference) = self.split.prompt(index)?;
            let question = self.dataset.question(self.split, index)?.is_some();
            let prompt = if question { Some(tokenizer.decode(&prompt, false)?) } else { None };
            let reference = tokenizer.decode(&reference, true)?;
            let by_name = |field: &str| -> Map<String, Value> {
                asked.iter().zip(&of_row).map(|(model, line)| (model.name.clone(), line[field].clone())).collect()
            };
            samples.push(
                &json!({
                    "row": index, "prompt": prompt, "reference": reference,
                    "answers": by_name("answer"), "scores": by_name("scores"),
                })
                .to_string(),
            )?;
            if let Some(prompt) = prompt.filter(|_| rows.len() < answers::ROWS) {
                let text = |line: &Value| line["answer"].as_str().unwrap_or_default().to_owned();
                rows.push(Answered {
                    question: String::new(),
                    prompt,
                    reference,
                    answers: of_row.iter().map(text).collect(),
                });
            }
        }
        let prompts: Vec<String> = rows.iter().map(|row| row.prompt.clone()).collect();
        let questions = question::questions(self.dataset.template.as_ref(), &prompts);
        rows.iter_mut().zip(questions).for_each(|(row, question)| row.question = question);
        Ok(rows)
    }
}

pub(super) fn score_json(score: &Score) -> (String, Value) {
    let (low, high) = score.interval.unzip();
    (score.name.clone(), json!({ "value": score.value, "low": low, "high": high }))
}

fn write_metrics(
    (path, existing): (&Path, Existing),
    split: &str,
    rows: usize,
    config: &Config,
    (asked, differences): (&[Asked], &[Difference]),
) -> Result<()> {
    let models: Map<String, Value> = asked
        .iter()
        .map(|model| {
            let scores: Map<String, Value> = model.scores.iter().map(score_json).collect();
            (model.name.clone(), json!({ "path": model.origin, "scores": scores }))
        })
        .collect();
    let differences: Map<String, Value> = differences.iter().map(difference_json).collect();
    let all = json!({
        "split": split,
        "rows": rows,
        "max_new_tokens": config.generation.max_new_tokens,
        "confidence": config.eval.confidence,
        "bootstrap_samples": config.eval.bootstrap_samples,
        "seed": config.train.seed,
        "models": models,
        "differences": differences,
    });
    staged::write(path, existing, &format!("{all:#}\n"))
}

/// A difference of two models' scores.
pub(super) fn difference_json(difference: &Difference) -> (String, Value) {
    let (low, high) = difference.interval.unzip();
    let by = difference.second - difference.first;
    (difference.name.clone(), json!({ "value": by, "low": low, "high": high, "p_value": difference.p_value }))
}

/// The scores as a table.
pub(super) fn table(asked: &[Asked], differences: &[Difference]) -> String {
    let names = asked.iter().flat_map(|model| &model.scores).map(|score| score.name.chars().count() + 2);
    let left = names.fold(16, usize::max);
    let mut text = format!("{:left$}", "");
    let width = asked.iter().map(|model| model.name.chars().count() + 2).fold(14, usize::max);
    for model in asked {
        let _ = write!(text, "{:>width$}", model.name); // a String never fails
    }
    text += if differences.is_empty() { "\n" } else { "    difference (interval)\n" };
    let Some(first) = asked.first() else { return text };
    for (index, score) in first.scores.iter().enumerate() {
        let _ = write!(text, "{:left$}", score.name);
        for score in asked.iter().filter_map(|model| model.scores.get(index)) {
            let _ = write!(text, "{:>width$.4}", score.value);
        }
        if let Some(difference) = differences.iter().find(|difference| difference.name == score.name) {
            let _ = write!(text, "    {:+.4}", difference.second - difference.first);
            if let Some((low, high)) = difference.interval {
                let _ = write!(text, " ({low:+.4} … {high:+.4})");
            }
        }
        text.push('\n');
    }
    text
}
