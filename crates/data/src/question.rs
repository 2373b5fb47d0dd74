//! Questions as people read them: a rendered prompt without system message and control tokens. Also the first row's
//! question and system message, for example commands that can be pasted.
use std::cell::Cell;

use serde_json::{Value, json};

use super::classification_rows::ClassifierInput;
use super::inputs::{Input, Inputs};
use super::messages::Conversation;
use super::row::{Row, content_text};
use super::web_address::is_link;
use super::{ChatTemplate, source};

/// The text that a chat template writes before and after a user's message.
struct UserTurn {
    before: String,
    after: String,
}

impl UserTurn {
    /// Renders two short conversations to find this text; `None` if the template has no fixed text before a user's
    /// message.
    fn of(template: &ChatTemplate) -> Option<Self> {
        const FIRST: &str = "Zero";
        const ANSWER: &str = "Certainly";
        const SECOND: &str = "Twelve";
        let turn = |role: &str, text: &str| json!({"role": role, "content": text});
        let render = |messages: Vec<Value>| {
            let conversation = Conversation { messages, ..Conversation::default() };
            Some(template.render(&conversation, true).ok()?.text)
        };
        let alone = render(vec![turn("user", FIRST)])?;
        let (opening, first_end) = alone.split_once(FIRST)?;
        let both = render(vec![turn("user", FIRST), turn("assistant", ANSWER), turn("user", SECOND)])?;
        let (_, rest) = both.split_once(FIRST)?;
        let (answered, rest) = rest.split_once(ANSWER)?;
        let (between, _) = rest.split_once(SECOND)?;
        let before = common_suffix(opening, between).trim().to_owned();
        let after = common_prefix(first_end, answered).trim().to_owned();
        (!before.is_empty()).then_some(Self { before, after })
    }

    /// The last user message in a rendered prompt; the whole prompt if the text before such a message is not in it.
    fn of_prompt<'a>(&self, prompt: &'a str) -> &'a str {
        let Some(at) = prompt.rfind(&self.before) else { return prompt.trim() };
        let rest = &prompt[at + self.before.len()..];
        let end = if self.after.is_empty() { None } else { rest.find(&self.after) };
        rest[..end.unwrap_or(rest.len())].trim()
    }
}

/// The last user message of each rendered prompt. Paragraphs at the start that all messages share are removed:
/// templates without a system turn write the system message there.
pub fn questions(template: Option<&ChatTemplate>, prompts: &[String]) -> Vec<String> {
    let turn = template.and_then(UserTurn::of);
    let shown: Vec<&str> =
        prompts.iter().map(|prompt| turn.as_ref().map_or(prompt.trim(), |turn| turn.of_prompt(prompt))).collect();
    let shared = match shown.as_slice() {
        [first, rest @ ..] if !rest.is_empty() => {
            let shared = rest.iter().fold(*first, |shared, text| common_prefix(shared, text));
            shared.rfind("\n\n").map_or(0, |at| at + 2)
        }
        _ => 0,
    };
    shown.iter().map(|text| if text.len() > shared { text[shared..].trim() } else { text }.to_owned()).collect()
}

fn common_prefix<'a>(one: &'a str, other: &str) -> &'a str {
    let same = one.char_indices().zip(other.chars()).find(|((_, a), b)| a != b);
    match same {
        Some(((at, _), _)) => &one[..at],
        None if other.len() < one.len() => &one[..other.len()],
        None => one,
    }
}

fn common_suffix<'a>(one: &'a str, other: &str) -> &'a str {
    let same = one.chars().rev().zip(other.chars().rev()).take_while(|(a, b)| a == b);
    &one[one.len() - same.map(|(a, _)| a.len_utf8()).sum::<usize>()..]
}

/// The question of a row, to ask it again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The system message, if the row has one.
    pub system: Option<String>,
    /// The last user message before the last answer, the prompt of a prompt/completion row, or the first words of a
    /// text.
    pub question: String,
    /// Whether the row is a conversation.
    pub chat: bool,
    /// The pictures that it shows, as the row names them.
    pub images: Vec<String>,
}

