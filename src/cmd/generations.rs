//! The file that `infer --out` writes: the rows of `--in`, each with the model's answer or prediction. An interrupted file is
//! continued after its last complete line.
use std::fs::{File, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::Path;

use serde_json::{Map, Value};

use crate::config::Config;
use crate::config::arch::ScoreHead;
use crate::data;
use crate::device::Device;
use crate::error::{Error, Kind, Result};
use crate::files::output::{Existing, check_output_file};
use crate::files::{self, real};
use crate::words::are;

/// The kind of answer in each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Answer,
    Label,
    Number,
}

impl Form {
    const ALL: [Self; 3] = [Self::Answer, Self::Label, Self::Number];

    /// The kind of answer of a model with this head.
    pub fn of(head: Option<&ScoreHead>) -> Self {
        match head {
            None => Self::Answer,
            Some(head) if head.is_number() => Self::Number,
            Some(_) => Self::Label,
        }
    }

    /// The fields that are added to a row.
    pub const fn fields(self) -> &'static [&'static str] {
        match self {
            Self::Answer => &["answer", "end", "answer_tokens"],
            Self::Label => &["prediction", "probabilities"],
            Self::Number => &["prediction", "truncated"],
        }
    }

    /// A row's own fields. One with the name of a new field gets the prefix `own_`, so that both can be compared.
    fn own_fields(self, row: &Value) -> Map<String, Value> {
        let line = if self == Self::Answer { "prompt" } else { "text" };
        let Value::Object(fields) = row else { return Map::from_iter([(line.to_owned(), row.clone())]) };
        let mut own = Map::new();
        for (name, value) in fields {
            let mut free = name.clone();
            if self.fields().contains(&name.as_str()) {
                while fields.contains_key(&free) || own.contains_key(&free) {
                    free.insert_str(0, "own_");
                }
            }
            own.insert(free, value.clone());
        }
        own
    }

    /// The row with the values of the added fields, in their order.
    pub fn with(self, row: &Value, said: impl IntoIterator<Item = Value>) -> Value {
        let mut fields = self.own_fields(row);
        fields.extend(self.fields().iter().map(|name| (*name).to_owned()).zip(said));
        Value::Object(fields)
    }

    /// Whether `line` is `row` with added fields.
    fn is_of(self, line: &Map<String, Value>, row: &Value) -> bool {
        let mut own = line.clone();
        self.fields().iter().all(|name| own.remove(*name).is_some()) && own == self.own_fields(row)
    }
}

/// What an existing file already contains: the number of answered rows, and the answer to the first one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Done {
    pub rows: usize,
    form: Option<Form>,
    /// The values of the fields that were added to the first row.
    first: Vec<Value>,
    /// The bytes of these rows in the file; `None`: the file is replaced, whatever it holds.
    bytes: Option<u64>,
}

impl Done {
    /// No row is answered yet, and an existing file is replaced.
    pub const NONE: Self = Self { rows: 0, form: None, first: Vec::new(), bytes: None };

