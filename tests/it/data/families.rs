//! Templates in the manner of the families of 2026: several blocks in a turn, channels, calls, turns without an end,
//! dates, marks, and variables. What is learned is compared with what Transformers' marks say.
use serde_json::{Value, json};
use tunesmith::Kind;
use tunesmith::config::LossOn;
use tunesmith::data::row::{Conversation, Form, Row};
use tunesmith::data::{ChatTemplate, ReasoningForm, mask};
use tunesmith::eval::SplitAnswer;

use super::tokenizer;

/// Special tokens of these families.
const SPECIAL: &str = "<s> </s> <|start|> <|end|> <|message|> <|channel|> <|return|> <|call|> <|eom|> <|eot|> <|turn> <turn|> \
    <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|think|> <|im_start|> \
    <|im_end|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|tool_call_start|> <|tool_call_end|> \
    <|tool_list_start|> <|tool_list_end|> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> ]~!b[ ]~b] [e~[ <|start_of_role|> \
    <|end_of_role|> <|end_of_text|> <seed:bos> <seed:eos> <｜hy_begin▁of▁sentence｜> <｜hy_User｜> <｜hy_Assistant｜> \
    <｜hy_place▁holder▁no▁2｜> <｜hy_place▁holder▁no▁3｜> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [AVAILABLE_TOOLS] \
    [/AVAILABLE_TOOLS] [TOOL_CALLS] [ARGS] [TOOL_RESULTS] [/TOOL_RESULTS] [THINK] [/THINK] <start_of_turn> <end_of_turn>";

fn golden() -> Value {
    serde_json::from_slice(&std::fs::read(super::golden("../c4/chats.json")).unwrap()).unwrap()
}

fn compile(name: &str, marked: bool, kwargs: &Value) -> ChatTemplate {
    let source = std::fs::read_to_string(super::golden("../c4").join(format!("{name}.jinja"))).unwrap();
    let tags = regex::Regex::new(r"\{%-?\s*(end)?generation\s*-?%\}").unwrap();
    // A comment trims the space around it as the tag does.
    let source = if marked { source } else { tags.replace_all(&source, "{#- -#}").into_owned() };
    let date = std::time::UNIX_EPOCH + std::time::Duration::from_secs(20_295 * 86_400);
    let template = ChatTemplate::compile(&source, name, &tokenizer("bpe_llama3")).unwrap().at(Some(date));
    template.with_kwargs(kwargs.as_object().unwrap()).unwrap()
}

fn conversation(row: &Value) -> Conversation {
    let mut row = row.clone();
    let parts = row["messages"].as_array().into_iter().flatten().filter_map(|message| message["content"].as_array());
    let pictures = parts.flatten().filter(|part| part["type"] == "image").count();
    if pictures > 0 {
        row["images"] = vec!["a.png"; pictures].into();
    }
    match Row::parse(row, &[Form::Messages]).unwrap() {
        Row::Chat(conversation) => conversation,
        other => panic!("{other:?}"),
    }
}

