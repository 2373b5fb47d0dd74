//! The images of a run, as pixels or as features that have been computed.
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use super::ahead::Ahead;
use super::feature_maker::FeatureMaker;
use super::picture_identity::Identity;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::words::count;
use tunesmith_config::vision::{ChatImages, Features, VisionArch};
use tunesmith_data::{Came, PictureFiles, PictureLook, PicturePlaces, PictureRows, Pictures, WorldRows, split_world};
use tunesmith_model::feature_cache::FeatureCache;
use tunesmith_vision::{Layout, Pixels};

/// The pictures of a run: read from their files, or the features of them that have been computed.
#[derive(Debug)]
pub struct RunPictures {
    pub(crate) source: Arc<PictureSource>,
    /// The images of the next step, which threads are reading.
    ahead: Mutex<Option<Arc<Ahead>>>,
    note: Mutex<Note>,
}

/// The note about damaged features, which is reported once in a run.
#[derive(Debug, Default)]
enum Note {
    #[default]
    Nothing,
    New(String),
    Said,
}

/// Reads images from their files, or their features once these are computed.
#[derive(Debug)]
pub(crate) struct PictureSource {
    pub files: Arc<PictureFiles>,
    pub computed: OnceLock<Computed>,
}

/// The cached features of a run's images.
#[derive(Debug)]
pub(crate) struct Computed {
    pub arch: Arc<VisionArch>,
    pub features: Features,
    /// The identity of each image, by its name in the data.
    pub pictures: BTreeMap<String, Identity>,
    /// The features, and what computes damaged ones again; `None` where only sizes matter: features are then zeros.
    pub cached: Option<(RwLock<FeatureCache>, FeatureMaker)>,
}

impl RunPictures {
    /// Reads the pictures of these files; until their features are computed, it gives their pixels.
    pub fn new(files: PictureFiles) -> Self {
        let source = PictureSource { files: Arc::new(files), computed: OnceLock::new() };
        Self { source: Arc::new(source), ahead: Mutex::new(None), note: Mutex::default() }
    }

    /// The note about damaged features, if there is one and it was not taken yet.
    pub fn take_note(&self) -> Option<String> {
        let mut note = self.note.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *note {
            Note::New(text) => {
                let text = std::mem::take(text);
                *note = Note::Said;
                Some(text)
            }
            Note::Nothing | Note::Said => None,
        }
    }
}

impl PictureSource {
    fn pixels(&self, file: &str) -> Result<Arc<Pixels>> {
        match self.computed.get() {
            Some(computed) => computed.pixels(&self.files, file).map(Arc::new),
            None => self.files.pixels(file),
        }
    }
}

impl Pictures for RunPictures {
    fn keep(&self, name: String) -> Result<String> {
        self.source.files.keep(name)
    }

    fn is_remote(&self, name: &str) -> bool {
        self.source.files.is_remote(name)
    }

    fn fetch(&self, name: &str) -> Result<Option<Came>> {
        self.source.files.fetch(name)
    }

    fn is_lost(&self, name: &str) -> bool {
        self.source.files.is_lost(name)
    }

    fn file_state(&self, name: &str) -> Option<String> {
        self.source.files.file_state(name)
    }

    fn among_others(&self, name: String) -> String {
        self.source.files.among_others(name)
    }

    fn rows(&self, file: &str) -> Result<PictureRows> {
        self.source.files.rows(file)
    }

    fn pixels(&self, file: &str) -> Result<Arc<Pixels>> {
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match ahead.and_then(|ahead| ahead.take(file)) {
            Some(pixels) => Ok(pixels),
            None => self.source.pixels(file),
        }
    }

    fn read_ahead(&self, files: Vec<String>) {
        // A step computes on all threads at the same time. Half as many readers keep up with it.
        let threads = tunesmith_ops::par::threads().div_ceil(2);
        let source = Arc::clone(&self.source);
        let next = Ahead::of(files, threads, Arc::new(move |file| source.pixels(file)));
        let before = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).replace(Arc::new(next));
        drop(before);
    }

    fn mend(&self, files: &[&str]) -> Result<bool> {
        let Some(computed) = self.source.computed.get() else { return Ok(false) };
        let Some(what) = computed.mend(&self.source.files, files)? else { return Ok(false) };
        let mut note = self.note.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*note, Note::Nothing) {
            *note = Note::New(format!("{what}: damaged features are computed again"));
        }
        Ok(true)
    }

    fn shown_in(&self, places: PicturePlaces) {
        self.source.files.shown_in(places);
    }

    fn check_rows(&self, file: &str, pixels: &Pixels, rows: usize) -> Result<()> {
        self.source.files.check_rows(file, pixels, rows)
    }

    fn look(&self, file: &str) -> Result<PictureLook> {
        self.source.files.look(file)
    }

    fn thumbnail(&self, file: &str) -> Result<String> {
        self.source.files.thumbnail(file)
    }

    fn chat(&self) -> Option<ChatImages> {
        self.source.files.chat()
    }

    fn start_token(&self) -> Option<u32> {
        self.source.files.start_token()
    }

    fn world(&self) -> Option<WorldRows> {
        self.source.files.world()
    }

    fn key(&self) -> String {
        self.source.files.key()
    }
}

impl Computed {
    fn identity(&self, files: &PictureFiles, file: &str) -> Result<Cow<'_, Identity>> {
        match self.pictures.get(file) {
            Some(picture) => Ok(Cow::Borrowed(picture)),
            None => Identity::of(files, file).map(Cow::Owned),
        }
    }

    fn pixels(&self, files: &PictureFiles, file: &str) -> Result<Pixels> {
        let picture = self.identity(files, file)?;
        let numbers = picture.numbers(&self.arch, self.features);
        let patches = match &self.cached {
            Some((cache, _)) => cache.read().unwrap_or_else(PoisonError::into_inner).read(&picture.content, numbers)?,
            None => vec![0.0; numbers],
        };
        let Layout { tiles, joined, .. } = picture.into_owned().layout;
        Ok(Pixels { patches, tiles, joined, world: split_world(file).1 })
    }

    /// Computes the features of `files` again where the cache cannot read them. Returns what was damaged, in words, or `None`.
    fn mend(&self, source: &Arc<PictureFiles>, files: &[&str]) -> Result<Option<String>> {
        let Some((cache, maker)) = &self.cached else { return Ok(None) };
        let mut cache = cache.write().unwrap_or_else(PoisonError::into_inner);
        let mut damaged = BTreeMap::new();
        for &file in files {
            let picture = self.identity(source, file)?;
            if cache.read(&picture.content, picture.numbers(&self.arch, self.features)).is_err() {
                damaged.insert(picture.content.clone(), (file, picture));
            }
        }
        if damaged.is_empty() {
            return Ok(None);
        }
        let what = format!("{}: damaged features of {}", cache.dir().display(), count(damaged.len(), "image"));
        let mut mend = || {
            for (content, (file, _)) in &damaged {
                if Identity::of(source, file)?.content != *content {
                    let changed = Error::data("the file has changed since the run began")
                        .hint("put the file back that the run began with, or start the run again");
                    return Err(source.located(file, changed));
                }
            }
            let pictures: Vec<_> = damaged.values().map(|(file, picture)| (*file, &**picture)).collect();
            maker.mend(source, &pictures, &mut cache)
        };
        mend().map_err(|error: Error| {
            match error.kind() {
                Kind::Memory => error.hint("tunesmith encode computes them again, without the model in memory"),
                _ => error,
            }
            .context(format!("{what}, which cannot be computed again"))
        })?;
        Ok(Some(what))
    }
}
