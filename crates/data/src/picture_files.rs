//! Pictures in files.
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::general_purpose::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::archive::{self, Archives};
use super::inputs::Inputs;
use super::pictures::{AMONG_OTHERS, PictureLook, PictureRows, Pictures, bad_image};
use super::row::{Form, PROBE_ROWS};
use super::source;
use tunesmith_base::error::{Error, Kind, Result};
use tunesmith_base::files::{self, atomic};
use tunesmith_config::Config;
use tunesmith_config::vision::{ChatImages, VisionArch};
use tunesmith_vision::{Layout, MAX_BYTES, Picture, Pixels, Processor};

/// The longest side of a thumbnail, in pixels.
const THUMBNAIL: u32 = 256;

/// The name of the file, and whether the picture stands with others.
fn split(name: &str) -> (&str, bool) {
    name.strip_suffix(AMONG_OTHERS).map_or((name, false), |file| (file, true))
}

/// Whether one of the first rows of any file of a configuration shows a picture.
///
/// # Errors
/// A file cannot be read.
pub fn shows_pictures(config: &Config) -> Result<bool> {
    let inputs = Inputs::of(config)?;
    let mut shows = false;
    for path in inputs.files() {
        source::read(path, Some(Form::Text), Some(PROBE_ROWS), &Cell::new(0), &mut |row, _| {
            shows |= row.shows_picture();
            Ok(())
        })?;
    }
    Ok(shows)
}

/// Reads the pictures of a model's rows from a folder.
#[derive(Debug)]
pub struct PictureFiles {
    processor: Processor,
    vision: VisionArch,
    /// The folder, without links; or an archive, or a folder in one.
    folder: PathBuf,
    archives: Archives,
    /// Where pictures go that rows contain.
    kept: PathBuf,
    /// Whether pictures are decoded when rows are read.
    decodes: bool,
}

impl PictureFiles {
    /// For names relative to `folder`. What rows contain themselves is written to `cache`. With `decodes`, a damaged picture is
    /// found when rows are read, not when it is needed.
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
        Ok(Self { processor, vision, folder, archives, kept: cache.join("pictures"), decodes })
    }

    /// The bytes of a picture.
    fn read(&self, file: &str) -> Result<Vec<u8>> {
        let (file, _) = split(file);
        let path = Path::new(file);
        let whole = self.folder.join(path);
        let failed = |error: std::io::Error| Error::io("read", &whole, &error).with_kind(Kind::Data);
        let member = archive::split(&whole);
        if path.is_relative() {
            let inside = match &member {
                // A folder of an archive has no links; names that lead out of it are no member's.
                Some((archive, _)) if self.folder.starts_with(archive) => true,
                Some((archive, _)) => fs::canonicalize(archive).map_err(failed)?.starts_with(&self.folder),
                None => fs::canonicalize(&whole).map_err(failed)?.starts_with(&self.folder),
            };
            if !inside {
                return Err(Error::data(format!("it leads out of the folder of pictures {}", self.folder.display()))
                    .hint("set data.image_dir, or name pictures elsewhere by their whole path"));
            }
        }
        if let Some((archive, name)) = member {
            return self.archives.read(&archive, &name, MAX_BYTES);
        }
        files::read(&whole, MAX_BYTES).map_err(failed)
    }

    /// How a picture of this name and size is cut, and the hash of what its features depend on, given its file's.
    ///
    /// # Errors
    /// [`tunesmith_base::Kind::Data`]: the processor refuses such a picture.
    pub fn cut(&self, file: &str, width: u32, height: u32, content: String) -> Result<(Layout, String)> {
        let (_, several) = split(file);
        let content = if several { format!("{content} among others") } else { content };
        Ok((self.processor.layout(width, height, several)?, content))
    }

    /// All that a picture's pixels depend on besides its file.
    pub fn processing(&self) -> String {
        format!("{:?}", self.processor)
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
        if self.vision.any_res.is_some() {
            let tiles = layout.tiles.iter().map(|tile| (tile.rows, tile.columns));
            let rows = self.vision.rows(tiles, layout.joined.as_ref());
            return Ok(PictureRows { tiles: vec![rows], split: None });
        }
        let tiles = layout.tiles.iter().map(|tile| self.vision.tile_rows(tile.rows, tile.columns)).collect();
        Ok(PictureRows { tiles, split: layout.split })
    }
}

