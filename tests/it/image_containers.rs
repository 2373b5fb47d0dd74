//! Every kind of an image file in everything that holds images: a folder, rows, tar and zip archives, Parquet files. Each is read exactly,
//! or refused with its row and file, before the model loads and in little memory.
use crate::bad_images::base64;
use crate::picture_sources::{tar, zip_of};
use crate::pictures::{copy, dataset, golden, write_rows};
use crate::processes::peak_memory;
use crate::run::fixture::tunesmith;
use arrow_array::{ArrayRef, BinaryArray, RecordBatch, StringArray, StructArray};
use arrow_schema::{DataType, Field};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tunesmith::Kind;
use tunesmith::config::{BadImages, Config};

type Files = [(String, Vec<u8>)];

/// Writes images with captions into a folder: the file with rows, and the folder of images if rows name them.
type Container = (&'static str, fn(&Path, &Files) -> (PathBuf, Option<PathBuf>));

fn written(path: PathBuf, bytes: &[u8]) -> PathBuf {
    fs::write(&path, bytes).unwrap();
    path
}

/// Rows that name files.
fn named(folder: &Path, files: &Files) -> PathBuf {
    let rows = folder.join("rows.jsonl");
    write_rows(&rows, files.iter().map(|(name, _)| json!({"image": name, "caption": "a cat"})));
    rows
}

/// The members of a shard: each image with its caption.
fn shard(files: &Files) -> Vec<(String, Vec<u8>)> {
    let member = |(number, (name, bytes)): (usize, &(String, Vec<u8>))| {
        let end = name.rsplit('.').next().unwrap();
        [(format!("{number:04}.{end}"), bytes.clone()), (format!("{number:04}.txt"), b"a cat".to_vec())]
    };
    files.iter().enumerate().flat_map(member).collect()
}

fn parquet(folder: &Path, files: &Files) -> (PathBuf, Option<PathBuf>) {
    let bytes: ArrayRef = Arc::new(BinaryArray::from_iter_values(files.iter().map(|(_, bytes)| bytes)));
    let paths: ArrayRef = Arc::new(StringArray::from_iter_values(files.iter().map(|(name, _)| name)));
    let image = StructArray::from(vec![
        (Arc::new(Field::new("bytes", DataType::Binary, true)), bytes),
        (Arc::new(Field::new("path", DataType::Utf8, true)), paths),
    ]);
    let captions = StringArray::from_iter_values(files.iter().map(|_| "a cat"));
    let columns: [(&str, ArrayRef); 2] = [("image", Arc::new(image)), ("caption", Arc::new(captions))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let path = folder.join("rows.parquet");
    let mut writer = parquet::arrow::ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    (path, None)
}

const CONTAINERS: [Container; 10] = [
    ("a folder", |folder, files| {
        let images = folder.join("images");
        fs::create_dir(&images).unwrap();
        for (name, bytes) in files {
            fs::write(images.join(name), bytes).unwrap();
        }
        (named(folder, files), Some(images))
    }),
    ("rows", |folder, files| {
        let row = |(_, bytes): &(String, Vec<u8>)| json!({"image": {"base64": base64(bytes)}, "caption": "a cat"});
        write_rows(&folder.join("rows.jsonl"), files.iter().map(row));
        (folder.join("rows.jsonl"), None)
    }),
    ("a tar archive", |folder, files| (written(folder.join("rows.tar"), &tar(&shard(files))), None)),
    ("a compressed tar archive", |folder, files| {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(&tar(&shard(files))).unwrap();
        (written(folder.join("rows.tar.gz"), &packed.finish().unwrap()), None)
    }),
    ("a zip archive", |folder, files| (written(folder.join("rows.zip"), &zip_of(&shard(files), false)), None)),
    ("a deflated zip archive", |folder, files| (written(folder.join("rows.zip"), &zip_of(&shard(files), true)), None)),
    ("a tar archive of images", |folder, files| {
        (named(folder, files), Some(written(folder.join("images.tar"), &tar(files))))
    }),
    ("a zip archive of images", |folder, files| {
        (named(folder, files), Some(written(folder.join("images.zip"), &zip_of(files, false))))
    }),
    ("a deflated zip archive of images", |folder, files| {
        (named(folder, files), Some(written(folder.join("images.zip"), &zip_of(files, true))))
    }),
    ("a Parquet file", parquet),
];

/// A folder with a model that sees images.
fn model() -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("model");
    copy(&golden("vision/llava/model"), &model);
    copy(&golden("picture_chats/llava"), &model);
    (root, model)
}

fn changed(root: &Path, (rows, images): &(PathBuf, Option<PathBuf>), bad: BadImages) -> impl Fn(&mut Config) {
    let (rows, images, cache) = (rows.clone(), images.clone(), root.join("cache"));
    move |config| {
        config.data.train_path = vec![rows.clone()];
        config.data.image_dir.clone_from(&images);
        config.data.cache_dir = Some(cache.clone());
        config.data.bad_images = bad;
    }
}

/// Reads the images of golden folders whose kind is not refused.
fn good() -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for folder in ["picture_kinds", "pixels"] {
        for entry in fs::read_dir(golden(folder)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if !name.ends_with("json") && name != "cmyk.jpg" {
                files.push((format!("{folder}_{name}"), fs::read(path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

#[test]
fn every_kind_of_a_file_is_read_alike_from_everything_that_holds_it() {
    let (root, model) = model();
    let files = good();
    let mut expected = None;
    for (name, write) in CONTAINERS {
        let folder = root.path().join(name);
        fs::create_dir(&folder).unwrap();
        let place = write(&folder, &files);
        let data = dataset(&model, &place.0, changed(root.path(), &place, BadImages::Refuse))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(data.train.len(), files.len(), "{name}");
        let batch = data.train.batch(0..files.len()).unwrap();
        let pixels: Vec<_> = batch.images.iter().map(|image| Arc::clone(&image.pixels)).collect();
        assert_eq!(pixels.len(), files.len(), "{name}");
        match &expected {
            None => expected = Some(pixels),
            Some(expected) => {
                for ((found, wanted), (file, _)) in pixels.iter().zip(expected).zip(&files) {
                    assert!(found == wanted, "{file} in {name}");
                }
            }
        }
    }
}

/// A PNG file of 60,000 x 60,000 black pixels, whole and true.
fn bomb() -> Vec<u8> {
    let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    let line = vec![0; 1 + 60_000 / 8];
    (0..60_000).for_each(|_| packed.write_all(&line).unwrap());
    let chunk = |name: &[u8], data: &[u8]| {
        let named = [name, data].concat();
        let sum = crc32fast::hash(&named).to_be_bytes();
        [&(data.len() as u32).to_be_bytes(), &named[..], &sum].concat()
    };
    let header = [&60_000_u32.to_be_bytes()[..], &60_000_u32.to_be_bytes(), &[1, 0, 0, 0, 0]].concat();
    let data = packed.finish().unwrap();
    let chunks = [chunk(b"IHDR", &header), chunk(b"IDAT", &data), chunk(b"IEND", b"")].concat();
    [b"\x89PNG\r\n\x1a\n", &chunks[..]].concat()
}

/// Files that claim more pixels than may be read, with nothing behind it, and what is said of them.
fn claims() -> Vec<(String, Vec<u8>, &'static str)> {
    let read = |name: &str| fs::read(golden("pixels").join(name)).unwrap();
    let side = 60_000_u16;
    let mut bmp = read("rgb.bmp");
    bmp[18..22].copy_from_slice(&u32::from(side).to_le_bytes());
    bmp[22..26].copy_from_slice(&u32::from(side).to_le_bytes());
    let mut gif = read("animated.gif");
    gif[6..8].copy_from_slice(&side.to_le_bytes());
    gif[8..10].copy_from_slice(&side.to_le_bytes());
    let mut jpg = read("rgb.jpg");
    let frame = jpg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    jpg[frame + 5..frame + 7].copy_from_slice(&side.to_be_bytes());
    jpg[frame + 7..frame + 9].copy_from_slice(&side.to_be_bytes());
    // 14 bits for each side, less one.
    let mut webp = read("rgb.webp");
    let lossless = webp.windows(4).position(|bytes| bytes == b"VP8L").unwrap();
    let sides = u32::from_le_bytes(*webp[lossless + 9..].first_chunk().unwrap());
    let largest = sides & 0xf000_0000 | 0x3ffe << 14 | 0x3ffe;
    webp[lossless + 9..lossless + 13].copy_from_slice(&largest.to_le_bytes());
    let mut tiff = read("rgb.tiff");
    let directory = u32::from_le_bytes(*tiff[4..].first_chunk().unwrap()) as usize;
    for entry in (directory + 2..tiff.len() - 12).step_by(12).take(2) {
        let tag = u16::from_le_bytes([tiff[entry], tiff[entry + 1]]);
        assert!([256, 257].contains(&tag), "width and height come first");
        tiff[entry + 2..entry + 4].copy_from_slice(&4_u16.to_le_bytes());
        tiff[entry + 8..entry + 12].copy_from_slice(&u32::from(side).to_le_bytes());
    }
    let most = "at most 89478485 are read";
    // Of a TIFF file, the places of its parts contradict the claim first.
    [("bmp", bmp, most), ("gif", gif, most), ("jpg", jpg, most), ("webp", webp, most), ("tiff", tiff, "cannot be read")]
        .map(|(end, bytes, said)| (format!("claim.{end}"), bytes, said))
        .to_vec()
}

/// Bad files, what is said of them, and whether that shows without decoding them.
fn bad() -> Vec<(String, Vec<u8>, &'static str, bool)> {
    let read = |name: &str| fs::read(golden("pixels").join(name)).unwrap();
    let half = |name: &str| {
        let bytes = read(name);
        bytes[..bytes.len() / 2].to_vec()
    };
    let mut files = vec![
        ("cut.png".to_owned(), half("rgb.png"), "is cut off", true),
        ("cut.jpg".to_owned(), half("rgb.jpg"), "is cut off", true),
        ("cut.webp".to_owned(), half("rgb.webp"), "is cut off", true),
        ("cut.gif".to_owned(), half("animated.gif"), "", false),
        ("cut.bmp".to_owned(), half("rgb.bmp"), "", false),
        ("cut.tiff".to_owned(), half("rgb.tiff"), "", false),
        ("cmyk.jpg".to_owned(), read("cmyk.jpg"), "CMYK", true),
        ("text.png".to_owned(), b"no image".to_vec(), "no image", true),
        ("empty.png".to_owned(), Vec::new(), "an empty file", true),
    ];
    files.extend(claims().into_iter().map(|(name, bytes, said)| (name, bytes, said, true)));
    files
}

#[test]
fn a_bad_file_is_refused_with_its_row_or_left_out_wherever_it_is() {
    let (root, model) = model();
    let one = ("good.png".to_owned(), fs::read(golden("pixels/rgb.png")).unwrap());
    let mut tried = 0;
    for (name, write) in CONTAINERS {
        for (file, bytes, said, at_once) in bad() {
            if bytes.is_empty() && ["rows", "a Parquet file"].contains(&name) {
                continue; // no bytes are no image
            }
            let folder = root.path().join(format!("{name} with {file}"));
            fs::create_dir(&folder).unwrap();
            let place = write(&folder, &[one.clone(), (file.clone(), bytes)]);
            let load = |bad| dataset(&model, &place.0, changed(root.path(), &place, bad));
            let about = format!("{file} in {name}");
            let refused = if at_once {
                load(BadImages::Refuse).map(|_| ()).unwrap_err()
            } else {
                load(BadImages::Refuse).and_then(|data| data.train.batch(0..2).map(|_| ())).unwrap_err()
            };
            let text = refused.to_string();
            assert_eq!(refused.kind(), Kind::Data, "{about}: {text}");
            assert!(text.contains("image ") && text.contains(said), "{about}: {text}");
            let rows = place.0.file_name().unwrap().to_string_lossy().into_owned();
            assert!(!at_once || text.contains(&rows) && text.contains(':'), "{about}: {text}");
            let left = load(BadImages::Skip).unwrap_or_else(|error| panic!("{about}: {error}"));
            assert_eq!((left.train.len(), left.report.train.bad_images.rows), (1, 1), "{about}");
            assert!(left.report.warnings.iter().any(|warning| warning.contains(&rows)), "{about}");
            tried += 1;
        }
    }
    assert_eq!(tried, 10 * 14 - 2);
}

#[test]
fn a_picture_of_60_000_pixels_a_side_is_refused_in_little_memory() {
    let (root, model) = model();
    let mut files = claims();
    files.push(("bomb.png".to_owned(), bomb(), "at most 89478485 are read"));
    let good = ("good.png".to_owned(), fs::read(golden("pixels/rgb.png")).unwrap());
    for (name, write) in CONTAINERS {
        let run = |label: &str, files: &Files, words: &[&str]| {
            let folder = root.path().join(format!("{name} of {label}"));
            if !folder.exists() {
                fs::create_dir(&folder).unwrap();
                let (rows, images) = write(&folder, files);
                let mut config: Value = json!({"model": {"name": model, "max_seq_len": 256},
                    "data": {"train_path": rows, "cache_dir": root.path().join("cache"), "use_cache": false},
                    "train": {"output_dir": folder.join("run"), "max_steps": 1}});
                config["data"]["image_dir"] = images.map_or(Value::Null, |images| json!(images));
                fs::write(folder.join("run.yaml"), config.to_string()).unwrap();
            }
            let config = folder.join("run.yaml").display().to_string();
            peak_memory(&mut tunesmith(&[&[words[0], &config], &words[1..]].concat()))
        };
        let (code, text, usual) =
            run("a good file", &[good.clone(), ("other.png".to_owned(), good.1.clone())], &["data"]);
        assert_eq!(code, Some(0), "{name}: {text}");
        for (file, bytes, said) in &files {
            let both = [good.clone(), (file.clone(), bytes.clone())];
            for (words, expected) in [(&["data"][..], 3), (&["train"], 3), (&["data", "data.bad_images=skip"], 0)] {
                let (code, text, most) = run(file, &both, words);
                assert_eq!(code, Some(expected), "{file} in {name}, {words:?}: {text}");
                assert!(expected == 0 || text.contains(said), "{file} in {name}: {text}");
                assert!(most < usual + (32 << 20), "{file} in {name}, {words:?}: {most} bytes, {usual} for a good one");
            }
        }
    }
}

/// Overwrites an image with zeros wherever it lies below `root`; in a deflated archive, the beginning of its member `name`.
fn zero(root: &Path, name: &str, bytes: &[u8]) -> bool {
    let find = |within: &[u8], part: &[u8]| within.windows(part.len()).position(|window| window == part);
    let mut hit = false;
    for entry in fs::read_dir(root).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            hit |= path.file_name().unwrap() != "model" && zero(&path, name, bytes);
            continue;
        }
        let mut content = fs::read(&path).unwrap();
        let member = find(&content, name.as_bytes()).filter(|_| path.extension().is_some_and(|end| end == "zip"));
        let Some((at, length)) =
            find(&content, bytes).map(|at| (at, bytes.len())).or_else(|| member.map(|at| (at + name.len() + 8, 16)))
        else {
            continue;
        };
        content[at..at + length].fill(0);
        fs::write(&path, content).unwrap();
        hit = true;
    }
    hit
}

#[test]
fn an_image_that_is_damaged_after_the_rows_were_read_is_named_with_its_row() {
    let good = |name: &str| (name.to_owned(), fs::read(golden("pixels").join(name)).unwrap());
    let files = [good("rgb.png"), good("wide.png")];
    for (name, write) in CONTAINERS {
        let (root, model) = model();
        let folder = root.path().join("data");
        fs::create_dir(&folder).unwrap();
        let place = write(&folder, &files);
        // Rows from the files, then from the cache.
        for use_cache in [true, true, false] {
            let change = changed(root.path(), &place, BadImages::Refuse);
            let data = dataset(&model, &place.0, |config| {
                change(config);
                config.data.use_cache = use_cache;
            });
            let data = data.unwrap();
            data.train.batch(0..2).unwrap();
            let member = if name.contains("of images") { "wide.png" } else { "0001.png" };
            let rows_before = fs::read(&place.0).unwrap();
            assert!(zero(root.path(), member, &files[1].1), "{name}");
            let rows = place.0.file_name().unwrap().to_string_lossy().into_owned();
            let [second, unit] = [format!("{rows}:2: image "), format!("{rows}: row 2: image ")];
            for error in [data.train.batch(0..2).map(drop), data.train.thumbnails(1).map(drop)] {
                let text = error.unwrap_err().to_string();
                let file = if name.contains("rows") || name.contains("compressed") || name.contains("Parquet") {
                    "pictures/"
                } else if name.contains("of images") || name == "a folder" {
                    "wide.png"
                } else {
                    "0001.png"
                };
                assert!(text.contains(file), "{name}: {text}");
                assert!(text.contains(&second) || text.contains(&unit) || text.contains(": row 2: "), "{name}: {text}");
            }
            // As it was, for the next round.
            fs::remove_dir_all(&folder).unwrap();
            fs::create_dir(&folder).unwrap();
            write(&folder, &files);
            assert!(fs::read(&place.0).unwrap().len() == rows_before.len(), "{name}");
            let _ = fs::remove_dir_all(root.path().join("cache/pictures"));
        }
    }
}

#[test]
fn an_image_that_gets_another_size_during_a_run_is_named_with_its_row() {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("model");
    copy(&golden("vision/qwen2_vl/model"), &model);
    copy(&golden("picture_chats/qwen2_vl"), &model);
    let image = root.path().join("a.png");
    fs::copy(golden("pixels/rgb.png"), &image).unwrap();
    let rows = root.path().join("rows.jsonl");
    let row = |name: &str| json!({"image": name, "question": "what?", "answer": "a cat"});
    let whole = golden("pixels/rgb.png").display().to_string();
    write_rows(&rows, [row(&whole), row("a.png"), row("a.png"), row("a.png")]);
    let data = dataset(&model, &rows, |config| config.data.image_dir = Some(root.path().to_owned())).unwrap();
    data.train.batch(0..4).unwrap();
    fs::copy(golden("pixels/wide.png"), &image).unwrap();
    let text = data.train.batch(0..4).unwrap_err().to_string();
    assert!(text.contains("rows.jsonl:2 and 2 more rows: image a.png: it takes "), "{text}");
    assert!(text.contains("the file was replaced"), "{text}");
    fs::remove_file(&image).unwrap();
    let text = data.train.batch(0..4).unwrap_err().to_string();
    assert!(text.contains("rows.jsonl:2 and 2 more rows: image a.png: "), "{text}");
}
