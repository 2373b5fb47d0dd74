//! Every command that runs a model uses the GPU that `model.device` names, and commands that describe the machine show its
//! GPUs. The GPUs are those of the stand-in.
use crate::run::ends::metrics;
use crate::run::fixture::{Fixture, said, tunesmith};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;
use tunesmith::device::cuda::testing;

/// A command on the stand-in's GPUs, without `nvidia-smi`.
fn on_gpus(words: &[&str], cache: &Path, environment: &[(&str, &str)]) -> Output {
    let mut command = tunesmith(words);
    command.env("TUNESMITH_CUDA_LIBRARIES", testing::stand_in()).env("XDG_CACHE_HOME", cache).env("PATH", "/bin");
    command.envs(environment.iter().copied()).output().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn every_command_computes_on_the_gpu_that_is_named() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["model.device: cuda:1", "train.max_steps: 2", "gen.max_new_tokens: 4"]);
    let ask = |words: &[&str]| {
        let counts = fixture.path("launches");
        let _ = std::fs::remove_file(&counts);
        let ended = on_gpus(words, fixture.root.path(), &[("TUNESMITH_STAND_IN_COUNT", text(&counts))]);
        assert!(ended.status.success(), "{words:?}: {}", said(&ended));
        let launches = std::fs::read_to_string(&counts).unwrap_or_default();
        assert!(launches.lines().count() > 5, "{words:?} launches no kernels:\n{launches}");
        said(&ended)
    };
    let (merged, exported) = (fixture.path("merged"), fixture.path("exported"));
    let gpu = "GPU 1 (Stand-in GPU)";
    for words in [
        &["train", text(&config)][..],
        &["infer", text(&config), "--prompt", "abc", "--raw"],
        &["eval", text(&config)],
        &["merge", text(&config), "--output", text(&merged)],
        &["export", text(&config), "--hf", "--output", text(&exported)],
        &["memory-check", text(&config)],
    ] {
        let found = ask(words);
        assert!(found.contains(gpu), "{words:?} does not say where it computes: {found}");
    }
    // A model that was trained as a whole, too.
    let whole = fixture.config(
        "whole",
        &["model.device: cuda:1", "train.max_steps: 1", "tuning.mode: full", "train.output_dir: OUT-whole"],
    );
    ask(&["train", text(&whole)]);
    let found = ask(&["eval", text(&whole), "--overwrite"]);
    assert!(found.contains(gpu), "{found}");
    ask(&["bench", "--model", text(&fixture.path("model")), "--device", "cuda:1", "--seq", "16", "--steps", "1"]);
}

#[test]
fn a_merge_that_does_not_fit_the_gpu_is_checked_on_the_cpu_and_says_so() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 1"]);
    assert!(on_gpus(&["train", text(&config)], fixture.root.path(), &[]).status.success());
    let merged = fixture.path("merged");
    let words = ["merge", text(&config), "model.device=cuda", "--output", text(&merged)];
    let ended = on_gpus(&words, fixture.root.path(), &[("TUNESMITH_STAND_IN_MEMORY", "33600000")]);
    assert!(ended.status.success(), "{}", said(&ended));
    assert!(said(&ended).contains("the merge is checked on the CPU: in float32 the model takes"), "{}", said(&ended));
}

#[test]
fn gpus_and_their_libraries_are_described() {
    let folder = tempfile::tempdir().unwrap();
    let ask = |words: &[&str], environment: &[(&str, &str)]| {
        let ended = on_gpus(words, folder.path(), environment);
        assert!(ended.status.success(), "{words:?}: {}", said(&ended));
        said(&ended)
    };
    let place = testing::stand_in().join("libnvrtc.so.13");
    for words in [&["doctor"][..], &["gpu-info", "--no-measure"]] {
        let found = ask(words, &[]);
        assert!(found.contains(text(&place)) && found.contains("13.0"), "{words:?}: {found}");
        assert!(found.contains("NCCL"), "{words:?}: {found}");
    }
    let found = ask(&["gpu-info", "--no-measure"], &[]);
    let memory = "Stand-in GPU, 4.00 GiB (4.00 GiB free, a run may hold 3.60 GiB), compute capability 9.0";
    assert!(found.contains(memory), "{found}");
    let found = ask(&["memory-check"], &[]);
    assert!(found.contains("a run may hold 3.60 GiB on GPU 0, 3.60 GiB on GPU 1 now"), "{found}");
    for (environment, says) in [
        (("TUNESMITH_STAND_IN_DRIVER", "11080"), "the driver runs CUDA 11.8, and CUDA 12.0 is needed"),
        (("TUNESMITH_STAND_IN_DEVICES", "0"), "the CUDA driver shows no GPU"),
        (("TUNESMITH_STAND_IN_CAPABILITY", "75"), "compute capability 7.5, and 8.0 is needed"),
    ] {
        let found = ask(&["doctor"], &[environment]);
        assert!(found.contains(says) && found.contains("model.device: cpu"), "{environment:?}: {found}");
    }
}