    /// Counts the rows in `out`, and cuts off an incomplete line at its end.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: a line that is not that row of --in; [`crate::Kind::Io`]: another command is writing the file.
    pub fn read(out: &Path, rows: &[Value]) -> Result<Self> {
        let mut file = match files::open_own(out) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self { bytes: Some(0), ..Self::NONE });
            }
            Err(error) => return Err(Error::io("read", out, &error)),
        };
        // Locks the file until an incomplete line is cut off, because another command may be writing that line.
        hold(&file, out)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|error| Error::io("read", out, &error))?;
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let mut done = Self { bytes: Some(whole as u64), ..Self::NONE };
        for line in bytes[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
            let found: Map<String, Value> = serde_json::from_slice(line).unwrap_or_default();
            let row = rows.get(done.rows);
            let form = Form::ALL.into_iter().filter(|form| done.form.is_none_or(|known| known == *form));
            done.form = row.and_then(|row| form.into_iter().find(|form| form.is_of(&found, row)));
            if done.form.is_none() {
                return Err(another(out, done.rows));
            }
            if done.rows == 0 {
                let fields = done.form.map_or(&[][..], Form::fields);
                done.first = fields.iter().filter_map(|name| found.get(*name).cloned()).collect();
            }
            done.rows += 1;
        }
        if whole == 0 && !bytes.is_empty() {
            return Err(Error::config(format!("{}: the file is not empty and holds no answers", out.display()))
                .hint("give --overwrite to replace the file, or name another --out"));
        }
        if whole < bytes.len() {
            let cut = real(out).and_then(|out| files::open_to_write(&out, false)?.set_len(whole as u64));
            cut.map_err(|error| Error::io("write", out, &error))?;
        }
        Ok(done)
    }

    /// Compares the file's first answer with the answer `again` to that row, so that a file is not continued with another model
    /// or other settings. Only on the CPU: on a GPU, rounding makes an answer depend on the other rows of its batch.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: it differs; those of `again`.
    pub fn check_first(&self, device: Device, out: &Path, again: impl FnOnce() -> Result<Vec<Value>>) -> Result<()> {
        if self.rows == 0 || device != Device::Cpu {
            return Ok(());
        }
        // Compares with the answer as it would be read from the file.
        let again = Value::Array(again()?).to_string();
        if serde_json::from_str(&again).is_ok_and(|again: Vec<Value>| again == self.first) {
            return Ok(());
        }
        Err(Error::config(format!("{}:1: this command answers that row differently", out.display())).hint(
            "another model, other settings, or another kind of processor wrote the file: give --overwrite to replace it, or \
             name another --out",
        ))
    }
}

/// Locks the open file `out` until it is closed, so that no two commands write it. A file system without locks has none.
///
/// # Errors
/// [`crate::Kind::Io`]: another command has it.
fn hold(file: &File, out: &Path) -> Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            Err(Error::new(Kind::Io, format!("{}: another command is writing this file", out.display()))
                .hint("wait for it, or name another --out"))
        }
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

fn another(out: &Path, row: usize) -> Error {
    Error::config(format!("{}:{}: not the answer to that row of --in", out.display(), row + 1))
        .hint("give --overwrite to replace the file, or name another --out")
}

/// The open file, with one line per row.
pub(super) struct Lines<'a> {
    form: Form,
    file: File,
    path: &'a Path,
    rows: &'a [Value],
    next: usize,
}

impl<'a> Lines<'a> {
    /// Opens the file to append after the rows that are `done`.
    ///
    /// # Errors
    /// The disk; [`crate::Kind::Config`]: `out` holds what another kind of model says, or is something that the run reads.
    pub fn open(out: &'a Path, rows: &'a [Value], done: &Done, form: Form, config: &Config) -> Result<Self> {
        if done.form.is_some_and(|known| known != form) {
            return Err(another(out, 0));
        }
        // Checks again, now that the model's files are known.
        let place = check_output_file(out, Existing::Replace, &data::named_inputs(config))?;
        let failed = |error: std::io::Error| Error::io("write", out, &error);
        let file = files::open_to_write(&place, true).map_err(failed)?;
        hold(&file, out)?;
        let length = file.metadata().map_err(failed)?.len();
        if done.bytes.is_some_and(|bytes| bytes != length) {
            return Err(Error::new(
                Kind::Io,
                format!("{}: another command has written this file meanwhile", out.display()),
            )
            .hint("run the same command again to continue, or name another --out"));
        }
        if done.rows == 0 {
            file.set_len(0).map_err(failed)?;
        }
        Ok(Self { form, file, path: out, rows, next: done.rows })
    }

    /// The row that comes next.
    pub const fn next(&self) -> usize {
        self.next
    }

    /// Writes the next row with the values of its added fields.
    ///
    /// # Errors
    /// The disk.
    pub fn push(&mut self, said: impl IntoIterator<Item = Value>) -> Result<()> {
        let line = format!("{}\n", self.form.with(&self.rows[self.next], said));
        self.file.write_all(line.as_bytes()).map_err(|error| Error::io("write", self.path, &error))?;
        self.next += 1;
        Ok(())
    }

