//! Configuration files of DeepSpeed, Accelerate and FSDP: each of their keys has an outcome, and the values become our
//! settings.
use super::*;
use serde_json::Value as Json;
use tunesmith::config::foreign::{Format, KeyOutcome, Outcome, docs};

/// The packages' own lists of keys.
fn golden() -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/foreign/keys.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn keys(kind: &str) -> Vec<String> {
    golden()[kind].as_array().unwrap().iter().map(|key| key.as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_key_of_the_packages_is_in_the_tables_and_no_other() {
    for (format, kind) in [(Format::DeepSpeed, "deepspeed"), (Format::Accelerate, "accelerate"), (Format::Fsdp, "fsdp")]
    {
        let keys = keys(kind);
        assert!(keys.len() > 20, "{kind}");
        for key in &keys {
            assert!(format.covering(key).is_some(), "{kind}: {key} is in no table");
        }
        for name in format.keys() {
            let named = |key: &String| format.covering(key) == Some(name);
            // What Accelerate's section adds to the keys that Transformers names.
            let of_accelerate = || keys_of_accelerate().contains(&format!("fsdp_config.fsdp_{name}"));
            let theirs = keys.iter().any(named) || (format == Format::Fsdp && of_accelerate());
            assert!(theirs, "{kind}: {name} is no key of theirs");
        }
        let mut names: Vec<&str> = format.keys().collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{kind}: a key has two lines");
    }
}

fn keys_of_accelerate() -> Vec<String> {
    keys("accelerate")
}

#[test]
fn the_page_is_generated_from_the_tables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/foreign-configs.md");
    assert!(
        std::fs::read_to_string(path).unwrap_or_default() == docs::markdown(),
        "docs/foreign-configs.md is not what crates/config/src/foreign says; regenerate it:\n  \
         cargo run --quiet -- config --foreign > docs/foreign-configs.md"
    );
    assert!(!docs::markdown().contains("|  |"), "a key without a word");
}

/// A configuration that names `ds.json`, and that file.
fn with_deepspeed(yaml: &str, json: &str) -> Folder {
    let folder = Folder::new(&[("ds.json", json)]);
    folder.write("a.yaml", format!("{yaml}\n"));
    folder
}

fn load_ds(yaml: &str, json: &str) -> Result<Resolved, String> {
    let folder = with_deepspeed(yaml, json);
    let word = format!("DEEPSPEED_CONFIG={}", folder.path("ds.json").display());
    let without = |text: String| text.replace(&format!("{}/", folder.0.path().display()), "");
    folder.load(&[&word], &[]).map_err(|error| without(error.to_string()))
}

fn value<'a>(resolved: &'a Resolved, key: &str) -> &'a Json {
    &resolved.settings.iter().find(|setting| setting.key == key).unwrap_or_else(|| panic!("{key}")).value
}

const FULL: &str = r#"{
    // Comments of three kinds.
	"train_batch_size": 32, # with a tab before it
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4, /* and of
    several lines */
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5,
        "warmup_num_steps": 500, "warmup_type": "linear", "total_num_steps": 1000}},
    "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": true, "contiguous_gradients": true,
        "allgather_partitions": true, "allgather_bucket_size": 2e8, "offload_optimizer": {"device": "cpu", "pin_memory": true}},
    "data_types": {"grad_accum_dtype": "bf16"},
    "tensorboard": {"enabled": true, "output_path": "runs/tb", "job_name": "first"},
    "wall_clock_breakdown": false,
    "flops_profiler": {"enabled": false, "profile_step": 1}
}"#;

