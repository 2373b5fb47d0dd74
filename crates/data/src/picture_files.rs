//! Reads the pictures of rows from files: in the folder of images, in tar and zip archives, in the cache of `data:`
//! URIs, and in the cache of web addresses. [`PictureFiles`] implements [`Pictures`].
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::alphabet;
use base64::engine::general_purpose::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::archive::{self, Archives};
use super::inputs::Inputs;
use super::picture_places::PicturePlaces;
use super::picture_texts::PictureRows;
use super::pictures::{AMONG_OTHERS, PictureLook, Pictures, WorldRows, bad_image, split_world};
use super::row::PROBE_ROWS;
use super::row_images::{NO_IMAGE, OR_FILE};
use super::source::{self, Place};
use super::web_address::{Came, is_link, shown};
use super::web_images::WebImages;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::files::{self, atomic};
use tunesmith_config::vision::{ChatImages, VisionArch};
use tunesmith_config::{Bytes, Config};
use tunesmith_vision::{Layout, MAX_BYTES, Picture, Pixels, Processor};

/// Added to the hash of a picture's file to identify the second encoder's features of it.
const SECOND: &str = " second";
/// The longest side of a thumbnail, in pixels.
const THUMBNAIL: u32 = 256;

/// The name of the file without its marks, and whether the picture stands with others in a chat.
fn split(name: &str) -> (&str, bool) {
    let (name, _) = split_world(name);
    name.strip_suffix(AMONG_OTHERS).map_or((name, false), |file| (file, true))
}

/// Where a configuration shows its first picture: the file and line of the first such row among the first rows of each
/// training, validation and test file. `None` if none of these rows shows a picture.
///
/// # Errors
/// A file cannot be read.
pub fn first_picture(config: &Config) -> Result<Option<Place>> {
    let inputs = Inputs::of(config)?;
    let mut first = None;
    for input in inputs.train.iter().chain(&inputs.validation).chain(&inputs.test) {
        for path in &input.paths {
            source::read(path, input.format, Some(PROBE_ROWS), &Cell::new(0), &mut |row, forms| {
                let place = row.place.clone();
                if first.is_none() && row.shows_picture(forms) {
                    first = Some(place);
                }
                Ok(())
            })?;
        }
    }
    Ok(first)
}

/// The names of the pictures of each row that shows some, among the first rows of each training file. Rows and files
/// that cannot be read are left out.
pub fn first_pictures(config: &Config) -> Vec<Vec<String>> {
    let Ok(inputs) = Inputs::of(config) else { return Vec::new() };
    let mut rows = Vec::new();
    for (path, format) in inputs.train.iter().flat_map(|input| input.paths.iter().map(|path| (path, input.format))) {
        // An error only ends the file: the rows before it are used.
        let _ = source::read(path, format, Some(PROBE_ROWS), &Cell::new(0), &mut |row, forms| {
            if row.clone().shows_picture(forms)
                && let Ok(row) = row.parse(forms)
            {
                rows.push(row.into_images());
            }
            Ok(())
        });
    }
    rows
}

/// Reads the pictures that a run's rows name, and prepares them for the vision encoder.
#[derive(Debug)]
pub struct PictureFiles {
    processor: Processor,
    /// Prepares pictures for the second encoder; `None` without one.
    world: Option<Processor>,
    vision: VisionArch,
    /// The folder of images as a real path; or an archive, or a folder in an archive.
    folder: PathBuf,
    archives: Archives,
    /// The cache folder for pictures from `data:` URIs and web addresses. Files are named by the hash of their content.
    kept: PathBuf,
    /// Fetches pictures of web addresses; `None` if rows may not name any (`data.allow_image_urls`).
    web: Option<WebImages>,
    /// Whether pictures are decoded as soon as rows are read, so that damaged ones are found then
    /// (`data.bad_images: skip`).
    decodes: bool,
    /// Where the rows are that show the pictures, once these rows were read.
    places: Mutex<PicturePlaces>,
}

