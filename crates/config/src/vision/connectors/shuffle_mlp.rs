//! Neighbouring patches side by side, a `LayerNorm`, linear, activation, linear: `InternVL`.
use super::{Behind, ConnectorFamily, Norm, PROJECTOR, Result, Step};

pub(super) static FAMILY: ConnectorFamily =
    ConnectorFamily { name: "pixel shuffle and MLP", model_types: &["internvl"], read };

fn read(behind: &Behind<'_>) -> Result<Vec<Step>> {
    let &Behind { source, encoder, decoder_size } = behind;
    let factor = (1.0 / source.positive("downsample_ratio", 0.5)?) as usize;
    if !(1..=64).contains(&factor) || !encoder.grid[0].is_multiple_of(factor) {
        let expected = format!("one over a divisor of {} patches a side", encoder.grid[0]);
        return Err(source.mismatch("downsample_ratio", &expected));
    }
    let merged = encoder.hidden_size * factor * factor;
    let norm = Norm { name: format!("{PROJECTOR}layer_norm"), size: merged, eps: 1e-5, rms: false, offset: 0.0 };
    Ok(vec![
        Step::SideBySide(factor),
        Step::Norm(norm),
        Step::linear(format!("{PROJECTOR}linear_1"), [merged, decoder_size], true),
        Step::Function(behind.activation()?),
        Step::linear(format!("{PROJECTOR}linear_2"), [decoder_size; 2], true),
    ])
}
