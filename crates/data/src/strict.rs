//! JSON that refuses duplicate keys. Other parsers keep one of the two values and drop the other silently.
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// The start of the error message for a duplicate key.
pub(super) const REPEATED: &str = "the key ";

/// A JSON value without duplicate keys at any depth.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Strict(pub(super) Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Values)
    }
}

struct Values;

impl<'de> Visitor<'de> for Values {
    type Value = Strict;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Strict, E> {
        Ok(Strict(Value::Null))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Strict, E> {
        Ok(Strict(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Strict, E> {
        Ok(Strict(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Strict, E> {
        Ok(Strict(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Strict, E> {
        Ok(Strict(value.into()))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Strict, E> {
        Ok(Strict(value.into()))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Strict, E> {
        Ok(Strict(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Strict, A::Error> {
        let mut list = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Strict(list.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Strict, A::Error> {
        let mut map = Map::new();
        while let Some(key) = fields.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("{REPEATED}{key:?} is given twice")));
            }
            let Strict(value) = fields.next_value()?;
            map.insert(key, value);
        }
        Ok(Strict(map.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_serde_json() {
        let text = r#"{"b": [1, -2, 1.5e300, 18446744073709551615, true, null, "\u00e9"], "a": {"x": {}, "y": []}}"#;
        let Strict(value) = serde_json::from_str(text).unwrap();
        assert_eq!(value.to_string(), serde_json::from_str::<Value>(text).unwrap().to_string());
    }

    #[test]
    fn a_key_that_stands_twice_is_refused_at_any_depth() {
        for text in [r#"{"a": 1, "a": 1}"#, r#"[{"b": {"a": 1, "c": 2, "\u0061": 3}}]"#] {
            let error = serde_json::from_str::<Strict>(text).unwrap_err();
            assert!(error.is_data() && error.to_string().contains("the key \"a\" is given twice"), "{error}");
        }
        assert!(serde_json::from_str::<Strict>(&"[".repeat(100_000)).unwrap_err().is_syntax());
    }
}
