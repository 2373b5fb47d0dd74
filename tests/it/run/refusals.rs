//! Bad input: each refused with its exit code, a message that names the place, and nothing written.
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::parity::golden;

use super::fixture::{Fixture, model_config, said, train, tunesmith};

/// Runs the configuration; it must end with `code`, say each of `wanted`, and leave no output directory.
fn refused(fixture: &Fixture, config: &Path, words: &[&str], code: i32, wanted: &[&str]) {
    let output = train(config, words);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(code), "{said}");
    for text in wanted.iter().chain(&["error:"]) {
        assert!(said.contains(text), "{text:?} is missing in:\n{said}");
    }
    assert!(!said.contains("panicked"), "{said}");
    assert!(!fixture.path("out").exists(), "something was written");
}

fn refused_config(text: &str, wanted: &[&str]) {
    let fixture = Fixture::new();
    let path = fixture.path("bad.yaml");
    fs::write(&path, text).unwrap();
    refused(&fixture, &path, &[], 2, wanted);
}

#[test]
fn broken_yaml() {
    refused_config("train:\n  batch_size: [1\n", &["bad.yaml"]);
}

#[test]
fn an_unknown_key_names_its_neighbour_and_line() {
    refused_config("train:\n  learning_rte: 1e-3\n", &["bad.yaml:2", "learning_rte", "learning_rate"]);
}

#[test]
fn missing_files() {
    let fixture = Fixture::new();
    refused(&fixture, &fixture.path("none.yaml"), &[], 2, &["none.yaml"]);
    let config = fixture.config("run", &["data.train_path: /no/such/rows.jsonl"]);
    refused(&fixture, &config, &[], 3, &["/no/such/rows.jsonl"]);
    let config = fixture.config("run", &["model.name: /no/such/model"]);
    refused(&fixture, &config, &[], 4, &["/no/such/model"]);
}

fn refused_data(rows: &[u8], wanted: &[&str]) {
    let fixture = Fixture::new();
    fs::write(fixture.path("train.jsonl"), rows).unwrap();
    refused(&fixture, &fixture.config("run", &[]), &[], 3, &[&["train.jsonl"], wanted].concat());
}

const GOOD_ROW: &str = r#"{"messages":[{"role":"user","content":"ab"},{"role":"assistant","content":"ba"}]}"#;

#[test]
fn an_image_for_a_model_of_text_names_its_row() {
    let fixture = Fixture::new();
    let shown = r#"{"image": "a.png", "caption": "c"}"#;
    fs::write(fixture.path("train.jsonl"), format!("{GOOD_ROW}\n{GOOD_ROW}\n{shown}\n{shown}\n")).unwrap();
    let wanted = ["train.jsonl:3: the row shows an image", "\"llama\"", "or leave rows with images out"];
    refused(&fixture, &fixture.config("run", &[]), &[], 4, &wanted);
}

#[test]
fn data_that_is_empty_malformed_or_not_utf8() {
    refused_data(b"", &["no rows"]);
    refused_data(b"\n\n", &["no rows"]);
    refused_data(format!("{GOOD_ROW}\n{GOOD_ROW}\n{{\"messages\": [\n").as_bytes(), &["train.jsonl:3"]);
    refused_data(&[GOOD_ROW.as_bytes(), b"\n{\"text\":\"\xff\xfe\"}\n"].concat(), &["train.jsonl:2", "UTF-8"]);
}

#[test]
fn data_without_any_label() {
    let row = json!({ "messages": [{ "role": "user", "content": "a question, never answered" }] });
    refused_data(format!("{row}\n{row}\n").as_bytes(), &["loss"]);
    let row = json!({ "input_ids": [1, 2, 3], "labels": [-100, -100, -100] });
    refused_data(format!("{row}\n").as_bytes(), &["loss"]);
}

#[test]
fn a_model_folder_without_its_tokenizer() {
    let fixture = Fixture::new();
    fs::remove_file(fixture.path("model/tokenizer.json")).unwrap();
    refused(&fixture, &fixture.config("run", &[]), &[], 4, &["tokenizer.json"]);
}

