//! Keys of Transformers' `TrainingArguments`, TRL's `SFTConfig` and SFT-Play in our own configuration, and files as guides print them.
use super::*;
use serde_json::Value as Json;
use tunesmith::config::foreign::Format;

/// The classes' fields with their defaults.
fn golden() -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/foreign/keys.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

const CLASSES: [&str; 5] =
    ["training_arguments", "seq2seq_arguments", "sft_config", "older_arguments", "older_sft_config"];

/// Rows of the table that none of the classes has: SFT-Play's, `from_pretrained`'s, and our own.
const OTHERS: &[&str] = &[
    "attn_implementation",
    "backend",
    "data.split.test_ratio",
    "data.split.train_ratio",
    "data.split.val_ratio",
    "data.streaming",
    "device_map",
    "low_cpu_mem_usage",
    "model.type",
];

fn fields() -> Vec<(String, Json)> {
    let golden = golden();
    let class = |class: &&str| golden[*class].as_object().unwrap().clone();
    CLASSES.iter().flat_map(class).collect()
}

/// The key under `train` is a setting of ours, a line of the table, or (where it is refused) an error that names it.
#[test]
fn every_key_of_the_classes_is_honoured_noted_or_refused_by_name() {
    let fields = fields();
    assert!(fields.len() > 250);
    for (key, _) in &fields {
        let spelled = format!("train.{key}");
        let ours = config::schema::options().any(|def| def.spellings().any(|name| name == spelled));
        let listed = Format::Trainer.keys().filter(|name| name == key).count();
        assert_eq!(usize::from(ours) + listed, 1, "{key}: a setting of ours ({ours}), and {listed} lines of the table");
    }
    for name in Format::Trainer.keys() {
        let theirs = fields.iter().any(|(key, _)| key == name);
        assert_ne!(theirs, OTHERS.contains(&name), "{name}: whose key is it?");
    }
}

/// A file with all fields of a class at their defaults, as `to_dict()` writes them, loads.
#[test]
fn the_defaults_of_each_class_load() {
    let golden = golden();
    for class in CLASSES {
        let fields = golden[class].as_object().unwrap().clone();
        for (key, value) in &fields {
            let folder = Folder::new(&[("a.yaml", &serde_json::json!({ "train": { key: value } }).to_string())]);
            let loaded = folder.load(&[], &[]);
            let resolved = loaded.unwrap_or_else(|error| panic!("{class}: {key}: {value}: {error}"));
            let listed = Format::Trainer.keys().any(|name| name == key);
            let noted = resolved.not_needed.iter().any(|one| one.key == format!("train.{key}"));
            let taken = resolved.settings.iter().any(|setting| setting.source != Source::Default);
            assert!(!listed || noted || taken, "{class}: {key}: {value} is passed over in silence");
            assert!(!noted || resolved.notes.iter().any(|note| note.contains(key) && note.starts_with("not needed: ")));
        }
        let two_names =
            |key: &str| key.starts_with("gradient_checkpointing") || key.starts_with("per_gpu") || key == "adafactor";
        let all: serde_json::Map<_, _> = fields.into_iter().filter(|(key, _)| !two_names(key)).collect();
        let folder = Folder::new(&[("a.yaml", &serde_json::json!({ "train": all }).to_string())]);
        folder.load(&[], &[]).unwrap_or_else(|error| panic!("{class}: {error}"));
    }
}

#[test]
fn a_key_without_a_meaning_is_noted_in_each_spelling() {
    let noted = |yaml: &str, words: &[&str], env: &[(&str, &str)]| {
        let resolved = Folder::new(&[("a.yaml", yaml)]).load(words, env).unwrap();
        assert_eq!((resolved.not_needed.len(), resolved.notes.len()), (1, 1), "{:?}", resolved.notes);
        (resolved.not_needed[0].value.clone(), resolved.notes[0].clone())
    };
    let (value, note) = noted("train:\n  dataloader_num_workers: 4\n", &[], &[]);
    assert_eq!(value, 4);
    assert!(
        note.starts_with("not needed: ")
            && note.contains("a.yaml:2 train.dataloader_num_workers: 4 (there is no data loader"),
        "{note}"
    );
    assert_eq!(noted("data: {dataloader_num_workers: 4}", &[], &[]).0, 4);
    assert_eq!(noted("", &["train.dataloader_pin_memory=false"], &[]).0, false);
    assert_eq!(noted("", &["TRAIN_DATALOADER_PIN_MEMORY=true"], &[]).0, true);
    let (_, note) = noted("", &[], &[("TRAIN_DATALOADER_NUM_WORKERS", "8")]);
    assert!(
        note.starts_with("not needed: env TRAIN_DATALOADER_NUM_WORKERS train.dataloader_num_workers: 8 ("),
        "{note}"
    );
    // What is given nearest is what is shown.
    assert_eq!(noted("train: {eval_do_concat_batches: true}", &["train.eval_do_concat_batches=false"], &[]).0, false);
    for text in [
        "model: {trust_remote_code: true, attn_implementation: flash_attention_2, device_map: auto}",
        "train: {ddp_find_unused_parameters: true, ddp_broadcast_buffers: true, tf32: true, torch_compile: true}",
        "train: {gradient_checkpointing_kwargs: {use_reentrant: false}, dataset_kwargs: {skip_prepare_dataset: false}}",
        "logging: {backend: tensorboard, log_interval: 5, logging_strategy: steps}",
        "data: {format: jsonl, split: {train_ratio: 0.9, val_ratio: 0.1, test_ratio: 0}}",
    ] {
        load(text);
    }
}