/// A folder with all of the stand-in's libraries but one.
fn without(library: &str, folder: &Path) -> PathBuf {
    let there = folder.join(format!("without-{library}"));
    std::fs::create_dir(&there).unwrap();
    for entry in std::fs::read_dir(testing::stand_in()).unwrap().flatten() {
        let name = entry.file_name();
        if entry.path().is_file() && !name.to_str().unwrap().starts_with(library) {
            std::os::unix::fs::symlink(entry.path(), there.join(name)).unwrap();
        }
    }
    there
}

#[test]
fn a_missing_library_is_named_and_auto_says_why_it_takes_the_cpu() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 1"]);
    for (library, package) in [("libnvrtc", "nvidia-cuda-nvrtc-cu12"), ("libcublasLt", "nvidia-cublas-cu12")] {
        let folder = without(library, fixture.root.path());
        let environment = [("TUNESMITH_CUDA_LIBRARIES", text(&folder))];
        let words = ["train", text(&config), "--overwrite", "model.device=cuda"];
        let refused = on_gpus(&words, fixture.root.path(), &environment);
        assert_eq!(refused.status.code(), Some(10), "{library}: {}", said(&refused));
        assert!(said(&refused).contains(package), "{library}: {}", said(&refused));
        let words = ["train", text(&config), "--overwrite", "model.device=auto"];
        let ended = on_gpus(&words, fixture.root.path(), &environment);
        assert!(ended.status.success(), "{library}: {}", said(&ended));
        let says = "the CPU, chosen by model.device: auto: the ";
        assert!(said(&ended).contains(says) && said(&ended).contains(package), "{library}: {}", said(&ended));
    }
    let words = ["train", text(&config), "--overwrite", "model.device=auto"];
    let ended = on_gpus(&words, fixture.root.path(), &[("TUNESMITH_STAND_IN_CAPABILITY", "75")]);
    assert!(ended.status.success() && said(&ended).contains("compute capability 7.5"), "{}", said(&ended));
}

#[test]
fn the_kernels_of_the_cpu_are_refused_on_a_gpu() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 1", "model.device: cuda", "tuning.backend: reference"]);
    let refused = on_gpus(&["train", text(&config)], fixture.root.path(), &[]);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert!(said(&refused).contains("the run computes on GPU 0 (Stand-in GPU)"), "{}", said(&refused));
}

#[test]
fn kernels_are_compiled_again_where_they_cannot_be_cached() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 1", "model.device: cuda"]);
    // A file where the folder would be: even root cannot write there.
    let cache = fixture.path("no-folder");
    std::fs::write(&cache, "").unwrap();
    let ended = on_gpus(&["train", text(&config)], &cache, &[]);
    assert!(ended.status.success(), "{}", said(&ended));
}

