//! Charts as inline SVG without scripts. Colours come from the page's style sheet, so that they follow its light or
//! dark theme.
use std::fmt::Write as _;

use super::html::escape;

/// The drawing area inside the view box; the rest is for the axes' labels.
const WIDTH: f64 = 560.0;
const WIDE: f64 = 1100.0;
const HEIGHT: f64 = 264.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;

/// The most points of a line; longer ones are averaged.
const MAX_POINTS: usize = 480;

/// One line or set of points of a chart.
#[derive(Debug, Clone)]
pub struct Series {
    /// The name in the legend.
    pub name: &'static str,
    /// The class in the style sheet, which decides the colour and weight.
    pub class: &'static str,
    /// `(x, y)` in order of x.
    pub points: Vec<(f64, f64)>,
    /// Draws a dot at every point.
    pub dots: bool,
}

/// The layout of a chart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChartMarks {
    /// As wide as the page, its axis from the smallest to the largest value.
    Wide,
    /// Half the page, its axis from zero.
    Small,
}

/// A line chart over steps, without empty series. Returns an empty string if there is nothing to draw.
pub fn lines(title: &str, series: &[Series], shape: ChartMarks) -> String {
    let series: Vec<Series> = series.iter().filter(|series| !series.points.is_empty()).cloned().collect();
    let all = || series.iter().flat_map(|series| &series.points);
    let Some(x_max) = all().map(|point| point.0).reduce(f64::max) else { return String::new() };
    let x_min = all().map(|point| point.0).fold(x_max, f64::min);
    let largest = all().map(|point| point.1).fold(f64::MIN, f64::max);
    let y_min = all().map(|point| point.1).fold(largest, f64::min);
    let y_max = top(&series).unwrap_or(largest);
    let (width, y_min) = match shape {
        ChartMarks::Wide => (WIDE, y_min),
        ChartMarks::Small => (WIDTH, y_min.min(0.0)),
    };
    let y_ticks = ticks(y_min, y_max, 5);
    let (low, high) = (y_ticks[0].min(y_min), y_ticks[y_ticks.len() - 1].max(y_max));
    let above: usize = series.iter().map(|series| series.points.iter().filter(|point| point.1 > high).count()).sum();
    let x_of = |x: f64| LEFT + (x - x_min) / (x_max - x_min).max(f64::MIN_POSITIVE) * (width - LEFT - RIGHT);
    let y_of = |y: f64| HEIGHT - BOTTOM - (y - low) / (high - low).max(f64::MIN_POSITIVE) * (HEIGHT - TOP - BOTTOM);

    let mut svg = open(title, width);
    grid(&mut svg, &y_ticks, width, y_of);
    if above > 0 {
        let (inner, tall) = (width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
        let _ = write!(
            svg,
            "<svg x=\"{LEFT}\" y=\"{TOP}\" width=\"{inner}\" height=\"{tall}\" viewBox=\"{LEFT} {TOP} {inner} {tall}\">"
        );
    }
    let mut marks = String::new();
    for tick in ticks(x_min, x_max, 6).into_iter().filter(|tick| (x_min..=x_max).contains(tick) && tick.fract() == 0.0)
    {
        let x = x_of(tick);
        let _ = write!(
            marks,
            "<text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>",
            HEIGHT - 26.0
        );
    }
    for Series { name, class, points, dots } in &series {
        let drawn = thin(points);
        if drawn.len() > 1 {
            let path: Vec<_> = drawn.iter().map(|&(x, y)| format!("{:.1},{:.1}", x_of(x), y_of(y))).collect();
            let _ = write!(svg, "<polyline class=\"line {class}\" points=\"{}\"/>", path.join(" "));
        }
        if *dots || drawn.len() == 1 {
            for &(x, y) in &drawn {
                let (left, top) = (x_of(x), y_of(y));
                let _ = write!(
                    svg,
                    "<circle class=\"dot {class}\" cx=\"{left:.1}\" cy=\"{top:.1}\" r=\"3.2\"><title>{name} {} at step {x}</title></circle>",
                    number(y)
                );
            }
        }
    }
    if above > 0 {
        svg.push_str("</svg>");
    }
    axis_name(&mut marks, "step", width);
    let _ = write!(svg, "{marks}</svg>");
    let mut legend = String::new();
    if above > 0 {
        let points = if above == 1 { "point" } else { "points" };
        let _ = write!(legend, "<span>{above} {points} above the chart's range, up to {}</span>", number(largest));
    }
    for series in series.iter().filter(|_| series.len() > 1) {
        let _ = write!(legend, "<span class=\"key {}\">{}</span>", series.class, escape(series.name));
    }
    figure(title, &legend, &svg)
}

/// The end of the axis if a few large values, such as those of the first steps, would leave the rest less than half of
/// its height. It is a quarter above the 90th percentile. `None`: the axis ends at the largest value.
fn top(series: &[Series]) -> Option<f64> {
    /// The fewest points for such an axis.
    const POINTS: usize = 20;
    let mut values: Vec<f64> = series
        .iter()
        .flat_map(|series| &series.points)
        .map(|point| point.1)
        .filter(|value| value.is_finite())
        .collect();
    if values.len() < POINTS {
        return None;
    }
    values.sort_unstable_by(f64::total_cmp);
    let (least, usual, largest) = (values[0], values[(values.len() - 1) * 9 / 10], values[values.len() - 1]);
    let end = least + 1.25 * (usual - least);
    (usual > least && largest - least > 2.0 * (end - least)).then_some(end)
}

/// A histogram of `values` over at most `bars` buckets of a round width.
pub fn histogram(title: &str, unit: &str, values: &[usize], bars: usize) -> String {
    let Some(&longest) = values.iter().max() else { return String::new() };
    let step = ticks(0.0, longest as f64, bars);
    let width = if step.len() > 1 { (step[1] - step[0]).ceil().max(1.0) as usize } else { 1 };
    let first = values.iter().min().copied().unwrap_or(0) / width;
    let mut counts = vec![0usize; longest / width - first + 1];
    for value in values {
        counts[value / width - first] += 1;
    }
    let tallest = counts.iter().copied().max().unwrap_or(1) as f64;
    let y_ticks = ticks(0.0, tallest, 4);
    let high = y_ticks[y_ticks.len() - 1].max(tallest);
    let y_of = |y: f64| HEIGHT - BOTTOM - y / high * (HEIGHT - TOP - BOTTOM);
    let slot = (WIDTH - LEFT - RIGHT) / counts.len() as f64;

    let mut svg = open(title, WIDTH);
    grid(&mut svg, &y_ticks, WIDTH, y_of);
    let label_every = counts.len().div_ceil(10);
    for (index, &count) in counts.iter().enumerate() {
        let from = (first + index) * width;
        let (x, y) = (LEFT + slot * index as f64, y_of(count as f64));
        let (bar, height) = ((slot - 2.0).max(0.8), HEIGHT - BOTTOM - y);
        let _ = write!(
            svg,
            "<rect class=\"bar\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{bar:.1}\" height=\"{height:.1}\" rx=\"1.5\"><title>{} of {from} to {} {unit}</title></rect>",
            x + 1.0,
            tunesmith_base::words::count(count, "row"),
            from + width - 1,
        );
        if index % label_every == 0 {
            let _ = write!(svg, "<text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\">{from}</text>", HEIGHT - 26.0);
        }
    }
    axis_name(&mut svg, unit, WIDTH);
    svg.push_str("</svg>");
    figure(title, "<span>height: rows</span>", &svg)
}

/// The name of the horizontal axis, below its ticks.
fn axis_name(svg: &mut String, name: &str, width: f64) {
    let (x, y) = (LEFT + (width - LEFT - RIGHT) / 2.0, HEIGHT - 8.0);
    let _ =
        write!(svg, "<text class=\"tick\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>", escape(name));
}

fn open(title: &str, width: f64) -> String {
    format!("<svg viewBox=\"0 0 {width} {HEIGHT}\" role=\"img\" aria-label=\"{}\">", escape(title))
}

fn figure(title: &str, legend: &str, svg: &str) -> String {
    format!(
        "<figure><figcaption><b>{}</b><span class=\"legend\">{legend}</span></figcaption>{svg}</figure>",
        escape(title)
    )
}

fn grid(svg: &mut String, y_ticks: &[f64], width: f64, y_of: impl Fn(f64) -> f64) {
    for (&tick, label) in y_ticks.iter().zip(tick_labels(y_ticks)) {
        let y = y_of(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/><text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            width - RIGHT,
            LEFT - 8.0,
            y + 4.0,
            label,
        );
    }
}

/// About `count` round numbers that cover `low..=high`.
fn ticks(low: f64, high: f64, count: usize) -> Vec<f64> {
    let span = if high > low { high - low } else { high.abs().max(1.0) };
    let rough = span / count as f64;
    let magnitude = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * magnitude).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(10.0 * magnitude);
    let (first, last) = ((low / step).floor() as i64, (high / step).ceil() as i64);
    (first..=last.max(first + 1)).map(|index| index as f64 * step).collect()
}

