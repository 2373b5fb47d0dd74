//! Property tests of every chat template with any conversation: each assistant turn gets labels once, as a whole and as it was
//! written, and no other text does.
use proptest::prelude::*;
use serde_json::{Value, json};
use tunesmith::config::{LossOn, Truncation};
use tunesmith::data::row::{Conversation, Form, Row};
use tunesmith::data::{ChatTemplate, Dataset, Sampler, SamplerOptions, Split, mask};

use super::{config, examples, load_with, texts, tokenizer};

/// Special tokens of all these templates.
const SPECIAL: &str = "<s> </s> <|im_start|> <|im_end|> <|im_sep|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|start|> <|end|> \
    <|message|> <|channel|> <|return|> <|call|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> \
    <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> <|START_ACTION|> <|END_ACTION|> <|START_THINKING|> <|END_THINKING|> \
    <|START_TOOL_RESULT|> <|END_TOOL_RESULT|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_call_begin|> \
    <|tool_call_end|> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|call_end|> [gMASK] <sop> <|user|> <|assistant|> <|system|> \
    <|observation|> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12> <｜end▁of▁sentence｜> <|tool_call_start|> <|tool_list_start|> [INST] [/INST] \
    [TOOL_CALLS] <|turn> <turn|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|think|> \
    <|open|> <|close|> <|sep|> <|end_of_msg|> <|endoftext|> <|/tool_call|> <|tool_call|> <|start_of_role|> <|end_of_role|> <|end_of_text|>";

/// Templates: the folder, the name, what ends a turn (nothing: it has no end), whether they know tools and thoughts.
const TEMPLATES: &[(&str, &str, &[&str], bool)] = &[
    ("c3", "apriel", &["<|end|>"], true),
    ("c3", "closed_once", &["</s>"], true),
    ("c3", "cohere2", &["<|END_OF_TURN_TOKEN|>"], true),
    ("c3", "command_r7b", &["<|END_OF_TURN_TOKEN|>"], true),
    ("c3", "deepseek_v31", &["<｜end▁of▁sentence｜>"], true),
    ("c3", "gemma4", &["<turn|>", "<tool_call|>"], true),
    ("c3", "glm45", &["<|user|>", "<|observation|>"], true),
    ("c3", "gpt_oss", &["<|return|>", "<|call|>"], true),
    ("c3", "granite", &["<|end_of_text|>"], true),
    ("c3", "hermes", &["<|im_end|>"], true),
    ("c3", "kimi_k2", &["<|im_end|>"], true),
    ("c3", "kimi_k3", &["<|end_of_msg|>"], true),
    ("c3", "lfm2", &["<|im_end|>"], true),
    ("c3", "llama2", &["</s>"], true),
    ("c3", "mistral_v3", &["</s>"], true),
    ("c3", "msg_end", &["[msg_end]"], true),
    ("c3", "nemotron", &["<SPECIAL_12>"], true),
    ("c3", "olmo2", &["</s>"], true),
    ("c3", "phi4", &["<|im_end|>"], true),
    ("c3", "phi4_mini", &["<|end|>"], true),
    ("c3", "qwen3_2507", &["<|im_end|>"], true),
    ("c3", "r1_distill", &["<｜end▁of▁sentence｜>"], true),
    ("c3", "r1_last", &["<｜end▁of▁sentence｜>"], true),
    ("c3", "smollm3", &["<|im_end|>"], true),
    ("c3", "vicuna", &["</s>"], true),
    ("c3", "zephyr", &["</s>"], true),
    ("c2", "qwen3", &["<|im_end|>"], true),
    ("c2", "llama31", &["<|eot_id|>"], true),
    ("c2", "deepseek_r1", &["<|im_end|>"], true),
    ("c", "template_chatml", &["<|im_end|>"], false),
    ("c", "template_llama3", &["<|eot_id|>"], false),
    ("c", "template_phi3", &["<|end|>"], false),
];

