//! Golden parity with PyTorch, Transformers and PEFT: logits, losses, gradients, 20-step traces, final adapters,
//! greedy tokens. `tests/golden/README.md` says how the traces were made.
use serde_json::Value;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tunesmith::checkpoint::AdapterConfig;
use tunesmith::comm::World;
use tunesmith::comm::single::Single;
use tunesmith::config::arch::{Arch, TensorSpec, plain_name};
use tunesmith::config::{
    Checkpointing, Config, DeviceChoice, Dtype, InitLora, LrScheduler, Mode, Patterns, TargetModules,
};
use tunesmith::data::batch::{Batch, Example, IGNORE};
use tunesmith::device::cuda::testing;
use tunesmith::device::memory;
use tunesmith::eval::{Settings, Unwatched, generate};
use tunesmith::model::Model;
use tunesmith::model::adapters::KINDS;
use tunesmith::model::weights::{StackedTensor, WeightFiles};
use tunesmith::ops::simd::pair_level;
use tunesmith::ops::testing::in_vectors;
use tunesmith::optim::{AdamW, Betas, Optimizer, OptimizerPlan, Schedule};
use tunesmith::parallel::ParallelPlan;
use tunesmith::parallel::optimizer::{self, slots};
use tunesmith::train::step::step;

/// Limits of `tests/golden/README.md`.
const LOGITS: f32 = 5e-5;
const NLL: f32 = 5e-5;
const GRADIENT: f32 = 5e-5;
const TRACE_LOSS: f64 = 2e-5;
const TRACE_NORM: f64 = 1e-5;
/// Limit where gates are cut off (Gemma 3n): rounding may put a gate on the other side of its cut, where its slope differs.
const TRACE_NORM_OF_CUTS: f64 = 1e-4;
const ADAPTER: f32 = 5e-6;
const FULL: f32 = 2e-5;

pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The repository: where cargo runs this, or where a test binary that was built elsewhere is told that it is.
pub fn root() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

pub fn golden(path: &str) -> PathBuf {
    root().join("tests/golden/a").join(path)
}

pub fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// F32 and I32 tensors alike, as f32 (the integers are small).
pub fn tensors(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let widen = |view: &safetensors::tensor::TensorView<'_>| -> Vec<f32> {
        let words = view.data().chunks_exact(4).map(|word| <[u8; 4]>::try_from(word).unwrap());
        match view.dtype() {
            safetensors::Dtype::F32 => words.map(f32::from_le_bytes).collect(),
            safetensors::Dtype::I32 => words.map(|word| i32::from_le_bytes(word) as f32).collect(),
            other => panic!("{other:?} in {}", path.display()),
        }
    };
    file.tensors().iter().map(|(name, view)| (name.clone(), (view.shape().to_vec(), widen(view)))).collect()
}

/// The engine's name of a tensor of an adapter.
pub fn own(name: &str) -> String {
    plain_name(name.trim_start_matches("base_model.model."))
}

fn peft(name: &str) -> String {
    format!("base_model.model.{name}")
}

/// The configuration of an adapter as PEFT wrote it, in the goldens' recipe.
pub fn adapter_config(path: &Path) -> Config {
    let adapter = json(path);
    let mut config = recipe();
    if adapter["peft_type"] != "LORA" {
        config.tuning = AdapterConfig::from_json(&adapter.to_string(), path).unwrap().tuning;
        return config;
    }
    let lora = &mut config.tuning.lora;
    lora.r = adapter["r"].as_u64().unwrap() as usize;
    lora.lora_alpha = adapter["lora_alpha"].as_f64().unwrap();
    lora.use_rslora = adapter["use_rslora"].as_bool().unwrap();
    lora.use_dora = adapter["use_dora"].as_bool().unwrap();
    let words = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    lora.target_modules = TargetModules::List(words(&adapter["target_modules"]));
    lora.modules_to_save = words(&adapter["modules_to_save"]);
    lora.target_parameters = words(&adapter["target_parameters"]);
    let entries = |value: &Value| value.as_object().unwrap().clone().into_iter().collect::<Vec<_>>();
    let ranks = entries(&adapter["rank_pattern"]).into_iter().map(|(key, rank)| (key, rank.as_u64().unwrap() as usize));
    lora.rank_pattern = Patterns(ranks.collect());
    let alphas = entries(&adapter["alpha_pattern"]).into_iter().map(|(key, alpha)| (key, alpha.as_f64().unwrap()));
    lora.alpha_pattern = Patterns(alphas.collect());
    config
}

