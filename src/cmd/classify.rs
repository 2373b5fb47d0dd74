//! `infer` and `eval` of models with a classification head: predict a label with its probabilities, or a number, and measure the
//! predictions on held-out rows.
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::atomic_lines::{self, AtomicLines};
use super::data::Bar;
use super::download::Downloads;
use super::eval_options::{Args, Which, choose, names, place};
use super::eval_results::{difference_json, existing, foot, intervals, score_json, table};
use super::generations::Lines;
use super::interrupt::interrupt;
use super::model_session::ModelSession;
use super::provenance;
use super::terminal::{print, print_exact, print_note, print_text};
use crate::checkpoint::loaded_adapter::{LoadedAdapter, score_head};
use crate::checkpoint::peft;
use crate::config::arch::{Arch, ScoreHead};
use crate::config::{Config, Labels, Truncation};
use crate::data::batch::{Batch, IGNORE};
use crate::data::classification_rows::Whole;
use crate::data::encode::whole_ids;
use crate::data::row::Conversation;
use crate::data::{self, Dataset, Split};
use crate::error::{Error, Result};
use crate::eval::metrics::scored::{Bootstrap, Scored, best, softmax};
use crate::export::merge::{Parts, plain_model};
use crate::files::output::check_output_file;
use crate::hub::{self, Part};
use crate::model::Model;
use crate::plan::human_seconds;
use crate::telemetry::report::Confusion;
use crate::telemetry::report::answers::{self, Answered, Asked, Page};
use crate::words::{are, count};

/// The outputs of a classification head for one text.
struct Said {
    outputs: Vec<f32>,
    tokens: usize,
    truncated: bool,
}

impl Said {
    /// The fields of an answer: the predicted label and the probabilities of all labels, or the number and whether the text was cut.
    fn fields(&self, head: &ScoreHead) -> [(String, Value); 2] {
        if head.is_number() {
            return [
                ("prediction".to_owned(), json!(self.outputs[0])),
                ("truncated".to_owned(), self.truncated.into()),
            ];
        }
        let probabilities = softmax(&self.outputs);
        let by_label: Map<String, Value> =
            head.labels.iter().zip(probabilities).map(|(label, share)| (label.clone(), json!(share))).collect();
        let found = head.labels[best(&self.outputs)].as_str();
        [("prediction".to_owned(), found.into()), ("probabilities".to_owned(), by_label.into())]
    }
}

/// The tokens of a text or a conversation, cut as in training.
fn ids(session: &ModelSession, whole: &Whole) -> Result<(Vec<u32>, bool)> {
    let arch = &session.model.arch;
    let split = session.config.data.split_special_tokens;
    let (mut ids, _) = whole_ids(whole, &session.tokenizer, session.template.as_ref(), arch.padding(), (split, None))?;
    let limit = session.config.model.max_seq_len.min(arch.max_position_embeddings);
    let truncated = ids.len() > limit;
    match session.config.data.truncation {
        Truncation::Left => ids = ids.split_off(ids.len().saturating_sub(limit)),
        Truncation::Right | Truncation::Drop | Truncation::Split => ids.truncate(limit),
    }
    Ok((ids, truncated))
}

/// What is said of some texts at once.
fn say(session: &ModelSession, wholes: &[Whole]) -> Result<Vec<Said>> {
    let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
    let mut said = Vec::with_capacity(wholes.len());
    for whole in wholes {
        let (ids, truncated) = ids(session, whole)?;
        batch.push(&ids, &vec![IGNORE; ids.len()]);
        said.push(Said { outputs: Vec::new(), tokens: ids.len(), truncated });
    }
    let outputs = session.model.logits(&batch, &batch.ends())?;
    for (said, outputs) in said.iter_mut().zip(outputs.chunks_exact(session.model.arch.outputs())) {
        said.outputs = outputs.to_vec();
    }
    Ok(said)
}

