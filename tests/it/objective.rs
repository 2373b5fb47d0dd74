//! Training objectives beyond plain cross-entropy: neither the number of micro-batches nor the split into passes changes them.
use std::path::Path;
use tunesmith::comm::single::Single;
use tunesmith::config::arch::Arch;
use tunesmith::config::{Config, InitLora, Mode};
use tunesmith::data::batch::{Batch, IGNORE};
use tunesmith::model::Model;
use tunesmith::model::weights::WeightFiles;
use tunesmith::train::step::{StepStats, step};

use super::parity::fresh_optimizer;

/// Everything at once.
fn config(mode: Mode) -> Config {
    let mut config = Config::default();
    config.tuning.mode = mode;
    config.tuning.lora.r = 4;
    config.tuning.lora.lora_dropout = 0.1;
    config.tuning.lora.init_lora_weights = InitLora::Random;
    config.train.label_smoothing_factor = 0.1;
    config.train.z_loss = 1e-3;
    config.train.neftune_noise_alpha = Some(5.0);
    config
}

fn load(config: &Config) -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a/llama/model");
    let arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    Model::load(&arch, Some(&weights), config).unwrap()
}

/// Eight rows of different lengths and weights, cut into batches of so many rows each.
fn batches(cuts: &[usize], weight: impl Fn(usize) -> f32) -> Vec<Batch> {
    let (mut row, mut tokens, mut out) = (0, 0, Vec::new());
    for &rows in cuts {
        let mut batch = Batch { cu_seqlens: vec![0], first_row: tokens, ..Batch::default() };
        for _ in 0..rows {
            let length = 6 + row * 5 % 13;
            let ids: Vec<u32> = (0..length).map(|at| ((row * 131 + at * 37) % 500 + 3) as u32).collect();
            let labels: Vec<i32> =
                ids.iter().enumerate().map(|(at, &id)| if at < 3 { IGNORE } else { id as i32 }).collect();
            batch.push(&ids, &labels);
            batch.weigh_last(weight(row));
            row += 1;
        }
        tokens += batch.tokens.len() as u64;
        out.push(batch);
    }
    assert_eq!(row, 8);
    out
}

fn weight(row: usize) -> f32 {
    [1.0, 0.5, 2.0, 0.0, 1.0, 3.0, 0.25, 1.0][row]
}

/// One step on the eight rows, and the gradients.
fn train(config: &Config, batches: &[Batch]) -> (StepStats, Vec<f32>) {
    let mut model = load(config);
    let mut optimizer = fresh_optimizer(config, &mut model);
    let stats = step(&mut model, &mut optimizer, &Single, batches, 1e-3, 0.0).unwrap();
    (stats, model.params.grads().read())
}

fn close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let difference = got.iter().zip(want).fold(0.0f32, |most, (got, want)| most.max((got - want).abs()));
    assert!(difference <= 2e-6 * largest, "{what}: {difference:e} of {largest:e}");
}

#[test]
fn accumulation_and_cuts_change_nothing() {
    for mode in [Mode::Lora, Mode::Full] {
        let config = config(mode);
        let (whole, gradients) = train(&config, &batches(&[8], weight));
        for cuts in [&[4, 4][..], &[1; 8], &[3, 1, 4]] {
            let (parts, others) = train(&config, &batches(cuts, weight));
            assert!((parts.loss / whole.loss - 1.0).abs() < 1e-6, "{mode:?} {cuts:?}: {} {}", parts.loss, whole.loss);
            assert_eq!((parts.label_tokens, parts.tokens), (whole.label_tokens, whole.tokens));
            close(&format!("{mode:?} {cuts:?}"), &others, &gradients);
        }
    }
}

#[test]
fn each_part_of_the_objective_counts() {
    let all = config(Mode::Lora);
    let (_, gradients) = train(&all, &batches(&[8], weight));
    let differs = |what: &str, config: &Config, weights: fn(usize) -> f32| {
        let (_, others) = train(config, &batches(&[8], weights));
        assert_ne!(others, gradients, "{what}");
    };
    let mut without = all.clone();
    without.train.label_smoothing_factor = 0.0;
    differs("label smoothing", &without, weight);
    let mut without = all.clone();
    without.train.z_loss = 0.0;
    differs("z-loss", &without, weight);
    let mut without = all.clone();
    without.train.neftune_noise_alpha = None;
    differs("noise", &without, weight);
    differs("weights", &all, |_| 1.0);
}

#[test]
fn weights_of_one_are_none_and_a_weight_of_zero_leaves_a_row_out() {
    for mode in [Mode::Lora, Mode::Full] {
        let mut config = Config::default();
        config.tuning.mode = mode;
        config.tuning.lora.init_lora_weights = InitLora::Random;
        let plain = batches(&[8], |_| 1.0);
        assert!(plain[0].weights.is_empty(), "the plain case stays plain");
        let mut ones = plain.clone();
        ones[0].weights = vec![1.0; ones[0].tokens.len()];
        let ((plain_stats, plain), (ones_stats, ones)) = (train(&config, &plain), train(&config, &ones));
        close("ones", &ones, &plain);
        assert!((ones_stats.loss / plain_stats.loss - 1.0).abs() < 1e-6);

        let (zero_stats, zero) = train(&config, &batches(&[5, 3], |row| f32::from(u8::from(row >= 5))));
        let last_three = batches(&[5, 3], |_| 1.0).split_off(1);
        let (left_stats, left) = train(&config, &last_three);
        close("zeros", &zero, &left);
        assert!((zero_stats.loss / left_stats.loss - 1.0).abs() < 1e-6, "{} {}", zero_stats.loss, left_stats.loss);
    }
}

#[test]
fn what_is_reported_is_plain_cross_entropy_without_noise_in_validation() {
    let mut config = config(Mode::Lora);
    config.tuning.lora.lora_dropout = 0.0;
    let batch = batches(&[8], weight).remove(0);
    let model = load(&config);
    let losses: f64 = model.loss(&batch).unwrap() / batch.label_weight();
    assert_eq!(model.loss(&batch).unwrap() / batch.label_weight(), losses);
    config.train.neftune_noise_alpha = None;
    let (plain, _) = train(&config, std::slice::from_ref(&batch));
    assert!((plain.loss / losses - 1.0).abs() < 1e-6, "{} {losses}: no smoothing, no z-loss in it", plain.loss);
    config.train.neftune_noise_alpha = Some(50.0);
    let (noisy, _) = train(&config, &[batch]);
    assert!((noisy.loss / losses - 1.0).abs() > 1e-4, "the noise is there in training");
}
