//! The report of a made-up run: whole, self-contained and escaped.
use super::*;
use crate::metrics::{EvalLine, StepLine};
use std::collections::BTreeMap;

pub(crate) fn example() -> RunReport {
    let step = |step: u64| {
        let progress = step as f64 / 150.0;
        let noise = (f64::from(step as u32 * 7919 % 101) / 101.0 - 0.5) * 0.5;
        MetricsLine::Step(StepLine {
            step,
            epoch: progress * 3.0,
            loss: Some(0.25 + 3.4 * (-5.0 * progress).exp() + noise * (1.1 - progress)),
            accuracy: None,
            learning_rate: 2e-3 * (progress * 10.0).min(1.0) * (1.0 - progress),
            grad_norm: Some(0.6 + 1.5 * (-3.0 * progress).exp() + noise * 0.4),
            label_tokens: 230,
            tokens: 900,
            tokens_per_second: 9_800.0 + 700.0 * noise,
            peak_bytes: (180 << 20) + (step << 14),
            loss_scale: None,
        })
    };
    let eval = |step: u64| {
        MetricsLine::Eval(EvalLine {
            step,
            epoch: step as f64 / 50.0,
            eval_loss: Some(0.3 + 3.2 * (step as f64 / -30.0).exp()),
            eval_label_tokens: 900,
            eval_rows: 64,
            eval_seconds: 0.4,
            eval_scores: BTreeMap::new(),
            eval_confusion: Vec::new(),
        })
    };
    let mut lines: Vec<_> = (1..=150).map(step).collect();
    lines.extend([25, 50, 75, 100, 125, 150].map(eval));
    let pair = |label: &str, value: &str| (label.to_owned(), value.to_owned());
    let card = |name: &str, value: &str, remark: &str| (name.to_owned(), value.to_owned(), remark.to_owned());
    RunReport {
        title: "quickstart <script>alert(1)</script>".to_owned(),
        subtitle: "examples/quickstart/model · llama · LoRA r 16 on 28 modules · 229,376 of 3,412,480 weights trained"
            .to_owned(),
        outcome: RunOutcome::Completed,
        cards: vec![
            card("final loss", "0.112", "first 3.42"),
            card("best evaluation loss", "0.298", "at step 150"),
            card("speed", "9,812", "tokens/s"),
            card("time", "1m 42s", "peak memory 212 MiB"),
        ],
        lines,
        data: vec![
            pair("training rows", "2,000"),
            pair("validation rows", "64"),
            pair("tokens", "48,120"),
            pair("truncated rows", "0"),
        ],
        lengths: (0..2000).map(|row| 14 + (row * row * 31 % 97) / 4 + row % 13).collect(),
        samples: vec![
            Sample {
                prompt: "<|user|>\nReverse: tunesmith\n<|assistant|>\n".into(),
                question: "Reverse: tunesmith".into(),
                pictures: vec!["data:image/png;base64,AAAA".into(), "https://example.org/a.png".into()],
                reference: "htimsenut".into(),
                before: "The tune".into(),
                after: "htimsenut".into(),
            },
            Sample {
                prompt: "<|user|>\nReverse: \"<b>\"\n<|assistant|>\n".into(),
                question: "Reverse: \"<b>\"".into(),
                pictures: Vec::new(),
                reference: ">b<".into(),
                before: String::new(),
                after: ">d<".into(),
            },
        ],
        confusion: Some(Confusion {
            title: "Validation rows after step 150".into(),
            labels: vec!["ham & eggs".into(), "spam".into()],
            cells: vec![vec![40, 2], vec![5, 17]],
        }),
        plan: vec![
            pair("steps in all", "150 (3.00 epochs)"),
            pair("effective batch", "8 rows x 2 accumulated x 1 rank = 16"),
        ],
        settings: vec![
            SettingRow {
                key: "train.learning_rate".into(),
                value: "0.002".into(),
                source: "configs/a.yaml:12".into(),
                default: false,
            },
            SettingRow { key: "train.seed".into(), value: "42".into(), source: "default".into(), default: true },
        ],
        machine: MachineInfo {
            processor: "A processor".into(),
            threads: 2,
            memory: 8 << 30,
            system: "linux x86_64".into(),
        },
        facts: vec![pair("training", "1m 31s")],
    }
}

#[test]
fn the_page_is_whole_self_contained_and_escaped() {
    let page = render(&example());
    if let Ok(path) = std::env::var("TUNESMITH_WRITE_REPORT") {
        std::fs::write(path, &page).unwrap();
    }
    for wanted in [
        "Gradient norm",
        "ham &amp; eggs",
        "configs/a.yaml:12",
        "✓ equal",
        "✗ differs",
        "50 %",
        "&gt;b&lt;",
        "prefers-color-scheme",
    ] {
        assert!(page.contains(wanted), "{wanted}");
    }
    for absent in ["<script", "http://", "https://", "NaN", "<b>&quot;"] {
        assert!(!page.contains(absent), "{absent}");
    }
    assert_eq!(exact_matches(&example().samples), (0, 1));
    let page = render(&example());
    assert!(page.contains("<img src=\"data:image/png;base64,AAAA\"") && !page.contains("https://example.org"));
    assert_eq!([whole_percent(69, 200), whole_percent(0, 0)], [35, 0]);
}

#[test]
fn a_run_without_lines_or_samples_still_has_a_page() {
    let page = render(&RunReport { lines: Vec::new(), samples: Vec::new(), lengths: Vec::new(), ..example() });
    assert!(page.contains("Configuration") && !page.contains("Learning</h2>"));
}
