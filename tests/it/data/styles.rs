//! Templates in the manner of five much-used ones: tools, thoughts, dates, parts, merged system messages.
use serde_json::Value;
use tunesmith::config::LossOn;
use tunesmith::data::row::{Conversation, Form, Row};
use tunesmith::data::{ChatTemplate, mask};

use super::{config, load_with, tokenizer};

fn golden(name: &str) -> std::path::PathBuf {
    super::golden("../c2").join(name)
}

fn template(name: &str) -> ChatTemplate {
    let source = std::fs::read_to_string(golden(&format!("{name}.jinja"))).unwrap();
    ChatTemplate::compile(&source, name, &tokenizer("bpe_llama3")).unwrap()
}

fn conversation(row: &Value) -> Conversation {
    let mut row = row.clone();
    // The chats show pictures without a name.
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

fn chats() -> Value {
    serde_json::from_slice(&std::fs::read(golden("chats.json")).unwrap()).unwrap()
}

#[test]
fn chats_render_as_in_transformers() {
    let chats = chats();
    let date = std::time::UNIX_EPOCH + std::time::Duration::from_secs(20_295 * 86_400);
    assert_eq!(chats["date"], "2025-07-26");
    let (mut compared, mut refused) = (0, 0);
    for case in chats["cases"].as_array().unwrap() {
        let label = format!("{} {}", case["template"], case["conversation"]);
        let template = template(case["template"].as_str().unwrap()).at(Some(date));
        let row = &chats["conversations"][case["conversation"].as_str().unwrap()];
        let rendered = template.render(&conversation(row), case["add_generation_prompt"] == true);
        if let Some(error) = case["error"].as_str() {
            assert!(rendered.unwrap_err().message().ends_with(error), "{label}");
            refused += 1;
            continue;
        }
        let rendered = rendered.unwrap_or_else(|error| panic!("{label}: {error}"));
        assert_eq!(rendered.text, case["rendered"].as_str().unwrap(), "{label}");
        compared += 1;
    }
    assert_eq!((compared, refused), (166, 28));
}

#[test]
fn arguments_are_text_for_templates_that_join_them_with_text() {
    let joins = "{% for m in messages %}{{ m.role + ':' }}{% for c in m.tool_calls %}{{ '<' + c.function.arguments + '>' }}\
                 {% endfor %}{% if m.content %}{{ m.content }}{% endif %}{% endfor %}";
    let objects =
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}";
    let never = "{{ raise_exception('no') }}";
    let compile = |source| ChatTemplate::compile(source, "a template", &tokenizer("bpe_llama3")).unwrap();
    for arguments in
        [serde_json::json!("{\"city\": \"Zürich\", \"days\": 2}"), serde_json::json!({"city": "Zürich", "days": 2})]
    {
        let call = serde_json::json!({"type": "function", "function": {"name": "weather", "arguments": arguments}});
        let row = serde_json::json!({"messages": [
            {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]});
        let conversation = conversation(&row);
        let text = |source| compile(source).render(&conversation, false).map(|rendered| rendered.text);
        assert_eq!(text(joins).unwrap(), "user:Weather?assistant:<{\"city\": \"Zürich\", \"days\": 2}>");
        assert_eq!(text(objects).unwrap(), "Zürich");
        assert!(text(never).unwrap_err().message().ends_with("no"));
    }
}

#[test]
fn a_content_that_the_template_cannot_read_is_named() {
    let adds = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}";
    let template = ChatTemplate::compile(adds, "a template", &tokenizer("bpe_llama3")).unwrap();
    let call = serde_json::json!({"type": "function", "function": {"name": "f", "arguments": {}}});
    for (content, what) in [
        (serde_json::json!([{"type": "text", "text": "a"}]), "message 2: its \"content\" is a list of parts"),
        (Value::Null, "message 2: its \"content\" is missing or null"),
    ] {
        let row = serde_json::json!({"messages": [
            {"role": "user", "content": "q"}, {"role": "assistant", "content": content, "tool_calls": [call]}]});
        let error = template.render(&conversation(&row), false).unwrap_err();
        assert!(error.message().contains(what) && error.message().contains("(a template) expects a string"), "{error}");
        assert!(error.hint_text().unwrap().contains("data.template_path"), "{error}");
    }
    // What is wrong with something else stays as it is.
    let never = ChatTemplate::compile("{{ raise_exception('no') }}", "a template", &tokenizer("bpe_llama3")).unwrap();
    let row = serde_json::json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]});
    assert!(never.render(&conversation(&row), false).unwrap_err().message().ends_with("no"));
}

