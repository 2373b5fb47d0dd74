//! Converts columns of bytes to text. Some Parquet writers (older Spark, Impala) do not mark text columns, and JSON has
//! no bytes. Values in UTF-8 become text; of other values, such as images, only the length is passed on.
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{
    Array, ArrayRef, FixedSizeListArray, GenericBinaryArray, GenericListArray, GenericStringArray, Int64Array,
    MapArray, OffsetSizeTrait, RecordBatch, StructArray,
};

/// Converts all byte columns of a batch, also in lists and structs.
pub(super) fn as_text(batch: &RecordBatch) -> RecordBatch {
    let columns = StructArray::from(batch.clone());
    record(&columns).map_or_else(|| batch.clone(), RecordBatch::from)
}

/// The converted column; `None` if it has no bytes.
fn column(array: &ArrayRef) -> Option<ArrayRef> {
    if let Some(bytes) = array.as_binary_opt::<i32>() {
        return Some(text(bytes));
    }
    if let Some(bytes) = array.as_binary_opt::<i64>() {
        return Some(text(bytes));
    }
    if let Some(bytes) = array.as_binary_view_opt() {
        return Some(bytes.clone().to_string_view().map_or_else(|_| lengths(bytes.iter()), |text| Arc::new(text) as _));
    }
    if let Some(items) = array.as_list_opt::<i32>() {
        return list(items);
    }
    if let Some(items) = array.as_list_opt::<i64>() {
        return list(items);
    }
    if let Some(items) = array.as_fixed_size_list_opt() {
        let (field, size, values, nulls) = items.clone().into_parts();
        let values = column(&values)?;
        let field = Arc::new(field.as_ref().clone().with_data_type(values.data_type().clone()));
        return FixedSizeListArray::try_new(field, size, values, nulls).ok().map(|array| Arc::new(array) as _);
    }
    if let Some(map) = array.as_map_opt() {
        let (field, offsets, entries, nulls, ordered) = map.clone().into_parts();
        let entries = record(&entries)?;
        let field = Arc::new(field.as_ref().clone().with_data_type(entries.data_type().clone()));
        return MapArray::try_new(field, offsets, entries, nulls, ordered).ok().map(|array| Arc::new(array) as _);
    }
    array.as_struct_opt().and_then(record).map(|array| Arc::new(array) as _)
}

fn record(array: &StructArray) -> Option<StructArray> {
    let (fields, columns, nulls) = array.clone().into_parts();
    let changed: Vec<Option<ArrayRef>> = columns.iter().map(column).collect();
    if changed.iter().all(Option::is_none) {
        return None;
    }
    let columns: Vec<ArrayRef> = changed.into_iter().zip(columns).map(|(new, old)| new.unwrap_or(old)).collect();
    let typed = fields.iter().zip(&columns);
    let fields =
        typed.map(|(field, column)| field.as_ref().clone().with_data_type(column.data_type().clone())).collect();
    StructArray::try_new(fields, columns, nulls).ok()
}

fn list<O: OffsetSizeTrait>(array: &GenericListArray<O>) -> Option<ArrayRef> {
    let (field, offsets, values, nulls) = array.clone().into_parts();
    let values = column(&values)?;
    let field = Arc::new(field.as_ref().clone().with_data_type(values.data_type().clone()));
    GenericListArray::<O>::try_new(field, offsets, values, nulls).ok().map(|array| Arc::new(array) as _)
}

fn text<O: OffsetSizeTrait>(bytes: &GenericBinaryArray<O>) -> ArrayRef {
    GenericStringArray::<O>::try_from_binary(bytes.clone())
        .map_or_else(|_| lengths(bytes.iter()), |text| Arc::new(text) as _)
}

fn lengths<'a>(items: impl Iterator<Item = Option<&'a [u8]>>) -> ArrayRef {
    Arc::new(items.map(|item| item.map(|bytes| bytes.len() as i64)).collect::<Int64Array>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::builder::{BinaryBuilder, ListBuilder};
    use arrow_array::{BinaryArray, BinaryViewArray, LargeBinaryArray, StringArray};
    use arrow_json::LineDelimitedWriter;

    fn lines(columns: Vec<(&str, ArrayRef)>) -> Vec<String> {
        let mut writer = LineDelimitedWriter::new(Vec::new());
        writer
            .write(&as_text(
                &RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true)))
                    .unwrap(),
            ))
            .unwrap();
        String::from_utf8(writer.into_inner()).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn bytes_are_text_where_they_are_utf8() {
        let mut list = ListBuilder::new(BinaryBuilder::new());
        list.append_value([Some(b"one".as_slice()), None]);
        list.append_null();
        let list: ArrayRef = Arc::new(list.finish());
        let inner: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"x", b"y"]));
        let nested = StructArray::try_from(vec![("inner", inner)]).unwrap();
        let found = lines(vec![
            ("plain", Arc::new(BinaryArray::from_opt_vec(vec![Some("\u{e9}\"".as_bytes()), None]))),
            ("large", Arc::new(LargeBinaryArray::from_vec(vec![b"c", b"d"]))),
            ("view", Arc::new(BinaryViewArray::from_iter_values([b"e", b"f"]))),
            ("list", list),
            ("nested", Arc::new(nested)),
            ("text", Arc::new(StringArray::from(vec!["g", "h"]))),
        ]);
        assert_eq!(
            found,
            [
                "{\"plain\":\"\u{e9}\\\"\",\"large\":\"c\",\"view\":\"e\",\"list\":[\"one\",null],\"nested\":{\"inner\":\"x\"},\"text\":\"g\"}",
                "{\"large\":\"d\",\"view\":\"f\",\"nested\":{\"inner\":\"y\"},\"text\":\"h\"}"
            ]
        );
    }

    #[test]
    fn other_bytes_are_only_counted() {
        let pixels: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"\xff\xd8\xff", b"text"]));
        assert_eq!(lines(vec![("image", pixels)]), ["{\"image\":3}", "{\"image\":4}"]);
    }
}
