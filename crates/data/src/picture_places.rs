//! The rows that show pictures, for messages about a picture that is read after the rows were.
use std::fmt;
use std::sync::Arc;

use tunesmith_base::error::Error;

/// Finds the place of the rows that show a picture by its name, such as `rows.jsonl:3 and 4 more rows`.
type Find = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Knows which rows show a picture; by default none.
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

    /// The error about a picture, with the place of its rows in front.
    pub(super) fn locate(&self, name: &str, error: Error) -> Error {
        match self.0.as_ref().and_then(|find| find(name)) {
            Some(place) => error.context(place),
            None => error,
        }
    }
}
