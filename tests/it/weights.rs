//! Reading and writing safetensors: compared with the reference library, and with files whose headers are wrong.
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::SafeTensors;
use tempfile::TempDir;
use tunesmith::config::arch::{Arch, TensorSpec};
use tunesmith::device::Array;
use tunesmith::model::weights::{WeightFiles, write_safetensors};
use tunesmith::{Error, Kind};

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/a").join(path)
}

fn spec(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.to_vec() }
}

/// A file with the given header text and data.
fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn dir_with(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn open_error(files: &[(&str, &[u8])], expected: &[TensorSpec]) -> Error {
    let dir = dir_with(files);
    let error = WeightFiles::open(dir.path(), expected).expect_err("must be refused");
    assert_eq!(error.kind(), Kind::Model, "{error}");
    error
}

fn assert_says(error: &Error, fragments: &[&str]) {
    for fragment in fragments {
        assert!(error.to_string().contains(fragment), "{fragment:?} is not in: {error}");
    }
}

#[test]
fn golden_models_read_as_the_reference_library_reads_them() {
    for name in ["llama", "qwen2", "qwen3"] {
        let dir = golden(name).join("model");
        let arch = Arch::from_dir(&dir).unwrap();
        let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let reference = SafeTensors::deserialize(&bytes).unwrap();
        for spec in arch.tensors() {
            let view = reference.tensor(&spec.name).unwrap();
            let expected: Vec<f32> = match view.dtype() {
                safetensors::Dtype::F32 => {
                    view.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
                }
                safetensors::Dtype::BF16 => {
                    view.data().chunks(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect()
                }
                other => panic!("{other:?}"),
            };
            let mut found = vec![f32::NAN; spec.len()];
            weights.read_into(&spec.name, &mut found).unwrap();
            assert_eq!(found, expected, "{name} {}", spec.name);
        }
    }
}

#[test]
fn every_half_number_widens_exactly() {
    for (dtype, widen) in [
        ("F16", (|bits| f16::from_bits(bits).to_f32()) as fn(u16) -> f32),
        ("BF16", |bits| bf16::from_bits(bits).to_f32()),
    ] {
        let finite: Vec<u16> = (0..=u16::MAX).filter(|&bits| widen(bits).is_finite()).collect();
        let (count, bytes) = (finite.len(), finite.iter().flat_map(|bits| bits.to_le_bytes()).collect::<Vec<u8>>());
        let header = |count: usize| {
            let end = 2 * count;
            format!(r#"{{"x":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[0,{end}]}}}}"#)
        };
        let dir = dir_with(&[("model.safetensors", &raw(&header(count), &bytes))]);
        let (_, values) = WeightFiles::open(dir.path(), &[spec("x", &[count])]).unwrap().read("x").unwrap();
        for (bits, found) in finite.into_iter().zip(values) {
            assert!(found.to_bits() == widen(bits).to_bits(), "{dtype} {bits:#x}");
        }
        // Each of the others is refused, wherever it stands, by every way to read it.
        for bits in (0..=u16::MAX).filter(|&bits| !widen(bits).is_finite()).step_by(97) {
            let mut bytes = bytes.clone();
            let at = usize::from(bits) % count;
            bytes[2 * at..2 * at + 2].copy_from_slice(&bits.to_le_bytes());
            let dir = dir_with(&[("model.safetensors", &raw(&header(count), &bytes))]);
            let files = WeightFiles::open(dir.path(), &[spec("x", &[count])]).unwrap();
            let narrow = files.read_bf16_to("x", Array::from(vec![bf16::ZERO; count]).view_mut()).unwrap_err();
            let part = files.read_part_into("x", at, &mut [0.0]).unwrap_err();
            for error in [files.read("x").unwrap_err(), narrow, part] {
                let text = error.to_string();
                let place = format!("at index {at} of [{count}]");
                assert!(error.kind() == Kind::Model && text.contains("NaN or infinite"), "{text}");
                assert!(text.contains("model.safetensors: tensor \"x\"") && text.contains(&place), "{text}");
            }
        }
    }
}

#[test]
fn tensors_larger_than_a_chunk_survive_the_round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let large: Vec<f32> = (0..700_001).map(|i| i as f32 * 0.5).collect();
    let odd = [f32::MIN, -0.0, f32::MIN_POSITIVE / 2.0, f32::MAX];
    let tensors = [("b.large".into(), vec![700_001], &large[..]), ("a.odd".into(), vec![2, 2], &odd[..])];
    let path = dir.path().join("model.safetensors");
    write_safetensors(&path, &tensors, &[("format", "pt")]).unwrap();
    let expected = [spec("a.odd", &[2, 2]), spec("b.large", &[700_001])];
    let weights = WeightFiles::open(dir.path(), &expected).unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a.odd", "b.large"]);
    assert_eq!(weights.shape("a.odd"), Some(&[2, 2][..]));
    assert_eq!(weights.read("b.large").unwrap().1, large);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&weights.read("a.odd").unwrap().1), bits(&odd));
    let bytes = std::fs::read(&path).unwrap();
    let reference = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(reference.tensor("b.large").unwrap().shape(), [700_001]);
    let again = write_safetensors(&path, &tensors, &[]).unwrap_err();
    assert_eq!(again.kind(), Kind::Io, "an existing file is never overwritten");
}