fn digest(text: &str) -> String {
    let value = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |value, byte| (value ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{value:016x}")
}

fn special() -> Vec<String> {
    SPECIAL.split_whitespace().map(str::to_owned).collect()
}

/// What is learned, with the digest of the text before it.
fn learned(
    template: &ChatTemplate,
    conversation: &Conversation,
    loss_on: LossOn,
) -> tunesmith::Result<Vec<(String, String)>> {
    let renderings = mask::render(template, conversation, loss_on, &special())?;
    let spans = renderings.iter().flat_map(|one| one.spans.iter().map(move |span| (&one.text, span.clone())));
    let spans = spans.filter(|(_, span)| !span.is_empty());
    Ok(spans.map(|(text, span)| (digest(&text[..span.start]), text[span].to_owned())).collect())
}

/// Whether each turn that is learned is the end of the stored one.
fn ends_alike(found: &[(String, String)], turns: &[(&str, &str)]) -> bool {
    found.iter().zip(turns).all(|((_, found), (_, turn))| !found.is_empty() && turn.ends_with(found.as_str()))
}

#[test]
fn every_family_learns_what_transformers_marks_and_nothing_else() {
    let golden = golden();
    let text_of = |number: &Value| golden["texts"][number.as_u64().unwrap() as usize].as_str().unwrap();
    let (mut compared, mut refused, mut wrong) = (0, 0, Vec::new());
    let mut compiled = std::collections::BTreeMap::new();
    for case in golden["cases"].as_array().unwrap() {
        let (name, title) = (case["template"].as_str().unwrap(), case["conversation"].as_str().unwrap());
        let label = format!("{name} {title} {}", case["kwargs"]);
        let conversation = conversation(&golden["conversations"][title]);
        let (marked, plain) = compiled
            .entry(format!("{name} {}", case["kwargs"]))
            .or_insert_with(|| (compile(name, true, &case["kwargs"]), compile(name, false, &case["kwargs"])));
        let (marked, plain) = (&*marked, &*plain);
        if let Some(error) = case["error"].as_str() {
            let found = plain.render(&conversation, false);
            // What Python says of a wrong type is said in other words.
            let said = |found: &str| title == "parts" || error.contains("has no attribute") || found.contains(error);
            let alike = found.as_ref().is_err_and(|found| found.kind() == Kind::Data && said(found.message()));
            assert!(alike, "{label}: {found:?} is not {error}");
            refused += 1;
            continue;
        }
        let text = |prompt| plain.render(&conversation, prompt).map(|rendered| digest(&rendered.text));
        assert_eq!(text(false).unwrap(), case["text"], "{label}");
        assert_eq!(text(true).ok().as_deref(), case["prompt"].as_str(), "{label}");
        // Transformers' mask.
        let found = learned(marked, &conversation, LossOn::Assistant).unwrap();
        let marks: Vec<&str> = case["marked"].as_array().unwrap().iter().map(text_of).collect();
        assert!(found.iter().map(|(_, learned)| learned).eq(marks.iter()), "{label}: {found:?} is not {marks:?}");
        // Without marks, each turn is learned as it was written.
        let turns = case["turns"].as_array().unwrap().iter();
        let turns: Vec<(&str, &str)> =
            turns.map(|turn| (turn["before"].as_str().unwrap(), text_of(&turn["learned"]))).collect();
        let shares_more = name == "gemma4" || case["kwargs"]["enable_thinking"] == false;
        match learned(plain, &conversation, LossOn::Assistant) {
            Ok(found) if found.iter().map(|(a, b)| (a.as_str(), b.as_str())).eq(turns.iter().copied()) => {}
            // A thought that the prompt forbids begins as the prompt does, and Gemma writes the words beside a call behind
            // its result: the golden has them too.
            // A second call behind results has a header that its prompt does not have: it is learned with the call.
            Ok(found)
                if name == "deepseek_v3"
                    && title == "tool_thoughts"
                    && found.len() == turns.len()
                    && [0, 2].iter().all(|&turn| found[turn].0 == turns[turn].0 && found[turn].1 == turns[turn].1)
                    && found[1].1.strip_prefix("<｜Assistant｜>") == Some(turns[1].1) => {}
            Ok(found) if shares_more && found.len() == turns.len() && ends_alike(&found, &turns) => {}
            Ok(found) => wrong.push(format!("{label}:\n  {found:?}\n  {turns:?}")),
            Err(error) => wrong.push(format!("{label}: {error}")),
        }
        compared += 1;
    }
    assert!(wrong.is_empty(), "{} of {compared}:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!((compared, refused), (711, 57));
}

#[test]
fn the_blocks_of_chosen_turns_are_found_by_their_words() {
    let row = |first: Value| {
        json!({"messages": [{"role": "user", "content": "a"}, first, {"role": "tool", "name": "f", "content": "r"},
            {"role": "assistant", "content": "b", "reasoning_content": "so"}]})
    };
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]);
    let called =
        json!({"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": call, "train": false});
    // Two blocks in a turn: which belong to the turn that is left out does not follow from their number.
    let source = "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% if m.reasoning_content %}\
        {% generation %}<{{ m.reasoning_content }}>{% endgeneration %}-{% endif %}{% generation %}{{ m.content }}\
        {% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}.{% endgeneration %}{% else %}{{ m.content }}\
        {% endif %}{% endfor %}";
    let template = ChatTemplate::compile(source, "two blocks", &tokenizer("bpe_llama3")).unwrap();
    let words = |loss_on, row: &Value| -> Vec<String> {
        learned(&template, &conversation(row), loss_on).unwrap().into_iter().map(|(_, words)| words).collect()
    };
    assert_eq!(words(LossOn::Assistant, &row(called.clone())), ["<so>", "b."]);
    assert_eq!(words(LossOn::Completion, &row(called.clone())), ["<so>", "b."]);
    assert_eq!(words(LossOn::All, &row(called.clone())), ["[user]a[assistant]", "-", "[tool]r[assistant]<so>-b."]);
    // A block that shows no word of any turn: the row is refused.
    let source = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}x{% endgeneration %}{% endif %}{% endfor %}";
    let blind = ChatTemplate::compile(source, "blind", &tokenizer("bpe_llama3")).unwrap();
    let error = learned(&blind, &conversation(&row(called)), LossOn::Assistant).unwrap_err();
    assert!(
        error.kind() == Kind::Data && error.message().contains("which turns its {% generation %} blocks"),
        "{error}"
    );
    // Without turns to tell apart, all blocks are learned, as in Transformers.
    let all = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    assert_eq!(learned(&blind, &conversation(&all), LossOn::Assistant).unwrap().len(), 1);
}

