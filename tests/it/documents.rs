//! Documents: the rows that `tunesmith ingest` makes of them, hostile files, and a run on these rows: raw text in pieces, mixed
//! with chats, and its perplexity.
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::{Value, json};
use tunesmith::config::{self, Config};
use tunesmith::data::documents::{DocumentFormat, read};
use tunesmith::data::{self, Dataset, Silent};

use crate::run::fixture::{Fixture, said, train, tunesmith};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ingest(words: &[&str], out: &Path) -> Output {
    tunesmith(&[&["ingest"], words, &["--out", out.to_str().unwrap()]].concat()).env_remove("CONFIG").output().unwrap()
}

#[track_caller]
fn ingested(words: &[&str], out: &Path) -> Vec<Value> {
    let output = ingest(words, out);
    assert!(output.status.success(), "{}", said(&output));
    lines(out)
}

#[test]
fn the_example_s_documents_become_rows() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("rows.jsonl");
    let (documents, model) = (root().join("examples/dapt/documents"), root().join("examples/quickstart/model"));
    let model_word = format!("model.name={}", model.display());
    let output = ingest(&[documents.to_str().unwrap(), &model_word], &out);
    assert!(output.status.success(), "{}", said(&output));
    let rows = lines(&out);
    let of = |name: &str| -> String {
        let row = rows.iter().find(|row| row["source"].as_str().unwrap().ends_with(name)).unwrap();
        row["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(rows.len(), 4);
    let rules = "# The harbour of Greta Bay\n\nThe harbour is open from seven to eleven. Whoever brings boxes pays a toll.\n\n## Rules\n\n\
        1. Boats come in by the north gate.\n2. The toll is paid before a box is landed.\n3. Names & numbers go into the book.\n\n\
        ## Goods that are known\n\n- ";
    assert!(of("rules.docx").starts_with(rules), "{}", of("rules.docx"));
    assert!(of("rules.docx").ends_with("## Tolls\n\n| boxes | toll |\n| --- | --- |\n| up to 10 | 2 coins |\n| up to 20 | 3 coins |\n| up to 40 | 5 coins |"));
    let week = of("week.html");
    assert!(week.starts_with("# Arrivals of the week\n\nBoats that came in, as the harbour book has them. Times are—as ever—those of the tower clock.\n\n| day |"));
    assert!(
        week.ends_with(" |") && !week.contains("Home") && !week.contains("count(") && week.lines().count() == 18,
        "{week}"
    );
    assert!(
        of("watch.md").starts_with("# The watch\n\nWho keeps the watch writes down every sail.\n\n## Last week\n\n- ")
    );
    let book = of("book.txt");
    assert!(
        book.starts_with("Harbour book of Greta Bay\n\n") && book.lines().all(|line| !line.ends_with(' ')),
        "{book}"
    );
    assert_eq!(book.lines().count(), 42);
    let report: Value = serde_json::from_str(&fs::read_to_string(out.with_extension("report.json")).unwrap()).unwrap();
    let characters: usize = rows.iter().map(|row| row["text"].as_str().unwrap().chars().count()).sum();
    let tokenizer = data::Tokenizer::load(&model).unwrap();
    let tokens: usize = rows.iter().map(|row| tokenizer.ids(row["text"].as_str().unwrap()).unwrap().0.len() + 1).sum();
    assert_eq!(report["documents"], 4);
    assert_eq!((&report["characters"], &report["tokens"]), (&json!(characters), &json!(tokens)));
    assert_eq!(report["kinds"], json!({"DOCX": 1, "HTML": 1, "Markdown": 1, "text": 1}));
    assert!(said(&output).contains("4 (1 DOCX, 1 HTML, 1 Markdown, 1 text)"), "{}", said(&output));
}

#[test]
fn a_file_of_python_docx_keeps_its_structure() {
    let text = read(&root().join("tests/golden/documents/report.docx"), DocumentFormat::Docx).unwrap();
    assert_eq!(
        text,
        "# Report on α & ω\n\n# First part\n\nSome bold text, with a tab\nand a break.\n\n- one\n- within\n1. first\n2. second\n\n### A table\n\n\
         | key | value |\n| --- | --- |\n| a \\| b | two lines |\n\nThe end."
    );
}

#[test]
fn repetitions_are_left_out_and_broken_documents_named() {
    let folder = tempfile::tempdir().unwrap();
    let docs = folder.path().join("docs");
    let write = |name: &str, bytes: &[u8]| {
        let path = docs.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let long: String = (0..80).map(|number| "word".to_owned() + &number.to_string() + " ").collect();
    write("a.txt", long.as_bytes());
    write("b/copy.md", long.as_bytes());
    write("b/near.txt", (long.clone() + "and one more").as_bytes());
    write("c.html", b"<p> </p>");
    write("d.pdf", b"%PDF");
    write("e.txt", b"another text");
    let out = folder.path().join("new/rows.jsonl");
    let docs_word = docs.to_str().unwrap();
    let sources = |rows: &[Value]| -> Vec<String> {
        let name =
            |row: &Value| Path::new(row["source"].as_str().unwrap()).strip_prefix(&docs).unwrap().display().to_string();
        rows.iter().map(name).collect()
    };
    assert_eq!(sources(&ingested(&[docs_word], &out)), ["a.txt", "b/copy.md", "b/near.txt", "e.txt"]);
    assert_eq!(sources(&ingested(&[docs_word, "data.dedupe=exact"], &out)), ["a.txt", "b/near.txt", "e.txt"]);
    assert_eq!(sources(&ingested(&["DATA_DEDUPE=minhash", docs_word], &out)), ["a.txt", "e.txt"]);
    let report: Value = serde_json::from_str(&fs::read_to_string(out.with_extension("report.json")).unwrap()).unwrap();
    assert_eq!(report["left_out"]["repeated"].as_array().unwrap().len(), 2);
    assert!(report["left_out"]["empty"][0].as_str().unwrap().ends_with("c.html"));
    assert_eq!(report["left_out"]["other_files"], json!({".pdf": 1}));
    assert_eq!(report["tokens"], Value::Null);

    write("broken.docx", b"PK\x03\x04 but not for long");
    let output = ingest(&[docs_word], &out);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(said(&output).contains("broken.docx: broken zip archive"), "{}", said(&output));
    assert_eq!(lines(&out).len(), 2, "the rows of before stand");
    let output = ingest(&[docs_word, "--skip-broken"], &out);
    assert!(output.status.success() && said(&output).contains("1 left out: "), "{}", said(&output));
    assert_eq!(lines(&out).len(), 4);
    assert_eq!(fs::read_dir(folder.path().join("new")).unwrap().count(), 2, "rows and report, nothing else");
    for (words, code, hint) in [
        (vec![docs_word, "data.dedup=exact"], 2, "data.dedupe"),
        (vec!["data.dedupe=exact"], 2, "no documents are named"),
        (vec!["nowhere"], 3, "nowhere"),
    ] {
        let output = ingest(&words, &out);
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        assert!(said(&output).contains(hint), "{}", said(&output));
    }
}

/// A zip archive with one entry, whose stated size need not be true.
struct Zip<'a> {
    name: &'a str,
    method: u16,
    flags: u16,
    packed: Vec<u8>,
    size: u32,
    sum: u32,
}

impl<'a> Zip<'a> {
    fn deflated(name: &'a str, content: impl Iterator<Item = Vec<u8>>) -> Self {
        let mut sum = flate2::Crc::new();
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
        for piece in content {
            sum.update(&piece);
            encoder.write_all(&piece).unwrap();
        }
        Self { name, method: 8, flags: 0, packed: encoder.finish().unwrap(), size: sum.amount(), sum: sum.sum() }
    }

    fn bytes(&self) -> Vec<u8> {
        let packed = self.packed.len() as u32;
        let common = |out: &mut Vec<u8>| {
            for number in [20, self.flags, self.method, 0, 0] {
                out.extend(number.to_le_bytes());
            }
            for number in [self.sum, packed, self.size] {
                out.extend(number.to_le_bytes());
            }
            out.extend((self.name.len() as u16).to_le_bytes());
            out.extend([0; 2]);
        };
        let mut out = b"PK\x03\x04".to_vec();
        common(&mut out);
        out.extend(self.name.as_bytes());
        out.extend(&self.packed);
        let start = out.len() as u32;
        out.extend(b"PK\x01\x02\x14\0");
        common(&mut out);
        out.extend([0; 14]);
        out.extend(self.name.as_bytes());
        let length = out.len() as u32 - start;
        out.extend(b"PK\x05\x06\0\0\0\0\x01\0\x01\0");
        out.extend(length.to_le_bytes());
        out.extend(start.to_le_bytes());
        out.extend([0; 2]);
        out
    }
}

#[track_caller]
fn refused(outcome: tunesmith::Result<String>, what: &str) {
    let error = outcome.expect_err(what);
    assert_eq!(error.kind(), tunesmith::Kind::Data);
    assert!(error.message().contains("x.docx") && error.message().contains(what), "{error}");
}

#[test]
fn hostile_archives_are_refused_by_name_or_read_and_never_believed() {
    const DOCUMENT: &str = "word/document.xml";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.docx");
    let of = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        read(&path, DocumentFormat::Docx)
    };
    let xml =
        |inner: &str| format!("<w:document><w:body><w:p><w:r><w:t>{inner}</w:t></w:r></w:p></w:body></w:document>");
    let zip = |inner: &str| Zip::deflated(DOCUMENT, std::iter::once(xml(inner).into_bytes()));
    assert_eq!(of(&zip("fine").bytes()).unwrap(), "fine");
    refused(of(b""), "broken zip archive");
    refused(of(b"\xd0\xcf\x11\xe0 an old .doc file"), "broken zip archive");
    refused(of(&Zip { name: "word/other.xml", ..zip("x") }.bytes()), "without word/document.xml");
    refused(of(&Zip { sum: 7, ..zip("x") }.bytes()), "checksum");
    refused(of(&Zip { flags: 1, ..zip("x") }.bytes()), "encrypted");
    refused(of(&Zip { method: 14, ..zip("x") }.bytes()), "expected Deflate");
    refused(of(&Zip { packed: vec![0xff; 40], ..zip("x") }.bytes()), "broken zip archive");

    refused(of(&Zip::deflated(DOCUMENT, std::iter::once(b"<w:document>\xff".to_vec())).bytes()), "invalid UTF-8");
    refused(of(&zip("<w:p").bytes()), "malformed XML");
    let bomb = format!("<!DOCTYPE x [<!ENTITY a \"{}\">]>{}", "a".repeat(100), xml("&a;"));
    refused(of(&Zip::deflated(DOCUMENT, std::iter::once(bomb.into_bytes())).bytes()), "document type");
    // 130 MiB of spaces take 130 KiB; what the archive says of the size is a lie.
    let spaces = Zip::deflated(DOCUMENT, std::iter::repeat_n(vec![b' '; 1 << 20], 130));
    assert!(spaces.packed.len() < 2 << 20);
    refused(of(&Zip { size: 100, ..spaces }.bytes()), "unpacks to more than 128 MiB");
    let mut large = zip("x").bytes();
    let end = large.len() - 22;
    large.splice(end..end, b"PK\x06\x07\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0".iter().copied());
    refused(of(&large), "64-bit form");

    // Every cut, and every byte changed: an error that names the file, or a text.
    let whole = zip("a text that is not short").bytes();
    for length in 0..whole.len() {
        if let Err(error) = of(&whole[..length]) {
            assert!(error.message().contains("x.docx"), "{error}");
        }
        let mut changed = whole.clone();
        changed[length] ^= 0x41;
        if let Err(error) = of(&changed) {
            assert!(error.message().contains("x.docx"), "{error}");
        }
    }
}

