//! Training in float16: the loss scale changes as in DeepSpeed, steps that overflow are skipped, and losses stay close to those
//! in float32.
use serde_json::Value;
use std::path::Path;
use tunesmith::comm::single::Single;
use tunesmith::config::Config;
use tunesmith::data::batch::Batch;
use tunesmith::model::Model;
use tunesmith::optim::loss_scale::{LossScaleSettings, LossScaler};
use tunesmith::train::step::{StepStats, step};

use super::parity::{Forward, adapter_config, fresh_optimizer, golden, load, put, tensors};

fn adapted(family: &str, change: impl Fn(&mut Config)) -> (Model, Config) {
    let dir = golden(family).join("adapter_init");
    let mut config = adapter_config(&dir.join("adapter_config.json"));
    config.train.adam_epsilon = 1e-8;
    change(&mut config);
    let mut model = load(family, &config);
    put(&mut model, &tensors(&dir.join("adapter_model.safetensors")));
    (model, config)
}

fn gradient(family: &str, change: impl Fn(&mut Config), loss_scale: f32) -> (f64, Vec<f64>) {
    let (mut model, _) = adapted(family, change);
    let batch = Forward::read(family).batch();
    model.params.zero_grads();
    model.loss_scale = loss_scale;
    let loss = model.forward_backward(&batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
    let grads = model.params.grads().read().into_iter().map(|value| f64::from(value) / f64::from(loss_scale));
    (loss, grads.collect())
}

fn distance(one: &[f64], other: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    norm(&mut one.iter().zip(other).map(|(a, b)| a - b)) / norm(&mut other.iter().copied())
}

#[test]
fn a_power_of_two_changes_no_bit_of_a_float32_gradient() {
    // Mixtral has a loss for uneven use of experts beside the tokens' own.
    for family in ["llama", "mixtral"] {
        let plain = gradient(family, |_| {}, 1.0);
        assert!(plain == gradient(family, |_| {}, 1024.0), "{family}");
    }
}

#[test]
fn float16_keeps_gradients_where_the_loss_scale_keeps_them_above_its_smallest_numbers() {
    let (loss, exact) = gradient("llama", |_| {}, 1.0);
    let half = |config: &mut Config| config.train.fp16 = true;
    let (same, scaled) = gradient("llama", half, 65536.0);
    assert_eq!(loss, same, "the forward pass is not touched");
    let (_, bf16) = gradient("llama", |config| config.train.bf16 = true, 1.0);
    let (_, vanished) = gradient("llama", half, 1e-5);
    let distances = [&scaled, &bf16, &vanished].map(|grads| distance(grads, &exact));
    assert!(distances[0] > 0.0 && distances[0] < 1e-3, "{distances:?}");
    assert!(distances[0] < distances[1], "three more bits than bfloat16: {distances:?}");
    assert!(distances[2] > 0.05, "unscaled they fall below what float16 can hold: {distances:?}");
}

fn steps(change: impl Fn(&mut Config), count: usize) -> (Vec<StepStats>, Model, LossScaler) {
    let (mut model, config) = adapted("llama", change);
    let mut optimizer = fresh_optimizer(&config, &mut model);
    let batch = Forward::read("llama").batch();
    let batches = std::slice::from_ref::<Batch>(&batch);
    let stats =
        (0..count).map(|_| step(&mut model, &mut optimizer, &Single, batches, 1e-3, 1.0).unwrap()).collect::<Vec<_>>();
    let scaler = optimizer.scaler.clone().unwrap_or_else(|| LossScaler::new(SETTINGS));
    (stats, model, scaler)
}

const SETTINGS: LossScaleSettings =
    LossScaleSettings { initial: 65536.0, window: 1000, hysteresis: 2, least: 1.0, dynamic: true };

#[test]
fn a_run_in_float16_stays_beside_that_in_float32() {
    let (plain, ..) = steps(|_| {}, 12);
    let (half, _, scaler) = steps(|config| config.train.fp16 = true, 12);
    assert_eq!((scaler.overflows(), scaler.scale()), (0, 65536.0));
    for (half, plain) in half.iter().zip(&plain) {
        assert!((half.loss - plain.loss).abs() < 2e-3, "{half:?} {plain:?}");
        assert!((half.grad_norm / plain.grad_norm - 1.0).abs() < 5e-3, "{half:?} {plain:?}");
    }
}

#[test]
fn steps_that_overflow_are_skipped_until_the_scale_fits() {
    overflow();
}

#[test]
fn steps_that_overflow_are_skipped_on_a_gpu_which_updates_before_the_host_knows() {
    crate::parity::on_gpu(overflow);
}

fn overflow() {
    let high = |config: &mut Config| {
        config.train.fp16 = true;
        config.train.initial_scale_power = 36;
        config.train.loss_scale_window = 3;
    };
    let (stats, model, scaler) = steps(high, 40);
    let skipped = stats.iter().take_while(|stats| stats.skipped).count();
    assert!(skipped > 3 && stats.iter().take(skipped).all(|stats| stats.overflow), "{stats:?}");
    assert_eq!(scaler.overflows() as usize, stats.iter().filter(|stats| stats.skipped).count());
    // It tries a higher scale again and again.
    assert!(stats[skipped..].iter().any(|stats| stats.skipped), "{stats:?}");
    assert!(model.params.values().read().iter().all(|value| value.is_finite()));
    let first = stats[skipped].loss;
    assert_eq!(stats[0].loss, first, "nothing was updated");
    assert!(stats.iter().rfind(|stats| !stats.skipped).unwrap().loss < first);
    // A scale that is given stays, and an overflow is then a failure.
    let fixed = |config: &mut Config| {
        config.train.fp16 = true;
        config.train.loss_scale = 2f64.powi(36);
    };
    let (stats, _, scaler) = steps(fixed, 2);
    assert!(stats.iter().all(|stats| stats.skipped && !stats.overflow) && scaler.scale() == 2f64.powi(36));
}

#[test]
fn the_scale_is_part_of_the_optimizers_state() {
    let change = |config: &mut Config| {
        config.train.fp16 = true;
        config.train.initial_scale_power = 30;
    };
    let (mut model, config) = adapted("llama", change);
    let mut optimizer = fresh_optimizer(&config, &mut model);
    let batch = Forward::read("llama").batch();
    for _ in 0..4 {
        step(&mut model, &mut optimizer, &Single, std::slice::from_ref(&batch), 1e-3, 1.0).unwrap();
    }
    let mut again = fresh_optimizer(&config, &mut model);
    assert_ne!(again.scaler, optimizer.scaler);
    assert!(again.set_scalars(&optimizer.scalars()));
    assert_eq!(again.scaler, optimizer.scaler);
    let mut plain = fresh_optimizer(&Config::default(), &mut model);
    assert!(!plain.set_scalars(&optimizer.scalars()), "a run without a loss scale does not go on from one with it");
}

#[test]
fn the_scale_moves_as_deepspeeds() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/optim/loss_scale.json");
    let runs: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for run in runs.as_array().unwrap() {
        let number = |key: &str| run[key].as_f64().unwrap();
        let mut scaler = LossScaler::new(LossScaleSettings {
            initial: 2f64.powf(number("power")),
            window: number("window") as u64,
            hysteresis: number("hysteresis") as u64,
            least: number("least"),
            dynamic: true,
        });
        let overflows = run["overflows"].as_array().unwrap();
        for (at, (overflow, scale)) in overflows.iter().zip(run["scales"].as_array().unwrap()).enumerate() {
            scaler.update(overflow.as_bool().unwrap());
            assert_eq!(scaler.scale(), scale.as_f64().unwrap(), "step {at} of {run}");
        }
        assert_eq!(scaler.overflows() as usize, overflows.iter().filter(|overflow| *overflow == true).count());
    }
    assert_eq!(runs.as_array().unwrap().len(), 5);
}
