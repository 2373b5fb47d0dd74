//! Converts documents (plain text, Markdown, HTML, DOCX) to text to train on, for `tunesmith ingest`.
//!
//! Headings, lists and tables become Markdown. Markdown files stay as they are, without front matter and comments. The
//! input is untrusted: sizes are bounded, and a broken file is an error with the file's name.
mod docx;
mod docx_archive;
mod html;
mod page;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::encoding::other_encoding;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;
use tunesmith_base::registry::EXTENSIONS;

/// The largest text file, and the largest text in a DOCX file, in bytes.
const MAX_BYTES: u64 = 128 << 20;
/// How many levels of folders are searched.
const MAX_DEPTH: usize = 32;

/// The kind of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DocumentFormat {
    /// Plain text, kept as it is: `.txt`, `.text`.
    Text,
    /// Kept as it is, but for front matter and comments: `.md`, `.markdown`.
    Markdown,
    /// A web page of any quality: `.html`, `.htm`, `.xhtml`.
    Html,
    /// A document of Word 2007 or later: `.docx`.
    Docx,
}

impl DocumentFormat {
    /// The kind of a file by its extension; `None` if the extension is not supported.
    pub fn of(path: &Path) -> Option<Self> {
        Some(match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "txt" | "text" => Self::Text,
            "md" | "markdown" => Self::Markdown,
            "html" | "htm" | "xhtml" => Self::Html,
            "docx" => Self::Docx,
            _ => return None,
        })
    }

    /// The name of the format, for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Markdown => "Markdown",
            Self::Html => "HTML",
            Self::Docx => "DOCX",
        }
    }
}

/// The result of a search for documents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundDocuments {
    /// Supported files, in the order of their names.
    pub documents: Vec<(PathBuf, DocumentFormat)>,
    /// The number of other files in the folders, by extension.
    pub others: BTreeMap<String, u64>,
    /// Symbolic links to files outside of their folder, which are not read.
    pub outside: Vec<PathBuf>,
    /// Folders that are too deep and not searched.
    pub too_deep: Vec<PathBuf>,
}

/// Finds documents: the files among `paths`, and those in folders and their subfolders, in the order of their names.
/// Skips hidden files and folders, links to folders, and links out of a folder.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`]: a path does not exist, or a file is not a supported document.
pub fn find(paths: &[PathBuf]) -> Result<FoundDocuments> {
    let mut found = FoundDocuments::default();
    for path in paths {
        if path.is_dir() {
            let root = path
                .canonicalize()
                .map_err(|error| Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Data))?;
            walk(path, &root, 0, &mut found)?;
            continue;
        }
        if let Err(error) = fs::metadata(path) {
            return Err(Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Data));
        }
        let kind = DocumentFormat::of(path).ok_or_else(|| {
            Error::data(format!("{}: found no known extension, expected .txt, .md, .html or .docx", path.display()))
                .hint(match path.extension().and_then(|end| end.to_str()) {
                    Some("doc" | "odt" | "rtf") => "save it as .docx",
                    Some("pdf") => "turn it into text first, for example with pdftotext",
                    Some(end) if EXTENSIONS.iter().copied().flatten().any(|known| *known == end) => {
                        "rows need no ingestion: name them in data.train_path"
                    }
                    _ => "rename the file after its format",
                })
        })?;
        found.documents.push((path.clone(), kind));
    }
    // `paths` may contain both a folder and a file in it.
    let mut seen = std::collections::HashSet::new();
    found.documents.retain(|(path, _)| seen.insert(path.canonicalize().unwrap_or_else(|_| path.clone())));
    Ok(found)
}

/// Searches `folder`, which is `depth` levels below `root`.
fn walk(folder: &Path, root: &Path, depth: usize, found: &mut FoundDocuments) -> Result<()> {
    let failed = |error: std::io::Error| Error::io("read", folder, &error).with_kind(tunesmith_base::Kind::Data);
    let mut entries: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        entries.push(entry.map_err(failed)?.path());
    }
    entries.sort();
    for path in entries {
        // Word creates files that begin with `~$` while a document is open.
        if path
            .file_name()
            .map(|name| name.to_string_lossy())
            .is_some_and(|name| name.starts_with('.') || name.starts_with("~$"))
        {
            continue;
        }
        if path.is_dir() {
            if path.is_symlink() {
                continue;
            }
            if depth < MAX_DEPTH {
                walk(&path, root, depth + 1, found)?;
            } else {
                found.too_deep.push(path);
            }
            continue;
        }
        let leads_out = || path.canonicalize().is_ok_and(|real| !real.starts_with(root));
        if path.is_symlink() && DocumentFormat::of(&path).is_some() && leads_out() {
            found.outside.push(path);
            continue;
        }
        if let (Some(kind), true) = (DocumentFormat::of(&path), path.is_file()) {
            found.documents.push((path, kind));
        } else {
            let end =
                path.extension().map_or_else(String::new, |end| format!(".{}", end.to_string_lossy().to_lowercase()));
            *found.others.entry(end).or_default() += 1;
        }
    }
    Ok(())
}

