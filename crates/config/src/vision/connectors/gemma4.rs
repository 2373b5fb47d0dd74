//! The mean of neighbouring patches times the root of the width, taken off and multiplied by stored values where the file says so, an
//! `RMSNorm` without weights, then a linear module: Gemma 4.
use super::{Behind, ConnectorFamily, Result, Step};

pub(super) static FAMILY: ConnectorFamily =
    ConnectorFamily { name: "average pool and linear", model_types: &["gemma4"], read };

fn read(&Behind { source, encoder, decoder_size }: &Behind<'_>) -> Result<Vec<Step>> {
    let vision = source.part("vision_config")?;
    let side = vision.size_up_to("pooling_kernel_size", Some(3), 64)?;
    let (size, eps) = (encoder.hidden_size, encoder.norm_eps);
    let names = ["std_bias", "std_scale"].map(|name| encoder.name(name));
    let mut steps = vec![Step::Mean(side), Step::Scale((size as f64).sqrt() as f32)];
    steps.extend(vision.flag("standardize", false)?.then_some(Step::Standardize { names, size }));
    let projection = "model.embed_vision.embedding_projection".to_owned();
    steps.extend([Step::PlainNorm { size, eps }, Step::linear(projection, [size, decoder_size], false)]);
    Ok(steps)
}
