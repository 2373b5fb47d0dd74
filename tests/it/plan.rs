//! `tunesmith plan`: the prediction of memory against what the engine holds.
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tunesmith::config::arch::{Arch, ScoreHead};
use tunesmith::config::{Config, Dtype, Mode, load_text};
use tunesmith::data::batch::{Batch, Example, IGNORE};
use tunesmith::model::Model;
use tunesmith::model::adapters::KINDS;
use tunesmith::model::targets::{self, Targets};
use tunesmith::model::weights::WeightFiles;
use tunesmith::ops::quant::{Format, encode};
use tunesmith::ops::testing::numbers;
use tunesmith::plan::memory::{Breakdown, Device, Job, Pass, Predictor, Storage};
use tunesmith::plan::strategies::{self, Machine, Strategy, Way};
use tunesmith::train::{memory_prediction, trainable};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn arch(name: &str) -> Arch {
    let dir: PathBuf = root().join("tests/golden/a").join(name).join("model");
    Arch::from_dir(&dir).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Rows of these lengths, of which the first tokens carry no label.
fn batch(vocabulary: usize, lengths: &[usize], unlabelled: usize) -> Batch {
    let row = |(row, &length): (usize, &usize)| {
        let input_ids: Vec<u32> = (0..length).map(|at| ((row * 31 + at * 17) % vocabulary) as u32).collect();
        let label = |(at, &id): (usize, &u32)| if at < unlabelled { IGNORE } else { id as i32 };
        Example { labels: input_ids.iter().enumerate().map(label).collect(), input_ids }
    };
    let rows: Vec<Example> = lengths.iter().enumerate().map(row).collect();
    Batch::from_examples(&rows)
}

fn config(text: &str) -> Config {
    load_text(Path::new("case"), text).unwrap_or_else(|error| panic!("{text}: {error}")).config
}

/// Bytes that the pools hold after a pass, and as they were predicted.
fn held_and_predicted(arch: &Arch, config: &Config, batch: &Batch) -> ([u64; 2], [u64; 2]) {
    let mut model = Model::load(arch, None, config).unwrap();
    model.params.zero_grads();
    model.forward_backward(batch, 1.0, 1.0, 0).unwrap();
    // What the first pass took while buffers grew is gone after the second.
    model.forward_backward(batch, 1.0, 1.0, 0).unwrap();
    let predictor = Predictor::new(memory_prediction::job(config, arch, Storage::F32, None).unwrap(), Device::Cpu);
    let longest = batch.cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap();
    let walked = predictor.activations(&Pass {
        tokens: batch.tokens.len() as u64,
        longest: longest as u64,
        labelled: batch.label_tokens() as u64,
    });
    (model.idle_bytes(), [walked.pools, walked.head])
}

const LORA: &str = "tuning: {lora: {r: 4}}";
const MODES: [(&str, &str); 14] = [
    ("lora", LORA),
    ("lora on q alone", "tuning: {lora: {r: 4, target_modules: [q_proj]}}"),
    ("upper blocks", "tuning: {lora: {r: 4, layers_to_transform: [1]}}"),
    ("checkpointing", "{tuning: {lora: {r: 4}}, train: {gradient_checkpointing: true}}"),
    ("one block", "{tuning: {lora: {r: 4}}, train: {gradient_checkpointing: {full: 1}}}"),
    ("bf16", "{tuning: {lora: {r: 3}}, train: {bf16: true}}"),
    ("bf16 and checkpointing", "{tuning: {lora: {r: 3}}, train: {bf16: true, gradient_checkpointing: true}}"),
    ("dropout", "tuning: {lora: {r: 4, lora_dropout: 0.1}}"),
    ("dora", "tuning: {lora: {r: 4, use_dora: true, lora_dropout: 0.1}}"),
    ("head", "tuning: {lora: {r: 4, modules_to_save: [model.norm]}}"),
    ("full", "tuning: {mode: full}"),
    ("nothing recomputed", "{tuning: {lora: {r: 4}}, train: {gradient_checkpointing: none}}"),
    ("float16", "{tuning: {lora: {r: 3}}, train: {fp16: true}}"),
    ("last block", "tuning: {mode: freeze, freeze: {trainable_layers: 1}}"),
];

/// With every kind of adapter by itself.
fn modes() -> Vec<(String, String)> {
    let kinds = KINDS.iter().map(|kind| (kind.title.to_owned(), format!("tuning: {{mode: {}}}", kind.mode)));
    MODES.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).chain(kinds).collect()
}