#[test]
fn truncated_weights() {
    let fixture = Fixture::new();
    let path = fixture.path("model/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for length in [0, 7, 100, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).unwrap();
        refused(&fixture, &fixture.config("run", &[]), &[], 4, &["model.safetensors"]);
    }
}

#[test]
fn weights_whose_header_lies() {
    let fixture = Fixture::new();
    let path = fixture.path("model/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let lie = |change: &dyn Fn(&mut Value), wanted: &[&str]| {
        let mut header = header.clone();
        change(&mut header);
        let header = header.to_string().into_bytes();
        let lying = [&(header.len() as u64).to_le_bytes(), header.as_slice(), &bytes[8 + length..]].concat();
        fs::write(&path, lying).unwrap();
        refused(&fixture, &fixture.config("run", &[]), &[], 4, wanted);
    };
    let norm = "model.norm.weight";
    lie(&|header| header[norm]["shape"] = json!([33]), &[norm]);
    lie(&|header| header[norm]["data_offsets"] = json!([0, 1u64 << 60]), &[norm]);
    lie(&|header| header[norm]["dtype"] = json!("I32"), &[norm]);
    lie(&|header| drop(header.as_object_mut().unwrap().remove(norm)), &[]);
    fs::write(&path, [&u64::MAX.to_le_bytes(), &bytes[8..]].concat()).unwrap();
    refused(&fixture, &fixture.config("run", &[]), &[], 4, &["model.safetensors"]);
}

#[test]
fn a_weights_index_that_leaves_its_folder() {
    for target in ["../model/model.safetensors", "/etc/passwd"] {
        let fixture = Fixture::new();
        let index = json!({ "weight_map": { "model.norm.weight": target } });
        fs::rename(fixture.path("model/model.safetensors"), fixture.path("model/other.safetensors")).unwrap();
        fs::write(fixture.path("model/model.safetensors.index.json"), index.to_string()).unwrap();
        refused(&fixture, &fixture.config("run", &[]), &[], 4, &[target]);
    }
}

fn refused_model(change: impl Fn(&mut Value), code: i32, wanted: &[&str]) {
    let fixture = Fixture::new();
    let mut config = model_config();
    change(&mut config);
    fs::write(fixture.path("model/config.json"), config.to_string()).unwrap();
    refused(&fixture, &fixture.config("run", &[]), &[], code, wanted);
}

#[test]
fn a_model_that_is_not_supported_or_not_this_one() {
    refused_model(|config| config["model_type"] = json!("mamba"), 4, &["mamba", "llama"]);
    refused_model(|config| config["hidden_act"] = json!("gelu"), 4, &["gelu"]);
    refused_model(|config| config["num_attention_heads"] = json!(0), 4, &["num_attention_heads"]);
    refused_model(|config| config["vocab_size"] = json!(300), 4, &["embed_tokens", "300", "260"]);
}

#[test]
fn a_tokenizer_of_another_vocabulary() {
    // The tokenizer has 260 tokens, and the chat template uses the 259th.
    let fixture = Fixture::new();
    let mut model = model_config();
    model["vocab_size"] = json!(258);
    model["eos_token_id"] = json!(0);
    model["pad_token_id"] = Value::Null;
    fs::write(fixture.path("model/config.json"), model.to_string()).unwrap();
    let config = fixture.config("run", &["model.init: random", "tuning.mode: full"]);
    refused(&fixture, &config, &[], 3, &["258"]);

    let fixture = Fixture::new();
    let row = json!({ "input_ids": [1, 260, 3], "labels": [-100, 260, 3] });
    fs::write(fixture.path("train.jsonl"), format!("{row}\n")).unwrap();
    refused(&fixture, &fixture.config("run", &[]), &[], 3, &["260"]);
}