/// The ticks of an axis in one notation, with as many decimals each: 0.5, 1.0, 1.5, or 5e-4, 1e-3, 1.5e-3.
fn tick_labels(ticks: &[f64]) -> Vec<String> {
    if ticks.iter().any(|&tick| tick != 0.0 && is_scientific(tick)) {
        return ticks.iter().map(|&tick| if tick == 0.0 { number(tick) } else { scientific(tick) }).collect();
    }
    let decimals = |&tick: &f64| number(tick).split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let most = ticks.iter().map(decimals).max().unwrap_or(0);
    ticks.iter().map(|tick| if *tick == 0.0 { "0".to_owned() } else { format!("{tick:.most$}") }).collect()
}

/// Whether [`number`] writes a value with an exponent.
fn is_scientific(value: f64) -> bool {
    !(1e-3..1e6).contains(&value.abs())
}

fn scientific(value: f64) -> String {
    format!("{value:.2e}").replace(".00e", "e").replace("0e", "e")
}

/// Three significant digits, without needless zeros; scientific where that is shorter to read.
pub fn number(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    if is_scientific(value) {
        return scientific(value);
    }
    let decimals = (2 - value.abs().log10().floor() as i32).clamp(0, 6) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Averages neighbours until the line has at most [`MAX_POINTS`] points.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let group = points.len().div_ceil(MAX_POINTS).max(1);
    let mean = |chunk: &[(f64, f64)]| {
        let count = chunk.len() as f64;
        (chunk.iter().map(|point| point.0).sum::<f64>() / count, chunk.iter().map(|point| point.1).sum::<f64>() / count)
    };
    points.chunks(group).map(mean).collect()
}

