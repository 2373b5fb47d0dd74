//! Loss masks: the assistant's text and the token that ends its turn have labels, and nothing else does.
use proptest::prelude::*;
use serde_json::{Value, json};
use tunesmith::config::LossOn;
use tunesmith::data::row::Conversation;
use tunesmith::data::template::Rendered;
use tunesmith::data::{ChatTemplate, IGNORE, encode, mask};

use super::{assert_refused, config, examples, golden, load_text, load_with, texts, tokenizer};

fn chat(turns: &[(&str, &str)]) -> Conversation {
    let message = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
    Conversation { messages: turns.iter().map(message).collect(), ..Conversation::default() }
}

fn render(source: &str, conversation: &Conversation, loss_on: LossOn) -> Result<Vec<Rendered>, tunesmith::Error> {
    let tokenizer = tokenizer("bpe_llama3");
    let template = ChatTemplate::compile(source, "test", &tokenizer).unwrap();
    mask::render(&template, conversation, loss_on, tokenizer.special_texts())
}

fn supervised(source: &str, conversation: &Conversation, loss_on: LossOn) -> Vec<String> {
    render(source, conversation, loss_on).unwrap().iter().flat_map(learned).collect()
}

fn learned(rendered: &Rendered) -> Vec<String> {
    rendered.spans.iter().map(|span| rendered.text[span.clone()].to_owned()).collect()
}

fn template(name: &str) -> String {
    std::fs::read_to_string(golden(&format!("template_{name}.jinja"))).unwrap()
}

/// The template without its generation tags.
fn unmarked(source: &str) -> String {
    let tags = regex::Regex::new(r"\{%-?\s*(end)?generation\s*-?%\}").unwrap();
    // A comment takes the tag's place: it trims the space around it just so.
    tags.replace_all(source, |tag: &regex::Captures<'_>| {
        let (open, close) = (tag[0].starts_with("{%-"), tag[0].ends_with("-%}"));
        format!("{{#{}{}#}}", if open { "-" } else { "" }, if close { " -" } else { "" })
    })
    .into_owned()
}

/// A template in Qwen3's manner: thoughts stay only in the last turn, and an empty one is put there.
const FORGETFUL: &str = r"
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
        {{- content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}";

#[test]
fn a_call_that_the_template_does_not_write_is_refused_and_what_else_it_leaves_out_is_named() {
    let call = json!({"type": "function", "function": {"name": "add", "arguments": {"a": 1}}});
    let tool = json!({"type": "function", "function": {"name": "add"}});
    let row = json!({"tools": [tool], "notes": "some words", "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 1."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]});
    let folder = tempfile::tempdir().unwrap();
    let load = |template: &str| {
        let (rows, path) = (folder.path().join("rows.jsonl"), folder.path().join("t.jinja"));
        std::fs::write(&rows, row.to_string()).unwrap();
        std::fs::write(&path, template).unwrap();
        let mut config = config(&rows);
        config.data.template_path = Some(path);
        load_with(&config)
    };
    let plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}";
    assert_refused(load(plain), &["rows.jsonl:1", "message 3", "t.jinja", "does not write its call of \"add\""]);
    // The tools' names alone are not the call.
    let tools_only = format!("{{{{ tools | tojson }}}}{plain}");
    assert_refused(load(&tools_only), &["message 3"]);
    let calls = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}\
        {% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}\n\
        {% endif %}{% endfor %}";
    let data = load(calls).unwrap();
    assert!(texts(&data, 0).1.contains("add({\"a\": 1})"), "{:?}", texts(&data, 0));
    let warnings = data.report.warnings.join("\n");
    for part in [
        "the field \"notes\", which the model does not see",
        "a message of role \"system\", which the model does not see",
    ] {
        assert!(warnings.contains(part), "{warnings} lacks {part}");
    }
    assert!(!warnings.contains("have tools"), "its name is in the call: {warnings}");
}

