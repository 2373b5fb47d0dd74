//! Names of JSON types for messages about rows.
use serde_json::Value;

/// The type of a value with its article, as in "found a list".
pub fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        value if is_other_bytes(value) => "bytes that are neither UTF-8 text nor an image",
        Value::Object(_) => "an object",
    }
}

/// The only key of an object that stands for bytes which are neither text nor an image. Its value is the number of
/// bytes.
pub const OTHER_BYTES: &str = "other bytes";

/// Whether a value stands for such bytes.
pub fn is_other_bytes(value: &Value) -> bool {
    value.as_object().is_some_and(|fields| fields.len() == 1 && fields.contains_key(OTHER_BYTES))
}
