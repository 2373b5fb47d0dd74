//! Commands for the user to paste into a shell: to resume a run, and to use its result.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::args;
use super::shell_quote::quoted;
use super::terminal::{Style, stdout_colour};
use crate::data::question::Question;
use crate::train::output;
use crate::train::run::Ask;

/// A longer question would make an unreadable command.
const QUESTION: usize = 300;

/// The program's name or path, as it was called; relative if it is below the current folder.
fn program() -> String {
    let called = std::env::args_os().next().map_or_else(|| PathBuf::from("tunesmith"), PathBuf::from);
    let here = std::env::current_dir().unwrap_or_default();
    quoted(&below(&called, &here).to_string_lossy())
}

/// Makes a path below `here` relative to it. A single word gets `./`, or the shell would look in PATH.
fn below(path: &Path, here: &Path) -> PathBuf {
    match path.strip_prefix(here) {
        Ok(inside) if inside.components().count() == 1 => Path::new(".").join(inside),
        Ok(inside) => inside.to_owned(),
        Err(_) => path.to_owned(),
    }
}

/// The variable in which `launch` passes the command to resume to its ranks.
pub(super) const AGAIN: &str = "TUNESMITH_AGAIN";

/// The command that resumes a run: this process's or the launcher's, with settings of the environment. `launched` says that
/// another launcher than `launch` has started the ranks; its command is not known here.
pub(super) fn to_resume(launched: bool) -> String {
    match std::env::var(AGAIN) {
        Ok(command) if !command.is_empty() => command,
        _ if launched => "the launcher's command, with --resume behind the words of `train`".to_owned(),
        _ => own_again(),
    }
}

/// This process's command in the form that resumes its run.
pub(super) fn own_again() -> String {
    let words: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    format!("`{}`", resumed(&program(), &words, &args::variables()))
}

/// Adds --resume to the words. Removes --overwrite, and an earlier --resume, whose checkpoint is no longer the newest.
fn resumed(program: &str, words: &[String], variables: &[(String, String)]) -> String {
    let mut command: Vec<String> = variables.iter().map(|(name, value)| format!("{name}={}", quoted(value))).collect();
    command.push(program.to_owned());
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--overwrite" => {}
            "--resume" => {
                words.next_if(|next| !next.starts_with('-') && args::is_checkpoint(next));
            }
            word if word.starts_with("--resume=") => {}
            word => command.push(quoted(word)),
        }
    }
    command.push("--resume".to_owned());
    command.join(" ")
}

/// A flag with its value. A value that begins with a hyphen follows `=`, or it would be read as a flag.
fn flag(name: &str, text: &str) -> String {
    let between = if text.starts_with('-') { "=" } else { " " };
    format!(" {name}{between}{}", quoted(text))
}

/// Whether a text has no control characters besides line ends and tabs.
fn is_plain(text: &str) -> bool {
    text.chars().all(|character| character == '\n' || character == '\t' || !character.is_control())
}

