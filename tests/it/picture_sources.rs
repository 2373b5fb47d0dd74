//! Images in archives, ranks that divide the encoding of images, and a pair of text model and encoder saved as one folder.
use crate::pictures::{encoder, kept, paired, picture, seeing, write_rows};
use crate::run::fixture::{Fixture, said, train, tunesmith};
use serde_json::{Value, json};
use std::fs;
use std::io::Write as _;
use std::path::Path;

/// A tar archive of files, as GNU tar writes it.
pub fn tar(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in files {
        let mut header = vec![0; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..108].copy_from_slice(b"0000644\0");
        header[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
        header[148..156].fill(b' ');
        header[156] = b'0';
        header[257..265].copy_from_slice(b"ustar  \0");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        bytes.extend(header);
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

/// A zip archive of files that are not compressed, as `zip -0` writes it.
fn zip(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    zip_of(files, false)
}

/// A zip archive of files, which may be compressed.
pub fn zip_of(files: &[(String, Vec<u8>)], deflated: bool) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in files {
        let offset = bytes.len() as u32;
        let mut packed = content.clone();
        if deflated {
            let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(content).unwrap();
            packed = encoder.finish().unwrap();
        }
        let mut shared = vec![20, 0, 0, 0, if deflated { 8 } else { 0 }, 0, 0, 0, 0, 0];
        shared.extend(crc32fast::hash(content).to_le_bytes());
        shared.extend([(packed.len() as u32).to_le_bytes(), (content.len() as u32).to_le_bytes()].concat());
        shared.extend([name.len() as u8, 0, 0, 0]);
        bytes.extend([&b"PK\x03\x04"[..], shared.as_slice(), name.as_bytes(), &packed].concat());
        directory.extend([&b"PK\x01\x02\x14\x03"[..], shared.as_slice(), &[0; 6]].concat());
        directory.extend((0o100_644_u32 << 16).to_le_bytes());
        directory.extend(offset.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (count, start, size) = (files.len() as u16, bytes.len() as u32, directory.len() as u32);
    bytes.extend(directory);
    bytes.extend(b"PK\x05\x06\0\0\0\0");
    bytes.extend([count.to_le_bytes(); 2].concat());
    bytes.extend([size.to_le_bytes(), start.to_le_bytes()].concat());
    bytes.extend([0, 0]);
    bytes
}

/// The training rows of [`paired`] as members of a shard.
fn shard(fixture: &Fixture) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for number in 0..24 {
        let (name, caption) =
            [("a.png", json!("a cat")), ("b.png", json!(["the sea", "the blue sea"])), ("b.png", json!("waves"))]
                [number % 3]
                .clone();
        files.push((format!("{number:04}.png"), fs::read(fixture.path(name)).unwrap()));
        match caption.as_str() {
            Some(text) => files.push((format!("{number:04}.txt"), text.as_bytes().to_vec())),
            None => files.push((format!("{number:04}.json"), json!({ "caption": caption }).to_string().into_bytes())),
        }
    }
    files
}

fn adapter(fixture: &Fixture, out: &str, lines: &[&str]) -> Vec<u8> {
    let config = fixture.config(out, &[&["train.max_steps: 3", &encoder(fixture)], lines].concat());
    let done = train(&config, &[&format!("train.output_dir={}", fixture.path(out).display())]);
    assert!(done.status.success(), "{lines:?}: {}", said(&done));
    fs::read(fixture.path(out).join("adapter/adapter_model.safetensors")).unwrap()
}

#[test]
fn shards_train_as_the_files_in_them() {
    let fixture = paired();
    let expected = adapter(&fixture, "files", &[]);
    let archive = tar(&shard(&fixture));
    fs::write(fixture.path("train.tar"), &archive).unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(&archive).unwrap();
    fs::write(fixture.path("train.tar.gz"), packed.finish().unwrap()).unwrap();
    fs::write(fixture.path("train.zip"), zip(&shard(&fixture))).unwrap();
    for name in ["train.tar", "train.tar.gz", "train.zip"] {
        let cache = format!("data.cache_dir: {}", fixture.path("cache of shards").display());
        let rows = format!("data.train_path: {}", fixture.path(name).display());
        assert!(adapter(&fixture, &format!("of {name}"), &[&cache, &rows]) == expected, "{name}");
    }
    // Pictures of a compressed archive are kept, those of the other one stay in it.
    assert_eq!(fs::read_dir(fixture.path("cache of shards/pictures")).unwrap().count(), 2);
    // The cache is where the settings say, not beside the rows.
    fs::create_dir(fixture.path("below")).unwrap();
    fs::copy(fixture.path("train.tar.gz"), fixture.path("below/train.tar.gz")).unwrap();
    let lines = ["data.cache_dir: kept here", "data.train_path: below/train.tar.gz", "data.val_path: UNSET"];
    let config = fixture.config("relative", &[&lines[..], &["train.max_steps: 1", &encoder(&fixture)]].concat());
    let args = ["train", config.to_str().unwrap(), "--overwrite"];
    let done = tunesmith(&args).current_dir(fixture.path("")).output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    // Rows elsewhere name members of an archive.
    let row = |number: usize| json!({"image": format!("{number:04}.png"), "caption": "a cat"});
    write_rows(&fixture.path("members.jsonl"), (0..24).map(row));
    write_rows(
        &fixture.path("same.jsonl"),
        (0..24).map(|number| {
            let file = ["a.png", "b.png", "b.png"][number % 3];
            json!({"image": file, "caption": "a cat"})
        }),
    );
    let rows = |name: &str| format!("data.train_path: {}", fixture.path(name).display());
    let no_val = "data.val_path: UNSET";
    let expected = adapter(&fixture, "named", &[&rows("same.jsonl"), no_val]);
    for name in ["train.tar", "train.zip"] {
        let within = format!("data.image_dir: {}", fixture.path(name).display());
        let found = adapter(&fixture, &format!("within {name}"), &[&rows("members.jsonl"), &within, no_val]);
        assert!(found == expected, "{name}");
    }
}

#[test]
fn a_bad_shard_is_refused_before_the_model_loads() {
    let fixture = paired();
    let refused = |files: &[(String, Vec<u8>)], part: &str| {
        fs::write(fixture.path("train.tar"), tar(files)).unwrap();
        let rows = format!("data.train_path: {}", fixture.path("train.tar").display());
        let config = fixture.config("run", &[&encoder(&fixture), &rows]);
        let done = train(&config, &[]);
        assert_eq!(done.status.code(), Some(3), "{}", said(&done));
        assert!(said(&done).contains("train.tar") && said(&done).contains(part), "{} lacks {part}", said(&done));
    };
    let file = |name: &str, content: &[u8]| (name.to_owned(), content.to_vec());
    let png = fs::read(fixture.path("a.png")).unwrap();
    refused(&[file("1.png", &png), file("1.mp4", b""), file("1.txt", b"x")], "video");
    refused(&[file("1.png", &png), file("1.json", b"[]")], "1.json");
    refused(&[file("1.png", b"no image"), file("1.txt", b"x")], "no image");
    refused(&[file("../1.png", &png), file("1.txt", b"x")], "leads out");
    // One that claims more bytes than it has, one with another checksum, and one that leads out.
    let members = [file("1.png", &png), file("1.txt", b"x")];
    let mut larger = zip(&members);
    let directory = larger.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
    larger[directory + 24] ^= 1;
    let mut other = zip(&members);
    other[directory + 16] ^= 1;
    for (bytes, part) in [
        (larger, "that the archive claims"),
        (other, "checksum"),
        (zip(&[file("../1.png", &png), file("1.txt", b"x")]), "leads out"),
        (zip(&members)[..directory].to_vec(), "no zip archive"),
    ] {
        fs::write(fixture.path("train.zip"), bytes).unwrap();
        let rows = format!("data.train_path: {}", fixture.path("train.zip").display());
        let config = fixture.config("run", &[&encoder(&fixture), &rows]);
        let done = train(&config, &[]);
        assert_eq!(done.status.code(), Some(3), "{}", said(&done));
        assert!(said(&done).contains("train.zip") && said(&done).contains(part), "{} lacks {part}", said(&done));
    }
}

#[test]
fn ranks_of_a_machine_share_the_encoding() {
    let fixture = paired();
    for number in 0..12 {
        let mut bytes = fs::read(picture(["rgb.png", "wide.png", "tall.png"][number % 3])).unwrap();
        // Behind the end of a PNG file, bytes mean nothing; but it is another picture's file.
        bytes.push(number as u8);
        fs::write(fixture.path(&format!("{number}.png")), bytes).unwrap();
    }
    write_rows(
        &fixture.path("train.jsonl"),
        (0..24).map(|number| json!({"image": format!("{}.png", number % 12), "caption": "a cat"})),
    );
    let encoder = encoder(&fixture);
    let ranks = ["train.strategy: dp", "train.dp_ranks: 2", "train.grad_accum: 2", "train.batch_size: 1", &encoder];
    let each = kept(&fixture, "each", "none", &[&ranks[..], &["vision.cache_features: false"]].concat());
    let shared = kept(&fixture, "shared", "cache", &[&ranks[..], &["vision.cache_features: true"]].concat());
    assert!(shared.0 == each.0 && shared.1 == each.1, "{}", shared.2);
    let folder = fs::read_dir(fixture.path("cache/features")).unwrap().next().unwrap().unwrap().path();
    let names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(
        names.len() > 1 && names.iter().all(|name| Path::new(name).extension().unwrap() == "safetensors"),
        "{names:?}"
    );
}

#[test]
fn a_pair_becomes_one_folder_that_answers_and_trains_alike() {
    let fixture = paired();
    let lines =
        ["vision.connector: mlp", "tuning.vision_unfreeze_layers: 1", "tuning.vision_target_modules: [\"fc1\"]"];
    let encoder = encoder(&fixture);
    let config = fixture.config("run", &[&["train.max_steps: 3", &encoder], &lines[..]].concat());
    let done = train(&config, &[]);
    assert!(done.status.success(), "{}", said(&done));
    let command = |args: &[&str]| {
        let done = tunesmith(args).output().unwrap();
        assert!(done.status.success(), "{args:?}: {}", said(&done));
        (String::from_utf8_lossy(&done.stdout).into_owned(), said(&done))
    };
    let (config, merged) = (config.display().to_string(), fixture.path("merged").display().to_string());
    let said_of_merge = command(&["merge", &config, "--output", &merged]).1;
    assert!(said_of_merge.contains("load_vision.py"), "{said_of_merge}");
    for name in ["vision.json", "vision.safetensors", "preprocessor_config.json", "model.safetensors", "config.json"] {
        assert!(fixture.path("merged").join(name).is_file(), "{name}");
    }
    let file = picture("rgb.png");
    let own = command(&["infer", &config, "--image", &file]).0;
    let name = format!("model.name={merged}");
    // The merged folder needs no encoder of its own, and no adapter.
    let plain = fixture.config("plain", &[]).display().to_string();
    let args = ["infer", &plain, &name, "vision.load=true", "--base", "--image", &file];
    assert_eq!(command(&args).0, own);
    // The same again: training goes on, and what comes out is a pair in a folder too.
    let on = fixture
        .config("on", &["train.max_steps: 2", &format!("model.name: {merged}"), "tuning.freeze_connector: false"]);
    let out = fixture.path("second").display().to_string();
    let done = train(&on, &[&format!("train.output_dir={out}")]);
    assert!(done.status.success(), "{}", said(&done));
    let twice = fixture.path("twice").display().to_string();
    command(&["merge", &on.display().to_string(), &format!("train.output_dir={out}"), "--output", &twice]);
    let [first, second] = [&merged, &twice].map(|dir| fs::read(Path::new(dir).join("vision.safetensors")).unwrap());
    assert!(first.len() == second.len() && first != second, "the same tensors, a connector that went on");
    assert_eq!(
        fs::read(Path::new(&merged).join("vision.json")).unwrap(),
        fs::read(Path::new(&twice).join("vision.json")).unwrap()
    );
}

/// Trains until the answers are learned, and holds the scores of the validation rows against those wanted.
fn learns_and_scores(fixture: &Fixture, lines: &[&str], wanted: &[(&str, f64)]) {
    let learned =
        ["train.max_steps: 60", "train.learning_rate: 0.02", "train.batch_size: 6", "train.save_strategy: no"];
    let config = fixture.config("run", &[&learned[..], lines].concat());
    let done = train(&config, &[]);
    assert!(done.status.success(), "{}", said(&done));
    let done = tunesmith(&["eval", config.to_str().unwrap()]).output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    let text = fs::read(fixture.path("out/eval/metrics.json")).unwrap();
    let metrics: Value = serde_json::from_slice(&text).unwrap();
    for (name, value) in wanted {
        let found = metrics["models"]["tuned"]["scores"][name]["value"].as_f64();
        assert!(found.is_some_and(|found| (found - value).abs() < 1e-9), "{name}: {found:?}\n{}", said(&done));
    }
}

#[test]
fn an_evaluation_scores_answers_about_pictures() {
    let fixture = seeing("llava");
    let rows = [("rgb.png", "is it?", "yes"), ("wide.png", "is it?", "no"), ("tall.png", "which?", "(b)")];
    let row = |number: usize| {
        let (file, question, answer) = rows[number % 3];
        json!({"image": picture(file), "question": question, "answer": answer})
    };
    write_rows(&fixture.path("train.jsonl"), (0..60).map(row));
    write_rows(&fixture.path("val.jsonl"), (0..6).map(row));
    let whole = ["yes_no_accuracy", "yes_no_f1", "choice", "vqa_accuracy", "rouge1"].map(|name| (name, 1.0));
    learns_and_scores(&fixture, &["eval.metrics: [\"yes_no\", \"choice\", \"vqa_accuracy\", \"rouge\"]"], &whole);
    // Of several people's answers the most frequent is trained on, and all count. Two of ten gave the first: each of the two sees one other
    // who did, the eight see two, and three would be enough.
    let fixture = seeing("llava");
    let few = ["yes", "a", "b", "c", "d", "yes", "e", "f", "g", "h"];
    let several = |number: usize| {
        let (file, question, _) = rows[number % 2];
        let of_all = |text: &str| json!({"answer": text, "answer_confidence": "yes"});
        let answers: Vec<Value> = if number.is_multiple_of(2) { few.map(of_all).into() } else { vec![json!("no"); 10] };
        json!({"image": picture(file), "question": question, "answers": answers})
    };
    write_rows(&fixture.path("train.jsonl"), (0..60).map(several));
    write_rows(&fixture.path("val.jsonl"), (0..2).map(several));
    let accuracy = (8.0 * 2.0 / 3.0 + 2.0 / 3.0) / 10.0;
    let wanted = [("vqa_accuracy", f64::midpoint(accuracy, 1.0)), ("exact_match", 1.0)];
    learns_and_scores(&fixture, &["eval.metrics: [\"vqa_accuracy\", \"exact_match\"]"], &wanted);
    let samples = fs::read_to_string(fixture.path("out/eval/samples.jsonl")).unwrap();
    let first: Value = serde_json::from_str(samples.lines().next().unwrap()).unwrap();
    assert_eq!((&first["reference"], &first["references"]), (&json!("yes"), &json!(few)));
    // A caption is compared with all of its image's, and the best one counts. CIDEr takes their mean: one of two captions has the same words
    // and pairs of words, and none has longer runs, which are half of the score.
    let fixture = paired();
    let caption = |number: usize| match number % 2 {
        0 => ("a.png", "a cat", "waves"),
        _ => ("b.png", "the sea", "water"),
    };
    let learned = (0..60).map(caption).map(|(image, one, _)| json!({"image": image, "caption": one}));
    write_rows(&fixture.path("train.jsonl"), learned);
    let several = (0..2).map(caption).map(|(image, one, other)| json!({"image": image, "caption": [other, one]}));
    write_rows(&fixture.path("val.jsonl"), several);
    let lines = [
        &*encoder(&fixture),
        "train.learning_rate: 0.005",
        "train.max_steps: 150",
        "eval.metrics: [\"cider\", \"meteor\", \"rouge\"]",
    ];
    learns_and_scores(&fixture, &lines, &[("rouge1", 1.0), ("rougeL", 1.0), ("cider", 2.5)]);
}

#[test]
fn the_report_of_an_evaluation_shows_pictures() {
    let fixture = seeing("llava");
    let config = fixture.config("run", &["train.max_steps: 1"]);
    assert!(train(&config, &[]).status.success());
    let done = tunesmith(&["eval", config.to_str().unwrap()]).output().unwrap();
    assert!(done.status.success(), "{}", said(&done));
    let folder = fixture.path("out/eval");
    let report = fs::read_to_string(folder.join("report.html")).unwrap();
    assert!(report.contains("<img src=\"data:image/png;base64,"), "small copies");
    let samples = fs::read_to_string(folder.join("samples.jsonl")).unwrap();
    assert!(samples.contains("rgb.png]") || samples.contains("wide.png]"), "the picture's name: {samples}");
}
