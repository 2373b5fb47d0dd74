//! Metrics of answers against rouge-score, sacrebleu, nltk and jsonschema, the sums behind them, and user-defined scorers.
use serde_json::Value;
use std::time::{Duration, Instant};
use tunesmith::Kind;
use tunesmith::config::{EvalConfig, EvalMetric};
use tunesmith::eval::metrics::schema::Schema;
use tunesmith::eval::metrics::scorer::Scorer;
use tunesmith::eval::metrics::{Likelihood, Metrics, Row, bleu, chrf, meteor, porter, rouge, sari};

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/metrics/metrics.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key].as_array().unwrap()
}

/// Each pair with its answer and reference.
fn pairs(golden: &Value) -> impl Iterator<Item = (&Value, &str, &str)> {
    list(golden, "pairs")
        .iter()
        .map(|pair| (pair, pair["prediction"].as_str().unwrap(), pair["reference"].as_str().unwrap()))
}

#[track_caller]
fn near(what: &str, got: f64, want: &Value, limit: f64) {
    let want = want.as_f64().unwrap();
    assert!((got - want).abs() <= limit, "{what}: {got} is not {want}");
}

#[test]
fn rouge_equals_rouge_score_with_and_without_stems() {
    let golden = golden();
    for (pair, answer, reference) in pairs(&golden) {
        for (name, stemmed) in [("plain", false), ("stem", true)] {
            let got = rouge::rouge(answer, reference, stemmed);
            let kinds = [("rouge1", got.one), ("rouge2", got.two), ("rougeL", got.l), ("rougeLsum", got.lsum)];
            for (kind, overlap) in kinds {
                let want = &pair[name][kind];
                let what = format!("{answer:?} {reference:?} {name} {kind}");
                near(&what, overlap.precision, &want["p"], 1e-9);
                near(&what, overlap.recall, &want["r"], 1e-9);
                near(&what, overlap.f, &want["f"], 1e-9);
            }
        }
    }
}

#[test]
fn stems_are_those_of_nltk() {
    for (word, stem) in golden()["stems"].as_object().unwrap() {
        assert_eq!(porter::stem(word), stem.as_str().unwrap(), "{word}");
    }
}

#[test]
fn bleu_chrf_and_meteor_equal_their_references() {
    let golden = golden();
    let (mut of_bleu, mut of_chrf) = ([0.0; bleu::WIDTH], [0.0; chrf::WIDTH]);
    for (pair, answer, reference) in pairs(&golden) {
        let (counts, letters) = (bleu::counts(answer, reference), chrf::counts(answer, reference));
        let what = format!("{answer:?} {reference:?}");
        near(&format!("{what} bleu"), bleu::bleu(&counts, true), &pair["sentence_bleu"], 1e-6);
        near(&format!("{what} chrf"), chrf::chrf(&letters, false), &pair["chrf"], 1e-6);
        near(&format!("{what} chrf++"), chrf::chrf(&letters, true), &pair["chrf_pp"], 1e-6);
        near(&format!("{what} meteor"), meteor::meteor(answer, reference), &pair["meteor"], 1e-9);
        of_bleu.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        of_chrf.iter_mut().zip(letters).for_each(|(sum, count)| *sum += count);
    }
    near("corpus bleu", bleu::bleu(&of_bleu, false), &golden["corpus"]["bleu"], 1e-6);
    near("corpus chrf", chrf::chrf(&of_chrf, false), &golden["corpus"]["chrf"], 1e-6);
    near("corpus chrf++", chrf::chrf(&of_chrf, true), &golden["corpus"]["chrf_pp"], 1e-6);
}

#[test]
fn sari_equals_its_reference() {
    let golden = golden();
    for case in list(&golden, "sari") {
        let references: Vec<&str> = list(case, "references").iter().map(|text| text.as_str().unwrap()).collect();
        let (source, answer) = (case["source"].as_str().unwrap(), case["answer"].as_str().unwrap());
        near(&format!("{case}"), sari::sari(source, answer, &references), &case["sari"], 1e-9);
    }
}

#[test]
fn documents_fit_the_schemas_that_they_fit_elsewhere() {
    let golden = golden();
    for case in list(&golden, "schemas") {
        let schema = Schema::new(case["schema"].clone()).unwrap();
        for (document, fits) in list(&golden, "documents").iter().zip(list(case, "fits")) {
            let got = schema.check(document);
            assert_eq!(got.is_ok(), fits.as_bool().unwrap(), "{document} by {}: {got:?}", case["schema"]);
        }
    }
}