impl PictureFiles {
    /// Reads relative names from `folder`. Writes the pictures that rows contain as `data:` URIs to `cache`. With
    /// `decodes`, damaged pictures are found when the rows are read, and not first in training.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Io`]: the folder does not exist.
    pub fn new(processor: Processor, vision: VisionArch, folder: &Path, cache: &Path, decodes: bool) -> Result<Self> {
        let real = |path: &Path| fs::canonicalize(path).map_err(|error| Error::io("open", path, &error));
        let folder = match archive::split(folder) {
            Some((archive, inner)) => real(&archive)?.join(inner),
            None => real(folder)?,
        };
        let archives = Archives::default();
        // Absolute, because relative names of pictures belong to `folder`.
        let kept = std::path::absolute(cache).map_err(|error| Error::io("open", cache, &error))?.join("pictures");
        let places = Mutex::default();
        Ok(Self { processor, world: None, vision, folder, archives, kept, web: None, decodes, places })
    }

    /// Adds a second vision encoder, for which `processor` prepares pictures.
    #[must_use]
    pub fn with_world(self, processor: Processor) -> Self {
        Self { world: Some(processor), ..self }
    }

    /// Allows web addresses. At most `most` bytes of their pictures are kept on disk.
    ///
    /// # Errors
    /// [`Kind::Config`]: this build has no web client.
    pub fn with_web(self, most: Bytes) -> Result<Self> {
        Ok(Self { web: Some(WebImages::new(&self.kept, most, self.decodes)?), ..self })
    }

    /// Splits a name as [`Pictures::keep`] takes it into the web address, if the picture must be fetched, and the name
    /// of its file. A name with both (see [`OR_FILE`]) is fetched only if the file cannot be read.
    fn source<'a>(&self, name: &'a str) -> (Option<&'a str>, &'a str) {
        match name.split_once(OR_FILE) {
            Some((link, file)) if is_link(link) => {
                ((self.web.is_some() && self.read(file).is_err()).then_some(link), file)
            }
            _ => (is_link(name).then_some(name), name),
        }
    }

    /// The file of the picture at a web address, fetched if necessary. `reads` is as in [`WebImages::fetch`].
    fn web_image(&self, link: &str, reads: bool) -> Result<(PathBuf, Came)> {
        let web = self.web.as_ref().ok_or_else(|| {
            Error::data(format!("the image is a web address ({})", shown(link))).hint(
                "set data.allow_image_urls: true to fetch such images before the run, or download them and name the files",
            )
        })?;
        web.fetch(link, reads, &|bytes| {
            if self.decodes { Picture::decode(bytes).map(drop) } else { Picture::size(bytes).map(drop) }
        })
    }

    /// The processor of the encoder for which this name stands.
    fn processor(&self, file: &str) -> &Processor {
        self.world.as_ref().filter(|_| split_world(file).1).unwrap_or(&self.processor)
    }

    /// The bytes of a picture's file.
    fn read(&self, file: &str) -> Result<Vec<u8>> {
        let (file, _) = split(file);
        let path = Path::new(file);
        if let Some(link) = self.web.as_ref().filter(|_| file.contains(OR_FILE) || is_link(file)) {
            // The name has not gone through [`Pictures::keep`] yet. A plan asks for the size of such pictures.
            let fetched = self.source(file).0.and_then(|address| link.cached(address));
            let fetched = fetched.ok_or_else(|| Error::data("it was not fetched yet"))?;
            return files::read_own(&fetched, MAX_BYTES).map_err(|error| Error::io("read", &fetched, &error));
        }
        let whole = self.folder.join(path);
        let failed = |error: std::io::Error| Error::io("read", &whole, &error).with_kind(Kind::Data);
        let member = archive::split(&whole);
        if path.is_relative() {
            let inside = match &member {
                // Folders in an archive have no links, and no member's name leads out of the archive.
                Some((archive, _)) if self.folder.starts_with(archive) => true,
                Some((archive, _)) => fs::canonicalize(archive).map_err(failed)?.starts_with(&self.folder),
                None => fs::canonicalize(&whole).map_err(failed)?.starts_with(&self.folder),
            };
            if !inside {
                return Err(Error::data(format!("it leads out of the folder of images {}", self.folder.display()))
                    .hint("set data.image_dir, or name images elsewhere by their whole path"));
            }
        }
        if let Some((archive, name)) = member {
            return self.archives.read(&archive, &name, MAX_BYTES);
        }
        let bytes = files::read(&whole, MAX_BYTES).map_err(failed)?;
        // The cache names a file by the hash of its content, so a damaged copy shows.
        let name = whole.strip_prefix(&self.kept);
        if name.is_ok_and(|name| name != Path::new(blake3::hash(&bytes).to_hex().as_str())) {
            return Err(Error::data("the copy in the cache is not what the rows contain")
                .hint("remove it: the rows have it, or its address"));
        }
        Ok(bytes)
    }

    /// How the processor divides a picture of this size into tiles, and a key of its features: `content`, the hash of
    /// its file, plus what the picture is used for.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the processor refuses a picture of this size.
    pub fn cut(&self, file: &str, width: u32, height: u32, content: String) -> Result<(Layout, String)> {
        let (_, several) = split(file);
        let content = match (split_world(file).1, several) {
            (true, _) => format!("{content}{SECOND}"),
            (false, true) => format!("{content} among others"),
            (false, false) => content,
        };
        let layout = self.processor(file).layout(width, height, several)?;
        if !split_world(file).1 {
            layout.tiles.iter().try_for_each(|tile| self.vision.check_tile(tile.rows, tile.columns))?;
        }
        Ok((layout, content))
    }

    /// Everything that a picture's pixels depend on besides its file. Part of the key of cached features.
    pub fn processing(&self) -> String {
        let world = self.world.as_ref().map_or_else(String::new, |world| format!(" {world:?}"));
        format!("{:?}{world}", self.processor)
    }

    /// Adds the picture's file and the rows that show it to an error that occurs after these rows were read.
    #[must_use]
    pub fn located(&self, file: &str, error: Error) -> Error {
        let name = split(file).0;
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner).clone();
        places.locate(name, bad_image(name, error))
    }

    fn layout(&self, file: &str) -> Result<PictureRows> {
        let bytes = self.read(file)?;
        let (width, height) = if self.decodes {
            let picture = Picture::decode(&bytes)?;
            (picture.width, picture.height)
        } else {
            Picture::size(&bytes)?
        };
        let layout = self.processor.layout(width, height, split(file).1)?;
        layout.tiles.iter().try_for_each(|tile| self.vision.check_tile(tile.rows, tile.columns))?;
        if self.vision.start_token.is_some() {
            return Ok(PictureRows { tiles: vec![1], split: None, columns: 1 });
        }
        let columns = layout.tiles.first().map_or(0, |tile| tile.columns / self.vision.connector.side());
        if self.vision.any_res.is_some() {
            let tiles = layout.tiles.iter().map(|tile| (tile.rows, tile.columns));
            let rows = self.vision.rows(tiles, layout.joined.as_ref());
            return Ok(PictureRows { tiles: vec![rows], split: None, columns });
        }
        let tiles = layout.tiles.iter().map(|tile| self.vision.tile_rows(tile.rows, tile.columns)).collect();
        Ok(PictureRows { tiles, split: layout.split, columns })
    }
}

