//! Fuzz targets: one function for each kind of input that comes from outside. A target hands the bytes to the reader that
//! the program uses and checks what a caller relies on: no panic, and an error of the class that decides the exit code.
//!
//! The tests replay the stored inputs and a few thousand mutations of them; `fuzz/` runs the same functions under libFuzzer.
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::json;
use tunesmith::config::arch::Arch;
use tunesmith::config::foreign::{self, Format};
use tunesmith::config::vision::Processing;
use tunesmith::data::row::Conversation;
use tunesmith::data::{ChatTemplate, Tokenizer, documents, source};
use tunesmith::model::weights::WeightFiles;
use tunesmith::vision::{Picture, Processor};
use tunesmith::{Error, Kind, checkpoint, comm, config, import};

/// A reader under test.
pub struct Target {
    /// The name by which `just fuzz` knows it, and of its folder of stored inputs.
    pub name: &'static str,
    /// Whole inputs to begin with, as paths below `tests/golden` or `examples`.
    pub seeds: &'static [&'static str],
    /// Reads one input.
    pub run: fn(&[u8]),
}

/// A target for each reader.
pub const TARGETS: &[Target] = &[
    target("yaml", &["../../configs/base.yaml", "../../examples/quickstart/quickstart.yaml"], yaml),
    target("deepspeed", &["../../deepspeed/zero3.json", "../../deepspeed/zero2.json"], deepspeed),
    target("accelerate", &["../../configs/accelerate/multi_gpu_fsdp.yaml"], accelerate),
    target(
        "import",
        &["../it/import/axolotl_qlora.yaml", "../it/import/factory_lora.yaml", "../it/import/play_run.yaml"],
        imported,
    ),
    target("config_json", &["a/llama/model/config.json", "a/gemma3/model/config_v4.json"], config_json),
    target("safetensors", &["a/llama/adapter_init/adapter_model.safetensors"], safetensors),
    target("index", &["a/gemma3/model/model.safetensors.index.json"], index),
    target("tokenizer", &["c/tokenizer_bpe_gpt2/tokenizer.json"], tokenizer),
    target("template", &["c/template_llama3.jinja", "c/template_phi3.jinja", "c/template_mistral.jinja"], template),
    target("rows_jsonl", &["c/synthetic_200.jsonl"], rows_jsonl),
    target("rows_json", &[], rows_json),
    target("rows_csv", &[], rows_csv),
    target("rows_parquet", &["columns/rows.parquet", "columns/rows_snappy.parquet"], rows_parquet),
    target(
        "rows_arrow",
        &["columns/rows_stream.arrow", "columns/rows_lz4.arrow", "columns/rows_zstd.arrow"],
        rows_arrow,
    ),
    target("rows_compressed", &[], rows_compressed),
    target(
        "picture",
        &[
            "pixels/rgb.png",
            "pixels/one.png",
            "pixels/rgb.jpg",
            "pixels/rgb.webp",
            "pixels/rgb.tiff",
            "pixels/animated.gif",
        ],
        picture,
    ),
    target(
        "preprocessor_config",
        &["picture_chats/smolvlm/preprocessor_config.json", "picture_chats/llava_onevision/preprocessor_config.json"],
        preprocessor_config,
    ),
    target("docx", &["../../examples/dapt/documents/rules.docx"], docx),
    target("html", &["../../examples/dapt/documents/week.html", "../../examples/dapt/documents/watch.md"], html),
    target("adapter_config", &["a/llama/adapter_init/adapter_config.json"], adapter_config),
    target("manifest", &[], manifest),
    target("state", &[], state),
    target("launcher", &[], launcher),
    target("c10d_frames", &[], c10d_frames),
    target("store_frames", &[], store_frames),
];

const fn target(name: &'static str, seeds: &'static [&'static str], run: fn(&[u8])) -> Target {
    Target { name, seeds, run }
}

/// The repository.
fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    if here.join("tests/golden").is_dir() { here } else { here.join("..") }
}

fn golden(path: &str) -> PathBuf {
    root().join("tests/golden").join(path)
}

/// The stored inputs of a target: its corpus and its seeds.
pub fn inputs(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let corpus = root().join("tests/fuzz").join(target.name);
    let entries = std::fs::read_dir(&corpus).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    paths.sort();
    paths.extend(target.seeds.iter().map(|seed| golden(seed)));
    paths.into_iter().map(|path| (path.clone(), std::fs::read(&path).expect("a readable input"))).collect()
}

/// A folder of this thread's own, in memory where the system has such a place.
fn scratch() -> PathBuf {
    static ROOT: OnceLock<tempfile::TempDir> = OnceLock::new();
    thread_local! { static OWN: PathBuf = {
        let shared = Path::new("/dev/shm");
        let make = || if shared.is_dir() { tempfile::tempdir_in(shared) } else { tempfile::tempdir() };
        let root = ROOT.get_or_init(|| make().expect("a temporary folder"));
        tempfile::tempdir_in(root.path()).expect("a temporary folder").keep()
    } }
    OWN.with(Clone::clone)
}

