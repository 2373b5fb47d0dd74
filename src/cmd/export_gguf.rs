//! `tunesmith export --gguf`: a model for llama.cpp, with the image encoder of one that sees images, or an adapter.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::merge::{check_merge, output_dir};
use super::parts_args::Opened;
use super::shell_quote::quoted;
use crate::config::arch::Arch;
use crate::config::vision::VisionArch;
use crate::error::{Error, Result};
use crate::export::gguf::{self, GgufFormat, GgufVocabulary, Mmproj};
use crate::export::merge::Parts;
use crate::files::output::{Existing, OutputFile, check_no_overlap, check_output_file};
use crate::plan::human_bytes;

/// Begins the line that says why no file with the image encoder is written.
const NO_IMAGES: &str = "images          none: ";

/// What the flags of `export` say about files for llama.cpp.
pub struct GgufRequest<'a> {
    /// The type of matrices (`--gguf`).
    pub format: GgufFormat,
    /// What becomes of image encoder and connector (`--mmproj`).
    pub mmproj: &'a str,
    /// Whether only the adapter is written.
    pub adapter_only: bool,
    /// The path that the user gave.
    pub output: Option<&'a Path>,
    /// llama.cpp's name for the tokenizer's way of splitting text, if the user gave one.
    pub pre_tokenizer: Option<&'a str>,
    /// How far the merged model's logits may differ from the adapter's, relative to the largest.
    pub max_difference: f32,
    /// Whether existing files are replaced.
    pub overwrite: bool,
}

/// Writes the files; returns what to print, and each file with the name that it has in a repository. `name` is the model's.
///
/// # Errors
/// Everything that reading and writing can fail with.
pub fn write(request: &GgufRequest<'_>, mut opened: Opened, name: &str) -> Result<(String, Vec<(String, PathBuf)>)> {
    if opened.parts.arch.reads_images_across() {
        return Err(Error::model("--gguf: llama.cpp has no vision-encoder-decoder models, whose decoder reads images by cross-attention")
            .hint("caption with tunesmith (tunesmith infer --image), or write it for Transformers: --hf, or --peft for the adapter"));
    }
    let format = request.format;
    let kind = format.word();
    let output = request.output.map(|output| with_extension(output, "gguf"));
    let target = |default: &str| output_dir(output.as_deref(), opened.config.as_ref(), default);
    if request.adapter_only {
        let claimed = claim(request, &target(&default_name(name, kind, true))?, &opened.reads)?;
        return write_adapter(opened, claimed, format);
    }
    let path = target(&default_name(name, kind, false))?;
    let (mmproj, mut text) = images(request, &opened)?;
    let path = claim(request, &path, &opened.reads)?;
    let beside = match &mmproj {
        Some((_, format)) => {
            let path = beside(&path, request.output.is_none().then_some((name, format.word())));
            Some(claim(request, &path, &opened.reads)?)
        }
        None => None,
    };
    let arch = &opened.parts.arch;
    let vocabulary = GgufVocabulary::load(&opened.tokenizer, arch, opened.template.as_deref(), request.pre_tokenizer)?;
    if let Some(remark) = vocabulary.remark() {
        let _ = writeln!(text, "tokenizer       {remark}"); // a String never fails
    }
    let sees = seen(&opened.parts);
    let mut model = match opened.top.take() {
        Some(top) => {
            let (checked, model) = check_merge(opened.parts, top, request.max_difference)?;
            text += &checked;
            model.model
        }
        None => opened.parts.merged(None)?,
    };
    model.arch.vision = sees;
    let bytes = gguf::write_model(&path, &model, &vocabulary, name, format)?;
    let _ = writeln!(text, "file            {} ({})", path.display(), human_bytes(bytes));
    let mut command = format!("llama-cli -m {}", shown(&path));
    let mut files = vec![path];
    if let (Some((mmproj, format)), Some(path)) = (mmproj, beside) {
        let bytes = gguf::write_mmproj(&path, &model, &mmproj, name, format)?;
        let _ = writeln!(text, "images          {} ({})", path.display(), human_bytes(bytes));
        if let Some(remark) = mmproj.remark() {
            let _ = writeln!(text, "note            {remark}");
        }
        command = format!("llama-mtmd-cli -m {} --mmproj {} --image IMAGE", shown(&files[0]), shown(&path));
        files.push(path);
    }
    let _ = writeln!(text, "use it          {command}");
    Ok((text, files.into_iter().map(named).collect()))
}