#[test]
fn a_written_golden_file_is_byte_identical() {
    let path = golden("llama/adapter_final/adapter_model.safetensors");
    let weights = WeightFiles::open_file(&path).unwrap();
    let read: Vec<_> = weights.names().map(|name| (name.to_owned(), weights.read(name).unwrap())).collect();
    let tensors: Vec<_> = read.iter().rev().map(|(name, (shape, v))| (name.clone(), shape.clone(), &v[..])).collect();
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.safetensors");
    write_safetensors(&copy, &tensors, &[("format", "pt")]).unwrap();
    assert_eq!(std::fs::read(copy).unwrap(), std::fs::read(path).unwrap());
}

#[test]
fn the_writer_refuses_what_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let values = [1.0, 2.0];
    let wrong = [("x".to_owned(), vec![3], &values[..])];
    assert!(write_safetensors(&dir.path().join("a"), &wrong, &[]).is_err());
    let twice = [("x".to_owned(), vec![2], &values[..]), ("x".to_owned(), vec![2], &values[..])];
    assert!(write_safetensors(&dir.path().join("b"), &twice, &[]).is_err());
}

const XY: &str =
    r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"y":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;

fn xy() -> [TensorSpec; 2] {
    [spec("x", &[2]), spec("y", &[1])]
}

