//! Optimizers and schedules against the libraries they come from: fifty steps on tensors and gradients that both sides draw
//! alike. `scripts/golden/optim.py` made the traces.
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tunesmith::config::{ConfigValue as _, LrScheduler, Node, Optim, TrainConfig};
use tunesmith::optim::adamw_8bit::CodeMap;
use tunesmith::optim::{Ema, Optimizer, Schedule, Slot, State, registry};

/// The largest difference by the largest value of a tensor.
const RELATIVE: f32 = 1e-6;
const STEPS: u64 = 50;
const KEPT: [u64; 3] = [1, 10, 50];
const SHAPES: [(&str, &[usize]); 4] =
    [("square", &[16, 16]), ("wide", &[7, 33]), ("high", &[37, 5]), ("vector", &[29])];
const LARGE: [(&str, &[usize]); 2] = [("large", &[67, 65]), ("small", &[9, 11])];

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/optim").join(name)
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
    fn new(train: &TrainConfig, shapes: &[(&str, &[usize])], peak: f64) -> Self {
        let mut values = Vec::new();
        let slots: Vec<Slot> = shapes
            .iter()
            .zip(1..)
            .map(|((name, shape), stream)| {
                values.extend(draw(stream, 0, shape.iter().product()));
                Slot { name: (*name).to_owned(), shape: shape.to_vec(), decay: shape.len() == 2, lr_scale: 1.0 }
            })
            .collect();
        let optimizer = Optimizer::new(registry::rule(train).unwrap(), slots.clone(), &values);
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

fn train(optim: Optim, arguments: &str) -> TrainConfig {
    let node = if arguments.is_empty() { Node::Null } else { Node::Str(arguments.to_owned()) };
    TrainConfig {
        optim,
        optim_args: tunesmith::config::Arguments::from_node(&node).unwrap(),
        weight_decay: 0.1,
        adam_beta2: 0.99,
        ..TrainConfig::default()
    }
}

fn equals(name: &str, optim: Optim, arguments: &str) {
    let peak = if optim == Optim::Lion { 1e-3 } else { 1e-2 };
    let stored = stored(name);
    let mut run = Run::new(&train(optim, arguments), &SHAPES, peak);
    for step in 1..=STEPS {
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

#[test]
fn adamw_equals_pytorch() {
    equals("adamw", Optim::AdamW, "");
}

#[test]
fn sgd_equals_pytorch() {
    equals("sgd", Optim::Sgd, "");
    equals("sgd_momentum", Optim::Sgd, "momentum=0.9,dampening=0.1");
    equals("sgd_nesterov", Optim::Sgd, "momentum=0.9,nesterov=true");
}

#[test]
fn adafactor_equals_transformers() {
    equals("adafactor", Optim::Adafactor, "");
    let arguments = "scale_parameter=true,beta1=0.9,clip_threshold=0.5,decay_rate=-0.7";
    equals("adafactor_scaled", Optim::Adafactor, arguments);
}

#[test]
fn lion_equals_lion_pytorch() {
    equals("lion", Optim::Lion, "");
}

#[test]
fn muon_equals_pytorch_in_full_precision() {
    equals("muon", Optim::Muon, "");
    equals("muon_rms", Optim::Muon, "adjust_lr_fn=match_rms_adamw,nesterov=false,momentum=0.9,ns_steps=4");
    equals("muon_spectral", Optim::Muon, "adjust_lr_fn=spectral_unclamped");
}

#[test]
fn schedule_free_adamw_equals_schedulefree() {
    equals("schedule_free", Optim::ScheduleFreeAdamW, "");
    equals("schedule_free_power", Optim::ScheduleFreeAdamW, "r=0.5,weight_lr_power=1");
}

#[test]
fn adamw_8bit_equals_bitsandbytes_to_the_byte() {
    let stored = stored("adamw_8bit");
    for (map, signed) in [("qmap1", true), ("qmap2", false)] {
        assert_eq!(CodeMap::new(signed).values, stored[map], "{map}");
    }
    let mut run = Run::new(&train(Optim::AdamW8bit, ""), &LARGE, 1e-2);
    for step in 1..=STEPS {
        run.step(step);
        if !KEPT.contains(&step) {
            continue;
        }
        run.check("adamw_8bit", &run.values, &stored, step, "");
        for (name, shape, state) in run.optimizer.tensors() {
            if name.starts_with("small") {
                assert!(matches!(state, State::F32(_)), "{name}: tensors of under 4096 values keep f32");
                continue;
            }
            let want = &stored[&format!("{name}.{step}")];
            assert_eq!(shape.iter().product::<usize>(), want.len(), "{name}");
            match state {
                State::F32(scales) => close(&name, scales, want),
                State::U8(codes) => {
                    let codes: Vec<f32> = codes.iter().map(|&code| f32::from(code)).collect();
                    assert!(codes == *want, "{name} after step {step}");
                }
            }
        }
    }
}

#[test]
fn the_moving_average_equals_pytorch() {
    let stored = stored("ema");
    let mut run = Run::new(&train(Optim::AdamW, ""), &SHAPES, 1e-2);
    let mut ema = Ema::new(0.95, &run.values);
    for step in 1..=STEPS {
        run.step(step);
        ema.update(&run.values, step);
        if KEPT.contains(&step) {
            run.check("ema", &ema.values, &stored, step, "");
        }
    }
}

#[test]
fn a_tensor_of_its_own_rate_moves_as_in_a_group_of_its_own() {
    // At 5 times the rate, a fifth of the peak is the same as the whole.
    for optim in [Optim::AdamW, Optim::Adafactor, Optim::Lion, Optim::Muon, Optim::ScheduleFreeAdamW, Optim::Sgd] {
        let mut plain = Run::new(&train(optim, ""), &SHAPES, 1e-3);
        let mut scaled = Run::new(&train(optim, ""), &SHAPES, 2e-4);
        scaled.slots.iter_mut().for_each(|slot| slot.lr_scale = 5.0);
        let rule = registry::rule(&train(optim, "")).unwrap();
        scaled.optimizer = Optimizer::new(rule, scaled.slots.clone(), &scaled.values);
        for step in 1..=10 {
            plain.step(step);
            scaled.step(step);
        }
        close(optim.as_str(), &scaled.values, &plain.values);
    }
}

#[test]
fn schedules_equal_transformers() {
    let all: Value = serde_json::from_str(&std::fs::read_to_string(golden("schedules.json")).unwrap()).unwrap();
    let peak = all["peak"].as_f64().unwrap();
    let cases = all["schedules"].as_array().unwrap();
    for case in cases {
        let entry = |(name, value): (&String, &Value)| {
            let node = value.as_f64().map_or_else(|| Node::Str(value.as_str().unwrap().to_owned()), Node::Float);
            (name.clone(), node)
        };
        let arguments = case["arguments"].as_object().unwrap().iter().map(entry).collect();
        let train = TrainConfig {
            learning_rate: peak,
            lr_scheduler_type: LrScheduler::from_node(&Node::Str(case["form"].as_str().unwrap().to_owned())).unwrap(),
            lr_scheduler_kwargs: tunesmith::config::Arguments::from_node(&Node::Map(arguments)).unwrap(),
            ..TrainConfig::default()
        };
        let number = |key: &str| case[key].as_u64().unwrap();
        let schedule = Schedule::of(&train, number("warmup"), number("total")).unwrap();
        for (step, want) in case["rates"].as_array().unwrap().iter().enumerate() {
            let (got, want) = (schedule.lr(step as u64), want.as_f64().unwrap());
            assert!((got - want).abs() <= 1e-12 * peak, "{case}: step {step}: {got} != {want}");
        }
    }
    let forms: std::collections::BTreeSet<&str> = cases.iter().map(|case| case["form"].as_str().unwrap()).collect();
    assert_eq!(forms.len(), LrScheduler::WORDS.len(), "a case for each form");
}

#[test]
fn arguments_that_an_optimizer_lacks_are_refused() {
    let refused = |optim, arguments| registry::rule(&train(optim, arguments)).unwrap_err().to_string();
    assert!(refused(Optim::Sgd, "momentun=0.9").contains("did you mean momentum"));
    assert!(refused(Optim::Sgd, "nesterov=true").contains("needs a momentum"));
    assert!(refused(Optim::AdamW, "momentum=0.9").contains("optim = adamw_torch has no argument \"momentum\""));
    assert!(refused(Optim::Muon, "adjust_lr_fn=fast").contains("match_rms_adamw"));
    assert!(refused(Optim::Adafactor, "relative_step=true").contains("relative_step"));
    let train = TrainConfig { optim: Optim::ScheduleFreeAdamW, adam_beta1: 0.0, ..TrainConfig::default() };
    assert!(registry::rule(&train).unwrap_err().to_string().contains("adam_beta1"));
}

#[test]
fn objectives_equal_the_label_smoother_of_transformers_and_a_z_loss() {
    use tunesmith::ops::loss::{Terms, gradient};
    use tunesmith::ops::panel::{Act, Pool};
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
        let mut act = Act::from_rows(&Pool::new(), &of_rows(&logits), VOCABULARY);
        let scales = vec![1.0 / rows.len() as f32; rows.len()];
        gradient(&mut act, &targets, &scales, Terms { smoothing, z });
        let want: Vec<f32> = words(name).into_iter().map(f32::from_le_bytes).collect();
        close(name, &act.to_rows(), &of_rows(&want));
    }
}

#[test]
fn learning_rates_of_lora_plus_equal_peft() {
    let rows: Value = serde_json::from_str(&std::fs::read_to_string(golden("loraplus.json")).unwrap()).unwrap();
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
