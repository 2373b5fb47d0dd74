//! `tunesmith infer`: answers one prompt, shown while it grows, or every row of a file, in its order; a file that was cut
//! off goes on where it stands.
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::asking::{AskArgs, Asker};
use super::classify;
use super::terminal::{print_answer, print_exact, print_note};
use crate::data::numbers;
use crate::error::{Error, Result};
use crate::eval::stream::{TextStream, certain};
use crate::eval::{Answer, Asked, Go, Settings, Watcher, generate};
use crate::files::output::{Existing, claim_file};
use crate::files::{self, real};
use crate::signals::{self, Handling, Requests};

/// What `infer` takes.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    ask: AskArgs,
    /// The prompt; without it and without --in it is read from standard input
    #[arg(long, short, value_name = "TEXT", conflicts_with = "input")]
    prompt: Option<String>,
    /// A file of prompts: JSON Lines as training rows, or with their answers left out; another file is a prompt a line
    #[arg(long = "in", value_name = "FILE", requires = "out")]
    input: Option<PathBuf>,
    /// The file of answers: the rows of --in with `answer`, `end` and `answer_tokens` (a row's own field of such a name becomes
    /// `own_answer`); one that is there goes on
    #[arg(long, value_name = "FILE", requires = "input", conflicts_with = "prompt")]
    out: Option<PathBuf>,
    /// Start the file of answers anew
    #[arg(long, requires = "out")]
    overwrite: bool,
    /// Print one JSON object
    #[arg(long, conflicts_with = "input")]
    json: bool,
}

/// Answers.
///
/// # Errors
/// The model, the prompts, the files; [`crate::Kind::Preempted`] after Ctrl-C in a file.
pub fn run(args: &Args) -> Result<()> {
    match (&args.input, &args.out) {
        (Some(input), Some(out)) => {
            if files::is_same(input, out) {
                return Err(Error::config(format!("--out {}: that is --in", out.display())).hint("name another file"));
            }
            // Which file it may be shows in its rows.
            claim_file(out, Existing::Replace, std::slice::from_ref(input))?;
            let rows = read_rows(input)?;
            let done = if args.overwrite { 0 } else { answered(out, &rows)? };
            if done == rows.len() {
                print_note(&format!("{}: all {done} rows are answered", out.display()));
                return Ok(());
            }
            batch(args, &rows, done, out, input)
        }
        _ => single(args),
    }
}

/// Shows an answer while it grows.
pub(super) struct Shower<'a> {
    /// How tokens become text.
    pub asker: &'a Asker,
    /// Whether to print.
    pub shown: bool,
    /// Whether to stop.
    pub stop: &'a AtomicBool,
    stream: TextStream,
    printed: usize,
    read: usize,
}

impl<'a> Shower<'a> {
    pub(super) fn new(asker: &'a Asker, shown: bool, stop: &'a AtomicBool) -> Self {
        Self { asker, shown, stop, stream: TextStream::default(), printed: 0, read: 0 }
    }

    fn show(&mut self, end: usize) -> Result<()> {
        if self.shown && end > self.printed {
            print_answer(&self.stream.text()[self.printed..end])?;
        }
        self.printed = self.printed.max(end);
        Ok(())
    }
}

impl Watcher for Shower<'_> {
    fn token(&mut self, _: usize, tokens: &[u32]) -> Result<Go> {
        // Beams change their mind: only the last answer is shown.
        if self.asker.config.generation.num_beams == 1 {
            while self.read < tokens.len() {
                self.stream.push(&self.asker.tokenizer, tokens[self.read])?;
                self.read += 1;
            }
            self.show(certain(self.stream.text(), &self.asker.config.generation.stop_strings))?;
        }
        Ok(if self.stop.load(Ordering::Relaxed) { Go::EndText } else { Go::On })
    }

    fn ends(&mut self, _: usize, tokens: &[u32]) -> bool {
        asked(self.asker).stops(tokens)
    }

    fn answer(&mut self, _: usize, answer: &Answer) -> Result<()> {
        let text = asked(self.asker).text(answer)?;
        if self.shown && text.len() > self.printed {
            print_answer(text.get(self.printed..).unwrap_or_default())?;
        }
        self.printed = text.len();
        Ok(())
    }
}

pub(super) fn asked(asker: &Asker) -> Asked<'_> {
    Asked { tokenizer: &asker.tokenizer, stop_strings: &asker.config.generation.stop_strings }
}

