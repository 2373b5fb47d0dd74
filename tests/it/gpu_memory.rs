//! Memory on GPUs: what a plan counts against what the engine takes, and what the host holds while a model is loaded. All on
//! GPU 1 of the stand-in, which no other test of this process uses.
use crate::parity::{families, golden};
use crate::processes::alone;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tunesmith::Kind;
use tunesmith::comm::World;
use tunesmith::comm::single::Single;
use tunesmith::config::arch::{Arch, EMBEDDING, PER_LAYER_EMBEDDING};
use tunesmith::config::{Config, DeviceChoice, load_text};
use tunesmith::data::batch::{Batch, Example, IGNORE};
use tunesmith::device::cuda::testing;
use tunesmith::device::gpu::WORKSPACE;
use tunesmith::device::{Device, memory};
use tunesmith::model::Model;
use tunesmith::model::device::device;
use tunesmith::model::weights::{Dtype, Numbers, WeightFiles, write_numbers_by};
use tunesmith::optim::OptimizerPlan;
use tunesmith::parallel::{ParallelPlan, optimizer};
use tunesmith::plan::memory::{Breakdown, Pass};
use tunesmith::plan::strategies::{Strategy, Way};
use tunesmith::train::memory_prediction::MemoryModel;
use tunesmith::train::step::step;

const GPU: Device = Device::Cuda(1);

/// GPU 1, for one test at a time.
fn gpu() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    testing::use_stand_in();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(device(DeviceChoice::Cuda(Some(1))).unwrap(), GPU);
    turn
}

fn config(text: &str) -> Config {
    let mut config =
        load_text(std::path::Path::new("case"), text).unwrap_or_else(|error| panic!("{text}: {error}")).config;
    config.model.device = DeviceChoice::Cuda(Some(1));
    config
}

/// Rows of 100 tokens.
fn batch(vocabulary: usize, rows: usize) -> Batch {
    let row = |row: usize| {
        let input_ids: Vec<u32> = (0..100).map(|at| ((row * 31 + at * 17) % vocabulary) as u32).collect();
        Example { labels: input_ids.iter().map(|&id| id as i32).collect(), input_ids }
    };
    Batch::from_examples(&(0..rows).map(row).collect::<Vec<_>>())
}

/// Bytes of a GPU: held when the model is loaded, with gradients; and at most in two steps.
fn measured(arch: &Arch, weights: &WeightFiles, config: &Config, batch: &Batch) -> [u64; 2] {
    let before = memory::live(GPU);
    let mut model = Model::load(arch, Some(weights), config).unwrap();
    model.params.zero_grads();
    let loaded = memory::live(GPU) - before;
    memory::reset_peak(GPU);
    let trained: Vec<_> = model.params.specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
    let plan = OptimizerPlan::new(&config.train, None, &trained).unwrap();
    let parallel = ParallelPlan::new(&config.train, 1);
    let (mut optimizer, _) = optimizer::shared(&plan, &parallel, &mut model.params, World::ALONE).unwrap();
    for _ in 0..2 {
        step(&mut model, &mut optimizer, &Single, std::slice::from_ref(batch), 1e-4, 1.0).unwrap();
    }
    [loaded, memory::peak(GPU) - before]
}

fn predicted(arch: &Arch, weights: &WeightFiles, config: &Config, batch: &Batch) -> Breakdown {
    let tokens = batch.tokens.len() as u64;
    let pass = Pass { tokens, longest: 100, labelled: batch.label_tokens() as u64 };
    let model = MemoryModel::new(config, arch, Some(weights), GPU);
    let mut rank = model.rank(Way::plain(Strategy::Single), config.train.gradient_checkpointing, 1, &pass).unwrap();
    // Taken before the measurement.
    rank.program -= WORKSPACE as u64;
    rank
}

const MODES: [(&str, &str); 9] = [
    ("lora", "tuning: {lora: {r: 4}}"),
    ("lora, bf16", "{model: {dtype: bfloat16}, tuning: {lora: {r: 4}}, train: {bf16: true}}"),
    ("qlora", "{model: {quantization: nf4}, tuning: {lora: {r: 4}}, train: {optim: adamw_8bit}}"),
    ("int8", "{model: {quantization: int8}, tuning: {lora: {r: 4}}}"),
    // Multiplied as it is, with its transpose; and dequantized, with operands in float32.
    ("fp8, bf16", "{model: {quantization: fp8}, tuning: {lora: {r: 4}}, train: {bf16: true}}"),
    ("fp8", "{model: {quantization: fp8}, tuning: {lora: {r: 4}}}"),
    ("full", "tuning: {mode: full}"),
    ("full, blocks run again", "{tuning: {mode: full}, train: {gradient_checkpointing: true}}"),
    ("lora, on the host", "{model: {device: cuda}, tuning: {lora: {r: 4}}, train: {activation_offloading: true}}"),
];