#[test]
fn random_weights_that_transformers_could_not_read() {
    let fixture = Fixture::new();
    fs::copy(golden("nemotron_h").join("model/config.json"), fixture.path("model/config.json")).unwrap();
    let config = fixture.config("run", &["model.init: random", "tuning.mode: full"]);
    refused(&fixture, &config, &[], 2, &["model.init: random: not yet for", "model.init: pretrained"]);
}

#[test]
fn rows_longer_than_the_model_can_see() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["model.max_seq_len: 129"]);
    refused(&fixture, &config, &[], 2, &["run.yaml:", "model.max_seq_len", "128"]);
}

#[test]
fn allowing_a_difference_without_a_checkpoint() {
    let fixture = Fixture::new();
    refused(&fixture, &fixture.config("run", &[]), &["--allow", "data"], 2, &["--resume"]);
}

#[test]
fn an_output_directory_that_cannot_be_made() {
    let fixture = Fixture::new();
    let file = fixture.path("file");
    fs::write(&file, "not a directory").unwrap();
    let word = format!("train.output_dir={}", file.join("out").display());
    refused(&fixture, &fixture.config("run", &[]), &[&word], 6, &["file/out"]);
    let word = "train.output_dir=/proc/tunesmith";
    refused(&fixture, &fixture.config("run", &[]), &[word], 6, &["/proc/tunesmith"]);
}

#[test]
fn a_resume_from_nothing_usable() {
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("empty")).unwrap();
    let word = format!("--resume={}", fixture.path("empty").display());
    refused(&fixture, &fixture.config("run", &[]), &[&word], 5, &["empty"]);
}

/// A small tmpfs, unmounted on drop; nothing where mounting is not permitted.
struct Tmpfs(std::path::PathBuf);

impl Tmpfs {
    fn mount(path: &Path, size: &str) -> Option<Self> {
        fs::create_dir_all(path).unwrap();
        let status =
            Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(path).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("skipped: mounting a tmpfs is not permitted here");
            return None;
        }
        Some(Self(path.to_owned()))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        drop(Command::new("umount").arg(&self.0).status());
    }
}

#[test]
fn a_disk_that_cannot_hold_the_checkpoints_is_refused_before_the_first_step() {
    let fixture = Fixture::new();
    let Some(disk) = Tmpfs::mount(&fixture.path("small"), "256k") else { return };
    let word = format!("train.output_dir={}", disk.0.join("out").display());
    refused(&fixture, &fixture.config("run", &[]), &[&word], 6, &["free", "hint:"]);
    assert_eq!(fs::read_dir(&disk.0).unwrap().count(), 0);
}

#[test]
fn a_disk_that_fills_up_during_the_run_keeps_the_last_good_checkpoint() {
    let fixture = Fixture::new();
    let Some(disk) = Tmpfs::mount(&fixture.path("small"), "24m") else { return };
    let out = disk.0.join("out");
    let word = format!("train.output_dir={}", out.display());
    let words = [
        word.as_str(),
        "train.save_strategy=steps",
        "train.save_steps=2",
        "train.max_steps=100000",
        "train.save_total_limit=1",
    ];
    let config = fixture.config("run", &[]);
    let run = {
        let mut args = vec!["train", config.to_str().unwrap()];
        args.extend(words);
        super::fixture::tunesmith(&args)
            .stderr(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !out.join("checkpoint-000004").exists() && !out.join("checkpoint-000006").exists() {
        assert!(std::time::Instant::now() < deadline, "no checkpoint");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    // Something else takes the rest of the disk.
    let _ = fs::write(disk.0.join("other"), vec![1u8; 24 << 20]);
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", said(&output));
    assert!(said(&output).contains("space"), "{}", said(&output));
    let (newest, _) = tunesmith::checkpoint::newest_complete(&out).unwrap();
    assert!(newest.is_some(), "a whole checkpoint is left");
    fs::remove_file(disk.0.join("other")).unwrap();
    let again = train(&config, &[word.as_str(), "--resume", "train.max_steps=3"]);
    assert!(again.status.success(), "{}", said(&again));
}

#[test]
fn weights_that_gemma_3n_s_class_cuts_in_training() {
    let fixture = Fixture::new();
    let model = golden("gemma3n/model");
    for file in fs::read_dir(&model).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, fixture.path("model").join(file.file_name().unwrap())).unwrap();
    }
    let mut json: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
    let mut limit = |limit: Value| {
        json["altup_coef_clip"] = limit;
        fs::write(fixture.path("model/config.json"), json.to_string()).unwrap();
    };
    // The largest weight is 0.68.
    limit(json!(0.6));
    let wanted =
        ["not yet", ".altup.correction_coefs.weight: ", "beyond altup_coef_clip, 0.6", "a larger altup_coef_clip"];
    refused(&fixture, &fixture.config("run", &[]), &[], 4, &wanted);
    let full = ["tuning.mode: full", "train.learning_rate: 0.1", "train.warmup_steps: 0"];
    for (value, ends) in [(json!(0.7), true), (json!(120.0), false)] {
        limit(value);
        for (mode, ends) in [(&[][..], false), (&full[..], ends)] {
            let output = train(&fixture.config("run", mode), &[]);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(if ends { 8 } else { 0 }), "{said}");
            assert_eq!(said.contains("beyond altup_coef_clip, 0.7") && said.contains("learning_rate"), ends, "{said}");
            fs::remove_dir_all(fixture.path("out")).unwrap();
        }
    }
}

