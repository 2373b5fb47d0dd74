//! Images against Pillow, torchvision and Transformers (`scripts/golden/pixels.py`), to the bit; and files that lie.
use super::*;
use crate::resize::resize;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tunesmith_config::vision::{Backend, Processing, Resample, Size};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/pixels").join(name)
}

fn expected() -> Value {
    serde_json::from_slice(&fs::read(golden("pixels.json")).unwrap()).unwrap()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key].as_array().unwrap()
}

fn picture(row: &Value) -> Picture {
    Picture::decode(&fs::read(golden(row["file"].as_str().unwrap())).unwrap()).unwrap()
}

fn pair(value: &Value) -> (u32, u32) {
    (value[0].as_u64().unwrap() as u32, value[1].as_u64().unwrap() as u32)
}

#[test]
fn files_decode_as_pillow_decodes_them() {
    for row in list(&expected(), "pictures") {
        let found = picture(row);
        let bytes = fs::read(golden(row["file"].as_str().unwrap())).unwrap();
        assert_eq!((found.width, found.height), pair(&row["size"]), "{row}");
        assert_eq!(Picture::size(&bytes).unwrap(), pair(&row["size"]), "{row}");
        match row["mean"].as_array() {
            // Two decoders of JPEG may round differently.
            Some(mean) => {
                for (channel, mean) in mean.iter().enumerate() {
                    let sum: f64 = found.rgb.iter().skip(channel).step_by(3).map(|&byte| f64::from(byte)).sum();
                    let own = sum * 3.0 / found.rgb.len() as f64;
                    assert!((own - mean.as_f64().unwrap()).abs() < 0.2, "{row}: {own}");
                }
            }
            None => assert_eq!(u64::from(crc32fast::hash(&found.rgb)), row["crc"].as_u64().unwrap(), "{row}"),
        }
    }
}

#[test]
fn every_kind_of_a_file_decodes_as_pillow_decodes_it() {
    let folder = golden("../picture_kinds");
    let kinds: Value = serde_json::from_slice(&fs::read(folder.join("kinds.json")).unwrap()).unwrap();
    for row in list(&kinds, "pictures") {
        let bytes = fs::read(folder.join(row["file"].as_str().unwrap())).unwrap();
        let found = Picture::decode(&bytes).unwrap();
        assert_eq!((found.width, found.height), pair(&row["size"]), "{row}");
        assert_eq!(Picture::size(&bytes).unwrap(), pair(&row["size"]), "{row}");
        assert_eq!(u64::from(crc32fast::hash(&found.rgb)), row["crc"].as_u64().unwrap(), "{row}");
    }
}

#[test]
fn resized_bytes_are_those_of_pillow_and_of_torchvision() {
    for row in list(&expected(), "resized") {
        let filter = match row["filter"].as_str().unwrap() {
            "nearest" => Resample::Nearest,
            "bilinear" => Resample::Bilinear,
            "bicubic" => Resample::Bicubic,
            _ => Resample::Lanczos,
        };
        let (width, height) = pair(&row["size"]);
        let from = picture(row);
        for (backend, key) in [(Backend::Pil, "pil"), (Backend::Torchvision, "torchvision")] {
            let found = resize(&from, width, height, filter, backend);
            assert_eq!(u64::from(crc32fast::hash(&found.rgb)), row[key].as_u64().unwrap(), "{key}: {row}");
        }
    }
}

#[test]
fn values_are_those_of_each_image_processor() {
    let expected = expected();
    let patch = expected["patch"].as_u64().unwrap() as usize;
    let folder = tempfile::tempdir().unwrap();
    for row in list(&expected, "processed") {
        fs::write(folder.path().join("preprocessor_config.json"), row["settings"].to_string()).unwrap();
        let processor = Processor::new(Processing::open(folder.path()).unwrap(), patch);
        for file in list(row, "files") {
            let about = format!("{} {file}", row["name"]);
            let from = picture(file);
            let found = processor.pixels(&from, false).unwrap();
            let tiles = list(file, "tiles").iter().map(|tile| {
                let (rows, columns) = pair(tile);
                Tile { rows: rows as usize, columns: columns as usize }
            });
            assert_eq!(found.tiles, tiles.collect::<Vec<_>>(), "{about}");
            assert_eq!(processor.layout(from.width, from.height, false).unwrap().tiles, found.tiles, "{about}");
            let bytes: Vec<u8> = found.patches.iter().flat_map(|value| value.to_le_bytes()).collect();
            let first: Vec<f32> = found.patches.iter().take(4).copied().collect();
            assert_eq!(u64::from(crc32fast::hash(&bytes)), file["crc"].as_u64().unwrap(), "{about}: {first:?}");
        }
    }
}