#[test]
fn a_failing_call_of_a_library_is_named() {
    let fixture = Fixture::new();
    let lines = ["model.device: cuda", "train.max_steps: 3", "train.save_strategy: steps", "train.save_steps: 1"];
    let config = fixture.config("run", &lines);
    for (fault, says) in [
        ("nvrtcCreateProgram:2", "nvrtcCreateProgram"),
        ("nvrtcCompileProgram:5", "nvrtcCompileProgram"),
        ("nvrtcGetCUBIN:1", "nvrtcGetCUBIN"),
        ("cublasLtCreate:1", "cublasLtCreate"),
        ("cublasLtMatmulDescCreate:3", "cublasLtMatmulDescCreate"),
        ("cublasLtMatrixLayoutCreate:4", "cublasLtMatrixLayoutCreate"),
        ("cublasLtMatmulPreferenceCreate:1", "cublasLtMatmulPreferenceCreate"),
        ("cublasLtMatmulAlgoGetHeuristic:2", "cublasLtMatmulAlgoGetHeuristic"),
        ("cublasLtMatmul:1", "cublasLtMatmul"),
        ("cublasLtMatmul:150", "cublasLtMatmul"),
    ] {
        // A cache of its own: what is compiled is compiled in this run.
        let cache = fixture.path(&fault.replace(':', "-"));
        let words = ["train", text(&config), "--overwrite"];
        let ended = on_gpus(&words, &cache, &[("TUNESMITH_STAND_IN_FAIL", fault)]);
        assert_eq!(ended.status.code(), Some(10), "{fault}: {}", said(&ended));
        assert!(said(&ended).contains(says), "{fault}: {}", said(&ended));
    }
}

#[test]
fn a_run_whose_gpu_is_lost_goes_on_from_its_checkpoint() {
    let fixture = Fixture::new();
    let lines = ["model.device: cuda", "train.max_steps: 4", "train.save_strategy: steps", "train.save_steps: 1"];
    let config = fixture.config("run", &lines);
    let there = format!("train.output_dir={}", fixture.path("whole").display());
    let whole = on_gpus(&["train", text(&config), &there], fixture.root.path(), &[]);
    assert!(whole.status.success(), "{}", said(&whole));
    let losses = |out: &str| metrics(&fixture.path(out)).0.iter().map(|line| line["loss"].clone()).collect::<Vec<_>>();
    let mut resumed = 0;
    for launches in [100, 400, 600, 800] {
        let words = ["train", text(&config), "--overwrite"];
        let fault = format!("lost:{launches}");
        let ended = on_gpus(&words, fixture.root.path(), &[("TUNESMITH_STAND_IN_FAIL", &fault)]);
        assert_eq!(ended.status.code(), Some(10), "{fault}: {}", said(&ended));
        assert!(said(&ended).contains("CUDA_ERROR_DEVICE_UNAVAILABLE"), "{fault}: {}", said(&ended));
        let checkpoints = std::fs::read_dir(fixture.path("out")).into_iter().flatten().flatten();
        let some = checkpoints.into_iter().any(|it| it.file_name().to_str().unwrap().starts_with("checkpoint-"));
        if !some {
            continue;
        }
        let again = on_gpus(&["train", text(&config), "--resume"], fixture.root.path(), &[]);
        assert!(again.status.success(), "{fault}: {}", said(&again));
        assert_eq!(losses("out"), losses("whole"), "{fault}");
        resumed += 1;
    }
    assert!(resumed > 1, "some are lost after a checkpoint");
}

#[test]
fn the_gpu_report_measures_in_small_and_writes_json() {
    let folder = tempfile::tempdir().unwrap();
    let (out, binaries) = (folder.path().join("out"), folder.path().join("binaries"));
    std::fs::create_dir(&binaries).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_tunesmith"), binaries.join("tunesmith")).unwrap();
    let report = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/gpu-report");
    let mut command = std::process::Command::new(report);
    command.args(["--out", text(&out), "libraries", "plans", "lora", "decode"]);
    command.env("TUNESMITH_CUDA_LIBRARIES", testing::stand_in()).env("XDG_CACHE_HOME", folder.path());
    command.env("TUNESMITH_REPORT_SMALL", "1").env("TUNESMITH_REPORT_BINARIES", &binaries);
    let ended = command.output().unwrap();
    assert!(ended.status.success(), "{}", said(&ended));
    let runs: Vec<Value> = serde_json::from_slice(&std::fs::read(out.join("report.json")).unwrap()).unwrap();
    let of = |name: &str| runs.iter().find(|run| run["name"] == name).unwrap_or_else(|| panic!("no {name}: {runs:?}"));
    assert!(of("lora-8b-all-linear")["result"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(of("decode-8b-nf4")["result"]["runs"].as_array().unwrap().len(), 2);
    assert!(of("plan-70b")["command"].as_str().unwrap().contains("--vram 139GiB"));
    let markdown = std::fs::read_to_string(out.join("report.md")).unwrap();
    assert!(markdown.contains("Stand-in GPU") && markdown.contains("### lora-8b-all-linear"), "{markdown}");
}