fn single(args: &Args) -> Result<()> {
    let prompt = if let Some(prompt) = &args.prompt {
        prompt.clone()
    } else {
        if std::io::stdin().is_terminal() {
            return Err(Error::config("there is no prompt")
                .hint("--prompt TEXT, --in FILE --out FILE, or a text on standard input"));
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map_err(|error| Error::io("read", "standard input", &error))?;
        if text.trim().is_empty() {
            return Err(Error::config("there is no prompt: standard input is empty")
                .hint("--prompt TEXT, --in FILE --out FILE, or a text on standard input"));
        }
        if args.ask.raw { text } else { text.trim_end().to_owned() }
    };
    let asker = args.ask.open()?;
    if let Some(head) = &asker.model.arch.score {
        return classify::infer(&asker, head, args.ask.system.as_deref(), &prompt, args.json);
    }
    let tokens = asker.turn(args.ask.system.as_deref(), &prompt)?;
    let never = AtomicBool::new(false);
    let mut shower = Shower::new(&asker, !args.json, &never);
    let began = Instant::now();
    let answers = generate(&asker.model, std::slice::from_ref(&tokens), &asker.settings(), &mut shower)?;
    let Some(answer) = answers.and_then(|mut answers| answers.pop()) else { return Ok(()) };
    if !args.json {
        return print_exact("\n");
    }
    let seconds = began.elapsed().as_secs_f64();
    let found = json!({
        "model": asker.what, "prompt": prompt, "answer": asked(&asker).text(&answer)?, "end": answer.end,
        "prompt_tokens": tokens.len(), "answer_tokens": answer.tokens.len(), "seconds": seconds,
    });
    print_exact(&format!("{found}\n"))
}

/// The rows of a file: JSON values, or lines of text.
fn read_rows(path: &Path) -> Result<Vec<Value>> {
    let file = files::open(path).map_err(|error| Error::io("read", path, &error).with_kind(crate::Kind::Data))?;
    let is_json = path.extension().is_some_and(|end| end == "jsonl" || end == "json" || end == "ndjson");
    let mut rows = Vec::new();
    for (number, line) in BufReader::new(file).lines().enumerate() {
        let place = || format!("{}:{}", path.display(), number + 1);
        let line = line.map_err(|error| Error::data(format!("{}: {error}", place())))?;
        if line.trim().is_empty() {
            continue;
        }
        rows.push(if is_json {
            numbers::parse(&line).map_err(|error| {
                let what = error.to_string();
                let what = what.split(" at line ").next().unwrap_or_default();
                Error::data(format!("{}:{}: malformed JSON: {what}", place(), error.column()))
                    .hint("expected a JSON object a line")
            })?
        } else {
            Value::String(line)
        });
    }
    if rows.is_empty() {
        return Err(Error::data(format!("{}: there are no rows", path.display())));
    }
    Ok(rows)
}

/// The fields that an answered row has beside its own.
const OURS: [&str; 3] = ["answer", "end", "answer_tokens"];

/// A row's own fields, such that ours have room beside them: the answer that it has is often what one compares with.
fn own_fields(row: &Value) -> Map<String, Value> {
    let Value::Object(fields) = row else { return Map::from_iter([("prompt".to_owned(), row.clone())]) };
    let mut own = Map::new();
    for (name, value) in fields {
        let mut free = name.clone();
        if OURS.contains(&name.as_str()) {
            while fields.contains_key(&free) || own.contains_key(&free) {
                free.insert_str(0, "own_");
            }
        }
        own.insert(free, value.clone());
    }
    own
}

fn with_answer(row: &Value, text: &str, answer: &Answer) -> Value {
    let mut fields = own_fields(row);
    fields.insert(OURS[0].to_owned(), text.into());
    fields.insert(OURS[1].to_owned(), json!(answer.end));
    fields.insert(OURS[2].to_owned(), answer.tokens.len().into());
    Value::Object(fields)
}

/// How many rows `out` answers already; half a line at its end is cut off.
fn answered(out: &Path, rows: &[Value]) -> Result<usize> {
    let bytes = match files::read_own(out, u64::MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(Error::io("read", out, &error)),
    };
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let mut done = 0;
    for line in bytes[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let mut found: Map<String, Value> = serde_json::from_slice(line).unwrap_or_default();
        let ours = OURS.iter().all(|name| found.remove(*name).is_some());
        if !ours || rows.get(done).map(own_fields) != Some(found) {
            return Err(Error::config(format!("{}:{}: not the answer to that row of --in", out.display(), done + 1))
                .hint("--overwrite starts the file anew; or name another --out"));
        }
        done += 1;
    }
    if whole == 0 && !bytes.is_empty() {
        return Err(Error::config(format!("{}: no line of answers, though not empty", out.display()))
            .hint("--overwrite starts the file anew; or name another --out"));
    }
    if whole < bytes.len() {
        let cut = real(out).and_then(|out| files::open_to_write(&out, false)?.set_len(whole as u64));
        cut.map_err(|error| Error::io("write", out, &error))?;
    }
    Ok(done)
}

/// Writes answers in the order of their rows, whatever the order in which they come.
struct Writer<'a> {
    asker: &'a Asker,
    rows: &'a [Value],
    file: File,
    path: &'a Path,
    waiting: BTreeMap<usize, Value>,
    next: usize,
    tokens: usize,
    stop: Arc<AtomicBool>,
}

