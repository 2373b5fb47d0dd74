//! What the user sees in a terminal of 80 columns, and the commands that are printed for pasting.
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::fixture::{Fixture, said, train, tunesmith};

const COLUMNS: usize = 80;

/// Runs `tunesmith ARGS` in a terminal of 80 columns; nothing where there is no `script`. Each of `steps` is typed once the
/// text before it has been shown as often as it stands in the steps up to there: a line editor forgets what comes too early.
fn in_terminal(args: &[&str], folder: &Path, steps: &[(&str, &str)]) -> Option<String> {
    let words: Vec<String> = args.iter().map(|arg| format!("'{arg}'")).collect();
    let line = format!("stty cols {COLUMNS} rows 30; exec '{}' {}", env!("CARGO_BIN_EXE_tunesmith"), words.join(" "));
    let mut command = Command::new("script");
    command.args(["-qec", &line, "/dev/null"]).current_dir(folder).env("TERM", "xterm").env("XDG_STATE_HOME", folder);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut child) = command.spawn() else {
        eprintln!("skipped: there is no `script`");
        return None;
    };
    // Its end would be the terminal's.
    let mut typed = child.stdin.take().unwrap();
    let mut screen = child.stdout.take().unwrap();
    let (mut text, mut bytes, mut done) = (Vec::new(), [0; 4096], 0);
    loop {
        match screen.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(count) => text.extend_from_slice(&bytes[..count]),
        }
        let shown = String::from_utf8_lossy(&text);
        while let Some((wanted, keys)) = steps.get(done) {
            let times = steps[..=done].iter().filter(|(other, _)| other == wanted).count();
            if shown.matches(wanted).count() < times {
                break;
            }
            typed.write_all(keys.as_bytes()).unwrap();
            done += 1;
        }
    }
    let status = child.wait().unwrap();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(status.success(), "{args:?}: {text}");
    Some(text)
}

/// What stands in the lines of a screen, without colours; a line that is drawn again counts each time.
fn shown(text: &str) -> Vec<String> {
    let mut plain = String::new();
    let mut chars = text.chars();
    while let Some(character) = chars.next() {
        match character {
            '\x1b' => chars.by_ref().take_while(|next| !next.is_ascii_alphabetic()).for_each(drop),
            '\r' => plain.push('\n'),
            other => plain.push(other),
        }
    }
    plain.lines().map(str::to_owned).collect()
}

/// The commands that a run ends with.
fn commands(text: &str) -> Vec<String> {
    let lines = text.lines().skip_while(|line| !line.contains("ask the result")).skip(1);
    lines.map(|line| line.trim().to_owned()).collect()
}

#[test]
fn everything_fits_eighty_columns() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["gen.num_samples: 2", "train.eval_strategy: epoch", "logging.report: false"]);
    let (config, model) = (config.display().to_string(), fixture.path("model").display().to_string());
    for args in [
        &["train", &config][..],
        &["data", &config],
        &["config", &config],
        &["plan", &config],
        &["memory-check", &config],
        &["eval", &config],
        &["models"],
        &["models", &model],
        &["doctor"],
        &["gpu-info", "--no-measure"],
        &["memory-check"],
        &["merge", &config],
        &["export", &config, "--gguf", "f16"],
        &["export", &config, "--peft"],
        &["bench", "--model", &model, "--seq", "32", "--batch", "1", "--steps", "1"],
        &["bench", "--model", &model, "--seq", "32", "--batch", "1", "--predict"],
        &["bench", "--model", &model, "--mode", "decode", "--quantization", "nf4", "--seq", "4", "--steps", "2"],
        &["--help"],
        &["train", "--help"],
    ] {
        let Some(text) = in_terminal(args, &fixture.path(""), &[]) else { return };
        for line in shown(&text) {
            // Commands to paste, and words that are longer than a line, stay whole.
            let pasted = line.trim_start().starts_with('/')
                || line.contains("tunesmith infer")
                || line.contains("tunesmith chat");
            let longest = line.split(' ').map(str::len).max().unwrap_or(0);
            assert!(pasted || longest > COLUMNS / 2 || line.chars().count() <= COLUMNS, "{args:?}: {line}");
        }
    }
}

#[test]
fn the_commands_that_a_run_ends_with_work_as_printed() {
    let fixture = Fixture::new();
    let row = |word: &str| {
        serde_json::json!({"messages": [
            {"role": "user", "content": format!("It's \"{word}\"; $HOME?\nSay it.")}, {"role": "assistant", "content": word},
        ]})
        .to_string() + "\n"
    };
    fs::write(fixture.path("val.jsonl"), ["one", "two"].map(row).concat()).unwrap();
    let config = fixture.config("run", &["train.max_steps: 1", "gen.max_new_tokens: 3", "gen.num_samples: 2"]);
    let output = train(&config, &[]);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("It's \"one\"; $HOME? Say it."), "the question is shown: {text}");
    assert!(!text.contains("<|user|>"), "and nothing of the template: {text}");
    let whole = commands(&text).join("\n");
    assert!(whole.contains(" infer ") && whole.contains(" chat "), "{text}");
    for command in whole.split(env!("CARGO_BIN_EXE_tunesmith")).skip(1) {
        let line = format!("{}{command}", env!("CARGO_BIN_EXE_tunesmith"));
        let output: Output =
            Command::new("sh").args(["-c", &line]).current_dir(fixture.path("")).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{line}: {}", said(&output));
    }
    let report = fs::read_to_string(fixture.path("out/report.html")).unwrap();
    assert!(report.contains("<small>question</small>") && report.contains("whole prompt"), "{report}");
}

#[test]
fn a_chat_in_a_terminal_has_a_history_of_its_owner_alone() {
    let fixture = Fixture::new();
    let model = fixture.path("model").display().to_string();
    let args = ["chat", "--model", &model, "--max-new-tokens", "2"];
    let help = "Ctrl-C ends an answer";
    // The arrow up brings the first line back.
    let steps = [("/help lists", "/help\r"), (help, "\x1b[A\r"), (help, " hidden\r"), ("written", "/quit\r")];
    let Some(text) = in_terminal(&args, &fixture.path(""), &steps) else { return };
    assert!(text.matches("start a new conversation with this").count() == 2, "{text}");
    let history = fixture.path("tunesmith/chat_history");
    let kept = fs::read_to_string(&history).unwrap();
    assert!(kept.contains("/help") && kept.contains("/quit") && !kept.contains("hidden"), "{kept}");
    assert_eq!(fs::metadata(&history).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_chat_reads_lines_where_there_is_no_terminal() {
    let fixture = Fixture::new();
    let model = fixture.path("model").display().to_string();
    let mut command = tunesmith(&["chat", "--model", &model, "--max-new-tokens", "2"]);
    command.env("XDG_STATE_HOME", fixture.path("")).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"hello\n/quit\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && said(&output).contains("written"), "{}", said(&output));
    assert!(!fixture.path("tunesmith").exists(), "nobody typed anything");
}
