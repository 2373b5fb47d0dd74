//! The confusion matrix: a figure, and precision, recall and F1 of each label.
use std::fmt::Write as _;

use super::html::{clipped, escape};
use tunesmith_eval::metrics::scored::of_labels;

/// The most labels in the picture; more are shown only in the table.
const DRAWN: usize = 32;
/// Letters of a label in the picture.
const LETTERS: usize = 16;
/// Width and height of a cell.
const CELL: f64 = 64.0;
/// Margin for the labels at the left and the top.
const LEFT: f64 = 150.0;
const TOP: f64 = 78.0;

/// A confusion matrix with its labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confusion {
    /// The rows that were classified, for the heading.
    pub title: String,
    /// The labels, in the order of their numbers.
    pub labels: Vec<String>,
    /// Rows by label and predicted label: `[label][found]`.
    pub cells: Vec<Vec<u64>>,
}

impl Confusion {
    /// The picture and the table, as HTML.
    pub fn render(&self) -> String {
        let picture = if self.labels.len() <= DRAWN {
            format!("<figure><figcaption><b>{}</b></figcaption>{}</figure>", escape(&self.title), self.svg())
        } else {
            String::new()
        };
        let mut table =
            String::from("<table><tr><th>label</th><th>rows</th><th>precision</th><th>recall</th><th>F1</th></tr>");
        for ((label, row), [precision, recall, f1]) in self.labels.iter().zip(&self.cells).zip(of_labels(&self.cells)) {
            let _ = write!(
                table,
                "<tr><td>{}</td><td>{}</td><td>{precision:.4}</td><td>{recall:.4}</td><td>{f1:.4}</td></tr>",
                escape(&clipped(label, 80)),
                row.iter().sum::<u64>(),
            );
        }
        format!("<div class=\"split\">{picture}<div class=\"panel\">{table}</table></div></div>")
    }

    /// The picture: a row for each label. A cell is more opaque the larger its share of the row, in colours that are
    /// readable on light and dark backgrounds.
    fn svg(&self) -> String {
        let size = self.labels.len() as f64 * CELL;
        // Names that are wider than their column stand aslant, and reach beyond the last one.
        let aslant = self.labels.iter().any(|label| label.chars().count() > 8);
        let (width, height) = (LEFT + size + if aslant { 90.0 } else { 10.0 }, TOP + size + 10.0);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" font-family=\"sans-serif\" font-size=\"13\" aria-label=\"{}\">",
            escape(&self.title)
        );
        let _ = write!(
            svg,
            "<text x=\"{:.0}\" y=\"18\" text-anchor=\"middle\" fill=\"#888\">predicted</text>\
             <text x=\"14\" y=\"{:.0}\" text-anchor=\"middle\" fill=\"#888\" transform=\"rotate(-90 14 {1:.0})\">true</text>",
            LEFT + size / 2.0,
            TOP + size / 2.0,
        );
        for (index, label) in self.labels.iter().enumerate() {
            let short: String = label.chars().take(LETTERS).collect();
            let short = escape(&if short.len() < label.len() { short + "…" } else { short });
            let along = index as f64 * CELL + CELL / 2.0;
            let _ = write!(
                svg,
                "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\" fill=\"#888\">{short}</text>",
                LEFT - 8.0,
                TOP + along + 4.0
            );
            let (x, y) = (LEFT + along, TOP - 8.0);
            let turn = if aslant { format!(" transform=\"rotate(-20 {x:.0} {y:.0})\"") } else { String::new() };
            let anchor = if aslant { "start" } else { "middle" };
            let _ = write!(
                svg,
                "<text x=\"{x:.0}\" y=\"{y:.0}\" text-anchor=\"{anchor}\" fill=\"#888\"{turn}>{short}</text>"
            );
        }
        for (row, counts) in self.cells.iter().enumerate() {
            let all: u64 = counts.iter().sum();
            for (column, &count) in counts.iter().enumerate() {
                let share = if all > 0 { count as f64 / all as f64 } else { 0.0 };
                let (x, y) = (LEFT + column as f64 * CELL, TOP + row as f64 * CELL);
                let colour = if row == column { "#2f7d4f" } else { "#c2511c" };
                let ink = if share > 0.5 { "#fff" } else { "#888" };
                let name = |index: usize| escape(self.labels.get(index).map_or("", String::as_str));
                let _ = write!(
                    svg,
                    "<g><title>{} taken for {}: {count} of {all}</title>\
                     <rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"{CELL:.0}\" height=\"{CELL:.0}\" fill=\"{colour}\" fill-opacity=\"{:.3}\" stroke=\"#8884\"/>\
                     <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\" fill=\"{ink}\">{count}</text>\
                     <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\" font-size=\"10\" fill=\"{ink}\">{:.0} %</text></g>",
                    name(row),
                    name(column),
                    0.04 + 0.96 * share,
                    x + CELL / 2.0,
                    y + CELL / 2.0 + 1.0,
                    x + CELL / 2.0,
                    y + CELL / 2.0 + 16.0,
                    100.0 * share,
                );
            }
        }
        svg + "</svg>"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_drawn_and_every_label_escaped() {
        let labels = vec!["<a>".to_owned(), "b".to_owned()];
        let confusion = Confusion { title: "t".into(), labels, cells: vec![vec![3, 1], vec![0, 0]] };
        let page = confusion.render();
        assert_eq!(page.matches("<rect").count(), 4);
        assert!(page.contains("&lt;a&gt; taken for b: 1 of 4") && page.contains("75 %") && !page.contains("<a>"));
        assert!(page.contains("<td>1.0000</td><td>0.7500</td><td>0.8571</td>"), "{page}");
        let many = Confusion {
            title: "t".into(),
            labels: (0..40).map(|label| label.to_string()).collect(),
            cells: vec![vec![0; 40]; 40],
        };
        assert!(!many.render().contains("<svg") && many.render().contains("<td>39</td>"));
    }
}
