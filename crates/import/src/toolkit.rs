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
}

impl Toolkit {
    /// Every toolkit, in the order of the documentation.
    pub const ALL: [Self; 4] = [Self::Axolotl, Self::LlamaFactory, Self::MsSwift, Self::SftPlay];

    /// The name as its authors write it.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Axolotl => "Axolotl",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::MsSwift => "ms-swift",
            Self::SftPlay => "SFT-Play",
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
        }
    }
}