/// The bytes as a file of that name.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = scratch().join(name);
    std::fs::write(&path, bytes).expect("room in the temporary folder");
    path
}

/// An error is of one of `kinds`, says something, and shows no control character raw but line ends.
fn check<T>(outcome: Result<T, Error>, kinds: &[Kind]) -> Option<T> {
    match outcome {
        Ok(value) => Some(value),
        Err(error) => {
            assert!(kinds.contains(&error.kind()), "{:?} is none of {kinds:?}: {error}", error.kind());
            assert!(!error.message().is_empty(), "an error without a message");
            None
        }
    }
}

fn yaml(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    check(config::load_text(Path::new("fuzz.yaml"), text), &[Kind::Config]);
}

fn deepspeed(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    check(foreign::check(Format::DeepSpeed, Path::new("fuzz.json"), text), &[Kind::Config]);
}

fn accelerate(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    check(foreign::check(Format::Accelerate, Path::new("fuzz.yaml"), text), &[Kind::Config]);
    check(foreign::check(Format::Fsdp, Path::new("fuzz.yaml"), text), &[Kind::Config]);
}

fn imported(bytes: &[u8]) {
    check(import::read(&file("fuzz.yaml", bytes), None), &[Kind::Config, Kind::Io]);
}

fn config_json(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Some(arch) = check(Arch::from_json(text, Path::new("config.json")), &[Kind::Model]) {
        assert!(arch.linear_modules().len() <= arch.tensors().len());
    }
}

/// A picture; one whose head claims many pixels is not decoded, as that takes long.
fn picture(bytes: &[u8]) {
    let size = check(Picture::size(bytes), &[Kind::Data]);
    if size.is_none_or(|(width, height)| u64::from(width) * u64::from(height) <= 1 << 16) {
        check(Picture::decode(bytes), &[Kind::Data]);
    }
}

/// What a processor makes of a picture of any size.
fn preprocessor_config(bytes: &[u8]) {
    let dir = scratch().join("processor");
    std::fs::create_dir_all(&dir).expect("a folder");
    std::fs::write(dir.join("preprocessor_config.json"), bytes).expect("a writable file");
    let kinds = &[Kind::Model, Kind::Io, Kind::Data];
    if let Some(processing) = check(Processing::open(&dir), kinds) {
        let processor = Processor::new(processing, 4);
        for [width, height] in [[1, 1], [7, 300], [1024, 3]] {
            check(processor.layout(width, height, false), kinds);
            check(processor.layout(width, height, true), kinds);
        }
    }
}

fn safetensors(bytes: &[u8]) {
    if let Some(weights) = check(WeightFiles::open_file(&file("fuzz.safetensors", bytes)), &[Kind::Model, Kind::Io]) {
        for name in weights.names() {
            check(weights.read(name), &[Kind::Model, Kind::Io]);
        }
    }
}

/// An index over two small shards; whatever it says, only files of the folder are opened.
fn index(bytes: &[u8]) {
    static EXPECTED: OnceLock<Vec<config::arch::TensorSpec>> = OnceLock::new();
    let dir = scratch().join("index");
    if !dir.exists() {
        std::fs::create_dir(&dir).expect("a folder");
        for entry in std::fs::read_dir(golden("a/gemma3/model")).expect("the golden model") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_owned();
            if path.extension().is_some_and(|end| end == "safetensors") {
                std::fs::copy(&path, dir.join(name)).expect("a copy");
            }
        }
    }
    std::fs::write(dir.join("model.safetensors.index.json"), bytes).expect("room");
    let expected = EXPECTED.get_or_init(|| Arch::from_dir(&golden("a/gemma3/model")).expect("a model").tensors());
    check(WeightFiles::open(&dir, expected), &[Kind::Model, Kind::Io]);
}

fn tokenizer(bytes: &[u8]) {
    let dir = scratch().join("tokenizer");
    std::fs::create_dir_all(&dir).expect("a folder");
    std::fs::write(dir.join("tokenizer.json"), bytes).expect("room");
    let kinds = &[Kind::Data, Kind::Model];
    if let Some(tokenizer) = check(Tokenizer::load(&dir), kinds) {
        for text in ["", "Hello, wörld! 12\n\n<|im_end|> 東京", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa  \t"] {
            if let Some((ids, _)) = check(tokenizer.ids(text), kinds) {
                check(tokenizer.decode(&ids, false), kinds);
            }
        }
    }
}

