//! `tunesmith eval`: what a model answers on held-out rows, measured, beside what its base or another model answers.
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::args::ConfigArgs;
use super::classify;
use super::data::Bar;
use super::download::Downloads;
use super::terminal::{print, print_note, print_text};
use crate::checkpoint::atomic;
use crate::checkpoint::disk::RealDisk;
use crate::checkpoint::finished::Finished;
use crate::config::arch::Arch;
use crate::config::{Config, Task};
use crate::data::{self, Dataset, Split};
use crate::error::{Error, Result};
use crate::eval::metrics::{Difference, Likelihood, Metrics, Row, Score};
use crate::eval::{Asked as Asking, Settings};
use crate::export::merge::{Parts, plain_model, tokens_of};
use crate::hub::{self, Part};
use crate::model::Model;
use crate::plan::human_seconds;
use crate::train::output;
use crate::train::report::answers::{self, Answered, Asked, Page};
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
    #[arg(long, value_name = "N")]
    pub(super) rows: Option<usize>,
    /// The folder for metrics.json, samples.jsonl and report.html (`eval` in the output folder of the run)
    #[arg(long, value_name = "DIR")]
    pub(super) output: Option<PathBuf>,
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

/// Rows and what a model is asked of them.
struct Exam<'a> {
    config: &'a Config,
    dataset: &'a Dataset,
    split: &'a Split,
    rows: usize,
    stop_ids: Vec<u32>,
}

/// What a model made of it.
struct Told {
    metrics: Metrics,
    answers: Vec<String>,
    scores: Vec<Vec<(String, f64)>>,
    seconds: f64,
}

/// Runs the subcommand.
///
/// # Errors
/// Those of reading the configuration, the data and the models; [`crate::Kind::Config`]: no held-out rows.
pub fn run(args: &Args) -> Result<()> {
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
    let (split_name, split) = choose(args.split.as_deref(), &dataset)?;
    let which = match (args.compare.as_slice(), &args.checkpoint) {
        ([first, second], _) => vec![Which::parse(first), Which::parse(second)],
        _ if args.base => vec![Which::Base],
        (_, Some(dir)) if args.alone => vec![Which::Dir(dir.clone())],
        (_, Some(dir)) => vec![Which::Base, Which::Dir(dir.clone())],
        _ if args.alone => vec![Which::Tuned],
        _ => vec![Which::Base, Which::Tuned],
    };
    let exam = Exam {
        config: &config,
        dataset: &dataset,
        split,
        rows: args.rows.unwrap_or(usize::MAX).min(split.len()),
        stop_ids: [arch.eos_token_ids.as_slice(), &dataset.stop_ids()?].concat(),
    };
    // What cannot be asked is refused before the first model answers for an hour.
    let places: Vec<PathBuf> = which.iter().map(|which| place(which, &config, &base)).collect::<Result<_>>()?;
    Metrics::new(&config.eval, 0)?;
    let mut results = Vec::new();
    for (which, dir) in which.iter().zip(&places) {
        print_text(&format!("asking {} ({})\n", which.name(), dir.display()));
        let model = load(which, dir, &config, &base, &arch)?;
        results.push(exam.ask(&model)?);
    }
    let differences = match results.as_slice() {
        [first, second] => first.metrics.differences(&second.metrics),
        _ => Vec::new(),
    };
    let asked: Vec<Asked> = which
        .iter()
        .zip(&places)
        .zip(&results)
        .map(|((which, dir), result)| Asked {
            name: which.name(),
            origin: dir.display().to_string(),
            scores: result.metrics.scores(),
        })
        .collect();
    let target = args.output.clone().unwrap_or_else(|| config.train.output_dir.join("eval"));
    std::fs::create_dir_all(&target).map_err(|source| Error::io("create", &target, &source))?;
    let rows = exam.write_samples(&target.join("samples.jsonl"), &asked, &results)?;
    write_metrics(&target.join("metrics.json"), split_name, rows.len(), &config, (&asked, &differences))?;
    let seconds: f64 = results.iter().map(|result| result.seconds).sum();
    let mut facts: Vec<(String, String)> =
        asked.iter().map(|model| (model.name.clone(), model.origin.clone())).collect();
    facts.push(("rows".into(), format!("{} of {} ({split_name})", rows.len(), split.len())));
    facts.push(("answers".into(), format!("as gen says, at most {} tokens", config.generation.max_new_tokens)));
    facts.push((
        "intervals".into(),
        format!("{} % by a bootstrap of {} replicates", config.eval.confidence * 100.0, config.eval.bootstrap_samples),
    ));
    facts.push(("time".into(), human_seconds(seconds)));
    let title =
        config.train.output_dir.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned());
    let page =
        Page { title: &title, asked: &asked, differences: &differences, pictures: &[], rows: &rows, facts: &facts };
    atomic::replace_file(&RealDisk, &target.join("report.html"), &answers::render(&page))?;
    print(&(table(&asked, &differences) + &format!("report          {}\n", target.join("report.html").display())))
}

