//! An adapter's file contains every tensor of the modules that its `modules_to_save` names, as PEFT requires: also tensors
//! without a gradient, with the base's numbers.
use super::config;
use super::golden::golden;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tunesmith::checkpoint::AdapterConfig;
use tunesmith::checkpoint::loaded_adapter::LoadedAdapter;
use tunesmith::checkpoint::peft::{save_adapter, vision_training};
use tunesmith::checkpoint::untouched::Untouched;
use tunesmith::config::arch::Arch;
use tunesmith::config::vision::{Pairing, VisionArch, VisionTraining};
use tunesmith::model::targets::{Targets, placed};
use tunesmith::model::weights::WeightFiles;

/// Names and shapes of tensors.
type Shapes = BTreeMap<String, Vec<usize>>;

/// A golden model, or a golden encoder before the text model of `prefix`; and the folder of its encoder.
fn seeing(name: &str, training: VisionTraining) -> (Arch, WeightFiles, PathBuf) {
    let own = golden(name).join("model");
    let alone = !name.starts_with("across") && !golden(name).join("run.json").exists();
    let dir = if alone { golden("prefix").join("model") } else { own.clone() };
    let mut arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open_model(&dir, &arch, &arch.tensors()).unwrap();
    let vision = if alone {
        let pairing = Pairing { hidden_size: None, feature_layer: None, dropout: 0.0 };
        VisionArch::pair(&own, &pairing, arch.hidden_size).unwrap()
    } else {
        VisionArch::of_model(&dir, arch.hidden_size).unwrap()
    };
    // As in a run: some captioners have no connector.
    let connector = training.connector && !vision.connector.steps.is_empty();
    arch.vision = Some(VisionArch { training: VisionTraining { connector, ..training }, ..vision }.into());
    (arch, weights, own)
}

/// Whether a tensor is in a module whose name ends with one of `saved`: PEFT's rule.
fn is_saved(name: &str, saved: &[String]) -> bool {
    let parents = name.match_indices('.').map(|(at, _)| &name[..at]);
    parents.into_iter().any(|module| saved.iter().any(|entry| module.ends_with(entry.as_str())))
}

#[test]
fn an_adapter_s_file_holds_every_tensor_of_the_modules_that_it_saves() {
    let known: BTreeMap<String, Shapes> =
        serde_json::from_str(include_str!("../../golden/encoder_tensors.json")).unwrap();
    let mut copied = BTreeMap::new();
    for (name, tensors) in &known {
        for training in [
            VisionTraining { connector: true, encoder: true, ..VisionTraining::default() },
            VisionTraining { encoder: true, ..VisionTraining::default() },
            VisionTraining { connector: true, last_blocks: 1, ..VisionTraining::default() },
        ] {
            let case = format!("{name}, {training:?}");
            let (arch, weights, of_encoder) = seeing(name, training);
            // Of an encoder alone, the stored names are the encoder's.
            let alone = arch.vision.as_ref().unwrap().folder.is_some();
            let tuning = config(if alone { "prefix" } else { name }).tuning;
            let placements = placed(&arch, &tuning).unwrap();
            let trained = Targets::of(&tuning).tensors(&arch, &placements).unwrap();
            let untouched = Untouched::of_base(&arch, Some(&weights)).unwrap();
            let saved = AdapterConfig::of(&tuning, &placements, None).on(&arch).unwrap();
            let saved = AdapterConfig { untouched: untouched.into(), ..saved };
            let values: Vec<Vec<f32>> = trained.iter().map(|(_, shape)| vec![0.25; shape.iter().product()]).collect();
            let named: Vec<_> = trained
                .iter()
                .zip(&values)
                .map(|((name, shape), values)| (name.clone(), shape.clone(), &values[..]))
                .collect();
            let dir = tempfile::tempdir().unwrap();
            save_adapter(dir.path(), &saved, &named).unwrap();

            let modules: Vec<String> = serde_json::from_value(saved.to_json()["modules_to_save"].clone()).unwrap();
            let wanted: Shapes = tensors
                .iter()
                .filter(|(name, _)| is_saved(name, &modules))
                .map(|(name, shape)| (format!("base_model.model.{name}"), shape.clone()))
                .collect();
            let file = WeightFiles::open_file(&dir.path().join("adapter_model.safetensors")).unwrap();
            let found: Shapes = file
                .names()
                .filter(|name| !(name.contains(".lora_") || alone && name.contains(".multi_modal_projector.")))
                .map(|name| (name.to_owned(), file.shape(name).unwrap().to_vec()))
                .collect();
            assert!(!wanted.is_empty(), "{case}");
            assert_eq!(found, wanted, "{case}: {modules:?}");

            // What is copied has the base's numbers.
            let path = of_encoder.join("model.safetensors");
            let base = WeightFiles::open_file(&path).unwrap();
            for part in ["embeddings.mask_token", "head.probe", "head.attention.in_proj_weight"] {
                let find = |file: &WeightFiles| file.names().find(|name| name.ends_with(part)).map(str::to_owned);
                if let Some(own) = find(&file) {
                    assert_eq!(file.read(&own).unwrap(), base.read(&find(&base).unwrap()).unwrap(), "{case}, {own}");
                    *copied.entry(part).or_insert(0) += 1;
                }
            }

            // It is read as commands read it, and written again as it was. A connector inside the encoder's module is in the file.
            let vision = arch.vision.as_ref().unwrap();
            let training = vision_training(dir.path(), vision).unwrap();
            let arch = Arch { vision: Some(VisionArch { training, ..(**vision).clone() }.into()), ..arch.clone() };
            let loaded = LoadedAdapter::open(dir.path(), &arch).unwrap_or_else(|error| panic!("{case}: {error}"));
            assert!(trained.iter().all(|(name, _)| loaded.tensors.contains_key(name)), "{case}");
            let again = tempfile::tempdir().unwrap();
            let named: Vec<_> = (loaded.tensors.iter())
                .map(|(name, (shape, values))| (name.clone(), shape.clone(), &values[..]))
                .collect();
            save_adapter(again.path(), &loaded.config, &named).unwrap();
            let bytes = |dir: &tempfile::TempDir| std::fs::read(dir.path().join("adapter_model.safetensors")).unwrap();
            assert!(bytes(&again) == bytes(&dir), "{case}");
        }
    }
    assert!(copied.len() == 3 && copied.values().all(|&times| times > 1), "{copied:?}");
}