#[test]
fn incremental_rendering_finds_what_generation_blocks_mark() {
    let conversations = [
        chat(&[("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]),
        chat(&[("system", "s"), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "two")]),
        chat(&[("user", ""), ("assistant", "")]),
        chat(&[("user", "x"), ("assistant", "\n\n answer\n")]),
        chat(&[("user", "say </s>"), ("assistant", "<|im_end|>\n<|eot_id|>"), ("user", "d"), ("assistant", "d")]),
        chat(&[("user", "漢字"), ("assistant", "naïve 🙂"), ("user", "e\u{301}"), ("assistant", "\u{fdd0}\u{fdd1}")]),
    ];
    for name in ["chatml", "llama3", "gemma", "mistral", "phi3"] {
        for conversation in &conversations {
            if name == "gemma" && conversation.messages[0]["role"] == "system" {
                continue;
            }
            // Blank space at the edges belongs to the neighbouring token either way.
            let (marked, plain) = (template(name), unmarked(&template(name)));
            assert!(!plain.contains("generation %}"));
            let trimmed = |spans: Vec<String>| spans.iter().map(|span| span.trim().to_owned()).collect::<Vec<_>>();
            let expected = trimmed(supervised(&marked, conversation, LossOn::Assistant));
            let found = trimmed(supervised(&plain, conversation, LossOn::Assistant));
            assert_eq!(found, expected, "{name} {conversation:?}");
        }
    }
}

#[test]
fn a_template_that_rewrites_earlier_turns_shows_each_as_it_was_written() {
    let turns = [("user", "a"), ("assistant", "<think>hm</think>\n\nthink"), ("user", "b"), ("assistant", "four")];
    let renderings = render(FORGETFUL, &chat(&turns), LossOn::Assistant).unwrap();
    let texts: Vec<&str> = renderings.iter().map(|rendered| rendered.text.as_str()).collect();
    assert_eq!(
        texts,
        [
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nthink<|im_end|>\n",
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nthink<|im_end|>\n<|im_start|>user\nb<|im_end|>\n\
             <|im_start|>assistant\n<think>\n\n</think>\n\nfour<|im_end|>\n"
        ]
    );
    let learned: Vec<Vec<String>> = renderings.iter().map(learned).collect();
    assert_eq!(
        learned,
        [["\n</think>\n\nthink<|im_end|>"], ["\n</think>\n\nfour<|im_end|>"]],
        "what the prompt gives (<think>) is not learned"
    );
    assert_eq!(render(FORGETFUL, &chat(&turns), LossOn::Completion).unwrap(), renderings[1..]);
    // An answer of nothing, in a template that ends turns by nothing, is no error.
    let bare = "{% for m in messages %}{{ m.content }}{% endfor %}";
    assert_eq!(supervised(bare, &chat(&[("user", "a"), ("assistant", "")]), LossOn::Assistant), [""]);
    // Here every text depends on how many follow.
    let countdown = "{% for m in messages %}{{ m.role[:1] * (messages|length - loop.index0) + m.content }}{% endfor %}";
    assert_eq!(
        render(countdown, &chat(&[("user", "x"), ("assistant", "y")]), LossOn::Assistant).unwrap()[0].text,
        "uuxay"
    );
    assert_eq!(render(countdown, &chat(&turns), LossOn::Assistant).unwrap().len(), 2);
}

#[test]
fn a_message_that_is_written_with_the_next_one_is_not_learned() {
    let source = "{% for m in messages[1:] %}[{{ m.role }}]{{ messages[0].content + ';' if loop.first }}{{ m.content }}\
        {% endfor %}{% if add_generation_prompt and messages|length > 1 %}[assistant]{% endif %}";
    let turns = [("system", "be brief"), ("assistant", "a"), ("user", "b"), ("assistant", "c")];
    assert_eq!(supervised(source, &chat(&turns), LossOn::Assistant), [";a", "c"]);
}

#[test]
fn loss_on_chooses_the_turns() {
    let turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];
    for source in [template("chatml"), unmarked(&template("chatml"))] {
        assert_eq!(supervised(&source, &chat(&turns), LossOn::Assistant), ["b<|im_end|>", "d<|im_end|>"]);
        assert_eq!(supervised(&source, &chat(&turns), LossOn::Completion), ["d<|im_end|>"]);
        let all = supervised(&source, &chat(&turns), LossOn::All);
        assert!(all.len() == 1 && all[0].starts_with("<|im_start|>system"));
        // The prompt of a prompt/completion row may hold assistant turns: they are not learned.
        let prompted = Conversation { first_supervised: 2, ..chat(&turns) };
        assert_eq!(supervised(&source, &prompted, LossOn::Assistant), ["d<|im_end|>"]);
    }
}

#[test]
fn bos_comes_once_and_the_turn_ends_supervised() {
    let row = json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]});
    let data = load_text("rows.jsonl", row.to_string()).unwrap();
    let bos = data.tokenizer.id("<s>").unwrap();
    let example = data.train.example(0).unwrap();
    assert_eq!(example.input_ids.iter().filter(|&&id| id == bos).count(), 1);
    assert_eq!(texts(&data, 0).1, "ho<|eot_id|>");
    assert_eq!(*example.labels.last().unwrap(), data.tokenizer.id("<|eot_id|>").unwrap() as i32);
    let stops: Vec<String> = data.stop_ids().unwrap().into_iter().filter_map(|id| data.tokenizer.token(id)).collect();
    assert_eq!(stops, ["</s>", "<|eot_id|>"]);
    let (prompt, answer) = data.train.prompt(0).unwrap();
    assert!(data.tokenizer.decode(&prompt, false).unwrap().ends_with("assistant<|end_header_id|>\n\n"));
    assert_eq!(data.tokenizer.decode(&answer, false).unwrap(), "ho<|eot_id|>");
}