thread_local! {
    /// Where models of this thread's tests are.
    static DEVICE: Cell<DeviceChoice> = const { Cell::new(DeviceChoice::Cpu) };
}

/// Runs `test` with models on a GPU: the stand-in, or GPU 0 of this machine if `TUNESMITH_TEST_GPU` is set.
pub fn on_gpu<T>(test: impl FnOnce() -> T) -> T {
    testing::use_stand_in();
    DEVICE.set(DeviceChoice::Cuda(None));
    let done = memory::guarded(|| Ok(test())).expect("the GPU does all that it is told");
    DEVICE.set(DeviceChoice::Cpu);
    done
}

pub fn recipe() -> Config {
    let mut config = Config::default();
    config.model.device = DEVICE.get();
    config.tuning.lora.init_lora_weights = InitLora::Kaiming;
    config.train.decay_norms_and_bias = true;
    config
}

pub fn load(family: &str, config: &Config) -> Model {
    let dir = golden(family).join("model");
    let arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    Model::load(&arch, Some(&weights), config).unwrap()
}

/// Puts stored tensors into the trained ones. Each must have its place there, with the same shape.
pub fn put(model: &mut Model, stored: &Tensors) {
    for (name, (shape, values)) in stored {
        let spec = model.params.find(&own(name)).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(&spec.shape, shape, "{name}");
        let range = spec.range();
        model.params.put(&range, values);
    }
}

/// An adapter on a golden model, whose first `recompute` blocks are run again in backward.
pub fn adapted(family: &str, dir: &Path, recompute: usize) -> Model {
    let mut config = adapter_config(&dir.join("adapter_config.json"));
    config.train.gradient_checkpointing = Checkpointing::Blocks { full: recompute, none: 0 };
    let mut model = load(family, &config);
    let stored = tensors(&dir.join("adapter_model.safetensors"));
    assert_eq!(stored.len(), model.params.specs.len(), "PEFT's tensors and ours");
    put(&mut model, &stored);
    model
}

fn largest_difference(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    assert!(got.iter().chain(want).all(|value| value.is_finite()));
    got.iter().zip(want).fold(0.0, |most, (got, want)| most.max((got - want).abs()))
}

pub fn close(what: &str, got: &[f32], want: &[f32], limit: f32) {
    let difference = largest_difference(got, want);
    assert!(difference <= limit, "{what}: largest difference {difference:e}, limit {limit:e}");
}

/// The rows of `forward.safetensors` without their padding.
pub struct Forward {
    pub examples: Vec<Example>,
    pub tensors: Tensors,
}

impl Forward {
    pub fn read(family: &str) -> Self {
        let tensors = tensors(&golden(family).join("forward.safetensors"));
        let (ids, mask, labels) = (&tensors["input_ids"], &tensors["attention_mask"].1, &tensors["labels"].1);
        let width = ids.0[1];
        let examples = (0..ids.0[0]).map(|row| {
            let row = row * width..(row + 1) * width;
            let length = mask[row.clone()].iter().filter(|&&on| on > 0.0).count();
            Example {
                input_ids: ids.1[row.clone()][..length].iter().map(|&id| id as u32).collect(),
                labels: labels[row][..length].iter().map(|&label| label as i32).collect(),
            }
        });
        Self { examples: examples.collect(), tensors }
    }

    pub fn batch(&self) -> Batch {
        Batch::from_examples(&self.examples)
    }

