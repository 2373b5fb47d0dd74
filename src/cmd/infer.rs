//! `tunesmith infer`: answers one prompt, printed token by token, or every row of a file, in file order. An interrupted file is
//! continued.
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

use super::atomic_lines::check_plain_text;
use super::classify;
use super::generations::{Done, Form, Lines};
use super::interrupt::interrupt;
use super::model_session::{AskArgs, LoadEncoder, ModelSession, Prompt};
use super::terminal::{print_answer, print_exact, print_note, print_reasoning};
use crate::data::{is_link, numbers, shown_address, shows_picture};
use crate::error::{Error, Result};
use crate::eval::stream::certain;
use crate::eval::{Answer, End, Go, Settings, SplitAnswer, Unwatched, Watcher, generate_with_images};
use crate::files;
use crate::files::output::{Existing, check_output_file};
use crate::words::{are, count};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    ask: AskArgs,
    /// Show this image in front of the prompt; may be given more than once. With `data.allow_image_urls=true`, it may be a
    /// web address
    #[arg(long, value_name = "FILE", conflicts_with = "input")]
    image: Vec<PathBuf>,
    /// Answer this prompt (default: read it from standard input)
    #[arg(long, short, value_name = "TEXT", conflicts_with = "input")]
    prompt: Option<String>,
    /// Answer the prompts of a file: training rows as JSON Lines, with or without answers, or one prompt per line
    #[arg(long = "in", value_name = "FILE", requires = "out")]
    input: Option<PathBuf>,
    /// Write each row of --in to this file with `answer`, `end` and `answer_tokens`, or a classifier's `prediction` and
    /// `probabilities`. A row's own `answer` becomes `own_answer`. An unfinished file is continued
    #[arg(long, value_name = "FILE", requires = "input", conflicts_with = "prompt")]
    out: Option<PathBuf>,
    /// Replace the --out file instead of continuing it
    #[arg(long, requires = "out")]
    overwrite: bool,
    /// Print a JSON object
    #[arg(long, conflicts_with = "input")]
    json: bool,
}

/// Answers a prompt, or the prompts of a file.
///
/// # Errors
/// The model, the prompts, the files; [`crate::Kind::Preempted`] after Ctrl-C in a file.
pub fn run(args: &Args) -> Result<()> {
    match (&args.input, &args.out) {
        (Some(input), Some(out)) => {
            if files::is_same(input, out) {
                return Err(
                    Error::config(format!("--out {}: it is the --in file", out.display())).hint("name another file")
                );
            }
            check_plain_text(out)?;
            // An existing file is checked by its rows below.
            check_output_file(out, Existing::Replace, std::slice::from_ref(input))?;
            let rows = read_rows(input)?;
            let done = if args.overwrite { Done::NONE } else { Done::read(out, &rows)? };
            batch(args, &rows, &done, out, input)
        }
        _ => single(args),
    }
}

/// Prints an answer while it is generated, after its reasoning, which goes to standard error.
pub(super) struct Shower<'a> {
    pub session: &'a ModelSession,
    pub shown: bool,
    pub stop: &'a AtomicBool,
    split: SplitAnswer<'a>,
    reasoning_printed: usize,
    printed: usize,
    read: usize,
}

impl<'a> Shower<'a> {
    pub(super) fn new(session: &'a ModelSession, shown: bool, stop: &'a AtomicBool) -> Self {
        let split = SplitAnswer::new(session.reasoning.as_ref());
        Self { session, shown, stop, split, reasoning_printed: 0, printed: 0, read: 0 }
    }

    /// Prints the part of the reasoning, and of the first `end` bytes of the answer, that was not printed yet.
    fn show(&mut self, reasoning: &str, answer: &str, end: usize) -> Result<()> {
        if self.shown && reasoning.len() > self.reasoning_printed {
            print_reasoning(&reasoning[self.reasoning_printed..]);
            self.reasoning_printed = reasoning.len();
        }
        if self.shown && end > self.printed {
            if self.printed == 0 && self.reasoning_printed > 0 {
                print_reasoning("\n\n");
            }
            print_answer(&answer[self.printed..end])?;
        }
        self.printed = self.printed.max(end);
        Ok(())
    }
}

impl Watcher for Shower<'_> {
    fn token(&mut self, _: usize, tokens: &[u32]) -> Result<Go> {
        // The leading beam may change: only the final answer is shown.
        if self.session.config.generation.num_beams == 1 {
            while self.read < tokens.len() {
                self.split.push(&self.session.tokenizer, tokens[self.read])?;
                self.read += 1;
            }
            let (reasoning, answer) = (self.split.reasoning().to_owned(), self.split.answer());
            let end = certain(&answer, &self.session.config.generation.stop_strings);
            self.show(&reasoning, &answer, end)?;
        }
        Ok(if self.stop.load(Ordering::Relaxed) { Go::EndText } else { Go::On })
    }

    fn ends(&mut self, _: usize, tokens: &[u32]) -> bool {
        self.session.decoder().stops(tokens)
    }

    fn answer(&mut self, _: usize, answer: &Answer) -> Result<()> {
        let (reasoning, text) = self.session.parts(answer)?;
        let whole = text.is_char_boundary(self.printed) && reasoning.is_char_boundary(self.reasoning_printed);
        if whole { self.show(&reasoning, &text, text.len()) } else { Ok(()) }
    }
}