/// Models whose memory of a GPU is compared with the prediction.
pub const PREDICTED: [&str; 11] = [
    "llama",
    "gemma3",
    "gemma3n",
    "phi3",
    "qwen3_moe",
    "qwen3_5",
    "gpt_oss",
    "granitemoehybrid",
    "gemma4_e2b",
    "gemma4_a4b",
    "gpt2",
];

#[test]
fn families_take_what_is_predicted() {
    if !alone("gpu_memory::families_take_what_is_predicted") {
        return;
    }
    check(&PREDICTED.map(golden), &MODES);
}

#[test]
fn makers_formats_take_what_is_predicted() {
    if !alone("gpu_memory::makers_formats_take_what_is_predicted") {
        return;
    }
    let modes = ["auto", "nf4", "none"]
        .map(|word| (word, format!("{{model: {{quantization: {word}}}, tuning: {{lora: {{r: 4}}}}}}")));
    let modes: Vec<_> = modes.iter().map(|(word, text)| (*word, text.as_str())).collect();
    check(&["fp8", "fp8_edges", "gptq", "gptq_claims", "awq", "ct_int8", "nvfp4"].map(crate::makers::golden), &modes);
}

#[test]
fn experts_in_mxfp4_take_what_is_predicted() {
    let experts = "target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]";
    let lora = |model: &str, more: &str| {
        format!("{{model: {{{model}}}, tuning: {{lora: {{r: 4{more}}}}}, train: {{bf16: true}}}}")
    };
    let modes = [
        ("as stored", lora("quantization: auto", "")),
        ("others in NF4", lora("quantization: nf4", "")),
        ("dequantized", lora("quantization: none", "")),
        ("as stored, experts adapted", lora("quantization: auto", &format!(", {experts}"))),
    ];
    let modes: Vec<_> = modes.iter().map(|(word, text)| (*word, text.as_str())).collect();
    check(&[Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/mxfp4")], &modes);
}

#[test]
#[ignore = "minutes: scripts/just gpu-faults"]
fn every_family_takes_what_is_predicted() {
    check(&families().iter().map(|family| golden(family)).collect::<Vec<_>>(), &MODES);
}

fn check(folders: &[PathBuf], modes: &[(&str, &str)]) {
    let _gpu = gpu();
    println!("{:15} {:24} {:>9} {:>9} {:>7}", "family", "mode", "predicted", "measured", "off");
    let mut wrong = Vec::new();
    for folder in folders {
        let (dir, family) = (folder.join("model"), folder.file_name().unwrap_or_default().display());
        let arch = Arch::from_dir(&dir).unwrap();
        let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
        for &(name, text) in modes {
            let config = config(text);
            let batch = batch(arch.vocab_size, 2);
            let [loaded, most] = measured(&arch, &weights, &config, &batch);
            let rank = predicted(&arch, &weights, &config, &batch);
            let off = 100.0 * (rank.total() as f64 / most as f64 - 1.0);
            let kib = |bytes: u64| bytes >> 10;
            println!("{family} {name:24} {:>5} KiB {:>5} KiB {off:>+5.1} %", kib(rank.total()), kib(most));
            let held = rank.weights + rank.trained + rank.gradients;
            // Tokens choose experts unevenly here.
            let most_off = if arch.experts.is_some() { 25.0 } else { 10.0 };
            if off.abs() > most_off || held.abs_diff(loaded) > loaded / 20 {
                wrong.push(format!("{family}, {name}: {off:+.1} %; held {held}, {loaded} measured; {rank:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A folder with a model of 40 million numbers in bfloat16, whose largest matrix has 8 million.
fn large_model() -> (tempfile::TempDir, Arch) {
    let folder = tempfile::tempdir().unwrap();
    let text = r#"{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 16384, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "silu"}"#;
    std::fs::write(folder.path().join("config.json"), text).unwrap();
    let arch = Arch::from_dir(folder.path()).unwrap();
    let tensors: Vec<_> = arch
        .tensors()
        .iter()
        .map(|spec| (spec.name.clone(), spec.shape.clone(), Numbers::Fetched(spec.len(), Dtype::BF16)))
        .collect();
    let mut file = File::create(folder.path().join("model.safetensors")).unwrap();
    let fill = |_: &str, numbers: Numbers<'_>, out: &mut dyn Write| {
        let value = |at: u64| half::bf16::from_f32(((at * 37 % 101) as f32 - 50.0) / 2000.0).to_le_bytes();
        out.write_all(&(0..numbers.bytes() / 2).flat_map(value).collect::<Vec<u8>>())
    };
    write_numbers_by(&mut file, &tensors, &fill, &[]).unwrap();
    (folder, arch)
}

#[test]
fn the_host_holds_a_few_mib_of_a_model_that_goes_to_a_gpu() {
    if !alone("gpu_memory::the_host_holds_a_few_mib_of_a_model_that_goes_to_a_gpu") {
        return;
    }
    let _gpu = gpu();
    let (folder, arch) = large_model();
    let weights = WeightFiles::open(folder.path(), &arch.tensors()).unwrap();
    let numbers: u64 = arch.tensors().iter().map(|spec| spec.len() as u64).sum();
    println!("{:12} {:>9} {:>9}", "form", "GPU", "host");
    for (name, text, least) in [
        ("bfloat16", "tuning: {lora: {r: 4}}", 2 * numbers),
        ("float32", "{model: {dtype: float32}, tuning: {lora: {r: 4}}}", 4 * numbers),
        ("nf4", "{model: {quantization: nf4}, tuning: {lora: {r: 4}}}", numbers / 2),
        ("fp4", "{model: {quantization: fp4, double_quant: false}, tuning: {lora: {r: 4}}}", numbers / 2),
        ("int8", "{model: {quantization: int8}, tuning: {lora: {r: 4}}}", numbers),
        ("full", "tuning: {mode: full}", 4 * numbers),
    ] {
        let (host, there) = (memory::live(Device::Cpu), memory::live(GPU));
        memory::reset_peak(Device::Cpu);
        let model = Model::load(&arch, Some(&weights), &config(text)).unwrap();
        let (host, there) = (memory::peak(Device::Cpu) - host, memory::live(GPU) - there);
        println!("{name:12} {:>5} MiB {:>5} MiB", there >> 20, host >> 20);
        assert!(there >= least, "{name}: {there} bytes");
        // The whole model has 77 MiB in bfloat16, its largest matrix 32 in float32.
        assert!(host < 12 << 20, "{name}: the host held {host} bytes");
        drop(model);
    }
}

#[test]
fn activations_that_wait_on_the_host_change_no_bit_and_free_memory() {
    let _gpu = gpu();
    let text = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "hidden_act": "silu"}"#;
    let arch = Arch::from_json(text, std::path::Path::new("a test")).unwrap();
    let batch = batch(256, 2);
    println!("{:34} {:>9} {:>9}", "kept", "on GPU", "on host");
    for train in ["bf16: false", "bf16: true", "gradient_checkpointing: true", "gradient_checkpointing: none"] {
        let run = |offloading: bool| {
            let text = format!(
                "{{model: {{init: random, device: cuda}}, tuning: {{mode: full}}, \
                 train: {{{train}, activation_offloading: {offloading}}}}}"
            );
            let config = config(&text);
            let mut model = Model::load(&arch, None, &config).unwrap();
            model.params.zero_grads();
            let before = memory::live(GPU);
            memory::reset_peak(GPU);
            let mut losses = Vec::new();
            for step in 0..3 {
                losses.push(model.forward_backward(&batch, 0.01, 1.0, step).unwrap());
            }
            let most = memory::peak(GPU) - before;
            assert_eq!(memory::on_host(GPU), 0, "everything is back");
            (losses, model.params.grads().read(), most)
        };
        let (losses, gradients, most) = run(false);
        let (again, offloaded, less) = run(true);
        println!("{train:34} {:>5} KiB {:>5} KiB", most >> 10, less >> 10);
        assert_eq!(losses, again);
        assert!(gradients.iter().zip(&offloaded).all(|(one, other)| one.to_bits() == other.to_bits()), "{train}");
        assert!(less < most, "{train}: {less} of {most} bytes");
    }
}

#[test]
fn tables_that_wait_on_the_host_change_no_bit_and_free_memory() {
    let modes = [
        (
            "in float32",
            "{model: {device: cuda, dtype: float32}, tuning: {lora: {r: 4}}, train: {offload_embedding: true}}",
        ),
        (
            "in bfloat16",
            "{model: {device: cuda, dtype: bfloat16}, tuning: {lora: {r: 4}}, train: {offload_embedding: true, bf16: true}}",
        ),
    ];
    let folders = ["mistral", "gemma4_e2b"].map(golden);
    check(&folders, &modes);
    let _gpu = gpu();
    for folder in folders {
        let dir = folder.join("model");
        let arch = Arch::from_dir(&dir).unwrap();
        let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
        for (name, text) in modes {
            let batch = batch(arch.vocab_size, 2);
            let run = |offloads: bool| {
                let mut config = config(text);
                config.train.offload_embedding = offloads;
                let before = memory::live(GPU);
                let mut model = Model::load(&arch, Some(&weights), &config).unwrap();
                let held = memory::live(GPU) - before;
                model.params.zero_grads();
                let loss = model.forward_backward(&batch, 0.01, 1.0, 0).unwrap();
                let next = model.extend(&mut [(&mut model.cache(), &[5, 3, 9])]).unwrap().row(0);
                (loss, model.params.grads().read(), next, held)
            };
            let ((loss, gradients, next, held), (again, others, after, less)) = (run(false), run(true));
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(loss, again, "{name}");
            assert_eq!((bits(&gradients), bits(&next)), (bits(&others), bits(&after)), "{name}");
            let each = if name == "in bfloat16" { 2 } else { 4 };
            let tables = arch
                .tensors()
                .into_iter()
                .filter(|spec| spec.name == PER_LAYER_EMBEDDING || spec.name == EMBEDDING && !arch.tie_word_embeddings);
            let bytes: u64 = tables.map(|spec| each * spec.len() as u64).sum();
            assert!(bytes > 0 && held - less >= bytes, "{name}: {held} to {less} bytes, the tables have {bytes}");
        }
    }
}

#[test]
fn weights_that_wait_on_the_host_change_no_bit_and_two_blocks_of_them_are_held() {
    if !alone("gpu_memory::weights_that_wait_on_the_host_change_no_bit_and_two_blocks_of_them_are_held") {
        return;
    }
    let modes = [
        ("lora", "tuning: {lora: {r: 4}}"),
        ("qlora, bf16", "{model: {quantization: nf4}, tuning: {lora: {r: 4}}, train: {bf16: true}}"),
        ("dora", "tuning: {lora: {r: 4, use_dora: true}}"),
        ("blocks run again", "{tuning: {lora: {r: 4}}, train: {gradient_checkpointing: true}}"),
        ("freeze", "{tuning: {mode: freeze, freeze: {trainable_layers: 1}}}"),
    ];
    let offload = |text: &str| {
        let mut config = config(text);
        config.train.offload_param = true;
        config
    };
    let folders = ["llama", "gemma3", "qwen3_moe", "qwen3_5", "gpt_oss", "gemma4_e2b"].map(golden);
    let folders = folders.into_iter().chain([golden("../mxfp4"), crate::makers::golden("gptq")]);
    let _gpu = gpu();
    for folder in folders {
        let (dir, family) = (folder.join("model"), folder.file_name().unwrap_or_default().display());
        let arch = Arch::from_dir(&dir).unwrap();
        let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
        let batch = batch(arch.vocab_size, 2);
        for (name, text) in modes {
            let coded = ["mxfp4", "gptq"].iter().any(|maker| dir.ends_with(format!("{maker}/model")));
            let tried = match name {
                "lora" => true,
                "qlora, bf16" => !coded,
                _ => dir.ends_with("llama/model"),
            };
            if !tried {
                continue;
            }
            let run = |config: &Config| {
                let before = memory::live(GPU);
                let mut model = Model::load(&arch, Some(&weights), config).unwrap();
                let held = memory::live(GPU) - before;
                model.params.zero_grads();
                let mut losses = Vec::new();
                for step in 0..2 {
                    losses.push(model.forward_backward(&batch, 0.01, 1.0, step).unwrap());
                }
                let mut cache = model.cache();
                let next = [&[5, 3, 9][..], &[7]].map(|ids| model.extend(&mut [(&mut cache, ids)]).unwrap().row(0));
                (losses, model.params.grads().read(), next.concat(), held)
            };
            let ((loss, gradients, next, held), (again, others, after, less)) =
                (run(&config(text)), run(&offload(text)));
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(loss, again, "{family}, {name}");
            assert_eq!((bits(&gradients), bits(&next)), (bits(&others), bits(&after)), "{family}, {name}");
            assert!(less < held, "{family}, {name}: {held} to {less} bytes");
        }
    }
}

#[test]
fn weights_that_wait_on_the_host_take_what_is_predicted() {
    let modes = [
        ("lora", "{tuning: {lora: {r: 4}}, train: {offload_param: true}}"),
        (
            "qlora, bf16",
            "{model: {quantization: nf4}, tuning: {lora: {r: 4}}, train: {bf16: true, offload_param: true}}",
        ),
        (
            "tables too",
            "{model: {dtype: bfloat16}, tuning: {lora: {r: 4}}, train: {offload_param: true, offload_embedding: true}}",
        ),
        ("full", "{tuning: {mode: full}, train: {offload_param: true}}"),
    ];
    check(&["llama", "gemma3", "qwen3_moe", "gpt_oss"].map(golden), &[modes[0], modes[1], modes[3]]);
    check(&["mistral", "gemma4_e2b"].map(golden), &modes[2..3]);
    check(&[golden("../mxfp4")], &modes[0..1]);
    check(&[crate::makers::golden("gptq")], &modes[0..1]);
}

#[test]
fn tables_that_a_gpu_needs_do_not_wait_on_the_host() {
    let _gpu = gpu();
    for (family, text, why) in [
        ("gemma3", "train: {offload_embedding: true}", "the model's head shares its embedding"),
        ("mistral", "{tuning: {mode: full}, train: {offload_embedding: true}}", "its embedding is trained"),
    ] {
        let dir = golden(family).join("model");
        let arch = Arch::from_dir(&dir).unwrap();
        let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
        let error = Model::load(&arch, Some(&weights), &config(text)).unwrap_err();
        assert!(error.kind() == Kind::Config && error.message().contains(why), "{error}");
    }
}

#[test]
fn long_passes_in_tiles_compute_the_same_and_take_less_memory() {
    if !alone("gpu_memory::long_passes_in_tiles_compute_the_same_and_take_less_memory") {
        return;
    }
    let _gpu = gpu();
    let text = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 256, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "hidden_act": "silu"}"#;
    let arch = Arch::from_json(text, std::path::Path::new("a test")).unwrap();
    let mut rows = batch(256, 2);
    // The last block computes those with a label alone.
    rows.targets.iter_mut().enumerate().filter(|(at, _)| at % 3 == 0).for_each(|(_, target)| *target = IGNORE);
    let lora = "tuning: {lora: {r: 4, lora_dropout: 0.3, init_lora_weights: gaussian}}";
    println!("{:24} {:>9} {:>9}", "", "whole", "tiles");
    for (device, base) in [("cpu", lora), ("cuda:1", lora), ("cuda:1", "tuning: {mode: full}")] {
        let run = |tiles: Option<usize>| {
            let text = format!("{{model: {{init: random}}, {base}, train: {{gradient_checkpointing: true}}}}");
            let mut config = config(&text);
            config.model.device = if device == "cpu" { DeviceChoice::Cpu } else { DeviceChoice::Cuda(Some(1)) };
            let mut model = Model::load(&arch, None, &config).unwrap();
            if let Some(tokens) = tiles {
                model.set_tiles(tokens, &config);
            }
            model.params.zero_grads();
            let before = memory::live(GPU);
            memory::reset_peak(GPU);
            let loss = model.forward_backward(&rows, 0.01, 1.0, 0).unwrap();
            let most = memory::peak(GPU) - before;
            (loss, model.loss(&rows).unwrap(), model.params.grads().read(), most)
        };
        let (loss, evaluated, gradients, most) = run(None);
        let largest = gradients.iter().fold(0.0f32, |most, it| most.max(it.abs()));
        // Longer than the pass, and parts of it.
        for tokens in [304, 64, 80, 16] {
            let (again, evaluated_again, tiled, less) = run(Some(tokens));
            println!("{device:7} {tokens:>4} a tile {:>11} KiB {:>5} KiB", most >> 10, less >> 10);
            assert!((again / loss - 1.0).abs() < 1e-6 && (evaluated_again / evaluated - 1.0).abs() < 1e-6);
            let off = gradients.iter().zip(&tiled).fold(0.0f32, |most, (one, other)| most.max((one - other).abs()));
            assert!(off <= 2e-6 * largest, "{device}, {tokens} a tile: {off} of {largest}");
            assert!(tokens == 304 || device == "cpu" || less < most * 3 / 4, "{less} of {most} bytes");
        }
    }
}