    /// Holds a model's logits, token losses and mean loss against the stored ones, `sel` saying at which positions.
    pub fn check(&self, model: &Model, stored: &Tensors, suffix: &str) {
        let batch = self.batch();
        let positions = stored["sel_row"].1.iter().zip(&stored["sel_pos"].1);
        let rows: Vec<usize> = positions.map(|(&row, &at)| batch.cu_seqlens[row as usize] + at as usize).collect();
        let mut rising = rows.clone();
        rising.sort_unstable();
        rising.dedup();
        let logits = model.logits(&batch, &rising).unwrap();
        let width = model.arch.vocab_size;
        let ordered: Vec<f32> = rows
            .iter()
            .flat_map(|row| logits[rising.binary_search(row).unwrap() * width..][..width].to_vec())
            .collect();
        close("logits", &ordered, &stored[&format!("logits{suffix}")].1, LOGITS);

        let (shape, nll) = &stored[&format!("nll{suffix}")];
        let mut expected = Vec::new();
        for (row, ends) in batch.cu_seqlens.windows(2).enumerate() {
            for at in ends[0]..ends[1] {
                if batch.targets[at] != IGNORE {
                    expected.push(nll[row * shape[1] + at - ends[0]]);
                }
            }
        }
        let losses = model.token_losses(&batch).unwrap();
        close("token losses", &losses, &expected, NLL);
        if model.arch.experts.is_some_and(|experts| experts.balance.is_some()) {
            return; // the stored mean has the loss for uneven use of experts in it, which evaluation leaves out
        }
        let mean = losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / losses.len() as f64;
        assert!((mean - f64::from(stored[&format!("loss{suffix}")].1[0])).abs() <= 1e-5, "mean loss {mean}");
    }
}

