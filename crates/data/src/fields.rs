//! Fields that a row may have in addition to its text: `loss_weight` and a system message.
use serde_json::{Map, Value};

use super::json_type::json_type;
use tunesmith_base::error::{Error, Result};

/// The factor of a row's loss: its field `loss_weight`, or 1 without one. CSV rows have it as a string.
///
/// # Errors
/// The field is not a number of at least 0.
pub fn loss_weight(row: &Value) -> Result<f32> {
    let number = match &row["loss_weight"] {
        Value::Null => return Ok(1.0),
        Value::Number(number) => number.as_f64(),
        Value::String(text) if text.trim().is_empty() => return Ok(1.0),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.map(|number| number as f32).filter(|weight| weight.is_finite() && *weight >= 0.0).ok_or_else(|| {
        Error::data(format!("field \"loss_weight\" is {}, expected a number from 0 to 3.4e38", row["loss_weight"]))
    })
}

/// The system message in the field `system`, or `system_prompt` as in `OpenOrca`; `None` if it is empty.
///
/// # Errors
/// The two fields differ, or one is not a string.
pub(super) fn system(row: &mut Map<String, Value>) -> Result<Option<String>> {
    let mut found = None;
    for field in ["system", "system_prompt"] {
        match row.get_mut(field).map(Value::take) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() => {}
            Some(Value::String(text)) if found.as_ref().is_none_or(|earlier| *earlier == text) => found = Some(text),
            Some(Value::String(_)) => {
                return Err(Error::data("\"system\" and \"system_prompt\" differ, expected one of them"));
            }
            Some(other) => {
                return Err(Error::data(format!("field {field:?} is {}, expected a string", json_type(&other))));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_loss_weight_is_a_number_of_at_least_0() {
        let weight = |value: Value| loss_weight(&json!({ "text": "x", "loss_weight": value }));
        assert_eq!(loss_weight(&json!({ "text": "x" })).unwrap(), 1.0);
        assert_eq!(
            [json!(0.25), json!("0.25"), json!(null), json!("")].map(|value| weight(value).unwrap()),
            [0.25, 0.25, 1.0, 1.0]
        );
        for bad in [json!(-1), json!("much"), json!(1e300), json!([1])] {
            assert!(weight(bad.clone()).unwrap_err().to_string().contains("loss_weight"), "{bad}");
        }
    }
}