/// The mean of each point and its neighbours, about a fifteenth of the curve, as many on the left as on the right: it
/// neither lags nor bends at the ends.
pub fn smooth(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = (points.len() / 30).min(100);
    let around = |index: usize| {
        let reach = reach.min(index).min(points.len() - 1 - index);
        let near = &points[index - reach..=index + reach];
        (points[index].0, near.iter().map(|point| point.1).sum::<f64>() / near.len() as f64)
    };
    (0..points.len()).map(around).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover_the_range() {
        assert_eq!(ticks(0.0, 10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let small = ticks(0.0131, 0.0468, 5);
        assert!(small[0] <= 0.0131 && *small.last().unwrap() >= 0.0468 && small.len() < 9, "{small:?}");
        assert!(ticks(3.0, 3.0, 5).len() >= 2);
    }

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 2.0, 0.25, 1234.0, 0.0002, 1.5e7, -4.14159].map(number);
        assert_eq!(shown, ["0", "2", "0.25", "1234", "2e-4", "1.5e7", "-4.14"]);
    }

    #[test]
    fn the_ticks_of_an_axis_have_one_notation() {
        assert_eq!(tick_labels(&[0.0, 5e-4, 1e-3, 1.5e-3]), ["0", "5e-4", "1e-3", "1.5e-3"]);
        assert_eq!(tick_labels(&[0.0, 0.5, 1.0]), ["0", "0.5", "1.0"]);
        assert_eq!(tick_labels(&[8.0, 10.0, 12.0]), ["8", "10", "12"]);
        assert_eq!(tick_labels(&[1.25, 1.3, 1.35]), ["1.25", "1.30", "1.35"]);
        assert_eq!(tick_labels(&[-1.0, -0.5, 0.0]), ["-1.0", "-0.5", "0"]);
    }

    #[test]
    fn smoothing_keeps_a_constant_and_short_curves() {
        assert!(smooth(&[(1.0, 4.0); 100]).iter().all(|point| (point.1 - 4.0).abs() < 1e-12));
        let short = [(1.0, 4.0), (2.0, 1.0)];
        assert_eq!(smooth(&short), short);
    }

    #[test]
    fn a_chart_of_one_point_or_of_equal_values_has_no_nan() {
        for points in [vec![(1.0, 0.5)], vec![(1.0, 0.5), (2.0, 0.5)], vec![(1.0, 0.0), (2.0, 0.0)]] {
            let svg = lines("loss", &[Series { name: "loss", class: "raw", points, dots: false }], ChartMarks::Small);
            assert!(svg.contains("<svg") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        assert_eq!(lines("loss", &[], ChartMarks::Wide), "");
        let bars = histogram("lengths", "tokens", &[5, 5, 5], 20);
        assert!(bars.contains("3 rows of 5 to 5 tokens"), "{bars}");
    }

    /// A loss that falls from 12 to 0.1 within 60 of 500 steps.
    fn falling() -> Vec<(f64, f64)> {
        (1..=500)
            .map(|step| (f64::from(step), 0.02 + 0.1 / f64::from(step).sqrt() + 12.0 * (-f64::from(step) / 10.0).exp()))
            .collect()
    }

    #[test]
    fn the_first_steps_do_not_flatten_the_rest() {
        let series = |points| Series { name: "loss", class: "raw", points, dots: false };
        let end = top(&[series(falling())]).expect("an axis that is cut");
        let at_60 = falling()[59].1;
        let last = falling()[499].1;
        assert!((at_60 - last) / (end - last) > 0.3, "{at_60} {last} {end}");
        let svg = lines("Loss", &[series(falling())], ChartMarks::Wide);
        assert!(svg.contains("points above the chart's range, up to 11"), "{svg}");
        // A curve that falls evenly is shown whole, and so is one of few points.
        let even: Vec<_> = (0..500).map(|step| (f64::from(step), 5.0 - f64::from(step) / 100.0)).collect();
        assert_eq!(top(&[series(even)]), None);
        assert_eq!(top(&[series(falling()[..12].to_vec())]), None);
        assert_eq!(top(&[series(vec![(0.0, 1.0); 30])]), None);
    }

    #[test]
    fn long_lines_are_thinned() {
        let points: Vec<_> = (0..10_000).map(|step| (f64::from(step), 1.0)).collect();
        assert!(thin(&points).len() <= MAX_POINTS);
    }
}