/// Compares the gradients of the mean loss over `batch` with stored ones.
pub fn check_gradients(model: &mut Model, batch: &Batch, stored: &Tensors) {
    model.params.zero_grads();
    model.forward_backward(batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
    for (name, (shape, expected)) in stored {
        let spec = model.params.find(&own(name)).unwrap_or_else(|| panic!("{name}"));
        assert_eq!(&spec.shape, shape, "{name}");
        let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        close(
            &format!("gradient of {name}"),
            &model.params.grads().slice(spec.range()).read(),
            expected,
            GRADIENT * largest,
        );
    }
}

/// The 20 steps of a trace, each held against the stored loss, norm and learning rate.
pub fn check_trace(model: &mut Model, trace: &Value) {
    let data = json(&golden("data.json"));
    let integers =
        |value: &Value| -> Vec<i64> { value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect() };
    let examples: Vec<Example> = data["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| Example {
            input_ids: integers(&row["input_ids"]).into_iter().map(|id| id as u32).collect(),
            labels: integers(&row["labels"]).into_iter().map(|label| label as i32).collect(),
        })
        .collect();
    let betas = Betas { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };
    let mut optimizer = Optimizer::new(Box::new(AdamW(betas)), slots(&model.params.specs), model.params.values());
    let schedule = Schedule::new(LrScheduler::Cosine, 1e-3, 3, 20).unwrap();
    let steps = trace["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 20);
    let limit = if model.arch.altup.is_some() { TRACE_NORM_OF_CUTS } else { TRACE_NORM };
    for (index, expected) in steps.iter().enumerate() {
        let rows = &examples[index * 8..][..8];
        let micro_batches = [Batch::from_examples(&rows[..4]), Batch::from_examples(&rows[4..])];
        let rate = schedule.lr(index as u64);
        let stats = step(model, &mut optimizer, &Single, &micro_batches, rate, 1.0).unwrap();
        let number = |key: &str| expected[key].as_f64().unwrap();
        assert!((rate - number("lr")).abs() < 1e-12, "step {index}: rate {rate}");
        assert_eq!(stats.label_tokens as f64, number("label_tokens"), "step {index}");
        assert!(
            (stats.loss - number("loss")).abs() <= TRACE_LOSS,
            "step {index}: loss {} != {}",
            stats.loss,
            number("loss")
        );
        let norm = (stats.grad_norm / number("grad_norm") - 1.0).abs();
        assert!(norm <= limit, "step {index}: norm {} != {}", stats.grad_norm, number("grad_norm"));
    }
}

pub fn check_final(model: &Model, stored: &Tensors, limit: f32) {
    for (name, (_, expected)) in stored {
        let spec = model.params.find(&own(name)).unwrap();
        close(name, &model.params.values().slice(spec.range()).read(), expected, limit);
    }
}

/// Logits, losses, gradients and greedy answers; returns the model with its adapter.
pub fn check_passes(family: &str) -> Model {
    let dir = golden(family);
    let forward = Forward::read(family);
    // The base alone: an adapter whose B is zero.
    let base = load(family, &recipe());
    forward.check(&base, &forward.tensors, "_base");
    let mut model = adapted(family, &dir.join("adapter_init"), 0);
    forward.check(&model, &forward.tensors, "_lora");
    let gradients = tensors(&dir.join("lora_grads.safetensors"));
    assert_eq!(gradients.len(), model.params.specs.len());
    check_gradients(&mut model, &forward.batch(), &gradients);

    let answered = json(&dir.join("generate.json"));
    let ids = |value: &Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let prompts = answered["prompts"].as_array().unwrap();
    let asked: Vec<Vec<u32>> = prompts.iter().map(|prompt| ids(&prompt["prompt"])).collect();
    for (which, model) in [("base", &base), ("lora", &model)] {
        let settings = Settings::greedy(24, usize::MAX, Vec::new());
        let answers = generate(model, &asked, &settings, &mut Unwatched).unwrap().unwrap();
        for (answer, prompt) in answers.iter().zip(prompts) {
            assert_eq!(answer.tokens, ids(&prompt[which]), "{which}");
        }
    }
    model
}

/// What Transformers calls the experts and the router of Granite 4, and its files.
const GRANITE: [(&str, &str); 3] = [
    ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
];

/// The gradients of all weights, where they are stored.
pub fn check_full_gradients(family: &str) {
    let path = golden(family).join("full_grads.safetensors");
    if path.is_file() {
        let mut config = Config::default();
        config.model.device = DEVICE.get();
        config.tuning.mode = Mode::Full;
        let (mut model, mut stored) = (load(family, &config), tensors(&path));
        if model.params.specs.iter().any(|spec| spec.name.contains(".block_sparse_moe.")) {
            // Transformers has another name for what its files call so.
            stored = stored.into_iter().map(|(name, it)| (name.replace(".mlp.", ".block_sparse_moe."), it)).collect();
        }
        if model.params.specs.iter().any(|spec| spec.name.contains(".block_sparse_moe.router.layer.")) {
            let own = |name: &str| {
                GRANITE.iter().fold(name.to_owned(), |name, (theirs, own)| match name.strip_suffix(theirs) {
                    Some(block) => format!("{block}{own}"),
                    None => name,
                })
            };
            stored = stored.into_iter().map(|(name, it)| (own(&name), it)).collect();
        }
        if let Some(embedding) = stored.remove("model.embeddings.weight").filter(|_| family.starts_with("nemotron3")) {
            stored.insert("model.embed_tokens.weight".into(), embedding);
        }
        let specs = model.params.specs.iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice()));
        // Transformers holds experts stacked, whatever the files have.
        let stacked: Vec<StackedTensor> =
            StackedTensor::of(specs.clone()).into_iter().chain(StackedTensor::in_rows(specs)).collect();
        let parts: usize = stacked.iter().map(|it| it.experts.iter().map(Vec::len).sum::<usize>()).sum();
        if stacked.is_empty() {
            // By the names of Transformers' class, which a file of weights may have too.
            let folder = tempfile::tempdir().unwrap();
            std::fs::copy(&path, folder.path().join("model.safetensors")).unwrap();
            let arch = Arch::from_dir(&golden(family).join("model")).unwrap();
            let files = WeightFiles::open(folder.path(), &arch.parameters()).unwrap();
            let gradient = |spec: TensorSpec| (spec.name.clone(), files.read(&spec.name).unwrap());
            let plain: Tensors = arch.parameters().into_iter().map(gradient).collect();
            check_gradients(&mut model, &Forward::read(family).batch(), &plain);
            return;
        }
        let expected = model.params.specs.len() - parts + stacked.len();
        assert_eq!(stored.len(), expected, "{family}: a gradient for each tensor");
        let (of_experts, plain): (Tensors, Tensors) =
            stored.into_iter().partition(|(name, _)| stacked.iter().any(|it| it.name == *name));
        check_gradients(&mut model, &Forward::read(family).batch(), &plain);
        // Those of experts lie stacked in the golden.
        let gradient = |name: &String| {
            let spec = model.params.find(name).unwrap_or_else(|| panic!("{name}"));
            model.params.grads().slice(spec.range()).read()
        };
        for tensor in &stacked {
            let expert = |parts: &Vec<String>| tensor.joined(&parts.iter().map(gradient).collect::<Vec<_>>());
            let found: Vec<f32> = tensor.experts.iter().flat_map(expert).collect();
            let (shape, expected) = &of_experts[&tensor.name];
            assert_eq!(shape, &tensor.shape, "{}", tensor.name);
            let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            close(&tensor.name, &found, expected, GRADIENT * largest);
        }
    }
}

