//! One linear module with a bias: `PaliGemma`, and pairs with `vision.connector: linear`.
use super::{Behind, ConnectorFamily, PROJECTOR, Step};

pub(super) static FAMILY: ConnectorFamily = ConnectorFamily {
    name: "linear",
    model_types: &["paligemma"],
    read: |&Behind { encoder, decoder_size, .. }| Ok(steps(PROJECTOR, [encoder.hidden_size, decoder_size])),
};

/// From so many features to so many; `module` stands before the name.
pub(super) fn steps(module: &str, sizes: [usize; 2]) -> Vec<Step> {
    vec![Step::linear(format!("{module}linear"), sizes, true)]
}