impl Pictures for PictureFiles {
    fn keep(&self, name: String) -> Result<String> {
        let name = match self.source(&name) {
            (Some(link), _) => return Ok(self.web_image(link, false)?.0.display().to_string()),
            (None, file) => file.to_owned(),
        };
        let Some(data) = name.strip_prefix("data:") else {
            // Control characters at the end of a name have a meaning here ([`AMONG_OTHERS`]), and others would break a
            // message into lines.
            if name.contains(char::is_control) {
                return Err(bad_image(
                    &name.escape_debug().to_string(),
                    Error::data("a control character in the name"),
                ));
            }
            return Ok(name);
        };
        if name == NO_IMAGE {
            let found = "no image in the row's bytes, expected a JPEG, PNG, WebP, GIF, BMP or TIFF file";
            return Err(bad_image("in the row", Error::data(found)));
        }
        let coded = data.split_once(";base64,").map(|(_, coded)| coded);
        let bytes = coded.and_then(base64).ok_or_else(|| {
            bad_image("in the row", Error::data("expected data:image/png;base64,…, and base64 behind the comma"))
        })?;
        let path = self.kept.join(blake3::hash(&bytes).to_hex().as_str());
        if !files::read_own(&path, MAX_BYTES).is_ok_and(|there| there == bytes) {
            fs::create_dir_all(&self.kept).map_err(|error| Error::io("create", &self.kept, &error))?;
            atomic::write(&path, &bytes).map_err(|error| Error::io("write", &path, &error))?;
        }
        Ok(path.display().to_string())
    }

    fn is_remote(&self, name: &str) -> bool {
        name.contains(OR_FILE) || is_link(name)
    }