/// Twenty steps, and the adapter after them.
pub fn check_training(family: &str, model: &mut Model) {
    let dir = golden(family);
    check_trace(model, &json(&dir.join("trace.json")));
    check_final(model, &tensors(&dir.join("adapter_final/adapter_model.safetensors")), ADAPTER);
}

fn check_family(family: &str) {
    let dir = golden(family);
    let mut model = check_passes(family);
    check_full_gradients(family);
    check_training(family, &mut model);
    let trace = json(&dir.join("trace.json"));

    // Activation checkpointing changes nothing, to the bit, whatever blocks it is for.
    let blocks = model.arch.num_hidden_layers;
    for recompute in [1, blocks] {
        let mut again = adapted(family, &dir.join("adapter_init"), recompute);
        check_trace(&mut again, &trace);
        assert_eq!(again.params.values().read(), model.params.values().read());
    }
}

/// Every golden model, by its folder.
pub fn families() -> Vec<String> {
    let folders = std::fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap());
    let models = folders.filter(|folder| folder.path().join("model").is_dir());
    let mut names: Vec<String> = models.map(|folder| folder.file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() > 17);
    names
}

#[test]
fn every_family_equals_peft() {
    let families = families();
    std::thread::scope(|scope| {
        for family in &families {
            let thread = std::thread::Builder::new().name(format!("parity of {family}"));
            thread.spawn_scoped(scope, || check_family(family)).unwrap();
        }
    });
}

#[test]
fn both_styles_of_config_json_describe_the_same_model() {
    for family in &families() {
        let dir = golden(family).join("model");
        let old = dir.join("config_v4.json");
        let old = Arch::from_json(&std::fs::read_to_string(&old).unwrap(), &old).unwrap();
        let new = Arch::from_dir(&dir).unwrap();
        assert_eq!(old, new, "{family}");
    }
}

fn check_variant(variant: &str) {
    check_variant_of("llama", variant);
}

pub fn check_variant_of(family: &str, variant: &str) {
    let dir = golden("variants").join(variant);
    let forward = Forward::read(family);
    let trace = json(&dir.join("trace.json"));
    let mut model = if dir.join("adapter_init").exists() {
        adapted(family, &dir.join("adapter_init"), 0)
    } else {
        let mut model = load(family, &adapter_config(&dir.join("adapter_final/adapter_config.json")));
        put(&mut model, &tensors(&dir.join("lora_init.safetensors")));
        model
    };
    forward.check(&model, &tensors(&dir.join("forward.safetensors")), "");
    let gradients = tensors(&dir.join("grads.safetensors"));
    check_gradients(&mut model, &forward.batch(), &gradients);
    let norms = trace["grad_l2"].as_object().unwrap();
    assert_eq!(norms.len(), model.params.specs.len(), "a gradient norm for each tensor");
    for spec in &model.params.specs {
        let live = spec.name.replace("lm_head.weight", "lm_head.modules_to_save.weight");
        let expected = norms.get(&peft(&live)).unwrap_or_else(|| panic!("{}", spec.name));
        check_norm(&spec.name, &model.params.grads().slice(spec.range()).read(), expected.as_f64().unwrap());
    }
    check_trace(&mut model, &trace);
    let stored = tensors(&dir.join("adapter_final/adapter_model.safetensors"));
    assert_eq!(stored.len(), model.params.specs.len());
    check_final(&model, &stored, if variant == "modules_to_save" { FULL } else { ADAPTER });
}