#[test]
fn variables_of_the_environment_that_cannot_be_followed_are_refused() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 1"]);
    for (verb, variable, value, part) in [
        ("data", "RAYON_NUM_THREADS", "99999999", "expected a number of threads from 1 to 1024"),
        ("train", "RAYON_NUM_THREADS", "all", "expected a number of threads from 1 to 1024"),
        ("train", "WORLD_SIZE", "2", "RANK is not set"),
        ("train", "RANK", "1", "WORLD_SIZE is not set"),
    ] {
        let output = tunesmith(&[verb, config.to_str().unwrap()]).env(variable, value).output().unwrap();
        let text = said(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(&format!("env {variable}={value}")) && text.contains(part), "{text}");
        assert!(!fixture.path("out").exists(), "{variable}");
    }
}

#[test]
fn modules_that_are_excluded_in_vain_are_warned_about() {
    let fixture = Fixture::new();
    for (excluded, told) in [("[\"dwon_proj\"]", "\"dwon_proj\" matches no linear module"), ("[\"down_proj\"]", "")] {
        let line = format!("tuning.lora.exclude_modules: {excluded}");
        let output = train(&fixture.config("run", &["train.max_steps: 1", &line]), &["--overwrite"]);
        let text = said(&output);
        assert!(output.status.success() && text.contains(told), "{text}");
        assert_eq!(text.contains("exclude_modules: "), !told.is_empty(), "{text}");
    }
}

#[test]
fn a_gguf_file_is_no_model_and_no_adapter() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 1"]).display().to_string();
    std::fs::create_dir(fixture.path("folder")).unwrap();
    let file = fixture.path("folder/tiny-Q4_K_M.gguf");
    std::fs::write(&file, "GGUF").unwrap();
    for path in [fixture.path("folder"), file] {
        let path = path.display().to_string();
        let (named, merged) = (format!("model.name={path}"), fixture.path("merged").display().to_string());
        for (call, code) in [
            (&["train", &config, &named][..], 4),
            (&["infer", "--model", &path, "--prompt", "x"], 4),
            (&["plan", "--model", &path], 4),
            (&["models", &path], 4),
            (&["infer", &config, "--adapter", &path, "--prompt", "x"], 5),
            (&["merge", &config, "--adapter", &path, "--output", &merged], 5),
        ] {
            let output = tunesmith(call).output().unwrap();
            let text = said(&output);
            assert_eq!(output.status.code(), Some(code), "{call:?}: {text}");
            assert!(
                text.contains("tiny-Q4_K_M.gguf") && text.contains("reads none") && text.contains("safetensors"),
                "{text}"
            );
        }
    }
}
