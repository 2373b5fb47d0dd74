//! `tunesmith chat`: a conversation in the terminal. Answers appear token by token; Ctrl-C ends an answer, not the program.
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

use super::chat_input::{ChatInput, Said};
use super::infer::{Shower, named_images};
use super::model_session::{AskArgs, LoadEncoder, ModelSession, Prompt};
use super::terminal::{Style, print, print_text, stdout_colour};
use crate::data::{is_link, shown_address};
use crate::error::{Error, Kind, Result};
use crate::eval::End;
use crate::eval::chat::Memory;
use crate::files;
use crate::files::output::{Existing, check_output_file};
use crate::signals::{self, Requests};
use crate::words::count;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    ask: AskArgs,
}

const HELP: &str = "\
/help          list the commands
/reset         start a new conversation
/system TEXT   start a new conversation with this system message; without TEXT, with none
/base          use the base model without the adapter; keep the conversation
/tuned         use the adapter again; keep the conversation
/image FILE    show this picture with the next question (with data.allow_image_urls: true, of a web address too)
/save FILE     append the conversation to a JSON Lines file, as a training row
/quit          leave (also Ctrl-D); Ctrl-C ends an answer
";

struct Chat {
    session: ModelSession,
    system: Option<String>,
    messages: Vec<Value>,
    /// The images of `messages`, in their order.
    images: Vec<String>,
    /// Images that were added (`/image`) and will be shown with the next question.
    next_images: Vec<String>,
    memory: Memory,
    tuned: bool,
    stop: Arc<AtomicBool>,
    colour: bool,
}

/// Whether the conversation goes on after a line of input.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    On,
    Leave,
}

/// Runs the conversation until the user leaves.
///
/// # Errors
/// The model; the terminal.
pub fn run(args: &Args) -> Result<()> {
    let session = args.ask.open(LoadEncoder::IfPossible, &[])?;
    if session.model.arch.score.is_some() {
        return Err(Error::config(format!("{}: this model is a classifier and cannot chat", session.what))
            .hint("`tunesmith infer` shows the label, or the number, of a text"));
    }
    let stop = Arc::new(AtomicBool::new(false));
    let (asked, requests) = (Arc::clone(&stop), Requests::default());
    let _listening = signals::handle(move |signal| {
        if !asked.swap(true, Ordering::Relaxed) {
            requests.forget();
        }
        signal == signal_hook::consts::SIGINT && requests.is_first()
    })?;
    let colour = stdout_colour();
    let sides = if session.has_adapter() { "; /base switches to the base model" } else { "" };
    print_text(&format!("{}\n/help lists the commands{sides}\n", Style::Bold.paint(&session.what, colour)));
    let mut chat = Chat {
        session,
        system: args.ask.system.clone(),
        messages: Vec::new(),
        images: Vec::new(),
        next_images: Vec::new(),
        memory: Memory::default(),
        tuned: true,
        stop,
        colour,
    };
    let mut talk = ChatInput::open()?;
    loop {
        let line = match talk.next()? {
            Said::Line(line) => line,
            Said::Nothing => continue,
            Said::End => break,
        };
        chat.stop.store(false, Ordering::Relaxed);
        match chat.line(line.trim()) {
            Ok(Next::On) => {}
            Ok(Next::Leave) => return Ok(()),
            // A refused turn or file does not end the conversation.
            Err(error) if matches!(error.kind(), Kind::Data | Kind::Io | Kind::Config | Kind::Model) => {
                let hint = error.hint_text().map_or_else(String::new, |hint| format!(" ({hint})"));
                print_text(&format!("{}{hint}\n", Style::Red.paint(error.message(), chat.colour)));
            }
            Err(error) => return Err(error),
        }
    }
    if talk.is_terminal() { print("\n") } else { Ok(()) }
}

/// Whether a file holds conversations, so that another may be appended.
fn ends_in_a_conversation(path: &Path) -> bool {
    let Ok(text) = files::read_own_text(path, files::SMALL) else { return false };
    let last = text.lines().next_back().map(serde_json::from_str::<Value>);
    text.is_empty() || (text.ends_with('\n') && matches!(last, Some(Ok(row)) if row["messages"].is_array()))
}

impl Chat {
    fn line(&mut self, line: &str) -> Result<Next> {
        let (word, rest) = line.split_once(char::is_whitespace).map_or((line, ""), |(word, rest)| (word, rest.trim()));
        match word {
            "" => {}
            "/quit" | "/exit" => return Ok(Next::Leave),
            "/help" => print_text(HELP),
            "/reset" => {
                self.forget();
                print_text("a new conversation\n");
            }
            "/system" => {
                self.system = (!rest.is_empty()).then(|| rest.to_owned());
                self.forget();
                print_text(if rest.is_empty() {
                    "no system message\n"
                } else {
                    "a new conversation with this system message\n"
                });
            }
            "/base" | "/tuned" => self.switch(word == "/tuned"),
            "/image" => self.show(rest)?,
            "/save" => self.save(rest)?,
            _ if word.starts_with('/') => print_text(&format!("{word} is not a command; /help lists the commands\n")),
            _ if self.session.pictures.as_ref().is_some_and(|pictures| pictures.chat().is_none()) => {
                print_text("this model writes captions: /image FILE\n");
            }
            _ => self.answer(line)?,
        }
        Ok(Next::On)
    }

