//! A cache on disk for the output of a frozen image encoder, so that each image is encoded once. Images are found by
//! the content of their files.
//!
//! A folder holds the features of one encoder and one way to prepare images. Its files are safetensors of many images.
//! Each image has a tensor, named by the hash of its file, and a digest, which is checked whenever it is read. A file is
//! written under a temporary name, synced and renamed, so that it is complete or absent, and runs may share the folder.
//! Files that cannot be read are skipped, and damaged features forgotten ([`FeatureCache::forget_damaged`]): these images
//! are encoded again.
//! A process that encodes a part of the images holds a lock on it, so that ranks and runs share the work
//! ([`FeatureCache::claim`]).
//!
//! Features that a GPU has computed in bfloat16 are stored in bfloat16. Other numbers are not rounded.
use super::weights::{Dtype, Numbers, WeightFiles, write_floats, write_numbers_by};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files::atomic::AtomicFile;
use tunesmith_base::files::{self, temporary};

/// Part of the key. It changes when the form of the files does, so that older files are not read.
const VERSION: &str = "tunesmith features 1";
/// Bytes of features that are held until they are written, in one file.
const FILE_BYTES: usize = 128 << 20;
const ENDING: &str = "safetensors";
/// The ending of a file that claims images.
const CLAIM: &str = "lock";

/// The cached image features of one encoder.
#[derive(Debug)]
pub struct FeatureCache {
    dir: PathBuf,
    files: Vec<WeightFiles>,
    known: HashSet<PathBuf>,
    /// For each image (by its content): the indices of the files that hold it. An image whose features were damaged is
    /// in two files.
    places: HashMap<String, Vec<usize>>,
    /// Files that cannot be read.
    unreadable: usize,
    /// Features that are not written yet, by content.
    pending: Vec<(String, Vec<f32>)>,
    pending_bytes: usize,
}

impl FeatureCache {
    /// Opens the folder below `root` for `key`, which names everything that features depend on besides the images.
    pub fn open(root: &Path, key: &str) -> Self {
        let key = blake3::hash(format!("{VERSION} {key}").as_bytes());
        let dir = root.join("features").join(&key.to_hex()[..32]);
        temporary::sweep_folder(&dir);
        let mut cache = Self {
            dir,
            files: Vec::new(),
            known: HashSet::new(),
            places: HashMap::new(),
            unreadable: 0,
            pending: Vec::new(),
            pending_bytes: 0,
        };
        cache.remove_leftover_claims();
        cache.refresh();
        cache
    }