    fn fetch(&self, name: &str) -> Result<Option<Came>> {
        self.source(name).0.map(|link| self.web_image(link, true).map(|(_, came)| came)).transpose()
    }

    fn is_lost(&self, name: &str) -> bool {
        let path = Path::new(split(name).0);
        path.starts_with(&self.kept) && !path.exists()
    }

    fn file_state(&self, name: &str) -> Option<String> {
        let whole = self.folder.join(split(name).0);
        let file = archive::split(&whole).map_or(whole, |(archive, _)| archive);
        let metadata = fs::metadata(&file).ok().filter(|_| !file.starts_with(&self.kept))?;
        Some(format!("{} {:?}", metadata.len(), metadata.modified().ok()))
    }

    fn among_others(&self, name: String) -> String {
        if self.processor.cuts_alone() { format!("{name}{AMONG_OTHERS}") } else { name }
    }

    fn rows(&self, file: &str) -> Result<PictureRows> {
        self.layout(file).map_err(|error| bad_image(split(file).0, error))
    }

    fn pixels(&self, file: &str) -> Result<Arc<Pixels>> {
        let read = || {
            let pixels = self.processor(file).pixels(&Picture::decode(&self.read(file)?)?, split(file).1)?;
            Ok(Pixels { world: split_world(file).1, ..pixels })
        };
        read().map(Arc::new).map_err(|error| self.located(file, error))
    }

    fn shown_in(&self, places: PicturePlaces) {
        *self.places.lock().unwrap_or_else(PoisonError::into_inner) = places;
    }

    fn check_rows(&self, file: &str, pixels: &Pixels, rows: usize) -> Result<()> {
        let now = match &self.vision.world {
            Some(world) if pixels.world => world.rows(),
            _ if self.vision.start_token.is_some() => return Ok(()),
            _ => {
                let tiles = pixels.tiles.iter().map(|tile| (tile.rows, tile.columns));
                self.vision.rows(tiles, pixels.joined.as_ref())
            }
        };
        if now == rows {
            return Ok(());
        }
        let found = format!("it takes {now} tokens, and took {rows} when the rows were read: the file was replaced");
        Err(self.located(file, Error::data(found).hint("put the file back, and start the run again")))
    }

    fn look(&self, file: &str) -> Result<PictureLook> {
        let read = || {
            let bytes = self.read(file)?;
            let (width, height) = Picture::size(&bytes)?;
            Ok(PictureLook { content: blake3::hash(&bytes).to_hex().to_string(), width, height })
        };
        read().map_err(|error| self.located(file, error))
    }

    fn thumbnail(&self, file: &str) -> Result<String> {
        let small = || Picture::decode(&self.read(file)?)?.thumbnail(THUMBNAIL);
        let png = small().map_err(|error| self.located(file, error))?;
        Ok(format!("data:image/png;base64,{}", STANDARD.encode(png)))
    }

    fn chat(&self) -> Option<ChatImages> {
        self.vision.chat
    }

    fn start_token(&self) -> Option<u32> {
        self.vision.start_token
    }

    fn world(&self) -> Option<WorldRows> {
        self.vision.world.as_ref().map(|world| WorldRows { tokens: world.tokens, rows: world.rows() })
    }

    fn key(&self) -> String {
        let VisionArch { connector, encoder, chat, any_res, start_token, .. } = &self.vision;
        let prefix = encoder.prefix_tokens() * usize::from(!encoder.feature.drop_prefix);
        let (processor, folder, side) = (&self.processor, self.folder.display(), connector.side());
        let lines = any_res.as_ref().map_or_else(String::new, |any_res| format!(" {any_res:?}"));
        let world = self.world().map_or_else(String::new, |world| format!(" {world:?}"));
        let web = if self.web.is_some() { " web" } else { "" };
        let start = start_token.map_or_else(String::new, |token| format!(" starts with {token}"));
        format!("{processor:?} {folder} {side} {prefix} {chat:?} {}{lines}{world}{web}{start}", self.decodes)
    }
}