#[test]
fn a_pad_token_that_is_eos_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    std::fs::write(&rows, "{\"text\": \"a </s> b\"}\n{\"user\": \"a</s>\", \"assistant\": \"b</s>\"}\n").unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden("tokenizer_bpe_gpt2").join(file), folder.path().join(file)).unwrap();
    }
    let load =
        || tunesmith::data::load(&config(&rows), folder.path(), 1000.into(), &tunesmith::data::Silent, None).unwrap();
    let before = load();
    let path = folder.path().join("tokenizer_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut settings: Value = serde_json::from_str(&text).unwrap();
    settings["pad_token"] = json!("</s>");
    std::fs::write(&path, settings.to_string()).unwrap();
    assert_eq!(examples(&load().train), examples(&before.train));
    assert_eq!(texts(&before, 0).1, "a </s> b</s>".replacen('a', "", 0), "every EOS is learned");
    assert_eq!(texts(&before, 1).1, "b</s><|im_end|>");
}

#[test]
fn rows_without_labels_are_counted_and_a_set_without_any_is_refused() {
    let good = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#;
    let bad = r#"{"messages": [{"role": "user", "content": "q"}]}"#;
    let data = load_text("rows.jsonl", format!("{good}\n{bad}\n{good}\n{bad}\n")).unwrap();
    assert_eq!((data.train.len(), data.report.train.unlabeled), (2, 2));
    assert!(data.report.train.unlabeled_places[0].ends_with("rows.jsonl:2"));
    assert!(data.report.warnings[0].contains("2 of 4 rows left out without labels"), "{:?}", data.report.warnings);
    assert_refused(
        load_text("rows.jsonl", format!("{bad}\n{bad}\n")),
        &["no row can be used, of 2 train rows", "no token carries"],
    );
    assert_refused(
        load_text("rows.jsonl", "{\"input_ids\": [1, 2], \"labels\": [1, -100]}"),
        &["no row can be used, of 1"],
    );
}

