//! Images that rows name by web address (`data.allow_image_urls`), in a cache on disk that ranks and runs share.
//!
//! ```text
//! pictures/HASH                      an image, named by the hash of its bytes
//! pictures/links/XX/HASH             of an address, named by its hash: which image was there, or why none was fetched
//! pictures/links/XX/lock             held while an address of this folder is fetched, so that it is fetched once
//! pictures/links/total               the bytes of all images that were fetched
//! ```
//!
//! Every file is written whole and then renamed; an image comes before what names it.
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::pictures::bad_image;
use super::web_address::{Came, shown};
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::files::{self, atomic};
use tunesmith_base::memory::human_bytes;
use tunesmith_config::Bytes;
use tunesmith_hub::{WebClient, WebFailure, offline};

/// The most bytes of an image that is fetched.
const MAX_BYTES: u64 = 64 << 20;
/// The most bytes of a small file of the cache.
const SMALL: u64 = 64 << 10;
/// How long an address that could not be reached is not asked for again: the ranks of a run must leave the same rows out.
const RESPITE: Duration = Duration::from_secs(600);

/// What was found at an address.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Found {
    /// The hash of the image.
    Image(String),
    /// No image, and why.
    Nothing {
        why: String,
        /// Whether it may be there another time.
        passing: bool,
        /// Seconds since 1970.
        at: u64,
    },
}

/// Fetches images of web addresses, and keeps them.
#[derive(Debug)]
pub(super) struct WebImages {
    client: WebClient,
    cache: WebCache,
}

/// Which images are there.
#[derive(Debug)]
struct WebCache {
    /// Where images are.
    kept: PathBuf,
    links: PathBuf,
    /// The most bytes of all images.
    most: u64,
    /// Whether an address where no image was found is remembered (`data.bad_images: skip`).
    remembers: bool,
}

impl WebImages {
    /// In the folder `kept`, of at most so many bytes.
    ///
    /// # Errors
    /// [`Kind::Config`]: this build fetches nothing.
    pub fn new(kept: &Path, most: Bytes, remembers: bool) -> Result<Self> {
        let client = WebClient::new().map_err(|error| error.context("data.allow_image_urls"))?;
        Ok(Self { client, cache: WebCache::new(kept, most, remembers) })
    }

    /// The file of an image that is in the cache.
    pub fn cached(&self, link: &str) -> Option<PathBuf> {
        match self.cache.found(link, false)? {
            Found::Image(content) => Some(self.cache.kept.join(content)),
            Found::Nothing { .. } => None,
        }
    }

    /// The file of an image, which is fetched if it is not in the cache; with `reads`, also if it is damaged there. `check` refuses what is
    /// no image.
    ///
    /// # Errors
    /// As [`bad_image`], of [`Kind::Data`] or [`Kind::Io`]: it cannot be fetched, or is no image. [`Kind::Config`]: there is no room for it,
    /// or nothing may be fetched. [`Kind::Io`]: the cache cannot be written.
    pub fn fetch(&self, link: &str, reads: bool, check: &dyn Fn(&[u8]) -> Result<()>) -> Result<(PathBuf, Came)> {
        let cache = &self.cache;
        if let Some(found) = cache.found(link, reads) {
            return cache.known(link, found);
        }
        let record = cache.record(link);
        let folder = files::parent(&record);
        fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, &error))?;
        let _lock = lock(&folder.join("lock"))?;
        if let Some(found) = cache.found(link, reads) {
            return cache.known(link, found); // by another rank meanwhile
        }
        if let Some(variable) = offline() {
            return Err(Error::config(format!("the image {} is not in the cache, and {variable} is set", shown(link)))
                .hint("fetch it where there is a network: tunesmith data CONFIG, with the same data.cache_dir"));
        }
        let fetched = self.client.fetch(link, MAX_BYTES).and_then(|bytes| match check(&bytes) {
            Ok(()) => Ok(bytes),
            Err(error) => Err(WebFailure { text: error.message().to_owned(), is_passing: false }),
        });
        let found = match fetched {
            Ok(bytes) => {
                let content = blake3::hash(&bytes).to_hex().to_string();
                let path = cache.kept.join(&content);
                // The right bytes may be there, from a row or another address.
                if !files::read_own(&path, MAX_BYTES).is_ok_and(|there| there == bytes) {
                    cache.take_room(bytes.len() as u64)?;
                    atomic::write(&path, &bytes).map_err(|error| Error::io("write", &path, &error))?;
                }
                write(&record, &Found::Image(content))?;
                return Ok((path, Came::Fetched(bytes.len() as u64)));
            }
            Err(WebFailure { text, is_passing }) => Found::Nothing { why: text, passing: is_passing, at: now() },
        };
        if cache.remembers {
            write(&record, &found)?;
        }
        cache.known(link, found)
    }
}

impl WebCache {
    fn new(kept: &Path, most: Bytes, remembers: bool) -> Self {
        Self { kept: kept.to_owned(), links: kept.join("links"), most: most.0, remembers }
    }

