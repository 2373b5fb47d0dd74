//! Reads `ensure_weight_tying` as PEFT does.
use std::path::Path;

use super::AdapterConfig;
use crate::adapter_file::{PREFIX, open_weights};
use tunesmith_config::arch::LM_HEAD;

/// PEFT's `EMBEDDING_LAYER_NAMES`: a module of another name, such as GPT-2's `wte`, is not tied.
const TIED: [&str; 2] = ["embed_tokens", "lm_head"];

impl AdapterConfig {
    /// Clears `ensure_weight_tying` if PEFT has trained and saved one of `modules_to_save` alone, because the module
    /// has another name than those that PEFT ties. If the file has the head too, both were one matrix: PEFT writes
    /// `wte` for the `lm_head` that was asked for.
    pub(super) fn tie_as_peft(&mut self, dir: &Path) {
        let lora = &mut self.tuning.lora;
        let ties = |module: &String| TIED.contains(&module.rsplit('.').next().unwrap_or(module));
        if !lora.ensure_weight_tying || lora.modules_to_save.is_empty() || lora.modules_to_save.iter().any(ties) {
            return;
        }
        // If the file cannot be read, the reader of its tensors reports it.
        lora.ensure_weight_tying =
            open_weights(dir).map_or(true, |weights| weights.shape(&format!("{PREFIX}{LM_HEAD}")).is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peft::{CONFIG_FILE, save_adapter, vocabulary};
    use tunesmith_config::arch::Arch;
    use tunesmith_config::{TargetModules, TuningConfig};

    #[test]
    fn peft_ties_no_embedding_of_another_name() {
        let config = r#"{"model_type": "gpt2", "vocab_size": 8, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 8,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}"#;
        let arch = Arch::from_json(config, Path::new("config.json")).unwrap();
        let table = [0.5f32; 32];
        for (saved, tables, tied) in [
            ("wte", &["model.embed_tokens.weight"][..], false),
            ("wte", &["model.embed_tokens.weight", LM_HEAD], true),
            ("lm_head", &["model.embed_tokens.weight"], true),
        ] {
            let mut tuning = TuningConfig::default();
            tuning.lora.target_modules = TargetModules::List(vec!["c_attn".to_owned()]);
            tuning.lora.modules_to_save = vec![saved.to_owned()];
            tuning.lora.ensure_weight_tying = true;
            let dir = tempfile::tempdir().unwrap();
            let tensors: Vec<_> = tables.iter().map(|&name| (name.to_owned(), vec![8, 4], &table[..])).collect();
            save_adapter(dir.path(), &AdapterConfig::of(&tuning, &[], None), &tensors).unwrap();
            assert!(dir.path().join(CONFIG_FILE).exists());
            let read = AdapterConfig::from_dir(dir.path()).unwrap();
            assert_eq!(read.tuning.lora.ensure_weight_tying, tied, "{saved} {tables:?}");
            let mut fitted = arch.clone();
            fitted.fit(&vocabulary(dir.path()).unwrap()).unwrap();
            assert_eq!(fitted.separated, !tied, "{saved} {tables:?}");
        }
    }
}