    /// Removes the files of claims whose process was killed. If another process is about to lock such a file, two of them
    /// may encode the same images, which costs time alone.
    fn remove_leftover_claims(&self) {
        let found = fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.path());
        for path in found.filter(|path| path.extension().is_some_and(|end| end == CLAIM)) {
            if files::open_own(&path).is_ok_and(|file| file.try_lock().is_ok()) {
                let _ = fs::remove_file(&path); // a file that stays does no harm
            }
        }
    }

    /// Finds the files that other ranks and runs have written since the last call.
    pub fn refresh(&mut self) {
        let found = fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let ours = |path: &PathBuf| path.extension().is_some_and(|end| end == ENDING) && !self.known.contains(path);
        let mut found: Vec<PathBuf> = found.filter(ours).collect();
        found.sort();
        for path in found {
            match WeightFiles::open_file(&path) {
                Ok(file) => self.add_file(file),
                Err(_) => self.unreadable += 1,
            }
            self.known.insert(path);
        }
    }

    /// Claims the right to encode the images of `part`, a name on which all who share the folder agree. Returns `None`
    /// as long as another process has the claim. A claim ends with its process. On a file system without locks,
    /// everybody gets every claim.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the folder cannot be written.
    pub fn claim(&self, part: &str) -> Result<Option<Claim>> {
        let path = self.dir.join(&blake3::hash(part.as_bytes()).to_hex()[..32]).with_extension(CLAIM);
        fs::create_dir_all(&self.dir).map_err(|error| Error::io("create", &self.dir, &error))?;
        let file = files::open_to_write(&path, true).map_err(|error| Error::io("write", &path, &error))?;
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => Ok(None),
            _ => Ok(Some(Claim { _file: file, path })),
        }
    }

    /// The folder that holds the files of features.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether the cache has the features of the image with this content.
    pub fn has(&self, content: &str) -> bool {
        self.places.contains_key(content)
    }

    /// Number of files that cannot be read.
    pub const fn unreadable(&self) -> usize {
        self.unreadable
    }

    /// Reads and checks the features of these images; the map has the number of values of each. Damaged ones are
    /// forgotten, so that they are computed again. Returns how many images were damaged.
    pub fn forget_damaged(&mut self, pictures: &BTreeMap<&str, usize>) -> usize {
        let here: Vec<(&str, usize)> = pictures
            .iter()
            .filter(|(content, _)| self.has(content))
            .map(|(&content, &count)| (content, count))
            .collect();
        let damaged: Vec<&str> = here
            .into_par_iter()
            .filter(|(content, count)| self.read(content, *count).is_err())
            .map(|(content, _)| content)
            .collect();
        for content in &damaged {
            self.places.remove(*content);
        }
        damaged.len()
    }

    /// The features of an image: `count` numbers.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: they are not there, or were damaged.
    pub fn read(&self, content: &str, count: usize) -> Result<Vec<f32>> {
        let mut problem = Error::model(format!("no features of the image {content}"));
        for &place in self.places.get(content).into_iter().flatten() {
            match read_from(&self.files[place], content, count) {
                Ok(values) => return Ok(values),
                Err(error) => problem = error,
            }
        }
        Err(problem.with_kind(tunesmith_base::Kind::Io).hint(format!(
            "start the run again: it computes the features in {} that are damaged again",
            self.dir.display()
        )))
    }

    /// Adds the features of an image. They are on the disk after [`FeatureCache::flush`] at the latest.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`].
    pub fn add(&mut self, content: String, features: Vec<f32>) -> Result<()> {
        self.pending_bytes += 4 * features.len();
        self.pending.push((content, features));
        if self.pending_bytes >= FILE_BYTES { self.flush() } else { Ok(()) }
    }

    /// Writes what was added.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`].
    pub fn flush(&mut self) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        if pending.is_empty() {
            return Ok(());
        }
        let digests: Vec<blake3::Hash> = pending.iter().map(|(_, features)| digest_of(features)).collect();
        let mut name = blake3::Hasher::new();
        let mut tensors = Vec::with_capacity(2 * pending.len());
        for ((content, features), digest) in pending.iter().zip(&digests) {
            name.update(content.as_bytes());
            let dtype = if are_bf16(features) { Dtype::BF16 } else { Dtype::F32 };
            tensors.push((content.clone(), vec![features.len()], Numbers::Fetched(features.len(), dtype)));
            tensors.push((digest_name(content), vec![32], Numbers::U8(digest.as_bytes()[..].into())));
        }
        let path = |name: &blake3::Hasher| self.dir.join(&name.finalize().to_hex()[..32]).with_extension(ENDING);
        // A file that stands for damaged features has another name, so that others who share the folder find it.
        while path(&name).exists() {
            name.update(b"again");
        }
        let path = path(&name);
        fs::create_dir_all(&self.dir).map_err(|error| Error::io("create", &self.dir, &error))?;
        let write = || {
            let mut staged = AtomicFile::create(&path)?;
            let by_content: HashMap<&str, &[f32]> =
                pending.iter().map(|(content, features)| (content.as_str(), features.as_slice())).collect();
            let fetch = |content: &str, numbers: Numbers<'_>, writer: &mut dyn Write| match numbers {
                Numbers::Fetched(_, dtype) => write_floats(writer, by_content[content], dtype),
                _ => Err(std::io::ErrorKind::NotFound.into()),
            };
            write_numbers_by(&mut staged, &tensors, &fetch, &[])?;
            staged.commit()
        };
        write().map_err(|error| Error::io("write", &path, &error))?;
        self.add_file(WeightFiles::open_file(&path)?);
        self.known.insert(path);
        Ok(())
    }

    fn add_file(&mut self, file: WeightFiles) {
        let place = self.files.len();
        for name in file.names().filter(|name| file.shape(&digest_name(name)).is_some()) {
            self.places.entry(name.to_owned()).or_default().push(place);
        }
        self.files.push(file);
    }
}

/// The features of an image in one file, checked against their digest.
fn read_from(file: &WeightFiles, content: &str, count: usize) -> Result<Vec<f32>> {
    let mut values = vec![0.0; count];
    let mut digest = [0; 32];
    file.read_into(content, &mut values)?;
    file.read_bytes_into(&digest_name(content), &mut digest)?;
    if digest != *digest_of(&values).as_bytes() {
        return Err(Error::model(format!("the features of the image {content} were damaged")));
    }
    Ok(values)
}