#[test]
fn other_names_of_our_settings_are_settings() {
    let config = load(
        "train: {max_length: 512, packing: true, run_name: first, logging_dir: tb, dataset_num_proc: 2, report_to: none, \
         train_sampling_strategy: sequential, truncation_mode: keep_end, assistant_only_loss: true, activation_checkpointing: true, \
         model_init_kwargs: {torch_dtype: bfloat16, attn_implementation: sdpa}}",
    );
    let (data, logging) = (&config.data, &config.logging);
    assert_eq!((config.model.max_seq_len, data.packing, data.num_proc, data.shuffle), (512, true, Some(2), false));
    assert_eq!((logging.run_name.as_deref(), logging.logging_dir.as_deref()), (Some("first"), Some(Path::new("tb"))));
    assert!(!logging.tensorboard);
    assert_eq!(data.truncation.as_str(), "left");
    assert_eq!(config.model.dtype.as_str(), "bfloat16");
    assert_eq!(load("train: {completion_only_loss: true}").data.loss_on.as_str(), "completion");
    assert_eq!(load("train: {assistant_only_loss: false}").data.loss_on.as_str(), "all");
    assert_eq!(load("train: {dp_ranks: 2}").train.strategy.as_str(), "dp");
    assert_eq!(load("train: {adafactor: true}").train.optim.as_str(), "adafactor");
    assert!((load("data: {split: {val_ratio: 0.2}}").data.split - 0.2).abs() < 1e-12);
    // Of a file that is included the nearer one wins, whatever it is called there.
    let folder = Folder::new(&[
        ("base.yaml", "model: {max_seq_len: 2048}\nlogging: {tensorboard: true}"),
        ("a.yaml", "include: base.yaml\ntrain: {max_length: 64, report_to: none}"),
    ]);
    let config = folder.load(&[], &[]).unwrap().config;
    assert_eq!((config.model.max_seq_len, config.logging.tensorboard), (64, false));
}

