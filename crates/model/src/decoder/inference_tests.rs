//! A model for inference holds its matrices rearranged.
use super::*;
use crate::stack::Stack;
use std::path::Path;
use tunesmith_config::Init;

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
