//! In place of `web.rs` in a build without the cargo feature `hub`: nothing is fetched.
use tunesmith_base::error::{Error, Result};

/// Why a file was not fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebFailure {
    /// The reason, for people.
    pub text: String,
    /// Whether it may be there another time.
    pub is_passing: bool,
}

/// Never made.
#[derive(Debug)]
pub enum WebClient {}

impl WebClient {
    /// Refuses.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Config`], always.
    pub fn new() -> Result<Self> {
        Err(Error::config("this tunesmith was built without the feature `hub`, which downloads"))
    }

    /// Never called.
    ///
    /// # Errors
    /// None.
    pub fn fetch(&self, _url: &str, _most: u64) -> Result<Vec<u8>, WebFailure> {
        match *self {}
    }
}
