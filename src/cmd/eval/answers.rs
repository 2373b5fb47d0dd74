//! Evaluation of generated answers: every model's answer to each row, and its scores.
use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::super::atomic_lines::AtomicLines;
use super::super::terminal::print_note;
use super::evaluation::Evaluation;
use super::worst::Worst;
use crate::data::process::{Part, sources};
use crate::data::{Shown, Tokenizer, question};
use crate::error::{Error, Result};
use crate::eval::EvalSplit;
use crate::eval::metrics::{Difference, Metrics, Score};
use crate::files::output::Existing;
use crate::model::Model;
use crate::telemetry::report::answers::{self, Answered, Rows};
use crate::words::{are, count};

/// The most bytes of thumbnails in the report.
const PICTURE_BYTES: usize = 8 << 20;

/// A prompt as text, with an image's name in place of its tokens, whose ids mean nothing.
fn readable(tokenizer: &Tokenizer, prompt: &[u32], pictures: &[Shown]) -> Result<String> {
    let (mut text, mut from) = (String::new(), 0);
    for picture @ Shown { runs, .. } in pictures {
        for (number, run) in runs.iter().filter(|run| run.end <= prompt.len()).enumerate() {
            text += &tokenizer.decode(&prompt[from..run.start.max(from)], false)?;
            if number == 0 {
                let _ = write!(text, "[{}]", picture.label()); // a String never fails
            }
            from = run.end;
        }
    }
    Ok(text + &tokenizer.decode(&prompt[from..], false)?)
}

/// How answers are generated and where they are kept meanwhile.
pub(super) struct Answers<'a> {
    eval_split: EvalSplit<'a>,
    stop_ids: Vec<u32>,
    /// One text per row for metrics that read the source, else empty.
    sources: Vec<String>,
    /// The folder for temporary files.
    dir: &'a Path,
}

/// A model's metrics, and a temporary file with each row's answer and scores, so that memory does not grow with the rows.
pub(super) struct Measured {
    metrics: Metrics,
    lines: AtomicLines,
}

impl<'a> Answers<'a> {
    /// Checks that the metrics can be computed, before the first model is loaded.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: the JSON Schema cannot be read or the scorer not started; [`crate::Kind::Data`]: the rows'
    /// files cannot be read again.
    pub fn new(eval_split: EvalSplit<'a>, part: Part, eos_ids: &[u32], dir: &'a Path) -> Result<Self> {
        let EvalSplit { config, dataset, .. } = eval_split;
        Metrics::new(&config.eval, 0)?;
        let sources = if config.eval.reads_sources() { sources(dataset, config, part)? } else { Vec::new() };
        Ok(Self { eval_split, stop_ids: [eos_ids, &dataset.stop_ids()?].concat(), sources, dir })
    }
}

impl Answers<'_> {
    /// The prompt of a row as people read it, `None` without a question, and its reference.
    fn texts(&self, index: usize) -> Result<(Option<String>, String)> {
        let EvalSplit { dataset, split, .. } = self.eval_split;
        let (prompt, reference) = split.prompt(index)?;
        let question = dataset.question(split, index)?.is_some();
        let pictures = split.pictures(index).last().map_or(&[] as &[Shown], Vec::as_slice);
        let prompt = if question { Some(readable(&dataset.tokenizer, &prompt, pictures)?) } else { None };
        Ok((prompt, dataset.tokenizer.decode(&reference, true)?))
    }

    /// A row as the report shows it, without the question. `bytes` counts the thumbnails so far, of which there is a limit.
    fn shown(&self, index: usize, answers: Vec<String>, bytes: &mut usize) -> Result<Answered> {
        let (prompt, reference) = self.texts(index)?;
        let split = self.eval_split.split;
        let mut pictures = if *bytes < PICTURE_BYTES { split.thumbnails(index)? } else { Vec::new() };
        *bytes += pictures.iter().map(String::len).sum::<usize>();
        if *bytes > PICTURE_BYTES {
            pictures.clear();
        }
        Ok(Answered { question: String::new(), prompt: prompt.unwrap_or_default(), pictures, reference, answers })
    }
}

