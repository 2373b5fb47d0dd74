//! `tunesmith train`: fine-tunes a model.
use super::args::{JobArgs, is_checkpoint, print_notes};
use super::numbers::whole;
use super::paste;
use super::terminal::{print, print_exact, print_note, print_text};
use super::train_console::{Console, show_summary};
use crate::comm::env;
use crate::config::{Flag, Range, Resolved};
use crate::error::{Error, Result};
use crate::train::run::{self, Options};
use crate::train::signals::Stop;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Resume from a checkpoint: the newest intact one of the output folder (default), a checkpoint's folder, or a run's file
    /// `best` or `latest`
    #[arg(long, value_name = "latest|DIR", num_args = 0..=1, default_missing_value = "latest")]
    resume: Option<String>,
    /// Resume although this setting differs from the checkpoint's, such as `train.learning_rate`; may be given more than once
    #[arg(long, value_name = "KEY")]
    allow: Vec<String>,
    /// Start over in the output folder of an earlier run: its files are removed before step 1. What `eval`, `merge`, and `export` wrote there stays
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// Compute on this GPU (`model.device`); several need a rank each: `tunesmith launch --gpu-ids 0,1 -- train CONFIG`
    #[arg(long, value_delimiter = ',', value_name = "N,N", allow_hyphen_values = true, value_parser = whole::<usize>(Range::at_least(0.0)))]
    gpu_ids: Vec<usize>,
}

/// Trains, and prints how to use the result.
///
/// # Errors
/// Everything that a run can fail with; [`crate::Kind::Preempted`] after a signal, when everything is saved.
pub fn run(args: &Args) -> Result<()> {
    let (job, resume) = claim_word(&args.job, args.resume.as_deref());
    let flag = |value: String| Flag { name: "--resume", key: "train.resume_from_checkpoint", value };
    let mut flags: Vec<Flag> = resume.map(flag).into_iter().collect();
    let launch = env::read(|name| std::env::var(name).ok())?;
    // Other ranks print only their errors.
    let first = launch.as_ref().is_none_or(|launch| launch.world.is_first());
    if launch.is_none() {
        one_process(args)?;
        if let [id] = args.gpu_ids[..] {
            flags.push(Flag { name: "--gpu-ids", key: "model.device", value: format!("cuda:{id}") });
        }
    }
    let resolved = job.load_silently(&flags)?;
    if first {
        print_notes(&resolved);
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let names_file = resolved.config.train.accelerate.is_some();
        for note in by_accelerate(variable, launch.is_some(), names_file) {
            print_note(note);
        }
    }
    let stop = Stop::default();
    let _listening = stop.listen(
        move |signal| {
            tell(first, &format!("{signal} before step 1: nothing was written"));
            std::process::exit(i32::from(crate::Kind::Preempted.exit_code()));
        },
        move |signal, again| {
            let what = if again {
                "again: ending at once; existing checkpoints are intact"
            } else {
                "finishing this step, then saving (again: end at once)"
            };
            tell(first, &format!("{signal}: {what}"));
        },
    )?;
    let console = Console::new(resolved.config.train.logging_steps);
    let again = paste::to_resume(launch.is_some());
    let options = Options {
        allow: args.allow.clone(),
        overwrite: args.overwrite,
        launch,
        resume_command: again,
        plan_only: false,
    };
    let summary = run::run(&resolved, &options, &stop, &console)?;
    console.finish();
    if !first {
        return Ok(());
    }
    print(&show_summary(&summary))?;
    match &summary.ask {
        Some(ask) => print_exact(&paste::to_ask(ask, &resolved.config.train.output_dir)),
        None => Ok(()),
    }
}

/// Refuses a request for several GPUs without a launcher.
///
/// # Errors
/// [`crate::Kind::Config`]: several are asked for.
fn one_process(args: &Args) -> Result<()> {
    let refused = |asked: &str, launch: &str| {
        Err(Error::config(format!("{asked}: `train` alone is one process, which is one rank"))
            .hint(format!("`{launch} -- train CONFIG` starts a rank for each")))
    };
    if let Some(number) = args.job.config.num_gpus().filter(|number| number != "1") {
        return refused(&format!("NUM_GPUS={number}"), &format!("NUM_GPUS={number} tunesmith launch"));
    }
    let ids: Vec<String> = args.gpu_ids.iter().map(usize::to_string).collect();
    match &ids[..] {
        [] => Ok(()),
        [id] => {
            let _: u8 = id.parse().map_err(|_| Error::config(format!("--gpu-ids {id}: there is no such GPU")))?;
            Ok(())
        }
        ids => {
            let ids = ids.join(",");
            refused(&format!("--gpu-ids {ids}"), &format!("tunesmith launch --gpu-ids {ids}"))
        }
    }
}