fn source(folder: &str, name: &str) -> String {
    let path = super::golden("..").join(folder).join(format!("{name}.jinja"));
    let source = std::fs::read_to_string(path).unwrap();
    // Without the marks that some have: what they say is held against Transformers elsewhere.
    let tags = regex::Regex::new(r"\{%-?\s*(end)?generation\s*-?%\}").unwrap();
    tags.replace_all(&source, |tag: &regex::Captures<'_>| {
        let (open, close) = (tag[0].starts_with("{%-"), tag[0].ends_with("-%}"));
        format!("{{#{}{}#}}", if open { "-" } else { "" }, if close { " -" } else { "" })
    })
    .into_owned()
}

fn compile(folder: &str, name: &str) -> ChatTemplate {
    ChatTemplate::compile(&source(folder, name), name, &tokenizer("bpe_llama3")).unwrap()
}

fn special() -> Vec<String> {
    SPECIAL.split_whitespace().map(str::to_owned).collect()
}

/// Few words, so that messages are often equal, begin, end or hold each other, or look like turns.
fn any_text() -> impl Strategy<Value = String> {
    let pieces = [
        "yes",
        "d",
        "assistant",
        " ",
        "\n",
        "<|im_start|>user\nd",
        "<|im_end|>\n",
        "</s>",
        "<|end|>",
        "漢字",
        "ï",
        "🙂",
        "\"7\"",
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..4).prop_map(|pieces| pieces.concat())
}

/// An answer of words, thought about or not, or after calls.
fn any_exchange() -> impl Strategy<Value = Vec<Value>> {
    let call = (any_text(), any_text(), any_text(), 1..3usize);
    (any_text(), prop::collection::vec(call, 0..3), any_text(), 0..4usize, any_text()).prop_map(
        |(question, calls, answer, thinks, thought)| {
            let mut messages = vec![json!({"role": "user", "content": question})];
            for (words, argument, result, results) in calls {
                // Some templates write no thought beside a call, or one call alone.
                let call = json!({"id": "call00000", "type": "function",
                    "function": {"name": "look", "arguments": {"at": argument, "n": 0}}});
                messages.push(json!({"role": "assistant", "content": words, "tool_calls": [call]}));
                let result = json!({"role": "tool", "name": "look", "tool_call_id": "call00000", "content": result});
                messages.extend(vec![result; results]);
            }
            messages.push(match thinks {
                0 => json!({"role": "assistant", "content": answer, "reasoning_content": format!("so {thought}")}),
                1 => json!({"role": "assistant", "content": format!("<think>\nso {thought}\n</think>\n\n{answer}")}),
                _ => json!({"role": "assistant", "content": answer}),
            });
            messages
        },
    )
}