/// Models whose buffers are predicted to the byte.
pub const PREDICTED: [&str; 29] = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "mistral",
    "smollm3",
    "olmo2",
    "granite",
    "phi3",
    "qwen3_5",
    "lfm2",
    "ministral3",
    "seed_oss",
    "hunyuan_v1_dense",
    "granitemoehybrid",
    "olmo_hybrid",
    "nemotron_h",
    "glm4",
    "gemma4_e2b",
    "gemma4_31b",
    "gemma4_unified",
    "gemma3n",
    "gemma3n_odd",
    "deepseek_v3_dense",
    "lfm3",
    "muse_glimmer",
    "gpt2",
];

#[test]
fn buffers_are_predicted_to_the_byte() {
    let mut count = 0;
    for family in PREDICTED {
        let arch = arch(family);
        for (name, text) in modes() {
            if ["phi3", "gpt2"].contains(&family) && name == "lora on q alone" {
                continue; // its projections are one module
            }
            if family == "gpt2" && text == "tuning: {mode: oft}" {
                continue; // PEFT has none on its modules
            }
            let batch = batch(arch.vocab_size, &[70, 33], 5);
            let text = text.replace("model.norm", arch.final_norm().trim_end_matches(".weight"));
            let latent = arch.attentions().any(|attention| attention.latent.is_some());
            let text = if latent { text.replace("[q_proj]", "[q_b_proj]") } else { text };
            let (held, predicted) = held_and_predicted(&arch, &config(&text), &batch);
            assert_eq!(held, predicted, "{family}, {name}");
            count += 1;
        }
    }
    assert_eq!(count, PREDICTED.len() * modes().len() - 3);
}

/// Trained parameters and all of them, as `get_nb_trainable_parameters` of PEFT 0.21.2 counts these models.
#[test]
fn parameters_are_counted_as_in_peft() {
    let few = "target_modules: [q_proj, v_proj]";
    for (family, lora, counts) in [
        ("llama", "target_modules: all-linear", (8192, 147_776)),
        ("qwen2", "target_modules: all-linear", (8576, 121_792)),
        ("qwen2", "target_modules: all-linear, bias: all", (8832, 121_792)),
        ("qwen2", "target_modules: all-linear, bias: lora_only", (8832, 121_792)),
        ("gemma2", "target_modules: all-linear", (8192, 115_264)),
        ("llama", &format!("{few}, use_dora: true"), (1984, 141_568)),
        ("llama", &format!("{few}, modules_to_save: [embed_tokens, lm_head]"), (67_328, 206_912)),
        ("gemma2", &format!("{few}, modules_to_save: [embed_tokens]"), (34_560, 141_632)),
    ] {
        let config = config(&format!("tuning: {{lora: {{r: 4, {lora}}}}}"));
        let mut arch = arch(family);
        arch.separate(Targets::of(&config.tuning).apart());
        let placements = targets::placed(&arch, &config.tuning).unwrap();
        let trained = trainable::tensors(&config, &arch, &placements).unwrap();
        let trained: usize = trained.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        let all = trainable::all_parameters(&config, &arch, &placements).unwrap();
        assert_eq!((trained, all), counts, "{family}, {lora}");
    }
    let (config, arch) = (config("tuning: {mode: full}"), arch("llama"));
    assert_eq!(trainable::all_parameters(&config, &arch, &[]).unwrap(), 139_584);
}

