//! The kinds of connectors: each has one file, which turns a model's `config.json` into [`Step`]s, and one line here. Shapes, names of
//! tensors, and both passes follow from the steps.
mod average_pool;
mod gemma4;
mod linear;
mod merger;
mod mlp;
mod patch_merger;
mod pixel_shuffle;
mod shuffle_mlp;

use super::connector::{Connector, Norm, Pairing, Step};
use super::encoder::{Encoder, Pointwise};
use crate::enums::ProjectionArchitecture;
use crate::hf_json::Source;
use tunesmith_base::error::Result;

/// Where most models have their connector.
const PROJECTOR: &str = "model.multi_modal_projector.";

/// A kind of connector: the models that have it, and how it is read.
#[derive(Debug)]
pub struct ConnectorFamily {
    /// The name for people, such as `pixel shuffle`.
    pub name: &'static str,
    /// Values of `model_type` of the models that have it.
    pub model_types: &'static [&'static str],
    /// What it computes, in order.
    read: fn(&Behind<'_>) -> Result<Vec<Step>>,
}

/// Every kind of connector that can be computed.
pub static CONNECTORS: &[&ConnectorFamily] = &[
    &average_pool::FAMILY,
    &gemma4::FAMILY,
    &linear::FAMILY,
    &merger::FAMILY,
    &mlp::FAMILY,
    &patch_merger::FAMILY,
    &pixel_shuffle::FAMILY,
    &shuffle_mlp::FAMILY,
];

/// What a connector is read from: the model's `config.json`, and the parts that it joins.
struct Behind<'a> {
    source: &'a Source<'a>,
    encoder: &'a Encoder,
    decoder_size: usize,
}

impl Behind<'_> {
    /// The activation that `projector_hidden_act` names.
    fn activation(&self) -> Result<Pointwise> {
        let name = self.source.text("projector_hidden_act")?.unwrap_or("gelu");
        Pointwise::parse(name).ok_or_else(|| self.source.not_yet(format!("projector_hidden_act {name:?}")))
    }
}

/// The connector of a composite checkpoint, by its `model_type`.
///
/// # Errors
/// [`tunesmith_base::Kind::Model`]: no kind belongs to it, or a key that this kind cannot compute, by name.
pub(super) fn of_model(source: &Source<'_>, encoder: &Encoder, decoder_size: usize) -> Result<Connector> {
    let kind = source.text("model_type")?.unwrap_or_default();
    let family = CONNECTORS.iter().find(|family| family.model_types.contains(&kind));
    let family = family.ok_or_else(|| source.not_yet(format!("the connector of a model of model_type {kind:?}")))?;
    let steps = (family.read)(&Behind { source, encoder, decoder_size })?;
    Ok(Connector { kind: family.name, encoder_size: encoder.hidden_size, decoder_size, steps, stored: true })
}

/// The connector number `place` behind an inner block of the encoder (`DeepStack`), of a model whose own is a merger.
///
/// # Errors
/// As [`of_model`].
pub(super) fn deepstack(
    source: &Source<'_>,
    encoder: &Encoder,
    place: usize,
    decoder_size: usize,
) -> Result<Connector> {
    let steps = merger::deepstack(&Behind { source, encoder, decoder_size }, place)?;
    Ok(Connector { kind: merger::FAMILY.name, encoder_size: encoder.hidden_size, decoder_size, steps, stored: true })
}

/// The connector of a pair, drawn from the seed.
pub(super) fn of_pair(pairing: &Pairing, encoder_size: usize, decoder_size: usize) -> Connector {
    let sizes = [encoder_size, decoder_size];
    let (kind, steps) = match pairing.hidden_size {
        None => (linear::FAMILY.name, linear::steps(PROJECTOR, sizes)),
        Some(hidden) => {
            let function = (Pointwise::Gelu, pairing.dropout);
            (mlp::FAMILY.name, mlp::steps(PROJECTOR, [encoder_size, hidden, decoder_size], true, function))
        }
    };
    Connector { kind, encoder_size, decoder_size, steps, stored: false }
}

/// The projector behind a second encoder, drawn from the seed; `module` stands before its names.
pub(super) fn of_world(
    architecture: ProjectionArchitecture,
    module: &str,
    [encoder_size, decoder_size]: [usize; 2],
) -> Connector {
    let mlp = || mlp::steps(module, [encoder_size, decoder_size, decoder_size], true, (Pointwise::Gelu, 0.0));
    let (kind, steps) = match architecture {
        ProjectionArchitecture::Linear => (linear::FAMILY.name, linear::steps(module, [encoder_size, decoder_size])),
        ProjectionArchitecture::Mlp => (mlp::FAMILY.name, [mlp(), vec![Step::Function(Pointwise::Gelu)]].concat()),
        ProjectionArchitecture::MlpNoFinalGelu => (mlp::FAMILY.name, mlp()),
    };
    Connector { kind, encoder_size, decoder_size, steps, stored: false }
}
