//! Checks that the settings of an adapter, as they are written to `adapter_config.json`, are enough to read it back:
//! they must select the same modules with the same ranks and scales.
use std::path::Path;

use super::AdapterConfig;
use crate::layout::ADAPTER_CONFIG;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::arch::Arch;
use tunesmith_config::{InitLora, TuningConfig};
use tunesmith_model::adapters;
use tunesmith_model::targets::{Placement, Targets};

impl AdapterConfig {
    /// The settings to save ([`AdapterConfig::of`], then [`AdapterConfig::with_tokens`]), such that reading them gives
    /// these placements on the model again. If the settings as the user wrote them do not, every module is listed by
    /// its full name.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: neither form of the settings gives these placements.
    pub fn readable(
        tuning: &TuningConfig,
        placements: &[Placement],
        base_model: Option<&str>,
        arch: &Arch,
    ) -> Result<Self> {
        let of = Self::of(tuning, placements, base_model);
        let mut listed = of.clone();
        if let Some(method) = adapters::of(tuning) {
            method.list(placements, &mut listed.tuning);
        }
        listed.tuning.lora.init_lora_weights = tuning.lora.init_lora_weights;
        // PEFT knows only the names of Transformers.
        if Targets::of(tuning).needs_other_names(arch)? {
            let listed = listed.with_tokens(arch)?;
            return listed.check_read_back(placements, arch).map(|()| listed);
        }
        let written = of.with_tokens(arch)?;
        let Err(reason) = written.check_read_back(placements, arch) else { return Ok(written) };
        let Ok(listed) = listed.with_tokens(arch) else { return Err(reason) };
        listed.check_read_back(placements, arch).map(|()| listed)
    }

    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: the file with these settings would not give these placements.
    fn check_read_back(&self, placements: &[Placement], arch: &Arch) -> Result<()> {
        let mut plain = self.clone();
        // PiSSA's matrices are saved as plain LoRA.
        plain.tuning.lora.init_lora_weights = InitLora::Kaiming;
        let read = Self::from_json(&plain.to_json().to_string(), Path::new(ADAPTER_CONFIG))?.place(arch)?;
        if read == placements {
            return Ok(());
        }
        let lacking = |of: &[Placement], all: &[Placement]| {
            of.iter().find(|placement| !all.contains(placement)).map(|placement| placement.key.clone())
        };
        let Some(module) = lacking(placements, &read).or_else(|| lacking(&read, placements)) else { return Ok(()) };
        Err(Error::config(format!("{ADAPTER_CONFIG} cannot say which adapter {module} has with these settings"))
            .hint("name the modules and parameters by other rules: each only once, by one of the settings"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_config::adapters::lora::LoraConfig;
    use tunesmith_config::{Mode, TargetModules};
    use tunesmith_model::targets::place;

    fn mixtral() -> Arch {
        let config = r#"{"model_type": "mixtral", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}"#;
        Arch::from_json(config, Path::new("config.json")).unwrap()
    }

    /// Former names of experts double the rank of gate and up, as in PEFT, also where the parameter is named too.
    #[test]
    fn what_is_written_gives_the_ranks_that_were_trained() {
        let arch = mixtral();
        let list = |words: &[&str]| TargetModules::List(words.iter().map(|&word| word.to_owned()).collect());
        let all = ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
        for (modules, parameters, doubled) in [
            (TargetModules::AllLinear, &all[..], true),
            (TargetModules::AllLinear, &all[1..], true),
            (TargetModules::AllLinear, &[], true),
            (list(&["q_proj", "w1", "w3", "w2"]), &all[..], true),
            (list(&["q_proj", "w1", "w3"]), &all[1..2], true),
            (list(&["q_proj"]), &all[..], false),
            (TargetModules::Auto, &all[..], false),
            (TargetModules::Regex(r".*\.(q_proj|w1|w3)".to_owned()), &all[1..2], true),
        ] {
            let parameters = parameters.iter().map(|&name| name.to_owned()).collect();
            let lora = LoraConfig {
                r: 4,
                target_modules: modules.clone(),
                target_parameters: parameters,
                ..LoraConfig::default()
            };
            let placements = place(&arch, &lora).unwrap();
            let rank = |key: &str| {
                let found = placements.iter().find(|placement| placement.key.ends_with(key)).unwrap();
                found.adapter.rank().unwrap().r
            };
            assert_eq!(rank("gate_up_proj"), if doubled { 8 } else { 4 }, "{modules:?}");
            assert_eq!(rank("q_proj"), 4);
            let tuning = TuningConfig { lora, ..TuningConfig::default() };
            let config = AdapterConfig::readable(&tuning, &placements, None, &arch).unwrap();
            let read = AdapterConfig::from_json(&config.to_json().to_string(), Path::new("x")).unwrap();
            assert_eq!(read.place(&arch).unwrap(), placements, "{modules:?}");
            config.check_read_back(&placements, &arch).unwrap();
        }
    }

    #[test]
    fn settings_that_do_not_give_their_adapter_back_are_refused() {
        let arch = mixtral();
        let placements = place(&arch, &LoraConfig::default()).unwrap();
        let config = AdapterConfig::of(&TuningConfig::default(), &placements, None).with_tokens(&arch).unwrap();
        config.check_read_back(&placements, &arch).unwrap();
        let mut other = config.clone();
        other.tuning.lora.r = 8;
        let error = other.check_read_back(&placements, &arch).unwrap_err();
        assert!(error.message().contains("model.layers.0.self_attn.q_proj"), "{error}");
        let error = config.check_read_back(&placements[1..], &arch).unwrap_err();
        assert!(error.message().contains(&placements[0].key), "{error}");
    }

    #[test]
    fn an_empty_list_names_no_module() {
        let arch = mixtral();
        let down = "mlp.experts.down_proj";
        let lora = LoraConfig {
            target_modules: TargetModules::List(Vec::new()),
            target_parameters: vec![down.to_owned()],
            ..LoraConfig::default()
        };
        let placements = place(&arch, &lora).unwrap();
        assert_eq!(placements.len(), 2);
        assert!(placements.iter().all(|placement| placement.key.ends_with(down)));
        let tuning = TuningConfig { lora, ..TuningConfig::default() };
        let mut written = AdapterConfig::readable(&tuning, &placements, None, &arch).unwrap().to_json();
        assert_eq!(written["target_modules"], serde_json::json!([]));
        for modules in [serde_json::json!([]), serde_json::Value::Null] {
            written["target_modules"] = modules;
            let read = AdapterConfig::from_json(&written.to_string(), Path::new("x")).unwrap();
            assert_eq!(read.place(&arch).unwrap(), placements);
        }
        let none = LoraConfig { target_modules: TargetModules::List(Vec::new()), ..LoraConfig::default() };
        assert!(place(&arch, &none).unwrap_err().message().contains("no module matches []"));

        let mut tuning = TuningConfig { mode: Mode::Ia3, ..TuningConfig::default() };
        tuning.ia3.target_modules = Some(TargetModules::List(vec!["q_proj".to_owned(), "o_proj".to_owned()]));
        tuning.ia3.feedforward_modules = Some(TargetModules::List(Vec::new()));
        let placements = place(&arch, &tuning.ia3).unwrap();
        assert!(placements.iter().all(|placement| placement.tensors()[0].1 == [placement.out_features, 1]));
        let written = AdapterConfig::readable(&tuning, &placements, None, &arch).unwrap().to_json();
        assert_eq!(written["feedforward_modules"], serde_json::json!([]));
    }

    /// PEFT reads no other names than those of Transformers.
    #[test]
    fn names_of_the_engine_are_written_as_those_of_transformers() {
        let config = r#"{"model_type": "gpt2", "vocab_size": 8, "n_embd": 4, "n_layer": 2, "n_head": 2, "n_positions": 8,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}"#;
        let arch = Arch::from_json(config, Path::new("config.json")).unwrap();
        for (pattern, written) in [
            (r"model\.layers\.1\.attn\.c_attn", serde_json::json!(["transformer.h.1.attn.c_attn"])),
            (r".*\.1\.attn\.c_attn", serde_json::json!(r".*\.1\.attn\.c_attn")),
        ] {
            let mut tuning = TuningConfig::default();
            tuning.lora.target_modules = TargetModules::Regex(pattern.to_owned());
            let placements = place(&arch, &tuning.lora).unwrap();
            let config = AdapterConfig::readable(&tuning, &placements, None, &arch).unwrap();
            assert_eq!(config.to_json()["target_modules"], written);
        }
    }
}
