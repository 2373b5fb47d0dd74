//! Parquet, Arrow and compressed files: the same rows as from JSON Lines, and errors, never a crash, from broken ones.
use std::cell::Cell;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use tunesmith::Kind;
use tunesmith::data::source;

use super::{assert_refused, config, examples, load_with};

fn golden(folder: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(folder).join(name)
}

fn load(path: &Path) -> Vec<tunesmith::data::Example> {
    let mut config = config(path);
    config.data.template_path = Some(golden("c2", "qwen3.jinja"));
    examples(&load_with(&config).unwrap().train)
}

#[test]
fn rows_of_columns_are_those_of_the_lines() {
    let lines = load(&golden("columns", "rows.jsonl"));
    assert!(lines.len() > 25, "{}", lines.len());
    for name in ["rows.parquet", "rows_snappy.parquet", "rows_stream.arrow", "rows_lz4.arrow", "rows_zstd.arrow"] {
        assert_eq!(load(&golden("columns", name)), lines, "{name}");
    }
}

#[test]
fn compressed_rows_are_those_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read(golden("columns", "rows.jsonl")).unwrap();
    let lines = load(&golden("columns", "rows.jsonl"));
    let gzip = |part: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(part).unwrap();
        encoder.finish().unwrap()
    };
    let (first, second) = text.split_at(text.len() / 2);
    let zstandard = |part: &[u8]| zstd::encode_all(part, 1).unwrap();
    let document = {
        let text = std::str::from_utf8(&text).unwrap();
        format!("[{}]", text.trim().replace('\n', ","))
    };
    let files = [
        ("rows.jsonl.gz", gzip(&text)),
        ("parts.jsonl.gz", [gzip(first), gzip(second)].concat()),
        ("rows.jsonl.zst", zstandard(&text)),
        ("parts.jsonl.zst", [zstandard(first), zstandard(second)].concat()),
        ("rows.json.gz", gzip(document.as_bytes())),
    ];
    for (name, bytes) in &files {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(load(&path), lines, "{name}");
        // A file that is cut short is an error, not a shorter set.
        std::fs::write(&path, &bytes[..bytes.len() / 3]).unwrap();
        assert_refused(load_with(&config(&path)), &[name]);
    }
    let path = folder.path().join("rows.csv.zst");
    std::fs::write(&path, zstandard(b"question,answer\nq,a\n")).unwrap();
    assert_eq!(examples(&load_with(&config(&path)).unwrap().train).len(), 1);
    std::fs::write(&path, b"question,answer\nq,a\n").unwrap();
    assert_refused(load_with(&config(&path)), &["rows.csv.zst"]);
}

#[test]
fn a_row_that_never_ends_is_refused_before_it_fills_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv.zst");
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
    encoder.write_all(b"text\n\"").unwrap();
    let piece = vec![b'a'; 1 << 20];
    (0..300).for_each(|_| encoder.write_all(&piece).unwrap());
    std::fs::write(&path, encoder.finish().unwrap()).unwrap();
    assert_refused(load_with(&config(&path)), &["rows.csv.zst", "a row takes more than"]);
}

/// Reads all rows, which may fail in one way only.
fn read(path: &Path) -> Result<usize, tunesmith::Error> {
    let mut rows = 0;
    source::read(path, None, None, &Cell::new(0), &mut |row, forms| {
        rows += 1;
        row.parse(forms).map(drop)
    })
    .map(|()| rows)
}

#[test]
fn broken_column_files_are_errors_and_never_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["rows.parquet", "rows_stream.arrow", "rows_lz4.arrow", "rows_zstd.arrow"] {
        let whole = std::fs::read(golden("columns", name)).unwrap();
        let path = folder.path().join(name);
        let mut refused = 0;
        let mut check = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            if let Err(error) = read(&path) {
                assert_eq!(error.kind(), Kind::Data, "{error}");
                assert!(error.message().contains(name), "{error}");
                refused += 1;
            }
        };
        for at in (0..whole.len()).step_by(whole.len() / 250 + 1) {
            for flip in [0xff, 0x40, 0x01] {
                let mut bytes = whole.clone();
                bytes[at] ^= flip;
                check(&bytes);
            }
            check(&whole[..at]);
            // A file, unlike a stream, has a footer that tells whether rows are missing.
            assert!(!whole.starts_with(b"ARROW1") || read(&path).is_err(), "{name} cut after {at} bytes");
        }
        assert!(refused > 200, "{name}: {refused}");
    }
    for (name, bytes) in [
        ("rows.parquet", &b"PAR1"[..]),
        ("rows.arrow", b""),
        ("rows.arrow", b"FEA1xxxxxxxxxxxxxxxx"),
        ("rows.arrow", &[0xff; 64]),
        ("rows.parquet.gz", b"x"),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(read(&path).unwrap_err().kind(), Kind::Data, "{name}");
    }
}

#[test]
fn a_pattern_names_several_files_in_order() {
    let folder = tempfile::tempdir().unwrap();
    for number in [2, 1, 3] {
        std::fs::write(folder.path().join(format!("part-{number}.jsonl")), format!("{{\"text\": \"{number}\"}}\n"))
            .unwrap();
    }
    let data = load_with(&config(&folder.path().join("part-*.jsonl"))).unwrap();
    let texts: Vec<String> = (0..3).map(|index| super::texts(&data, index).0).collect();
    assert_eq!(texts, ["<s>1</s>", "<s>2</s>", "<s>3</s>"]);
    assert_refused(load_with(&config(&folder.path().join("other-*.jsonl"))), &["data.train_path", "other-*.jsonl"]);
    assert_refused(load_with(&config(folder.path())), &["is a folder"]);
}