/// A validation saves nothing for a backward pass.
#[test]
fn buffers_of_a_validation_are_predicted_to_the_byte() {
    for family in ["llama", "qwen2", "gemma2", "gemma3n", "gemma4_e2b", "qwen3_5", "lfm2", "deepseek_v3_dense"] {
        let arch = arch(family);
        let config = config(LORA);
        let model = Model::load(&arch, None, &config).unwrap();
        let batch = batch(arch.vocab_size, &[70, 33], 5);
        model.loss(&batch).unwrap();
        let job = memory_prediction::job(&config, &arch, Storage::F32, None).unwrap();
        let predictor = Predictor::new(job, Device::Cpu);
        let pass = Pass { tokens: 103, longest: 70, labelled: batch.label_tokens() as u64 };
        let ([held, head], trained) = (model.idle_bytes(), predictor.activations(&pass));
        assert_eq!(predictor.evaluated(&pass) - trained.head, held, "{family}");
        assert!(head <= trained.head && held < trained.pools, "{family}");
    }
}

/// Tables of a model whose embedding and head share one: what is trained of them, and a head that gets a matrix of its own.
#[test]
fn trained_tables_of_a_tied_model_are_predicted() {
    let table = |arch: &Arch| 4 * (arch.vocab_size * arch.hidden_size) as u64;
    for family in ["qwen2", "gemma2"] {
        for (modules, ensured, trained, more) in [
            ("lm_head", false, 1, 1),
            ("embed_tokens", false, 1, 1),
            ("embed_tokens, lm_head", false, 2, 1),
            ("lm_head", true, 1, 0),
        ] {
            let plain = arch(family);
            let text =
                format!("tuning: {{lora: {{r: 4, modules_to_save: [{modules}], ensure_weight_tying: {ensured}}}}}");
            let config = config(&text);
            let mut arch = plain.clone();
            arch.separate(Targets::of(&config.tuning).apart());
            let batch = batch(arch.vocab_size, &[70, 33], 5);
            let (held, predicted) = held_and_predicted(&arch, &config, &batch);
            assert_eq!(held, predicted, "{family}, {text}");
            let weights = |arch: &Arch, text: &str| {
                let config = self::config(text);
                let predictor =
                    Predictor::new(memory_prediction::job(&config, arch, Storage::F32, None).unwrap(), Device::Cpu);
                let all = predictor.predict(&Pass { tokens: 103, longest: 70, labelled: 90 });
                (all.weights + all.trained, all.trained)
            };
            let ((all, own), (before, adapter)) = (weights(&arch, &text), weights(&plain, LORA));
            assert_eq!(
                (all - before, own - adapter),
                (more * table(&plain), trained * table(&plain)),
                "{family}, {text}"
            );
        }
    }
}

#[test]
fn a_head_of_scores_is_predicted_to_the_byte_and_holds_no_vocabulary() {
    for family in ["llama", "qwen2", "gemma2"] {
        for labels in [0, 3] {
            let mut arch = arch(family);
            arch.score = Some(ScoreHead { labels: (0..labels).map(|label| label.to_string()).collect() });
            for (name, text) in modes() {
                let whole = |length: usize| {
                    let labels = [vec![IGNORE; length], vec![2]].concat();
                    Example { input_ids: (0..length as u32).collect(), labels }
                };
                let mut batch = Batch::from_examples(&[70, 33].map(whole));
                if labels > 0 {
                    batch.weigh_last(0.5);
                }
                let (held, predicted) = held_and_predicted(&arch, &config(&text), &batch);
                assert_eq!(held, predicted, "{family}, {labels} labels, {name}");
            }
        }
    }
    let mut arch = arch("llama");
    let of = |arch: &Arch| {
        let job = memory_prediction::job(&config(LORA), arch, Storage::F32, None).unwrap();
        Predictor::new(job, Device::Cpu).predict(&Pass::of(4, 60, None))
    };
    let plain = of(&arch);
    arch.score = Some(ScoreHead { labels: ["a", "b"].map(String::from).to_vec() });
    let scored = of(&arch);
    let matrix = 4 * (arch.vocab_size * arch.hidden_size) as u64;
    assert_eq!(plain.weights - scored.weights, matrix, "the head has a matrix of its own");
    assert_eq!(scored.trained - plain.trained, 4 * 2 * arch.hidden_size as u64);
}