    fn record(&self, link: &str) -> PathBuf {
        let hash = blake3::hash(link.as_bytes()).to_hex();
        self.links.join(&hash[..2]).join(&hash[2..])
    }

    /// What the cache says about an address, as long as that counts. With `reads`, an image must have the content that it had.
    fn found(&self, link: &str, reads: bool) -> Option<Found> {
        let bytes = files::read_own(&self.record(link), SMALL).ok()?;
        let found = serde_json::from_slice(&bytes).ok()?;
        let counts = match &found {
            Found::Image(content) => {
                let path = self.kept.join(content);
                let is_whole = || {
                    let bytes = files::read_own(&path, MAX_BYTES);
                    bytes.is_ok_and(|bytes| blake3::hash(&bytes).to_hex().as_str() == content)
                };
                content.bytes().all(|byte| byte.is_ascii_hexdigit()) && path.is_file() && (!reads || is_whole())
            }
            Found::Nothing { .. } if !self.remembers => false,
            Found::Nothing { passing, at, .. } => !passing || now().abs_diff(*at) < RESPITE.as_secs(),
        };
        counts.then_some(found)
    }

    fn known(&self, link: &str, found: Found) -> Result<(PathBuf, Came)> {
        match found {
            Found::Image(content) => Ok((self.kept.join(content), Came::Cached)),
            Found::Nothing { why, passing, .. } => {
                let error = Error::new(if passing { Kind::Io } else { Kind::Data }, why);
                let error = if passing {
                    error.hint("check the network (proxies are not used for images) and run it again: what has arrived is kept")
                } else {
                    error.hint("name another image, leave the row out, or set data.bad_images: skip")
                };
                Err(bad_image(&shown(link), error))
            }
        }
    }

    /// Counts bytes that are about to be written.
    fn take_room(&self, bytes: u64) -> Result<()> {
        let path = self.links.join("total");
        let _lock = lock(&self.links.join("total.lock"))?;
        let text = files::read_own_text(&path, SMALL).unwrap_or_default();
        let total = text.trim().parse().unwrap_or(0_u64).saturating_add(bytes);
        if total > self.most {
            return Err(Error::config(format!(
                "data.image_cache_size: the images of web addresses take more than {}",
                human_bytes(self.most)
            ))
            .hint(format!("raise it, or remove {} if no run needs it", self.kept.display())));
        }
        atomic::write(&path, total.to_string().as_bytes()).map_err(|error| Error::io("write", &path, &error))
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn write(path: &Path, found: &Found) -> Result<()> {
    let text = serde_json::to_vec(found).unwrap_or_default();
    atomic::write(path, &text).map_err(|error| Error::io("write", path, &error))
}

/// Waits for a lock, which is held until the value is dropped.
fn lock(path: &Path) -> Result<File> {
    let file = files::open_to_write(path, false).map_err(|error| Error::io("open", path, &error))?;
    file.lock().map_err(|error| Error::io("lock", path, &error))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_counts_as_long_as_it_is_true() {
        let dir = tempfile::tempdir().unwrap();
        let images = |remembers| WebCache::new(dir.path(), Bytes(100), remembers);
        let link = "https://example.org/a.png";
        assert_eq!(images(true).found(link, true), None);
        let record = images(true).record(link);
        fs::create_dir_all(files::parent(&record)).unwrap();
        let nothing = |passing, at| Found::Nothing { why: "gone".into(), passing, at };
        for (found, counts) in [
            (nothing(false, 0), true),
            (nothing(true, now()), true),
            (nothing(true, now() - 601), false),
            (Found::Image("../../etc".into()), false),
            (Found::Image("00".into()), false), // which is not there
        ] {
            write(&record, &found).unwrap();
            assert_eq!(images(true).found(link, true).is_some(), counts, "{found:?}");
            assert_eq!(images(false).found(link, false), None, "{found:?}");
        }
        fs::write(&record, "no JSON").unwrap();
        assert_eq!(images(true).found(link, true), None);
        let content = blake3::hash(b"an image").to_hex().to_string();
        write(&record, &Found::Image(content.clone())).unwrap();
        let path = dir.path().join(&content);
        fs::write(&path, "an image").unwrap();
        assert!(images(false).found(link, true).is_some());
        fs::write(&path, "damaged").unwrap();
        assert!(images(false).found(link, true).is_none() && images(false).found(link, false).is_some());
    }

    #[test]
    fn all_images_together_have_so_much_room() {
        let dir = tempfile::tempdir().unwrap();
        let images = WebCache::new(dir.path(), Bytes(100), false);
        fs::create_dir_all(&images.links).unwrap();
        images.take_room(60).unwrap();
        images.take_room(40).unwrap();
        let error = images.take_room(1).unwrap_err();
        assert!(error.kind() == Kind::Config && error.message().contains("data.image_cache_size"), "{error}");
    }
}