/// `infer` of one text.
///
/// # Errors
/// The text, the engine.
pub(super) fn infer(
    session: &ModelSession,
    head: &ScoreHead,
    system: Option<&str>,
    prompt: &str,
    as_json: bool,
) -> Result<()> {
    let whole = match system {
        None => Whole::Text(prompt.to_owned()),
        Some(system) => Whole::Chat(Conversation {
            messages: vec![
                json!({ "role": "system", "content": system }),
                json!({ "role": "user", "content": prompt }),
            ],
            ..Conversation::default()
        }),
    };
    let said = say(session, &[whole])?.remove(0);
    if as_json {
        let mut found = Map::from_iter([("model".to_owned(), session.what.as_str().into())]);
        found.insert("prompt".to_owned(), prompt.into());
        found.extend(said.fields(head));
        found.insert("tokens".to_owned(), said.tokens.into());
        found.insert("truncated".to_owned(), said.truncated.into());
        return print_exact(&format!("{}\n", Value::Object(found)));
    }
    if said.truncated {
        print_note(&format!("the text is longer than model.max_seq_len: {} tokens of it were read", said.tokens));
    }
    if head.is_number() {
        return print_exact(&format!("{}\n", said.outputs[0]));
    }
    let mut rows: Vec<(f64, &String)> = softmax(&said.outputs).into_iter().zip(&head.labels).collect();
    rows.sort_by(|one, other| other.0.total_cmp(&one.0));
    let lines: Vec<String> = rows.iter().map(|(share, label)| format!("{share:.4}  {label}\n")).collect();
    print(&lines.concat())
}

/// `infer` of the rows of a file that are not `done`: each with `prediction` and `probabilities`, written to `open`'s lines.
///
/// # Errors
/// A row that has no text; the engine, the disk; [`crate::Kind::Preempted`] after Ctrl-C.
pub(super) fn infer_file<'a>(
    session: &ModelSession,
    head: &ScoreHead,
    (rows, done): (&[Value], usize),
    open: impl FnOnce() -> Result<Lines<'a>>,
    input: &Path,
) -> Result<()> {
    let whole = |(index, row): (usize, &Value)| {
        let whole = match row {
            Value::String(text) => Ok(Whole::Text(text.clone())),
            Value::Object(fields) => Whole::parse(&mut fields.clone()),
            _ => Err(Error::data("found neither an object nor a string")),
        };
        whole.map_err(|error| error.context(format!("{}: row {}", input.display(), index + 1)))
    };
    // All texts first: a row that has none is refused before the first answer.
    let wholes = rows.iter().enumerate().skip(done).map(whole).collect::<Result<Vec<_>>>()?;
    let mut lines = open()?;
    let (stop, _listening) = interrupt()?;
    let (began, mut truncated) = (Instant::now(), 0);
    for wholes in wholes.chunks(8) {
        if stop.load(std::sync::atomic::Ordering::Relaxed) {
            return lines.close(false);
        }
        for said in say(session, wholes)? {
            truncated += usize::from(said.truncated);
            lines.push(said.fields(head).map(|(_, value)| value))?;
        }
    }
    lines.close(true)?;
    if truncated > 0 {
        print_note(&format!("{} longer than model.max_seq_len and cut", are(truncated, "row")));
    }
    let seconds = human_seconds(began.elapsed().as_secs_f64());
    print_note(&format!("{} answered in {seconds}", count(rows.len() - done, "row")));
    Ok(())
}

/// The head of an adapter or a model.
fn head_of(dir: &Path) -> Result<ScoreHead> {
    let head = if dir.join("adapter_config.json").is_file() { score_head(dir)? } else { Arch::from_dir(dir)?.score };
    head.ok_or_else(|| {
        Error::config(format!("{}: it has no head of scores", dir.display()))
            .hint("name what a run with this task has trained")
    })
}

fn load(dir: &Path, allow: &[String], config: &Config, base: &Path) -> Result<Model> {
    if !dir.join("adapter_config.json").is_file() {
        return plain_model(dir);
    }
    let mut parts = Parts::open(base, &config.tuning.adapters, &peft::vocabulary(dir)?)?;
    parts.arch.score = score_head(dir)?;
    provenance::check_base(&parts, dir, allow)?;
    parts.adapted(&LoadedAdapter::open(dir, &parts.arch)?, &config.model)
}

