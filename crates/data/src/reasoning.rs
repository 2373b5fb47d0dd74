//! How a chat template writes reasoning: what opens it, and what stands between it and the answer. Found by rendering a
//! turn that has both.
use serde_json::{Value, json};

use super::messages::Conversation;
use super::template::ChatTemplate;

/// The text around the reasoning of an answer, without white space at its ends.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReasoningForm {
    /// What opens reasoning; empty if the prompt has opened it.
    pub open: String,
    /// What stands between the reasoning and the answer.
    pub close: String,
    /// What stands before an answer without reasoning; empty for most templates.
    pub head: String,
}

impl ReasoningForm {
    /// The form of a template, if its prompt leaves the reasoning to the model. `None` if the prompt has closed an empty
    /// thought (`enable_thinking: false`).
    ///
    /// Of a template that writes no reasoning, `<think>` and `[THINK]` are expected in the answer's text.
    pub fn of(template: &ChatTemplate) -> Option<Self> {
        const THOUGHT: &str = "Considering";
        const ANSWER: &str = "Certainly";
        let question = json!({ "role": "user", "content": "Question" });
        let render = |messages: Vec<Value>, prompt: bool| {
            let conversation = Conversation { messages, ..Conversation::default() };
            template.render(&conversation, prompt).ok().map(|rendered| rendered.text)
        };
        let prompt = render(vec![question.clone()], true)?;
        let thoughtful = json!({ "role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT });
        let thoughtful = render(vec![question.clone(), thoughtful], false)?;
        let plain = render(vec![question, json!({ "role": "assistant", "content": ANSWER })], false)?;
        let head = plain.rfind(ANSWER).and_then(|at| plain[..at].strip_prefix(&prompt)).unwrap_or_default();
        let head = head.trim().to_owned();
        let places =
            thoughtful.rfind(THOUGHT).zip(thoughtful.rfind(ANSWER)).filter(|(thought, answer)| thought < answer);
        let Some((thought, answer)) = places else { return Some(Self::usual(&prompt, head)) };
        let close = thoughtful[thought + THOUGHT.len()..answer].trim().to_owned();
        let open = thoughtful[..thought].strip_prefix(&prompt)?.trim().to_owned();
        // Without a text between them, nothing tells one from the other.
        (!close.is_empty()).then_some(Self { open, close, head })
    }

    fn usual(prompt: &str, head: String) -> Self {
        let [think, other] = [("<think>", "</think>"), ("[THINK]", "[/THINK]")];
        let (open, close) = if prompt.contains("[INST]") { other } else { think };
        let opened = prompt.trim_end().ends_with(open);
        Self { open: if opened { String::new() } else { open.to_owned() }, close: close.to_owned(), head }
    }
}