#[test]
fn lying_headers_are_refused_by_name() {
    let model = |header: &str, data: usize| {
        let file = raw(header, &vec![0; data]);
        open_error(&[("model.safetensors", &file)], &xy())
    };
    assert!(WeightFiles::open(dir_with(&[("model.safetensors", &raw(XY, &[0; 12]))]).path(), &xy()).is_ok());
    let x = |info: &str| format!(r#"{{"x":{{{info}}}}}"#);
    let y = r#""y":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}"#;
    assert_says(&model(XY, 11), &["model.safetensors", "\"y\"", "8..12", "11"]);
    assert_says(&model(XY, 13), &["1 bytes belong to no tensor"]);
    assert_says(&model(&x(r#""dtype":"F32","shape":[2],"data_offsets":[8,0]"#), 8), &["\"x\"", "8..0"]);
    assert_says(&model(&x(r#""dtype":"F32","shape":[3],"data_offsets":[0,8]"#), 8), &["\"x\"", "[3]", "8 bytes"]);
    let huge = u64::MAX;
    assert_says(
        &model(&x(&format!(r#""dtype":"F32","shape":[2],"data_offsets":[0,{huge}]"#)), 8),
        &["\"x\"", "claims"],
    );
    assert_says(&model(&x(&format!(r#""dtype":"F32","shape":[{huge},{huge}],"data_offsets":[0,8]"#)), 8), &["\"x\""]);
    assert_says(&model(&x(&format!(r#""dtype":"Q9","shape":[{huge},{huge}],"data_offsets":[0,8]"#)), 8), &["\"x\""]);
    assert_says(&model(&x(r#""dtype":"F32","shape":[-2],"data_offsets":[0,8]"#), 8), &["header is not valid", "\"x\""]);
    assert_says(&model(&x(r#""dtype":"F32","shape":[2]"#), 8), &["data_offsets"]);
    assert_says(&model("[]", 0), &["header is not valid"]);
    assert_says(&model(r#"{"__metadata__":{"a":1}}"#, 0), &["__metadata__"]);
    let overlap = format!(r#"{{"x":{{"dtype":"F32","shape":[2],"data_offsets":[4,12]}},{y}}}"#);
    assert_says(&model(&overlap, 12), &["gap"]);
    let overlap = format!(r#"{{"x":{{"dtype":"F32","shape":[3],"data_offsets":[0,12]}},{y}}}"#);
    assert_says(&model(&overlap, 12), &["\"y\"", "overlaps"]);
    let twice = format!("{{{y},{y}}}");
    assert_says(&model(&twice.replace("[8,12]", "[0,4]"), 4), &["overlaps"]);
    let twice = r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;
    assert_says(&model(twice, 12), &["\"x\" is there twice"]);
    for claim in [u64::MAX, 1 << 62, 100_000_001, 400] {
        let mut file = raw(XY, &[0; 12]);
        file[..8].copy_from_slice(&claim.to_le_bytes());
        let error = open_error(&[("model.safetensors", &file)], &xy());
        assert_says(&error, &["header claims", &claim.to_string(), "model.safetensors"]);
    }
    assert_says(&open_error(&[("model.safetensors", &[0; 5])], &xy()), &["5 bytes long"]);
}

#[test]
fn wrong_models_are_refused_by_tensor() {
    let file = raw(XY, &[0; 12]);
    let refused = |expected: &[TensorSpec], fragments: &[&str]| {
        assert_says(&open_error(&[("model.safetensors", &file)], expected), fragments);
    };
    refused(&[spec("x", &[1, 2]), spec("y", &[1])], &["\"x\" is [2], expected [1, 2]", "hint"]);
    refused(&[spec("x", &[2]), spec("y", &[1]), spec("z", &[4])], &["no tensor \"z\", expected [4]"]);
    refused(&[spec("x", &[2])], &["\"y\" (F32 [1]) is no part of"]);
    let int = raw(r#"{"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}"#, &[0; 8]);
    assert_says(
        &open_error(&[("model.safetensors", &int)], &[spec("x", &[2])]),
        &["\"x\" is I32, expected F32, BF16 or F16", "quantized"],
    );
    assert_says(&open_error(&[], &xy()), &["no weights", "model.safetensors.index.json"]);
    assert_says(&open_error(&[("pytorch_model.bin", b"x")], &xy()), &["not yet: pytorch_model.bin"]);
}

#[test]
fn known_leftovers_are_passed_over() {
    let header = r#"{"lm_head.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
        "model.layers.0.self_attn.rotary_emb.inv_freq":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},
        "x":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},"__metadata__":{"format":"pt"}}"#;
    let dir = dir_with(&[("model.safetensors", &raw(header, &[0; 12]))]);
    WeightFiles::open(dir.path(), &[spec("x", &[1])]).unwrap();
    let error = WeightFiles::open(dir.path(), &[spec("x", &[1]), spec("lm_head.weight", &[2])]).unwrap_err();
    assert_says(&error, &["lm_head.weight", "expected [2]"]);
}

#[test]
fn a_shared_head_is_a_copy_of_the_embedding() {
    let header = r#"{"lm_head.weight":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},
        "model.embed_tokens.weight":{"dtype":"F32","shape":[2,1],"data_offsets":[8,16]}}"#;
    let open = |data: [f32; 4]| {
        let bytes: Vec<u8> = data.iter().flat_map(|value| value.to_le_bytes()).collect();
        let dir = dir_with(&[("model.safetensors", &raw(header, &bytes))]);
        WeightFiles::open(dir.path(), &[spec("model.embed_tokens.weight", &[2, 1])]).map(drop)
    };
    open([1.0, 2.0, 1.0, 2.0]).unwrap();
    let error = open([1.0, 2.5, 1.0, 2.0]).unwrap_err();
    assert_says(&error, &["lm_head.weight", "config.json says", "\"tie_word_embeddings\": false"]);
}

const INDEX: &str = "model.safetensors.index.json";
const X: &str = r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
const Y: &str = r#"{"y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;

#[test]
fn shards_are_read_and_checked() {
    let x = raw(X, &[1.0f32.to_le_bytes(), 2.0f32.to_le_bytes()].concat());
    let y = raw(Y, &3.0f32.to_le_bytes());
    let index = |map: &str| format!(r#"{{"metadata":{{"total_size":12}},"weight_map":{{{map}}}}}"#);
    let good = index(r#""x":"m-1.safetensors","y":"m-2.safetensors""#);
    let dir = dir_with(&[(INDEX, good.as_bytes()), ("m-1.safetensors", &x), ("m-2.safetensors", &y)]);
    let sharded = WeightFiles::open(dir.path(), &xy()).unwrap();
    assert_eq!(sharded.read("x").unwrap().1, [1.0, 2.0]);
    assert_eq!(sharded.read("y").unwrap().1, [3.0]);
    let both = raw(XY, &[1.0f32.to_le_bytes(), 2.0f32.to_le_bytes(), 3.0f32.to_le_bytes()].concat());
    let single = WeightFiles::open_file(&dir_path_with(dir.path(), "one.safetensors", &both)).unwrap();
    assert_eq!(single.fingerprint().unwrap(), sharded.fingerprint().unwrap(), "sharding does not change the hash");

    let refused = |map: &str, fragments: &[&str]| {
        let error =
            open_error(&[(INDEX, index(map).as_bytes()), ("m-1.safetensors", &x), ("m-2.safetensors", &y)], &xy());
        assert_says(&error, &[&[INDEX], fragments].concat());
    };
    let abs = dir.path().join("m-1.safetensors");
    for bad in ["../m-1.safetensors", "a/m-1.safetensors", abs.to_str().unwrap(), "..", "", ".hidden", "a\\\\b"] {
        refused(&format!(r#""x":"{bad}","y":"m-2.safetensors""#), &["shard name", "plain name"]);
    }
    refused(r#""x":"m-1.safetensors","y":"m-3.safetensors""#, &["m-3.safetensors", "missing"]);
    refused(r#""x":"m-1.safetensors","y":"m-1.safetensors""#, &["\"y\"", "m-1.safetensors", "does not hold it"]);
    refused(r#""x":"m-1.safetensors","y":"m-2.safetensors","z":"m-2.safetensors""#, &["\"z\""]);
    refused(r#""x":"m-1.safetensors","x":"m-1.safetensors","y":"m-2.safetensors""#, &["\"x\" is listed twice"]);
    refused(r#""x":1"#, &["not a valid index"]);
    let twice = open_error(
        &[(INDEX, good.as_bytes()), ("m-1.safetensors", &raw(XY, &[0; 12])), ("m-2.safetensors", &y)],
        &xy(),
    );
    assert_says(&twice, &["\"y\" is there twice", "m-1.safetensors", "m-2.safetensors"]);
    let unlisted = index(r#""x":"m-1.safetensors""#);
    let error = open_error(&[(INDEX, unlisted.as_bytes()), ("m-1.safetensors", &raw(XY, &[0; 12]))], &xy());
    assert_says(&error, &["\"y\"", "does not list it"]);
}

fn dir_path_with(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_file_that_shrinks_after_opening_is_an_error() {
    let dir = dir_with(&[("model.safetensors", &raw(XY, &[0; 12]))]);
    let weights = WeightFiles::open(dir.path(), &xy()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("model.safetensors")).unwrap();
    file.set_len(XY.len() as u64 + 10).unwrap();
    assert_says(&weights.read("x").unwrap_err(), &["\"x\"", "cannot be read"]);
}

#[test]
fn pipes_and_folders_are_not_opened() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    let error = WeightFiles::open(dir.path(), &xy()).unwrap_err();
    assert_says(&error, &["not a regular file"]);
}

/// Every value of every header byte's bit flips, and every truncation: an error or a consistent file, never a panic.
#[test]
fn mutated_headers_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let file = raw(XY, &[7; 12]);
    let try_open = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        if let Ok(weights) = WeightFiles::open_file(&path) {
            for name in weights.names() {
                if let Ok((shape, values)) = weights.read(name) {
                    assert_eq!(shape.iter().product::<usize>(), values.len());
                }
            }
        }
    };
    for at in 0..file.len() - 12 {
        for bit in 0..8 {
            let mut bytes = file.clone();
            bytes[at] ^= 1 << bit;
            try_open(&bytes);
        }
    }
    for len in 0..file.len() {
        std::fs::write(&path, &file[..len]).unwrap();
        let error = WeightFiles::open_file(&path).expect_err("truncated");
        assert_eq!(error.kind(), Kind::Model);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn random_mutations_of_a_golden_file_never_panic(edits in proptest::collection::vec((0usize..2000, any::<u8>()), 1..6), cut in 0usize..4000) {
        let mut bytes = std::fs::read(golden("llama/adapter_init/adapter_model.safetensors")).unwrap();
        for (at, value) in edits {
            bytes[at] = value;
        }
        if cut < 2000 {
            bytes.truncate(cut * 7);
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir_path_with(dir.path(), "m.safetensors", &bytes);
        if let Ok(weights) = WeightFiles::open_file(&path) {
            for name in weights.names() {
                let _ = weights.read(name);
            }
        }
    }
}
