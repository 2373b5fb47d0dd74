//! `{input_ids, labels}`: taken as they are; without labels all of it is learned.
use serde_json::{Map, Value};

use super::{Row, Shape, has, kind};
use crate::data::batch::IGNORE;
use crate::error::{Error, Result};

pub(super) const SHAPE: Shape =
    Shape { fields: "input_ids", plain: true, fits: |row| has(row, "input_ids"), parse, asks: |_| None };

fn parse(row: &mut Map<String, Value>) -> Result<Row> {
    let numbers = |field: &str| -> Result<Vec<i64>> {
        let wrong = |found: &Value| Error::data(format!("field {field:?} holds {found}, expected token ids"));
        let items = row[field].as_array().ok_or_else(|| {
            Error::data(format!("field {field:?} is {}, expected a list of token ids", kind(&row[field])))
        })?;
        items.iter().map(|item| item.as_i64().ok_or_else(|| wrong(item))).collect()
    };
    let id = |field: &str, value: i64| {
        u32::try_from(value)
            .ok()
            .filter(|&id| i32::try_from(id).is_ok())
            .ok_or_else(|| Error::data(format!("field {field:?} holds {value}, which is no token id")))
    };
    let input_ids: Vec<u32> =
        numbers("input_ids")?.into_iter().map(|value| id("input_ids", value)).collect::<Result<_>>()?;
    let labels = if has(row, "labels") {
        let label =
            |value| if value == i64::from(IGNORE) { Ok(IGNORE) } else { id("labels", value).map(|id| id as i32) };
        numbers("labels")?.into_iter().map(label).collect::<Result<Vec<i32>>>()?
    } else {
        input_ids.iter().map(|&id| id as i32).collect()
    };
    if labels.len() != input_ids.len() {
        return Err(Error::data(format!("{} input_ids but {} labels", input_ids.len(), labels.len())));
    }
    Ok(Row::Tokens { input_ids, labels })
}