/// The text of a document, [`normalized`]; empty if the document has no text.
///
/// # Errors
/// [`tunesmith_base::Kind::Data`], with the file's name: it cannot be read, is too large, broken, or not in UTF-8.
pub fn read(path: &Path, kind: DocumentFormat) -> Result<String> {
    let text = match kind {
        DocumentFormat::Docx => docx::text(path)?,
        DocumentFormat::Text => file(path)?,
        DocumentFormat::Markdown => markdown(&file(path)?),
        DocumentFormat::Html => html::text(&file(path)?),
    };
    Ok(normalized(&text))
}

/// The content of a text file, of at most [`MAX_BYTES`].
fn file(path: &Path) -> Result<String> {
    let failed = |error: std::io::Error| Error::io("read", path, &error).with_kind(tunesmith_base::Kind::Data);
    let mut bytes = Vec::new();
    files::open(path).map_err(failed)?.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    let refused = |what: String, hint: &str| Err(Error::data(format!("{}: {what}", path.display())).hint(hint));
    if bytes.len() as u64 > MAX_BYTES {
        return refused(format!("larger than {} MiB", MAX_BYTES >> 20), "split it");
    }
    if let Some((name, how)) = other_encoding(&bytes) {
        return refused(format!("found {name}, expected UTF-8"), how);
    }
    if let Some(at) = bytes.iter().position(|byte| *byte == 0) {
        return refused(format!("found a zero at byte {}, expected text", at + 1), "is it named after its format?");
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok(text),
        Err(error) => {
            let at = error.utf8_error().valid_up_to() + 1;
            refused(format!("invalid UTF-8 at byte {at}"), "convert it: iconv -f latin1 -t utf-8")
        }
    }
}

/// Removes front matter, and comments outside of code, from Markdown.
fn markdown(text: &str) -> String {
    let mut lines = text.trim_start_matches('\u{feff}').lines().peekable();
    let mut out = String::with_capacity(text.len());
    if lines.peek().is_some_and(|line| line.trim_end() == "---") {
        let end = lines.clone().skip(1).position(|line| matches!(line.trim_end(), "---" | "..."));
        // Without an end, the first line is a horizontal rule.
        if let Some(end) = end {
            lines.nth(end + 1);
        }
    }
    let (mut fence, mut comment) = (None, false);
    let last = text.rfind("-->").unwrap_or(0);
    for line in lines {
        let head = line.trim_start();
        let marks = ["```", "~~~"].into_iter().find(|marks| head.starts_with(marks));
        match fence {
            Some(open) if marks == Some(open) => fence = None,
            None if !comment => fence = marks,
            _ => {}
        }
        if fence.is_some() || marks.is_some() && !comment {
            out.push_str(line);
        } else {
            let mut rest = line;
            loop {
                let mark = if comment { "-->" } else { "<!--" };
                let Some(at) = rest.find(mark) else { break };
                // A comment without an end is text.
                if !comment && rest.as_ptr() as usize - text.as_ptr() as usize + at > last {
                    break;
                }
                if !comment {
                    out.push_str(&rest[..at]);
                }
                (comment, rest) = (!comment, &rest[at + mark.len()..]);
            }
            if !comment {
                out.push_str(rest);
            }
        }
        out.push('\n');
    }
    out
}

