//! Replaces `web.rs` in a build without the cargo feature `hub`: nothing is fetched.
use tunesmith_base::error::{Error, Result};

/// Why a file was not fetched. Has the same fields as in a build with `hub`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebFailure {
    /// The reason, for messages.
    pub text: String,
    /// Whether another attempt may succeed.
    pub is_passing: bool,
}

/// A client that cannot exist: [`WebClient::new`] always fails.
#[derive(Debug)]
pub enum WebClient {}

impl WebClient {
    /// Fails, because this build cannot fetch anything.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`], always.
    pub fn new() -> Result<Self> {
        Err(Error::config("this tunesmith was built without the feature `hub`, which downloads"))
    }

    /// Never called, because there is no value of this type.
    ///
    /// # Errors
    /// Never.
    pub fn fetch(&self, _url: &str, _most: u64) -> Result<Vec<u8>, WebFailure> {
        match *self {}
    }
}