#[test]
fn a_file_of_deepspeed_becomes_settings_with_their_places() {
    let resolved = load_ds("", FULL).unwrap();
    let expected = [
        ("train.batch_size", "4"),
        ("train.grad_accum", "4"),
        ("train.max_grad_norm", "0.5"),
        ("train.optim", "\"adamw_torch\""),
        ("train.learning_rate", "3e-5"),
        ("train.adam_beta1", "0.8"),
        ("train.adam_beta2", "0.95"),
        ("train.adam_epsilon", "1e-7"),
        ("train.weight_decay", "3e-7"),
        ("train.lr_scheduler_type", "\"linear\""),
        ("train.warmup_steps", "500"),
        ("train.max_steps", "1000"),
        ("train.fp16", "true"),
        ("train.initial_scale_power", "12"),
        ("train.grad_dtype", "\"bfloat16\""),
        ("train.loss_scale_window", "500"),
        ("train.hysteresis", "3"),
        ("train.min_loss_scale", "2.0"),
        ("train.strategy", "\"zero2\""),
        ("train.ddp_bucket_cap_mb", "1908"),
        ("logging.logging_dir", "\"runs/tb\""),
        ("logging.run_name", "\"first\""),
    ];
    for (key, text) in expected {
        assert_eq!(*value(&resolved, key), serde_json::from_str::<Json>(text).unwrap(), "{key}");
        let source = resolved.source(key).to_string();
        assert!(source.contains("ds.json:"), "{key}: {source}");
    }
    assert!(resolved.source("train.max_grad_norm").to_string().ends_with("ds.json:7 gradient_clipping"));
    assert_eq!(resolved.foreign.claims.rows.as_ref().unwrap().0, 32);
    let outcome = |key: &str| {
        let ends = format!(" {key}");
        resolved.foreign.outcomes.iter().find(|one| one.source.to_string().ends_with(&ends)).unwrap().outcome
    };
    assert_eq!(outcome("steps_per_print"), Outcome::NotNeeded);
    assert_eq!(outcome("zero_optimization.allgather_bucket_size"), Outcome::NotNeeded);
    assert_eq!(outcome("zero_optimization.overlap_comm"), Outcome::Same);
    assert_eq!(outcome("zero_optimization.offload_optimizer.device"), Outcome::Taken);
    assert_eq!(value(&resolved, "train.offload_optimizer"), true);
    assert_eq!(outcome("flops_profiler"), Outcome::Same);
    assert_eq!(resolved.notes.len(), 3, "{:?}", resolved.notes);
    let (start, note) = ("not needed: ", &resolved.notes[0]);
    assert!(note.starts_with(start) && note.contains("steps_per_print: 2000 (train.logging_steps says"), "{note}");
}

#[test]
fn auto_is_ours_and_shown() {
    let json = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 8},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "linear", "warmup_min_lr": "auto"}},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"}}"#;
    let resolved = load_ds("train: {batch_size: 2, learning_rate: 0.001}", json).unwrap();
    assert_eq!(value(&resolved, "train.batch_size"), 2);
    assert_eq!(value(&resolved, "train.strategy"), "ddp");
    assert_eq!(value(&resolved, "train.initial_scale_power"), 16, "fp16 is off, so that its scale is not read");
    let text = |key: &str| {
        let auto = resolved
            .foreign
            .outcomes
            .iter()
            .find(|one| one.outcome == Outcome::Auto && one.ours.as_deref() == Some(key));
        auto.unwrap_or_else(|| panic!("{key}")).text()
    };
    assert!(text("train.batch_size").starts_with("train.batch_size: 2 ("), "{}", text("train.batch_size"));
    assert_eq!(text("train.max_grad_norm"), "train.max_grad_norm: 1.0 (default)");
    assert_eq!(text("train.effective_batch"), "train.batch_size x train.grad_accum x ranks");
    let on = load_ds("train: {fp16: true}", json).unwrap();
    assert_eq!(value(&on, "train.initial_scale_power"), 8);
}

