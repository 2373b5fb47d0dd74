//! A second opinion beside PyTorch's: candle-transformers' own Llama on the same files gives the same logits.
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use std::path::Path;
use tunesmith::config::Config;
use tunesmith::config::arch::Arch;
use tunesmith::data::batch::{Batch, Example};
use tunesmith::model::Model;
use tunesmith::model::weights::WeightFiles;

#[test]
fn logits_equal_those_of_candle_transformers() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a/llama/model");
    let text = std::fs::read_to_string(dir.join("config_v4.json")).unwrap();
    let config = serde_json::from_str::<LlamaConfig>(&text).unwrap().into_config(false);
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let weights = VarBuilder::from_buffered_safetensors(bytes, DType::F32, &Device::Cpu).unwrap();
    let oracle = Llama::load(weights, &config).unwrap();

    let arch = Arch::from_dir(&dir).unwrap();
    let files = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    let model = Model::load(&arch, Some(&files), &Config::default()).unwrap();

    for length in [1, 16, 33, 60] {
        let tokens: Vec<u32> = (0..length).map(|at| (at * 37 + 5) % 512).collect();
        let mut cache = Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
        let input = Tensor::new(tokens.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let expected = oracle.forward(&input, 0, &mut cache).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let example = Example { labels: vec![-100; tokens.len()], input_ids: tokens };
        let got = model.logits(&Batch::from_examples([&example]), &[length as usize - 1]).unwrap();
        let difference = got.iter().zip(&expected).fold(0.0f32, |most, (got, want)| most.max((got - want).abs()));
        assert!(got.len() == expected.len() && difference < 5e-5, "length {length}: {difference:e}");
    }
}
