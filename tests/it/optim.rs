//! Optimizers and schedules against the libraries they come from: fifty steps on tensors and gradients that both sides draw
//! alike. `scripts/golden/optim.py` made the traces; each file of them is tested, and each optimizer and schedule must have one.
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tunesmith::config::{Arguments, ConfigValue as _, LrScheduler, Node, Optim, TrainConfig};
use tunesmith::ops::adamw_8bit::CodeMap;
use tunesmith::optim::{Ema, Optimizer, Schedule, Slot, State, rule};

/// The largest difference by the largest value of a tensor.
const RELATIVE: f32 = 1e-6;
const STEPS: u64 = 50;
const KEPT: [u64; 3] = [1, 10, 50];
const SHAPES: [(&str, &[usize]); 4] =
    [("square", &[16, 16]), ("wide", &[7, 33]), ("high", &[37, 5]), ("vector", &[29])];

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/optim").join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Stored tensors: floats, or bytes as floats.
fn stored(name: &str) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(golden(&format!("{name}.safetensors"))).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let floats = |view: &safetensors::tensor::TensorView<'_>| match view.dtype() {
        safetensors::Dtype::F32 => {
            view.data().chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
        }
        safetensors::Dtype::U8 => view.data().iter().map(|&byte| f32::from(byte)).collect(),
        other => panic!("{other:?}"),
    };
    file.tensors().iter().map(|(name, view)| (name.clone(), floats(view))).collect()
}

/// The generator's `draw`.
fn draw(stream: u64, step: u64, count: usize) -> Vec<f32> {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let start = stream.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(step.wrapping_mul(0xD134_2543_DE82_EF95));
    let number = |at: u64| {
        let bits = mix(start.wrapping_add(at.wrapping_mul(0x2545_F491_4F6C_DD1D)));
        let number = (bits >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        number / (1u32 << (bits & 7)) as f32
    };
    (0..count as u64).map(number).collect()
}

fn close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let difference = got.iter().zip(want).fold(0.0f32, |most, (got, want)| most.max((got - want).abs()));
    assert!(difference <= RELATIVE * largest, "{what}: {difference:e} of {largest:e}");
}

/// A run of fifty steps on the generator's tensors.
struct Run {
    optimizer: Optimizer,
    slots: Vec<Slot>,
    values: Vec<f32>,
    peak: f64,
}

impl Run {
    fn new(train: &TrainConfig, peak: f64) -> Self {
        Self::of(train, &SHAPES.map(|(name, shape)| (name.to_owned(), shape.to_vec())), peak)
    }

    fn of(train: &TrainConfig, shapes: &[(String, Vec<usize>)], peak: f64) -> Self {
        let mut values = Vec::new();
        let slots: Vec<Slot> = shapes
            .iter()
            .zip(1..)
            .map(|((name, shape), stream)| {
                values.extend(draw(stream, 0, shape.iter().product()));
                Slot {
                    name: name.clone(),
                    shape: shape.clone(),
                    decay: shape.len() == 2,
                    lr_scale: 1.0,
                    vision: ["high", "vector", "small"].contains(&&**name),
                }
            })
            .collect();
        let optimizer = Optimizer::new(rule(train).unwrap(), slots.clone(), &values);
        Self { optimizer, slots, values, peak }
    }

    fn step(&mut self, step: u64) {
        let of = |(slot, stream): (&Slot, u64)| draw(stream, step, slot.count());
        let grads: Vec<f32> = self.slots.iter().zip(1..).flat_map(of).collect();
        // Half the gradients, doubled: the factor of clipping is part of the formulas.
        let halves: Vec<f32> = grads.iter().map(|grad| grad * 0.5).collect();
        let rate = self.peak * (1.0 - (step - 1) as f64 / 100.0);
        self.optimizer.update(&mut self.values, &halves, 2.0, rate);
    }

    /// Holds `values` against what is stored for this step.
    fn check(&self, what: &str, values: &[f32], stored: &BTreeMap<String, Vec<f32>>, step: u64, suffix: &str) {
        let mut at = 0;
        for slot in &self.slots {
            let want = &stored[&format!("{}.{step}{suffix}", slot.name)];
            close(&format!("{what}: {} after step {step}{suffix}", slot.name), &values[at..at + slot.count()], want);
            at += slot.count();
        }
    }
}

fn train(optim: Optim, optim_args: Arguments) -> TrainConfig {
    TrainConfig { optim, optim_args, weight_decay: 0.1, adam_beta2: 0.99, ..TrainConfig::default() }
}

fn plain(optim: Optim) -> TrainConfig {
    train(optim, Arguments::default())
}

