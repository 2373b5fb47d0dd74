//! Values as Python prints them. minijinja does so except for floats (`1e+22`, `-3.5e-07`, `inf`), also in lists and
//! maps.
use std::fmt::Write as _;

use minijinja::Value;
use minijinja::value::ValueKind;

/// Python's `str` of a value; `None` where minijinja writes the same.
pub fn text(value: &Value) -> Option<String> {
    holds_float(value).then(|| {
        let mut text = String::new();
        repr(value, &mut text);
        text
    })
}

/// Python's `str` of any value.
pub fn string(value: &Value) -> String {
    text(value).unwrap_or_else(|| value.to_string())
}

/// Python's `repr` of a finite float; Rust's `Debug` of infinities and NaN.
pub fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    match scientific.split_once('e').and_then(|(mantissa, exponent)| Some((mantissa, exponent.parse::<i32>().ok()?))) {
        Some((mantissa, exponent)) if value != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

fn number(value: &Value) -> Option<f64> {
    (value.kind() == ValueKind::Number && !value.is_integer()).then(|| f64::try_from(value.clone()).ok()).flatten()
}

fn holds_float(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Number => !value.is_integer(),
        ValueKind::Seq => value.try_iter().is_ok_and(|mut items| items.any(|item| holds_float(&item))),
        ValueKind::Map => value
            .as_object()
            .and_then(minijinja::value::DynObject::try_iter_pairs)
            .into_iter()
            .flatten()
            .any(|(key, item)| holds_float(&key) || holds_float(&item)),
        _ => false,
    }
}

fn repr(value: &Value, text: &mut String) {
    if let Some(number) = number(value) {
        match number {
            _ if number.is_nan() => text.push_str("nan"),
            _ if number.is_infinite() => text.push_str(if number > 0.0 { "inf" } else { "-inf" }),
            _ => text.push_str(&float(number)),
        }
        return;
    }
    let items = |open: char, close: &str, text: &mut String| {
        text.push(open);
        for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
            text.push_str(if index > 0 { ", " } else { "" });
            repr(&item, text);
        }
        text.push_str(close);
    };
    match value.kind() {
        ValueKind::Seq if value.is_tuple() => items('(', if value.len() == Some(1) { ",)" } else { ")" }, text),
        ValueKind::Seq => items('[', "]", text),
        ValueKind::Map => {
            text.push('{');
            let pairs = value.as_object().and_then(minijinja::value::DynObject::try_iter_pairs);
            for (index, (key, item)) in pairs.into_iter().flatten().enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(&key, text);
                text.push_str(": ");
                repr(&item, text);
            }
            text.push('}');
        }
        _ => {
            let _ = write!(text, "{value:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_prints_them() {
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (-3.5e-7, "-3.5e-07"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1e22, "1e+22"),
            (1.5e300, "1.5e+300"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ];
        for (value, expected) in cases {
            assert_eq!(string(&Value::from(value)), expected);
        }
        let list = Value::from(vec![Value::from(1e16), Value::from("a"), Value::from(2), Value::from(true)]);
        assert_eq!(string(&list), "[1e+16, 'a', 2, True]");
        assert_eq!(string(&Value::from_pairs([("x", list)])), "{'x': [1e+16, 'a', 2, True]}");
        assert_eq!(text(&Value::from("1.5")), None);
    }
}
