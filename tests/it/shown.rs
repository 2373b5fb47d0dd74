//! What the program prints contains no secret, wherever it came from, and no control character that a terminal would obey.
use std::path::Path;
use std::process::{Command, Output};

const CANARY: &str = "CANARYxyzzy12345";

fn tunesmith(folder: &Path, words: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tunesmith"));
    command.args(words).current_dir(folder).env_clear().env("HOME", folder);
    command.envs(variables.iter().copied()).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), output.stderr.as_slice()].concat()).into_owned()
}

#[test]
fn no_secret_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("run.yaml");
    let write = |text: String| std::fs::write(&config, text).unwrap();
    let hub = format!("http://user:{CANARY}@127.0.0.1:9/");
    // Offline: what cannot be reached is tried again, which takes its time.
    let env: &[(&str, &str)] = &[("HF_TOKEN", CANARY), ("HF_ENDPOINT", &hub), ("HF_HUB_OFFLINE", "1")];
    for value in [
        format!("hf://{CANARY}@datasets/owner/name/rows.jsonl"),
        format!("hf://user:{CANARY}@owner/name/rows.jsonl"),
        format!("https://user:{CANARY}@host/rows.jsonl"),
        format!("https://host/rows.jsonl?token={CANARY}&x=1"),
        format!("hf_{CANARY}/rows.jsonl"),
    ] {
        write(format!("model:\n  name: owner/name\ndata:\n  train_path: [\"{value}\"]\n"));
        let words = [
            vec!["config", "run.yaml"],
            vec!["config", "run.yaml", "--json"],
            vec!["train", "run.yaml"],
            vec!["data", "run.yaml"],
            vec!["process", "run.yaml", "--output", "out"],
            vec!["plan", "run.yaml"],
            vec!["infer", "run.yaml", "--base", "-p", "x"],
        ];
        for words in words {
            let shown = text(&tunesmith(folder.path(), &words, env));
            assert!(!shown.contains(CANARY), "{words:?}: {shown}");
        }
        write(format!("model:\n  name: \"{value}\"\ndata:\n  train_path: [rows.jsonl]\n"));
        for words in [vec!["config", "run.yaml"], vec!["train", "run.yaml"], vec!["plan", "run.yaml"]] {
            let shown = text(&tunesmith(folder.path(), &words, env));
            assert!(!shown.contains(CANARY), "{words:?}: {shown}");
        }
        for words in [["download", &value], ["models", &value], ["train", &value], ["import", &value], [&value, "x"]] {
            let shown = text(&tunesmith(folder.path(), &words, env));
            assert!(!shown.contains(CANARY), "{words:?}: {shown}");
        }
    }
    write("model:\n  name: owner/name\n".to_owned());
    for word in
        [format!("train.hub_token={CANARY}"), format!("--hub_token={CANARY}"), format!("model.api_key={CANARY}")]
    {
        let shown = text(&tunesmith(folder.path(), &["train", "run.yaml", &word], env));
        assert!(!shown.contains(CANARY), "{word}: {shown}");
    }
}

#[test]
fn nothing_that_a_terminal_obeys_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let evil = "\u{1b}]0;title\u{7}\u{1b}[2Jx\u{9b}31m\r\u{202e}";
    let (model, rows) = (folder.path().join(format!("model{evil}")), folder.path().join(format!("rows{evil}.jsonl")));
    std::fs::create_dir(&model).unwrap();
    std::fs::write(model.join("config.json"), serde_json::json!({"model_type": evil}).to_string()).unwrap();
    std::fs::write(&rows, serde_json::json!({evil: "x"}).to_string()).unwrap();
    let (model, rows) = (model.to_str().unwrap(), rows.to_str().unwrap());
    let (local, train) = (format!("model.local_dir={model}"), format!("data.train_path={rows}"));
    std::fs::write(folder.path().join("run.yaml"), "train:\n  max_steps: 1\n").unwrap();
    for words in [
        vec!["config", "run.yaml", &local, &train],
        vec!["train", "run.yaml", &local, &train],
        vec!["data", "run.yaml", &local, &train],
        vec!["models", model],
        vec!["infer", "--model", model, "-p", "x"],
        vec!["download", evil],
        vec!["train", evil],
        vec![evil],
        vec!["train", "--epochs", evil],
    ] {
        let output = tunesmith(folder.path(), &words, &[]);
        let shown = text(&output);
        assert!(!shown.is_empty());
        let acts = |letter: char| letter.is_control() && letter != '\n' && letter != '\t' || letter == '\u{202e}';
        assert!(!shown.contains(acts), "{words:?}: {shown:?}");
    }
}

#[cfg(all(unix, feature = "hub"))]
#[test]
fn an_open_token_file_is_named_with_what_closes_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "hf_abcdefghijklmnop").unwrap();
    let said = |mode: u32| {
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(mode)).unwrap();
        let env = [("HF_HOME", folder.path().to_str().unwrap()), ("HF_HUB_OFFLINE", "1")];
        let shown = text(&tunesmith(folder.path(), &["download", "owner/name"], &env));
        shown.matches(&format!("chmod 600 {}", token.display())).count()
    };
    assert_eq!((said(0o644), said(0o640), said(0o600)), (1, 1, 0));
}