/// Normalizes a text. Line breaks become `\n`, and all white space but tabs becomes plain spaces. Control characters,
/// soft hyphens, zero-width spaces and byte order marks are removed. So are white space at the ends of lines, empty
/// lines at both ends, and all but one of several empty lines.
pub fn normalized(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut empty = 0;
    let mut line = String::new();
    let mut end = |line: &mut String| {
        let kept = line.trim_end();
        if kept.is_empty() {
            empty += 1;
        } else {
            if !out.is_empty() {
                out.push_str(if empty > 0 { "\n\n" } else { "\n" });
            }
            out.push_str(kept);
            empty = 0;
        }
        line.clear();
    };
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\r' if letters.peek() == Some(&'\n') => {}
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{85}' | '\u{2028}' | '\u{2029}' => end(&mut line),
            '\t' => line.push('\t'),
            '\u{ad}' | '\u{200b}' | '\u{feff}' => {}
            letter if letter.is_control() => {}
            letter if letter.is_whitespace() => line.push(' '),
            letter => line.push(letter),
        }
    }
    end(&mut line);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_normalised() {
        assert_eq!(normalized("\u{feff}\n\n a\u{a0}b \r\n\r\n\r\n\u{c}c\td\u{7}\u{ad}e\rf \n \n"), " a b\n\nc\tde\nf");
        assert_eq!(normalized(" \n\t\n"), "");
        let once = normalized("x\n\n\n  y  \n");
        assert_eq!(normalized(&once), once);
    }

    #[test]
    fn markdown_loses_front_matter_and_comments_alone() {
        let text = "---\ntitle: x\n---\n# Head\n\none <!-- no\nno --> two <!-- a --> three\n```html\n<!-- kept -->\n---\n```\n---\nend";
        assert_eq!(markdown(text), "# Head\n\none \n two  three\n```html\n<!-- kept -->\n---\n```\n---\nend\n");
        assert_eq!(markdown("---\nno end"), "---\nno end\n");
        assert_eq!(markdown("--> a <!-- never closed\nb"), "--> a <!-- never closed\nb\n");
    }

    #[test]
    fn documents_are_found_in_order_and_others_counted() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b.md", "a/z.TXT", "a/y.docx", "c.pdf", "noend", "~$b.docx", ".git/x.md", ".x.md"] {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let found = find(&[folder.path().to_owned(), folder.path().join("b.md")]).unwrap();
        let names: Vec<_> = found
            .documents
            .iter()
            .map(|(path, kind)| (path.strip_prefix(folder.path()).unwrap().to_str().unwrap(), *kind))
            .collect();
        assert_eq!(
            names,
            [("a/y.docx", DocumentFormat::Docx), ("a/z.TXT", DocumentFormat::Text), ("b.md", DocumentFormat::Markdown)]
        );
        assert_eq!(found.others, BTreeMap::from([(String::new(), 1), (".pdf".into(), 1)]));
        let error = find(&[folder.path().join("c.pdf")]).unwrap_err();
        assert!(error.to_string().contains("c.pdf") && error.hint_text().unwrap().contains("pdftotext"), "{error}");
        assert_eq!(find(&[folder.path().join("gone")]).unwrap_err().kind(), tunesmith_base::Kind::Data);
    }

    #[test]
    fn links_out_of_the_folder_and_folders_too_deep_are_named() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let deepest = (0..=MAX_DEPTH).fold(at("docs"), |path, _| path.join("d"));
        fs::create_dir_all(&deepest).unwrap();
        for path in [at("secret.txt"), at("docs/a.txt"), deepest.join("lost.txt")] {
            fs::write(path, "text").unwrap();
        }
        for (target, link) in [("../secret.txt", "docs/link.txt"), ("a.txt", "docs/other.txt")] {
            std::os::unix::fs::symlink(target, at(link)).unwrap();
        }
        let found = find(&[at("docs")]).unwrap();
        assert_eq!(found.documents, [(at("docs/a.txt"), DocumentFormat::Text)]);
        assert_eq!((found.outside, found.too_deep), (vec![at("docs/link.txt")], vec![deepest]));
    }

    #[test]
    fn what_is_no_text_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.txt");
        for (bytes, what) in [
            (&b"\xff\xfea\0"[..], "UTF-16"),
            (b"\xff\xfe\0\0a\0\0\0", "UTF-32"),
            (b"a\0b", "a zero at byte 2"),
            (b"caf\xe9", "invalid UTF-8 at byte 4"),
        ] {
            fs::write(&path, bytes).unwrap();
            let error = read(&path, DocumentFormat::Text).unwrap_err();
            assert!(
                error.kind() == tunesmith_base::Kind::Data
                    && error.message().contains("x.txt")
                    && error.message().contains(what),
                "{error}"
            );
        }
        fs::File::create(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert!(read(&path, DocumentFormat::Html).unwrap_err().message().contains("larger than 128 MiB"));
    }
}
