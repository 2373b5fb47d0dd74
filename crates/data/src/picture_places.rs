//! Which rows show a picture. Messages need this when a picture turns out to be bad after the rows were read.
use std::fmt;
use std::sync::Arc;

use tunesmith_base::error::Error;

/// Returns where the rows are that show the picture of this name, such as `rows.jsonl:3 and 4 more rows`.
type Find = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Finds the rows that show a picture. The default finds none.
#[derive(Clone, Default)]
pub struct PicturePlaces(Option<Arc<Find>>);

impl fmt::Debug for PicturePlaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PicturePlaces").field(&self.0.is_some()).finish()
    }
}

impl PicturePlaces {
    pub(super) fn new(find: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(find)))
    }

    /// Puts the place of the rows that show the picture in front of an error about it.
    pub(super) fn locate(&self, name: &str, error: Error) -> Error {
        match self.0.as_ref().and_then(|find| find(name)) {
            Some(place) => error.context(place),
            None => error,
        }
    }
}