/// The arguments of a trace.
fn arguments(case: &Value) -> Arguments {
    let entry = |(name, value): (&String, &Value)| {
        let node = match value {
            Value::Bool(flag) => Node::Bool(*flag),
            Value::String(word) => Node::Str(word.clone()),
            number => Node::Float(number.as_f64().unwrap()),
        };
        (name.clone(), node)
    };
    Arguments::from_node(&Node::Map(case["arguments"].as_object().unwrap().iter().map(entry).collect())).unwrap()
}

/// A trace of `optimizers.json` before its first step.
fn start(case: &Value) -> Run {
    let optim = Optim::from_node(&Node::Str(case["optim"].as_str().unwrap().to_owned())).unwrap();
    let shapes: Vec<(String, Vec<usize>)> = serde_json::from_value(case["shapes"].clone()).unwrap();
    Run::of(&train(optim, arguments(case)), &shapes, case["peak"].as_f64().unwrap())
}

#[test]
fn every_optimizer_equals_the_library_it_comes_from() {
    let cases = json(&golden("optimizers.json"));
    let cases = cases.as_array().unwrap();
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let (stored, mut run) = (stored(name), start(case));
        // Then some tensors have no gradient.
        let idle: Vec<u64> = case["idle"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
        for step in 1..=STEPS {
            run.optimizer.images = !idle.contains(&step);
            run.step(step);
            if KEPT.contains(&step) {
                run.check(name, &run.values, &stored, step, "");
                if run.optimizer.averages() {
                    let mut averages = run.values.clone();
                    run.optimizer.publish(&mut averages);
                    run.check(name, &averages, &stored, step, ".x");
                    assert!(averages != run.values || step == 1, "the averages are something of their own");
                }
            }
        }
    }
    let traced: BTreeSet<&str> = cases.iter().map(|case| case["optim"].as_str().unwrap()).collect();
    assert_eq!(traced, Optim::WORDS.iter().copied().collect(), "a trace for each optimizer");
}

#[test]
fn adamw_8bit_equals_bitsandbytes_to_the_byte() {
    let stored = stored("adamw_8bit");
    for (map, signed) in [("qmap1", true), ("qmap2", false)] {
        assert_eq!(CodeMap::new(signed).values, stored[map], "{map}");
    }
    let cases = json(&golden("optimizers.json"));
    let mut run = start(cases.as_array().unwrap().iter().find(|case| case["name"] == "adamw_8bit").unwrap());
    for step in 1..=STEPS {
        run.step(step);
        if !KEPT.contains(&step) {
            continue;
        }
        for (name, shape, state) in run.optimizer.tensors() {
            if name.starts_with("small") {
                assert!(matches!(state, State::F32(_)), "{name}: tensors of under 4096 values keep f32");
                continue;
            }
            let want = &stored[&format!("{name}.{step}")];
            assert_eq!(shape.iter().product::<usize>(), want.len(), "{name}");
            match state {
                State::F32(scales) => close(&name, &scales.read(), want),
                State::U8(codes) => {
                    let codes: Vec<f32> = codes.read().iter().map(|&code| f32::from(code)).collect();
                    assert!(codes == *want, "{name} after step {step}");
                }
            }
        }
    }
}

#[test]
fn the_moving_average_equals_pytorch() {
    let stored = stored("ema");
    let mut run = Run::new(&plain(Optim::AdamW), 1e-2);
    let mut ema = Ema::new(0.95, &run.values);
    for step in 1..=STEPS {
        run.step(step);
        ema.update(&run.values, step);
        if KEPT.contains(&step) {
            run.check("ema", &ema.values.read(), &stored, step, "");
        }
    }
}

#[test]
fn a_tensor_of_its_own_rate_moves_as_in_a_group_of_its_own() {
    // At 5 times the rate, a fifth of the peak is the same as the whole.
    for &optim in Optim::ALL {
        let mut whole = Run::new(&plain(optim), 1e-3);
        let mut scaled = Run::new(&plain(optim), 2e-4);
        scaled.slots.iter_mut().for_each(|slot| slot.lr_scale = 5.0);
        let rule = rule(&plain(optim)).unwrap();
        scaled.optimizer = Optimizer::new(rule, scaled.slots.clone(), &scaled.values);
        for step in 1..=10 {
            whole.step(step);
            scaled.step(step);
        }
        close(optim.as_str(), &scaled.values, &whole.values);
    }
}