/// A configuration of the fixture with raw texts of 10 to 400 letters, and chats.
fn mixed(fixture: &Fixture, extra: &[&str]) -> PathBuf {
    let texts = |numbers: std::ops::Range<usize>| -> String {
        let text = |number: usize| -> String {
            (0..10 + number * 97 % 391).map(|at| char::from(b'a' + ((number * 5 + at * at) % 26) as u8)).collect()
        };
        numbers.map(|number| json!({ "text": text(number), "source": "x" }).to_string() + "\n").collect()
    };
    fs::write(fixture.path("texts.jsonl"), texts(0..40)).unwrap();
    fs::write(fixture.path("held.jsonl"), texts(40..46)).unwrap();
    let sets = format!(
        "data.datasets: [{{\"path\": {:?}, \"format\": \"text\", \"weight\": 0.9}}, {{\"path\": {:?}, \"weight\": 0.1}}]",
        fixture.path("texts.jsonl").display().to_string(),
        fixture.path("train.jsonl").display().to_string()
    );
    let held = format!("data.val_path: {}", fixture.path("held.jsonl").display());
    let lines = [
        "data.train_path: []",
        &sets,
        &held,
        "data.packing: true",
        "data.truncation: split",
        "train.eval_strategy: steps",
        "train.eval_steps: 3",
    ];
    fixture.config("mixed", &[&lines[..], extra].concat())
}

