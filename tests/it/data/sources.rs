//! Every form of row, from every kind of file.
use super::{assert_refused, config, load_text, load_with, texts};

/// The text of the first row under ChatML (the larger golden tokenizer's template is Llama 3's).
fn chatml(name: &str, content: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    let mut config = config(&path);
    config.data.chat_template = Some(tunesmith::config::BuiltinTemplate::Chatml);
    texts(&load_with(&config).unwrap(), 0).0
}

#[test]
fn every_form_of_row_becomes_the_same_chat() {
    let user_assistant = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n";
    let with_system = format!("<|im_start|>system\ns<|im_end|>\n{user_assistant}");
    let rows = [
        (r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#, user_assistant),
        (r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#, user_assistant),
        (
            r#"{"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
            user_assistant,
        ),
        (r#"{"instruction": "q", "input": "", "output": "a"}"#, user_assistant),
        (r#"{"instruction": "q", "input": null, "response": "a", "id": 3}"#, user_assistant),
        (r#"{"history": [], "instruction": "q", "input": "", "output": "a"}"#, user_assistant),
        (
            r#"{"system": "s", "history": [["q", "a"]], "instruction": "q", "output": "a"}"#,
            &(with_system.clone() + user_assistant),
        ),
        (r#"{"question": "q", "answer": "a"}"#, user_assistant),
        (r#"{"prompt": "q", "response": "a"}"#, user_assistant),
        (r#"{"input": "q", "target": "a"}"#, user_assistant),
        (r#"{"system": "s", "user": "q", "assistant": "a"}"#, &with_system),
        (r#"{"system": "s", "query": "q", "output": "a"}"#, &with_system),
        (
            r#"{"system": "s", "conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]}"#,
            &with_system,
        ),
        (
            r#"{"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}"#,
            user_assistant,
        ),
    ];
    for (row, expected) in rows {
        assert_eq!(chatml("rows.jsonl", row), expected, "{row}");
        assert_eq!(chatml("rows.json", &format!("[\n{row}\n]")), expected, "{row}");
        assert_eq!(chatml("rows.json", &format!("{{\"data\": [{row}], \"version\": 1}}")), expected, "{row}");
        assert_eq!(chatml("rows.json", &format!("{row}\n{row}\n")), expected, "JSON Lines by another name");
        assert_eq!(chatml("rows.jsonl", &format!("\u{feff}{row}\r\n\r\n")), expected, "BOM and Windows line ends");
    }
    assert_eq!(chatml("rows.csv", "\u{feff}system,user,assistant\ns,q,a\n"), with_system);
    assert_eq!(chatml("rows.tsv", "question\tanswer\nq\ta\n"), user_assistant);
    let quoted = chatml("rows.csv", "instruction,input,output\n\"Sort, please.\",\"b\na\",a b\n");
    assert_eq!(quoted, "<|im_start|>user\nSort, please.\n\nb\na<|im_end|>\n<|im_start|>assistant\na b<|im_end|>\n");
}

#[test]
fn plain_text_ends_with_eos_and_a_prompt_carries_no_loss() {
    let data = load_text("rows.jsonl", r#"{"prompt": "2 + 2 =", "completion": " 4"}"#).unwrap();
    assert_eq!(texts(&data, 0), ("<s>2 + 2 = 4</s>".into(), " 4</s>".into()));
    let data = load_text("rows.jsonl", r#"{"text": "once upon"}"#).unwrap();
    // The first token is not predicted, whatever its label.
    assert_eq!(texts(&data, 0), ("<s>once upon</s>".into(), "once upon</s>".into()));
    let data = load_text("rows.jsonl", r#"{"text": "once upon</s>"}"#).unwrap();
    assert_eq!(texts(&data, 0).0, "<s>once upon</s>", "no second EOS");
}

#[test]
fn tokenized_rows_are_taken_as_they_are() {
    let rows = "{\"input_ids\": [5, 6, 7], \"labels\": [-100, 6, 9]}\n{\"input_ids\": [5, 6, 7], \"attention_mask\": [1, 1, 1]}\n";
    let data = load_text("rows.jsonl", rows).unwrap();
    let examples = super::examples(&data.train);
    assert_eq!((&*examples[0].input_ids, &*examples[0].labels), (&[5, 6, 7][..], &[-100, 6, 9][..]));
    assert_eq!(examples[1].labels, [5, 6, 7]);
    let beyond = load_text("rows.jsonl", "{\"input_ids\": [5, 1000]}");
    assert_refused(beyond, &["rows.jsonl:1", "vocabulary mismatch", "1000"]);
    assert_refused(load_text("rows.jsonl", "{\"input_ids\": [5, 6], \"labels\": [5, 1000]}"), &["vocabulary mismatch"]);
}

#[test]
fn a_file_keeps_the_forms_that_its_first_rows_show() {
    let mixed = std::fs::read_to_string(super::golden("synthetic_200.jsonl")).unwrap();
    let data = load_text("rows.jsonl", &mixed).unwrap();
    assert_eq!((data.train.len(), data.report.train.rows), (200, 200));

    let question = "{\"question\": \"q\", \"answer\": \"a\"}\n".repeat(100);
    let late = load_text("rows.jsonl", format!("{question}{{\"text\": \"t\"}}\n"));
    assert_refused(late, &["rows.jsonl:101", "[text]", "instruction"]);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    std::fs::write(&path, "{\"prompt\": \"p\", \"completion\": \"c\", \"text\": \"t\"}\n").unwrap();
    let mut config = config(&path);
    config.data.format = tunesmith::config::Format::Text;
    assert_eq!(texts(&load_with(&config).unwrap(), 0).0, "<s>t</s>", "a format that is set is kept");
    config.data.format = tunesmith::config::Format::Messages;
    assert_refused(load_with(&config), &["rows.jsonl:1", "[prompt, completion, text]", "messages"]);
}

#[test]
fn several_files_are_read_in_order_up_to_max_rows() {
    let folder = tempfile::tempdir().unwrap();
    let mut paths = Vec::new();
    for (name, rows) in [("a.jsonl", 3), ("b.jsonl", 4)] {
        let path = folder.path().join(name);
        let lines: Vec<String> = (0..rows).map(|row| format!("{{\"text\": \"{name} {row}\"}}")).collect();
        let text = lines.join("\n");
        std::fs::write(&path, text).unwrap();
        paths.push(path);
    }
    let mut config = config(&paths[0]);
    config.data.train_path = paths;
    config.data.max_rows = Some(5);
    let data = load_with(&config).unwrap();
    assert_eq!(data.train.len(), 5);
    assert_eq!((texts(&data, 2).0.as_str(), texts(&data, 3).0.as_str()), ("<s>a.jsonl 2</s>", "<s>b.jsonl 0</s>"));
}

#[test]
fn refusals_of_files_name_one_place_and_fit_the_form() {
    let broken = load_text("rows.jsonl", "{\"text\": \"a\"}\n{\"text\": }\n").unwrap_err().to_string();
    assert!(broken.contains("rows.jsonl:2: malformed JSON at column 10: expected value"), "{broken}");
    assert!(!broken.contains("at line"), "{broken}");
    let cut = load_text("rows.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"\n").unwrap_err().to_string();
    assert!(cut.contains("rows.jsonl:2: malformed JSON at column 12: EOF"), "{cut}");
    let ragged = load_text("rows.csv", "question,answer\nq,a\nq,a,b\n").unwrap_err().to_string();
    assert!(ragged.contains("rows.csv:3: malformed CSV: found 3 fields, expected 2"), "{ragged}");

    let semicolons = load_text("rows.csv", "question;answer\nq;a\n").unwrap_err();
    assert!(semicolons.message().contains("rows.csv:1: semicolons separate the cells"), "{semicolons}");
    assert!(semicolons.hint_text().is_some_and(|hint| hint.contains("commas")), "{semicolons}");

    let plain = load_text("rows.txt", "once upon a time\n").unwrap_err();
    assert!(plain.hint_text().is_some_and(|hint| hint.contains("{\"text\": …}")), "{plain:?}");
    let unlabeled = load_text("rows.jsonl", r#"{"input_ids": [5, 6], "labels": [-100, -100]}"#).unwrap_err();
    assert!(unlabeled.hint_text().is_some_and(|hint| hint.contains("-100")), "{unlabeled:?}");

    assert_refused(load_with(&config(std::path::Path::new("/nowhere/rows.jsonl"))), &["data.train_path", "/nowhere"]);
    let silent = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant"}]}"#;
    assert_refused(load_text("rows.jsonl", silent), &["rows.jsonl:1", "message 2", "\"content\" is missing"]);
    let null = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null}]}"#;
    assert_refused(load_text("rows.jsonl", null), &["rows.jsonl:1", "message 2", "\"content\" is null"]);
}

#[test]
fn plain_rows_do_not_count_as_templated() {
    assert!(!load_text("rows.jsonl", r#"{"text": "once upon"}"#).unwrap().report.templated);
    assert!(load_text("rows.jsonl", r#"{"question": "q", "answer": "a"}"#).unwrap().report.templated);
}

#[test]
fn every_format_and_form_stands_in_the_document() {
    use tunesmith::registry::{COMPRESSED, EXTENSIONS};
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/data.md")).unwrap();
    for extension in EXTENSIONS.iter().copied().flatten() {
        assert!(text.contains(&format!("`.{extension}`")), ".{extension} is missing in docs/data.md");
    }
    assert!(COMPRESSED.iter().filter(|extension| text.contains(&format!("`.{extension}`"))).count() > 1);
    for form in tunesmith::config::Format::WORDS.iter().filter(|word| **word != "auto") {
        assert!(text.contains(&format!("| `{form}` |")), "{form} is missing in docs/data.md");
    }
}