#[test]
fn typing_errors_and_what_would_change_the_result_are_refused() {
    for (text, expected) in [
        ("train: {dataloader_num_worker: 4}", "did you mean train.dataloader_num_workers?"),
        ("train: {torch_compil: true}", "did you mean train.torch_compile?"),
        ("train: {dataloader_drop_last: true}", "a.yaml:1:9: train.dataloader_drop_last: true is not supported"),
        ("train: {average_tokens_across_devices: false}", "divided by the label tokens of all ranks"),
        ("train: {loss_type: dft}", "cross entropy"),
        ("train: {packing_strategy: wrapped}", "set data.truncation: split"),
        ("train: {report_to: wandb}", "\"wandb\" is not supported"),
        ("train: {report_to: [tensorboard, mlflow]}", "\"mlflow\" is not supported"),
        ("train: {eval_delay: 2}", "a delayed first validation"),
        ("train: {auto_find_batch_size: true}", "set train.batch_size: auto"),
        ("train: {push_to_hub: true}", "tunesmith export --push"),
        ("train: {accelerator_config: {split_batches: true}}", "that of each rank"),
        ("train: {accelerator_config: {split_batch: true}}", "did you mean split_batches?"),
        ("train: {gradient_checkpointing_kwargs: {every_n_layers: 2}}", "{full: N}"),
        ("train: {model_init_kwargs: {rope_scaling: 2}}", "rope_scaling has no counterpart"),
        ("train: {ignore_data_skip: true}", "continues with the next rows"),
        ("train: {packing: true}\ndata: {packing: true}", "are the same setting"),
        ("train: {report_to: none}\nlogging: {tensorboard: true}", "are the same setting"),
        ("train: {assistant_only_loss: true, completion_only_loss: true}", "are the same setting"),
        ("model: {type: seq2seq}", "not yet part of"),
        ("data: {split: {test_ratio: 0.1}}", "data.test_path"),
        ("data: {split: {val_ration: 0.1}}", "did you mean data.split.val_ratio?"),
    ] {
        let error = refusal(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
    let folder = Folder::new(&[("a.yaml", "")]);
    assert!(
        folder.refusal(&["train.dataloader_num_worker=4"], &[]).contains("did you mean train.dataloader_num_workers?")
    );
    let error = folder.refusal(&[], &[("TRAIN_DATALOADER_NUM_WORKER", "4")]);
    assert!(error.contains("did you mean TRAIN_DATALOADER_NUM_WORKERS?"), "{error}");
    for (text, words) in [("train: {hub_token: hf_secret}", &[][..]), ("", &["train.hub_token=hf_secret"][..])] {
        let error = Folder::new(&[("a.yaml", text)]).refusal(words, &[]);
        assert!(error.contains("HF_TOKEN") && !error.contains("hf_secret"), "{error}");
    }
}

#[test]
fn words_for_a_mode_are_told_with_all_that_are_accepted() {
    assert!(refusal("tuning: {mode: qlroa}").ends_with("hint: did you mean qlora?"));
    assert!(refusal("tuning: {mode: nonsense}").contains("expected one of lora, qlora, ia3, oft, full, freeze"));
    assert!(refused_word("tuning.mode=dora").contains("tuning.lora.use_dora: true"));
    assert!(refused_word("tuning.mode=DoRA").contains("tuning.lora.use_dora: true"));
    assert!(refusal("train: {optim: adamw_torch_fusd}").ends_with("hint: did you mean adamw_torch_fused?"));
}

fn printed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/config/printed")
}

#[test]
fn files_are_shown_as_guides_print_them() {
    let shown = |name: &str| {
        let folder = Folder::new(&[]);
        let output = folder.tunesmith().arg("config").arg(printed().join(name)).output().unwrap();
        (stdout(&output), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let line = |text: &str, start: &str| {
        text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}")).to_owned()
    };
    let mut seen = 0;
    for entry in std::fs::read_dir(printed()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(shown(&name).0.contains("train.strategy"), "{name}");
        seen += 1;
    }
    assert_eq!(seen, 9);
    let (text, _) = shown("multi_gpu_config.yaml");
    assert!(line(&text, "train.dataloader_num_workers").contains("  4  "), "{text}");
    assert!(line(&text, "train.eval_do_concat_batches").contains("  false  "), "{text}");
    assert!(line(&text, "train.eval_do_concat_batches").contains("not needed: "), "{text}");
    let (text, notes) = shown("deepspeed_custom.json");
    assert!(line(&text, "train.strategy").contains("zero3") && line(&text, "train.bf16").contains("true"), "{text}");
    assert!(notes.contains("a configuration of DeepSpeed, read as train.deepspeed"), "{notes}");
    let (text, notes) = shown("acc_fsdp.yaml");
    assert!(line(&text, "train.strategy").contains("fsdp"), "{text}");
    assert!(text.contains("fsdp_config.fsdp_backward_prefetch_policy") && text.contains("not needed:"), "{text}");
    assert!(notes.contains("a configuration of Accelerate, read as train.accelerate"), "{notes}");
    assert!(shown("acc_single.yaml").0.contains("single") && shown("acc_ddp.yaml").0.contains("ddp"));
}

#[test]
fn the_values_that_were_given_are_in_the_json() {
    let folder = Folder::new(&[("a.yaml", "train: {eval_do_concat_batches: false, dataloader_num_workers: 4}")]);
    let output = folder.tunesmith().args(["config", "a.yaml", "--json"]).output().unwrap();
    let all: Json = serde_json::from_str(&stdout(&output)).unwrap();
    let find = |key: &str| all.as_array().unwrap().iter().find(|one| one["key"] == key).unwrap().clone();
    assert_eq!(find("train.eval_do_concat_batches")["value"], false);
    assert_eq!(find("train.dataloader_num_workers")["value"], 4);
    assert!(find("train.dataloader_num_workers")["note"].as_str().unwrap().contains("no data loader"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("not needed: "));
}

#[test]
fn where_other_toolkits_place_a_model_is_read() {
    let device = |yaml: &str| {
        let folder = Folder::new(&[("a.yaml", yaml)]);
        folder.load(&[], &[]).map(|resolved| resolved.config.model.device.to_string())
    };
    for (yaml, expected) in [
        ("train: {use_cpu: true}", "cpu"),
        ("train: {no_cuda: false}\nmodel: {device: cuda}", "cuda"),
        ("model: {device_map: auto}", "auto"),
        ("model: {device_map: cuda:1}", "cuda:1"),
        ("model: {device_map: {'': 2}}", "cuda:2"),
        ("train: {model_init_kwargs: {device_map: balanced}}", "auto"),
        ("train: {model_init_kwargs: {device_map: null}}", "cpu"),
    ] {
        assert_eq!(device(yaml).unwrap(), expected, "{yaml}");
    }
    for yaml in ["model: {device_map: {model.embed_tokens: 0, lm_head: 1}}", "model: {device_map: tpu}"] {
        let refused = device(yaml).unwrap_err();
        assert!(refused.to_string().contains("device_map"), "{yaml}: {refused}");
    }
    // One says where, the other says otherwise.
    assert!(device("train: {use_cpu: true}\nmodel: {device: cuda}").is_err());
    let folder = Folder::new(&[("a.yaml", "model: {device: auto}"), ("acc.yaml", "use_cpu: false\n")]);
    let word = format!("train.accelerate={}", folder.path("acc.yaml").display());
    assert_eq!(folder.load(&[&word], &[]).unwrap().config.model.device.to_string(), "auto");
}

#[test]
fn variables_of_nccl_and_num_gpus_are_read_or_named() {
    let folder = Folder::new(&[("a.yaml", "")]);
    let load = |words: &[&str], env: &[(&str, &str)]| folder.load(words, env).unwrap();
    let resolved = load(&[], &[("NCCL_TIMEOUT", "1800")]);
    assert!((resolved.config.train.ddp_timeout - 1800.0).abs() < 1e-9);
    assert_eq!(resolved.source("train.ddp_timeout").to_string(), "env NCCL_TIMEOUT");
    let resolved = load(&["train.ddp_timeout=5"], &[("NCCL_TIMEOUT", "1800")]);
    assert!((resolved.config.train.ddp_timeout - 5.0).abs() < 1e-9);
    assert!(load(&[], &[("NCCL_TIMEOUT", "long")]).notes[0].contains("expected seconds"));
    let debug = [("NCCL_DEBUG", "INFO"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")];
    let notes = load(&[], &debug).notes;
    assert!(notes[0].contains("env NCCL_DEBUG, TORCH_NCCL_ASYNC_ERROR_HANDLING: NCCL reads them"), "{notes:?}");
    assert!(load(&["train.ddp_backend=nccl"], &debug).notes.is_empty());
    assert!(load(&["model.device=cuda"], &debug).notes.is_empty());
    assert!(!load(&["model.device=cuda", "train.ddp_backend=gloo"], &debug).notes.is_empty());
    let run = |args: &[&str], number: &str| folder.tunesmith().args(args).env("NUM_GPUS", number).output().unwrap();
    let text = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let shown = run(&["config", "a.yaml"], "2");
    assert!(shown.status.success() && text(&shown).contains("tunesmith launch -- train CONFIG"), "{}", text(&shown));
    for (args, number) in [
        (&["train", "a.yaml"][..], "2"),
        (&["train", "a.yaml", "NUM_GPUS=2"][..], ""),
        (&["train", "a.yaml", "--gpu-ids", "0,1"][..], ""),
    ] {
        let refused = run(args, number);
        assert_eq!(refused.status.code(), Some(2));
        assert!(
            text(&refused).contains("is one process") && text(&refused).contains("tunesmith launch"),
            "{}",
            text(&refused)
        );
    }
}

/// A folder of models that is not there is no owner on the hub.
#[test]
fn a_missing_folder_is_not_looked_up_on_the_network() {
    let folder = Folder::new(&[("rows.jsonl", "{\"text\": \"a\"}\n")]);
    for name in ["models/my-model", "runs/first", "outputs/merged", "./a/b", "checkpoints/last"] {
        let word = format!("model.name={name}");
        let output = folder
            .tunesmith()
            .args(["train", &word, "data.train_path=rows.jsonl"])
            .env("HF_ENDPOINT", "http://127.0.0.1:9")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{text}");
        assert!(text.contains(&format!("model.name: {name} does not exist")) && !text.contains("127.0.0.1"), "{text}");
    }
}