impl Watcher for Writer<'_> {
    fn token(&mut self, _: usize, _: &[u32]) -> Result<Go> {
        self.tokens += 1;
        Ok(if self.stop.load(Ordering::Relaxed) { Go::EndAll } else { Go::On })
    }

    fn ends(&mut self, _: usize, tokens: &[u32]) -> bool {
        asked(self.asker).stops(tokens)
    }

    fn answer(&mut self, text: usize, answer: &Answer) -> Result<()> {
        self.waiting.insert(text, with_answer(&self.rows[text], &asked(self.asker).text(answer)?, answer));
        while let Some(row) = self.waiting.remove(&self.next) {
            let line = format!("{row}\n");
            self.file.write_all(line.as_bytes()).map_err(|error| Error::io("write", self.path, &error))?;
            self.next += 1;
        }
        Ok(())
    }
}

fn batch(args: &Args, rows: &[Value], done: usize, out: &Path, input: &Path) -> Result<()> {
    let ask = &args.ask;
    let asker = ask.open()?;
    if let Some(head) = &asker.model.arch.score {
        let existing = Existing::unless("--overwrite", args.overwrite);
        return classify::infer_file(&asker, head, rows, (out, existing), input);
    }
    let place = |index: usize, error: Error| error.context(format!("{}: row {}", input.display(), index + 1));
    // All prompts first: a row that cannot be asked is refused before the first answer.
    let prompts = rows
        .iter()
        .enumerate()
        .skip(done)
        .map(|(index, row)| asker.row(ask.system.as_deref(), row).map_err(|error| place(index, error)))
        .collect::<Result<Vec<_>>>()?;
    // By now the model's files are known, too.
    let place = claim_file(out, Existing::Replace, &crate::data::named_inputs(&asker.config))?;
    let open = files::open_to_write(&place, true);
    let file = open.and_then(|file| if done == 0 { file.set_len(0).map(|()| file) } else { Ok(file) });
    let file = file.map_err(|error| Error::io("write", out, &error))?;
    if done > 0 {
        print_note(&format!("{}: {done} rows are answered, going on with row {}", out.display(), done + 1));
    }
    let (stop, _listening) = interrupt()?;
    let settings = Settings { first_text: done as u64, ..asker.settings() };
    let rest = &rows[done..];
    let mut writer =
        Writer { asker: &asker, rows: rest, file, path: out, waiting: BTreeMap::new(), next: 0, tokens: 0, stop };
    let began = Instant::now();
    let finished = generate(&asker.model, &prompts, &settings, &mut writer)?.is_some();
    let (written, seconds) = (done + writer.next, began.elapsed().as_secs_f64());
    writer.file.sync_all().map_err(|error| Error::io("write", out, &error))?;
    if !finished {
        return Err(Error::preempted(format!("{}: {written} of {} rows are answered", out.display(), rows.len()))
            .hint("run the same command again: it goes on there"));
    }
    let speed = writer.tokens as f64 / seconds.max(1e-9);
    print_note(&format!("{}: {written} rows answered, {} tokens at {speed:.1} tokens/s", out.display(), writer.tokens));
    Ok(())
}

/// A flag that signals set; a second one ends the process.
pub(super) fn interrupt() -> Result<(Arc<AtomicBool>, Handling)> {
    let (flag, requests) = (Arc::new(AtomicBool::new(false)), Requests::default());
    let set = Arc::clone(&flag);
    let handling = signals::handle(move |_| {
        set.store(true, Ordering::Relaxed);
        requests.is_first()
    })?;
    Ok((flag, handling))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::End;

    #[test]
    fn a_file_of_answers_goes_on_after_its_last_whole_line() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("out.jsonl");
        let rows = [json!({"question": "a", "id": 1}), json!("b"), json!({"question": "c"})];
        assert_eq!(answered(&out, &rows).unwrap(), 0);
        let answer = Answer { tokens: vec![1, 2], end: End::Length };
        let lines: Vec<String> = rows.iter().map(|row| with_answer(row, "x", &answer).to_string()).collect();
        assert_eq!(lines[0], r#"{"question":"a","id":1,"answer":"x","end":"length","answer_tokens":2}"#);
        std::fs::write(&out, format!("{}\n{}\n{}", lines[0], lines[1], &lines[2][..9])).unwrap();
        assert_eq!(answered(&out, &rows).unwrap(), 2);
        assert_eq!(std::fs::read_to_string(&out).unwrap(), format!("{}\n{}\n", lines[0], lines[1]));
        let other = [json!({"question": "z"}), json!("b")];
        assert_eq!(answered(&out, &other).unwrap_err().kind(), crate::Kind::Config);
        assert!(answered(&out, &rows[..1]).is_err(), "more answers than rows");

        // What a row says itself is kept.
        let rows = [json!({"question": "a", "answer": "b", "own_answer": 1, "end": true})];
        let line = with_answer(&rows[0], "x", &answer);
        let kept = json!({"question": "a", "own_own_answer": "b", "own_answer": 1, "own_end": true, "answer": "x", "end": "length", "answer_tokens": 2});
        assert_eq!(line, kept);
        std::fs::write(&out, format!("{line}\n")).unwrap();
        assert_eq!(answered(&out, &rows).unwrap(), 1);
    }
}
