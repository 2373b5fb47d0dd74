//! Archives as `tar`, Python's `tarfile` and `zip` write them, and hostile ones.
use super::tar::{Members, Streamed};
use super::*;
use std::fs;
use std::io::Write as _;

/// A header of a tar archive; GNU's form without `ustar`.
fn header(name: &str, kind: u8, size: u64) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(b"0000644\0");
    header[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    sum(&mut header);
    header
}

fn sum(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn member(name: &str, kind: u8, content: &[u8]) -> Vec<u8> {
    let padding = content.len().next_multiple_of(512) - content.len();
    [header(name, kind, content.len() as u64), content.to_vec(), vec![0; padding]].concat()
}

fn whole(members: &[Vec<u8>]) -> Vec<u8> {
    [members.concat(), vec![0; 1024]].concat()
}

/// A zip archive of members that are not compressed, as `zip -0` writes it.
fn zipped(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in members {
        let offset = bytes.len() as u32;
        let mut check = flate2::Crc::new();
        check.update(content);
        let mut shared = vec![20, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        shared.extend(check.sum().to_le_bytes());
        shared.extend((content.len() as u32).to_le_bytes());
        shared.extend((content.len() as u32).to_le_bytes());
        shared.extend((name.len() as u16).to_le_bytes());
        shared.extend([0, 0]);
        bytes.extend([&b"PK\x03\x04"[..], shared.as_slice(), name.as_bytes(), content].concat());
        directory.extend([&b"PK\x01\x02\x14\x03"[..], shared.as_slice(), &[0; 6]].concat());
        directory.extend((0o100_644_u32 << 16).to_le_bytes());
        directory.extend(offset.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (count, start, size) = (members.len() as u16, bytes.len() as u32, directory.len() as u32);
    bytes.extend(directory);
    bytes.extend(b"PK\x05\x06\0\0\0\0");
    bytes.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
    bytes.extend([size.to_le_bytes(), start.to_le_bytes()].concat());
    bytes.extend([0, 0]);
    bytes
}

fn put(bytes: &[u8], extension: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(format!("a.{extension}"));
    fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn read_one(bytes: &[u8], extension: &str, name: &str) -> Result<Vec<u8>> {
    let (_dir, path) = put(bytes, extension);
    Archives::default().read(&path, name, 1 << 20)
}

#[test]
fn members_of_every_form_of_tar_are_found() {
    let long = format!("{}/{}.png", "folder".repeat(20), "name".repeat(20));
    let record = format!("path={long}\n");
    let length = record.len() + 4;
    let pax = format!("{length} {record}");
    assert_eq!(pax.len(), length);
    let mut split = header("b.png", b'0', 3);
    split[345..351].copy_from_slice(b"folder");
    sum(&mut split);
    let mut wide = header("wide.png", b'0', 0);
    wide[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
    sum(&mut wide);
    let pad = || [b"abc".to_vec(), vec![0; 509]].concat();
    let bytes = whole(&[
        member("pax_global_header", b'g', b"19 comment=ignored\n"),
        member("folder/", b'5', b""),
        member("./a.png", b'0', b"first"),
        split,
        pad(),
        wide,
        pad(),
        member("PaxHeaders/x", b'x', pax.as_bytes()),
        member("short", b'0', b"pax"),
        member("././@LongLink", b'L', format!("gnu/{long}\0").as_bytes()),
        member("short", 0, &[7; 1000]),
        member("empty", b'0', b""),
    ]);
    for (name, content) in [
        ("a.png", b"first".to_vec()),
        ("./a.png", b"first".to_vec()),
        ("folder/b.png", b"abc".to_vec()),
        ("wide.png", b"abc".to_vec()),
        (long.as_str(), b"pax".to_vec()),
        (format!("gnu/{long}").as_str(), vec![7; 1000]),
        ("empty", Vec::new()),
    ] {
        assert_eq!(read_one(&bytes, "tar", name).unwrap(), content, "{name}");
    }
    let error = read_one(&bytes, "tar", "short").unwrap_err();
    assert!(error.message().contains("no member \"short\""), "{error}");
    let mut reader = bytes.as_slice();
    let mut members = Members::new(Streamed(&mut reader));
    let mut found = Vec::new();
    while let Some(member) = members.next_file().unwrap() {
        // Every other one is passed over.
        found.push((found.len() % 2 == 0).then(|| members.read(&member, 2000).unwrap()));
    }
    assert_eq!(found, [Some(b"first".to_vec()), None, Some(b"abc".to_vec()), None, Some(vec![7; 1000]), None]);
}

#[test]
fn a_hostile_tar_archive_is_refused() {
    let good = member("a.png", b'0', b"abc");
    let mut torn = whole(std::slice::from_ref(&good));
    torn[0] ^= 1;
    let large = [header("a.png", b'0', 0o77_777_777_777), b"abc".to_vec(), vec![0; 509 + 1024]].concat();
    let mut endless = header("a.png", b'0', 0);
    endless[124..136].fill(0xff);
    sum(&mut endless);
    for (bytes, part) in [
        (whole(&[good.clone(), member("../b.png", b'0', b"")]), "leads out of the archive (\"../b.png\")"),
        (whole(&[member("/etc/passwd", b'0', b"")]), "leads out"),
        (whole(&[member("b.png", b'2', b"")]), "has a link (\"b.png\")"),
        (whole(&[member("b.png", b'1', b"")]), "has a link"),
        (whole(&[member("b.png", b'6', b"")]), "a device or a pipe"),
        (whole(&[member("b.png", b'S', b"")]), "a sparse file"),
        (whole(&[member("x", b'x', b"22 GNU.sparse.size=9\n\n"), good.clone()]), "a sparse file"),
        (whole(&[member("x", b'x', b"999 path=b\n"), good.clone()]), "a pax header"),
        (whole(&[member("x", b'L', &vec![b'n'; (1 << 20) + 1]), good.clone()]), "a name of 1048577 bytes"),
        (whole(&[good.clone(), good.clone()]), "two members of the archive have one name"),
        (good.clone(), "cut off"),
        (good[..700].to_vec(), "cut off"),
        (torn, "damaged, or no tar archive"),
        (large, "cut off"),
        (endless, "no number"),
        (b"text".to_vec(), "cut off"),
    ] {
        let error = read_one(&bytes, "tar", "a.png").unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert!(error.message().contains(part), "{error} lacks {part}");
    }
    let bytes = whole(&[member("a.png", b'0', &[0; 2000])]);
    let (_dir, path) = put(&bytes, "tar");
    let error = Archives::default().read(&path, "a.png", 1999).unwrap_err();
    assert!(error.message().contains("2000 bytes, at most 1999"), "{error}");
    let (_dir, path) = put(&bytes, "tar.gz");
    let error = Archives::default().read(&path, "a.png", 1999).unwrap_err();
    assert!(error.message().contains("compressed archive"), "{error}");
}

#[test]
fn members_of_a_zip_archive_are_found_and_hostile_ones_refused() {
    let bytes = zipped(&[("folder/", b""), ("folder/a.png", b"abc"), ("b.png", b"")]);
    assert_eq!(read_one(&bytes, "zip", "folder/a.png").unwrap(), b"abc");
    assert_eq!(read_one(&bytes, "zip", "b.png").unwrap(), b"");
    // The same by another program's hand, compressed.
    let mut packed = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    packed.write_all(&[5; 3000]).unwrap();
    let packed = packed.finish().unwrap();
    let deflated = |claimed: u32| {
        let mut bytes = zipped(&[("a.png", &packed)]);
        let directory = 30 + 5 + packed.len();
        let mut check = flate2::Crc::new();
        check.update(&[5; 3000]);
        for at in [8, directory + 10] {
            bytes[at] = 8;
        }
        for at in [14, directory + 16] {
            bytes[at..at + 4].copy_from_slice(&check.sum().to_le_bytes());
        }
        for at in [22, directory + 24] {
            bytes[at..at + 4].copy_from_slice(&claimed.to_le_bytes());
        }
        bytes
    };
    assert_eq!(read_one(&deflated(3000), "zip", "a.png").unwrap(), [5; 3000]);
    let changed = |at: usize, to: u8| {
        let mut bytes = zipped(&[("a.png", b"abc")]);
        bytes[at] = to;
        bytes
    };
    let directory = 30 + 5 + 3;
    for (bytes, part) in [
        (deflated(2999), "other than the 2999 bytes"),
        (deflated(3001), "other than the 3001 bytes"),
        (deflated(u32::MAX - 1), "at most"),
        (deflated(u32::MAX), "damaged"),
        (zipped(&[("../a.png", b"abc")]), "leads out"),
        (zipped(&[("a.png", b"abc"), ("a.png", b"")]), "one name"),
        (changed(directory + 8, 1), "encrypted"),
        (changed(directory + 10, 12), "compressed by method 12"),
        (changed(directory + 41, 0o12 << 4), "a link"),
        (changed(directory + 16, 9), "checksum"),
        (changed(directory + 20, 99), "damaged"),
        (changed(directory + 42, 1), "damaged"),
        (changed(directory + 46 + 5 + 10, 2), "several files"),
        (changed(directory + 46 + 5 + 16, 2), "damaged"),
        (bytes[..bytes.len() - 1].to_vec(), "no zip archive"),
        (Vec::new(), "no zip archive"),
    ] {
        let error = read_one(&bytes, "zip", "a.png").unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert!(error.message().contains(part), "{error} lacks {part}");
    }
}

#[test]
fn a_path_goes_through_an_archive_only_where_a_file_is() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("folder.zip")).unwrap();
    fs::write(dir.path().join("folder.zip/a.tar"), "").unwrap();
    let at = |path: &str| {
        split(&dir.path().join(path))
            .map(|(archive, name)| (archive.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_owned(), name))
    };
    assert_eq!(at("folder.zip/a.tar/b/c.png"), Some(("folder.zip/a.tar".into(), "b/c.png".into())));
    assert_eq!(at("folder.zip/a.tar"), None);
    assert_eq!(at("folder.zip/b.tar/c.png"), None);
}
