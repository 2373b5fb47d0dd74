//! The toolkits, and the keys by which their configurations are recognised.

/// A toolkit whose configurations can be imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Toolkit {
    /// Axolotl's YAML, recognised by keys such as `base_model`.
    Axolotl,
    /// LLaMA-Factory's YAML, recognised by keys such as `stage` and `do_train`.
    LlamaFactory,
    /// ms-swift's YAML, recognised by `model` with `dataset`, and by keys such as `tuner_type`.
    MsSwift,
    /// SFT-Play's YAML, with the file that it includes.
    SftPlay,
    /// The YAML of TRL's `trl sft --config`, recognised by keys such as `dataset_name` and `use_peft`.
    Trl,
}

impl Toolkit {
    /// Every toolkit, in the order of the documentation.
    pub const ALL: [Self; 5] = [Self::Axolotl, Self::LlamaFactory, Self::MsSwift, Self::SftPlay, Self::Trl];

    /// The name as its authors write it.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Axolotl => "Axolotl",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::MsSwift => "ms-swift",
            Self::SftPlay => "SFT-Play",
            Self::Trl => "TRL",
        }
    }

    /// Keys of which every configuration has at least one. Many other keys are also arguments of Transformers, so they do not identify a toolkit.
    pub(super) const fn own_keys(self) -> &'static [&'static str] {
        match self {
            Self::Axolotl => &[
                "base_model",
                "datasets",
                "pretraining_dataset",
                "sequence_len",
                "micro_batch_size",
                "num_epochs",
                "val_set_size",
                "adapter",
            ],
            Self::LlamaFactory => &[
                "stage",
                "do_train",
                "dataset",
                "dataset_dir",
                "finetuning_type",
                "template",
                "cutoff_len",
                "train_dataset",
            ],
            Self::MsSwift => &[
                "dataset",
                "tuner_type",
                "train_type",
                "split_dataset_ratio",
                "truncation_strategy",
                "freeze_vit",
                "freeze_aligner",
                "freeze_llm",
                "vit_lr",
                "aligner_lr",
                "loss_scale",
            ],
            Self::SftPlay => &["include", "model", "tuning", "train", "data", "logging", "gen", "eval"],
            Self::Trl => &[
                "dataset_name",
                "dataset_config",
                "dataset_train_split",
                "dataset_test_split",
                "use_peft",
                "use_bnb_nested_quant",
                "lora_modules_to_save",
                "assistant_only_loss",
                "completion_only_loss",
                "test_split_size",
            ],
        }
    }
}