fn check_norm(what: &str, values: &[f32], expected: f64) {
    let norm = values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    assert!((norm / expected - 1.0).abs() <= 5e-5, "norm of {what}: {norm} != {expected}");
}

#[test]
fn rank_stabilised_lora_equals_peft() {
    check_variant("rslora");
}

#[test]
fn dora_equals_peft() {
    check_variant("dora");
}

/// The goldens of adapters that are not LoRA, all on the qwen2 model.
pub fn other_kinds() -> Vec<String> {
    let dirs = std::fs::read_dir(golden("variants")).unwrap().map(|entry| entry.unwrap().path());
    let settings = |dir: &Path| dir.join("adapter_final/adapter_config.json");
    let others = dirs.filter(|dir| settings(dir).exists() && json(&settings(dir))["peft_type"] != "LORA");
    let mut names: Vec<String> = others.map(|dir| dir.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

#[test]
fn every_other_kind_of_adapter_equals_peft() {
    let variants = other_kinds();
    for kind in KINDS.iter().filter(|kind| kind.mode != Mode::Lora) {
        assert!(variants.iter().any(|name| name.starts_with(kind.mode.as_str())), "no golden of {}", kind.title);
    }
    for variant in &variants {
        check_variant_of("qwen2", variant);
    }
}

#[test]
fn rank_and_alpha_patterns_equal_peft() {
    check_variant("patterns");
}

#[test]
fn modules_to_save_equal_peft() {
    check_variant("modules_to_save");
}

pub fn check_full(variant: &str, decay_all: bool) {
    let dir = golden("variants").join(variant);
    let mut config = recipe();
    config.tuning.mode = Mode::Full;
    config.train.decay_norms_and_bias = decay_all;
    let mut model = load("llama", &config);
    let (trace, stored) = (json(&dir.join("trace.json")), tensors(&dir.join("tensors.safetensors")));
    let part = |prefix: &str| -> Tensors {
        let named =
            stored.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?.to_owned(), tensor.clone())));
        named.collect()
    };
    check_gradients(&mut model, &Forward::read("llama").batch(), &part("grad."));
    for (name, expected) in trace["grad_l2"].as_object().unwrap() {
        let spec = model.params.find(name).unwrap_or_else(|| panic!("{name}"));
        check_norm(name, &model.params.grads().slice(spec.range()).read(), expected.as_f64().unwrap());
    }
    check_trace(&mut model, &trace);
    check_final(&model, &part("final."), FULL);
    for (name, expected) in trace["final_l2"].as_object().unwrap() {
        check_norm(
            name,
            &model.params.values().slice(model.params.find(name).unwrap().range()).read(),
            expected.as_f64().unwrap(),
        );
    }
}

#[test]
fn full_fine_tuning_equals_pytorch() {
    check_full("full", true);
}

#[test]
fn full_fine_tuning_without_decay_of_norms_equals_pytorch() {
    check_full("full_hfdecay", false);
}

#[test]
fn packed_rows_equal_rows_apart() {
    let dir = golden("variants/packed");
    let stored = tensors(&dir.join("packed.safetensors"));
    let sequences = &stored["sequence_ids"].1;
    let (ids, labels) = (&stored["input_ids"].1, &stored["labels"].1);
    let mut examples: Vec<Example> = Vec::new();
    for at in 0..ids.len() {
        if at == 0 || sequences[at] != sequences[at - 1] {
            examples.push(Example::default());
        }
        let example = examples.last_mut().unwrap();
        example.input_ids.push(ids[at] as u32);
        example.labels.push(labels[at] as i32);
    }
    assert_eq!(examples.len(), 3);
    let batch = Batch::from_examples(&examples);
    let mut model = adapted("llama", &golden("llama/adapter_init"), 0);
    let rows: Vec<usize> = stored["sel_pos"].1.iter().map(|&at| at as usize).collect();
    close("logits", &model.logits(&batch, &rows).unwrap(), &stored["logits"].1, LOGITS);
    let mean = model.loss(&batch).unwrap() / batch.label_tokens() as f64;
    assert!((mean - f64::from(stored["loss"].1[0])).abs() <= 1e-5, "mean loss {mean}");
    check_gradients(&mut model, &batch, &tensors(&dir.join("lora_grads.safetensors")));
}

