//! A norm, neighbouring patches side by side, linear, GELU, linear: the mergers of Qwen-VL. Those behind inner blocks of the encoder
//! (`DeepStack`, Qwen3-VL) have the norm behind the patches side by side.
use super::{Behind, ConnectorFamily, Norm, Pointwise, Result, Step};

pub(super) static FAMILY: ConnectorFamily = ConnectorFamily {
    name: "merger",
    model_types: &["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"],
    read: |behind| steps(behind, "merger", false),
};

/// The merger number `place` behind an inner block.
pub(super) fn deepstack(behind: &Behind<'_>, place: usize) -> Result<Vec<Step>> {
    steps(behind, &format!("deepstack_merger_list.{place}"), true)
}

fn steps(behind: &Behind<'_>, module: &str, norm_of_merged: bool) -> Result<Vec<Step>> {
    let &Behind { source, encoder, decoder_size } = behind;
    let factor = source.part("vision_config")?.size_up_to("spatial_merge_size", Some(2), 64)?;
    let newer = source.text("model_type")?.is_some_and(|kind| kind.starts_with("qwen3"));
    let names = if newer { ["norm", "linear_fc1", "linear_fc2"] } else { ["ln_q", "mlp.0", "mlp.2"] };
    let [norm, first, second] = names.map(|name| encoder.name(&format!("{module}.{name}")));
    let merged = encoder.hidden_size * factor * factor;
    let size = if norm_of_merged { merged } else { encoder.hidden_size };
    let norm = Step::Norm(Norm { name: norm, size, eps: 1e-6, rms: encoder.rms_norm, offset: 0.0 });
    let norm_and_merge =
        if norm_of_merged { [Step::SideBySide(factor), norm] } else { [norm, Step::SideBySide(factor)] };
    let mlp = [
        Step::linear(first, [merged; 2], true),
        Step::Function(Pointwise::Gelu),
        Step::linear(second, [merged, decoder_size], true),
    ];
    Ok(norm_and_merge.into_iter().chain(mlp).collect())
}
