//! Ranks with a GPU each, over the stand-ins for GPUs and NCCL. Gradients and weights that go from GPU to GPU have the same
//! bits as those that go through main memory, and no rank is left behind when another is lost. The stand-in for NCCL works
//! with a delay. So a rank gets wrong numbers if it does not wait for NCCL, or NCCL does not wait for it.
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use super::fixture::{Fixture, said, tunesmith};
use super::ranks::{alive, children, curve, send, wait_for_lines};
use crate::comm::{gloo_is_there, stand_in};

/// Two ranks on so many GPUs.
fn launch(config: &Path, gpus: usize, timeout: &str, words: &[&str], variables: &[(&str, &str)]) -> Child {
    let flags = ["launch", "--nproc", "2", "--timeout", timeout, "--", "train", config.to_str().unwrap()];
    let mut command = tunesmith(&[&flags[..], &["model.device=cuda"], words].concat());
    command.envs(stand_in(gpus)).env("TUNESMITH_STAND_IN_LATE", "4").env("XDG_CACHE_HOME", config.parent().unwrap());
    command.envs(variables.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs two ranks into the folder `name`, checks that the run succeeds, and returns its output.
fn run(fixture: &Fixture, config: &Path, name: &str, words: &[&str], variables: &[(&str, &str)]) -> String {
    let to = format!("train.output_dir={}", fixture.path(name).display());
    let output = launch(config, 2, "60", &[&[&*to], words].concat(), variables).wait_with_output().unwrap();
    assert!(output.status.success(), "{name}: {}", said(&output));
    said(&output)
}

/// The same with ranks as threads, which exchange everything through main memory.
fn through_host(fixture: &Fixture, config: &Path, name: &str, words: &[&str]) {
    let to = format!("train.output_dir={}", fixture.path(name).display());
    let args = ["train", config.to_str().unwrap(), "model.device=cuda", "train.dp_ranks=2", &to];
    let mut command = tunesmith(&[&args[..], words].concat());
    command.envs(stand_in(2)).env("XDG_CACHE_HOME", config.parent().unwrap());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{name}: {}", said(&output));
}

/// Every loss and norm, and the bytes of the trained weights.
fn outcome(out: &Path) -> (Vec<f64>, Vec<f64>, Vec<u8>) {
    let weights = ["adapter/adapter_model.safetensors", "model/model.safetensors"];
    let weights = weights.iter().find_map(|file| std::fs::read(out.join(file)).ok()).expect("trained weights");
    (curve(out, "loss"), curve(out, "grad_norm"), weights)
}

#[test]
fn what_goes_from_gpu_to_gpu_has_the_bits_of_main_memory() {
    let fixture = Fixture::untied();
    let config = fixture.config("run", &["train.max_steps: 4", "train.eval_strategy: steps", "train.eval_steps: 4"]);
    for (name, words) in [
        ("ddp", &["train.strategy=ddp"][..]),
        ("small", &["train.strategy=ddp", "train.ddp_bucket_cap_mb=1", "tuning.mode=full"]),
        ("narrow", &["train.strategy=ddp", "train.grad_dtype=bfloat16"]),
        ("zero1", &["train.strategy=zero1"]),
        ("zero2", &["train.strategy=zero2", "train.grad_dtype=bfloat16"]),
        ("zero3", &["train.strategy=zero3", "tuning.mode=full"]),
        ("fsdp", &["train.strategy=fsdp", "model.dtype=bfloat16"]),
        ("grad_op", &["train.strategy=fsdp", "train.fsdp_sharding_strategy=shard_grad_op"]),
        ("hybrid", &["train.strategy=fsdp", "train.fsdp_sharding_strategy=hybrid_shard"]),
        ("coded", &["train.strategy=zero3", "model.quantization=nf4"]),
        ("waiting", &["train.strategy=zero3", "model.quantization=nf4", "train.offload_param=true"]),
        ("waiting copies", &["train.strategy=ddp", "train.offload_param=true"]),
    ] {
        let (host, device) = (format!("{name} host"), format!("{name} device"));
        let counts = fixture.path(&format!("{name} counts"));
        // Threads call it dp; a later word replaces an earlier one.
        let as_threads: &[&str] = if words[0] == "train.strategy=ddp" { &["train.strategy=dp"] } else { &[] };
        through_host(&fixture, &config, &host, &[words, as_threads].concat());
        let counted = [("TUNESMITH_STAND_IN_COUNT", counts.to_str().unwrap())];
        let text = run(&fixture, &config, &device, words, &counted);
        assert!(text.contains("2 processes over nccl"), "{name}: {text}");
        let counts = std::fs::read_to_string(counts).unwrap();
        assert!(counts.contains("rank_sums"), "{name}: gradients are added on the GPU: {counts}");
        assert!(outcome(&fixture.path(&host)) == outcome(&fixture.path(&device)), "{name}: the same bits");
    }
    for (name, other) in [("coded", "waiting"), ("ddp", "waiting copies")] {
        let [one, other] = [name, other].map(|name| outcome(&fixture.path(&format!("{name} device"))));
        assert!(one == other, "{name}: weights that wait on the host change no bit");
    }
}

#[test]
fn files_of_deepspeed_and_accelerate_train_between_gpus() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 4"]);
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/");
    for (name, file) in [
        ("zero1", "deepspeed/zero1.json"),
        ("zero2", "deepspeed/zero2.json"),
        ("zero3", "deepspeed/zero3.json"),
        ("zero3", "deepspeed/zero3_offload.json"),
    ] {
        let _ = std::fs::remove_dir_all(fixture.path(name));
        through_host(&fixture, &config, name, &[&format!("train.strategy={name}")]);
        let file = format!("train.deepspeed={root}{file}");
        let text = run(&fixture, &config, "deepspeed", &[&file, "train.batch_size=2"], &[]);
        assert!(text.contains("2 processes over nccl"), "{text}");
        assert!(outcome(&fixture.path(name)) == outcome(&fixture.path("deepspeed")), "{name}");
        std::fs::remove_dir_all(fixture.path("deepspeed")).unwrap();
    }
    for (name, threads, file) in [("fsdp", "fsdp", "multi_gpu_fsdp.yaml"), ("ddp", "dp", "multi_gpu_ddp.yaml")] {
        through_host(&fixture, &config, name, &[&format!("train.strategy={threads}")]);
        let file = format!("{root}configs/accelerate/{file}");
        let words = ["train.bf16=false"];
        let text = run(&fixture, &config, "accelerate", &words, &[("ACCELERATE_CONFIG_FILE", &file)]);
        assert!(text.contains(&format!("{name}: 2 processes over nccl")), "{text}");
        assert!(outcome(&fixture.path(name)) == outcome(&fixture.path("accelerate")), "{name}");
        std::fs::remove_dir_all(fixture.path("accelerate")).unwrap();
    }
}

#[test]
fn ranks_that_share_a_gpu_go_through_main_memory_and_say_so() {
    if !gloo_is_there() {
        return;
    }
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 2"]);
    let output = launch(&config, 1, "60", &[], &[]).wait_with_output().unwrap();
    let text = said(&output);
    assert!(output.status.success() && text.contains("2 processes over gloo"), "{text}");
    assert_eq!(text.matches("no NCCL between ranks, gradients go through main memory over Gloo").count(), 1, "{text}");
    assert!(text.contains("share one GPU (GPU-00112233"), "{text}");
    let refused = launch(&config, 1, "60", &["train.ddp_backend=nccl", "--overwrite"], &[]).wait_with_output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert!(said(&refused).contains("train.ddp_backend: nccl, but ") && said(&refused).contains("share one GPU"));
}

#[test]
fn a_rank_that_is_killed_or_stopped_ends_the_others() {
    let fixture = Fixture::new();
    let config = fixture.config("run", &["train.max_steps: 100000"]);
    for (strategy, signal, timeout) in [
        ("ddp", libc::SIGKILL, "30"),
        ("fsdp", libc::SIGKILL, "30"),
        ("ddp", libc::SIGSTOP, "3"),
        ("fsdp", libc::SIGSTOP, "3"),
    ] {
        let launcher = launch(&config, 2, timeout, &["--overwrite", &format!("train.strategy={strategy}")], &[]);
        wait_for_lines(&fixture.path("out"), 3);
        let ranks = children(launcher.id());
        assert_eq!(ranks.len(), 2);
        let began = Instant::now();
        send(ranks[1], signal);
        let output: Output = launcher.wait_with_output().unwrap();
        let text = said(&output);
        assert!(began.elapsed() < Duration::from_secs(20), "{strategy}: {:?}: {text}", began.elapsed());
        assert!(ranks.iter().all(|&rank| !alive(rank)), "{strategy}: a rank is left behind");
        assert_eq!(output.status.code(), Some(7), "{strategy}: {text}");
        let names = match signal {
            libc::SIGKILL => text.contains("rank 1 was killed by signal 9"),
            _ => text.contains("peer error: rank 0: ") && text.contains("rank 1 did not answer"),
        };
        assert!(names, "{strategy}: {text}");
        std::fs::remove_dir_all(fixture.path("out")).unwrap();
    }
}
