//! The parts of Python and of Transformers that chat templates call: `raise_exception`, `strftime_now`, `tojson` as
//! `json.dumps`, and string methods. Each that could multiply its input asks [`guard`] first.
use std::fmt::Write as _;
use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{DynObject, Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, Expression, State, Value, context};
use minijinja_contrib::pycompat;

use super::jinja::{MULTIPLY, REMAINDER, failed, guard, measure};

/// Adds everything to the environment.
pub fn install(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> { Err(failed(message)) });
    environment.add_function("strftime_now", |layout: &str| strftime(layout, SystemTime::now()));
    environment
        .add_filter("tojson", |value: &Value, indent: Option<&Value>, kwargs: Kwargs| to_json(value, indent, &kwargs));
    environment.add_filter("replace", replace);
    environment.add_filter(
        "join",
        |items: &Value, separator: Option<&str>, attribute: Option<&str>, kwargs: Kwargs| {
            let (separator, attribute) = (separator.or(kwargs.get("d")?), attribute.or(kwargs.get("attribute")?));
            kwargs.assert_all_used()?;
            join(items, separator, attribute)
        },
    );
    environment.add_filter(
        "indent",
        |text: &str, width: Option<&Value>, first: Option<bool>, blank: Option<bool>, kwargs: Kwargs| {
            let width = width.cloned().or(kwargs.get("width")?);
            let first = first.or(kwargs.get("first")?).unwrap_or(false);
            let blank = blank.or(kwargs.get("blank")?).unwrap_or(false);
            kwargs.assert_all_used()?;
            indent(text, width.as_ref(), first, blank)
        },
    );
    environment
        .add_filter("format", |layout: &str, values: Rest<Value>| checked_format(FormatStyle::Printf, layout, &values));
    // These pad to any length, and no chat template needs them.
    environment.remove_filter("batch");
    environment.remove_filter("slice");
    environment.add_filter(MULTIPLY, multiply);
    environment.add_filter(REMAINDER, remainder);
    environment.add_global("_one", 1);
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::String | ValueKind::Map)
    });
    environment.set_unknown_method_callback(method);
}

/// An expression of two variables `a` and `b`, evaluated without rewriting.
fn plain(source: &'static str) -> Expression<'static, 'static> {
    static PLAIN: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);
    PLAIN.compile_expression(source).expect("a constant expression")
}

/// The operator `*`: numbers, or text and sequences repeated.
fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    static PRODUCT: LazyLock<Expression<'static, 'static>> = LazyLock::new(|| plain("a * b"));
    let repeats = |value: &Value| matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable);
    let (content, times) = if repeats(a) {
        (a, b)
    } else if repeats(b) {
        (b, a)
    } else {
        return PRODUCT.eval(context! { a, b });
    };
    let times = times.as_i64().ok_or_else(|| failed(format!("cannot repeat by {}", times.kind())))?.max(0) as usize;
    guard(measure(content)?.checked_mul(times))?;
    if let Some(text) = content.as_str() {
        return Ok(Value::from(text.repeat(times)));
    }
    let items = content.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
    Ok(Value::from(std::iter::repeat_n(items, times).flatten().collect::<Vec<_>>()))
}

/// The operator `%`: numbers, or printf-style formatting of a string.
fn remainder(a: &Value, b: &Value) -> Result<Value, Error> {
    static REMAINDER: LazyLock<Expression<'static, 'static>> = LazyLock::new(|| plain("a % b"));
    let Some(layout) = a.as_str() else { return REMAINDER.eval(context! { a, b }) };
    let values = if b.is_tuple() { b.try_iter()?.collect() } else { vec![b.clone()] };
    checked_format(FormatStyle::Printf, layout, &values)
}

/// Formatting whose widths and precisions are plain numbers of at most three digits.
fn checked_format(style: FormatStyle, layout: &str, values: &[Value]) -> Result<Value, Error> {
    let (mut digits, mut in_field, mut last) = (0, false, ' ');
    for letter in layout.chars() {
        digits = if in_field && letter.is_ascii_digit() { digits + 1 } else { 0 };
        let computed = match style {
            FormatStyle::Printf => {
                let computed = in_field && letter == '*';
                in_field = if letter == '%' { !in_field } else { in_field && !letter.is_alphabetic() };
                computed
            }
            FormatStyle::StrFormat => {
                let computed = in_field && letter == '{' && last != '{';
                in_field = if letter == '{' { !in_field || computed } else { in_field && letter != '}' };
                computed
            }
        };
        if digits > 3 || computed {
            return Err(failed(format!("the format string {layout:?} asks for a computed or very large width")));
        }
        last = letter;
    }
    let sizes = values.iter().map(measure).sum::<Result<usize, _>>()?;
    // A value may be named by every field: at most one field per two characters of the layout.
    guard(layout.len().checked_mul(1000).and_then(|own| own.checked_add(sizes.checked_mul(layout.len() / 2 + 1)?)))?;
    format(style, layout, values).map(Value::from)
}

