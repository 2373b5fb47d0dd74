//! Functions, filters and string methods of Python and Transformers that chat templates call: `raise_exception`,
//! `strftime_now`, `tojson` as `json.dumps`, and others. Those that can multiply their input call [`guard`] first.
use std::sync::LazyLock;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, Expression, State, Value, context, filters, tests};
use minijinja_contrib::pycompat;

use super::jinja_limits::{charge, failed, guard, guard_sorting, measure, now, raised, stopped, weight};
use super::strftime::strftime;
use super::tojson::to_json;
use super::{python_text, whitespace};

/// The filter that replaces the operator `*`.
pub const MULTIPLY: &str = "_multiply";
/// The filter that replaces the operator `~`.
pub const CONCAT: &str = "_concat";
/// The filter that replaces the operator `%`.
pub const REMAINDER: &str = "_remainder";

/// Adds all functions, filters and tests of this module to an environment.
pub fn install(environment: &mut Environment<'static>) {
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> { Err(raised(message)) });
    environment.add_function("strftime_now", |layout: &str| strftime(layout, now()));
    environment.add_filter("tojson", |value: &Value, indent: Option<&Value>, kwargs: Kwargs| {
        to_json(value, indent, &kwargs).and_then(built)
    });
    environment.add_filter("replace", replace);
    environment.add_filter("trim", |text: &Value, letters: Option<&str>| {
        Value::from(whitespace::strip(&python_text::string(text), letters))
    });
    environment
        .add_filter("split", |text: &str, separator: Option<&str>, most: Option<i64>| split(text, separator, most));
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
    // These filters can pad to any length, and no chat template needs them.
    environment.remove_filter("batch");
    environment.remove_filter("slice");
    environment.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => value.clone(),
        None => Value::from(python_text::string(value)),
    });
    environment.add_filter(CONCAT, |a: &Value, b: &Value| {
        // The result is as large as both values, so the guard bounds it.
        guard(measure(a)?.checked_add(measure(b)?))?;
        built(Value::from(python_text::string(a) + &python_text::string(b)))
    });
    environment.add_filter(MULTIPLY, multiply);
    environment.add_filter(REMAINDER, remainder);
    environment.add_global("_one", 1);
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::String | ValueKind::Map)
    });
    environment.set_unknown_method_callback(method);
    install_bounded(environment);
}

/// minijinja's filters and tests that may take long in one call. A check runs before each.
fn install_bounded(environment: &mut Environment<'static>) {
    environment.add_filter("sort", |state: &State, value: Value, kwargs: Kwargs| {
        guard_sorting(&value)?;
        filters::sort(state, value, kwargs)
    });
    environment.add_filter("unique", |state: &State, value: Value, kwargs: Kwargs| {
        guard_sorting(&value)?;
        filters::unique(state, value, kwargs)
    });
    environment.add_filter("groupby", |value: Value, attribute: Option<&str>, kwargs: Kwargs| {
        guard_sorting(&value)?;
        filters::groupby(value, attribute, kwargs)
    });
    environment.add_filter("dictsort", |value: &Value, kwargs: Kwargs| {
        guard_sorting(value)?;
        filters::dictsort(value, kwargs)
    });
    environment.add_filter(
        "sum",
        |state: &State, values: Value, attribute: Option<&str>, start: Option<Value>, kwargs: Kwargs| {
            /// The most bytes that are copied: minijinja copies the sum so far for each item.
            const MAX_COPIED: usize = 1 << 30;
            charge(0)?;
            let from = start.clone().or(kwargs.get("start")?);
            let copied = measure(&values)?.saturating_mul(values.len().unwrap_or(1));
            if from.is_some_and(|from| !from.is_number()) && copied > MAX_COPIED {
                return Err(stopped("the template adds too many texts or lists in one step: join is for that"));
            }
            filters::sum(state, values, attribute, start, kwargs)
        },
    );
    environment.add_filter("pprint", |value: &Value| {
        /// The most spaces that `pprint` writes before an item.
        const INDENT: usize = 256;
        guard(weight(value).checked_mul(INDENT).and_then(|spaces| spaces.checked_add(measure(value).ok()?)))?;
        built(Value::from(filters::pprint(value)))
    });
    environment.add_test("in", |state: &State, value: &Value, other: &Value| {
        charge(0)?;
        tests::is_in(state, value, other)
    });
}

/// Charges for a value that a filter has built. minijinja may call the filter for each item of a list, with no check
/// between.
fn built(text: Value) -> Result<Value, Error> {
    charge(text.as_str().map_or(1, str::len))?;
    Ok(text)
}

/// An expression of the variables `a` and `b`, compiled without the rewriting of [`super::jinja`].
fn plain(source: &'static str) -> Expression<'static, 'static> {
    static PLAIN: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);
    PLAIN.compile_expression(source).expect("a constant expression")
}

