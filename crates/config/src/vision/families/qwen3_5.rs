//! The image encoder of Qwen3.5, with experts or without: `transformers.models.qwen3_5`. As Qwen3-VL's.
use super::{Encoder, EncoderFamily, Source, qwen3_vl};
use tunesmith_base::error::Result;

pub(super) static FAMILY: EncoderFamily = EncoderFamily {
    model_types: &["qwen3_5_vision", "qwen3_5"],
    wholes: &["qwen3_5"],
    models: "inside Qwen3.5",
    read: |source| read(source, "qwen3_5_vision"),
};

/// That beside a language model with experts.
pub(super) static SPARSE: EncoderFamily = EncoderFamily {
    model_types: &["qwen3_5_moe_vision", "qwen3_5_moe"],
    wholes: &["qwen3_5_moe"],
    models: "inside Qwen3.5 with experts",
    read: |source| read(source, "qwen3_5_moe_vision"),
};

fn read(source: &Source<'_>, family: &'static str) -> Result<Encoder> {
    qwen3_vl::as_family(source, family)
}