#[test]
fn what_a_block_sets_ends_with_it() {
    // Transformers renders "inout".
    let source = "{% set x = 'out' %}{%- generation -%}{%- set x = 'in' -%}{{ x }}{%- endgeneration -%}{{ x }}";
    let template = ChatTemplate::compile(source, "scope", &tokenizer("bpe_llama3")).unwrap();
    let row = json!({"messages": [{"role": "user", "content": "a"}]});
    assert_eq!(template.render(&conversation(&row), false).unwrap().text, "inout");
}

#[test]
fn variables_come_from_the_settings_and_the_row() {
    let row = |kwargs: Value| json!({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": kwargs});
    let prompt = |settings: &Value, row: &Value| {
        compile("qwen35", false, settings).render(&conversation(row), true).unwrap().text
    };
    let (open, closed) = ("assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n");
    assert!(prompt(&json!({}), &row(Value::Null)).ends_with(open));
    assert!(prompt(&json!({"enable_thinking": false}), &row(json!({}))).ends_with(closed));
    assert!(prompt(&json!({}), &row(json!({"enable_thinking": false}))).ends_with(closed));
    assert!(prompt(&json!({"enable_thinking": false}), &row(json!({"enable_thinking": true}))).ends_with(open));
    let template = ChatTemplate::compile("{{ enable_thinking_ }}", "t", &tokenizer("bpe_llama3")).unwrap();
    let error = template.with_kwargs(json!({"enable_thinking": 1}).as_object().unwrap()).unwrap_err();
    assert!(error.kind() == Kind::Config && error.message().contains("\"enable_thinking\""), "{error}");
    let reserved = Row::parse(row(json!({"tools": []})), &[Form::Messages]).unwrap_err();
    assert!(reserved.message().contains("tools"), "{reserved}");
}

#[test]
fn each_template_shows_how_it_writes_reasoning() {
    let form = |name: &str, kwargs: Value| ReasoningForm::of(&compile(name, false, &kwargs));
    let is = |open: &str, close: &str, head: &str| {
        Some(ReasoningForm { open: open.into(), close: close.into(), head: head.into() })
    };
    let none = || json!({});
    let (channel, message) = ("<|channel|>", "<|message|>");
    let last = format!("{channel}final{message}");
    assert_eq!(
        form("harmony", none()),
        is(&format!("{channel}analysis{message}"), &format!("<|end|><|start|>assistant{last}"), &last)
    );
    let user = "to=user<|message|>";
    assert_eq!(form("muse", none()), is("to=self<|message|>", &format!("<|eom|><|start|>assistant {user}"), user));
    assert_eq!(form("gemma4", none()), is("<|channel>thought", "<channel|>", ""));
    assert_eq!(form("qwen35", none()), is("", "</think>", "</think>"));
    assert_eq!(form("qwen35", json!({"enable_thinking": false})), None);
    assert_eq!(form("glm45", none()), is("<think>", "</think>", "<think></think>"));
    assert_eq!(form("lfm25", none()), is("<think>", "</think>", ""));
    assert_eq!(form("deepseek_v3", none()), is("", "</think>", ""));
    assert_eq!(form("minimax_m2", none()), is("", "</think>", ""));
    assert_eq!(form("seed_oss", none()), is("<seed:think>", "</seed:think>", ""));
    assert_eq!(form("ministral3", none()), is("[THINK]", "[/THINK]", ""));
}

#[test]
fn reasoning_is_told_from_the_answer_token_by_token() {
    let tokenizer = tokenizer("bpe_llama3");
    let [open, close] = ["<|start_header_id|>analysis<|end_header_id|>", "<|start_header_id|>final<|end_header_id|>"];
    let channels = ReasoningForm { open: open.into(), close: format!("<|eot_id|>{close}"), head: close.into() };
    let form = |open: &str| ReasoningForm { open: open.into(), close: "</think>".into(), head: String::new() };
    for (form, text, reasoning, answer) in [
        (&form(""), "so it is\n</think>\n\nyes, 7 < 8<|eot_id|>", "so it is", "yes, 7 < 8"),
        (&form(""), "no end of thought", "no end of thought", ""),
        (&form("<think>"), "\n<think>so</think>yes", "so", "yes"),
        (&form("<think>"), "<thin ice", "", "<thin ice"),
        (&form("<think>"), "<think", "", "<think"),
        (&form("<think>"), "plain </think> text", "", "plain </think> text"),
        (&channels, &format!("{open}hm 漢字<|eot_id|>{close}yes<|eot_id|>"), "hm 漢字", "yes"),
        (&channels, &format!("{close}yes<|eot_id|>"), "", "yes"),
    ] {
        let ids = tokenizer.encode(text, false).unwrap().ids;
        let whole = SplitAnswer::of(Some(form), &tokenizer, &ids).unwrap();
        assert_eq!((whole.reasoning(), whole.answer().as_str()), (reasoning, answer), "{text}");
        let mut growing = SplitAnswer::new(Some(form));
        for id in ids {
            growing.push(&tokenizer, id).unwrap();
            let ahead = whole.reasoning().starts_with(growing.reasoning()) && answer.starts_with(&growing.answer());
            assert!(ahead, "{text}: {:?} {:?}", growing.reasoning(), growing.answer());
        }
    }
    let ids = tokenizer.encode("<think>so</think>yes", false).unwrap().ids;
    assert_eq!(SplitAnswer::of(None, &tokenizer, &ids).unwrap().answer(), "<think>so</think>yes");
}

/// Templates of a folder, NAME.jinja beside `NAME_training.jinja` with marks: `TUNESMITH_CHATS=FOLDER cargo test --locked --test it --
/// --ignored masks_of_a_folder`. What is learned of the last turn must be in its marked text.
#[test]
#[ignore = "wants a folder of templates"]
fn masks_of_a_folder_are_those_of_its_marks() {
    let folder = std::path::PathBuf::from(std::env::var_os("TUNESMITH_CHATS").unwrap());
    let golden = golden();
    let (mut equal, mut refused, mut other) = (0, 0, Vec::new());
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let marked = folder.join(format!("{name}_training.jinja"));
        if path.extension().is_none_or(|end| end != "jinja") || !marked.is_file() {
            continue;
        }
        let read = |path: &std::path::Path| {
            ChatTemplate::compile(&std::fs::read_to_string(path).unwrap(), &name, &tokenizer("bpe_llama3")).unwrap()
        };
        let (plain, marked) = (read(&path), read(&marked));
        for (title, row) in golden["conversations"].as_object().unwrap() {
            let whole = conversation(row);
            for index in (0..whole.messages.len()).filter(|&index| whole.messages[index]["role"] == "assistant") {
                let through = Conversation { messages: whole.messages[..=index].to_vec(), ..whole.clone() };
                let (found, marks) = (
                    learned(&plain, &through, LossOn::Completion),
                    marked.render(&through, false).map(|text| {
                        text.spans.iter().map(|span| text.text[span.clone()].to_owned()).collect::<Vec<_>>()
                    }),
                );
                let (found, marks) = match (found, marks) {
                    (Ok(found), Ok(marks)) => (found, marks),
                    (Err(error), _) if error.message().contains("does not show") => {
                        other.push(format!("{name} {title} {}: {error}", index + 1));
                        continue;
                    }
                    _ => {
                        refused += 1;
                        continue;
                    }
                };
                let (found, marks) = (found.last().map_or("", |(_, text)| text.trim_end()), marks.concat());
                if marks.contains(found) {
                    equal += 1;
                } else {
                    other.push(format!("{name} {title} {}:\n  {found:?}\n  {marks:?}", index + 1));
                }
            }
        }
    }
    assert!(other.is_empty(), "{equal} alike, {refused} refused, {} others:\n{}", other.len(), other.join("\n"));
    println!("{equal} alike, {refused} refused");
}