/// What each row is scored as.
fn score(model: &Model, head: &ScoreHead, split: &Split, rows: usize, at_once: usize) -> Result<Scored> {
    let mut scored = Scored::new(head.clone());
    for start in (0..rows).step_by(at_once) {
        let chunk = start..rows.min(start + at_once);
        let batch = split.batch(chunk.clone())?;
        let outputs = model.logits(&batch, &batch.ends())?;
        for (row, outputs) in chunk.zip(outputs.chunks_exact(head.outputs())) {
            let labelled = split.labelled(row)?;
            let (target, weight) = labelled.ok_or_else(|| Error::data(format!("row {} has no label", row + 1)))?;
            scored.push(outputs, target, weight);
        }
    }
    Ok(scored)
}

/// `eval` of a head of scores, or of two.
///
/// # Errors
/// Those of the data and the models; [`crate::Kind::Config`]: no held-out rows, or a base model, which has no such head.
pub(super) fn eval(args: &Args, mut config: Config) -> Result<()> {
    let which = match (args.compare.as_slice(), &args.checkpoint) {
        ([first, second], _) => vec![Which::parse(first), Which::parse(second)],
        _ if args.base => vec![Which::Base],
        (_, Some(dir)) => vec![Which::Dir(dir.clone())],
        _ => vec![Which::Tuned],
    };
    if which.iter().any(|which| matches!(which, Which::Base)) {
        return Err(Error::config(format!("task: {}, and the base has no head for it", config.task()))
            .hint("leave base out; two trained models are compared with --compare A B"));
    }
    let downloads = Downloads::default();
    let base = hub::model_dir(&config.model, Part::Whole, &downloads)?.dir;
    hub::fetch_paths(&mut config.data, &downloads)?;
    let places: Vec<PathBuf> = which.iter().map(|which| place(which, &config, &base)).collect::<Result<_>>()?;
    let heads: Vec<ScoreHead> = places.iter().map(|dir| head_of(dir)).collect::<Result<_>>()?;
    let head = heads[0].clone();
    let given = Some(ScoreHead { labels: config.data.labels.0.clone() }).filter(|given| !given.is_number());
    if let Some(other) = heads.iter().chain(&given).find(|other| **other != head) {
        return Err(Error::config(format!("labels differ: {:?} and {:?}", head.labels, other.labels)));
    }
    config.data.labels = Labels(head.labels.clone());
    let arch = Arch::from_dir(&base)?;
    config.model.max_seq_len = config.model.max_seq_len.min(arch.max_position_embeddings);
    let tokens = if config.tuning.new_tokens.is_empty() {
        arch.vocab_size
    } else {
        let mut arch = arch;
        arch.grow(data::new_token_ids(&base, &config.tuning.new_tokens)?);
        arch.vocab_size
    };
    let dataset = data::load(&config, &base, tokens, &Bar::default())?;
    for warning in &dataset.report.warnings {
        print_note(warning);
    }
    let (part, split) = choose(args.split.as_deref(), &dataset)?;
    let split_name = part.name();
    let rows = args.rows.map_or(usize::MAX, |rows| rows as usize).min(split.len());
    let names = names(&which, &places)?;
    let target = args.output.clone().unwrap_or_else(|| config.train.output_dir.join("eval"));
    let (inputs, existing) = (data::named_inputs(&config), existing(args.overwrite));
    for name in ["metrics.json", "report.html"] {
        check_output_file(&target.join(name), existing, &inputs)?;
    }
    let mut samples = AtomicLines::create(&target.join("samples.jsonl"), existing, &inputs)?;
    let began = Instant::now();
    let mut results = Vec::new();
    for (name, dir) in names.iter().zip(&places) {
        print_text(&format!("asking {name} ({})\n", dir.display()));
        let model = load(dir, &args.allow, &config, &base)?;
        results.push(score(&model, &head, split, rows, config.train.eval_batch_size)?);
    }
    let bootstrap = Bootstrap {
        replicates: config.eval.bootstrap_samples,
        confidence: config.eval.confidence,
        seed: config.train.seed,
    };
    let differences = match results.as_slice() {
        [first, second] => first.differences(second, bootstrap),
        _ => Vec::new(),
    };
    let asked: Vec<Asked> = names
        .into_iter()
        .zip(&places)
        .zip(&results)
        .map(|((name, dir), result)| Asked {
            name,
            origin: dir.display().to_string(),
            scores: result.scores(bootstrap).into_iter().filter(|score| score.value.is_finite()).collect(),
        })
        .collect();
    let shown = write_samples(&mut samples, &dataset, split, &head, (&asked, &results))?;
    samples.publish()?;
    let pictures: Vec<String> = asked
        .iter()
        .zip(&results)
        .filter(|_| !head.is_number())
        .map(|(model, result)| {
            let title = format!("{}: {} ({split_name})", model.name, count(rows, "row"));
            let confusion = Confusion { title, labels: head.labels.clone(), cells: result.confusion() };
            format!("<h2>Labels</h2>\n{}", confusion.render())
        })
        .collect();
    let models: Map<String, Value> = asked
        .iter()
        .zip(&results)
        .map(|(model, result)| {
            let scores: Map<String, Value> = model.scores.iter().map(score_json).collect();
            let found = json!({ "path": model.origin, "scores": scores, "confusion": result.confusion() });
            (model.name.clone(), found)
        })
        .collect();
    let all = json!({
        "split": split_name,
        "rows": rows,
        "task": config.task().as_str(),
        "labels": head.labels,
        "confidence": bootstrap.confidence,
        "bootstrap_samples": bootstrap.replicates,
        "seed": bootstrap.seed,
        "models": models,
        "differences": differences.iter().map(difference_json).collect::<Map<_, _>>(),
    });
    atomic_lines::write(&target.join("metrics.json"), existing, &format!("{all:#}\n"))?;
    let mut facts: Vec<(String, String)> =
        asked.iter().map(|model| (model.name.clone(), model.origin.clone())).collect();
    facts.push(("rows".into(), format!("{rows} of {} ({split_name})", split.len())));
    facts.push(("intervals".into(), intervals(bootstrap.confidence, bootstrap.replicates)));
    facts.push(("time".into(), human_seconds(began.elapsed().as_secs_f64())));
    let title =
        config.train.output_dir.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned());
    let page = Page {
        title: &title,
        asked: &asked,
        differences: &differences,
        pictures: &pictures,
        count: rows,
        rows: &shown,
        facts: &facts,
    };
    atomic_lines::write(&target.join("report.html"), existing, &answers::render(&page))?;
    print(
        &(table(&asked, &differences)
            + &foot(&facts)
            + &format!("report          {}\n", target.join("report.html").display())),
    )
}

