//! Tests that a model for inference holds its matrices rearranged, and its head quantized where that is asked for.
use super::*;
use crate::stack::Stack;
use std::path::Path;
use tunesmith_config::{Init, Quantization};
use tunesmith_ops::quant::{Format, encode};

/// Whether the head, and how many matrices of the blocks, are rearranged.
fn interleaved(mut model: Model) -> (bool, usize) {
    let is = |weight: &Weight| matches!(weight, Weight::Interleaved(_));
    let blocks = model.blocks.iter_mut().flat_map(Block::weights_mut);
    (is(&model.head.weight), blocks.filter(|weight| is(weight)).count())
}

#[test]
fn matrices_of_a_model_for_inference_are_interleaved() {
    let shape = r#"{"model_type": "llama", "vocab_size": 50, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true, "hidden_act": "silu"}"#;
    let arch = Arch::from_json(shape, Path::new("a test")).unwrap();
    let mut config = Config::default();
    config.model.init = Init::Random;
    let model = Model::load_for_inference(&arch, None, &config, &Stack::default()).unwrap();
    assert_eq!(interleaved(model), (true, 2 * 7));
    assert_eq!(interleaved(Model::load(&arch, None, &config).unwrap()), (false, 0));
}

/// A model of a few numbers, with the head that `tie_word_embeddings` says, for inference.
fn small(ties: bool, set: impl Fn(&mut Config)) -> Result<Model> {
    let shape = format!(
        r#"{{"model_type": "llama", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": {ties}, "hidden_act": "silu"}}"#
    );
    let arch = Arch::from_json(&shape, Path::new("a test"))?;
    let mut config = Config::default();
    config.model.init = Init::Random;
    set(&mut config);
    Model::load_for_inference(&arch, None, &config, &Stack::default())
}

fn logits(model: &Model) -> Vec<f32> {
    let mut cache = model.cache();
    model.extend(&mut [(&mut cache, &[3, 1, 4, 1, 5])]).unwrap().row(0)
}

/// The largest difference, as a share of the largest logit.
fn apart(found: &[f32], wanted: &[f32]) -> f32 {
    let largest =
        |values: &mut dyn Iterator<Item = f32>| values.fold(0.0f32, |largest, value| largest.max(value.abs()));
    assert_eq!(found.len(), wanted.len());
    let apart = largest(&mut found.iter().zip(wanted).map(|(found, wanted)| found - wanted));
    apart / largest(&mut wanted.iter().copied())
}

#[test]
fn a_quantized_head_computes_what_its_rounded_numbers_compute() {
    for ties in [true, false] {
        let formats = [
            (Quantization::Int8, Format::Int8),
            (Quantization::Fp8, Format::Fp8),
            (Quantization::Nf4, Format::Nf4),
            (Quantization::Fp4, Format::Fp4),
        ];
        for (quantization, format) in formats {
            let set = |quantizes: bool| {
                move |config: &mut Config| {
                    config.model.quantization = quantization;
                    config.generation.quantize_head = quantizes;
                }
            };
            let found = small(ties, set(true)).unwrap();
            let mut wanted = small(ties, set(false)).unwrap();
            let mut numbers = vec![0.0; 50 * 64];
            wanted.head.weight.view(wanted.params.values().into()).store().widen(0, &mut numbers);
            let coded = encode::quantize(&numbers, 64, format, true).unwrap();
            coded.widen(0, &mut numbers);
            assert!(apart(&logits(&found), &logits(&wanted)) > 1e-3, "{quantization}, tied {ties}: not quantized");
            wanted.head.weight = Weight::frozen(numbers, Device::Cpu);
            // Sums are multiplied by scales, and not each number.
            assert!(apart(&logits(&found), &logits(&wanted)) < 2e-6, "{quantization}, tied {ties}");
        }
    }
}

#[test]
fn a_head_is_quantized_in_a_quantized_model_and_if_it_is_not_trained() {
    let error = small(true, |config| config.generation.quantize_head = true).unwrap_err();
    assert!(error.to_string().contains("gen.quantize_head"), "{error}");
    for ties in [true, false] {
        let set = |quantizes: bool| {
            move |config: &mut Config| {
                config.model.quantization = Quantization::Int8;
                config.generation.quantize_head = quantizes;
                config.tuning.lora.modules_to_save = vec!["lm_head".to_owned()];
            }
        };
        let [plain, asked] = [false, true].map(|quantizes| small(ties, set(quantizes)).unwrap());
        assert_eq!(logits(&asked), logits(&plain), "tied {ties}");
    }
}