impl Pictures for PictureFiles {
    fn keep(&self, name: String) -> Result<String> {
        let Some(data) = name.strip_prefix("data:") else { return Ok(name) };
        let coded = data.split_once(";base64,").map(|(_, coded)| coded);
        let bytes = coded.and_then(base64).ok_or_else(|| {
            bad_image("in the row", Error::data("expected data:image/png;base64,…, and base64 behind the comma"))
        })?;
        let path = self.kept.join(blake3::hash(&bytes).to_hex().as_str());
        if !path.exists() {
            fs::create_dir_all(&self.kept).map_err(|error| Error::io("create", &self.kept, &error))?;
            atomic::write(&path, &bytes).map_err(|error| Error::io("write", &path, &error))?;
        }
        Ok(path.display().to_string())
    }

    fn among_others(&self, name: String) -> String {
        if self.processor.cuts_alone() { format!("{name}{AMONG_OTHERS}") } else { name }
    }

    fn rows(&self, file: &str) -> Result<PictureRows> {
        self.layout(file).map_err(|error| bad_image(split(file).0, error))
    }

    fn pixels(&self, file: &str) -> Result<Arc<Pixels>> {
        let read = || self.processor.pixels(&Picture::decode(&self.read(file)?)?, split(file).1);
        read().map(Arc::new).map_err(|error| bad_image(split(file).0, error))
    }

    fn look(&self, file: &str) -> Result<PictureLook> {
        let read = || {
            let bytes = self.read(file)?;
            let (width, height) = Picture::size(&bytes)?;
            Ok(PictureLook { content: blake3::hash(&bytes).to_hex().to_string(), width, height })
        };
        read().map_err(|error| bad_image(split(file).0, error))
    }

    fn thumbnail(&self, file: &str) -> Result<String> {
        let small = || Picture::decode(&self.read(file)?)?.thumbnail(THUMBNAIL);
        let png = small().map_err(|error| bad_image(split(file).0, error))?;
        Ok(format!("data:image/png;base64,{}", STANDARD.encode(png)))
    }

    fn chat(&self) -> Option<ChatImages> {
        self.vision.chat
    }

    fn key(&self) -> String {
        let VisionArch { connector, encoder, chat, any_res, .. } = &self.vision;
        let prefix = encoder.prefix_tokens() * usize::from(!encoder.feature.drop_prefix);
        let (processor, folder, side) = (&self.processor, self.folder.display(), connector.side());
        let lines = any_res.as_ref().map_or_else(String::new, |any_res| format!(" {any_res:?}"));
        format!("{processor:?} {folder} {side} {prefix} {chat:?} {}{lines}", self.decodes)
    }
}

/// The bytes of base64 text, of either alphabet, with or without padding and line breaks; `None` if it is none.
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
    }

    #[test]
    fn a_picture_that_is_missing_damaged_or_outside_is_refused_with_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = fs::read(golden("pixels/rgb.png")).unwrap();
        fs::write(dir.path().join("cut.png"), &bytes[..bytes.len() / 2]).unwrap();
        fs::write(dir.path().join("text.png"), "no picture").unwrap();
        fs::write(dir.path().join("empty.png"), "").unwrap();
        symlink(golden("pixels/rgb.png"), dir.path().join("link.png")).unwrap();
        // That a file is cut off shows without decoding it.
        assert!(files(dir.path(), false).rows("cut.png").is_err());
        let files = files(dir.path(), true);
        for (name, part) in [
            ("none.png", "No such file"),
            ("cut.png", "is cut off"),
            ("text.png", "no picture"),
            ("empty.png", "an empty file"),
            ("link.png", "leads out of the folder"),
            ("../a.png", ""),
        ] {
            let error = files.rows(name).unwrap_err();
            assert_eq!(error.kind(), Kind::Data, "{error}");
            assert!(
                error.message().starts_with(&format!("picture {name}: ")) && error.message().contains(part),
                "{error}"
            );
        }
    }
}
