//! Facts about the data, for the lines before step 1 and the report.
use tunesmith_base::words::count;
use tunesmith_data::Dataset;
use tunesmith_plan::grouped;

/// The maximum number of labels that are listed.
const LISTED: usize = 20;

/// Facts about the data, as pairs of label and value.
pub(crate) fn of_data(dataset: &Dataset) -> Vec<(String, String)> {
    let Dataset { train, validation, test, report, .. } = dataset;
    let mut facts = Vec::new();
    let mut fact = |label: &str, value: String| facts.push((label.to_owned(), value));
    let count = |number: usize| grouped(number as u64);
    fact("training rows", count(train.len()));
    for (label, split) in [("validation rows", validation), ("test rows", test)] {
        if let Some(split) = split {
            fact(label, count(split.len()));
        }
    }
    let lengths = train.lengths();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let share = 100.0 * train.label_tokens() as f64 / train.tokens().max(1) as f64;
    fact("training tokens", count(train.tokens()));
    fact("with a label", format!("{} ({share:.1} %)", count(train.label_tokens())));
    fact(
        "tokens per row",
        format!("{:.1} on average, {longest} at most", train.tokens() as f64 / train.len().max(1) as f64),
    );
    for (label, number) in [
        ("rows read", report.train.rows),
        ("rows truncated", report.train.truncated),
        ("rows left out as too long", report.train.too_long),
        ("rows left out without labels", report.train.unlabeled),
    ] {
        fact(label, grouped(number));
    }
    for (label, number) in [
        ("rows left out for their length", report.train.below_min_length + report.train.above_max_length),
        ("rows left out as duplicates", report.train.duplicates.rows + report.train.near_duplicates.rows),
        ("rows left out with a bad image", report.train.bad_images.rows),
        ("rows also in the evaluation rows", report.train.contaminated.rows),
    ] {
        if number > 0 {
            fact(label, grouped(number));
        }
    }
    if let Some(web) = report.train.web.summary() {
        fact("images of web addresses", web);
    }
    if let Some(turns) = report.train.turns.summary() {
        fact("earlier turns rewritten", turns);
    }
    for (label, text) in labels(dataset) {
        fact(&label, text);
    }
    let (cut, pieces) = report.cut;
    if cut > 0 {
        fact("long texts cut into rows", format!("{} into {}", count(cut), count(pieces)));
    }
    for share in &report.mix {
        fact(
            &format!("rows from {}", share.source),
            format!("{} of {}", grouped(share.used), grouped(share.available)),
        );
    }
    facts
}

/// Rows and loss weight of each label of a classification, as pairs of label and value.
pub fn labels(dataset: &Dataset) -> Vec<(String, String)> {
    let classes = &dataset.classes;
    let rows: u64 = classes.iter().map(|class| class.train).sum();
    let mut facts = Vec::new();
    for class in classes.iter().take(LISTED) {
        let share = 100.0 * class.train as f64 / rows.max(1) as f64;
        let held_out = match &dataset.validation {
            Some(_) => format!(", {} for validation", grouped(class.validation)),
            None => String::new(),
        };
        let text =
            format!("{} ({share:.1} %){held_out}, weight {:.4}", count(grouped(class.train), "row"), class.weight);
        facts.push((format!("label {}", class.label), text));
    }
    if classes.len() > LISTED {
        facts.push(("labels".to_owned(), format!("{} more", classes.len() - LISTED)));
    }
    facts
}