    /// Flushes the file to disk. `finished`: whether every row is answered.
    ///
    /// # Errors
    /// The disk; [`crate::Kind::Preempted`] when rows are left.
    pub fn close(self, finished: bool) -> Result<()> {
        self.file.sync_all().map_err(|error| Error::io("write", self.path, &error))?;
        if finished {
            return Ok(());
        }
        let (path, of) = (self.path.display(), self.rows.len());
        Err(Error::preempted(format!("{path}: {} of {} answered", self.next, are(of, "row")))
            .hint("run the same command again to continue"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn said(form: Form) -> Vec<Value> {
        match form {
            Form::Answer => vec!["x".into(), "length".into(), 2.into()],
            Form::Label => vec!["ham".into(), json!({"ham": 1.0})],
            Form::Number => vec![0.5.into(), false.into()],
        }
    }

    #[test]
    fn every_form_of_file_goes_on_after_its_last_whole_line() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("out.jsonl");
        let done = |rows: &[Value]| Done::read(&out, rows).map(|done| done.rows);
        let rows = [json!({"question": "a", "id": 1}), json!("b"), json!({"question": "c", "truncated": 1})];
        assert_eq!(done(&rows).unwrap(), 0);
        for form in Form::ALL {
            let lines: Vec<String> = rows.iter().map(|row| form.with(row, said(form)).to_string()).collect();
            std::fs::write(&out, format!("{}\n{}\n{}", lines[0], lines[1], &lines[2][..9])).unwrap();
            assert_eq!(done(&rows).unwrap(), 2, "{form:?}");
            assert_eq!(std::fs::read_to_string(&out).unwrap(), format!("{}\n{}\n", lines[0], lines[1]));
            std::fs::write(&out, lines.join("\n") + "\n").unwrap();
            assert_eq!(done(&rows).unwrap(), 3, "{form:?}");
            let other = [json!({"question": "z"}), json!("b")];
            assert_eq!(done(&other).unwrap_err().kind(), crate::Kind::Config);
            assert!(done(&rows[..1]).is_err(), "more answers than rows");
        }
        let mixed = [Form::Answer, Form::Label].map(|form| form.with(&rows[0], said(form)).to_string());
        std::fs::write(&out, mixed.join("\n") + "\n").unwrap();
        assert!(done(&[rows[0].clone(), rows[0].clone()]).is_err(), "of two kinds of model");
    }

    #[test]
    fn what_another_command_has_written_meanwhile_stays() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("out.jsonl");
        let (rows, config) = ([json!("a"), json!("b")], Config::default());
        let open = |done: &Done| Lines::open(&out, &rows, done, Form::Answer, &config).map(drop);
        let line = |row| format!("{}\n", Form::Answer.with(&rows[row], said(Form::Answer)));
        let before = Done::read(&out, &rows).unwrap();
        std::fs::write(&out, line(0)).unwrap();
        assert!(open(&before).unwrap_err().message().contains("meanwhile"), "the first line");
        let before = Done::read(&out, &rows).unwrap();
        std::fs::write(&out, line(0) + &line(1)).unwrap();
        assert_eq!(open(&before).unwrap_err().kind(), Kind::Io, "the second");
        assert_eq!(std::fs::read_to_string(&out).unwrap(), line(0) + &line(1));
        open(&Done::read(&out, &rows).unwrap()).unwrap();
        open(&Done::NONE).unwrap();
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "", "with --overwrite");
    }

    #[test]
    fn a_row_keeps_what_it_says_itself() {
        let row = json!({"question": "a", "answer": "b", "own_answer": 1, "end": true});
        let kept = json!({"question": "a", "own_own_answer": "b", "own_answer": 1, "own_end": true, "answer": "x", "end": "length", "answer_tokens": 2});
        let line = Form::Answer.with(&row, said(Form::Answer));
        assert_eq!(line, kept);
        assert!(Form::Answer.is_of(line.as_object().unwrap(), &row));
        let plain = Form::Answer.with(&json!({"question": "a"}), said(Form::Answer)).to_string();
        assert_eq!(plain, r#"{"question":"a","answer":"x","end":"length","answer_tokens":2}"#);
        let label = Form::Label.with(&json!({"text": "a", "prediction": "spam"}), said(Form::Label));
        assert_eq!(
            label,
            json!({"text": "a", "own_prediction": "spam", "prediction": "ham", "probabilities": {"ham": 1.0}})
        );
    }
}