/// Decodes base64 in the standard or the URL-safe alphabet, with or without padding and line breaks; `None` if it is
/// invalid.
fn base64(text: &str) -> Option<Vec<u8>> {
    const ANY: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let letter = |letter: char| match letter {
        '-' => Some('+'),
        '_' => Some('/'),
        '\n' | '\r' => None,
        other => Some(other),
    };
    let text: String = text.chars().filter_map(letter).collect();
    GeneralPurpose::new(&alphabet::STANDARD, ANY).decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tunesmith_config::vision::{Pairing, Processing};

    fn golden(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path)
    }

    fn files(folder: &Path, decodes: bool) -> PictureFiles {
        let settings = r#"{"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}}"#;
        fs::write(folder.join("preprocessor_config.json"), settings).unwrap();
        let pairing = Pairing { hidden_size: None, feature_layer: None, dropout: 0.0 };
        let vision = VisionArch::pair(&golden("vision/siglip/model"), &pairing, 8).unwrap();
        let processor = Processor::new(Processing::open(folder).unwrap(), vision.encoder.patch_size);
        PictureFiles::new(processor, vision, folder, &folder.join("cache"), decodes).unwrap()
    }

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYg", "foob")] {
            assert_eq!(base64(text).unwrap(), bytes.as_bytes(), "{text}");
        }
        assert_eq!(base64("_-8="), base64("/+8="));
        assert!(base64("a b").is_none());
    }

    #[test]
    fn a_picture_is_read_from_the_folder_a_whole_path_or_the_row() {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(golden("pixels/rgb.png"), dir.path().join("a.png")).unwrap();
        let files = files(dir.path(), false);
        let expected = files.pixels("a.png").unwrap();
        assert_eq!(files.rows("a.png").unwrap().tiles, [16]);
        let whole = golden("pixels/rgb.png").display().to_string();
        assert_eq!(files.pixels(&whole).unwrap(), expected);
        let coded = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7".to_owned();
        let kept = files.keep(coded.clone()).unwrap();
        assert_eq!(files.rows(&kept).unwrap().tiles, [16]);
        assert_eq!(files.keep(coded).unwrap(), kept, "the same bytes are written once");
        assert!(files.keep("data:image/png;base64,%".into()).is_err());
        for name in ["a\n.png", "a.png\0", "a.png\u{1}", "\u{1b}[2J.png"] {
            let error = files.keep(name.into()).unwrap_err();
            assert!(error.kind() == Kind::Data && error.message().contains("control character"), "{error}");
            assert!(!error.message().contains(char::is_control), "{error:?}");
        }
    }

    #[test]
    fn a_kept_picture_that_was_changed_is_refused_and_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), false);
        let coded = format!("data:image/png;base64,{}", STANDARD.encode(fs::read(golden("pixels/rgb.png")).unwrap()));
        let kept = files.keep(coded.clone()).unwrap();
        let whole = files.pixels(&kept).unwrap();
        assert!(!files.is_lost(&kept) && !files.is_lost("none.png"));
        fs::copy(golden("pixels/wide.png"), &kept).unwrap();
        let error = files.pixels(&kept).unwrap_err();
        assert!(error.kind() == Kind::Data && error.message().contains("not what the rows contain"), "{error}");
        files.keep(coded.clone()).unwrap();
        assert_eq!(files.pixels(&kept).unwrap(), whole);
        fs::remove_file(&kept).unwrap();
        assert!(files.is_lost(&kept));
        files.keep(coded).unwrap();
        assert_eq!(files.pixels(&kept).unwrap(), whole);
    }

    #[test]
    fn a_picture_that_is_missing_damaged_or_outside_is_refused_with_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = fs::read(golden("pixels/rgb.png")).unwrap();
        fs::write(dir.path().join("cut.png"), &bytes[..bytes.len() / 2]).unwrap();
        fs::write(dir.path().join("text.png"), "no image").unwrap();
        fs::write(dir.path().join("empty.png"), "").unwrap();
        symlink(golden("pixels/rgb.png"), dir.path().join("link.png")).unwrap();
        // That a file is cut off shows without decoding it.
        assert!(files(dir.path(), false).rows("cut.png").is_err());
        let files = files(dir.path(), true);
        for (name, part) in [
            ("none.png", "No such file"),
            ("cut.png", "is cut off"),
            ("text.png", "no image"),
            ("empty.png", "an empty file"),
            ("link.png", "leads out of the folder"),
            ("../a.png", ""),
        ] {
            let error = files.rows(name).unwrap_err();
            assert_eq!(error.kind(), Kind::Data, "{error}");
            assert!(
                error.message().starts_with(&format!("image {name}: ")) && error.message().contains(part),
                "{error}"
            );
        }
    }
}