fn template(bytes: &[u8]) {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer =
        TOKENIZER.get_or_init(|| Tokenizer::load(&golden("c/tokenizer_bpe_gpt2")).expect("the golden tokenizer"));
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let kinds = &[Kind::Data, Kind::Model];
    let Some(template) = check(ChatTemplate::compile(text, "fuzz", tokenizer), kinds) else { return };
    let call = json!({"type": "function", "function": {"name": "f", "arguments": {"x": 1.5, "y": [null, "ü"]}}});
    let conversation = Conversation {
        messages: vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": "  Hi <|im_end|>\n"}),
            json!({"role": "assistant", "content": "Yes.", "tool_calls": [call]}),
            json!({"role": "tool", "name": "f", "content": "3"}),
            json!({"role": "assistant", "content": "", "reasoning_content": "hm"}),
        ],
        ..Conversation::default()
    };
    check(template.render(&conversation, true), kinds);
}

/// Reads all rows of a file and understands each.
fn rows(name: &str, bytes: &[u8]) {
    let read = Cell::new(0);
    let outcome = source::read(&file(name, bytes), None, Some(64), &read, &mut |row, forms| {
        check(row.clone().source(forms), &[Kind::Data]);
        row.parse_noting(forms).map(|_| ())
    });
    check(outcome, &[Kind::Data, Kind::Io]);
}

fn rows_jsonl(bytes: &[u8]) {
    rows("fuzz.jsonl", bytes);
}

fn rows_json(bytes: &[u8]) {
    rows("fuzz.json", bytes);
}

fn rows_csv(bytes: &[u8]) {
    rows("fuzz.csv", bytes);
    rows("fuzz.tsv", bytes);
}

fn rows_parquet(bytes: &[u8]) {
    rows("fuzz.parquet", bytes);
}

fn rows_arrow(bytes: &[u8]) {
    rows("fuzz.arrow", bytes);
}

fn rows_compressed(bytes: &[u8]) {
    rows("fuzz.jsonl.gz", bytes);
    rows("fuzz.jsonl.zst", bytes);
}

fn docx(bytes: &[u8]) {
    check(documents::read(&file("fuzz.docx", bytes), documents::DocumentFormat::Docx), &[Kind::Data]);
}

fn html(bytes: &[u8]) {
    check(documents::read(&file("fuzz.html", bytes), documents::DocumentFormat::Html), &[Kind::Data]);
    check(documents::read(&file("fuzz.md", bytes), documents::DocumentFormat::Markdown), &[Kind::Data]);
}

fn adapter_config(bytes: &[u8]) {
    static ARCH: OnceLock<Arch> = OnceLock::new();
    let arch = ARCH.get_or_init(|| Arch::from_dir(&golden("a/llama/model")).expect("a model"));
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let kinds = &[Kind::Checkpoint, Kind::Config, Kind::Model];
    let parsed = checkpoint::adapter_config::AdapterConfig::from_json(text, Path::new("adapter_config.json"));
    if let Some(config) = check(parsed, kinds) {
        check(config.place(arch), kinds);
        assert!(config.to_json().is_object());
        check(config.with_tokens(arch), kinds);
    }
}

fn manifest(bytes: &[u8]) {
    let dir = scratch().join("checkpoint");
    if !dir.exists() {
        std::fs::create_dir(&dir).expect("a folder");
        std::fs::write(dir.join("state.json"), "{}").expect("room");
    }
    std::fs::write(dir.join("manifest.json"), bytes).expect("room");
    check(checkpoint::load(&dir), &[Kind::Checkpoint, Kind::Io]);
}

/// The state and the stamp of a checkpoint whose manifest is right.
fn state(bytes: &[u8]) {
    let _ = serde_json::from_slice::<checkpoint::state::TrainState>(bytes);
    let dir = scratch().join("stamped");
    std::fs::create_dir_all(&dir).expect("a folder");
    std::fs::write(dir.join("backend.json"), bytes).expect("room");
    if let Some(Some(origin)) = check(checkpoint::stamp_check::AdapterStamp::of(&dir), &[Kind::Checkpoint]) {
        let _ = origin.labels();
        check(origin.held(), &[Kind::Checkpoint, Kind::Config, Kind::Model]);
        check(origin.compare(&dir, &[("base_model", "x".into())], &[]), &[Kind::Checkpoint]);
    }
}

/// Lines `NAME=value` as a launcher's environment.
fn launcher(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let value = |name: &str| lines.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    check(comm::env::read(value), &[Kind::Config]);
    let _ = comm::slurm::first_host(text);
    let _ = comm::slurm::tasks_of(text, 3);
}

/// What a store of torchrun may answer.
fn c10d_frames(bytes: &[u8]) {
    comm::c10d::read_anything(bytes);
}

/// What another process may send to the ranks of a run, and they to it.
fn store_frames(bytes: &[u8]) {
    comm::store::read_anything(bytes);
}
