//! `infer` with a classification model: a label with its probabilities, or a number.
use std::path::Path;
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::generations::Lines;
use super::interrupt::interrupt;
use super::model_session::ModelSession;
use super::terminal::{print, print_exact, print_note};
use crate::config::Truncation;
use crate::config::arch::ScoreHead;
use crate::data::batch::{Batch, IGNORE};
use crate::data::classification_rows::ClassifierInput;
use crate::data::encode::classifier_input_ids;
use crate::data::row::Conversation;
use crate::error::{Error, Result};
use crate::eval::metrics::scored::{best, softmax};
use crate::plan::human_seconds;
use crate::words::{are, count};

/// Texts in one forward pass.
const BATCH: usize = 8;

/// The head's prediction from its outputs for a text: the most probable label and the probability of each label, or the number.
pub(super) fn prediction(head: &ScoreHead, outputs: &[f32]) -> (Value, Option<Value>) {
    if head.is_number() {
        return (json!(outputs[0]), None);
    }
    let probabilities: Map<String, Value> =
        head.labels.iter().zip(softmax(outputs)).map(|(label, share)| (label.clone(), json!(share))).collect();
    (head.labels[best(outputs)].as_str().into(), Some(probabilities.into()))
}

/// A text after the model has read it.
struct Classified {
    /// The outputs of the classification head.
    outputs: Vec<f32>,
    tokens: usize,
    /// Whether the text was longer than `model.max_seq_len`.
    truncated: bool,
}

impl Classified {
    /// The fields of a row of `--out`: the label and its probabilities, or the number and whether the text was cut.
    fn fields(&self, head: &ScoreHead) -> [(&'static str, Value); 2] {
        match prediction(head, &self.outputs) {
            (label, Some(probabilities)) => [("prediction", label), ("probabilities", probabilities)],
            (number, None) => [("prediction", number), ("truncated", self.truncated.into())],
        }
    }
}

/// The tokens of a text or a conversation, cut as in training, and whether they were cut.
fn tokens_of(session: &ModelSession, whole: &ClassifierInput) -> Result<(Vec<u32>, bool)> {
    let arch = &session.model.arch;
    let split = session.config.data.split_special_tokens;
    let (mut ids, _) =
        classifier_input_ids(whole, &session.tokenizer, session.template.as_ref(), arch.padding(), split, None)?;
    let limit = session.config.model.max_seq_len.min(arch.reach());
    let truncated = ids.len() > limit;
    match session.config.data.truncation {
        Truncation::Left => ids = ids.split_off(ids.len().saturating_sub(limit)),
        Truncation::Right | Truncation::Drop | Truncation::Split => ids.truncate(limit),
    }
    Ok((ids, truncated))
}

/// Classifies texts in one forward pass.
fn classify(session: &ModelSession, wholes: &[ClassifierInput]) -> Result<Vec<Classified>> {
    let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
    let mut classified = Vec::with_capacity(wholes.len());
    for whole in wholes {
        let (ids, truncated) = tokens_of(session, whole)?;
        batch.push(&ids, &vec![IGNORE; ids.len()]);
        classified.push(Classified { outputs: Vec::new(), tokens: ids.len(), truncated });
    }
    let outputs = session.model.logits(&batch, &batch.ends())?;
    for (classified, outputs) in classified.iter_mut().zip(outputs.chunks_exact(session.model.arch.outputs())) {
        classified.outputs = outputs.to_vec();
    }
    Ok(classified)
}

/// `infer` of one text: prints its labels by probability, or its number.
///
/// # Errors
/// The text cannot be tokenized; the engine.
pub(super) fn infer(
    session: &ModelSession,
    head: &ScoreHead,
    system: Option<&str>,
    prompt: &str,
    as_json: bool,
) -> Result<()> {
    let whole = match system {
        None => ClassifierInput::Text(prompt.to_owned()),
        Some(system) => {
            let messages =
                vec![json!({ "role": "system", "content": system }), json!({ "role": "user", "content": prompt })];
            ClassifierInput::Chat(Conversation { messages, ..Conversation::default() }.into())
        }
    };
    let found = classify(session, &[whole])?.remove(0);
    if as_json {
        let mut line = json!({ "model": session.what, "prompt": prompt });
        let ends = [("tokens", json!(found.tokens)), ("truncated", json!(found.truncated))];
        found.fields(head).into_iter().chain(ends).for_each(|(name, value)| line[name] = value);
        return print_exact(&format!("{line}\n"));
    }
    if found.truncated {
        print_note(&format!("the text is longer than model.max_seq_len: only {} tokens of it were read", found.tokens));
    }
    if head.is_number() {
        return print_exact(&format!("{}\n", found.outputs[0]));
    }
    let mut rows: Vec<(f64, &String)> = softmax(&found.outputs).into_iter().zip(&head.labels).collect();
    rows.sort_by(|one, other| other.0.total_cmp(&one.0));
    let lines: Vec<String> = rows.iter().map(|(share, label)| format!("{share:.4}  {label}\n")).collect();
    print(&lines.concat())
}

/// A row of a file. `index` counts from 0.
fn row(row: &Value, index: usize, input: &Path) -> Result<ClassifierInput> {
    let whole = match row {
        Value::String(text) => Ok(ClassifierInput::Text(text.clone())),
        Value::Object(fields) => ClassifierInput::parse(&mut fields.clone()),
        _ => Err(Error::data("found neither an object nor a string")),
    };
    whole.map_err(|error| error.context(format!("{}: row {}", input.display(), index + 1)))
}

/// The values of the fields that [`infer_file`] adds to the first row.
///
/// # Errors
/// As [`infer_file`].
pub(super) fn first(session: &ModelSession, head: &ScoreHead, rows: &[Value], input: &Path) -> Result<Vec<Value>> {
    let found = classify(session, &[row(&rows[0], 0, input)?])?.remove(0);
    Ok(found.fields(head).into_iter().map(|(_, value)| value).collect())
}

/// `infer` of a file: classifies the rows after the first `done` ones, and writes each with its prediction. `open` opens the
/// file of predictions, after all rows have been read without an error.
///
/// # Errors
/// A row that has no text; the engine, the disk; [`crate::Kind::Preempted`] after Ctrl-C.
pub(super) fn infer_file<'a>(
    session: &ModelSession,
    head: &ScoreHead,
    rows: &[Value],
    done: usize,
    open: impl FnOnce() -> Result<Lines<'a>>,
    input: &Path,
) -> Result<()> {
    let wholes =
        rows.iter().enumerate().skip(done).map(|(index, it)| row(it, index, input)).collect::<Result<Vec<_>>>()?;
    let mut lines = open()?;
    let (stop, _listening) = interrupt()?;
    let (began, mut truncated) = (Instant::now(), 0);
    for wholes in wholes.chunks(BATCH) {
        if stop.load(std::sync::atomic::Ordering::Relaxed) {
            return lines.close(false);
        }
        for found in classify(session, wholes)? {
            truncated += usize::from(found.truncated);
            lines.push(found.fields(head).map(|(_, value)| value))?;
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
