//! Linear, activation, linear: LLaVA, LLaVA-OneVision, and pairs with `vision.connector: mlp`, which have dropout behind the activation.
use super::{Behind, ConnectorFamily, PROJECTOR, Pointwise, Result, Step};

pub(super) static FAMILY: ConnectorFamily =
    ConnectorFamily { name: "MLP", model_types: &["llava", "llava_onevision"], read };

fn read(behind: &Behind<'_>) -> Result<Vec<Step>> {
    let bias = behind.source.flag("multimodal_projector_bias", true)?;
    let sizes = [behind.encoder.hidden_size, behind.decoder_size, behind.decoder_size];
    Ok(steps(PROJECTOR, sizes, bias, (behind.activation()?, 0.0)))
}

/// From so many features over so many to so many; `module` stands before the names.
pub(super) fn steps(
    module: &str,
    [from, hidden, to]: [usize; 3],
    bias: bool,
    (function, dropout): (Pointwise, f64),
) -> Vec<Step> {
    let mut steps = vec![Step::linear(format!("{module}linear_1"), [from, hidden], bias), Step::Function(function)];
    steps.extend((dropout > 0.0).then_some(Step::Dropout(dropout)));
    steps.push(Step::linear(format!("{module}linear_2"), [hidden, to], bias));
    steps
}