/// Writes a line a row, and returns what the page shows: those first that the last model has wrong.
fn write_samples(
    samples: &mut AtomicLines,
    dataset: &Dataset,
    split: &Split,
    head: &ScoreHead,
    (asked, results): (&[Asked], &[Scored]),
) -> Result<Vec<Answered>> {
    let (mut right, mut wrong) = (Vec::new(), Vec::new());
    let rows = results.first().map_or(0, Scored::rows);
    for row in 0..rows {
        let prompt = dataset.tokenizer.decode(&split.example(row)?.input_ids, false)?;
        let said = |result: &Scored| Said { outputs: result.outputs(row).to_vec(), tokens: 0, truncated: false };
        let reference = match split.labelled(row)? {
            _ if head.is_number() => json!(results[0].number(row)),
            Some((class, _)) => json!(head.labels.get(class as usize)),
            None => Value::Null,
        };
        let fields: Vec<[(String, Value); 2]> = results.iter().map(|result| said(result).fields(head)).collect();
        let by_name = |at: usize| -> Map<String, Value> {
            asked.iter().zip(&fields).map(|(model, fields)| (model.name.clone(), fields[at].1.clone())).collect()
        };
        let mut line = json!({ "row": row, "text": prompt, "label": reference, "predictions": by_name(0) });
        if !head.is_number() {
            line["probabilities"] = by_name(1).into();
        }
        samples.push(&line.to_string())?;
        let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let answers: Vec<String> = fields.iter().map(|[(_, found), _]| plain(found)).collect();
        let reference = plain(&reference);
        let is_right = answers.last() == Some(&reference);
        if is_right { &mut right } else { &mut wrong }.push(Answered {
            question: prompt.clone(),
            prompt,
            reference,
            answers,
        });
    }
    wrong.extend(right);
    Ok(wrong)
}
