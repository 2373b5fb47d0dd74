//! `tunesmith eval`: measures a model's answers on held-out rows, next to those of its base or of another model.
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::atomic_lines::{self, AtomicLines};
use super::classify;
use super::data::Bar;
use super::download::Downloads;
pub use super::eval_options::Args;
use super::eval_options::{Which, choose, names, place};
use super::eval_results::{difference_json, existing, foot, intervals, score_json, table};
use super::provenance;
use super::terminal::{print, print_note, print_text};
use crate::checkpoint::loaded_adapter::LoadedAdapter;
use crate::checkpoint::peft;
use crate::config::arch::{Arch, Vocabulary};
use crate::config::{Config, Task};
use crate::data::process::sources;
use crate::data::{self, Dataset, Split, question};
use crate::error::{Error, Result};
use crate::eval::metrics::{Difference, Likelihood, Metrics, Row};
use crate::eval::{AnswerDecoder, Settings};
use crate::export::merge::{Parts, plain_model};
use crate::files::output::{Existing, check_output_file};
use crate::hub::{self, Part};
use crate::model::Model;
use crate::plan::{human_bytes, human_seconds};
use crate::telemetry::machine;
use crate::telemetry::report::answers::{self, Answered, Asked, Page};
use crate::train::autobatch::budget;
use crate::words::{are, count};
use serde_json::{Map, Value, json};

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
    lines: AtomicLines,
    seconds: f64,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of reading the configuration, the data and the models; [`crate::Kind::Config`]: no held-out rows.
pub fn run(args: &Args) -> Result<()> {
    provenance::check_allowed(&args.allow)?;
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
        check_output_file(&target.join(name), existing, &inputs)?;
    }
    let mut samples = AtomicLines::create(&target.join("samples.jsonl"), existing, &inputs)?;
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
        results.push(exam.ask(&model, AtomicLines::create(&target.join("answers.jsonl"), Existing::Replace, &[])?)?);
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
    atomic_lines::write(&target.join("report.html"), existing, &answers::render(&page))?;
    let report = target.join("report.html");
    print(
        &(table(&asked, &differences)
            + &asked_of
            + &format!("peak memory     {peak}\n{used}report          {}\n", report.display())),
    )
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
    provenance::check_base(&parts, dir, allow)?;
    parts.adapted(&LoadedAdapter::open(dir, &parts.arch)?, &config.model)
}

impl Exam<'_> {
    /// Asks a model all rows; what it says goes into `lines`, so that memory does not grow with their number.
    fn ask(&self, model: &Model, mut lines: AtomicLines) -> Result<Told> {
        const AT_ONCE: usize = 64;
        let began = Instant::now();
        let tokenizer = &self.dataset.tokenizer;
        let mut metrics = Metrics::new(&self.config.eval, self.config.train.seed)?.with_likelihood();
        let settings = Settings::new(self.config, model.arch.max_position_embeddings, self.stop_ids.clone());
        let asked = AnswerDecoder { tokenizer, stop_strings: &self.config.generation.stop_strings };
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
    fn write_samples(&self, samples: &mut AtomicLines, asked: &[Asked], results: &[Told]) -> Result<Vec<Answered>> {
        let tokenizer = &self.dataset.tokenizer;
        let mut told = results.iter().map(|told| told.lines.read()).collect::<Result<Vec<_>>>()?;
        let mut rows = Vec::new();
        for index in 0..self.rows {
            let mut of_row = Vec::with_capacity(told.len());
            for lines in &mut told {
                let line = lines.next().transpose()?.unwrap_or_default();
                let line: Value = serde_json::from_str(&line).map_err(|error| {
                    Error::new(crate::Kind::Io, "the answers' file has changed")
                        .caused_by(error)
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
    atomic_lines::write(path, existing, &format!("{all:#}\n"))
}