/// What to do where there is nothing to ask.
const NO_PROMPT: &str = "give --prompt TEXT, --in FILE --out FILE, or a text on standard input; to a model that captions images only --image FILE";

fn single(args: &Args) -> Result<()> {
    let images = named_images(&args.image)?;
    let prompt = if let Some(prompt) = &args.prompt {
        prompt.clone()
    } else if !images.is_empty() && std::io::stdin().is_terminal() {
        String::new()
    } else {
        if std::io::stdin().is_terminal() {
            return Err(Error::config("there is no prompt").hint(NO_PROMPT));
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map_err(|error| Error::io("read", "standard input", &error))?;
        if text.trim().is_empty() && images.is_empty() {
            return Err(Error::config("there is no prompt: standard input is empty").hint(NO_PROMPT));
        }
        if args.ask.raw { text } else { text.trim_end().to_owned() }
    };
    let session = args.ask.open(LoadEncoder::IfNeeded, &images)?;
    if let Some(head) = &session.model.arch.score {
        return classify::infer(&session, head, args.ask.system.as_deref(), &prompt, args.json);
    }
    let Prompt { ids: tokens, images } = session.turn(args.ask.system.as_deref(), &prompt, &images)?;
    let never = AtomicBool::new(false);
    let mut shower = Shower::new(&session, !args.json, &never);
    let began = Instant::now();
    let images = [images];
    let answers =
        generate_with_images(&session.model, std::slice::from_ref(&tokens), &images, &session.settings(), &mut shower)?;
    let Some(answer) = answers.and_then(|mut answers| answers.pop()) else { return Ok(()) };
    if !args.json {
        print_exact("\n")?;
        let most = session.settings().max_new_tokens;
        match answer.end {
            End::Length => print_note(&format!("the answer is cut at gen.max_new_tokens = {most}")),
            End::Context => print_note("the answer is cut at the end of the model's context"),
            End::Stop => {}
        }
        return Ok(());
    }
    let seconds = began.elapsed().as_secs_f64();
    let (reasoning, text) = session.parts(&answer)?;
    let mut found = json!({
        "model": session.what, "prompt": prompt, "answer": text, "end": answer.end,
        "prompt_tokens": tokens.len(), "answer_tokens": answer.tokens.len(), "seconds": seconds,
    });
    if !reasoning.is_empty() {
        found["reasoning_content"] = reasoning.into();
    }
    print_exact(&format!("{found}\n"))
}

/// Images with absolute paths, so that the configuration's folder does not matter; web addresses as they are.
pub(super) fn named_images(files: &[PathBuf]) -> Result<Vec<String>> {
    let whole = |file: &PathBuf| {
        if let Some(address) = file.to_str().filter(|name| name.contains("://") && !file.exists()) {
            if is_link(address) {
                return Ok(address.to_owned());
            }
            return Err(Error::data(format!("image {}: no address of http or https", shown_address(address)))
                .hint("name a file, or such an address"));
        }
        let path = file.canonicalize().map_err(|error| {
            let error = Error::io("read", file, &error).with_kind(crate::Kind::Data);
            let is_data = file.to_str().is_some_and(|name| name.starts_with("data:"));
            if is_data { error.hint("a file, or an address of http or https, is expected here") } else { error }
        })?;
        // Names of images must be UTF-8, as they are in rows.
        path.into_os_string().into_string().map_err(|path| {
            Error::data(format!("image {}: its name is not valid UTF-8", path.display())).hint("rename the file")
        })
    };
    files.iter().map(whole).collect()
}

/// Files whose lines are no prompts: formats of training rows, archives, and compressed files.
const OTHER_FORMATS: [&str; 14] =
    ["csv", "tsv", "parquet", "arrow", "feather", "tar", "tgz", "zip", "gz", "zst", "zstd", "xz", "bz2", "docx"];

/// The rows of a file: JSON values, or lines of text.
fn read_rows(path: &Path) -> Result<Vec<Value>> {
    let end = path.extension().and_then(|end| end.to_str()).unwrap_or_default().to_lowercase();
    if OTHER_FORMATS.contains(&end.as_str()) {
        return Err(Error::data(format!("--in {}: the lines of a .{end} file are not prompts", path.display()))
            .hint("write the rows as JSON Lines (.jsonl), or one prompt a line as .txt"));
    }
    let file = files::open(path).map_err(|error| Error::io("read", path, &error).with_kind(crate::Kind::Data))?;
    let is_json = path.extension().is_some_and(|end| end == "jsonl" || end == "json" || end == "ndjson");
    let mut rows = Vec::new();
    for (number, line) in BufReader::new(file).lines().enumerate() {
        let place = || format!("{}:{}", path.display(), number + 1);
        let line = line.map_err(|error| Error::data(place()).unless_of_machine(path, &error))?;
        if line.trim().is_empty() {
            continue;
        }
        rows.push(if is_json {
            numbers::parse(&line).map_err(|error| {
                let what = error.to_string();
                let what = what.split(" at line ").next().unwrap_or_default();
                Error::data(format!("{}:{}: malformed JSON: {what}", place(), error.column()))
                    .hint("expected one JSON object per line")
                    .with_source(error)
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

/// The values of [`Form::Answer`]'s fields.
fn fields(session: &ModelSession, answer: &Answer) -> Result<[Value; 3]> {
    Ok([session.decoder().text(answer)?.into(), json!(answer.end), answer.tokens.len().into()])
}

/// Writes answers in row order, whatever order they end in.
struct Writer<'a> {
    session: &'a ModelSession,
    lines: Lines<'a>,
    /// The row of the first prompt.
    first: usize,
    waiting: BTreeMap<usize, [Value; 3]>,
    tokens: usize,
    stop: Arc<AtomicBool>,
}

impl Watcher for Writer<'_> {
    fn token(&mut self, _: usize, _: &[u32]) -> Result<Go> {
        self.tokens += 1;
        Ok(if self.stop.load(Ordering::Relaxed) { Go::EndAll } else { Go::On })
    }

    fn ends(&mut self, _: usize, tokens: &[u32]) -> bool {
        self.session.decoder().stops(tokens)
    }

    fn answer(&mut self, text: usize, answer: &Answer) -> Result<()> {
        let said = fields(self.session, answer)?;
        self.waiting.insert(self.first + text, said);
        while let Some(said) = self.waiting.remove(&self.lines.next()) {
            self.lines.push(said)?;
        }
        Ok(())
    }
}

fn batch(args: &Args, rows: &[Value], done: &Done, out: &Path, input: &Path) -> Result<()> {
    let ask = &args.ask;
    let encoder = if rows.iter().any(shows_picture) { LoadEncoder::Needed } else { LoadEncoder::IfNeeded };
    let session = ask.open_beside(encoder, &[], Some(input))?;
    let form = Form::of(session.model.arch.score.as_ref());
    let all_answered = || {
        print_note(&format!("{}: all {} answered", out.display(), are(done.rows, "row")));
        Ok(())
    };
    let lines = || {
        let lines = Lines::open(out, rows, done, form, &session.config)?;
        if done.rows > 0 {
            let next = done.rows + 1;
            print_note(&format!("{}: {} answered, continuing with row {next}", out.display(), are(done.rows, "row")));
        }
        Ok(lines)
    };
    if let Some(head) = &session.model.arch.score {
        done.check_first(session.model.device(), out, || classify::first(&session, head, rows, input))?;
        if done.rows == rows.len() {
            return all_answered();
        }
        return classify::infer_file(&session, head, rows, done.rows, lines, input);
    }
    let prompt = |index: usize| {
        let prompt = session.row(ask.system.as_deref(), &rows[index]);
        prompt.map_err(|error| error.context(format!("{}: row {}", input.display(), index + 1)))
    };
    done.check_first(session.model.device(), out, || {
        let Prompt { ids, images } = prompt(0)?;
        let answers = generate_with_images(&session.model, &[ids], &[images], &session.settings(), &mut Unwatched)?;
        let answer = answers.and_then(|mut answers| answers.pop()).expect("nobody stops it");
        fields(&session, &answer).map(Vec::from)
    })?;
    if done.rows == rows.len() {
        return all_answered();
    }
    // Reads all prompts first: a bad row is refused before the first answer.
    let prompts = (done.rows..rows.len()).map(prompt).collect::<Result<Vec<_>>>()?;
    let lines = lines()?;
    let (stop, _listening) = interrupt()?;
    let settings = Settings { first_text: done.rows as u64, ..session.settings() };
    let mut writer = Writer { session: &session, lines, first: done.rows, waiting: BTreeMap::new(), tokens: 0, stop };
    let began = Instant::now();
    let (prompts, images): (Vec<_>, Vec<_>) = prompts.into_iter().map(|prompt| (prompt.ids, prompt.images)).unzip();
    let finished = generate_with_images(&session.model, &prompts, &images, &settings, &mut writer)?.is_some();
    let seconds = began.elapsed().as_secs_f64();
    writer.lines.close(finished)?;
    let (rows, tokens) = (count(rows.len(), "row"), count(writer.tokens, "token"));
    let speed = writer.tokens as f64 / seconds.max(1e-9);
    print_note(&format!("{}: {rows} answered, {tokens} at {speed:.1} tokens/s", out.display()));
    Ok(())
}