/// The commands that use a run's result, one per line, not folded.
pub(super) fn to_ask(ask: &Ask, output_dir: &Path) -> String {
    let config = quoted(&output_dir.join(output::CONFIG).to_string_lossy());
    let Question { system, question, chat, images } = &ask.row;
    let system =
        system.as_deref().filter(|text| is_plain(text)).map_or_else(String::new, |text| flag("--system", text));
    let short = question.chars().count() <= QUESTION && is_plain(question) && !question.trim().is_empty();
    let question = if short { question } else { "Your question" };
    let question = if images.is_empty() || *chat { flag("--prompt", question) } else { String::new() };
    let shown: String = images.iter().filter(|image| is_plain(image)).map(|image| flag("--image", image)).collect();
    let raw = if *chat || ask.scores || !images.is_empty() { "" } else { " --raw" };
    let program = program();
    let mut text = format!("{}\n", Style::Bold.paint("ask the result", stdout_colour()));
    let _ = writeln!(text, "  {program} infer {config}{raw}{system}{shown}{question}"); // a String never fails
    if *chat && !ask.scores {
        let _ = writeln!(text, "  {program} chat {config}{system}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(
            ["runs/a-b_c.yaml", "", "it's", "a\nb"].map(quoted),
            ["runs/a-b_c.yaml", "''", r"'it'\''s'", "'a\nb'"]
        );
        assert_eq!(
            (flag("--prompt", "-1 + 2"), flag("--prompt", "1")),
            (" --prompt='-1 + 2'".into(), " --prompt 1".into())
        );
    }

    #[test]
    fn a_run_goes_on_with_the_words_that_it_had() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let resumed = |text: &str, variables: &[(&str, &str)]| {
            let variables: Vec<(String, String)> =
                variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            resumed("bin/tunesmith", &words(text), &variables)
        };
        let job = "train --model models/a --data rows.jsonl";
        assert_eq!(resumed(job, &[]), format!("bin/tunesmith {job} --resume"), "no YAML is made up");
        assert_eq!(resumed("train a.yaml --overwrite", &[]), "bin/tunesmith train a.yaml --resume");
        assert_eq!(
            resumed("train --resume a.yaml", &[("CONFIG", "b c.yaml"), ("TRAIN_SEED", "1")]),
            "CONFIG='b c.yaml' TRAIN_SEED=1 bin/tunesmith train a.yaml --resume"
        );
        let checkpoint = "train a.yaml --resume runs/a/checkpoint-000010 train.seed=2";
        assert_eq!(resumed(checkpoint, &[]), "bin/tunesmith train a.yaml train.seed=2 --resume");
        assert_eq!(resumed("train --resume=latest a.yaml", &[]), "bin/tunesmith train a.yaml --resume");
        assert_eq!(
            resumed("launch --nproc 2 -- train a.yaml", &[]),
            "bin/tunesmith launch --nproc 2 -- train a.yaml --resume"
        );
    }

    #[test]
    fn a_program_in_this_folder_is_not_looked_for_in_path() {
        let here = Path::new("/home/me");
        let below = |path: &str| below(Path::new(path), here).display().to_string();
        assert_eq!(below("/home/me/tunesmith"), "./tunesmith");
        assert_eq!(below("/home/me/target/release/tunesmith"), "target/release/tunesmith");
        assert_eq!(
            (below("tunesmith"), below("/usr/bin/tunesmith")),
            ("tunesmith".into(), "/usr/bin/tunesmith".into())
        );
    }

    #[test]
    fn each_kind_of_run_is_asked_in_its_way() {
        let row = |system: Option<&str>, question: &str, chat| Question {
            images: Vec::new(),
            system: system.map(str::to_owned),
            question: question.to_owned(),
            chat,
        };
        let lines = |row, scores| -> Vec<String> {
            let text = to_ask(&Ask { row, scores }, Path::new("runs/my run"));
            text.lines().skip(1).map(|line| line.trim_start().split_once(' ').unwrap().1.to_owned()).collect()
        };
        let config = "'runs/my run/config.resolved.yaml'";
        assert_eq!(
            lines(row(Some("Be brief."), "What's up?", true), false),
            [
                format!(r"infer {config} --system 'Be brief.' --prompt 'What'\''s up?'"),
                format!("chat {config} --system 'Be brief.'")
            ]
        );
        assert_eq!(lines(row(None, "Once", false), false), [format!("infer {config} --raw --prompt Once")]);
        assert_eq!(lines(row(None, "Spam", false), true), [format!("infer {config} --prompt Spam")]);
        let long = lines(row(None, &"long ".repeat(100), true), false);
        assert_eq!(long[0], format!("infer {config} --prompt 'Your question'"));
        assert!(!lines(row(Some("\u{1b}[2J"), "Hi", true), false)[0].contains('\u{1b}'));
    }
}
