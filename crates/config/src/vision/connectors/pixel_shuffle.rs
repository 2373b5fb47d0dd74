//! Neighbouring patches side by side, then a linear module without bias: Idefics 3, `SmolVLM`.
use super::{Behind, ConnectorFamily, Result, Step};

pub(super) static FAMILY: ConnectorFamily =
    ConnectorFamily { name: "pixel shuffle", model_types: &["idefics3", "smolvlm"], read };

fn read(&Behind { source, encoder, decoder_size }: &Behind<'_>) -> Result<Vec<Step>> {
    let factor = source.size_up_to("scale_factor", Some(2), 64)?;
    if !encoder.grid[0].is_multiple_of(factor) {
        return Err(source.mismatch("scale_factor", &format!("a divisor of {} patches a side", encoder.grid[0])));
    }
    let sizes = [encoder.hidden_size * factor * factor, decoder_size];
    let linear = Step::linear("model.connector.modality_projection.proj".to_owned(), sizes, false);
    Ok(vec![Step::SideBySide(factor), linear])
}
