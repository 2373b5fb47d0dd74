//! The user's scorer: a command that runs once, reads one JSON object per line, and answers each with one:
//!
//! ```text
//! to the command    {"id": 0, "source": "…", "answer": "…", "reference": "…"}
//! from the command  {"score": 0.5}      any names, numbers or booleans, the same names for every row
//! ```
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};
use tunesmith_base::error::{Error, Result};

use super::Row;

/// The longest line that is read.
const LINE_BYTES: u64 = 1 << 20;

/// A running scorer; dropping it ends the command.
#[derive(Debug)]
pub struct Scorer {
    name: String,
    child: Child,
    timeout: Duration,
    /// To the writing thread, so that a command that does not read cannot block.
    questions: Option<SyncSender<Vec<u8>>>,
    answers: Receiver<std::io::Result<Vec<u8>>>,
    asked: u64,
    names: Vec<String>,
}

impl Scorer {
    /// Starts the command: a program and its arguments, without a shell. What it writes to stderr is shown.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: it cannot be started.
    pub fn start(command: &[String], timeout: Duration) -> Result<Self> {
        let name = command.join(" ");
        let Some((program, arguments)) = command.split_first() else {
            return Err(Error::config("eval.scorer: expected a program and its arguments"));
        };
        let mut child =
            Command::new(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(
                |error| {
                    Error::config(format!("eval.scorer: cannot start `{program}`"))
                        .hint("write the program and its arguments as a list, such as [python3, score.py]")
                        .unless_of_machine(program, &error)
                },
            )?;
        let (questions, to_write) = sync_channel::<Vec<u8>>(1);
        if let Some(mut input) = child.stdin.take() {
            thread::spawn(move || {
                for line in to_write {
                    if input.write_all(&line).and_then(|()| input.flush()).is_err() {
                        break;
                    }
                }
            });
        }
        let (to_answer, answers) = sync_channel(1);
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || {
                let mut output = BufReader::new(output);
                loop {
                    let mut line = Vec::new();
                    let read = output.by_ref().take(LINE_BYTES + 1).read_until(b'\n', &mut line);
                    let ended = !matches!(read, Ok(1..));
                    if to_answer.send(read.map(|_| line)).is_err() || ended {
                        break;
                    }
                }
            });
        }
        Ok(Self { name, child, timeout, questions: Some(questions), answers, asked: 0, names: Vec::new() })
    }

    /// The names that the command gives its scores, known after the first row.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The command's scores of a row.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: no answer in time, the command's end, or something else than was agreed.
    pub fn score(&mut self, row: &Row<'_>) -> Result<Vec<f64>> {
        let Row { source, answer, reference } = row;
        let mut line =
            json!({ "id": self.asked, "source": source, "answer": answer, "reference": reference }).to_string();
        line.push('\n');
        // If the writer is gone, the missing answer shows it.
        let _ = self.questions.as_ref().map(|questions| questions.send(line.into_bytes()));
        let answer = self.answers.recv_timeout(self.timeout);
        let at = format!("eval.scorer `{}`: row {}", self.name, self.asked);
        let fail = |what: String| {
            Error::data(format!("{at}: {what}"))
                .hint("it must answer each line with one JSON object of numbers, such as {\"score\": 1}, and flush")
        };
        let line = match answer {
            Ok(Ok(line)) if line.is_empty() => return Err(fail(format!("it ended ({})", self.ended()))),
            Ok(Ok(line)) => line,
            Ok(Err(error)) => return Err(fail("its output cannot be read".to_owned()).caused_by(error)),
            Err(RecvTimeoutError::Timeout) => {
                return Err(fail(format!("no answer within {:?} (eval.scorer_timeout)", self.timeout)));
            }
            Err(RecvTimeoutError::Disconnected) => return Err(fail(format!("it ended ({})", self.ended()))),
        };
        if line.len() as u64 > LINE_BYTES {
            return Err(fail(format!("a line longer than {LINE_BYTES} bytes")));
        }
        let shown: String = String::from_utf8_lossy(&line).trim_end().chars().take(120).collect();
        let Ok(Value::Object(map)) = serde_json::from_slice(&line) else {
            return Err(fail(format!("expected a JSON object, found {shown:?}")));
        };
        let number = |value: &Value| value.as_f64().or_else(|| value.as_bool().map(f64::from));
        let scores: Option<Vec<(String, f64)>> =
            map.into_iter().map(|(name, value)| number(&value).map(|number| (name, number))).collect();
        let mut scores = scores
            .filter(|scores| !scores.is_empty())
            .ok_or_else(|| fail(format!("expected numbers or booleans by name, found {shown:?}")))?;
        scores.sort_by(|left, right| left.0.cmp(&right.0));
        let (names, values): (Vec<String>, Vec<f64>) = scores.into_iter().unzip();
        if self.asked > 0 && names != self.names {
            let (before, now) = (self.names.join(", "), names.join(", "));
            return Err(fail(format!("it scored {before} before and {now} here")));
        }
        (self.names, self.asked) = (names, self.asked + 1);
        Ok(values)
    }

    /// How the command ended, for messages.
    fn ended(&mut self) -> String {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(1) {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.to_string(),
                Ok(None) => thread::sleep(Duration::from_millis(5)),
                Err(error) => return error.to_string(),
            }
        }
        "it closed its output".into()
    }
}

impl Drop for Scorer {
    /// Closes the command's input, and kills the command if it does not end soon.
    fn drop(&mut self) {
        self.questions = None;
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(500) {
            match self.child.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
