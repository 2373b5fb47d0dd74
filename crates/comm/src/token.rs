//! The run's token, a secret that its ranks share. It is never sent; ranks prove that they know it.
use std::io::Read as _;

use tunesmith_base::error::{Error, Result};

/// The environment variable that holds the token.
pub const TOKEN: &str = "TUNESMITH_TOKEN";
/// The hint of errors about a missing or short token.
pub const MAKE_TOKEN: &str =
    "on every machine the same secret: export TUNESMITH_TOKEN=…, made once with `openssl rand -hex 16`";

/// The secret that the ranks of a run share.
#[derive(Clone, PartialEq, Eq)]
pub struct RunToken(String);

impl RunToken {
    /// A token that the user has chosen.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`]: it is shorter than 16 characters.
    pub fn given(text: &str) -> Result<Self> {
        match text.len() {
            16..=1024 => Ok(Self(text.to_owned())),
            length => {
                Err(Error::config(format!("env {TOKEN}: {length} characters, expected 16 to 1024")).hint(MAKE_TOKEN))
            }
        }
    }

    /// A new token from the system's random numbers.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the system gives none.
    pub fn fresh() -> Result<Self> {
        Ok(Self(blake3::Hash::from(random()?).to_hex().to_string()))
    }

    /// Its text, for a rank's environment.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// A keyed hash of `parts`, which proves that the sender knows the token. `side` keeps one side's proof from serving as the
    /// other's. The length of each part is hashed too, so that no bytes can move from one part to the next.
    pub(super) fn proof(&self, side: &str, parts: &[&[u8]]) -> blake3::Hash {
        let key = blake3::derive_key("tunesmith rendezvous 2", self.0.as_bytes());
        let mut hasher = blake3::Hasher::new_keyed(&key);
        for part in std::iter::once(side.as_bytes()).chain(parts.iter().copied()) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }
}

impl std::fmt::Debug for RunToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RunToken(…)")
    }
}

/// Random bytes of the system.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`]: the system gives none.
pub(super) fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let source = "/dev/urandom";
    let read = std::fs::File::open(source).and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Error::io("read", source, &error))?;
    Ok(bytes)
}