    fn forget(&mut self) {
        self.messages.clear();
        self.images.clear();
        self.next_images.clear();
        self.memory.clear();
    }

    fn switch(&mut self, tuned: bool) {
        if !self.session.has_adapter() {
            print_text("no adapter is loaded, so there is only one model\n");
            return;
        }
        if self.tuned != tuned {
            self.tuned = tuned;
            self.session.use_adapter(tuned);
            // The cache was computed by the other model.
            self.memory.clear();
        }
        print_text(if tuned { "asking the tuned model\n" } else { "asking the base model\n" });
    }

    fn show(&mut self, file: &str) -> Result<()> {
        let Some(pictures) = &self.session.pictures else {
            let why = match self.session.config.vision.load {
                Some(false) => "leave out vision.load=false",
                _ => "start with vision.load=true, which loads it or says why not",
            };
            print_text(&format!("the image encoder is not loaded: {why}\n"));
            return Ok(());
        };
        if file.is_empty() {
            print_text("/image FILE\n");
            return Ok(());
        }
        let name = named_images(&[file.into()])?.concat();
        // An image that cannot be fetched or cached must not end the conversation either.
        let kept = pictures.keep(name.clone()).map_err(|error| error.with_kind(Kind::Data))?;
        let rows: usize = pictures.rows(&kept)?.tiles.iter().sum();
        if pictures.chat().is_none() {
            let prompt = self.session.turn(None, "", &[name])?;
            return self.say(&prompt).map(drop);
        }
        self.next_images.push(name);
        let file = if is_link(file) { shown_address(file) } else { file.to_owned() };
        print_text(&format!("{file}: {}, shown with the next question\n", count(rows, "token")));
        Ok(())
    }

    fn whole(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.messages.iter().cloned()).collect()
    }

    fn save(&self, file: &str) -> Result<()> {
        if file.is_empty() || self.messages.is_empty() {
            print_text(if file.is_empty() { "/save FILE\n" } else { "the conversation is empty\n" });
            return Ok(());
        }
        let path = Path::new(file);
        let mut row = json!({ "messages": self.whole() });
        if !self.images.is_empty() {
            row["images"] = json!(self.images);
        }
        let line = format!("{row}\n");
        let place = check_output_file(
            path,
            Existing::Ours(ends_in_a_conversation, ""),
            &crate::data::named_inputs(&self.session.config),
        )?;
        let saved = files::open_to_write(&place, true).and_then(|mut file| {
            let before = file.metadata()?.len();
            std::io::Write::write_all(&mut file, line.as_bytes()).inspect_err(|_| {
                // Half a row would make the file unreadable.
                let _ = file.set_len(before);
            })
        });
        saved.map_err(|error| Error::io("write", path, &error))?;
        print_text(&format!("saved {} to {file}\n", count(self.messages.len(), "message")));
        Ok(())
    }

    /// Answers a user turn. A refused turn does not become part of the conversation.
    fn answer(&mut self, text: &str) -> Result<()> {
        let shown = self.images.len();
        let asked = if self.next_images.is_empty() {
            json!({"role": "user", "content": text})
        } else {
            let places = self.next_images.iter().map(|_| json!({"type": "image"}));
            let parts: Vec<_> = places.chain([json!({"type": "text", "text": text})]).collect();
            json!({"role": "user", "content": parts})
        };
        self.messages.push(asked);
        self.images.append(&mut self.next_images);
        let prompt = if self.session.template.is_some() {
            self.session.messages(&self.whole(), &self.images)
        } else {
            // Without a template there are no turns: each line is a prompt of its own.
            self.session.plain(text)
        };
        let prompt = prompt.inspect_err(|_| {
            self.messages.pop();
            self.images.truncate(shown);
        })?;
        if let Some((reasoning, text)) = self.say(&prompt)? {
            let mut message = json!({"role": "assistant", "content": text});
            if !reasoning.is_empty() {
                // The template decides whether the next prompt has it.
                message["reasoning_content"] = reasoning.into();
            }
            self.messages.push(message);
        }
        Ok(())
    }

    /// Prints the answer to a prompt, and returns its reasoning, which may be empty, and its text.
    fn say(&mut self, prompt: &Prompt) -> Result<Option<(String, String)>> {
        let (began, settings) = (Instant::now(), self.session.settings());
        let known = self.memory.known(&prompt.ids, &prompt.images);
        let mut shower = Shower::new(&self.session, true, &self.stop);
        let answer = self.memory.answer(&self.session.model, &prompt.ids, &prompt.images, &settings, &mut shower)?;
        let Some(answer) = answer else { return Ok(None) };
        let said = self.session.parts(&answer)?;
        let speed = answer.tokens.len() as f64 / began.elapsed().as_secs_f64().max(1e-9);
        let cut = match answer.end {
            _ if self.stop.load(Ordering::Relaxed) => ", cut off",
            End::Length => ", cut at gen.max_new_tokens",
            End::Context => ", cut at the end of the context",
            End::Stop => "",
        };
        let remark = format!(
            "[prompt {}, {} reused, {} written, {speed:.1} tokens/s{cut}]",
            count(prompt.ids.len(), "token"),
            known,
            answer.tokens.len()
        );
        print("\n")?;
        print_text(&format!("{}\n", Style::Dim.paint(&remark, self.colour)));
        Ok(Some(said))
    }
}
