//! Named sets of tensors, and the comparison of the set in a file with the set that a model needs.
use std::collections::BTreeMap;
use std::path::Path;

use tunesmith_base::error::{Error, Result};
use tunesmith_model::params::ParamSpec;

/// Shape and values of each tensor, by name.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Named tensors in flat buffers, for the safetensors writer.
pub(crate) type NamedTensors<'a> = Vec<(String, Vec<usize>, &'a [f32])>;

/// Gives the tensors of a flat buffer their names and shapes.
pub fn named<'a>(specs: &[ParamSpec], values: &'a [f32]) -> NamedTensors<'a> {
    specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone(), &values[spec.range()])).collect()
}

/// Requires the same names with the same shapes in `found`, which `path` holds, and in `expected`.
///
/// # Errors
/// [`tunesmith_base::Kind::Checkpoint`]: the first tensor that is missing, has another shape or is too much.
pub(crate) fn same_tensors<'n>(
    path: &Path,
    found: impl IntoIterator<Item = (&'n str, &'n [usize])>,
    expected: impl IntoIterator<Item = (&'n str, &'n [usize])>,
) -> Result<()> {
    let (found, expected): (BTreeMap<_, _>, BTreeMap<_, _>) =
        (found.into_iter().collect(), expected.into_iter().collect());
    let fail = |message: String| {
        let both = format!("{} tensors there, {} expected", found.len(), expected.len());
        Err(Error::checkpoint(format!("{}: {message} ({both})", path.display()))
            .hint("the adapter must belong to this model and these settings"))
    };
    for (name, shape) in &expected {
        match found.get(name) {
            None => return fail(format!("no tensor {name:?}, expected {shape:?}")),
            Some(other) if other != shape => return fail(format!("tensor {name:?} is {other:?}, expected {shape:?}")),
            Some(_) => {}
        }
    }
    match found.iter().find(|(name, _)| !expected.contains_key(*name)) {
        Some((name, shape)) => fail(format!("tensor {name:?} {shape:?} has no place in the model")),
        None => Ok(()),
    }
}
