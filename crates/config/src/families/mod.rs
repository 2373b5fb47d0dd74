//! The decoder families. Each has one file, which turns its `config.json` into an [`Arch`], and one line in
//! [`tunesmith_base::registry`].
use super::arch::Arch;
use super::family::Family;
use super::hf_json::Source;
use super::vision::ENCODERS;
use tunesmith_base::error::Result;

/// Turns the `config.json` of one family into an [`Arch`].
type Read = fn(&Source<'_>) -> Result<Arch>;

macro_rules! modules {
    ($($module:ident,)+) => {
        $( mod $module; )+

        /// Every family that this version implements.
        pub static FAMILIES: &[&Family] = &[$( &$module::FAMILY ),+];

        /// The reader of each entry of [`FAMILIES`], in the same order.
        const READERS: &[Read] = &[$( $module::read ),+];
    };
}
tunesmith_base::registry::families!(modules);

/// The family whose `model_type` the source has, with its reader.
pub(super) fn family_of(source: &Source<'_>) -> Result<(&'static Family, Read)> {
    let supported = FAMILIES.iter().map(|family| family.model_type).collect::<Vec<_>>().join(", ");
    let found =
        source.text("model_type")?.ok_or_else(|| source.mismatch("model_type", &format!("one of {supported}")))?;
    let mut families = FAMILIES.iter().copied().zip(READERS.iter().copied());
    families.find(|(family, _)| family.model_type == found).ok_or_else(|| {
        let hint = match found {
            _ if ENCODERS.iter().any(|encoder| encoder.model_types.contains(&found)) => {
                "it is an image encoder: name it in vision.encoder, beside a text model in model.name".to_owned()
            }
            _ => format!("supported in this version: {supported}"),
        };
        source.not_yet(format!("model_type {found:?}")).hint(hint)
    })
}
