//! The mean of neighbouring patches, an `RMSNorm` whose weights count from 1, then a product with a matrix: Gemma 3.
use super::{Behind, ConnectorFamily, Norm, PROJECTOR, Result, Step};

pub(super) static FAMILY: ConnectorFamily = ConnectorFamily { name: "average pool", model_types: &["gemma3"], read };

fn read(&Behind { source, encoder, decoder_size }: &Behind<'_>) -> Result<Vec<Step>> {
    let tokens = source.size("mm_tokens_per_image", Some(256))?;
    let side = tokens.isqrt();
    let patches = encoder.grid[0];
    if side * side != tokens || side == 0 || !patches.is_multiple_of(side) {
        return Err(source.mismatch("mm_tokens_per_image", &format!("the square of a divisor of {patches}")));
    }
    let (name, size) = (format!("{PROJECTOR}mm_soft_emb_norm"), encoder.hidden_size);
    Ok(vec![
        Step::Mean(patches / side),
        Step::Norm(Norm { name, size, eps: encoder.norm_eps, rms: true, offset: 1.0 }),
        Step::Matrix { name: format!("{PROJECTOR}mm_input_projection_weight"), shape: [size, decoder_size] },
    ])
}
