//! Models with a recurrent state or a short convolution against Transformers (`scripts/golden/lengths.py`): odd sizes, and rows around the
//! ends of chunks and shorter than the convolution, one after the other in a batch without padding.
use crate::parity::{Tensors, adapter_config, close, own, put, recipe, root, tensors};
use tunesmith::config::Config;
use tunesmith::config::arch::Arch;
use tunesmith::data::batch::{Batch, Example};
use tunesmith::model::Model;
use tunesmith::model::weights::WeightFiles;

const LIMIT: f32 = 5e-5;

fn load(name: &str, config: &Config) -> Model {
    let dir = root().join("tests/golden/lengths").join(name).join("model");
    let arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    Model::load(&arch, Some(&weights), config).unwrap()
}

/// The batch of all rows, and where each row's last token is.
fn rows(stored: &Tensors) -> (Batch, Vec<usize>) {
    let mut ids = stored["ids"].1.iter().map(|&id| id as u32);
    let row = |&length: &f32| {
        let input_ids: Vec<u32> = ids.by_ref().take(length as usize).collect();
        Example { labels: input_ids.iter().map(|&id| id as i32).collect(), input_ids }
    };
    let batch = Batch::from_examples(&stored["lengths"].1.iter().map(row).collect::<Vec<_>>());
    let last = batch.cu_seqlens[1..].iter().map(|end| end - 1).collect();
    (batch, last)
}

#[test]
fn mixers_of_odd_sizes_equal_transformers_at_the_ends_of_chunks_and_in_short_rows() {
    for name in ["qwen3_5", "olmo_hybrid", "lfm2", "granitemoehybrid", "nemotron_h"] {
        let dir = root().join("tests/golden/lengths").join(name);
        let stored = tensors(&dir.join("rows.safetensors"));
        let (batch, last) = rows(&stored);
        assert_eq!((last[0], batch.tokens.len()), (0, 332), "the first row has one token");
        let [of_values, of_gradients] = stored["drift"].1[..] else { panic!("{name}: two distances") };
        // Four times the distance of Transformers' own numbers from those in double precision, where that is more.
        let limit = LIMIT.max(4.0 * of_values);
        let check = |model: &Model, side: &str| {
            let wanted = |what: &str| &stored[&format!("{what}_{side}")].1;
            close(&format!("{name}: losses, {side}"), &model.token_losses(&batch).unwrap(), wanted("nll"), limit);
            close(&format!("{name}: logits, {side}"), &model.logits(&batch, &last).unwrap(), wanted("last"), limit);
        };
        check(&load(name, &recipe()), "base");
        let mut model = load(name, &adapter_config(&dir.join("adapter/adapter_config.json")));
        put(&mut model, &tensors(&dir.join("adapter/adapter_model.safetensors")));
        check(&model, "lora");
        model.params.zero_grads();
        model.forward_backward(&batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
        let gradients = tensors(&dir.join("lora_grads.safetensors"));
        assert_eq!(gradients.len(), model.params.specs.len(), "{name}");
        for (tensor, (_, wanted)) in &gradients {
            let range = model.params.find(&own(tensor)).unwrap_or_else(|| panic!("{name}: {tensor}")).range();
            let largest = wanted.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let limit = LIMIT.max(4.0 * of_gradients) * largest;
            let found = model.params.grads().slice(range).read();
            close(&format!("{name}: gradient of {tensor}"), &found, wanted, limit);
        }
    }
}