/// The rates differ from DeepSpeed's, so that "not needed" would be wrong.
#[test]
fn a_logarithmic_warm_up_becomes_linear_and_is_called_changed() {
    let outcomes = |params: &str| {
        let json =
            format!(r#"{{"scheduler": {{"type": "WarmupDecayLR", "params": {{"warmup_num_steps": 5{params}}}}}}}"#);
        let resolved = load_ds("", &json).unwrap();
        let changed = |one: &&KeyOutcome| one.outcome == Outcome::Changed;
        let keys = resolved.foreign.outcomes.iter().filter(changed).map(KeyOutcome::given).collect::<Vec<_>>();
        (keys, resolved.notes)
    };
    assert_eq!(outcomes(r#", "warmup_type": "linear""#), (vec![], vec![]));
    for (params, key) in [
        ("", r#"scheduler.type: "WarmupDecayLR""#),
        (r#", "warmup_type": "log""#, r#"scheduler.params.warmup_type: "log""#),
    ] {
        let (keys, notes) = outcomes(params);
        assert_eq!(keys, [key]);
        assert!(notes.len() == 1 && notes[0].starts_with("changed: ") && notes[0].contains("linear"), "{notes:?}");
    }
}

#[test]
fn sizes_that_deepspeed_leaves_out_are_made_up_when_the_ranks_are_known() {
    let settled = |yaml: &str, json: &str, world: usize| {
        let settled = load_ds(yaml, json).unwrap().in_world(world, world, Some("torchrun"))?;
        Ok::<_, Error>((value(&settled, "train.batch_size").clone(), value(&settled, "train.grad_accum").clone()))
    };
    let numbers = |batch: u64, accum: u64| (Json::from(batch), Json::from(accum));
    let micro = r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}"#;
    assert_eq!(settled("", micro, 2).unwrap(), numbers(4, 4));
    assert_eq!(settled("", micro, 8).unwrap(), numbers(4, 1));
    assert_eq!(settled("", r#"{"train_batch_size": 32, "gradient_accumulation_steps": 2}"#, 4).unwrap(), numbers(4, 2));
    assert_eq!(settled("", r#"{"train_batch_size": 32}"#, 4).unwrap(), numbers(8, 1));
    let said = settled("", micro, 3).unwrap_err().to_string();
    assert!(said.contains("32 rows a step cannot be made of 4 rows of a micro-batch x 3 ranks"), "{said}");
    let said = settled("train: {grad_accum: 2}", micro, 2).unwrap_err().to_string();
    assert!(
        said.contains("train_batch_size: 32, but train.batch_size 4 x train.grad_accum 2 x 2 ranks = 16"),
        "{said}"
    );
}

#[test]
fn both_say_the_same_or_both_are_shown() {
    let folder = Folder::new(&[("ds.json", r#"{"gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 4}"#)]);
    let named = format!("train: {{deepspeed: {}, ", folder.path("ds.json").display());
    folder.write("a.yaml", format!("{named}max_grad_norm: 0.5, batch_size: auto}}\n"));
    assert_eq!(value(&folder.load(&[], &[]).unwrap(), "train.batch_size"), 4, "auto is no contradiction");
    folder.write("a.yaml", format!("{named}max_grad_norm: 1.0}}\n"));
    let said = folder.refusal(&[], &[]);
    assert!(
        said.contains(
            "train.max_grad_norm: 1.0 (a.yaml:1) contradicts train.max_grad_norm: 0.5 (ds.json:1 gradient_clipping)"
        ),
        "{said}"
    );
    // The shell goes before both.
    let resolved = folder.load(&["train.max_grad_norm=2"], &[("TRAIN_BATCH_SIZE", "1")]).unwrap();
    assert_eq!(
        (value(&resolved, "train.max_grad_norm").as_f64(), value(&resolved, "train.batch_size").as_u64()),
        (Some(2.0), Some(1))
    );
    assert!(
        resolved.foreign.outcomes.iter().all(|one| one.outcome == Outcome::Overridden),
        "{:?}",
        resolved.foreign.outcomes
    );
    // A file that the shell names goes before one that it does not.
    folder.write("a.yaml", "train: {max_grad_norm: 1.0}\n");
    let word = folder.path("ds.json").display().to_string();
    let resolved = folder.load(&[], &[("DEEPSPEED_CONFIG", &word)]).unwrap();
    assert_eq!(value(&resolved, "train.max_grad_norm"), 0.5);
}

#[test]
fn weights_of_deepspeed_wait_on_the_host() {
    for json in [
        r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": true}}}"#,
        r#"{"zero_optimization": {"stage": 3, "cpu_offload_param": true}}"#,
    ] {
        assert_eq!(value(&load_ds("", json).unwrap(), "train.offload_param"), true, "{json}");
    }
    let none = load_ds("", r#"{"zero_optimization": {"offload_param": {"device": "none"}}}"#).unwrap();
    assert_eq!(value(&none, "train.offload_param"), false);
    let said = load_ds("", r#"{"zero_optimization": {"offload_param": {"device": "nvme"}}}"#).unwrap_err();
    assert!(said.contains("does not offload to disk"), "{said}");
}

#[test]
fn what_is_unknown_or_impossible_is_refused_with_its_place() {
    for (json, expected) in [
        (
            r#"{"gradient_cliping": 1}"#,
            "ds.json:1 gradient_cliping: unknown to DeepSpeed's configuration\n  hint: did you mean gradient_clipping?",
        ),
        (
            "{\n \"zero_optimization\": {\n  \"stag\": 2}}",
            "ds.json:3 zero_optimization.stag: unknown to DeepSpeed's configuration\n  hint: did you mean zero_optimization.stage?",
        ),
        (r#"{"loss_scale": 0}"#, "did you mean fp16.loss_scale?"),
        (r#"{"stage": 2}"#, "did you mean zero_optimization.stage?"),
        (r#"{"zero_optimization": 2}"#, "expected keys, within braces"),
        (
            r#"{"zero_optimization": {"stage": 4}}"#,
            "zero_optimization.stage: expected 0, 1, 2 or 3, found the integer 4",
        ),
        (r#"{"optimizer": {"type": "OneBitAdam"}}"#, "optimizer.type: \"OneBitAdam\" is not supported"),
        (r#"{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}"#, "weight decay is decoupled"),
        (r#"{"scheduler": {"type": "OneCycle"}}"#, "OneCycle and LRRangeTest are not part"),
        (r#"{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}"#, "does not offload to disk"),
        (r#"{"tensor_parallel": {"autotp_size": 2}}"#, "tensor_parallel: {\"autotp_size\":2} is not supported"),
        (r#"{"gradient_clipping": "x"}"#, "gradient_clipping: \"x\" is not supported"),
        (r#"{"gradient_clipping": 1, "gradient_clipping": 2}"#, "gradient_clipping: it is given twice"),
        (
            r#"{"bf16": {"enabled": true}, "fp16": {"enabled": true}}"#,
            "train.bf16: true (ds.json:1 bf16.enabled) contradicts train.fp16: true",
        ),
        (r#"{"train_batch_size": -1}"#, "expected an integer of at least 1"),
        ("[1]", "expected sections"),
        ("{\"a\": ", "ds.json"),
    ] {
        let said = load_ds("", json).unwrap_err();
        assert!(said.contains(expected), "{json}: {said}");
    }
    let folder = Folder::new(&[("a.yaml", "train: {deepspeed: ds.jsn}\n")]);
    assert!(folder.refusal(&[], &[]).contains("cannot read ds.jsn"));
}

#[test]
fn the_shipped_files_ask_for_their_stage_and_contradict_nothing() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (file, strategy) in [("zero1", "zero1"), ("zero2", "zero2"), ("zero3", "zero3"), ("zero3_offload", "zero3")] {
        let word = format!("DEEPSPEED_CONFIG={}", root.join(format!("deepspeed/{file}.json")).display());
        for config in ["run_lora", "run_full", "run_bnb", "multi_gpu_config", "a100_pair"] {
            let path = root.join(format!("configs/{config}.yaml"));
            let resolved = config::load_partial(&path, std::slice::from_ref(&word), &[], &[]);
            let resolved = resolved.unwrap_or_else(|error| panic!("{file}, {config}: {error}"));
            assert_eq!(value(&resolved, "train.strategy"), strategy);
            assert_eq!(resolved.notes, Vec::<String>::new(), "{file}: nothing in it is without effect");
        }
    }
    for (file, strategy, processes) in
        [("single_gpu", "single", 1), ("multi_gpu_ddp", "ddp", 2), ("multi_gpu_fsdp", "fsdp", 2)]
    {
        let word = format!("ACCELERATE_CONFIG_FILE={}", root.join(format!("configs/accelerate/{file}.yaml")).display());
        let resolved = config::load_partial(&root.join("configs/run_lora.yaml"), &[word], &[], &[]);
        let resolved = resolved.unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_eq!(value(&resolved, "train.strategy"), strategy);
        assert_eq!(resolved.foreign.claims.processes.as_ref().unwrap().0, processes);
        assert_eq!(resolved.notes, Vec::<String>::new(), "{file}: nothing in it is without effect");
    }
}

#[test]
fn a_file_of_accelerate_becomes_settings_too() {
    let load = |yaml: &str| {
        let folder =
            Folder::new(&[("a.yaml", ""), ("acc.yaml", yaml), ("ds.json", r#"{"zero_optimization": {"stage": 3}}"#)]);
        let yaml = yaml.replace("DS", &folder.path("ds.json").display().to_string());
        folder.write("acc.yaml", yaml);
        let word = format!("train.accelerate={}", folder.path("acc.yaml").display());
        folder.load(&[&word], &[]).map_err(|error| error.to_string())
    };
    let resolved = load("distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 8, gradient_clipping: '0.3', offload_optimizer_device: cpu}\n").unwrap();
    assert_eq!(value(&resolved, "train.strategy"), "zero2");
    assert_eq!(value(&resolved, "train.grad_accum"), 8);
    assert_eq!(value(&resolved, "train.max_grad_norm"), 0.3);
    assert_eq!(value(&resolved, "train.offload_optimizer"), true);
    assert_eq!(value(&resolved, "train.bf16"), true);
    let resolved = load("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: DS\n").unwrap();
    assert_eq!(value(&resolved, "train.strategy"), "zero3");
    assert!(resolved.source("train.strategy").to_string().ends_with("ds.json:1 zero_optimization.stage"));
    let fsdp = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_sharding_strategy: 1, fsdp_activation_checkpointing: true, fsdp_version: 2}\n";
    let resolved = load(fsdp).unwrap();
    assert_eq!(value(&resolved, "train.strategy"), "fsdp");
    assert_eq!(value(&resolved, "train.gradient_checkpointing"), true);
    let said = resolved.in_world(2, 2, Some("torchrun")).unwrap_err().to_string();
    assert!(said.contains("acc.yaml:2 num_processes: 4, but torchrun has started 2 ranks"), "{said}");
    for (yaml, expected) in [
        ("distributed_type: MEGATRON_LM\n", "distributed_type: \"MEGATRON_LM\" is not supported"),
        ("mixed_precision: fp8\n", "fp8 is not part of this version"),
        ("num_proceses: 2\n", "did you mean num_processes?"),
        ("fsdp_config: {fsdp_sharding: FULL_SHARD}\n", "unknown to Accelerate's configuration"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 5}\n",
            "hybrid_shard, which shards weights too",
        ),
        ("compute_environment: AMAZON_SAGEMAKER\n", "machines are your own"),
    ] {
        let said = load(yaml).unwrap_err();
        assert!(said.contains(expected), "{yaml}: {said}");
    }
}

#[test]
fn fsdp_is_asked_for_as_in_transformers() {
    let folder =
        Folder::new(&[("a.yaml", ""), ("fsdp.json", "{\"activation_checkpointing\": true, // yes\n \"version\": 2}")]);
    let file = format!("train.fsdp_config={}", folder.path("fsdp.json").display());
    let resolved = folder.load(&["train.fsdp=full_shard auto_wrap", &file], &[]).unwrap();
    assert_eq!(value(&resolved, "train.strategy"), "fsdp");
    assert_eq!(value(&resolved, "train.gradient_checkpointing"), true);
    let resolved = folder.load(&["train.fsdp=true"], &[]).unwrap();
    assert_eq!(value(&resolved, "train.strategy"), "fsdp");
    folder.write(
        "a.yaml",
        "train:\n  fsdp: [full_shard, auto_wrap]\n  fsdp_config: {cpu_offload: true, min_num_params: 0}\n",
    );
    let resolved = folder.load(&[], &[]).unwrap();
    assert!(resolved.source("train.strategy").to_string().contains("a.yaml:2"));
    assert_eq!(value(&resolved, "train.offload_param"), true);
    assert_eq!(value(&resolved, "train.offload_optimizer"), true);
    let resolved = folder.load(&["train.fsdp=full_shard offload", "train.fsdp_config={}"], &[]).unwrap();
    assert_eq!(value(&resolved, "train.offload_param"), true);
    for (word, expected) in [
        ("train.fsdp=ful_shard", "did you mean full_shard?"),
        ("train.fsdp=hybrid_shard_zero2", "hybrid_shard, which shards weights too"),
        ("train.fsdp=false", "train.fsdp_config without train.fsdp has no effect"),
    ] {
        let said = folder.refusal(&[word], &[]);
        assert!(said.contains(expected), "{word}: {said}");
    }
}

#[test]
fn the_program_shows_what_became_of_each_key() {
    let folder = with_deepspeed(
        RUNNABLE,
        r#"{"gradient_clipping": "auto", "zero_optimization": {"stage": 2}, "steps_per_print": 5}"#,
    );
    let output = folder.tunesmith().args(["config", "a.yaml"]).env("DEEPSPEED_CONFIG", "ds.json").output().unwrap();
    let text = stdout(&output);
    let line =
        |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}"));
    assert!(line("train.strategy").ends_with("ds.json:1 zero_optimization.stage"), "{text}");
    assert!(line("ds.json:1 gradient_clipping").contains("auto         train.max_grad_norm: 1.0 (default)"), "{text}");
    assert!(line("ds.json:1 steps_per_print").contains("not needed: "), "{text}");
    let note = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(note.is_empty(), "{note}");
}