/// The image encoder and connector to write, with their format, or `None`; and a line to print about them, which may be
/// empty.
fn images(request: &GgufRequest<'_>, opened: &Opened) -> Result<(Option<(Mmproj, GgufFormat)>, String)> {
    let (parts, word) = (&opened.parts, request.mmproj.to_lowercase());
    let (asked, format) = match word.as_str() {
        "none" => return Ok((None, String::new())),
        "auto" => (false, request.format.beside()),
        "f16" => (true, GgufFormat::F16),
        "q8_0" => (true, GgufFormat::Q8_0),
        "f32" => (true, GgufFormat::F32),
        other => {
            return Err(Error::config(format!("--mmproj {other}: expected auto, none, f16, q8_0 or f32"))
                .hint("llama.cpp's llama-quantize makes other types"));
        }
    };
    if parts.arch.wrapper.is_none() && parts.arch.vision.is_none() {
        return if asked {
            Err(Error::config(format!("--mmproj {word}: this model reads no images")).hint("leave it out"))
        } else {
            Ok((None, String::new()))
        };
    }
    match Mmproj::of(&parts.arch, &parts.base, &parts.weights) {
        Ok(mmproj) => Ok((Some((mmproj, format)), String::new())),
        Err(error) if asked => Err(error),
        Err(_) if parts.arch.vision.as_ref().is_some_and(|vision| vision.folder.is_some()) && opened.top.is_some() => {
            Err(Error::config("--gguf: llama.cpp cannot see images with a text model paired with an image encoder (vision.encoder)")
                .hint("--hf writes all of it for Transformers; --mmproj none writes the text model alone, which sees no images"))
        }
        Err(_) if parts.arch.vision.as_ref().is_some_and(|vision| vision.world.is_some()) && opened.top.is_some() => {
            Err(Error::config("--gguf: llama.cpp has no second encoder (vision.world)")
                .hint("--hf writes all of it for scripts/load_vision.py; --mmproj none writes the language model alone"))
        }
        // Leaving the encoder out would lose what the adapter has trained of it.
        Err(error) if parts.arch.vision.is_some() && opened.top.is_some() => {
            let why = error.message();
            Err(Error::config(format!("--gguf: the adapter changes the image encoder or the connector, and {why}"))
                .hint("--mmproj none writes the language model alone; --hf writes all of it for Transformers"))
        }
        Err(error) => {
            let hint = error.hint_text().map(|hint| format!(" ({hint})")).unwrap_or_default();
            Ok((None, format!("{NO_IMAGES}{}{hint}\n", error.message())))
        }
    }
}

/// The image encoder of a model, if its description can be read. The language model's file depends on it too: llama.cpp has
/// another architecture for a model whose positions have several axes.
fn seen(parts: &Parts) -> Option<Arc<VisionArch>> {
    let Arch { vision, wrapper, hidden_size, .. } = &parts.arch;
    let read = || wrapper.and_then(|_| VisionArch::of_model(&parts.base, *hidden_size).ok()).map(Arc::new);
    vision.clone().or_else(read)
}

fn write_adapter(mut opened: Opened, path: PathBuf, format: GgufFormat) -> Result<(String, Vec<(String, PathBuf)>)> {
    let top = opened.top.take().ok_or_else(no_adapter)?;
    if opened.parts.arch.vision.is_some() {
        return Err(Error::config(
            "--adapter-only: the adapter changes the image encoder or the connector, on which llama.cpp's --lora has no effect",
        )
        .hint("export the merged model: leave --adapter-only out"));
    }
    opened.parts.arch.vision = seen(&opened.parts);
    let bytes = gguf::write_adapter(&path, &opened.parts.arch, &top, format)?;
    let text = format!(
        "file            {} ({})\nuse it          llama-cli -m BASE.gguf --lora {}\n",
        path.display(),
        human_bytes(bytes),
        shown(&path)
    );
    Ok((text, vec![named(path)]))
}

/// An error: only an adapter is to be written, and there is none.
pub fn no_adapter() -> Error {
    Error::config("no adapter is named").hint("name one: --adapter DIR")
}

/// Checks that the file `path` may be written, before all the work. Returns the path to write to.
fn claim(request: &GgufRequest<'_>, path: &Path, reads: &[PathBuf]) -> Result<PathBuf> {
    check_no_overlap(path, reads)?;
    let existing = Existing::unless("--overwrite", request.overwrite);
    drop(OutputFile::create(path, existing, reads)?);
    check_output_file(path, existing, reads)
}

/// The file's name without `--output`: `NAME.q8_0.gguf` for a model, `NAME-F16-LoRA.gguf` for an adapter, as llama.cpp's
/// `convert_lora_to_gguf.py` names it.
fn default_name(name: &str, format: &str, adapter: bool) -> String {
    if adapter {
        format!("{name}-{}-LoRA.gguf", format.to_uppercase())
    } else {
        format!("{name}.{}.gguf", format.to_lowercase())
    }
}

/// The second file's path: `mmproj-` before the name of the first one, as llama.cpp's converter has it. `own` is the model's name and
/// the type, where `--output` names no file.
fn beside(path: &Path, own: Option<(&str, &str)>) -> PathBuf {
    let first = || path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name = own.map_or_else(first, |(name, word)| default_name(name, word, false));
    path.with_file_name(format!("mmproj-{name}"))
}

fn shown(path: &Path) -> String {
    quoted(&path.display().to_string())
}

fn named(path: PathBuf) -> (String, PathBuf) {
    (path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(), path)
}

/// Adds `.extension` to a file's name unless it ends so.
fn with_extension(path: &Path, extension: &str) -> PathBuf {
    let ends = path.extension().is_some_and(|end| end.eq_ignore_ascii_case(extension));
    if ends || path.is_dir() {
        return path.to_owned();
    }
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_and_a_model_have_different_names() {
        assert_eq!(default_name("run", "F16", false), "run.f16.gguf");
        assert_eq!(default_name("run", "f16", true), "run-F16-LoRA.gguf");
    }

    #[test]
    fn the_second_file_is_named_after_the_first_one() {
        let of = |own| beside(Path::new("out/cats.q4_0.gguf"), own).display().to_string();
        assert_eq!(of(None), "out/mmproj-cats.q4_0.gguf");
        assert_eq!(of(Some(("cats", "q8_0"))), "out/mmproj-cats.q8_0.gguf");
    }

    #[test]
    fn a_gguf_file_is_named_as_one() {
        let named = |path: &str| with_extension(Path::new(path), "gguf").display().to_string();
        assert_eq!(
            ["a", "a.gguf", "a.GGUF", "out/a.q8_0", "a.b/c"].map(named),
            ["a.gguf", "a.gguf", "a.GGUF", "out/a.q8_0.gguf", "a.b/c.gguf"]
        );
    }
}