/// The held-out rows.
pub(super) fn choose<'a>(name: Option<&str>, dataset: &'a Dataset) -> Result<(&'static str, &'a Split)> {
    let (validation, test) = (("validation", dataset.validation.as_ref()), ("test", dataset.test.as_ref()));
    let candidates = match name {
        None => vec![validation, test],
        Some("val" | "validation") => vec![validation],
        Some("test") => vec![test],
        Some(other) => return Err(Error::config(format!("--split {other}: expected val or test"))),
    };
    candidates
        .into_iter()
        .find_map(|(name, split)| Some((name, split?)))
        .filter(|(_, split)| !split.is_empty())
        .ok_or_else(|| {
            Error::config("there are no such held-out rows").hint("set data.val_path, data.test_path or data.split")
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

fn load(which: &Which, dir: &Path, config: &Config, base: &Path, arch: &Arch) -> Result<Model> {
    let below = &config.tuning.adapters;
    if matches!(which, Which::Base) {
        return Parts::open(base, below, arch.new_tokens.clone())?.bare(&config.model);
    }
    if !dir.join("adapter_config.json").is_file() {
        return plain_model(dir);
    }
    let parts = Parts::open(base, below, tokens_of(dir)?)?;
    if !parts.check_stamp(dir)? {
        print_note(&format!("no backend.json in or beside {}: its base cannot be checked", dir.display()));
    }
    parts.adapted(&Finished::open(dir, &parts.arch)?, &config.model)
}

impl Exam<'_> {
    /// The prompt and the reference of a row, as tokens.
    fn row(&self, index: usize) -> Result<(Vec<u32>, Vec<u32>)> {
        self.split.prompt(index)
    }

    /// Asks a model all rows.
    fn ask(&self, model: &Model) -> Result<Told> {
        const AT_ONCE: usize = 64;
        let began = Instant::now();
        let tokenizer = &self.dataset.tokenizer;
        let mut metrics = Metrics::new(&self.config.eval, self.config.train.seed)?.with_likelihood();
        let (mut answers, mut scores) = (Vec::with_capacity(self.rows), Vec::with_capacity(self.rows));
        let settings = Settings::new(self.config, model.arch.max_position_embeddings, self.stop_ids.clone());
        let asked = Asking { tokenizer, stop_strings: &self.config.generation.stop_strings };
        let indices: Vec<usize> = (0..self.rows).collect();
        for chunk in indices.chunks(AT_ONCE) {
            let rows: Vec<_> = chunk.iter().map(|&index| self.row(index)).collect::<Result<_>>()?;
            let prompts: Vec<Vec<u32>> = rows.iter().map(|(prompt, _)| prompt.clone()).collect();
            let settings = Settings { first_text: chunk[0] as u64, ..settings.clone() };
            let found = asked.answer(model, &prompts, &settings, &mut || true)?.unwrap_or_default();
            for ((&index, (prompt, reference)), answer) in chunk.iter().zip(&rows).zip(found) {
                let (source, reference) = (tokenizer.decode(prompt, true)?, tokenizer.decode(reference, true)?);
                let likelihood = self.likelihood(model, index)?;
                let row = Row { source: source.trim(), answer: &answer, reference: &reference };
                scores.push(metrics.add(&row, Some(&likelihood))?);
                answers.push(answer);
            }
        }
        Ok(Told { metrics, answers, scores, seconds: began.elapsed().as_secs_f64() })
    }

    /// How probable the model finds the row's labels.
    fn likelihood(&self, model: &Model, index: usize) -> Result<Likelihood> {
        let scored = model.token_scores(&self.split.batch([index])?)?;
        let example = self.split.example(index)?;
        let labels: Vec<u32> = example.labels.iter().filter_map(|&label| u32::try_from(label).ok()).collect();
        Ok(Likelihood {
            nll: scored.iter().map(|(nll, _)| f64::from(*nll)).sum(),
            tokens: scored.len() as u64,
            right: scored.iter().filter(|(_, right)| *right).count() as u64,
            bytes: self.dataset.tokenizer.decode(&labels, true)?.len() as u64,
        })
    }

    /// Writes a line a row, and returns what the page shows.
    fn write_samples(&self, path: &Path, asked: &[Asked], results: &[Told]) -> Result<Vec<Answered>> {
        let tokenizer = &self.dataset.tokenizer;
        let (mut text, mut rows) = (Vec::new(), Vec::with_capacity(self.rows));
        for index in 0..self.rows {
            let (prompt, reference) = self.row(index)?;
            let (prompt, reference) = (tokenizer.decode(&prompt, false)?, tokenizer.decode(&reference, true)?);
            let by_name = |value: &dyn Fn(&Told) -> Value| -> Map<String, Value> {
                asked.iter().zip(results).map(|(model, result)| (model.name.clone(), value(result))).collect()
            };
            let line = json!({
                "row": index,
                "prompt": prompt,
                "reference": reference,
                "answers": by_name(&|result| result.answers[index].as_str().into()),
                "scores": by_name(&|result| {
                    result.scores[index].iter().map(|(name, score)| (name.clone(), json!(score))).collect::<Map<_, _>>().into()
                }),
            });
            writeln!(text, "{line}").map_err(|source| Error::io("write", path, &source))?;
            let answers = results.iter().map(|result| result.answers[index].clone()).collect();
            rows.push(Answered { prompt, reference, answers });
        }
        std::fs::write(path, text).map_err(|source| Error::io("write", path, &source))?;
        Ok(rows)
    }
}

pub(super) fn score_json(score: &Score) -> (String, Value) {
    let (low, high) = score.interval.unzip();
    (score.name.clone(), json!({ "value": score.value, "low": low, "high": high }))
}

fn write_metrics(
    path: &Path,
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
    atomic::replace_file(&RealDisk, path, &format!("{all:#}\n"))
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
    text += if differences.is_empty() { "\n" } else { "    difference (range)\n" };
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
