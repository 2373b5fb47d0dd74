//! The tokenizers of GGUF files: llama.cpp's name for the way they split text, and its tokens against tunesmith's.
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Content;
use serde_json::Value as Json;
use tunesmith::data::Tokenizer;

use crate::gguf::{export, golden, json, model};

fn stored() -> Json {
    json(&golden("gguf/splits.json"))
}

/// The tokenizer of a case of `splits.json`, changed by `change`.
fn tokenizer(stored: &Json, case: &Json, change: impl FnOnce(&mut Json)) -> String {
    let pieces = case["name"] == "gemma4";
    let mut json = stored["bases"][if pieces { "pieces" } else { "bytes" }].clone();
    json["pre_tokenizer"] = case["pre_tokenizer"].clone();
    json["model"]["ignore_merges"] = case["ignore_merges"].clone();
    if case["ignore_merges"] == true {
        let merges = json["model"]["merges"].as_array().unwrap().iter().enumerate();
        json["model"]["merges"] = merges.filter(|(at, _)| at % 3 != 0).map(|(_, merge)| merge.clone()).collect();
    }
    change(&mut json);
    json.to_string()
}

/// A model of the family with this tokenizer.
fn folder(root: &Path, family: &str, tokenizer: &str) -> PathBuf {
    let mut keys = vec![("vocab_size", 1400.into())];
    if family == "nemotron_h" {
        keys.push(("time_step_min", 0.001.into()));
    }
    // A family has several cases.
    let dir = model(&tempfile::tempdir_in(root).unwrap().keep(), family, &keys, true);
    fs::write(dir.join("tokenizer.json"), tokenizer).unwrap();
    dir
}

/// What the export says, and its header.
fn header(root: &Path, dir: &Path) -> (String, Content) {
    let file = root.join("m.gguf");
    let output = export(dir, &file);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let content = Content::read(&mut fs::File::open(&file).unwrap()).unwrap();
    fs::remove_file(file).unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), content)
}

/// `tokenizer.ggml.pre`; of pieces, `tokenizer.ggml.model`.
fn name(content: &Content) -> String {
    let key = |key: &str| content.metadata.get(&format!("tokenizer.ggml.{key}")).map(|name| name.to_string().unwrap());
    let model = key("model").unwrap();
    if model == "gpt2" { key("pre").unwrap() } else { model }.clone()
}

#[test]
fn published_tokenizers_get_their_names_and_llama_cpp_makes_their_tokens() {
    let (root, stored) = (tempfile::tempdir().unwrap(), stored());
    let texts: Vec<&str> = stored["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert_eq!(texts.len(), 120);
    for case in stored["cases"].as_array().unwrap() {
        let (family, wanted) = (case["family"].as_str().unwrap(), case["name"].as_str().unwrap());
        let dir = folder(root.path(), family, &tokenizer(&stored, case, |_| {}));
        let (said, content) = header(root.path(), &dir);
        assert_eq!(name(&content), wanted, "{family}");
        let approximate = ["gpt-4o", "minimax-m2", "tekken"].contains(&wanted);
        let remark = format!("llama.cpp's {wanted} splits words with combining marks");
        assert_eq!(said.contains(&remark), approximate, "{wanted}: {said}");
        assert!(!said.contains("splits text in its own way"), "{wanted} was found by trying: {said}");
        assert_eq!(case["fuzzed"] != 0, approximate, "{wanted}");
        let own = Tokenizer::load(&dir).unwrap();
        let differing = case["differing"].as_array().unwrap();
        for (at, (text, ids)) in texts.iter().zip(case["ids"].as_array().unwrap()).enumerate() {
            let tokens: Vec<u64> = own.encode(text, false).unwrap().ids.iter().map(|id| u64::from(*id)).collect();
            let theirs: Vec<u64> = ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
            assert_eq!(tokens != theirs, differing.contains(&at.into()), "{wanted}: {text:?}");
        }
    }
}

/// The case of this name.
fn case<'a>(stored: &'a Json, name: &str) -> &'a Json {
    stored["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).unwrap()
}