#[test]
fn schemas_with_what_is_not_understood_are_refused_and_circles_end() {
    for (text, at) in [
        (r#"{"properties": {"a": {"unevaluatedProperties": false}}}"#, "#/properties/a/unevaluatedProperties"),
        (r#"{"type": "int"}"#, "#/type"),
        (r#"{"$ref": "other.json"}"#, "#/$ref"),
        (r#"{"pattern": "(?=a)"}"#, "#/pattern"),
        (r#"{"anyOf": [3]}"#, "#/anyOf"),
    ] {
        let error = Schema::new(serde_json::from_str(text).unwrap()).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(error.message().contains(at), "{error}");
    }
    let circle = Schema::new(serde_json::from_str(r##"{"$ref": "#"}"##).unwrap()).unwrap();
    assert!(circle.check(&Value::Null).unwrap_err().contains("circles"));
}

fn row<'a>(answer: &'a str, reference: &'a str) -> Row<'a> {
    Row { source: "a question", answer, reference }
}

#[test]
fn scores_are_of_all_rows_with_an_interval_around_them() {
    let golden = golden();
    let metrics = vec![
        EvalMetric::ExactMatch,
        EvalMetric::Rouge,
        EvalMetric::Bleu,
        EvalMetric::Chrf,
        EvalMetric::ChrfPlusPlus,
        EvalMetric::Json,
    ];
    let config = EvalConfig { metrics, ..EvalConfig::default() };
    let mut all = Metrics::new(&config, 1).unwrap().with_likelihood();
    let mut worse = Metrics::new(&config, 1).unwrap().with_likelihood();
    for (index, (_, answer, reference)) in pairs(&golden).enumerate() {
        let likelihood = Likelihood { nll: 2.0, weight: 4.0, tokens: 4, right: 1 + index as u64 % 2, bytes: 8 };
        let of_row = all.add(&row(answer, reference), Some(&likelihood)).unwrap();
        assert_eq!(of_row[0], ("loss".to_owned(), 0.5));
        worse.add(&row("no such thing", reference), Some(&Likelihood { nll: 4.0, ..likelihood })).unwrap();
    }
    assert_eq!(all.rows(), 43);
    let scores = all.scores();
    let find = |name: &str| scores.iter().find(|score| score.name == name).unwrap_or_else(|| panic!("{name}"));
    near("bleu", find("bleu").value, &golden["corpus"]["bleu"], 1e-6);
    near("chrf++", find("chrf++").value, &golden["corpus"]["chrf_pp"], 1e-6);
    let mean = pairs(&golden).map(|(pair, ..)| pair["plain"]["rouge1"]["f"].as_f64().unwrap()).sum::<f64>() / 43.0;
    near("rouge1", find("rouge1").value, &mean.into(), 1e-9);
    near("byte perplexity", find("byte_perplexity").value, &0.25f64.exp().into(), 1e-12);
    for name in ["bleu", "chrf", "rougeLsum", "exact_match", "token_accuracy"] {
        let (low, high) = find(name).interval.unwrap();
        assert!(low < find(name).value && find(name).value < high && high - low < 40.0, "{name}: {low} {high}");
    }
    let differences = all.differences(&worse);
    let of = |name: &str| differences.iter().find(|difference| difference.name == name).unwrap();
    assert!(of("bleu").second == 0.0 && of("bleu").interval.unwrap().1 < 0.0 && of("bleu").p_value == Some(0.0));
    assert_eq!(of("token_accuracy").p_value, Some(1.0), "no difference");
    let plain = Metrics::new(&config, 1).unwrap().without_intervals();
    assert!(plain.scores().is_empty() && plain.rows() == 0);
}

fn scorer(script: &str, timeout: f64) -> tunesmith::Result<Scorer> {
    Scorer::start(&["sh", "-c", script].map(String::from), Duration::from_secs_f64(timeout))
}

#[test]
fn a_scorer_of_one_s_own_scores_rows() {
    let script = r#"while read -r line; do case $line in *'"answer":"right"'*) echo '{"ok": true, "length": 5}';; *) echo '{"length": 2.5, "ok": false}';; esac; done"#;
    let config = EvalConfig {
        metrics: vec![],
        scorer: ["sh", "-c", script].map(String::from).to_vec(),
        ..EvalConfig::default()
    };
    let mut metrics = Metrics::new(&config, 1).unwrap();
    metrics.add(&row("right", "x"), None).unwrap();
    let second = metrics.add(&row("line\nbreak \"quoted\"", "x"), None).unwrap();
    assert_eq!(second, [("scorer.length".to_owned(), 2.5), ("scorer.ok".to_owned(), 0.0)]);
    let means: Vec<f64> = metrics.scores().into_iter().map(|score| score.value).collect();
    assert_eq!(means, [3.75, 0.5]);
}

#[test]
fn a_scorer_that_fails_says_how() {
    for (script, wanted) in [
        ("read -r line; echo nonsense; cat", "expected a JSON object, found \"nonsense\""),
        ("read -r line; echo '{\"score\": \"high\"}'; cat", "expected numbers or booleans by name"),
        ("read -r line; echo '{}'; cat", "expected numbers or booleans by name"),
        ("read -r line; exit 3", "it ended (exit status: 3)"),
        ("read -r line; head -c 2000000 /dev/zero | tr '\\0' x; cat", "a line longer than"),
    ] {
        let error = scorer(script, 20.0).unwrap().score(&row("a", "b")).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert!(error.message().contains(wanted), "{script}: {error}");
    }
    let begin = Instant::now();
    let error = scorer("sleep 60", 0.2).unwrap().score(&row("a", "b")).unwrap_err();
    assert!(error.message().contains("no answer within") && begin.elapsed() < Duration::from_secs(20), "{error}");
    let mut changes = scorer("read -r a; echo '{\"x\": 1}'; read -r b; echo '{\"y\": 1}'; cat", 20.0).unwrap();
    changes.score(&row("a", "b")).unwrap();
    assert!(changes.score(&row("a", "b")).unwrap_err().message().contains("scored x before and y here"));
    let missing = Scorer::start(&["no-such-program-here".to_owned()], Duration::from_secs(1)).unwrap_err();
    assert!(missing.kind() == Kind::Config && missing.message().contains("no-such-program-here"));
}