/// The operator `*`: multiplies numbers, and repeats strings and sequences.
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
        return built(Value::from(text.repeat(times)));
    }
    let items = content.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
    charge(items.len().saturating_mul(times))?;
    Ok(Value::from(std::iter::repeat_n(items, times).flatten().collect::<Vec<_>>()))
}

/// The operator `%`: the remainder of numbers, or printf-style formatting of a string.
fn remainder(a: &Value, b: &Value) -> Result<Value, Error> {
    static REMAINDER: LazyLock<Expression<'static, 'static>> = LazyLock::new(|| plain("a % b"));
    let Some(layout) = a.as_str() else { return REMAINDER.eval(context! { a, b }) };
    let values = if b.is_tuple() { b.try_iter()?.collect() } else { vec![b.clone()] };
    checked_format(FormatStyle::Printf, layout, &values)
}

/// Formats a string. Widths and precisions must be literal numbers of at most three digits.
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
            return Err(stopped(format!("the format string {layout:?} asks for a computed or very large width")));
        }
        last = letter;
    }
    let sizes = values.iter().map(measure).sum::<Result<usize, _>>()?;
    // Every field may name the same value, and a field takes at least two characters of the layout.
    guard(layout.len().checked_mul(1000).and_then(|own| own.checked_add(sizes.checked_mul(layout.len() / 2 + 1)?)))?;
    format(style, layout, &printed(style, layout, values)).map(Value::from).and_then(built)
}

/// The values of a format string, with floats as Python's text where the format prints text (`%s`, `{}`).
fn printed(style: FormatStyle, layout: &str, values: &[Value]) -> Vec<Value> {
    let (mut values, mut next) = (values.to_vec(), 0);
    let mut print_next = |printed: bool| {
        if let Some(value) = values.get_mut(next).filter(|_| printed)
            && let Some(text) = python_text::text(value)
        {
            *value = Value::from(text);
        }
        next += 1;
    };
    let mut rest = layout;
    match style {
        FormatStyle::Printf => {
            while let Some((_, field)) = rest.split_once('%') {
                let end = field.find(|letter: char| letter.is_alphabetic() || letter == '%').unwrap_or(field.len());
                let letter = field[end..].chars().next();
                if letter != Some('%') {
                    print_next(letter == Some('s'));
                }
                rest = &field[end + letter.map_or(0, char::len_utf8)..];
            }
        }
        // Fields that name their values may take them in any order, so the values stay as they are.
        FormatStyle::StrFormat => {
            while let Some((before, field)) = rest.split_once('{').filter(|_| !layout.contains("{{")) {
                let _ = before;
                let Some((inside, after)) = field.split_once('}') else { break };
                if !inside.is_empty() && !inside.starts_with(':') {
                    break;
                }
                print_next(inside.is_empty());
                rest = after;
            }
        }
    }
    values
}

fn split(text: &str, separator: Option<&str>, most: Option<i64>) -> Result<Value, Error> {
    let most = most.and_then(|most| usize::try_from(most).ok());
    Ok(match (separator, most) {
        (None, _) => whitespace::split(text, most.unwrap_or(usize::MAX)).into_iter().map(Value::from).collect(),
        (Some(""), _) => return Err(failed("empty separator")),
        (Some(separator), None) => text.split(separator).map(Value::from).collect(),
        (Some(separator), Some(most)) => text.splitn(most.saturating_add(1), separator).map(Value::from).collect(),
    })
}

fn replace(text: &Value, old: &str, new: &str, count: Option<i64>) -> Result<Value, Error> {
    let text = python_text::string(text);
    let found = text.matches(old).count();
    let times = count.and_then(|count| usize::try_from(count).ok()).map_or(found, |count| found.min(count));
    guard(new.len().checked_mul(times).and_then(|added| added.checked_add(text.len())))?;
    built(Value::from(text.replacen(old, new, times)))
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
        joined.push_str(&python_text::string(&item));
    }
    built(Value::from(joined))
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
    built(Value::from(indented))
}

/// Python's string methods: those that minijinja's `pycompat` lacks or does not bound, and all others from `pycompat`.
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
        "strip" | "lstrip" | "rstrip" => {
            let (letters,): (Option<&str>,) = from_args(args)?;
            let strip = match name {
                "lstrip" => whitespace::lstrip,
                "rstrip" => whitespace::rstrip,
                _ => whitespace::strip,
            };
            Ok(Value::from(strip(text, letters)))
        }
        "split" => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
            split(text, separator, most)
        }
        "splitlines" => {
            let (keep_ends,): (Option<bool>,) = from_args(args)?;
            Ok(whitespace::splitlines(text, keep_ends.unwrap_or(false)).into_iter().map(Value::from).collect())
        }
        "isspace" => {
            let () = from_args(args)?;
            Ok(Value::from(!text.is_empty() && text.chars().all(whitespace::is_space)))
        }
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