#[test]
fn words_that_no_merge_makes_decide_between_rules_that_differ_in_them_alone() {
    let (root, stored) = (tempfile::tempdir().unwrap(), stored());
    // The tokens are those of `llama-bpe` if words are taken whole, and those of `dbrx` otherwise.
    for (whole_words, wanted) in [(true, "llama-bpe"), (false, "dbrx")] {
        let changed = tokenizer(&stored, case(&stored, "llama-bpe"), |json| {
            json["model"]["ignore_merges"] = whole_words.into();
        });
        let (_, content) = header(root.path(), &folder(root.path(), "llama", &changed));
        assert_eq!(name(&content), wanted);
    }
    // Without such a word, llama.cpp's `tekken`, which takes words whole, has the tokens of both (a case of `splits.json`). With one,
    // no rule has those of a tokenizer that does not.
    let changed = tokenizer(&stored, case(&stored, "tekken"), |json| json["model"]["ignore_merges"] = false.into());
    let output = export(&folder(root.path(), "llama", &changed), &root.path().join("m.gguf"));
    assert_eq!(output.status.code(), Some(4), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_definition_that_drops_or_adds_text_is_not_taken_for_a_rule_of_llama_cpp() {
    let (root, stored) = (tempfile::tempdir().unwrap(), stored());
    let dbrx = case(&stored, "dbrx");
    let changes: [fn(&mut Json); 3] = [
        // Drops the matches.
        |json| json["pre_tokenizer"]["pretokenizers"][0]["invert"] = false.into(),
        |json| json["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true.into(),
        |json| json["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Contiguous".into(),
    ];
    for change in changes {
        let dir = folder(root.path(), "llama", &tokenizer(&stored, dbrx, change));
        let output = export(&dir, &root.path().join("m.gguf"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{said}");
        assert!(
            said.contains("llama.cpp has no name for this tokenizer") && said.contains("--pre-tokenizer"),
            "{said}"
        );
    }
}

#[test]
fn gemma_4_has_pieces_with_merges_if_none_crosses_a_line() {
    let (root, stored) = (tempfile::tempdir().unwrap(), stored());
    let gemma = case(&stored, "gemma4");
    let (_, content) = header(root.path(), &folder(root.path(), "gemma4_31b", &tokenizer(&stored, gemma, |_| {})));
    let text = |key: &str| &content.metadata[&format!("tokenizer.ggml.{key}")];
    let (tokens, kinds) = (text("tokens").to_vec().unwrap(), text("token_type").to_vec().unwrap());
    let kind = |token: &str| {
        let at = tokens.iter().position(|own| own.to_string().unwrap() == token).unwrap();
        kinds[at].to_i32().unwrap()
    };
    // Normal, unknown, hidden, shown though special, a byte.
    assert_eq!(["e", "<unk>", "<turn|>", "<|channel>", "<0x41>"].map(kind), [1, 2, 3, 4, 6]);
    assert!(!text("merges").to_vec().unwrap().is_empty());
    assert!(!text("add_space_prefix").to_bool().unwrap());
    assert!(!content.metadata.contains_key("tokenizer.ggml.scores"));
    // llama.cpp would not make a token of a line's end and the next line. Scores do.
    let crossing = tokenizer(&stored, gemma, |json| {
        let id = json["model"]["vocab"].as_object_mut().unwrap().remove("▁").unwrap();
        json["model"]["vocab"]["\na"] = id;
        let merges = json["model"]["merges"].as_array_mut().unwrap();
        merges.retain(|merge| !merge.to_string().contains('▁'));
        merges.push(serde_json::json!(["\n", "a"]));
    });
    let (_, content) = header(root.path(), &folder(root.path(), "gemma4_31b", &crossing));
    assert_eq!(name(&content), "llama");
    // Other families with such tokenizers have scores.
    let same = tokenizer(&stored, gemma, |_| {});
    assert_eq!(name(&header(root.path(), &folder(root.path(), "llama", &same)).1), "llama");
}