#[test]
fn a_template_that_ends_turns_with_no_token_of_the_model_is_warned_of() {
    use tunesmith::config::BuiltinTemplate::{Chatml, Gemma, Llama3};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    let row = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#;
    std::fs::write(&path, row).unwrap();
    // Its tokenizer has the tokens of ChatML alone.
    let model = crate::parity::root().join("examples/quickstart/model");
    let warnings = |template| {
        let mut config = config(&path);
        config.data.chat_template = Some(template);
        tunesmith::data::load(&config, &model, 1024.into(), &tunesmith::data::Silent, None).unwrap().report.warnings
    };
    assert!(warnings(Chatml).is_empty(), "{:?}", warnings(Chatml));
    for (template, end, tokens) in [
        (Llama3, "<|eot_id|>", r#"["<|end_header_id|>", "<|eot_id|>", "<|start_header_id|>"]"#),
        (Gemma, "<end_of_turn>", r#"["<end_of_turn>", "<start_of_turn>"]"#),
    ] {
        let warnings = warnings(template).join("\n");
        for part in [&format!("ends a turn with {end}, which"), &format!("tuning.new_tokens: {tokens}")] {
            assert!(warnings.contains(part), "{warnings}");
        }
    }
}

#[test]
fn rows_that_are_too_long_are_cut_or_left_out_and_counted() {
    use tunesmith::config::Truncation;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    std::fs::write(&path, "{\"input_ids\": [1, 2, 3, 4, 5]}\n{\"input_ids\": [6, 7, 8]}\n").unwrap();
    let mut config = config(&path);
    config.model.max_seq_len = 3;
    let mut cut = |truncation| {
        config.data.truncation = truncation;
        let data = load_with(&config).unwrap();
        let counts = &data.report.train;
        (data.train.example(0).unwrap().input_ids, counts.truncated, counts.too_long, data.report.warnings.len())
    };
    assert_eq!(cut(Truncation::Right), (vec![1, 2, 3], 1, 0, 1));
    assert_eq!(cut(Truncation::Left), (vec![3, 4, 5], 1, 0, 1));
    assert_eq!(cut(Truncation::Drop), (vec![6, 7, 8], 0, 1, 1));

    // Cutting the answer off leaves nothing to learn.
    let row = json!({"user": "a long question indeed", "assistant": "yes"}).to_string();
    std::fs::write(&path, row).unwrap();
    config.data.truncation = Truncation::Right;
    assert_refused(load_with(&config), &["lost to data.truncation=right", "raise model.max_seq_len"]);
}

#[test]
fn a_conversation_needs_a_template() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden("tokenizer_bpe_gpt2/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let rows = folder.path().join("rows.jsonl");
    std::fs::write(&rows, "{\"user\": \"q\", \"assistant\": \"a\"}\n").unwrap();
    let load = |config: &_| tunesmith::data::load(config, folder.path(), 1000.into(), &tunesmith::data::Silent, None);
    assert_refused(load(&config(&rows)), &["no chat template", "data.chat_template"]);
    let mut config = config(&rows);
    config.data.template_path = Some(folder.path().join("own.jinja"));
    assert_refused(load(&config), &["own.jinja"]);
    std::fs::write(folder.path().join("own.jinja"), "{% for m in messages %}{{ m.content }}|{% endfor %").unwrap();
    assert_refused(load(&config), &["own.jinja:1"]);
    std::fs::write(folder.path().join("own.jinja"), "{% for m in messages %}{{ m.content }}|{% endfor %}").unwrap();
    assert_eq!(
        texts(&load(&config).unwrap(), 0),
        ("q|a|".into(), "a|".into()),
        "without special tokens the rest of the turn"
    );
    std::fs::write(&rows, "{\"text\": \"t\"}\n").unwrap();
    assert_refused(load(&config), &["eos_token"]);
}

#[test]
fn named_templates_of_the_tokenizer_are_chosen_by_name() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden("tokenizer_bpe_gpt2/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let find = |chat_template: Value| {
        let settings = json!({"chat_template": chat_template, "eos_token": {"content": "</s>"}});
        std::fs::write(folder.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
        let tokenizer = tunesmith::data::Tokenizer::load(folder.path()).unwrap();
        assert_eq!(tokenizer.eos_id(), tokenizer.id("</s>"));
        ChatTemplate::find(folder.path(), &tokenizer, None, None).map(|found| found.unwrap().source().to_owned())
    };
    let named = json!([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]);
    assert_eq!(find(named).unwrap(), "d");
    assert_eq!(find(json!("s")).unwrap(), "s");
    let error = find(json!([{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}])).unwrap_err();
    assert!(error.message().contains("[rag, tool_use]"), "{error}");
    // Of a multimodal model's processor, which is what Transformers asks for images.
    std::fs::write(folder.path().join("chat_template.json"), json!({"chat_template": "p"}).to_string()).unwrap();
    assert_eq!(find(json!("s")).unwrap(), "p", "the processor's comes before tokenizer_config.json");
    std::fs::write(folder.path().join("chat_template.jinja"), "file").unwrap();
    assert_eq!(find(json!("s")).unwrap(), "file", "the file comes before both");
}

/// Texts with what might confuse a mask: special tokens, Jinja, blank space, other scripts.
fn any_text() -> impl Strategy<Value = String> {
    let pieces =
        ["<|im_end|>", "<|im_start|>", "</s>", "assistant", "\n", " ", "{{ x }}", "漢", "🙂", "e\u{301}", "a", "7"];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..8).prop_map(|pieces| pieces.concat())
}

#[test]
fn an_empty_span_teaches_nothing() {
    let tokenizer = tokenizer("bpe_llama3");
    let encoded = tokenizer.encode("Shimore", false).unwrap();
    let straddled = encoded.offsets.iter().position(|(start, end)| end - start > 1).unwrap();
    let middle = encoded.offsets[straddled].0 + 1;
    let example = encode::labeled(encoded, std::slice::from_ref(&(middle..middle)));
    assert!(example.labels.iter().all(|&label| label == IGNORE), "{:?}", example.labels);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Under ChatML the supervised text is each assistant's text with the end of its turn, by either way of finding it.
    #[test]
    fn supervised_text_is_what_the_assistant_says(turns in prop::collection::vec((any_text(), any_text()), 1..4)) {
        let turns: Vec<(&str, &str)> =
            turns.iter().flat_map(|(user, assistant)| [("user", user.as_str()), ("assistant", assistant)]).collect();
        let answers = turns.iter().filter(|(role, _)| *role == "assistant");
        let expected: Vec<String> = answers.map(|(_, text)| format!("{text}<|im_end|>")).collect();
        for source in [template("chatml"), unmarked(&template("chatml"))] {
            prop_assert_eq!(supervised(&source, &chat(&turns), LossOn::Assistant), expected.clone());
            // The same of the tokens; only a token that straddles the start may bring something along.
            let tokenizer = tokenizer("bpe_llama3");
            let rendered = render(&source, &chat(&turns), LossOn::Assistant).unwrap().remove(0);
            let example = encode::labeled(tokenizer.encode(&rendered.text, false).unwrap(), &rendered.spans);
            let learned: Vec<u32> =
                example.labels.iter().filter(|&&label| label != IGNORE).map(|&label| label as u32).collect();
            let learned = tokenizer.decode(&learned, false).unwrap();
            prop_assert_eq!(learned.replace('\n', ""), expected.concat().replace('\n', ""));
            prop_assert_eq!(tokenizer.decode(&example.input_ids, false).unwrap(), rendered.text);
        }
    }
}

#[test]
fn a_limit_that_stops_the_search_for_a_turn_is_reported_as_the_limit() {
    // Only the conversation as it is renders: every other version of it runs into a limit.
    let source = "{% if add_generation_prompt or messages|length == 1 or messages[-1].content != 'good' or messages[0].content != 'so' %}\
        {{ range(10 ** 18) }}{% endif %}{% for m in messages %}{{ m.content }};{% endfor %}";
    let error = render(source, &chat(&[("user", "so"), ("assistant", "good")]), LossOn::Assistant).unwrap_err();
    assert_eq!(error.kind(), tunesmith::Kind::Model, "{error}");
    assert!(!error.message().contains("does not show where"), "{error}");
}
