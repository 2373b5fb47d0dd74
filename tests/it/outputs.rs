//! Output files that the user names: an existing file is kept, and two commands never write the same file.
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::run::fixture::{Fixture, said, tunesmith};

fn run<S: AsRef<OsStr>>(args: &[S]) -> Output {
    tunesmith(args).env_remove("CONFIG").output().unwrap()
}

fn fails(output: &Output, code: i32, why: &str) {
    assert!(output.status.code() == Some(code) && said(output).contains(why), "{}", said(output));
}

#[test]
fn a_measurement_replaces_no_file_unasked_and_no_special_file_at_all() {
    let fixture = Fixture::new();
    let at = |name: &str| fixture.path(name).display().to_string();
    let bench = |file: &str, more: &[&str]| {
        let words = ["bench", "--shape", "small", "--seq", "16", "--batch", "1", "--predict", "--json-file", file];
        run(&[&words[..], more].concat())
    };
    fs::write(at("kept.json"), "kept").unwrap();
    fails(&bench(&at("kept.json"), &[]), 2, "is there already");
    assert_eq!(fs::read_to_string(at("kept.json")).unwrap(), "kept");
    let replaced = bench(&at("kept.json"), &["--overwrite"]);
    assert!(replaced.status.success(), "{}", said(&replaced));
    let found: Value = serde_json::from_slice(&fs::read(at("kept.json")).unwrap()).unwrap();
    assert!(found["total"].as_u64().unwrap() > 0, "{found}");

    assert!(Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
    fails(&bench(&at("fifo"), &["--overwrite"]), 6, "a FIFO");
    assert!(fs::metadata(at("fifo")).unwrap().file_type().is_fifo());
    fails(&bench(&at("model"), &["--overwrite"]), 6, "a folder");

    let config = fs::read(at("model/config.json")).unwrap();
    let words = ["bench", "--model", &at("model"), "--json-file", &at("model/config.json"), "--overwrite"];
    fails(&run(&words), 2, "it is an input");
    assert_eq!(fs::read(at("model/config.json")).unwrap(), config);
}

#[test]
fn a_file_of_answers_has_one_writer() {
    let fixture = Fixture::new();
    let at = |name: &str| fixture.path(name).display().to_string();
    fs::write(at("rows.txt"), "ab\ncd\n").unwrap();
    let words =
        ["infer", "--model", &at("model"), "--in", &at("rows.txt"), "--out", &at("out.jsonl"), "gen.max_new_tokens=2"];
    // Another command holds the file, and is within a line.
    fs::write(at("out.jsonl"), "{\"prompt\": \"ab\", \"ans").unwrap();
    let other = fs::File::open(at("out.jsonl")).unwrap();
    other.lock().unwrap();
    for more in [&[][..], &["--overwrite"]] {
        fails(&run(&[&words[..], more].concat()), 6, "another command is writing this file");
        assert_eq!(fs::read_to_string(at("out.jsonl")).unwrap(), "{\"prompt\": \"ab\", \"ans");
    }
    drop(other);
    let answered = run(&[&words[..], &["--overwrite"]].concat());
    assert!(answered.status.success(), "{}", said(&answered));
    assert_eq!(fs::read_to_string(at("out.jsonl")).unwrap().lines().count(), 2);
}

#[test]
fn images_without_captions_are_captioned_from_a_file_too() {
    let fixture = Fixture::new();
    let at = |name: &str| fixture.path(name).display().to_string();
    let rows = [json!({"image": "0330.png"}), json!({"image": "0331.png", "id": 7})];
    fs::write(at("rows.jsonl"), rows.each_ref().map(|row| format!("{row}\n")).concat()).unwrap();
    let captions = ["infer", "examples/caption/caption.yaml", "--base", "gen.max_new_tokens=2"];
    let (input, out) = (at("rows.jsonl"), at("out.jsonl"));
    let of_file = ["data.image_dir=examples/caption/data", "--in", &input, "--out", &out];
    let answered = run(&[&captions[..], &of_file].concat());
    assert!(answered.status.success(), "{}", said(&answered));
    let text = fs::read_to_string(at("out.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (line, row) in lines.iter().zip(&rows) {
        assert!(line["image"] == row["image"] && line["answer"].is_string() && line["caption"].is_null(), "{line}");
    }
    assert_eq!((lines.len(), &lines[1]["id"]), (2, &json!(7)));

    let address = [&captions[..], &["--image", "https://example.com/a.png"]].concat();
    fails(&run(&address), 3, "data.allow_image_urls: true");
    let address = [&captions[..], &["--image", "ftp://me:CANARY@example.com/a.png?k=CANARY"]].concat();
    let refused = run(&address);
    fails(&refused, 3, "no address of http or https");
    assert!(!String::from_utf8_lossy(&refused.stderr).contains("CANARY"));
    let name = fixture.root.path().join(OsStr::from_bytes(b"\xff.png"));
    fs::copy(Path::new("examples/caption/data/0330.png"), &name).unwrap();
    let words: Vec<_> = captions.iter().map(OsStr::new).chain([OsStr::new("--image"), name.as_os_str()]).collect();
    fails(&run(&words), 3, "not valid UTF-8");
}