/// The question of the first validation row; without validation rows, of the first test row, else of the first training
/// row. `None` for a tokenized row.
pub fn first(inputs: &Inputs) -> Option<Question> {
    let own = inputs.validation.iter().chain(&inputs.test).chain(&inputs.train);
    let mut found = own.take(1).find_map(of_input)?;
    // The question becomes part of a command that people see. A file may stand there, but a web address may hold a
    // secret.
    found.images.retain(|image| !is_link(image));
    Some(found)
}

fn of_input(input: &Input) -> Option<Question> {
    let mut found = None;
    // Loading the data has already read this file, so an error is not expected.
    let _ = source::read(input.paths.first()?, input.format, Some(1), &Cell::new(0), &mut |row, forms| {
        found = Some(row.parse(forms)?);
        Ok(())
    });
    match found? {
        Row::Chat(conversation) => of_turns(&conversation),
        Row::Labeled { input: ClassifierInput::Chat(conversation), .. } => of_turns(&conversation),
        Row::Completion { prompt: question, .. } | Row::Labeled { input: ClassifierInput::Text(question), .. } => {
            Some(Question { system: None, question, chat: false, images: Vec::new() })
        }
        Row::Text(text) => Some(Question { system: None, question: opening(&text), chat: false, images: Vec::new() }),
        Row::Caption { image, .. } => {
            Some(Question { system: None, question: String::new(), chat: false, images: vec![image] })
        }
        Row::Tokens { .. } => None,
    }
}

/// The first words of a text, as a prompt to continue.
fn opening(text: &str) -> String {
    const WORDS: usize = 8;
    text.split_whitespace().take(WORDS).collect::<Vec<_>>().join(" ")
}

fn of_turns(conversation: &Conversation) -> Option<Question> {
    let turns = &conversation.messages;
    let answer = turns.iter().rposition(|turn| turn["role"] == "assistant").unwrap_or(turns.len());
    let asked = turns[..answer].iter().rev().find(|turn| turn["role"] == "user")?;
    let system = turns.first().filter(|turn| turn["role"] == "system").map(|turn| content_text(&turn["content"]));
    Some(Question {
        system: system.filter(|text| !text.is_empty()),
        question: content_text(&asked["content"]),
        chat: true,
        images: conversation.images.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_users_words_are_found() {
        let turn = UserTurn { before: "<|im_start|>user".into(), after: "<|im_end|>\n<|im_start|>assistant".into() };
        let prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n\
                      <|im_start|>user\nTwo\nlines<|im_end|>\n<|im_start|>assistant\n<think>";
        assert_eq!(turn.of_prompt(prompt), "Two\nlines");
        assert_eq!(turn.of_prompt(" no marker "), "no marker");
    }

    #[test]
    fn paragraphs_that_all_prompts_begin_with_are_left_out() {
        let prompts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let merged = prompts(&["Be brief.\n\nWhat is up?", "Be brief.\n\nWhat is down?"]);
        assert_eq!(questions(None, &merged), ["What is up?", "What is down?"]);
        assert_eq!(questions(None, &merged[..1]), ["Be brief.\n\nWhat is up?"]);
        let alike = prompts(&["Same\n\nwords", "Same\n\nwords"]);
        assert_eq!(questions(None, &alike), ["words", "words"]);
        assert!(questions(None, &[]).is_empty());
    }

    #[test]
    fn common_ends_are_cut_between_characters() {
        assert_eq!(
            (common_prefix("äöx", "äöy"), common_prefix("ab", "abc"), common_prefix("abc", "ab")),
            ("äö", "ab", "ab")
        );
        assert_eq!((common_suffix("xäö", "yäö"), common_suffix("b", "ab")), ("äö", "b"));
    }
}