fn replace(text: &Value, old: &str, new: &str, count: Option<i64>) -> Result<Value, Error> {
    let text = text.to_string();
    let found = text.matches(old).count();
    let times = count.and_then(|count| usize::try_from(count).ok()).map_or(found, |count| found.min(count));
    guard(new.len().checked_mul(times).and_then(|added| added.checked_add(text.len())))?;
    Ok(Value::from(text.replacen(old, new, times)))
}

fn join(items: &Value, separator: Option<&str>, attribute: Option<&str>) -> Result<Value, Error> {
    let separator = separator.unwrap_or_default();
    if items.is_undefined() {
        return Ok(Value::from(""));
    }
    guard(separator.len().checked_mul(items.len().unwrap_or(0)))?;
    measure(items)?;
    let mut joined = String::new();
    for (index, item) in items.try_iter()?.checked().enumerate() {
        let item = item?;
        if index > 0 {
            joined.push_str(separator);
        }
        let item = attribute.map_or(Ok(item.clone()), |name| item.get_attr(name))?;
        let _ = write!(joined, "{item}");
    }
    Ok(Value::from(joined))
}

fn indent(text: &str, width: Option<&Value>, first: bool, blank: bool) -> Result<Value, Error> {
    let indention = match width {
        None => "    ".to_owned(),
        Some(width) => match (width.as_str(), width.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(width)) => {
                guard(Some(width))?;
                " ".repeat(width)
            }
            _ => return Err(failed("indent wants a number or a string")),
        },
    };
    guard(indention.len().checked_mul(text.lines().count() + 1).and_then(|added| added.checked_add(text.len())))?;
    let mut indented = String::with_capacity(text.len());
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            indented.push('\n');
        }
        if (index == 0 && first) || (index > 0 && (blank || !line.is_empty())) {
            indented.push_str(&indention);
        }
        indented.push_str(line);
    }
    Ok(Value::from(indented))
}

/// Python's string methods that minijinja's `pycompat` lacks or does not bound, then `pycompat` itself.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return pycompat::unknown_method_callback(state, value, name, args) };
    let pair = |found: Option<(&str, &str)>, separator: &str, whole_first: bool| {
        let parts = match (found, whole_first) {
            (Some((before, after)), _) => [before, separator, after],
            (None, true) => [text, "", ""],
            (None, false) => ["", "", text],
        };
        Value::from(Tuple::from(parts.map(Value::from)))
    };
    match name {
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            replace(value, old, new, count)
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            join(items, Some(text), None)
        }
        "format" => checked_format(FormatStyle::StrFormat, text, args),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            Ok(pair(text.split_once(separator), separator, true))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            Ok(pair(text.rsplit_once(separator), separator, false))
        }
        "rsplit" => {
            let (separator, most): (&str, Option<i64>) = from_args(args)?;
            if separator.is_empty() {
                return Err(failed("empty separator"));
            }
            let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX - 1);
            let mut parts: Vec<_> = text.rsplitn(most + 1, separator).map(Value::from).collect();
            parts.reverse();
            Ok(Value::from(parts))
        }
        "index" => {
            let (wanted,): (&str,) = from_args(args)?;
            let found = text.find(wanted).ok_or_else(|| failed("substring not found"))?;
            Ok(Value::from(text[..found].chars().count()))
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// `tojson` as Transformers defines it: `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`,
/// without escaping for HTML.
fn to_json(value: &Value, indent: Option<&Value>, kwargs: &Kwargs) -> Result<Value, Error> {
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let indent = indent.cloned().or(kwargs.get("indent")?).filter(|indent| !indent.is_none());
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let indent = match &indent {
        None => None,
        Some(indent) => match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) => Some(text.to_owned()),
            (None, Some(width)) if width <= 64 => Some(" ".repeat(width)),
            _ => return Err(failed("tojson wants an indent of at most 64")),
        },
    };
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(failed("tojson wants two separators")),
        None => (if indent.is_some() { ",".into() } else { ", ".into() }, ": ".into()),
    };
    let added = indent.as_ref().map_or(0, String::len) * 64 + item.len() + key.len() + 6;
    guard(measure(value)?.checked_mul(added))?;
    let mut json = Json { text: String::new(), ensure_ascii, indent, item, key, sort_keys };
    json.write(value, 0)?;
    Ok(Value::from(json.text))
}