/// Templates of a folder that `scripts/golden/chat_templates.py --all` has rendered: `TUNESMITH_CHATS=FOLDER cargo test --test it
/// templates_of_a_folder -- --ignored`.
#[test]
#[ignore = "wants a folder of templates"]
fn templates_of_a_folder_render_as_in_transformers() {
    let folder = std::path::PathBuf::from(std::env::var_os("TUNESMITH_CHATS").unwrap());
    let chats: Value = serde_json::from_slice(&std::fs::read(folder.join("chats.json")).unwrap()).unwrap();
    let date = std::time::UNIX_EPOCH + std::time::Duration::from_secs(20_295 * 86_400);
    let (mut equal, mut refused, mut other) = (0, 0, Vec::new());
    for case in chats["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let label = format!("{name} {} {}", case["conversation"], case["add_generation_prompt"]);
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let template = match ChatTemplate::compile(&source, name, &tokenizer("bpe_llama3")) {
            Ok(template) => template.at(Some(date)),
            Err(error) => {
                other.push(format!("{label}: does not compile: {error}"));
                continue;
            }
        };
        let row = &chats["conversations"][case["conversation"].as_str().unwrap()];
        match (template.render(&conversation(row), case["add_generation_prompt"] == true), case["error"].as_str()) {
            (Err(_), Some(_)) => refused += 1,
            (Ok(rendered), None) if rendered.text == case["rendered"].as_str().unwrap() => equal += 1,
            (Ok(rendered), _) => {
                other.push(format!("{label}:\n{:?}\n{} {}", rendered.text, case["rendered"], case["error"]));
            }
            (Err(error), _) => other.push(format!("{label}: {error}")),
        }
    }
    assert!(
        other.is_empty(),
        "{equal} equal, {refused} refused by both, {} others:\n{}",
        other.len(),
        other.join("\n")
    );
}

#[test]
fn what_is_learned_is_what_the_assistant_wrote() {
    let chats = chats();
    let mut special_texts = tokenizer("bpe_llama3").special_texts().to_vec();
    // Where a template drops thoughts that its prompt opens, a turn begins behind a special token.
    special_texts.push("<｜Assistant｜>".to_owned());
    let mut checked = 0;
    for case in chats["cases"].as_array().unwrap() {
        let name = case["conversation"].as_str().unwrap();
        if case["error"].is_string() || case["add_generation_prompt"] == true || matches!(name, "parts" | "question") {
            continue;
        }
        let label = format!("{} {name}", case["template"]);
        let conversation = conversation(&chats["conversations"][name]);
        let template = template(case["template"].as_str().unwrap());
        let rendered = mask::render(&template, &conversation, LossOn::Assistant, &special_texts);
        let renderings = rendered.unwrap_or_else(|error| panic!("{label}: {error}"));
        let spans = renderings.iter().flat_map(|one| one.spans.iter().map(|span| &one.text[span.clone()]));
        let learned: Vec<&str> = spans.collect();
        let assistants: Vec<&Value> =
            conversation.messages.iter().filter(|message| message["role"] == "assistant").collect();
        assert_eq!(learned.len(), assistants.len(), "{label}");
        for (learned, message) in learned.iter().zip(assistants) {
            let answer = message["content"].as_str().unwrap_or_default().rsplit("</think>").next().unwrap().trim();
            // Some templates leave out what is said beside a call.
            let written = renderings.iter().any(|one| one.text.contains(answer));
            assert!(!written || learned.contains(answer), "{label}: {learned:?} lacks {answer:?}");
            assert!(written || ["tool_with_words", "tool_thoughts"].contains(&name), "{label}");
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                assert!(learned.contains(call["function"]["name"].as_str().unwrap()), "{label}: {learned:?}");
            }
        }
        for other in conversation.messages.iter().filter(|message| message["role"] != "assistant") {
            let text = other["content"].as_str().unwrap().trim();
            assert!(text.len() < 3 || learned.iter().all(|learned| !learned.contains(text)), "{label}: {learned:?}");
        }
        checked += 1;
    }
    assert!(checked > 50, "{checked}");
}

