//! A setting that was typed as a flag, as Transformers' scripts take it: `--learning_rate 1e-4` for `train.learning_rate=1e-4`.
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::config::schema;

/// What to type instead; `None` if the flag has the name of no setting. Takes clap's own suggestion out of `usage`, which would lead astray.
pub(super) fn hint(usage: &mut clap::Error) -> Option<String> {
    if usage.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(flag)) = usage.get(ContextKind::InvalidArg) else { return None };
    let name = flag.trim_start_matches('-').split('=').next().unwrap_or_default().replace('-', "_");
    let path = path_of(&name)?;
    usage.remove(ContextKind::Suggested);
    usage.remove(ContextKind::SuggestedArg);
    Some(format!("  hint: settings are words without dashes: {path}=VALUE\n"))
}

/// The path of the setting with this name, alias, or path; one of `train` before others, and a name before an alias.
fn path_of(name: &str) -> Option<String> {
    let matches = schema::options().filter_map(|option| {
        let path = option.path();
        let named = option.name == name || path == name;
        let aliased = option.aliases.iter().any(|alias| alias.rsplit('.').next() == Some(name));
        let other = usize::from(option.section != "train");
        (named || aliased).then(|| (if named { other } else { 2 + other }, path))
    });
    matches.min_by_key(|&(rank, _)| rank).map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use super::path_of;

    #[test]
    fn names_of_other_trainers_lead_to_settings() {
        for (name, path) in [
            ("lr", "train.learning_rate"),
            ("learning_rate", "train.learning_rate"),
            ("epochs", "train.num_train_epochs"),
            ("per_device_train_batch_size", "train.batch_size"),
            ("train.max_steps", "train.max_steps"),
            ("max_seq_length", "model.max_seq_len"),
        ] {
            assert_eq!(path_of(name).as_deref(), Some(path), "{name}");
        }
        assert_eq!(path_of("no_such_setting"), None);
    }
}
