//! Quoting of words for a POSIX shell, in commands that the program prints.

/// `word`, in single quotes where a POSIX shell would not read it back as it is.
pub(super) fn quoted(word: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "_-./:=,@%+".contains(character);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