fn load(path: &Path, words: &[String]) -> (Config, Dataset) {
    let config = config::load(path, words, &[], &[]).unwrap().config;
    let dataset = data::load(&config, &config.model.dir().unwrap(), 260.into(), &Silent, None).unwrap();
    (config, dataset)
}

#[test]
fn long_texts_fill_blocks_and_no_token_is_lost() {
    const END: u32 = 258;
    let fixture = Fixture::new();
    let path = mixed(&fixture, &[]);
    let texts: Vec<String> =
        lines(&fixture.path("texts.jsonl")).iter().map(|row| row["text"].as_str().unwrap().to_owned()).collect();
    let alone = [format!("data.datasets=[{}]", fixture.path("texts.jsonl").display())];
    let (config, dataset) = load(&path, &alone);
    // In the order of the files the pieces are the documents, each with its end token behind it.
    let ids: Vec<u32> =
        (0..dataset.train.len()).flat_map(|index| dataset.train.example(index).unwrap().input_ids).collect();
    let wanted: Vec<u32> = texts.iter().flat_map(|text| text.bytes().map(u32::from).chain([END])).collect();
    assert_eq!(ids, wanted);
    assert!(dataset.train.lengths().iter().all(|length| (2..=64).contains(length)));
    let long = texts.iter().filter(|text| text.len() + 1 > 64).count();
    assert_eq!(dataset.report.cut.0, long);
    assert_eq!(dataset.train.len(), texts.len() - long + dataset.report.cut.1);
    assert_eq!(
        dataset.validation.as_ref().unwrap().tokens(),
        lines(&fixture.path("held.jsonl")).iter().map(|row| row["text"].as_str().unwrap().len() + 1).sum::<usize>()
    );
    // Blocks of 64 tokens are nearly full.
    let sampler = dataset.sampler(&config);
    let fill = wanted.len() as f64 / (64 * sampler.rows()) as f64;
    assert!(fill > 0.95, "{fill}");
    // What other truncations cost here.
    let (_, cut) = load(&path, &[alone[0].clone(), "data.truncation=right".to_owned()]);
    assert!(cut.train.tokens() * 2 < wanted.len());
    // `process` writes documents, not pieces.
    let out = fixture.path("processed.jsonl");
    let words = ["process", path.to_str().unwrap(), &alone[0], "--out", out.to_str().unwrap()];
    let output = tunesmith(&words).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let processed: Vec<String> = lines(&out).iter().map(|row| row["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!(processed, texts);
    assert_eq!(lines(&fixture.path("processed.validation.jsonl")).len(), 6);
}

#[test]
fn texts_and_chats_are_trained_together_and_measured_by_perplexity() {
    let fixture = Fixture::new();
    let config = mixed(
        &fixture,
        &[
            "train.metric_for_best_model: byte_perplexity",
            "train.predict_with_generate: true",
            "eval.bootstrap_samples: 0",
        ],
    );
    let (_, dataset) = load(&config, &[]);
    let [texts, chats] = dataset.report.mix.as_slice() else { panic!("two sources") };
    assert_eq!(texts.used, texts.available, "every piece of every text");
    assert_eq!(chats.used, (texts.used as f64 / 9.0).round() as u64);

    let output = train(&config, &[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("no validation row has a prompt"), "{}", said(&output));
    assert!(said(&output).contains("best eval byte_perplexity"), "{}", said(&output));
    assert!(said(&output).contains(" % of the run)"), "{}", said(&output));
    let evaluations: Vec<Value> =
        lines(&fixture.path("out/metrics.jsonl")).into_iter().filter(|line| line["eval_loss"].is_number()).collect();
    assert_eq!(evaluations.len(), 2);
    let validation = dataset.validation.as_ref().unwrap();
    // A letter is a byte and a token; the first of a piece is not predicted, and the end token is no text.
    let bytes = validation.label_tokens() - 6;
    for line in &evaluations {
        let (loss, scores) = (line["eval_loss"].as_f64().unwrap(), &line["eval_scores"]);
        let near = |name: &str, wanted: f64| {
            let found = scores[name].as_f64().unwrap();
            assert!((found / wanted - 1.0).abs() < 1e-9, "{name}: {found}, expected {wanted}");
        };
        near("perplexity", loss.exp());
        near("byte_perplexity", (loss * validation.label_tokens() as f64 / bytes as f64).exp());
    }

    // The same by `tunesmith eval`, which asks raw text nothing.
    let output = tunesmith(&["eval", config.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let count = validation.len();
    assert!(said(&output).contains(&format!("{count} of {count} rows are raw text")), "{}", said(&output));
    let metrics: Value =
        serde_json::from_str(&fs::read_to_string(fixture.path("out/eval/metrics.json")).unwrap()).unwrap();
    let tuned = &metrics["models"]["tuned"]["scores"];
    for name in ["perplexity", "byte_perplexity"] {
        let (here, there) =
            (tuned[name]["value"].as_f64().unwrap(), evaluations[1]["eval_scores"][name].as_f64().unwrap());
        assert!((here / there - 1.0).abs() < 1e-5, "{name}: {here} and {there}");
    }
    assert!(tuned.get("exact_match").is_none(), "nothing was answered: {tuned}");
    let samples = lines(&fixture.path("out/eval/samples.jsonl"));
    assert_eq!(samples.len(), count);
    assert!(
        samples.iter().all(|line| line["prompt"].is_null() && line["answers"]["tuned"].is_null()),
        "{}",
        samples[0]
    );
    assert_eq!(fs::read_dir(fixture.path("out/eval")).unwrap().count(), 3);
}
