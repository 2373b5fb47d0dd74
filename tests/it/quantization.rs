//! Bases in 4 and 8 bits: the bytes are those of bitsandbytes, its checkpoints are read and written, hostile ones are refused;
//! training on such bases, and the cache of quantized matrices on disk.
mod golden;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::{Value, json};
use tunesmith::Kind;
use tunesmith::config::arch::{Arch, TensorSpec};
use tunesmith::config::{Config, InitLora, Mode, Quantization};
use tunesmith::model::Model;
use tunesmith::model::adapters::KINDS;
use tunesmith::model::quantize::{self, How};
use tunesmith::model::quantized_cache::Cache;
use tunesmith::model::shards::Shards;
use tunesmith::model::stack::Stack;
use tunesmith::model::weights::{self, Numbers, Parts, Stacking, WeightFiles, write_numbers_to};
use tunesmith::ops::quant::{Format, encode};
use tunesmith::ops::testing::in_vectors;

use super::parity::{self, Forward, Tensors, adapter_config, check_final, check_gradients, check_trace, close, put};
use super::run::fixture::{said, tunesmith};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/b").join(path)
}

/// A stored tensor: bytes as they are, everything else as f32.
#[derive(Debug, Clone)]
enum Stored {
    Bytes(Vec<u8>),
    Floats(Vec<usize>, Vec<f32>),
}

fn stored(path: &Path) -> BTreeMap<String, Stored> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let read = |view: &safetensors::tensor::TensorView<'_>| match view.dtype() {
        safetensors::Dtype::U8 => Stored::Bytes(view.data().to_vec()),
        safetensors::Dtype::BF16 => {
            let halves = view.data().chunks_exact(2).map(|half| bf16::from_le_bytes(half.try_into().unwrap()).to_f32());
            Stored::Floats(view.shape().to_vec(), halves.collect())
        }
        safetensors::Dtype::F16 => {
            let halves = view.data().chunks_exact(2).map(|half| f16::from_le_bytes(half.try_into().unwrap()).to_f32());
            Stored::Floats(view.shape().to_vec(), halves.collect())
        }
        safetensors::Dtype::I32 => {
            let words = view.data().chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap()) as f32);
            Stored::Floats(view.shape().to_vec(), words.collect())
        }
        _ => {
            let words = view.data().chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
            Stored::Floats(view.shape().to_vec(), words.collect())
        }
    };
    file.tensors().iter().map(|(name, view)| (name.clone(), read(view))).collect()
}

struct Golden(BTreeMap<String, Stored>);

impl Golden {
    fn bytes(&self, name: &str) -> &[u8] {
        match &self.0[name] {
            Stored::Bytes(bytes) => bytes,
            Stored::Floats(..) => panic!("{name} holds numbers"),
        }
    }

    fn floats(&self, name: &str) -> &[f32] {
        match &self.0[name] {
            Stored::Floats(_, values) => values,
            Stored::Bytes(_) => panic!("{name} holds bytes"),
        }
    }