impl Evaluation for Answers<'_> {
    type Measured = Measured;

    fn measure(&self, model: &Model) -> Result<Measured> {
        let mut lines = AtomicLines::create(&self.dir.join("answers.jsonl"), Existing::Replace, &[])?;
        let metrics = self.eval_split.answer(model, &self.sources, &self.stop_ids, |row| {
            let scores: Map<String, Value> = row.scores.into_iter().map(|(name, score)| (name, json!(score))).collect();
            lines.push(&json!({ "answer": row.answer, "scores": scores }).to_string())
        })?;
        lines.finish()?;
        Ok(Measured { metrics, lines })
    }

    fn scores(&self, measured: &Measured) -> Vec<Score> {
        measured.metrics.scores()
    }

    fn differences(&self, first: &Measured, second: &Measured) -> Vec<Difference> {
        first.metrics.differences(&second.metrics)
    }

    fn write_samples(&self, samples: &mut AtomicLines, names: &[&str], measured: &[Measured]) -> Result<Rows> {
        let EvalSplit { dataset, split, rows, .. } = self.eval_split;
        let tokenizer = &dataset.tokenizer;
        let mut files = measured.iter().map(|measured| measured.lines.read()).collect::<Result<Vec<_>>>()?;
        let (mut first, mut worst, mut raw_rows) = (Vec::new(), Worst::default(), 0);
        for index in 0..rows {
            let mut by_model = Vec::with_capacity(files.len());
            for lines in &mut files {
                let line = lines.next().transpose()?.unwrap_or_default();
                let line: Value = serde_json::from_str(&line).map_err(|error| {
                    Error::new(crate::Kind::Io, "the temporary file of answers was changed")
                        .caused_by(error)
                        .hint("leave it alone until eval has ended, and start eval again")
                })?;
                by_model.push(line);
            }
            let (prompt, reference) = self.texts(index)?;
            raw_rows += usize::from(prompt.is_none());
            let by_name = |field: &str| -> Map<String, Value> {
                names.iter().zip(&by_model).map(|(name, line)| ((*name).to_owned(), line[field].clone())).collect()
            };
            let mut sample = json!({
                "row": index, "prompt": prompt, "reference": reference,
                "answers": by_name("answer"), "scores": by_name("scores"),
            });
            let references = split.references(index, tokenizer)?;
            if references != [sample["reference"].as_str().unwrap_or_default()] {
                sample["references"] = references.into();
            }
            samples.push(&sample.to_string())?;
            if prompt.is_some() {
                let text = |line: &Value| line["answer"].as_str().unwrap_or_default().to_owned();
                let answers: Vec<String> = by_model.iter().map(text).collect();
                if let Some(scores) = by_model.last().and_then(|line| line["scores"].as_object()) {
                    worst.offer(index, scores, &answers);
                }
                if first.len() < answers::ROWS {
                    first.push((index, answers));
                }
            }
        }
        if raw_rows > 0 {
            print_note(&format!(
                "{raw_rows} of {} raw text without a question: only loss and perplexity are measured on them",
                are(rows, "row")
            ));
        }
        // Where a reader sees all rows at once, a choice of them says nothing.
        let chosen = if rows > 2 * answers::WORST { worst.rows } else { Vec::new() };
        let mut picture_bytes = 0;
        let mut shown = |(index, answers)| self.shown(index, answers, &mut picture_bytes);
        // The worst rows come first, also where there is no room for all thumbnails.
        let worst_rows = chosen.into_iter().map(|row| shown((row.index, row.answers))).collect::<Result<_>>()?;
        let first = first.into_iter().map(shown).collect::<Result<_>>()?;
        let mut rows = Rows { first, worst: worst_rows, measure: worst.measure };
        let all = || rows.first.iter().chain(&rows.worst);
        let prompts: Vec<String> = all().map(|row| row.prompt.clone()).collect();
        let questions = question::questions(dataset.template.as_ref(), &prompts);
        let all = rows.first.iter_mut().chain(&mut rows.worst);
        all.zip(questions).for_each(|(row, question)| row.question = question);
        Ok(rows)
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        vec![("max_new_tokens", self.eval_split.config.generation.max_new_tokens.into())]
    }

    fn fact(&self) -> Option<(String, String)> {
        let most = count(self.eval_split.config.generation.max_new_tokens, "token");
        Some(("answers".into(), format!("settings of section gen, at most {most}")))
    }
}
