//! Fetches the images that rows name by web address (`data.allow_image_urls`), into a cache on disk that ranks and runs
//! share.
//!
//! ```text
//! pictures/HASH                      an image, named by the hash of its bytes
//! pictures/links/XX/HASH             of an address, named by its hash: which image was there, or why none was fetched
//! pictures/links/XX/lock             held while an address of this folder is fetched, so that it is fetched once
//! pictures/links/total               the bytes of all images that were fetched
//! ```
//!
//! Every file is written under another name and then renamed. An image is written before the file that names it.
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

/// The largest image that is fetched, in bytes.
const MAX_BYTES: u64 = 64 << 20;
/// The largest small file of the cache that is read, in bytes: what is known of an address, or the total.
const SMALL: u64 = 64 << 10;
/// How long an address that could not be reached is not tried again. All ranks of a run must leave out the same rows, so
/// a later rank must not have more success than an earlier one.
const RESPITE: Duration = Duration::from_secs(600);

/// What is known of a web address. It is stored as JSON in `pictures/links`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Found {
    /// An image, by the hash of its bytes.
    Image(String),
    /// No image.
    Nothing {
        why: String,
        /// Whether another attempt may succeed, as after a network error.
        passing: bool,
        /// The time of the attempt, in seconds since 1970.
        at: u64,
    },
}

/// Fetches images by web address and keeps them in a cache.
#[derive(Debug)]
pub(super) struct WebImages {
    client: WebClient,
    cache: WebCache,
}

/// The files of the cache.
#[derive(Debug)]
struct WebCache {
    /// The folder of images (`pictures`), named by their hash.
    kept: PathBuf,
    links: PathBuf,
    /// The most bytes that all fetched images may take together.
    most: u64,
    /// Whether failed attempts are remembered too (`data.bad_images: skip`). Otherwise a failure ends the run, and the
    /// next run tries again.
    remembers: bool,
}

impl WebImages {
    /// Uses the cache in the folder `kept`, for at most `most` bytes of images.
    ///
    /// # Errors
    /// [`Kind::Config`]: this build has no web client.
    pub fn new(kept: &Path, most: Bytes, remembers: bool) -> Result<Self> {
        let client = WebClient::new().map_err(|error| error.context("data.allow_image_urls"))?;
        Ok(Self { client, cache: WebCache::new(kept, most, remembers) })
    }

    /// The file of an image that was fetched before; `None` if the cache does not have it.
    pub fn cached(&self, link: &str) -> Option<PathBuf> {
        match self.cache.found(link, false)? {
            Found::Image(content) => Some(self.cache.kept.join(content)),
            Found::Nothing { .. } => None,
        }
    }

    /// The file of the image at a web address. Fetches it if the cache does not have it; with `reads`, also if the
    /// cached file is damaged. `check` refuses bytes that are not an image.
    ///
    /// # Errors
    /// As [`bad_image`], of [`Kind::Data`] or [`Kind::Io`]: the image cannot be fetched, or the bytes are not an image.
    /// [`Kind::Config`]: the cache is full, or the machine is set to be offline. [`Kind::Io`]: the cache cannot be
    /// written.
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
                // The same bytes may be in the cache already, from a `data:` URI or another address.
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

    /// What the cache knows about an address; `None` if it knows nothing or the knowledge is too old. With `reads`, an
    /// image counts only if its file still has the hash that names it.
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

    /// Adds `bytes` to the total of the cache, before they are written.
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

/// Waits for the lock of a file. The lock is held until the returned file is dropped.
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
