//! Hints: the name that was probably meant, and what a later version will do.

/// The hint for what a later version will do.
pub(super) fn not_yet(what: &str) -> String {
    format!("{what} is not yet part of this version")
}

/// The name that `word` was probably meant to be. At most a third of its letters may differ, but always one; case does not count.
pub fn nearest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = word.to_lowercase();
    let rated = names.into_iter().map(|name| (strsim::osa_distance(&lower, &name.to_lowercase()), name));
    let (distance, name) = rated.min_by_key(|(distance, _)| *distance)?;
    (distance <= (lower.chars().count() / 3).max(1)).then_some(name)
}
