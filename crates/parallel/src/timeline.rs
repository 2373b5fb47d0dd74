//! A timeline of one step: when a rank computes, and when it communicates.
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Records when the two threads of a rank work in a step: passes and update on one, collectives on the other.
#[derive(Debug)]
pub struct Timeline {
    began: Instant,
    spans: Mutex<Vec<Span>>,
}

#[derive(Debug)]
struct Span {
    exchange: bool,
    what: String,
    from: Duration,
    to: Duration,
}

/// Characters of a bar.
const WIDTH: usize = 48;

impl Default for Timeline {
    fn default() -> Self {
        Self { began: Instant::now(), spans: Mutex::default() }
    }
}

impl Timeline {
    /// The time since the step began.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn add(&self, exchange: bool, what: String, from: Duration) {
        let span = Span { exchange, what, from, to: self.now() };
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }

    /// Records a computation that began at `from` and ends now.
    pub fn computed(&self, what: impl Into<String>, from: Duration) {
        self.add(false, what.into(), from);
    }

    /// Records communication that began at `from` and ends now.
    pub(crate) fn exchanged(&self, what: impl Into<String>, from: Duration) {
        self.add(true, what.into(), from);
    }

    /// One line for each span, by beginning: thread, begin and end in milliseconds, a bar, and what it was.
    pub fn lines(&self) -> Vec<String> {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.sort_by_key(|span| (span.from, span.to));
        let whole = spans.iter().map(|span| span.to).max().unwrap_or_default().as_secs_f64().max(1e-9);
        let column = |at: Duration| ((at.as_secs_f64() / whole * WIDTH as f64) as usize).min(WIDTH - 1);
        let line = |span: &Span| {
            let (who, mark) = if span.exchange { ("ranks", '=') } else { ("pass ", '#') };
            let (from, to) = (1e3 * span.from.as_secs_f64(), 1e3 * span.to.as_secs_f64());
            let before = std::iter::repeat_n(' ', column(span.from));
            let bar: String =
                before.chain(std::iter::repeat_n(mark, column(span.to) - column(span.from) + 1)).collect();
            format!("{who} {from:9.2} {to:9.2} ms |{bar:WIDTH$}| {}", span.what)
        };
        spans.iter().map(line).collect()
    }

    /// The lines of step `step` under a heading with their sums and overlap.
    pub fn text(&self, step: u64) -> String {
        let [passes, sums, both] = self.overlap().map(|span| 1e3 * span.as_secs_f64());
        let head = format!(
            "step {step}, rank 0: {passes:.1} ms of passes and update, {sums:.1} ms between ranks, {both:.1} ms of that at the \
             same time"
        );
        [head].into_iter().chain(self.lines()).collect::<Vec<_>>().join("\n  ")
    }

    /// The time of computation, the time of communication, and how long both overlapped.
    pub fn overlap(&self) -> [Duration; 3] {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |exchange: bool| spans.iter().filter(move |span| span.exchange == exchange);
        let sum = |exchange: bool| of(exchange).map(|span| span.to.saturating_sub(span.from)).sum();
        let both = of(true)
            .flat_map(|one| of(false).map(move |other| one.to.min(other.to).saturating_sub(one.from.max(other.from))));
        [sum(false), sum(true), both.sum()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_in_order_and_what_overlaps_is_counted() {
        let timeline = Timeline::default();
        let ms = Duration::from_millis;
        let span = |exchange, from, to| Span { exchange, what: format!("{from}"), from: ms(from), to: ms(to) };
        *timeline.spans.lock().unwrap() = vec![span(true, 30, 60), span(false, 0, 40), span(false, 40, 50)];
        assert_eq!(timeline.overlap(), [ms(50), ms(30), ms(20)]);
        let lines = timeline.lines();
        assert!(lines[0].starts_with("pass ") && lines[0].ends_with("| 0"), "{lines:?}");
        assert!(lines[1].starts_with("ranks") && lines[1].contains("30.00     60.00 ms |"), "{lines:?}");
        let start = |line: &str| line.find(['#', '=']).unwrap();
        assert!(start(&lines[0]) < start(&lines[1]) && start(&lines[1]) < start(&lines[2]), "{lines:?}");
    }
}
