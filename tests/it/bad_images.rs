//! Bad images in every form of a row: cut off, with a wrong size, not images at all, or missing. They are refused with the row
//! and the file, or left out and counted.
use crate::pictures::{copy, dataset, golden, write_rows};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tunesmith::Kind;
use tunesmith::config::BadImages;

/// A row that shows an image by its name or its bytes.
type Form = (&'static str, fn(&str, &[u8]) -> Value);

/// The text of RFC 4648.
pub fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let letters = |group: &[u8]| {
        let number = (0..3).fold(0_usize, |number, at| number << 8 | usize::from(group.get(at).copied().unwrap_or(0)));
        let letter = move |at: usize| {
            if at > group.len() { '=' } else { char::from(LETTERS[number >> (18 - 6 * at) & 63]) }
        };
        [letter(0), letter(1), letter(2), letter(3)]
    };
    bytes.chunks(3).flat_map(letters).collect()
}

fn chat(content: &Value) -> Value {
    json!([{"role": "user", "content": content}, {"role": "assistant", "content": "a cat"}])
}

const FORMS: [Form; 12] = [
    ("a caption", |name, _| json!({"image": name, "caption": "a cat"})),
    ("captions", |name, _| json!({"image": {"path": name, "bytes": null}, "alt_text": ["a cat", "one cat"]})),
    ("a question", |name, _| json!({"image": name, "question": "what?", "answer": "a cat"})),
    ("LLaVA", |name, _| {
        let turns = json!([{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cat"}]);
        json!({"image": name, "conversations": turns})
    }),
    ("a list", |name, _| json!({"images": [name], "messages": chat(&json!("<image>what?"))})),
    ("a list without places", |name, _| json!({"images": [{"path": name}], "messages": chat(&json!("what?"))})),
    ("a part by path", |name, _| json!({"messages": chat(&json!([{"type": "image", "path": name}]))})),
    ("a part by image", |name, _| json!({"messages": chat(&json!([{"type": "image", "image": name}]))})),
    ("OpenAI's part", |_, bytes| {
        let address = format!("data:image/png;base64,{}", base64(bytes));
        json!({"messages": chat(&json!([{"type": "image_url", "image_url": {"url": address}}]))})
    }),
    ("base64", |_, bytes| json!({"image": {"base64": base64(bytes)}, "question": "what?", "answer": "a cat"})),
    ("a statement", |name, _| json!({"image": name, "caption": "a cat is here", "label": 1, "relation": "at"})),
    ("a region", |name, _| {
        let turns = json!([{"from": "human", "value": "<mask> <depth>?"}, {"from": "gpt", "value": "a cat"}]);
        json!({"filename": name, "conversations": turns, "bbox": [[0, 0, 1, 1]]})
    }),
];

/// Makes a model's folder, and a folder with three good images and some bad ones. Returns the bad ones, each with a part of its
/// error.
fn folders(root: &Path) -> Vec<(&'static str, &'static str)> {
    copy(&golden("vision/llava/model"), &root.join("model"));
    copy(&golden("picture_chats/llava"), &root.join("model"));
    let images = root.join("images");
    fs::create_dir(&images).unwrap();
    for good in ["rgb.png", "animated.gif", "cmyk.jpg"] {
        fs::copy(golden("pixels").join(good), images.join(good)).unwrap();
    }
    fs::copy(golden("pixels/rgb.png"), root.join("outside.png")).unwrap();
    let bytes = fs::read(golden("pixels/rgb.png")).unwrap();
    fs::write(images.join("cut.png"), &bytes[..bytes.len() / 2]).unwrap();
    let mut bomb = bytes;
    bomb[16..24].copy_from_slice(&[0, 0, 0xea, 0x60, 0, 0, 0xea, 0x60]);
    let crc = crc32fast::hash(&bomb[12..29]).to_be_bytes();
    bomb[29..33].copy_from_slice(&crc);
    fs::write(images.join("bomb.png"), bomb).unwrap();
    fs::write(images.join("empty.png"), "").unwrap();
    fs::write(images.join("text.png"), "no image").unwrap();
    std::os::unix::fs::symlink(root.join("outside.png"), images.join("link.png")).unwrap();
    vec![
        ("cut.png", "is cut off"),
        ("bomb.png", "60000 x 60000"),
        ("cmyk.jpg", "CMYK"),
        ("empty.png", "an empty file"),
        ("text.png", "no image"),
        ("link.png", "leads out of the folder"),
        ("../outside.png", "leads out of the folder"),
        ("none.png", "No such file"),
    ]
}

#[test]
fn a_bad_image_is_refused_with_row_and_file_or_left_out_in_every_form_of_a_row() {
    let root = tempfile::tempdir().unwrap();
    let bad = folders(root.path());
    let (model, images, rows) = (root.path().join("model"), root.path().join("images"), root.path().join("rows.jsonl"));
    let load = |bad_images: BadImages| {
        dataset(&model, &rows, |config| {
            config.data.image_dir = Some(images.clone());
            config.data.cache_dir = Some(root.path().join("cache"));
            config.data.bad_images = bad_images;
        })
    };
    let mut tried = 0;
    for (form, row) in FORMS {
        let good = |name: &str| row(name, &fs::read(images.join(name)).unwrap());
        write_rows(&rows, [good("rgb.png"), good("animated.gif")]);
        let all = load(BadImages::Refuse).unwrap_or_else(|error| panic!("{form}: {error}")).train.len();
        assert_eq!(all, 2, "{form}");
        let by_name = row("a name", b"").to_string().contains("a name");
        for (name, said) in &bad {
            let bytes = fs::read(images.join(name)).unwrap_or_default();
            if !by_name && (said.contains("leads out") || said.contains("No such file") || bytes.is_empty()) {
                continue; // no name leads anywhere, and no bytes are no image
            }
            write_rows(&rows, [good("rgb.png"), row(name, &bytes)]);
            let error = load(BadImages::Refuse).map(|_| ()).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), Kind::Data, "{form}, {name}: {text}");
            assert!(text.contains("rows.jsonl:2") && text.contains(said), "{form}, {name}: {text}");
            assert!(!by_name || text.contains(&format!("image {name}: ")), "{form}, {name}: {text}");
            let left = load(BadImages::Skip).unwrap_or_else(|error| panic!("{form}, {name}: {error}"));
            assert_eq!(left.train.len(), 1, "{form}, {name}");
            assert!(left.report.warnings.iter().any(|warning| warning.contains("rows.jsonl:2")), "{form}, {name}");
            tried += 1;
        }
    }
    assert_eq!(tried, 10 * 8 + 2 * 4);
}
