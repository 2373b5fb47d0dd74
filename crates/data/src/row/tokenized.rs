//! Rows `{input_ids, labels, attention_mask}`: token ids that another program made, used unchanged. Without `labels`,
//! every token carries a loss.
use serde_json::{Map, Value};

use super::{Row, Shape, has};
use crate::batch::IGNORE;
use crate::json_type::json_type;
use tunesmith_base::error::{Error, Result};

pub(super) const SHAPE: Shape =
    Shape { fields: "input_ids", plain: true, fits: |row| has(row, "input_ids"), parse, source_text: |_| None };

/// Parses a row. Tokens that the mask excludes at either end are padding and are removed.
fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    let mut numbers = |field: &str| -> Result<Option<Vec<i64>>> {
        let items = match row.get_mut(field).map(Value::take) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Array(items)) => items,
            Some(other) => {
                return Err(Error::data(format!(
                    "field {field:?} is {}, expected a list of token ids",
                    json_type(&other)
                )));
            }
        };
        let number = |item: &Value| {
            let wrong = || Error::data(format!("field {field:?} holds {item}, expected token ids"));
            item.as_i64()
                .or_else(|| item.as_bool().filter(|_| field == "attention_mask").map(i64::from))
                .ok_or_else(wrong)
        };
        items.iter().map(number).collect::<Result<_>>().map(Some)
    };
    let id = |field: &str, value: i64| {
        u32::try_from(value)
            .ok()
            .filter(|&id| i32::try_from(id).is_ok())
            .ok_or_else(|| Error::data(format!("field {field:?} holds {value}, which is no token id")))
    };
    let mut input_ids: Vec<u32> = numbers("input_ids")?
        .unwrap_or_default()
        .into_iter()
        .map(|value| id("input_ids", value))
        .collect::<Result<_>>()?;
    let mut labels = match numbers("labels")? {
        Some(labels) => {
            let label =
                |value| if value == i64::from(IGNORE) { Ok(IGNORE) } else { id("labels", value).map(|id| id as i32) };
            labels.into_iter().map(label).collect::<Result<Vec<i32>>>()?
        }
        None => input_ids.iter().map(|&id| id as i32).collect(),
    };
    let count = input_ids.len();
    let same = |field: &str, len: usize| {
        if len == count { Ok(()) } else { Err(Error::data(format!("{count} input_ids but {len} {field}"))) }
    };
    same("labels", labels.len())?;
    if let Some(mask) = numbers("attention_mask")? {
        same("entries of attention_mask", mask.len())?;
        let begin = mask.iter().position(|&seen| seen != 0).unwrap_or(mask.len());
        let end = mask.iter().rposition(|&seen| seen != 0).map_or(begin, |last| last + 1);
        if mask[begin..end].iter().any(|&seen| seen != 1) || mask.iter().any(|seen| ![0, 1].contains(seen)) {
            return Err(Error::data("field \"attention_mask\" has other values than 1 between its padding")
                .hint("every token sees all earlier ones of its row; give each sequence a row of its own"));
        }
        (input_ids, labels) = (input_ids[begin..end].to_vec(), labels[begin..end].to_vec());
    }
    Ok(Row::Tokens { input_ids, labels })
}