#[test]
fn every_schedule_equals_the_library_it_comes_from() {
    let mut forms = BTreeSet::new();
    for entry in std::fs::read_dir(golden("")).unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_string_lossy().starts_with("schedules") {
            continue;
        }
        let all = json(&path);
        let peak = all["peak"].as_f64().unwrap();
        for case in all["schedules"].as_array().unwrap() {
            let form = LrScheduler::from_node(&Node::Str(case["form"].as_str().unwrap().to_owned())).unwrap();
            let train = TrainConfig {
                learning_rate: peak,
                lr_scheduler_type: form,
                lr_scheduler_kwargs: arguments(case),
                ..TrainConfig::default()
            };
            let number = |key: &str| case[key].as_u64().unwrap();
            let schedule = Schedule::of(&train, number("warmup"), number("total")).unwrap();
            for (step, want) in case["rates"].as_array().unwrap().iter().enumerate() {
                let (got, want) = (schedule.lr(step as u64), want.as_f64().unwrap());
                assert!((got - want).abs() <= 1e-12 * peak, "{case}: step {step}: {got} != {want}");
            }
            forms.insert(form.as_str());
        }
    }
    assert_eq!(forms, LrScheduler::WORDS.iter().copied().collect(), "a case for each form");
}

#[test]
fn every_optimizer_and_schedule_stands_in_the_document() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/optimization.md");
    let text = std::fs::read_to_string(path).unwrap();
    let rows: String = text.lines().filter(|line| line.starts_with("| `")).collect();
    for word in Optim::WORDS.iter().chain(LrScheduler::WORDS) {
        assert!(rows.contains(&format!("`{word}`")), "{word} has no row in docs/optimization.md");
    }
}

#[test]
fn arguments_that_an_optimizer_lacks_are_refused() {
    let refused = |optim, arguments: &str| {
        let arguments = Arguments::from_node(&Node::Str(arguments.to_owned())).unwrap();
        rule(&train(optim, arguments)).unwrap_err().to_string()
    };
    assert!(refused(Optim::Sgd, "momentun=0.9").contains("did you mean momentum"));
    assert!(refused(Optim::Sgd, "nesterov=true").contains("needs a momentum"));
    assert!(refused(Optim::AdamW, "momentum=0.9").contains("optim = adamw_torch has no argument \"momentum\""));
    assert!(refused(Optim::Muon, "adjust_lr_fn=fast").contains("match_rms_adamw"));
    assert!(refused(Optim::Adafactor, "relative_step=true").contains("relative_step"));
    let train = TrainConfig { optim: Optim::ScheduleFreeAdamW, adam_beta1: 0.0, ..TrainConfig::default() };
    assert!(rule(&train).unwrap_err().to_string().contains("adam_beta1"));
}

#[test]
fn objectives_equal_the_label_smoother_of_transformers_and_a_z_loss() {
    use tunesmith::ops::activation::{Activation, Pool};
    use tunesmith::ops::loss::{Terms, gradient};
    const VOCABULARY: usize = 33;
    let bytes = std::fs::read(golden("objectives.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> {
        let view = file.tensor(name).unwrap();
        view.data().chunks_exact(4).map(|word| word.try_into().unwrap()).collect()
    };
    let labels: Vec<i32> = words("labels").into_iter().map(i32::from_le_bytes).collect();
    let logits: Vec<f32> = draw(7, 0, labels.len() * VOCABULARY).iter().map(|value| value * 6.0).collect();
    // Position t predicts label t + 1.
    let rows: Vec<usize> = (0..labels.len() - 1).filter(|&at| labels[at + 1] >= 0).collect();
    let targets: Vec<u32> = rows.iter().map(|&at| labels[at + 1] as u32).collect();
    let of_rows = |values: &[f32]| -> Vec<f32> {
        rows.iter().flat_map(|&at| values[at * VOCABULARY..][..VOCABULARY].to_vec()).collect()
    };
    for (name, smoothing, z) in [("smoothed", 0.1, 0.0), ("z", 0.0, 1e-2), ("both", 0.25, 1e-3)] {
        let mut act = Activation::from_rows(&Pool::new(), &of_rows(&logits), VOCABULARY);
        let scales = vec![1.0 / rows.len() as f32; rows.len()];
        gradient(&mut act, &targets, &scales, Terms { smoothing, z });
        let want: Vec<f32> = words(name).into_iter().map(f32::from_le_bytes).collect();
        close(name, &act.to_rows(), &of_rows(&want));
    }
}

#[test]
fn learning_rates_of_lora_plus_equal_peft() {
    let rows = json(&golden("loraplus.json"));
    let rows = rows.as_array().unwrap();
    let shape =
        |row: &Value| row["shape"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap() as usize).collect();
    let tensors: Vec<(String, Vec<usize>)> =
        rows.iter().map(|row| (row["name"].as_str().unwrap().to_owned(), shape(row))).collect();
    let train = TrainConfig { learning_rate: 1e-3, ..TrainConfig::default() };
    let scales = tunesmith::optim::rates::scales(&train, Some(16.0), &tensors).unwrap();
    for (row, scale) in rows.iter().zip(scales) {
        assert!((scale * 1e-3 - row["lr"].as_f64().unwrap()).abs() < 1e-12, "{row}: {scale}");
    }
    assert!(rows.len() > 20);
}