struct Json {
    text: String,
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Json {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                let _ = write!(self.text, "{value}");
            }
            ValueKind::Number => self.text.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<_> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                self.text.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.begin_item(index, depth);
                    self.write(item, depth + 1)?;
                }
                self.end_items(items.len(), depth);
                self.text.push(']');
            }
            ValueKind::Map => {
                let pairs = value.as_object().and_then(DynObject::try_iter_pairs).into_iter().flatten();
                let mut pairs: Vec<_> = pairs.map(|(key, item)| (key.to_string(), item)).collect();
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.text.push('{');
                for (index, (key, item)) in pairs.iter().enumerate() {
                    self.begin_item(index, depth);
                    self.string(key);
                    self.text.push_str(&self.key);
                    self.write(item, depth + 1)?;
                }
                self.end_items(pairs.len(), depth);
                self.text.push('}');
            }
            kind => return Err(failed(format!("{kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn begin_item(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.text.push_str(&self.item);
        }
        self.break_line(depth + 1);
    }

    fn end_items(&mut self, count: usize, depth: usize) {
        if count > 0 {
            self.break_line(depth);
        }
    }

    fn break_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            for _ in 0..depth {
                self.text.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for letter in text.chars() {
            match letter {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                letter if letter < ' ' || (self.ensure_ascii && !letter.is_ascii()) => {
                    for unit in letter.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.text, "\\u{unit:04x}");
                    }
                }
                letter => self.text.push(letter),
            }
        }
        self.text.push('"');
    }
}

/// A float as Python's `repr` writes it.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    let scientific = format!("{value:e}");
    let exponent: i32 = scientific.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let mantissa = scientific.split('e').next().unwrap_or_default();
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    format!("{value:?}")
}

/// `datetime.now().strftime(layout)`, in UTC and English.
fn strftime(layout: &str, now: SystemTime) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let (year, month, day) = civil_date(days);
    let day_of_year = days - days_before(year) + 1;
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[(days % 7) as usize]);
    let hour12 = (hour + 11) % 12 + 1;
    let mut text = String::new();
    let mut letters = layout.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let mut code = letters.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = letters.next();
        }
        let mut number = |value: u64, width: usize| {
            let width = if unpadded { 0 } else { width };
            let _ = write!(text, "{value:0width$}");
        };
        match code {
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month as u64, 2),
            Some('d') => number(day, 2),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('j') => number(day_of_year, 3),
            Some('B') => text.push_str(month_name),
            Some('b' | 'h') => text.push_str(&month_name[..3]),
            Some('A') => text.push_str(day_name),
            Some('a') => text.push_str(&day_name[..3]),
            Some('p') => text.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('e') => {
                let _ = write!(text, "{day:2}");
            }
            Some('F') => {
                let _ = write!(text, "{year:04}-{month:02}-{day:02}");
            }
            Some('T') => {
                let _ = write!(text, "{hour:02}:{minute:02}:{second:02}");
            }
            Some('Z') => text.push_str("UTC"),
            Some('%') => text.push('%'),
            other => {
                return Err(failed(format!(
                    "strftime_now does not know %{}",
                    other.map_or(String::new(), String::from)
                )));
            }
        }
    }
    Ok(text)
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before(year: u64) -> u64 {
    let past = year - 1;
    past * 365 + past / 4 - past / 100 + past / 400 - 719_162
}

/// (year, month from 1, day from 1) of a day counted from 1970-01-01.
fn civil_date(days: u64) -> (u64, usize, u64) {
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let leap = u64::from(year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)));
    let mut day = days - days_before(year);
    for (month, length) in [31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31].into_iter().enumerate() {
        if day < length {
            return (year, month + 1, day + 1);
        }
        day -= length;
    }
    unreachable!("a year has at most 366 days")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_as_python_writes_them() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        // date -u -d @1709251199 and @1709251200: the leap day of 2024 and the day after.
        assert_eq!(
            strftime("%d %b %Y %H:%M:%S %A %j", at(1_709_251_199)).unwrap(),
            "29 Feb 2024 23:59:59 Thursday 060"
        );
        assert_eq!(strftime("%-d %B %y %I %p", at(1_709_251_200)).unwrap(), "1 March 24 12 AM");
        assert_eq!(strftime("%Y-%m-%d %a", at(0)).unwrap(), "1970-01-01 Thu");
        assert!(strftime("%Q", at(0)).is_err());
    }

    #[test]
    fn floats_as_python_writes_them() {
        let written = [(1.0, "1.0"), (0.1, "0.1"), (1e16, "1e+16"), (1.5e-5, "1.5e-05"), (1e15, "1000000000000000.0")];
        for (value, text) in written {
            assert_eq!(float(value), text);
        }
    }
}