/// The right to encode some images, which nobody else has ([`FeatureCache::claim`]). It ends when this is dropped.
#[derive(Debug)]
pub struct Claim {
    _file: File,
    path: PathBuf,
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Whoever waits for the claim has the file open, and then finds the features.
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether bfloat16 holds all the values exactly.
fn are_bf16(values: &[f32]) -> bool {
    values.iter().all(|value| value.to_bits().trailing_zeros() >= 16)
}

fn digest_name(content: &str) -> String {
    format!("{content}.digest")
}

fn digest_of(features: &[f32]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for value in features {
        hasher.update(&value.to_le_bytes());
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_claims_a_part_and_finds_what_others_wrote() {
        let root = tempfile::tempdir().unwrap();
        let [mut one, mut two] = [(); 2].map(|()| FeatureCache::open(root.path(), "encoder"));
        let claim = one.claim("a b").unwrap().unwrap();
        assert!(two.claim("a b").unwrap().is_none() && two.claim("c").unwrap().is_some());
        one.add("a".into(), vec![1.0, 1e-9]).unwrap();
        one.add("b".into(), vec![-2.5, 0.15625, 65536.0]).unwrap();
        one.flush().unwrap();
        drop(claim);
        assert!(!two.has("a"));
        assert!(two.claim("a b").unwrap().is_some());
        two.refresh();
        assert_eq!(two.read("a", 2).unwrap(), [1.0, 1e-9]);
        assert_eq!(two.read("b", 3).unwrap(), [-2.5, 0.15625, 65536.0]);
        let file = &two.files[0];
        assert!(!file.is_bf16("a") && file.is_bf16("b"), "16 bits only where nothing is lost");
        let left = fs::read_dir(two.dir()).unwrap().map(|entry| entry.unwrap().path());
        assert_eq!(left.filter(|path| path.extension().is_some_and(|end| end == CLAIM)).count(), 0);
        // What a killed process leaves is removed, a claim that is held is not.
        let held = one.claim("d").unwrap().unwrap();
        let leftover = one.dir().join("leftover").with_extension(CLAIM);
        fs::write(&leftover, "").unwrap();
        drop(FeatureCache::open(root.path(), "encoder"));
        assert!(!leftover.exists() && held.path.exists());
    }

    #[test]
    fn what_was_added_is_there_for_the_next_run_and_damage_is_noticed() {
        let root = tempfile::tempdir().unwrap();
        let mut cache = FeatureCache::open(root.path(), "encoder");
        assert!(!cache.has("a"));
        cache.add("a".into(), vec![1.0, -2.5]).unwrap();
        cache.add("b".into(), vec![3.0]).unwrap();
        cache.flush().unwrap();
        cache.add("c".into(), vec![4.0]).unwrap();
        cache.flush().unwrap();
        assert_eq!(cache.read("c", 1).unwrap(), [4.0]);
        drop(cache);
        let cache = FeatureCache::open(root.path(), "encoder");
        assert_eq!(cache.read("a", 2).unwrap(), [1.0, -2.5]);
        assert!(cache.read("a", 3).is_err() && cache.read("d", 1).is_err());
        assert!(!FeatureCache::open(root.path(), "other").has("a"));
        let mut files: Vec<_> = fs::read_dir(cache.dir()).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort_by_key(|path| fs::metadata(path).unwrap().len());
        // The larger file holds a and b: one bit of their numbers, then the whole end.
        let mut bytes = fs::read(&files[1]).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[header + 1] ^= 1;
        fs::write(&files[1], &bytes).unwrap();
        let mut cache = FeatureCache::open(root.path(), "encoder");
        let pictures = [("a", 2), ("b", 1), ("c", 1)];
        let damaged: Vec<_> = pictures.into_iter().filter(|&(name, count)| cache.read(name, count).is_err()).collect();
        let [(name, count)] = damaged[..] else { panic!("{damaged:?}") };
        assert!(cache.read(name, count).unwrap_err().message().contains("damaged"));
        // What is damaged is computed again, and found by others; the rest stays.
        let mut others = FeatureCache::open(root.path(), "encoder");
        assert_eq!(cache.forget_damaged(&pictures.into()), 1);
        assert!(!cache.has(name) && pictures.iter().filter(|(name, _)| cache.has(name)).count() == 2);
        cache.add(name.into(), vec![7.0; count]).unwrap();
        cache.flush().unwrap();
        others.refresh();
        for cache in [cache, others, FeatureCache::open(root.path(), "encoder")] {
            assert_eq!(cache.read(name, count).unwrap(), vec![7.0; count]);
            assert!(pictures.iter().all(|&(name, count)| cache.read(name, count).is_ok()));
        }
        fs::write(&files[1], &bytes[..bytes.len() - 1]).unwrap();
        let cache = FeatureCache::open(root.path(), "encoder");
        let other = if name == "a" { "b" } else { "a" };
        assert!(!cache.has(other) && cache.has(name) && cache.has("c"), "a file that is cut off is passed over");
        assert_eq!(cache.unreadable(), 1);
    }
}
