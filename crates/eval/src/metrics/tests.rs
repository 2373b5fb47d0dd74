//! Metrics of rows with several references, as a whole.
use super::*;

fn row<'a>(answer: &'a str, references: &[&'a str]) -> Row<'a> {
    Row { source: "", answer, reference: references[0] }
}

fn value(scores: &[Score], name: &str) -> f64 {
    scores.iter().find(|score| score.name == name).unwrap_or_else(|| panic!("{name}")).value
}

fn visual(config: &EvalConfig) -> Metrics {
    let metrics = Metrics::new(config, 1).unwrap();
    VisualMetric::ALL.into_iter().fold(metrics, Metrics::with_visual)
}

#[test]
fn the_best_reference_counts_for_rouge_and_meteor() {
    let golden = &captions()["captions"];
    for (name, rouge_stemmer) in [("plain", false), ("stem", true)] {
        let config =
            EvalConfig { metrics: vec![EvalMetric::Rouge, EvalMetric::Meteor], rouge_stemmer, ..EvalConfig::default() };
        let mut metrics = Metrics::new(&config, 1).unwrap().without_intervals();
        for of_row in golden["rows"].as_array().unwrap() {
            let (answer, references) = texts(of_row);
            let got = metrics.add_with_references(&row(answer, &references), &references, None).unwrap();
            for (metric, got) in got {
                let want = if metric == "meteor" { &of_row["meteor"] } else { &of_row[name][&metric] };
                let want = want.as_f64().unwrap();
                assert!((got - want).abs() < 1e-9, "{answer:?} {name} {metric}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn any_reference_matches_and_rows_without_one_are_refused() {
    let metrics = vec![EvalMetric::ExactMatch, EvalMetric::Contains, EvalMetric::Sari, EvalMetric::Bleu];
    let mut metrics = Metrics::new(&EvalConfig { metrics, ..EvalConfig::default() }, 1).unwrap();
    let references = ["a dog", "a cat"];
    let scores = metrics.add_with_references(&row("a cat", &references), &references, None).unwrap();
    let of = |name: &str| scores.iter().find(|score| score.0 == name).unwrap().1;
    assert_eq!((of("exact_match"), of("contains")), (1.0, 1.0));
    assert!((of("sari") - 100.0 * sari::sari("", "a cat", &references)).abs() < 1e-12);
    let alone = metrics.add(&row("a cat", &["a dog"]), None).unwrap();
    assert_eq!((alone[0].1, alone[1].1), (0.0, 0.0));
    assert_eq!(scores[3], alone[3], "BLEU reads the first reference");
    let error = metrics.add_with_references(&row("a", &["a"]), &[], None).unwrap_err();
    assert!(error.kind() == tunesmith_base::Kind::Data && error.message().contains("row 3"), "{error}");
}

#[test]
fn visual_metrics_have_names_scores_and_intervals() {
    for metric in VisualMetric::ALL {
        assert_eq!(VisualMetric::named(metric.name()), Some(metric));
    }
    assert_eq!(VisualMetric::named("cider-d"), None);
    let golden = &captions()["captions"];
    let config = EvalConfig { metrics: vec![], ..EvalConfig::default() };
    let (mut good, mut bad) = (visual(&config), visual(&config));
    for of_row in golden["rows"].as_array().unwrap() {
        let (answer, references) = texts(of_row);
        let scores = good.add_with_references(&row(answer, &references), &references, None).unwrap();
        assert!(scores.iter().all(|(name, _)| name != "cider"), "CIDEr has no score of a row alone");
        bad.add_with_references(&row("nothing here", &references), &references, None).unwrap();
    }
    let scores = good.scores();
    assert!((value(&scores, "cider") - golden["cider"].as_f64().unwrap()).abs() < 1e-12);
    let cider = scores.iter().find(|score| score.name == "cider").unwrap();
    let (low, high) = cider.interval.unwrap();
    assert!(0.0 < low && low < cider.value && cider.value < high && high < 10.0, "{low} {high}");
    let differences = good.differences(&bad);
    let cider = differences.iter().find(|difference| difference.name == "cider").unwrap();
    assert!(cider.second == 0.0 && cider.interval.unwrap().1 < 0.0 && cider.p_value == Some(0.0), "{cider:?}");
    assert!(visual(&config).scores().is_empty());
}

#[test]
fn letters_and_yes_count_only_where_the_reference_has_them() {
    let config = EvalConfig { metrics: vec![], ..EvalConfig::default() };
    let mut metrics = visual(&config);
    for (answer, reference) in
        [("B.", "B"), ("A", "B"), ("Yes.", "yes"), ("Yes.", "no"), ("No.", "yes"), ("no", "no"), ("yes", "Yes, a dog")]
    {
        let scores = metrics.add(&row(answer, &[reference]), None).unwrap();
        assert!(scores.iter().all(|(name, _)| name != "yes_no_f1"), "F1 says nothing of one row");
    }
    let scores = metrics.scores();
    // Two rows with a letter, one right. Of five, two right yes, one wrong yes, one right no, one wrong no.
    assert_eq!(value(&scores, "choice"), 0.5);
    assert!((value(&scores, "yes_no_accuracy") - 0.6).abs() < 1e-15);
    for name in ["yes_no_precision", "yes_no_recall", "yes_no_f1"] {
        assert!((value(&scores, name) - 2.0 / 3.0).abs() < 1e-15, "{name}");
    }
}

/// `tests/golden/metrics/captions.json`, which `scripts/golden/metrics.py` writes.
pub(super) fn captions() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/metrics/captions.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The answer and the references of a row.
pub(super) fn texts(row: &Value) -> (&str, Vec<&str>) {
    let references = row["references"].as_array().unwrap().iter();
    (row["answer"].as_str().unwrap(), references.map(|text| text.as_str().unwrap()).collect())
}