    fn shape(&self, name: &str) -> &[usize] {
        match &self.0[name] {
            Stored::Floats(shape, _) => shape,
            Stored::Bytes(_) => panic!("{name} holds bytes"),
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn qlora(label: &str) -> Config {
    let mut config = adapter_config(&parity::golden("llama/adapter_init/adapter_config.json"));
    config.model.quantization = Quantization::Nf4;
    config.model.double_quant = label.ends_with("dq");
    config
}

fn open(dir: &Path) -> (Arch, WeightFiles) {
    let arch = Arch::from_dir(dir).unwrap();
    let files = WeightFiles::open(dir, &arch.tensors()).unwrap();
    (arch, files)
}

fn model(dir: &Path, config: &Config) -> Model {
    let (arch, files) = open(dir);
    Model::load(&arch, Some(&files), config).unwrap()
}

fn adapter() -> Tensors {
    parity::tensors(&parity::golden("llama/adapter_init/adapter_model.safetensors"))
}

#[test]
fn qlora_equals_peft_on_bitsandbytes_from_its_checkpoint_and_quantized_here() {
    let dense = parity::golden("llama/model");
    for label in ["nf4", "nf4dq"] {
        let dir = golden(&format!("llama_{label}"));
        let forward = Forward::read("llama");
        let expected = parity::tensors(&dir.join("forward.safetensors"));
        let gradients = parity::tensors(&dir.join("lora_grads.safetensors"));
        let trace = parity::json(&dir.join("trace.json"));
        let last = parity::tensors(&dir.join("adapter_final.safetensors"));
        let mut trained: Vec<Vec<f32>> = Vec::new();
        // The checkpoint as it is found, and the one before quantization; blocks run again in backward the second time.
        for (from, auto, again) in [(dir.join("model"), true, false), (dense.clone(), false, true)] {
            let mut config = qlora(label);
            config.train.gradient_checkpointing = again.into();
            if auto {
                config.model.quantization = Quantization::Auto;
            }
            let mut model = model(&from, &config);
            let mut base = Config { model: config.model.clone(), ..parity::recipe() };
            base.model.quantization = config.model.quantization;
            forward.check(&self::model(&from, &base), &expected, "_base");
            put(&mut model, &adapter());
            forward.check(&model, &expected, "_lora");
            check_gradients(&mut model, &forward.batch(), &gradients);
            check_trace(&mut model, &trace);
            check_final(&model, &last, 5e-6);
            trained.push(model.params.values().read());
        }
        assert!(trained[0] == trained[1], "{label}: the same bits");
    }
}

#[test]
fn our_codes_of_the_model_are_the_checkpoints_and_a_saved_one_is_its_file_to_the_byte() {
    let (arch, dense) = open(&parity::golden("llama/model"));
    for (label, double) in [("nf4", false), ("nf4dq", true)] {
        let dir = golden(&format!("llama_{label}/model"));
        let (_, files) = open(&dir);
        assert_eq!(files.quantization(), Some(Format::Nf4));
        let matrices = quantize::matrices(&arch, &[]).unwrap();
        assert_eq!(matrices.len(), 14);
        let (mut coded, mut plain) = (Vec::new(), Vec::new());
        for TensorSpec { name, shape } in arch.tensors() {
            assert_eq!(files.shape(&name), Some(&shape[..]));
            let (_, values) = dense.read(&name).unwrap();
            if matrices.contains(&name) {
                let ours = encode::quantize(&values, shape[1], Format::Nf4, double).unwrap();
                let theirs = files.read_quantized(&name).unwrap();
                assert_eq!(bits(&ours.dequantize()), bits(&theirs.dequantize()), "{name}");
                coded.push((name, shape, ours));
            } else {
                plain.push((name, shape, values));
            }
        }
        let parts: Vec<Parts<'_>> =
            coded.iter().map(|(name, shape, matrix)| Parts::new(name, shape, "float32", matrix).unwrap()).collect();
        let mut tensors: Vec<_> = parts.iter().flat_map(Parts::tensors).collect();
        tensors.extend(
            plain.iter().map(|(name, shape, values)| (name.clone(), shape.clone(), Numbers::F32(values.into()))),
        );
        let mut written = Vec::new();
        write_numbers_to(&mut written, &tensors, &[("format", "pt")]).unwrap();
        assert!(written == std::fs::read(dir.join("model.safetensors")).unwrap(), "{label}: the same file");
        let config = parity::json(&dir.join("config.json"));
        assert_eq!(weights::config_json(Format::Nf4, double, &[]), config["quantization_config"]);
    }
}

#[test]
fn matrices_of_eight_bits_are_read_and_trained_on() {
    let (arch, dense) = open(&parity::golden("llama/model"));
    let matrices = quantize::matrices(&arch, &["down_proj".into()]).unwrap();
    assert_eq!(matrices.len(), 12);
    let read = |name: &str| dense.read(name).unwrap();
    let coded: Vec<_> = matrices
        .iter()
        .map(|name| {
            let (shape, values) = read(name);
            let matrix = encode::quantize(&values, shape[1], Format::Int8, false).unwrap();
            (name.clone(), shape, matrix)
        })
        .collect();
    let rest: Vec<_> = arch.tensors().into_iter().filter(|spec| !matrices.contains(&spec.name)).collect();
    let rest: Vec<_> = rest.iter().map(|spec| (spec.name.clone(), read(&spec.name))).collect();
    let parts: Vec<_> =
        coded.iter().map(|(name, shape, matrix)| Parts::new(name, shape, "float32", matrix).unwrap()).collect();
    let mut tensors: Vec<_> = parts.iter().flat_map(Parts::tensors).collect();
    tensors
        .extend(rest.iter().map(|(name, (shape, values))| (name.clone(), shape.clone(), Numbers::F32(values.into()))));
    let dir = tempfile::tempdir().unwrap();
    let mut file = std::fs::File::create(dir.path().join("model.safetensors")).unwrap();
    write_numbers_to(&mut file, &tensors, &[]).unwrap();
    let mut config = parity::json(&parity::golden("llama/model/config.json"));
    config["quantization_config"] = weights::config_json(Format::Int8, false, &["down_proj".into()]);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();

    let forward = Forward::read("llama");
    let mut losses = Vec::new();
    let settings = |quantization| {
        let mut config = parity::recipe();
        config.model.quantization = quantization;
        config.model.quantization_skip_modules = vec!["down_proj".into()];
        config
    };
    let from_here = dir.path().to_path_buf();
    for (from, quantization) in [
        (&from_here, Quantization::Auto),
        (&parity::golden("llama/model"), Quantization::Int8),
        (&from_here, Quantization::None),
    ] {
        losses.push(model(from, &settings(quantization)).token_losses(&forward.batch()).unwrap());
    }
    assert!(losses[0] == losses[1] && losses[1] == losses[2], "read, made here and widened: the same bits");
    let exact = model(&parity::golden("llama/model"), &parity::recipe()).token_losses(&forward.batch()).unwrap();
    assert!(exact != losses[0], "they are quantized");
    close("int8 is near", &losses[0], &exact, 0.3);
}

#[test]
fn adapters_of_every_kind_train_on_four_bits_as_on_the_same_numbers_dense() {
    // A dense checkpoint that holds the quantized numbers.
    let (arch, files) = open(&golden("llama_nf4dq/model"));
    let dir = tempfile::tempdir().unwrap();
    let read: Vec<_> =
        arch.tensors().into_iter().map(|spec| (spec.name.clone(), files.read(&spec.name).unwrap())).collect();
    let tensors: Vec<_> =
        read.iter().map(|(name, (shape, values))| (name.clone(), shape.clone(), &values[..])).collect();
    weights::write_safetensors(&dir.path().join("model.safetensors"), &tensors, &[]).unwrap();
    std::fs::copy(parity::golden("llama/model/config.json"), dir.path().join("config.json")).unwrap();
    let (_, dense) = open(dir.path());

    let lora: [fn(&mut Config); 6] = [
        |_| {},
        |config| config.tuning.lora.use_dora = true,
        |config| config.tuning.lora.use_rslora = true,
        |config| config.tuning.lora.lora_dropout = 0.3,
        |config| config.train.gradient_checkpointing = true.into(),
        |config| config.tuning.lora.modules_to_save = vec!["lm_head".into()],
    ];
    let batch = Forward::read("llama").batch();
    let kinds = KINDS.iter().map(|kind| (kind.mode, lora[0])).chain(lora.map(|change| (Mode::Lora, change)));
    for (index, (mode, change)) in kinds.enumerate() {
        let mut config = parity::recipe();
        config.tuning.mode = mode;
        config.tuning.lora.r = 4;
        config.tuning.lora.init_lora_weights = InitLora::Random;
        change(&mut config);
        let run = |files: &WeightFiles| {
            let mut model = Model::load(&arch, Some(files), &config).unwrap();
            model.params.zero_grads();
            let loss = model.forward_backward(&batch, 0.1, 1.0, 3).unwrap();
            (loss, model.params.values().read(), model.params.grads().read())
        };
        let (coded, wide) = (run(&files), run(&dense));
        assert!(coded == wide, "case {index}: loss, adapter and gradients to the bit");
        assert!(coded.2.iter().any(|&gradient| gradient != 0.0));
    }
}

/// QLoRA of every family: its codes, those of each expert among them, train as a dense model of the same numbers does.
#[test]
fn every_family_trains_on_codes_as_on_the_same_numbers_dense() {
    // Tiles would sum what is kept in bfloat16 beside the codes in another order than the same numbers in float32.
    in_vectors(|| {
        for family in &parity::families() {
            let dir = parity::golden(family);
            let (arch, files) = open(&dir.join("model"));
            let batch = Forward::read(family).batch();
            let mut config = adapter_config(&dir.join("adapter_init/adapter_config.json"));
            let init = parity::tensors(&dir.join("adapter_init/adapter_model.safetensors"));
            let run = |files: &WeightFiles, config: &Config| {
                let mut model =
                    Model::load(&arch, Some(files), config).unwrap_or_else(|error| panic!("{family}: {error}"));
                put(&mut model, &init);
                model.params.zero_grads();
                let loss = model.forward_backward(&batch, 0.1, 1.0, 0).unwrap();
                (loss, model.params.grads().read())
            };
            let plain = run(&files, &config);
            let matrices = quantize::matrices(&arch, &[]).unwrap();
            let sparse = (0..arch.num_hidden_layers).any(|layer| arch.experts_of(layer).is_some());
            assert_eq!(matrices.iter().any(|name| name.contains("experts.")), sparse, "{family}");
            assert!(!matrices.iter().any(|name| name.ends_with(".gate.weight")), "{family}: routers stay dense");
            let mut widened: Vec<_> = arch
                .tensors()
                .into_iter()
                .map(|TensorSpec { name, shape }| {
                    let (_, mut values) = files.read(&name).unwrap();
                    if matrices.contains(&name) {
                        values = encode::quantize(&values, shape[1], Format::Nf4, true).unwrap().dequantize();
                    }
                    (name, shape, values)
                })
                .collect();
            let stacked =
                Stacking::NONE.again(widened.iter().map(|(name, shape, _)| (name.as_str(), shape.as_slice())));
            for it in stacked.iter().filter(|it| it.is_transposed()) {
                // As GPT-2's files have them.
                let (_, shape, values) = widened.iter_mut().find(|(name, ..)| *name == it.name).unwrap();
                *values = it.joined(&[std::mem::take(values)]);
                shape.clone_from(&it.shape);
            }
            let tensors: Vec<_> =
                widened.iter().map(|(name, shape, values)| (name.clone(), shape.clone(), &values[..])).collect();
            let folder = tempfile::tempdir().unwrap();
            weights::write_safetensors(&folder.path().join("model.safetensors"), &tensors, &[]).unwrap();
            let wide = run(&WeightFiles::open(folder.path(), &arch.tensors()).unwrap(), &config);
            config.model.quantization = Quantization::Nf4;
            let coded = run(&files, &config);
            assert!(coded == wide, "{family}: loss and gradients to the bit, {} and {}", coded.0, wide.0);
            assert!(coded.0.to_bits() != plain.0.to_bits(), "{family}: quantization loses something");
        }
    });
}

#[test]
fn finished_adapters_are_merged_before_quantization() {
    let (arch, files) = open(&golden("llama_nf4/model"));
    let config = parity::recipe();
    let dir = parity::golden("llama/adapter_final");
    let (stack, _) = tunesmith::train::adapter::stack(&[dir], &mut arch.clone()).unwrap();
    let model = Model::load_on(&arch, Some(&files), &config, &stack).unwrap();
    assert!(
        model.notes.iter().any(|note| note.contains("14 matrices") && note.contains("second time")),
        "{:?}",
        model.notes
    );
    let (_, dense) = open(&parity::golden("llama/model"));
    let mut nf4 = config;
    nf4.model.quantization = Quantization::Nf4;
    nf4.model.double_quant = false;
    let merged = Model::load_on(&arch, Some(&dense), &nf4, &stack).unwrap();
    assert!(merged.notes.is_empty(), "merged into the numbers before quantization: nothing to say");
}

#[test]
fn loftq_starts_with_what_quantization_loses() {
    let golden = Golden(stored(&golden("loftq.safetensors")));
    for case in ["once", "twice", "often"] {
        let (values, shape) = (golden.floats(&format!("{case}.w")), golden.shape(&format!("{case}.w")));
        let (rows, cols) = (shape[0], shape[1]);
        let rounds = golden.floats(&format!("{case}.rounds"))[0] as usize;
        let (a, b) = (golden.floats(&format!("{case}.a")), golden.floats(&format!("{case}.b")));
        let rank = a.len() / cols;
        let how = How { format: Format::Nf4, double: false };
        for scale in [1.0f32, 2.0] {
            let (matrix, [ours_a, ours_b]) =
                tunesmith::model::adapters::loftq::start(values, cols, how, rank, scale, rounds).unwrap();
            let update = |a: &[f32], b: &[f32], scale: f32| -> Vec<f32> {
                let at = |at: usize| {
                    (0..rank).map(|k| b[at / cols * rank + k] * a[k * cols + at % cols]).sum::<f32>() * scale
                };
                (0..rows * cols).map(at).collect()
            };
            close(case, &update(&ours_a, &ours_b, scale), &update(a, b, 1.0), 2e-5);
            close(
                case,
                &matrix.dequantize(),
                golden.floats(&format!("{case}.numbers")),
                if rounds == 1 { 0.0 } else { 1e-6 },
            );
        }
    }
    // In a model: nearer to the dense one than a plain start.
    let forward = Forward::read("llama");
    let dense = parity::golden("llama/model");
    let exact = model(&dense, &parity::recipe()).token_losses(&forward.batch()).unwrap();
    let distance = |init, rounds| {
        let mut config = qlora("nf4");
        (config.tuning.lora.init_lora_weights, config.tuning.lora.loftq_iter) = (init, rounds);
        config.tuning.lora.r = 32;
        let losses = model(&dense, &config).token_losses(&forward.batch()).unwrap();
        losses.iter().zip(&exact).map(|(ours, exact)| f64::from(ours - exact).powi(2)).sum::<f64>()
    };
    let (plain, once) = (distance(InitLora::Kaiming, 1), distance(InitLora::Loftq, 1));
    assert!(once < 0.6 * plain, "{once} {plain}");
    // A layer that is not quantized starts as LoRA does, and learns.
    let mut config = qlora("nf4");
    config.tuning.lora.init_lora_weights = InitLora::Loftq;
    config.model.quantization_skip_modules = vec!["q_proj".into()];
    let model = model(&dense, &config);
    let a = model.params.find("model.layers.0.self_attn.q_proj.lora_A.weight").unwrap();
    assert!(model.params.values().slice(a.range()).read().iter().any(|&value| value != 0.0));
}

#[test]
fn copies_are_kept_used_and_made_anew_where_they_are_damaged() {
    let (arch, files) = open(&parity::golden("llama/model"));
    let (config, root) = (qlora("nf4dq"), tempfile::tempdir().unwrap());
    let how = How { format: Format::Nf4, double: true };
    let load = || {
        let cache = Cache::new(root.path(), &files, how).unwrap();
        let dir = cache.dir().to_path_buf();
        (
            Model::load_with(&arch, Some(&files), &config, &Stack::default(), Some(cache), Shards::default()).unwrap(),
            dir,
        )
    };
    let batch = Forward::read("llama").batch();
    let losses = |model: &Model| model.token_losses(&batch).unwrap();
    let (first, dir) = load();
    let kept: Vec<PathBuf> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!((kept.len(), first.notes.len()), (14, 0));
    let name = "model.layers.1.mlp.up_proj.weight";
    let victim = dir.join(format!("{name}.safetensors"));
    let whole = std::fs::read(&victim).unwrap();
    // Used: other codes with a fitting digest would be believed.
    assert!(losses(&load().0) == losses(&first));
    let damages: [fn(Vec<u8>) -> Vec<u8>; 3] = [
        |mut bytes| {
            let at = bytes.len() - 1000;
            bytes[at] ^= 1;
            bytes
        },
        |bytes| bytes[..bytes.len() / 2].to_vec(),
        |_| Vec::new(),
    ];
    for damage in damages {
        std::fs::write(&victim, damage(whole.clone())).unwrap();
        let (again, _) = load();
        assert!(
            again.notes.len() == 1 && again.notes[0].contains("damaged") && again.notes[0].contains(name),
            "{:?}",
            again.notes
        );
        assert!(losses(&again) == losses(&first));
        assert!(std::fs::read(&victim).unwrap() == whole, "made anew");
    }
    // Every byte of a small file counts.
    for at in (0..whole.len()).step_by(whole.len() / 60) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        std::fs::write(&victim, &bytes).unwrap();
        let (again, _) = load();
        assert!(losses(&again) == losses(&first), "byte {at}");
    }
    // Other settings are another copy.
    let other = Cache::new(root.path(), &files, How { double: false, ..how }).unwrap();
    assert_ne!(other.dir(), dir);
    // What a dead run has left of a matrix, and of a note of the source's hash.
    let left = [dir.join("a.tmp-1-0"), dir.with_file_name("b.tmp-1-0")];
    for path in &left {
        std::fs::write(path, b"half").unwrap();
    }
    load();
    assert!(left.iter().all(|path| !path.exists()));
}

/// The checkpoint with one tensor changed, as its files would hold it.
fn changed(change: impl Fn(&mut Value, &mut Vec<u8>)) -> tempfile::TempDir {
    let from = golden("llama_nf4dq/model");
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut data = bytes[8 + length..].to_vec();
    change(&mut header, &mut data);
    let text = header.to_string();
    let dir = tempfile::tempdir().unwrap();
    let whole = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &data].concat();
    std::fs::write(dir.path().join("model.safetensors"), whole).unwrap();
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    dir
}

#[test]
fn hostile_checkpoints_are_refused_and_never_panic() {
    const MATRIX: &str = "model.layers.0.mlp.up_proj.weight";
    let state = format!("{MATRIX}.quant_state.bitsandbytes__nf4");
    let load = |dir: &Path| -> tunesmith::Result<()> {
        let arch = Arch::from_dir(dir)?;
        let files = WeightFiles::open(dir, &arch.tensors())?;
        Model::load(&arch, Some(&files), &parity::recipe()).map(drop)
    };
    let range = |header: &Value, name: &str| -> std::ops::Range<usize> {
        let ends = &header[name]["data_offsets"];
        ends[0].as_u64().unwrap() as usize..ends[1].as_u64().unwrap() as usize
    };
    assert!(load(changed(|_, _| {}).path()).is_ok());
    // A state of the same length that says something else.
    for (from, to, fragment) in [
        ("\"blocksize\": 64", "\"blocksize\": 65", "in blocks of 65"),
        ("\"blocksize\": 64", "\"blocksize\":  0", "in blocks of 0"),
        ("\"blocksize\": 64", "\"blocksize\": 32", "scales"),
        ("[128, 64]", "[128, 65]", "expected [128, 64]"),
        ("[128, 64]", "[64, 128]", "expected [128, 64]"),
        ("[128, 64]", "[9e9, 64]", "not valid"),
        ("[128, 64]", "[  0, 64]", "says [0, 64]"),
        ("\"nf4\"", "\"fp4\"", "quant_type"),
        ("\"nested_blocksize\": 256", "\"nested_blocksize\": 000", "not valid"),
        ("\"nested_blocksize\": 256", "\"nested_blocksize\":   0", "nested_blocksize"),
        ("\"nested_blocksize\": 256", "\"nested_blocksize\":  64", "nested_absmax"),
        ("\"nested_offset\"", "\"nested_offzet\"", "nested_offset"),
        ("{\"quant_type\"", "[\"quant_type\"", "not valid"),
    ] {
        let dir = changed(|header, data| {
            let place = range(header, &state);
            let text = String::from_utf8(data[place.clone()].to_vec()).unwrap();
            assert!(text.contains(from), "{text}");
            data[place].copy_from_slice(text.replace(from, to).as_bytes());
        });
        let error = load(dir.path()).expect_err(to);
        assert_eq!(error.kind(), Kind::Model, "{error}");
        assert!(error.to_string().contains(fragment), "{to}: {error}");
    }
    // Scales and tables that are no numbers.
    for part in ["quant_map", "nested_quant_map", "nested_absmax"] {
        let dir = changed(|header, data| {
            let place = range(header, &format!("{MATRIX}.{part}"));
            data[place][..4].copy_from_slice(&f32::NAN.to_le_bytes());
        });
        let error = load(dir.path()).expect_err(part);
        assert!(error.to_string().contains("NaN or infinite"), "{part}: {error}");
    }
    // Parts that are missing, or that belong to nothing.
    for part in ["absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4"] {
        let dir = changed(|header, _| {
            let entry = header.as_object_mut().unwrap().remove(&format!("{MATRIX}.{part}")).unwrap();
            header["stray"] = entry;
        });
        let error = load(dir.path()).expect_err(part);
        assert_eq!(error.kind(), Kind::Model, "{part}: {error}");
    }
    let dir = changed(|header, _| {
        let entry = header.as_object_mut().unwrap().remove(MATRIX).unwrap();
        header["stray"] = entry;
    });
    assert!(load(dir.path()).expect_err("no codes").to_string().contains("has no codes"));
    // Other methods are refused by their name.
    let dir = changed(|_, _| {});
    for (config, fragment) in [
        (json!({"quant_method": "hqq", "nbits": 4}), "hqq"),
        (json!({"quant_method": "bitsandbytes"}), "load_in_4bit"),
        (json!("bitsandbytes"), "quantization_config"),
    ] {
        let path = dir.path().join("config.json");
        let mut whole = parity::json(&path);
        whole["quantization_config"] = config;
        std::fs::write(&path, whole.to_string()).unwrap();
        let error = Arch::from_dir(dir.path()).expect_err(fragment);
        assert!(error.to_string().contains(fragment), "{error}");
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    let (arch, coded) = open(&golden("llama_nf4/model"));
    let (_, dense) = open(&parity::golden("llama/model"));
    let refused = |files: &WeightFiles, change: fn(&mut Config)| {
        let mut config = parity::recipe();
        change(&mut config);
        let error = Model::load(&arch, Some(files), &config).unwrap_err();
        assert_eq!(error.kind(), Kind::Config, "{error}");
        error.to_string()
    };
    let text = refused(&coded, |config| config.model.quantization = Quantization::Fp4);
    assert!(text.contains("the checkpoint is quantized as nf4"), "{text}");
    let text = refused(&coded, |config| config.tuning.mode = Mode::Full);
    assert!(text.contains("cannot be trained themselves") && text.contains("quantization: none"), "{text}");
    let text = refused(&coded, |config| config.tuning.lora.init_lora_weights = InitLora::Pissa);
    assert!(text.contains("before quantization"), "{text}");
    let text = refused(&dense, |config| {
        config.model.quantization = Quantization::Nf4;
        config.model.quantization_skip_modules = vec!["q_porj".into()];
    });
    assert!(text.contains("did you mean q_proj?"), "{text}");
    // Widened, it is a model like any other.
    let mut config = parity::recipe();
    (config.tuning.mode, config.model.quantization) = (Mode::Full, Quantization::None);
    assert!(Model::load(&arch, Some(&coded), &config).is_ok());

    let config = |text: &str| {
        let text = format!("model: {{name: m}}\ndata: {{train_path: d}}\n{text}");
        tunesmith::config::load_text(Path::new("c.yaml"), &text)
    };
    let resolved = config("tuning: {mode: qlora}").unwrap();
    assert_eq!((resolved.config.tuning.mode, resolved.config.model.quantization), (Mode::Lora, Quantization::Nf4));
    let shown = |key: &str| resolved.settings.iter().find(|setting| setting.key == key).unwrap().value.clone();
    assert_eq!((shown("tuning.mode"), shown("model.quantization")), (json!("qlora"), json!("nf4")));
    assert!(resolved.config.model.double_quant);
    for (text, fragment) in [
        ("tuning: {mode: qlora, lora: {init_lora_weights: pissa}}", "use loftq"),
        ("tuning: {lora: {init_lora_weights: loftq}}", "mode: qlora"),
        ("tuning: {lora: {loftq_iter: 3}}", "only loftq has rounds"),
        ("tuning: {mode: full}\nmodel: {name: m, quantization: nf4}", "cannot be trained themselves"),
        ("tuning: {mode: qlora}\nmodel: {name: m, quantization: none}", "trains on a quantized base"),
    ] {
        let model = if text.contains("model:") { "" } else { "model: {name: m}\n" };
        let text = format!("{model}data: {{train_path: d}}\n{text}");
        let error = tunesmith::config::load_text(Path::new("c.yaml"), &text).unwrap_err();
        assert!(error.to_string().contains(fragment), "{text}: {error}");
    }
}

#[test]
fn decoding_of_a_quantized_folder_is_measured_or_refused_by_name() {
    let measured = |folder: &str, more: &[&str]| {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(folder).join("model");
        let model = model.display().to_string();
        let args = ["bench", "--mode", "decode", "--model", &model, "--seq", "4", "--steps", "2"];
        tunesmith(&[&args[..], more].concat()).output().unwrap()
    };
    for folder in ["b/llama_nf4", "b/llama_int8"] {
        let done = measured(folder, &[]);
        assert!(done.status.success() && said(&done).contains("tokens/s at batch 8"), "{folder}: {}", said(&done));
    }
    for (folder, more, message) in [
        ("makers/fp8", &[][..], "a base that is stored as fp8"),
        ("b/llama_nf4", &["--cold"], "--cold is about training"),
    ] {
        let refused = measured(folder, more);
        assert!(refused.status.code() == Some(2) && said(&refused).contains(message), "{}", said(&refused));
    }
}
