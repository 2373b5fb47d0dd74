//! An `RMSNorm`, neighbouring patches as a convolution reads them, linear back to the encoder's width, then linear, activation, linear:
//! Mistral 3.
use super::{Behind, ConnectorFamily, Norm, PROJECTOR, Result, Step, mlp};

pub(super) static FAMILY: ConnectorFamily =
    ConnectorFamily { name: "patch merger and MLP", model_types: &["mistral3"], read };

/// Language models whose class has an epsilon where the file has none, and that.
const EPSILONS: [(&str, f64); 3] = [("mistral", 1e-6), ("ministral3", 1e-5), ("mistral4", 1e-6)];

fn read(behind: &Behind<'_>) -> Result<Vec<Step>> {
    let &Behind { source, encoder, decoder_size } = behind;
    let factor = source.size_up_to("spatial_merge_size", Some(2), Step::MOST_BY_FEATURE)?;
    let text = source.part("text_config")?;
    let kind = text.text("model_type")?.unwrap_or("mistral");
    let eps = match EPSILONS.iter().find(|(name, _)| *name == kind) {
        Some((_, eps)) => text.positive("rms_norm_eps", *eps)?,
        None if text.has("rms_norm_eps") => text.positive("rms_norm_eps", 1e-6)?,
        None => return Err(text.mismatch("rms_norm_eps", "a number, which the connector's norm needs")),
    };
    let size = encoder.hidden_size;
    let bias = source.flag("multimodal_projector_bias", false)?;
    let norm = Norm { name: format!("{PROJECTOR}norm"), size, eps, rms: true, offset: 0.0 };
    let merging = format!("{PROJECTOR}patch_merger.merging_layer");
    let merge =
        [Step::Norm(norm), Step::ByFeature(factor), Step::linear(merging, [size * factor * factor, size], false)];
    let mlp = mlp::steps(PROJECTOR, [size, decoder_size, decoder_size], bias, (behind.activation()?, 0.0));
    Ok(merge.into_iter().chain(mlp).collect())
}