/// Notes about settings of `accelerate launch` that do not reach this process.
fn by_accelerate(variable: impl Fn(&str) -> Option<String>, launched: bool, names_file: bool) -> Vec<&'static str> {
    let mut notes = Vec::new();
    let Some(precision) = variable("ACCELERATE_MIXED_PRECISION") else { return notes };
    let asked = |name: &str| variable(name).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    // `accelerate launch` sets the port only if it was to start several processes.
    if !launched && variable("MASTER_PORT").is_some() && variable("WORLD_SIZE").is_none() {
        notes.push(
            "accelerate launch has started one process: with --cpu, mpirun starts the others (--mpirun_hostfile); \
             `tunesmith launch --nproc N -- train …` starts N ranks",
        );
    }
    let shares = asked("ACCELERATE_USE_FSDP") || asked("ACCELERATE_USE_DEEPSPEED");
    if !names_file && (shares || precision != "no") {
        notes.push(
            "only the number of processes is read from accelerate launch; for FSDP, DeepSpeed and mixed precision name its file \
             too: ACCELERATE_CONFIG_FILE=FILE",
        );
    }
    notes
}

/// Resolves the configuration of a `train …` command before the number of ranks is known, and returns it with `NUM_GPUS`. `None`
/// if the words cannot be parsed; the ranks then report that.
///
/// # Errors
/// [`crate::Kind::Config`]: the configuration is refused.
pub fn resolved(words: &[String]) -> Result<Option<(Resolved, Option<String>)>> {
    #[derive(clap::Parser)]
    struct Words {
        #[command(flatten)]
        args: Args,
    }
    let Ok(Words { args }) = <Words as clap::Parser>::try_parse_from(words) else { return Ok(None) };
    let (job, _) = claim_word(&args.job, args.resume.as_deref());
    Ok(Some((job.load_partial(&[])?, job.config.num_gpus())))
}

/// Corrects an optional value: in `--resume CONFIG` or `--resume KEY=VALUE`, clap takes the next word as the checkpoint. A word
/// that is not a checkpoint is moved to the configuration's words.
fn claim_word(job: &JobArgs, resume: Option<&str>) -> (JobArgs, Option<String>) {
    let mut job = job.clone();
    let resume = resume.map(|word| {
        if is_checkpoint(word) {
            word.to_owned()
        } else {
            job.config.words.push(word.to_owned());
            "latest".to_owned()
        }
    });
    (job, resume)
}

fn tell(first: bool, text: &str) {
    if first {
        print_text(&format!("{text}\n"));
    }
}

#[cfg(test)]
mod tests {
    use super::super::args::ConfigArgs;
    use super::*;

    #[test]
    fn what_accelerate_does_not_hand_on_is_told() {
        let notes = |variables: &[(&str, &str)], launched, names_file| {
            let variable =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            by_accelerate(variable, launched, names_file).join("; ")
        };
        let plain = ("ACCELERATE_MIXED_PRECISION", "no");
        assert_eq!(notes(&[], false, false), "");
        assert_eq!(notes(&[plain], true, false), "");
        assert!(notes(&[plain, ("MASTER_PORT", "29500")], false, false).contains("has started one process"));
        let fsdp = [plain, ("ACCELERATE_USE_FSDP", "true")];
        assert!(notes(&fsdp, true, false).contains("ACCELERATE_CONFIG_FILE=FILE"));
        assert_eq!(notes(&fsdp, true, true), "");
        assert!(notes(&[("ACCELERATE_MIXED_PRECISION", "bf16")], true, false).contains("mixed precision"));
    }

    fn claim(resume: &str) -> (Vec<String>, Option<String>) {
        let config = ConfigArgs { words: vec!["a.yaml".to_owned()] };
        let (job, resume) = claim_word(&JobArgs { config, model: None, data: Vec::new() }, Some(resume));
        (job.config.words, resume)
    }

    #[test]
    fn resume_gives_back_a_word_that_is_no_checkpoint() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let name = file.path().to_str().unwrap();
        let words = |more: &str| vec!["a.yaml".to_owned(), more.to_owned()];
        assert_eq!(claim("TRAIN_SEED=1"), (words("TRAIN_SEED=1"), Some("latest".to_owned())));
        assert_eq!(claim(name), (words(name), Some("latest".to_owned())));
        let run = tempfile::tempdir().unwrap();
        let best = run.path().join("best");
        std::fs::write(&best, "checkpoint-000010\n").unwrap();
        assert_eq!(claim(best.to_str().unwrap()).1.as_deref(), best.to_str(), "a file that names a checkpoint");
        assert_eq!(claim("runs/a/checkpoint-000010").1.as_deref(), Some("runs/a/checkpoint-000010"));
    }
}