#[test]
fn chosen_turns_are_learned_under_every_template() {
    let row = serde_json::json!({"messages": [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "first", "weight": 0},
        {"role": "user", "content": "two"}, {"role": "assistant", "content": "second"},
        {"role": "user", "content": "three"}, {"role": "assistant", "content": "third", "train": false},
    ]});
    let tokenizer = tokenizer("bpe_llama3");
    let marked = std::fs::read_to_string(super::golden("template_chatml.jinja")).unwrap();
    let marked = ChatTemplate::compile(&marked, "chatml", &tokenizer).unwrap();
    assert!(marked.marks_generation());
    let templates =
        ["qwen3", "llama31", "mistral_nemo", "deepseek_r1", "gemma3"].map(template).into_iter().chain([marked]);
    for template in templates {
        let learned = |loss_on| -> Vec<String> {
            let renderings = mask::render(&template, &conversation(&row), loss_on, tokenizer.special_texts()).unwrap();
            let spans =
                renderings.iter().flat_map(|one| one.spans.iter().map(|span| one.text[span.clone()].to_owned()));
            spans.collect()
        };
        let turns = learned(LossOn::Assistant);
        let one = turns.len() == 1 && turns[0].contains("second");
        assert!(one && !turns[0].contains("first") && !turns[0].contains("two"), "{template:?}: {turns:?}");
        assert_eq!(learned(LossOn::Completion), [""; 0], "the last turn is not to be learned");
        let all = learned(LossOn::All).concat();
        assert!(all.contains("second") && all.contains("three"), "{all}");
        assert!(!all.contains("first") && !all.contains("third"), "{all}");
    }
}

#[test]
fn a_dated_template_is_fixed_by_its_date_and_noted_without() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    std::fs::write(&path, "{\"question\": \"q\", \"answer\": \"a\"}\n").unwrap();
    let mut config = config(&path);
    config.data.template_path = Some(golden("llama31.jinja"));
    let noted = |config: &tunesmith::config::Config| {
        let data = load_with(config).unwrap();
        (super::texts(&data, 0).0, data.report.warnings.iter().any(|warning| warning.contains("template_date")))
    };
    assert!(noted(&config).1);
    config.data.template_date = Some("2024-02-29".into());
    let (text, warned) = noted(&config);
    assert!(text.contains("29 Feb 2024") && !warned, "{text}");
    config.data.template_date = Some("29.2.2024".into());
    assert!(load_with(&config).unwrap_err().message().contains("data.template_date"));
}

#[test]
fn numbers_are_printed_as_python_prints_them() {
    let golden: Value = serde_json::from_slice(&std::fs::read(super::golden("../c3/numbers.json")).unwrap()).unwrap();
    let tokenizer = tokenizer("bpe_llama3");
    let folder = tempfile::tempdir().unwrap();
    for (name, expression) in golden["templates"].as_object().unwrap() {
        let source =
            format!("{{% set x = messages[0].tool_calls[0].function.arguments.x %}}{}", expression.as_str().unwrap());
        let template = ChatTemplate::compile(&source, name.clone(), &tokenizer).unwrap();
        let cases: Vec<&Value> =
            golden["cases"].as_array().unwrap().iter().filter(|case| case["template"] == **name).collect();
        // As text and as an object of a row, of a line and of an item.
        let row = |case: &&Value, text: bool| {
            let arguments = format!("{{\"x\": {}}}", case["number"].as_str().unwrap());
            let arguments = if text { Value::from(arguments).to_string() } else { arguments };
            format!(
                "{{\"messages\": [{{\"role\": \"assistant\", \"tool_calls\": [{{\"function\": {{\"name\": \"f\", \"arguments\": {arguments}}}}}]}}]}}"
            )
        };
        let of = |text: bool| cases.iter().map(|case| row(case, text)).collect::<Vec<_>>();
        let files = [
            ("a.jsonl", of(false).join("\n")),
            ("b.jsonl", of(true).join("\n")),
            ("c.json", format!("[{}]", of(false).join(", "))),
        ];
        for (file, content) in files {
            let path = folder.path().join(file);
            std::fs::write(&path, content).unwrap();
            let mut at = 0;
            let take = &mut |row: tunesmith::data::source::RawRow, forms: &[Form]| -> tunesmith::Result<()> {
                let Row::Chat(conversation) = row.parse(forms)? else { panic!("a conversation") };
                let rendered = template.render(&conversation, false)?.text;
                assert_eq!(rendered, cases[at]["rendered"].as_str().unwrap(), "{file} {name} {}", cases[at]["number"]);
                at += 1;
                Ok(())
            };
            tunesmith::data::source::read(&path, Some(Form::Messages), None, &std::cell::Cell::new(0), take).unwrap();
            assert_eq!(at, cases.len());
        }
    }
}