/// The base in bfloat16 where the checkpoint has it so is the same model, to the bit. In AMX's tiles, such a matrix has sums in another
/// order.
#[test]
fn a_bf16_checkpoint_kept_as_it_is_loses_nothing() {
    let run = |dtype| {
        let mut config = recipe();
        config.model.dtype = dtype;
        let mut model = load("gemma3", &config);
        let batch = Forward::read("gemma3").batch();
        model.params.zero_grads();
        let loss = model.forward_backward(&batch, 1.0, 1.0, 0).unwrap();
        (loss, model.params.grads().read())
    };
    in_vectors(|| assert!(run(Dtype::Auto) == run(Dtype::Float32)));
    let (kept, widened) = (run(Dtype::Auto), run(Dtype::Float32));
    assert!(kept == run(Dtype::Bfloat16));
    let moved = |a: f64, b: f64| ((a - b) / b).abs();
    assert!(moved(kept.0, widened.0) <= 1e-6, "loss {} and {}", kept.0, widened.0);
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let pairs = || kept.1.iter().zip(&widened.1).map(|(&a, &b)| (f64::from(a), f64::from(b)));
    let share = squares(&mut pairs().map(|(a, b)| a - b)) / squares(&mut pairs().map(|(_, b)| b));
    assert!(share.sqrt() <= 1e-5, "gradients: {}", share.sqrt());
}

/// `train.bf16` rounds what waits for the backward pass: gradients differ by its rounding. The loss is the same, unless the
/// processor multiplies in bfloat16.
#[test]
fn activations_in_bf16_move_gradients_by_their_rounding_only() {
    for family in ["llama", "gemma2", "phi3"] {
        let run = |bf16, recompute: bool| {
            let mut config = adapter_config(&golden(family).join("adapter_init/adapter_config.json"));
            config.train.bf16 = bf16;
            config.train.gradient_checkpointing = recompute.into();
            let mut model = load(family, &config);
            put(&mut model, &tensors(&golden(family).join("adapter_init/adapter_model.safetensors")));
            let batch = Forward::read(family).batch();
            model.params.zero_grads();
            let loss = model.forward_backward(&batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
            (loss, model.params.grads().read())
        };
        let (loss, exact) = run(false, false);
        for recompute in [false, true] {
            let (other, rounded) = run(true, recompute);
            // Where products are rounded too, forward is.
            let rounds = pair_level().is_some();
            assert!(rounds || loss == other, "{family}: forward is not touched");
            assert!((other / loss - 1.0).abs() < 2e-3, "{family}: {other} {loss}");
            // The last block is not rounded; of one that is run again only the input is, which here bfloat16 can hold.
            assert!(recompute || exact != rounded, "{family}");
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
            let error = norm(&mut exact.iter().zip(&rounded).map(|(a, b)| f64::from(a - b)));
            let size = norm(&mut exact.iter().map(|&a| f64::from(a)));
            assert!(error < if rounds { 0.03 } else { 0.01 } * size, "{family}: {error} of {size}");
        }
    }
}

/// The plan of a configuration's optimizer for what a model trains.
pub fn optimizer_plan(config: &Config, model: &Model) -> OptimizerPlan {
    let tensors = optimizer::tensors(&model.params.specs);
    OptimizerPlan::new(&config.train, config.tuning.lora.loraplus_lr_ratio, &tensors).unwrap()
}

/// A configuration's optimizer for a model that one rank trains.
pub fn fresh_optimizer(config: &Config, model: &mut Model) -> Optimizer {
    let (plan, parallel) = (optimizer_plan(config, model), ParallelPlan::new(&config.train, 1));
    optimizer::shared(&plan, &parallel, &mut model.params, World::ALONE).unwrap().0
}