#[test]
fn a_file_that_lies_is_refused() {
    let refused = |bytes: &[u8], part: &str| {
        let error = Picture::decode(bytes).unwrap_err();
        assert_eq!(error.kind(), tunesmith_base::Kind::Data);
        assert!(error.message().contains(part), "{error} lacks {part:?}");
    };
    refused(b"", "an empty file");
    refused(b"no image at all", "no image");
    refused(&fs::read(golden("cmyk.jpg")).unwrap(), "CMYK");
    // A header of 60,000 x 60,000 pixels with no data behind it.
    let mut bomb = fs::read(golden("rgb.png")).unwrap();
    bomb[16..24].copy_from_slice(&[0, 0, 0xea, 0x60, 0, 0, 0xea, 0x60]);
    let crc = crc32fast::hash(&bomb[12..29]).to_be_bytes();
    bomb[29..33].copy_from_slice(&crc);
    refused(&bomb, "60000 x 60000");
    assert!(Picture::size(&bomb).is_err());
}

#[test]
fn no_step_makes_an_image_larger_than_may_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let processor = |settings: Value| {
        fs::write(folder.path().join("preprocessor_config.json"), settings.to_string()).unwrap();
        Processor::new(Processing::open(folder.path()).unwrap(), 8)
    };
    let padded = json!({"image_processor_type": "LlavaImageProcessor", "do_pad": true, "size": {"shortest_edge": 32}, "crop_size": 32});
    let cropped = json!({"image_processor_type": "CLIPImageProcessor", "do_resize": false, "crop_size": {"height": 16384, "width": 16}});
    let cropped_square = json!({"image_processor_type": "CLIPImageProcessor", "size": 32, "crop_size": 16384});
    let exact = json!({"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}});
    // The last one is small, and its size is too, but not what is between resampling one direction and the other.
    let cases = [(padded, 60_000, 1), (cropped, 60_000, 1), (cropped_square, 32, 32), (exact, 1, 2_900_000)];
    for (settings, width, height) in cases {
        let processor = processor(settings);
        let error = processor.layout(width, height, false).unwrap_err();
        assert!(error.kind() == tunesmith_base::Kind::Data && error.message().contains("would be made"), "{error}");
        let picture = Picture { width, height, rgb: vec![0; 3 * width as usize * height as usize] };
        assert!(processor.pixels(&picture, false).is_err());
    }
}

#[test]
fn an_image_of_which_no_patch_is_left_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let settings =
        json!({"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 8});
    fs::write(folder.path().join("preprocessor_config.json"), settings.to_string()).unwrap();
    let processor = Processor::new(Processing::open(folder.path()).unwrap(), 8);
    for (width, height) in [(1, 65), (65, 1), (1, u32::MAX)] {
        let error = processor.layout(width, height, false).unwrap_err();
        assert!(error.kind() == tunesmith_base::Kind::Data && error.message().contains("a patch 8 x 8"), "{error}");
    }
    assert_eq!(processor.layout(1, 64, false).unwrap().tiles[0], Tile { rows: 8, columns: 1 });
}

/// `smart_resize` of Qwen2-VL's image processor has the same limit.
#[test]
fn an_image_with_one_side_over_two_hundred_times_the_other_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let settings = json!({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2});
    fs::write(folder.path().join("preprocessor_config.json"), settings.to_string()).unwrap();
    let processor = Processor::new(Processing::open(folder.path()).unwrap(), 14);
    for (width, height) in [(2001, 10), (10, 2001), (1, u32::MAX)] {
        let error = processor.layout(width, height, false).unwrap_err();
        assert!(error.kind() == tunesmith_base::Kind::Data && error.message().contains("over 200 times"), "{error}");
    }
    assert!(processor.layout(2000, 10, false).is_ok());
}

#[test]
fn a_file_that_is_cut_off_or_changed_never_panics() {
    for name in ["rgb.png", "rgb.jpg", "rgb.webp", "animated.gif", "rgb.bmp", "rgb.tiff", "rotated.png"] {
        let bytes = fs::read(golden(name)).unwrap();
        let whole = Picture::decode(&bytes).unwrap();
        for end in (0..bytes.len()).step_by(7) {
            // An animation's first frame may be whole.
            if let Ok(found) = Picture::decode(&bytes[..end]) {
                assert!(found == whole || name == "rgb.tiff" || name == "animated.gif", "{name} up to {end}");
            }
        }
        if ["rgb.png", "rgb.jpg", "rgb.webp"].contains(&name) {
            let error = Picture::size(&bytes[..bytes.len() - 9]).unwrap_err();
            assert!(error.message().contains("cut off"), "{name} shows it without being decoded: {error}");
        }
        for at in (0..bytes.len()).step_by(3) {
            let mut changed = bytes.clone();
            changed[at] ^= 0x55;
            let _ = Picture::decode(&changed);
            let _ = Picture::size(&changed);
        }
    }
}

/// A motion photo has a film behind its picture, whose bytes may be any.
#[test]
fn what_lies_behind_a_jpeg_is_not_looked_at() {
    let bytes = fs::read(golden("rgb.jpg")).unwrap();
    let whole = Picture::decode(&bytes).unwrap();
    for film in [&b"\xff\xda\xff\xd8\xff"[..], &[0xff; 9], b"ftypmp42\xff\xd9\xff\xda"] {
        assert_eq!(Picture::decode(&[&bytes[..], film].concat()).unwrap(), whole);
    }
}

#[test]
fn a_thumbnail_is_a_small_png_of_the_picture() {
    let picture = Picture { width: 600, height: 200, rgb: [10, 200, 30].repeat(600 * 200) };
    let small = Picture::decode(&picture.thumbnail(256).unwrap()).unwrap();
    assert_eq!((small.width, small.height), (256, 85));
    assert!(small.rgb.as_chunks::<3>().0.iter().all(|pixel| *pixel == [10, 200, 30]));
    let tiny = Picture { width: 1, height: 2, rgb: vec![1, 2, 3, 4, 5, 6] };
    assert_eq!(Picture::decode(&tiny.thumbnail(256).unwrap()).unwrap(), tiny);
}

#[test]
fn settings_are_read_as_transformers_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    let open = |file: &str, settings: Value| {
        fs::write(folder.path().join(file), settings.to_string()).unwrap();
        Processing::open(folder.path())
    };
    let tile = |size: Value| {
        let found =
            open("preprocessor_config.json", json!({"image_processor_type": "GotOcr2ImageProcessor", "size": size}));
        match found.unwrap().size {
            Size::Canvas { tile, .. } => tile,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(tile(json!({"height": 32, "width": 40})), [32, 40]);
    assert_eq!(tile(json!([32, 40])), [32, 40]);
    assert_eq!(tile(json!(32)), [32, 32]);
    // Some classes never keep the middle alone. With an older file beside it, that of the whole processor counts.
    for (class, size, crops) in [
        ("SmolVLMImageProcessor", json!({"longest_edge": 32}), false),
        ("SiglipImageProcessor", json!({"height": 32, "width": 32}), true),
    ] {
        let more = json!({"image_processor_type": class, "size": size, "do_center_crop": true, "crop_size": 16});
        let found = open("processor_config.json", json!({"image_processor": more})).unwrap();
        assert_eq!((found.class, found.crop.is_some()), (class, crops));
    }
    let padded =
        json!({"image_processor_type": "CLIPImageProcessor", "do_pad": true, "pad_size": {"height": 64, "width": 64}});
    let refused = open("processor_config.json", json!({"image_processor": padded})).unwrap_err();
    assert!(refused.message().contains("do_pad: true with a pad_size"), "{refused}");
}
