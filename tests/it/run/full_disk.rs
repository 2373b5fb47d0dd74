//! A full disk, simulated by a limit on the size of files; and checkpoints on another disk, behind a link.
use super::fixture::{Fixture, said, train, tunesmith};
use super::resume::{assert_same_ending, go};
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};

/// Runs the program with files of at most so many blocks of 512 bytes.
fn limited(blocks: u64, args: &[&str], input: &str) -> Output {
    let own = tunesmith(args);
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("ulimit -f {blocks}; exec \"$0\" \"$@\""))
        .arg(own.get_program())
        .args(own.get_args());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn a_checkpoint_that_finds_no_room_names_the_newest_that_is_whole() {
    let fixture = Fixture::new();
    let lines = ["train.save_strategy: steps", "train.save_steps: 1", "train.max_steps: 2", "train.save_async: false"];
    let config = fixture.config("run", &lines);
    assert!(train(&config, &[]).status.success());
    let size = fs::metadata(fixture.path("out/checkpoint-000002/optimizer.safetensors")).unwrap().len();
    // Step 2's checkpoint is no longer whole.
    fs::File::options()
        .write(true)
        .open(fixture.path("out/checkpoint-000002/optimizer.safetensors"))
        .unwrap()
        .set_len(9)
        .unwrap();
    let config = config.to_str().unwrap();
    for more in ["train.save_async=false", "train.save_async=true"] {
        let output = limited((size - 1) / 512, &["train", config, "--resume", "train.max_steps=4", more], "");
        let text = said(&output);
        assert_eq!(output.status.code(), Some(6), "{text}");
        let first = fixture.path("out/checkpoint-000001").display().to_string();
        assert!(text.contains(&format!("the newest intact checkpoint is {first}")), "{text}");
        assert!(text.contains("a checkpoint could not be written") && text.contains("ulimit -f"), "{text}");
    }
    let output = limited((size - 1) / 512, &["train", config, "--overwrite", "train.max_steps=4"], "");
    assert!(said(&output).contains("there is no checkpoint yet"), "{}", said(&output));
}

#[test]
fn a_conversation_that_finds_no_room_leaves_its_file_and_goes_on() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["gen.max_new_tokens: 4"]);
    let (kept, other) = (fixture.path("kept.jsonl"), fixture.path("other.jsonl"));
    let content = "x".repeat(445);
    let before = format!("{}\n", serde_json::json!({"messages": [{"role": "user", "content": content}]}));
    assert!((480..512).contains(&before.len()), "{}", before.len());
    fs::write(&kept, &before).unwrap();
    let talk = format!("abc\n/save {}\n/save /dev/full\n/save {}\n/quit\n", kept.display(), other.display());
    let output = limited(1, &["chat", config.to_str().unwrap(), "--base"], &talk);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("kept.jsonl: File too large") && text.contains("ulimit -f"), "{text}");
    assert!(text.contains("/dev/full: it is a device"), "{text}");
    assert_eq!(fs::read_to_string(&kept).unwrap(), before, "nothing of the row is left");
    let saved: serde_json::Value = serde_json::from_slice(&fs::read(&other).unwrap()).unwrap();
    assert_eq!(saved["messages"][0]["content"], "abc");
}

#[test]
fn a_run_goes_on_from_a_checkpoint_behind_a_link() {
    let fixture = Fixture::new();
    let lines = ["train.save_strategy: steps", "train.save_steps: 2", "train.max_steps: 6"];
    let config = fixture.config("run", &lines);
    assert!(go(&config, &[], u64::MAX));
    for (name, linked, resume) in [
        // The checkpoint was moved to another disk; `latest` finds the link.
        ("moved", "moved/checkpoint-000003", "latest".to_owned()),
        ("beside", "beside/link", fixture.path("beside/link").display().to_string()),
        // A link of the user's own to the checkpoint in its place.
        ("elsewhere", "link of mine", fixture.path("link of mine").display().to_string()),
    ] {
        let (out, link) = (fixture.path(name), fixture.path(linked));
        let words = |resume: &str| {
            [format!("train.output_dir={}", out.display()), format!("train.resume_from_checkpoint={resume}")]
        };
        let [to, from] = words("null");
        assert!(!go(&config, &[&to, &from], 3), "{name}");
        let mut place = out.join("checkpoint-000003");
        if name != "elsewhere" {
            let disk = fixture.path(&format!("disk of {name}"));
            fs::rename(&place, &disk).unwrap();
            place = disk;
        }
        symlink(&place, &link).unwrap();
        let [to, from] = words(&resume);
        assert!(go(&config, &[&to, &from], u64::MAX), "{name}");
        assert_same_ending(&fixture.path("out"), &out, 6, false);
        assert!(link.is_symlink() && place.join("manifest.json").is_file(), "{name}: what the link leads to stays");
    }
}
