//! JSON floats, parsed to the nearest f64. `serde_json` rounds twice when a number has many digits: the last digit of
//! one in five floats that a program wrote would differ, and so would what a template prints.
use serde_json::{Number, Value};

use super::strict::Strict;

/// Parses a JSON text, with floats to the nearest f64.
///
/// # Errors
/// The text is not valid JSON, or an object has a duplicate key.
pub fn parse(text: &str) -> serde_json::Result<Value> {
    let Strict(mut value) = serde_json::from_str(text)?;
    refine(text.as_bytes(), &mut value);
    Ok(value)
}

/// Replaces the floats of `value` by the f64 nearest to their literals in `text`, from which it was parsed.
pub(super) fn refine(text: &[u8], value: &mut Value) {
    let exact: Vec<f64> = Literals { text, at: 0 }.collect();
    if !exact.is_empty() && exact.len() == floats(value) {
        assign(value, &mut exact.into_iter());
    }
}

/// The float literals of a JSON text, in order.
struct Literals<'t> {
    text: &'t [u8],
    at: usize,
}

impl Iterator for Literals<'_> {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        loop {
            let &byte = self.text.get(self.at)?;
            match byte {
                b'"' => self.skip_string(),
                b'-' | b'0'..=b'9' => {
                    let rest = &self.text[self.at..];
                    let part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-');
                    let literal = &rest[..rest.iter().position(|byte| !part(byte)).unwrap_or(rest.len())];
                    self.at += literal.len();
                    let literal = str::from_utf8(literal).ok()?;
                    let integer = literal.parse::<i64>().is_ok() || literal.parse::<u64>().is_ok();
                    if !integer || literal == "-0" {
                        return literal.parse().ok();
                    }
                }
                _ => self.at += 1,
            }
        }
    }
}

impl Literals<'_> {
    fn skip_string(&mut self) {
        self.at += 1;
        while let Some(&byte) = self.text.get(self.at) {
            self.at += if byte == b'\\' { 2 } else { 1 };
            if byte == b'"' {
                break;
            }
        }
    }
}

fn floats(value: &Value) -> usize {
    match value {
        Value::Number(number) => usize::from(number.is_f64()),
        Value::Array(items) => items.iter().map(floats).sum(),
        Value::Object(fields) => fields.values().map(floats).sum(),
        _ => 0,
    }
}

fn assign(value: &mut Value, exact: &mut impl Iterator<Item = f64>) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let near = |one: f64, other: f64| (one - other).abs() <= 1e-12 * one.abs() + f64::MIN_POSITIVE;
            let exact = exact.next().filter(|exact| number.as_f64().is_some_and(|read| near(*exact, read)));
            if let Some(exact) = exact.and_then(Number::from_f64) {
                *number = exact;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| assign(item, exact)),
        Value::Object(fields) => fields.values_mut().for_each(|field| assign(field, exact)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_float_is_the_nearest(floats in prop::collection::vec(any::<f64>().prop_filter("finite", |x| x.is_finite()), 1..20)) {
            let text = format!("{{\"a \\\" 1.5\": {floats:?}, \"n\": 18446744073709551615, \"x\": [-7, {{\"y\": 0.1}}]}}");
            let value = parse(&text).unwrap();
            let read: Vec<f64> = value["a \" 1.5"].as_array().unwrap().iter().map(|item| item.as_f64().unwrap()).collect();
            prop_assert_eq!(read, floats);
            prop_assert_eq!(value["n"].as_u64(), Some(u64::MAX));
        }
    }
}