#[test]
fn experts_are_predicted_with_room_for_uneven_use() {
    let mut wrong = Vec::new();
    for family in [
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "gpt_oss",
        "glm4_moe",
        "qwen3_5_moe",
        "qwen3_next",
        "lfm2_moe",
        "afmoe",
        "minimax_m2",
        "gemma4_a4b",
        "granite4_moe",
        "nemotron3_nano",
        "nemotron3_super",
    ] {
        let arch = arch(family);
        for (name, text) in [MODES[0], MODES[3], MODES[5], MODES[10], MODES[11]] {
            let batch = batch(arch.vocab_size, &[600, 500], 5);
            let (held, predicted) = held_and_predicted(&arch, &config(text), &batch);
            let ratio = predicted[0] as f64 / held[0] as f64;
            println!("{family:16} {name:24} {ratio:.2}");
            if !(1.0..1.7).contains(&ratio) {
                wrong.push(format!("{family}, {name}: {predicted:?} for {held:?}"));
            }
            assert_eq!(held[1], predicted[1], "{family}, {name}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn large_vocabularies_and_long_batches_are_cut_into_chunks() {
    let mut arch = arch("llama");
    arch.vocab_size = 70_000;
    let batch = batch(1000, &[400, 300], 0);
    let (held, predicted) = held_and_predicted(&arch, &config(LORA), &batch);
    assert_eq!(held, predicted);
    let mut narrow = config(LORA);
    (narrow.model.dtype, narrow.tuning.mode) = (Dtype::Bfloat16, Mode::Lora);
    let (held, predicted) = held_and_predicted(&arch, &narrow, &batch);
    assert_eq!(held, predicted);
}

/// `tunesmith` with these words, in a place where no speed of this machine is known.
fn tunesmith(words: &[&str]) -> Output {
    let cache = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tunesmith"));
    command.current_dir(root()).env_clear().env("XDG_CACHE_HOME", cache.path()).args(words);
    command.output().expect("the program runs")
}

fn stdout(words: &[&str]) -> String {
    let output = tunesmith(words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Public shapes with the shipped configurations, and the file that holds what `plan` says of them.
const TABLES: [(&str, &str); 9] = [
    ("qwen2.5-7b", "configs/rtx4090_sli.yaml --model tests/golden/plan/qwen2.5-7b --gpus 2 --vram 24GiB --tflops 60"),
    ("gemma-27b", "configs/a100_pair.yaml --model tests/golden/plan/gemma-27b --gpus 2 --vram 80GiB --tflops 150"),
    (
        "llama-70b",
        "configs/h200_quad.yaml --model tests/golden/plan/llama-70b/config.json --gpus 4 --vram 141GB --tflops 400",
    ),
    (
        "qwen3-moe-235b",
        "configs/h200_quad.yaml --model tests/golden/plan/qwen3-moe-235b --gpus 8 --vram 141GB --tflops 400",
    ),
    (
        "gpt-oss-20b",
        "configs/run_bnb.yaml --model tests/golden/plan/gpt-oss-20b --gpus 1 --vram 16GiB --tflops 200 model.max_seq_len=2048 train.batch_size=1 train.offload_embedding=true",
    ),
    (
        "gpt-oss-120b",
        "configs/run_bnb.yaml --model tests/golden/plan/gpt-oss-120b --gpus 1 --vram 80GiB --tflops 200 model.max_seq_len=2048 train.batch_size=1 train.offload_embedding=true",
    ),
    (
        "gpt-oss-20b-offloaded",
        "configs/run_bnb.yaml --model tests/golden/plan/gpt-oss-20b --gpus 1 --vram 8GiB --tflops 200 model.max_seq_len=2048 train.batch_size=1 train.offload_param=true",
    ),
    (
        "qwen3-30b-a3b-offloaded",
        "configs/run_bnb.yaml --model tests/golden/plan/qwen3-30b-a3b --gpus 1 --vram 8GiB --tflops 200 model.max_seq_len=2048 train.batch_size=1 train.offload_param=true",
    ),
    ("projection-4.4b", "tests/golden/plan/projection.yaml --gpus 4 --vram 24GiB --tflops 60"),
];

#[test]
fn tables_of_public_shapes_are_as_they_were_reviewed() {
    for (name, words) in TABLES {
        let file = format!("tests/golden/plan/{name}.txt");
        let found = stdout(&["plan"].into_iter().chain(words.split(' ')).collect::<Vec<_>>());
        let expected = std::fs::read_to_string(root().join(&file)).unwrap_or_default();
        assert_eq!(found, expected, "look at it, then: cargo run -q -- plan {words} > {file}");
    }
}

/// Bytes of a rank that trains alone with a row of 64 tokens.
fn rank(job: Job<'_>, device: Device) -> Breakdown {
    let machine = Machine { device, ranks: 1, memory: Machine::UNKNOWN };
    let pass = Pass { tokens: 64, longest: 64, labelled: 63 };
    strategies::rank(&Predictor::new(job, device), &machine, Way::plain(Strategy::Single), &pass)
}

/// Every `quant_method`. What `fp8_edges` leaves dense is in its files alone.
#[test]
fn a_config_alone_plans_a_quantized_base_as_its_files_do() {
    let folders =
        |parent: &str, names: &[&str]| names.iter().map(|name| format!("{parent}/{name}")).collect::<Vec<_>>();
    let bitsandbytes = folders("b", &["llama_nf4", "llama_nf4dq", "llama_fp4", "llama_int8"]);
    let makers = ["fp8", "gptq", "gptq8", "gptq_claims", "awq", "ct_int4", "ct_int8", "ct_fp8", "ct_nvfp4", "nvfp4"];
    let others = [vec!["makers/unsloth".to_owned(), "mxfp4".to_owned()], folders("makers", &makers)].concat();
    for case in bitsandbytes.iter().chain(&others) {
        let dir = root().join("tests/golden").join(case).join("model");
        let arch = Arch::from_dir(&dir).unwrap();
        let files = WeightFiles::open(&dir, &arch.tensors()).unwrap();
        let stored = memory_prediction::stored(&dir);
        for device in [Device::Cpu, Device::Gpu] {
            let planned = |word: &str, files| {
                let text =
                    format!("{{model: {{quantization: {word}}}, tuning: {{lora: {{r: 4}}}}, train: {{bf16: true}}}}");
                rank(memory_prediction::job(&config(&text), &arch, stored, files).unwrap(), device)
            };
            for word in ["auto", "none"] {
                assert_eq!(planned(word, None), planned(word, Some(&files)), "{case}, {word}, {device:?}");
            }
            let [kept, dense] = ["auto", "none"].map(|word| planned(word, None).weights);
            assert!(kept < dense, "{case}, {device:?}: {kept} of {dense} bytes");
        }
    }
    // What a run refuses is not planned either.
    let arch = Arch::from_dir(&root().join("tests/golden/b/llama_int8/model")).unwrap();
    for (text, part) in [
        ("tuning: {mode: qlora}", "the checkpoint is quantized as int8"),
        ("tuning: {mode: full}", "cannot be trained themselves"),
    ] {
        let error = memory_prediction::job(&config(text), &arch, Storage::Bf16, None).unwrap_err();
        assert!(error.message().contains(part), "{error}");
    }
}

/// Gate and up of an expert are one matrix, whose scales are single though those of both are quantized.
#[test]
fn joined_experts_with_double_quantization_have_the_same_bits_and_are_counted() {
    let qlora = config("{model: {quantization: nf4, double_quant: true}, tuning: {lora: {r: 4}}}");
    let arch = arch("qwen3_moe");
    let job = memory_prediction::job(&qlora, &arch, Storage::F32, None).unwrap();
    let width = arch.hidden_size;
    let specs = |part: &str| {
        let name = format!("model.layers.0.mlp.experts.1.{part}.weight");
        arch.tensors().into_iter().find(|spec| spec.name == name).unwrap()
    };
    let planned = |part: &str| {
        let spec = specs(part);
        job.storage(&spec).unwrap().bytes(&spec.shape)
    };
    let quantized = |part: &str, seed: u64| {
        let values = numbers(seed, specs(part).len());
        encode::quantize(&values, specs(part).shape[1], Format::Nf4, true).unwrap()
    };
    let (gate, up, down) = (quantized("gate_proj", 1), quantized("up_proj", 2), quantized("down_proj", 3));
    let joined = gate.joined(&up).unwrap();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<u32>>();
    assert_eq!(specs("gate_proj").shape[1], width);
    assert_eq!(bits(joined.dequantize()), bits([gate.dequantize(), up.dequantize()].concat()));
    assert_eq!(joined.bytes() as u64, planned("gate_proj") + planned("up_proj"));
    // Its mean is counted too.
    assert_eq!(down.bytes() as u64 + 4, planned("down_proj"));
    assert!(joined.bytes() > gate.bytes() + up.bytes());
}

#[test]
fn routers_that_choose_groups_are_planned_on_gpus() {
    for name in ["deepseek_v2_groups", "deepseek_v3", "glm4_moe", "mistral4", "nemotron3_super"] {
        let model = root().join("tests/golden/a").join(name).join("model");
        stdout(&["plan", "--model", model.to_str().expect("UTF-8"), "--vram", "24GiB"]);
    }
}

#[test]
fn what_training_lacks_is_planned_and_what_nobody_has_is_refused() {
    let model = "--model=tests/golden/plan/qwen2.5-7b";
    for config in ["rtx4090_sli", "a100_pair", "h200_quad", "multi_gpu_config", "run_lora", "run_full"] {
        let config = format!("configs/{config}.yaml");
        stdout(&["plan", &config, model, "--gpus", "2", "--vram", "24GiB"]);
    }
    let refused = |words: &[&str], part: &str| {
        let output = tunesmith(words);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(part), "{words:?}: {text}");
    };
    // There is no GPU to ask.
    let unknown = stdout(&["plan", model, "--gpus", "2"]);
    assert!(unknown.contains("2 GPUs of unknown memory (--vram 24GiB)"), "{unknown}");
    assert!(unknown.contains("It fits: dp from"), "{unknown}");
    let named = stdout(&["plan", model, "MODEL_DEVICE=cuda"]);
    assert!(named.contains("1 GPU of unknown memory") && named.contains("It fits: single from"), "{named}");
    refused(&["plan", model, "--vram", "24 elephants"], "24GiB");
    refused(&["plan", model, "TRAIN_STRATEGY=zero9"], "train.strategy");
    refused(&["plan"], "no configuration file");
    refused(&["plan", "--model", "/no/such/folder"], "/no/such/folder");
}

#[test]
fn what_does_not_do_for_another_optimizer_is_no_error() {
    let said = stdout(&["plan", "configs/run_lora.yaml", "--model=tests/golden/plan/qwen2.5-7b", "train.adam_beta1=0"]);
    let states = said.lines().find(|line| line.starts_with("optimizer states")).expect("the states");
    assert!(states.contains("adamw_torch") && !states.contains("schedule_free"), "{states}");
}

#[test]
fn json_says_the_same_and_what_does_not_fit_says_what_helps() {
    let words = ["plan", "--model=tests/golden/plan/qwen2.5-7b", "--gpus=1", "--vram=12GiB", "--json"];
    let json: serde_json::Value = serde_json::from_str(&stdout(&words)).expect("JSON");
    assert_eq!(json["machine"]["memory"], 12u64 << 30);
    assert_eq!(json["plan"]["recommended"], serde_json::Value::Null);
    let helps = json["plan"]["helps"].as_array().expect("a list");
    assert_eq!(helps[0][0], "train.gradient_checkpointing: true", "what saves the most first: {helps:?}");
    assert!(helps.iter().any(|help| help[0] == "tuning.mode: qlora"), "{helps:?}");
    let row = &json["plan"]["rows"][0];
    let parts: u64 = row["rank"]
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "host")
        .map(|(_, it)| it.as_u64().unwrap())
        .sum();
    assert_eq!(row["total"], parts);
}

#[test]
fn a_longer_row_than_the_longest_does_not_fit() {
    let words = "plan --model=tests/golden/plan/qwen2.5-7b --device=cpu --vram=64GiB --json TRAIN_NUM_THREADS=2 TRAIN_MAX_TOKENS_PER_PASS=null";
    let plan = |more: &[String]| -> serde_json::Value {
        let words: Vec<&str> = words.split(' ').chain(more.iter().map(String::as_str)).collect();
        serde_json::from_str(&stdout(&words)).expect("JSON")
    };
    let longest = plan(&[])["plan"]["rows"][0]["longest"]["upto"].as_u64().expect("a length");
    let fit = |length: u64| {
        let words = ["TRAIN_BATCH_SIZE=1".to_owned(), format!("MODEL_MAX_SEQ_LEN={length}")];
        plan(&words)["plan"]["rows"][0]["fit"].as_str().map(str::to_owned)
    };
    assert_eq!((fit(longest).as_deref(), fit(longest + 16).as_deref()), (Some("tight"), Some("no")), "{longest}");
}

#[test]
fn many_ranks_are_predicted_and_a_few_measured() {
    let model = root().join("tests/golden/a/llama/model/config.json");
    let words =
        ["plan", "--model", model.to_str().unwrap(), "--gpus", "8", "--vram", "80GiB", "--scaling", "TUNING_MODE=full"];
    let refused = tunesmith(&words);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("the speed of a rank is unknown"));
    let report = |more: &[&str]| -> serde_json::Value {
        serde_json::from_str(&stdout(&[&words[..], &["--tflops", "100", "--json"], more].concat())).unwrap()
    };
    let estimates = |report: &serde_json::Value| report["scaling"]["estimates"].as_array().unwrap().clone();
    let (fast, slow) = (estimates(&report(&[])), estimates(&report(&["--between", "1"])));
    assert_eq!(fast.len(), 27);
    let step = |one: &serde_json::Value| one["step"].as_f64().unwrap();
    for (fast, slow) in fast.iter().zip(&slow) {
        let beyond = fast["ranks"].as_u64().unwrap() > 8;
        assert!(if beyond { step(slow) > step(fast) } else { step(slow) == step(fast) }, "{fast} {slow}");
    }
    let text = stdout(&[&words[..], &["--tflops", "100"]].concat());
    assert!(text.contains("scaling, predicted") && text.contains("1,024"), "{text}");

    let words =
        ["bench", "--shape", model.to_str().unwrap(), "--mode", "full", "--seq", "16", "--batch", "1", "--steps", "2"];
    let lines: serde_json::Value =
        serde_json::from_str(&stdout(&[&words[..], &["--ranks", "1,2", "--json"]].concat())).unwrap();
    for line in lines.as_array().unwrap() {
        let positive = |key: &str| line[key].as_f64().is_some_and(|number| number > 0.0);
        assert!(["alone", "predicted", "measured", "tokens_per_second"].into_iter().all(positive), "{line}");
        assert!(line["ranks"] == 1 || line["predicted"].as_f64() >= line["alone"].as_f64(), "{line}");
    }
    assert!(lines.as_array().unwrap().len() >= 2);
}

/// The models of the hardware configurations, by their names on the hub: nothing is fetched.
#[test]
fn the_hardware_configurations_are_planned_by_name_without_a_network() {
    for (config, model, machine) in [
        ("rtx4090_sli", "Qwen/Qwen2.5-14B-Instruct: qwen2, 14.77 B parameters", ["2", "24GiB"]),
        ("a100_pair", "google/gemma-3-27b-it: ", ["2", "80GiB"]),
        ("multi_gpu_config", "google/gemma-3-27b-it: ", ["2", "80GiB"]),
        ("h200_quad", "meta-llama/Llama-3.1-70B-Instruct: llama, 70.55 B parameters", ["4", "141GB"]),
    ] {
        let config = format!("configs/{config}.yaml");
        let text = stdout(&["plan", &config, "--gpus", machine[0], "--vram", machine[1]]);
        assert!(text.contains(model), "{text}");
        assert!(text.contains("GiB of one rank"), "{text}");
    }
}