fn any_conversation(knows_tools: bool) -> impl Strategy<Value = Value> {
    let system = prop::option::of(any_text().prop_map(|text| json!({"role": "system", "content": format!("s{text}")})));
    (system, prop::collection::vec(any_exchange(), 1..4), any::<bool>(), any::<bool>()).prop_map(
        move |(system, exchanges, tools, asks)| {
            let mut messages: Vec<Value> = system.into_iter().chain(exchanges.into_iter().flatten()).collect();
            if !knows_tools {
                messages.retain(|message| message["role"] != "tool" && message.get("tool_calls").is_none());
            }
            if asks {
                messages.push(json!({"role": "user", "content": "more?"}));
            }
            let look = json!({"type": "function", "function": {"name": "look", "description": "looks",
                "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}});
            if tools && knows_tools {
                json!({"messages": messages, "tools": [look]})
            } else {
                json!({ "messages": messages })
            }
        },
    )
}

fn conversation(row: &Value) -> Conversation {
    match Row::parse(row.clone(), &[Form::Messages]).unwrap() {
        Row::Chat(conversation) => conversation,
        other => panic!("{other:?}"),
    }
}

/// The text with each letter replaced by a sign of the same size that nothing else has; tags of thoughts stay.
fn hidden(text: &str) -> String {
    let sign = |letter: char| match letter.len_utf8() {
        1 if letter.is_ascii_alphanumeric() => '~',
        1 => letter,
        2 => 'Ø',
        3 => '※',
        _ => '𝄞',
    };
    let parts = text.split_inclusive("think>").map(|part| match part.strip_suffix("think>") {
        Some(before) => before.chars().map(sign).collect::<String>() + "think>",
        None => part.chars().map(sign).collect(),
    });
    parts.collect()
}

const SIGNS: [char; 4] = ['~', 'Ø', '※', '𝄞'];

/// The message with its words hidden.
fn hide(message: &mut Value) {
    for field in ["content", "reasoning_content"] {
        if let Some(text) = message[field].as_str().map(hidden) {
            message[field] = text.into();
        }
    }
    if let Some(text) = message["tool_calls"][0]["function"]["arguments"]["at"].as_str().map(hidden) {
        message["tool_calls"][0]["function"]["arguments"]["at"] = text.into();
    }
}

fn first(conversation: &Conversation, count: usize) -> Conversation {
    Conversation { messages: conversation.messages[..count].to_vec(), ..conversation.clone() }
}

fn check(name: &str, template: &ChatTemplate, ends: &[&str], row: &Value) -> Result<(), TestCaseError> {
    let conversation = conversation(row);
    let render = |conversation: &Conversation| template.render(conversation, false).map(|rendered| rendered.text);
    let full = render(&conversation).unwrap();
    let renderings = mask::render(template, &conversation, LossOn::Assistant, &special())
        .map_err(|error| TestCaseError::fail(format!("{name}: {error}")))?;
    let assistants: Vec<usize> =
        (0..conversation.messages.len()).filter(|&index| conversation.messages[index]["role"] == "assistant").collect();
    let spans: Vec<_> =
        renderings.iter().flat_map(|one| one.spans.iter().map(move |span| (one, span.clone()))).collect();
    prop_assert_eq!(spans.len(), assistants.len(), "{}: a span for each turn of {}", name, row);
    let mut rewrites = false;
    for (&index, (rendered, span)) in assistants.iter().zip(&spans) {
        let text = &rendered.text;
        let learned = &text[span.clone()];
        let label = format!("{name}, message {}: {learned:?} of {text:?}", index + 1);
        // As it was written, behind what the model is given. The token of the next role may end it.
        let through = render(&first(&conversation, index + 1)).unwrap();
        let borrowed = ends.iter().find(|end| !through.contains(&text[..span.end]) && learned.ends_with(**end));
        let end = span.end - borrowed.map_or(0, |end| end.len());
        prop_assert!(borrowed.is_none() || name == "glm45", "{} is not what it was: {:?}", label, through);
        prop_assert!(through.starts_with(&text[..end]), "{} is not what it was: {:?}", label, through);
        rewrites |= !full.starts_with(&text[..end]);
        let prompt = template.render(&first(&conversation, index), true).unwrap().text;
        if through.starts_with(&prompt) {
            prop_assert_eq!(span.start, prompt.len(), "{}", label);
        }
        // The header that the prompt ends with is not.
        let before = render(&first(&conversation, index)).unwrap();
        if let Some(header) = prompt.strip_prefix(&before).map(str::trim).filter(|header| !header.is_empty()) {
            let behind = text[..span.start].trim_end().ends_with(header);
            prop_assert!(behind || !learned.contains(header), "{} holds {:?}", label, header);
        }
        // The end is learned.
        let ended = ends.is_empty() || ends.iter().any(|end| learned.ends_with(end));
        prop_assert!(ended, "{} does not end with {:?}", label, ends);
        // Which messages this rendering has.
        let count = (index + 1..=conversation.messages.len())
            .find(|&count| {
                let rendered = render(&first(&conversation, count));
                let ended = |one: &str| name == "glm45" && ends.iter().any(|end| text.strip_suffix(end) == Some(one));
                rendered.is_ok_and(|one| one == *text || ended(&one))
            })
            .ok_or_else(|| TestCaseError::fail(format!("{label}: not a rendering of its first messages")))?;
        let text = &text[..render(&first(&conversation, count)).unwrap().len()];
        let span = span.start..span.end.min(text.len());
        // Nobody else's words are learned.
        let mut others = first(&conversation, count);
        others.messages.iter_mut().filter(|message| message["role"] != "assistant").for_each(hide);
        let others = render(&others).unwrap();
        prop_assert_eq!(others.len(), text.len(), "{}", label);
        let theirs = others.get(span.clone()).map(|learned| learned.contains(SIGNS));
        prop_assert_eq!(theirs, Some(false), "{} has words of another role", label);
        // All of the turn's are, and none of another turn's.
        for &turn in assistants.iter().filter(|&&turn| turn < count) {
            let mut one = first(&conversation, count);
            hide(&mut one.messages[turn]);
            let one = render(&one).unwrap();
            prop_assert_eq!(one.len(), text.len(), "{}", label);
            let inside = |(at, _): (usize, &str)| span.contains(&at) == (turn == index);
            prop_assert!(one.match_indices(SIGNS).all(inside), "{} is not the turn: {:?}", label, one);
        }
    }
    if !rewrites {
        let texts: Vec<&str> = renderings.iter().map(|one| one.text.as_str()).collect();
        let one = texts.len() == 1 && (texts[0] == full || (name == "glm45" && texts[0].starts_with(&full)));
        prop_assert!(one, "{} rewrites nothing: one rendering, not {:?}", name, texts);
    }
    Ok(())
}

#[test]
fn every_turn_is_learned_as_it_was_written_and_nothing_else() {
    for &(folder, name, ends, tools) in TEMPLATES {
        let template = compile(folder, name);
        let options = ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() };
        let mut runner = proptest::test_runner::TestRunner::new(options);
        let outcome = runner.run(&any_conversation(tools), |row| check(name, &template, ends, &row));
        outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn a_turn_begins_behind_its_header_however_the_text_before_it_is_rewritten() {
    let user = |text: &str| json!({"role": "user", "content": text});
    let call = json!([{"type": "function", "function": {"name": "look", "arguments": {}}}]);
    let called = json!({"role": "assistant", "content": "", "thinking": "hm", "tool_calls": call});
    let result = json!({"role": "tool", "name": "look", "content": "found"});
    let answer = json!({"role": "assistant", "content": "done", "thinking": "so"});
    let tools = json!({"messages": [user("q"), called, result, answer]});
    let thought =
        |text: &str, thought: &str| json!({"role": "assistant", "content": text, "reasoning_content": thought});
    let mut looks = thought("", "hm");
    looks["tool_calls"] = json!([{"type": "function", "function": {"name": "look", "arguments": {}}}]);
    let found = json!({"role": "tool", "name": "look", "content": "found"});
    let thought =
        json!({"messages": [user("q"), looks, found, thought("done", "so"), user("r"), thought("again", "yes")]});
    let twice = json!({"messages": [user("q"), {"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]});
    let analysis = "<|channel|>analysis<|message|>";
    let call = "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>";
    for (folder, name, row, expected) in [
        // The end of a tool's result is written differently when it is the last message.
        (
            "c3",
            "hermes",
            &tools,
            vec!["<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call><|im_end|>", "done<|im_end|>"],
        ),
        // The thought before the call goes when the answer comes.
        (
            "c3",
            "gpt_oss",
            &tools,
            vec![
                &*format!("{analysis}hm<|end|>{call}"),
                &*format!("{analysis}so<|end|><|start|>assistant<|channel|>final<|message|>done<|return|>"),
            ],
        ),
        // A thought stays while its answer is the last, and a turn goes on behind the result of its call.
        (
            "c3",
            "gemma4",
            &thought,
            vec![
                "<|channel>thought\nhm\n<channel|><|tool_call>call:look{}<tool_call|>",
                "<|channel>thought\nso\n<channel|>done<turn|>",
                "<|channel>thought\nyes\n<channel|>again<turn|>",
            ],
        ),
        // An empty thought belongs to the last turn alone.
        ("c2", "qwen3", &twice, vec!["<think>\n\n</think>\n\none<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]),
    ] {
        let renderings =
            mask::render(&compile(folder, name), &conversation(row), LossOn::Assistant, &special()).unwrap();
        let learned: Vec<&str> = renderings
            .iter()
            .flat_map(|one| one.spans.iter().map(|span| one.text[span.clone()].trim_end_matches('\n')))
            .collect();
        assert_eq!(learned, expected, "{name}: {renderings:?}");
    }
    // A footer that the last message alone has.
    let source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + ('\nA' if loop.last else '\nB') + '<|im_end|>\n' }}\
        {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let template = ChatTemplate::compile(source, "footer", &tokenizer("bpe_llama3")).unwrap();
    let row = json!({"messages": [user("q"), {"role": "assistant", "content": "one"}, user("r"), {"role": "assistant", "content": "two"}]});
    let renderings = mask::render(&template, &conversation(&row), LossOn::Assistant, &special()).unwrap();
    let learned = renderings.iter().flat_map(|one| one.spans.iter().map(|span| &one.text[span.clone()]));
    assert_eq!(learned.collect::<Vec<_>>(), ["one\nA<|im_end|>", "two\nA<|im_end|>"]);
}

/// Three turns, and one, under a template that keeps only the last turn's reasoning.
fn thoughtful(change: impl FnOnce(&mut tunesmith::config::Config)) -> Result<Dataset, tunesmith::Error> {
    let turn = |number: usize| {
        let answer = format!("<think>so {number}</think>because {number}");
        [
            json!({"role": "user", "content": format!("and now tell me why {number}?")}),
            json!({"role": "assistant", "content": answer}),
        ]
    };
    let long: Vec<Value> = (1..4).flat_map(turn).collect();
    let rows = [json!({"messages": long, "loss_weight": 0.5}), json!({"messages": turn(4)})];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    std::fs::write(&path, rows.map(|row| row.to_string()).join("\n")).unwrap();
    let mut config = config(&path);
    config.data.template_path = Some(super::golden("../c3/lfm2.jinja"));
    change(&mut config);
    load_with(&config)
}

fn learned(split: &Split, index: usize, data: &Dataset) -> Vec<String> {
    let text = |labels: &[i32]| {
        let ids: Vec<u32> = labels.iter().filter_map(|&label| u32::try_from(label).ok()).collect();
        data.tokenizer.decode(&ids, false).unwrap()
    };
    split.sequences(index).unwrap().0.iter().map(|example| text(&example.labels)).collect()
}

#[test]
fn a_row_of_several_renderings_counts_as_one_row() {
    let data = thoughtful(|_| ()).unwrap();
    assert_eq!(data.train.len(), 2);
    let end = "<|im_end|>";
    let all: Vec<String> = (1..4).map(|number| format!("<think>so {number}</think>because {number}{end}")).collect();
    assert_eq!(learned(&data.train, 0, &data), all, "each thought once");
    let sequences = data.train.sequences(0).unwrap().0;
    assert_eq!(data.train.length(0), sequences.iter().map(|one| one.input_ids.len()).sum::<usize>());
    let longest = sequences.iter().map(|one| one.input_ids.len()).max().unwrap();
    assert_eq!((data.train.longest_sequence(), data.train.lengths().len()), (longest, 2));

    // A step of one row has all its renderings, each a sequence of its own, with the row's weight.
    let batch = data.train.batch([0]).unwrap();
    assert_eq!(batch.cu_seqlens.len(), 4);
    assert_eq!(batch.label_tokens(), data.train.label_tokens() - data.train.batch([1]).unwrap().label_tokens());
    assert_eq!(batch.label_weight(), 0.5 * batch.label_tokens() as f64);
    let options =
        SamplerOptions { batch_size: 1, grad_accum: 1, seed: 1, shuffle: true, group_by_length: false, packing: None };
    let mut sampler = Sampler::new(&data.train.lengths(), options);
    assert_eq!((sampler.rows(), sampler.steps_per_epoch()), (2, 2));
    assert_eq!(sampler.next_step().concat().concat().len(), 1);
    // What is asked of it is its last question.
    let (prompt, answer) = data.train.prompt(0).unwrap();
    assert!(data.tokenizer.decode(&prompt, false).unwrap().ends_with("why 3?<|im_end|>\n<|im_start|>assistant\n"));
    assert_eq!(data.tokenizer.decode(&answer, false).unwrap(), all[2]);

    let turns = &data.report.train.turns;
    assert_eq!((turns.rows, turns.renderings, turns.longest), (1, 3, longest as u64));
    assert_eq!((turns.tokens, turns.tokens_once), (data.train.length(0) as u64, longest as u64));
    assert!(turns.summary().unwrap().starts_with("1 row in 3 renderings"), "{:?}", turns.summary());

    // Packing takes it as one row, a split as one row.
    let packed = thoughtful(|config| config.data.packing = true).unwrap();
    let mut config = tunesmith::config::Config::default();
    config.data.packing = true;
    assert_eq!(packed.sampler(&config).rows(), 1);
    let split = thoughtful(|config| config.data.split = 0.5).unwrap();
    assert_eq!((split.train.len(), split.validation.as_ref().map(Split::len)), (1, Some(1)));
}

#[test]
fn renderings_are_cut_one_by_one_and_limited_in_all() {
    let whole = thoughtful(|_| ()).unwrap();
    let lengths: Vec<usize> = whole.train.sequences(0).unwrap().0.iter().map(|one| one.input_ids.len()).collect();
    for truncation in [Truncation::Drop, Truncation::Right] {
        let cut = thoughtful(|config| {
            (config.data.truncation, config.model.max_seq_len) = (truncation, lengths[1]);
        });
        let cut = cut.unwrap();
        let found = cut.train.sequences(0).unwrap().0;
        // What is cut off the last rendering is all of its turn that is learned.
        assert_eq!(found[..2], whole.train.sequences(0).unwrap().0[..2], "{truncation}");
        assert_eq!(cut.report.train.truncated, 1, "{truncation}");
        assert!(found.iter().all(|one| one.input_ids.len() <= lengths[1]));
    }
    // What is cut off counts for no limit: the turns that are left are learned.
    let data =
        thoughtful(|config| (config.model.max_seq_len, config.data.max_turn_growth) = (lengths[0], 1.0)).unwrap();
    assert_eq!(learned(&data.train, 0, &data), learned(&whole.train, 0, &whole)[..1]);
    let all = lengths.iter().sum::<usize>() as f64 / lengths[2] as f64;
    let limited = |most: f64| thoughtful(|config| config.data.max_turn_growth = most).unwrap();
    assert_eq!(examples(&limited(all + 0.01).train), examples(&whole.train));
    for (most, kept) in [(all - 0.01, 2), (1.0, 1)] {
        let data = limited(most);
        assert_eq!(learned(&data.train, 0, &data), learned(&whole.train, 0, &whole)[3 - kept..], "the last turns stay");
        assert_eq!(data.report.train.turns.limited.rows, 1);
        let warnings = data.report.warnings.join("\n");
        assert!(
            warnings.contains("1 row whose first turns are not trained on: raise data.max_turn_growth"),
            "{warnings}"
        );
    }
}

#[test]
fn reasoning_that_no_template_writes_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    let answer = json!({"role": "assistant", "content": "4", "reasoning_content": "Two and two."});
    std::fs::write(&path, json!({"messages": [{"role": "user", "content": "2+2?"}, answer]}).to_string()).unwrap();
    let data = load_with(&config(&path)).unwrap();
    assert!(texts(&data, 0).1.starts_with('4'));
    assert!(
        data.report.warnings.join("\n").contains("reasoning, which the model does not see"),
        "{:?}",
        data.report.warnings
    );
}
