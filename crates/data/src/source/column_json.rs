//! Columns of a record batch as JSON. A null counts as an absent field; in a list it stays.
//!
//! Bytes in UTF-8 become text, because some Parquet writers (older Spark, Impala) do not mark text columns. An image's become
//! a `data:` URI; of other bytes only the length is passed on ([`OTHER_BYTES`]). Decimals become numbers. Dates, times, durations and intervals
//! become text, in the forms of arrow-json.
use std::fmt::{Debug, Display};

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowTemporalType, ArrowTimestampType, Date32Type, Date64Type, Decimal32Type, Decimal64Type, Decimal128Type,
    Decimal256Type, DecimalType, DurationMicrosecondType, DurationMillisecondType, DurationNanosecondType,
    DurationSecondType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    IntervalDayTimeType, IntervalMonthDayNanoType, IntervalYearMonthType, Time32MillisecondType, Time32SecondType,
    Time64MicrosecondType, Time64NanosecondType, TimestampMicrosecondType, TimestampMillisecondType,
    TimestampNanosecondType, TimestampSecondType, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{
    Array, ArrayRef, ArrowPrimitiveType, GenericBinaryArray, GenericStringArray, ListLikeArray, MapArray,
    OffsetSizeTrait, PrimitiveArray, downcast_run_array,
};
use arrow_schema::{DataType, Fields, IntervalUnit, TimeUnit};
use serde::Serialize;

use crate::json_type::OTHER_BYTES;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tunesmith_base::error::{Error, Result};
use tunesmith_vision::is_picture;

/// Appends the value at an index to a line. Returns false, and appends nothing, if the value is null.
pub(super) type Encode<'a> = Box<dyn Fn(usize, &mut Vec<u8>) -> bool + 'a>;

/// Encodes rows of `columns` as objects.
///
/// # Errors
/// A column has a type without a JSON form: a union, or a map whose keys are not text.
pub(super) fn object<'a>(fields: &Fields, columns: &'a [ArrayRef]) -> Result<Encode<'a>> {
    let mut members = Vec::with_capacity(columns.len());
    for (field, array) in fields.iter().zip(columns) {
        let mut name = Vec::new();
        json(field.name(), &mut name);
        members.push((name, column(array)?));
    }
    Ok(Box::new(move |at, out| {
        out.push(b'{');
        for (name, value) in &members {
            member(out, |out| out.extend_from_slice(name), |out| value(at, out));
        }
        out.push(b'}');
        true
    }))
}

/// Appends a member of an object, unless its value is null.
fn member(out: &mut Vec<u8>, name: impl Fn(&mut Vec<u8>), value: impl Fn(&mut Vec<u8>) -> bool) {
    let before = out.len();
    // Only the first member follows a brace: no value ends with one that opens.
    if out.last() != Some(&b'{') {
        out.push(b',');
    }
    name(out);
    out.push(b':');
    if !value(out) {
        out.truncate(before);
    }
}

fn column(array: &dyn Array) -> Result<Encode<'_>> {
    let of_type = array.data_type();
    Ok(match of_type {
        DataType::Null => Box::new(|_, _| false),
        DataType::Boolean => present(array.as_boolean(), |array, at, out| json(&array.value(at), out)),
        DataType::Int8 => number::<Int8Type>(array),
        DataType::Int16 => number::<Int16Type>(array),
        DataType::Int32 => number::<Int32Type>(array),
        DataType::Int64 => number::<Int64Type>(array),
        DataType::UInt8 => number::<UInt8Type>(array),
        DataType::UInt16 => number::<UInt16Type>(array),
        DataType::UInt32 => number::<UInt32Type>(array),
        DataType::UInt64 => number::<UInt64Type>(array),
        DataType::Float16 => {
            present(array.as_primitive::<Float16Type>(), |array, at, out| json(&array.value(at).to_f32(), out))
        }
        DataType::Float32 => number::<Float32Type>(array),
        DataType::Float64 => number::<Float64Type>(array),
        DataType::Decimal32(..) => decimal::<Decimal32Type>(array),
        DataType::Decimal64(..) => decimal::<Decimal64Type>(array),
        DataType::Decimal128(..) => decimal::<Decimal128Type>(array),
        DataType::Decimal256(..) => decimal::<Decimal256Type>(array),
        DataType::Binary => text(array).unwrap_or_else(|| bytes(array.as_binary::<i32>())),
        DataType::LargeBinary => text(array).unwrap_or_else(|| bytes(array.as_binary::<i64>())),
        DataType::BinaryView => text(array).unwrap_or_else(|| {
            present(array.as_binary_view(), |array, at, out| picture_or_other(array.value(at), out))
        }),
        DataType::FixedSizeBinary(_) => text(array).unwrap_or_else(|| {
            present(array.as_fixed_size_binary(), |array, at, out| picture_or_other(array.value(at), out))
        }),
        DataType::Timestamp(TimeUnit::Second, zone) => timestamp::<TimestampSecondType>(array, zone.as_deref()),
        DataType::Timestamp(TimeUnit::Millisecond, zone) => {
            timestamp::<TimestampMillisecondType>(array, zone.as_deref())
        }
        DataType::Timestamp(TimeUnit::Microsecond, zone) => {
            timestamp::<TimestampMicrosecondType>(array, zone.as_deref())
        }
        DataType::Timestamp(TimeUnit::Nanosecond, zone) => timestamp::<TimestampNanosecondType>(array, zone.as_deref()),
        DataType::Date32 => temporal::<Date32Type, _>(array, PrimitiveArray::value_as_date),
        DataType::Date64 => temporal::<Date64Type, _>(array, PrimitiveArray::value_as_datetime),
        DataType::Time32(TimeUnit::Second) => temporal::<Time32SecondType, _>(array, PrimitiveArray::value_as_time),
        DataType::Time32(_) => temporal::<Time32MillisecondType, _>(array, PrimitiveArray::value_as_time),
        DataType::Time64(TimeUnit::Microsecond) => {
            temporal::<Time64MicrosecondType, _>(array, PrimitiveArray::value_as_time)
        }
        DataType::Time64(_) => temporal::<Time64NanosecondType, _>(array, PrimitiveArray::value_as_time),
        DataType::Duration(TimeUnit::Second) => duration::<DurationSecondType>(array),
        DataType::Duration(TimeUnit::Millisecond) => duration::<DurationMillisecondType>(array),
        DataType::Duration(TimeUnit::Microsecond) => duration::<DurationMicrosecondType>(array),
        DataType::Duration(TimeUnit::Nanosecond) => duration::<DurationNanosecondType>(array),
        DataType::Interval(IntervalUnit::YearMonth) => {
            present(array.as_primitive::<IntervalYearMonthType>(), |array, at, out| {
                let months = array.value(at);
                json(&format!("{} years {} mons", months.div_euclid(12), months.rem_euclid(12)), out);
            })
        }
        DataType::Interval(IntervalUnit::DayTime) => {
            present(array.as_primitive::<IntervalDayTimeType>(), |array, at, out| {
                let value = array.value(at);
                json(&interval([(0, "mons"), (value.days, "days")], i64::from(value.milliseconds), 3), out);
            })
        }
        DataType::Interval(IntervalUnit::MonthDayNano) => {
            present(array.as_primitive::<IntervalMonthDayNanoType>(), |array, at, out| {
                let value = array.value(at);
                json(&interval([(value.months, "mons"), (value.days, "days")], value.nanoseconds, 9), out);
            })
        }
        DataType::List(_) => list(array.as_list::<i32>())?,
        DataType::LargeList(_) => list(array.as_list::<i64>())?,
        DataType::ListView(_) => list(array.as_list_view::<i32>())?,
        DataType::LargeListView(_) => list(array.as_list_view::<i64>())?,
        DataType::FixedSizeList(..) => list(array.as_fixed_size_list())?,
        DataType::Struct(fields) => {
            let array = array.as_struct();
            let value = object(fields, array.columns())?;
            Box::new(move |at, out| array.is_valid(at) && value(at, out))
        }
        DataType::Map(..) => map(array.as_map())?,
        DataType::Dictionary(..) => {
            let array = array.as_any_dictionary();
            let value = column(array.values())?;
            let keys = if array.values().is_empty() { Vec::new() } else { array.normalized_keys() };
            Box::new(move |at, out| array.is_valid(at) && value(keys[at], out))
        }
        DataType::RunEndEncoded(..) => downcast_run_array!(
            array => {
                let value = column(array.values())?;
                Box::new(move |at, out| value(array.get_physical_index(at), out))
            },
            _ => unreachable!("an array with ends of runs")
        ),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Union(..) => {
            return text(array).ok_or_else(|| unsupported(of_type));
        }
    })
}

fn unsupported(of_type: &DataType) -> Error {
    Error::data(format!("a column of type {of_type} cannot be read"))
        .hint("convert it to text, numbers, lists or structs")
}

/// Encodes the values of an array, of which some may be null.
fn present<'a, A: Array + 'a>(array: A, value: impl Fn(&A, usize, &mut Vec<u8>) + 'a) -> Encode<'a> {
    Box::new(move |at, out| {
        let valid = array.is_valid(at);
        if valid {
            value(&array, at, out);
        }
        valid
    })
}

/// Appends a text or a number. What JSON cannot write, such as NaN, becomes null.
fn json<T: Serialize + ?Sized>(value: &T, out: &mut Vec<u8>) {
    serde_json::to_writer(out, value).expect("text and numbers have a JSON form");
}

/// Encodes text, and bytes if all of the array are UTF-8.
fn text(array: &dyn Array) -> Option<Encode<'_>> {
    fn strings<'a, O: OffsetSizeTrait>(array: GenericStringArray<O>) -> Encode<'a> {
        present(array, |array, at, out| json(array.value(at), out))
    }
    Some(match array.data_type() {
        DataType::Utf8 => strings(array.as_string::<i32>().clone()),
        DataType::LargeUtf8 => strings(array.as_string::<i64>().clone()),
        DataType::Utf8View => present(array.as_string_view(), |array, at, out| json(array.value(at), out)),
        DataType::Binary => strings(GenericStringArray::<i32>::try_from_binary(array.as_binary().clone()).ok()?),
        DataType::LargeBinary => strings(GenericStringArray::<i64>::try_from_binary(array.as_binary().clone()).ok()?),
        DataType::BinaryView => present(array.as_binary_view().clone().to_string_view().ok()?, |array, at, out| {
            json(array.value(at), out);
        }),
        DataType::FixedSizeBinary(_) => {
            let array = array.as_fixed_size_binary();
            let is_text = |at| array.is_null(at) || std::str::from_utf8(array.value(at)).is_ok();
            if !(0..array.len()).all(is_text) {
                return None;
            }
            present(array, |array, at, out| json(&String::from_utf8_lossy(array.value(at)), out))
        }
        _ => return None,
    })
}

fn bytes<O: OffsetSizeTrait>(array: &GenericBinaryArray<O>) -> Encode<'_> {
    present(array, |array, at, out| picture_or_other(array.value(at), out))
}

fn picture_or_other(bytes: &[u8], out: &mut Vec<u8>) {
    if is_picture(bytes) {
        json(&format!("data:;base64,{}", STANDARD.encode(bytes)), out);
    } else {
        json(&serde_json::json!({ OTHER_BYTES: bytes.len() }), out);
    }
}

fn number<T: ArrowPrimitiveType<Native: Serialize>>(array: &dyn Array) -> Encode<'_> {
    present(array.as_primitive::<T>(), |array, at, out| json(&array.value(at), out))
}

fn decimal<T: DecimalType + ArrowPrimitiveType>(array: &dyn Array) -> Encode<'_> {
    present(array.as_primitive::<T>(), |array, at, out| out.extend_from_slice(array.value_as_string(at).as_bytes()))
}

/// Encodes what `convert` makes of a value, in its `Debug` form, which is ISO 8601.
fn temporal<'a, T, V: Debug + 'a>(
    array: &'a dyn Array,
    convert: fn(&PrimitiveArray<T>, usize) -> Option<V>,
) -> Encode<'a>
where
    T: ArrowTemporalType<Native: Display>,
    i64: From<T::Native>,
{
    present(array.as_primitive::<T>(), move |array, at, out| {
        let value = convert(array, at).map(|value| format!("{value:?}"));
        json(&value.unwrap_or_else(|| beyond("temporal", array.value(at), array.data_type())), out);
    })
}

/// Encodes points in time with the offset of `zone`. Zones with a name have no offset here: they are shown in UTC, and
/// so are those without a sense.
fn timestamp<'a, T: ArrowTimestampType>(array: &'a dyn Array, zone: Option<&str>) -> Encode<'a>
where
    i64: From<T::Native>,
{
    let zone = zone.map(|zone| zone.parse().or_else(|_| "+00:00".parse()).expect("an offset of zero"));
    present(array.as_primitive::<T>(), move |array, at, out| {
        let value = match zone {
            None => array.value_as_datetime(at).map(|value| format!("{value:?}")),
            Some(zone) => array.value_as_datetime_with_tz(at, zone).map(|value| {
                let text = value.to_rfc3339();
                text.strip_suffix("+00:00").map(|local| format!("{local}Z")).unwrap_or(text)
            }),
        };
        json(&value.unwrap_or_else(|| beyond("datetime", array.value(at), array.data_type())), out);
    })
}

/// What arrow-json writes for a value outside of the calendar.
fn beyond(what: &str, value: impl Display, of_type: &DataType) -> String {
    format!("ERROR: Cast error: Failed to convert {value} to {what} for {of_type}")
}

fn duration<T: ArrowTemporalType>(array: &dyn Array) -> Encode<'_>
where
    i64: From<T::Native>,
{
    present(array.as_primitive::<T>(), |array, at, out| {
        json(&array.value_as_duration(at).map_or_else(|| "<invalid>".to_owned(), |value| value.to_string()), out);
    })
}

/// An interval as text, such as `2 mons 1 days 3 hours 0.500 secs`. `fraction` is in units of `10^-digits` seconds.
fn interval(parts: [(i32, &str); 2], fraction: i64, digits: usize) -> String {
    let second = 10_i64.pow(digits as u32);
    let (seconds, rest) = (fraction / second, fraction % second);
    let clock = [(seconds / 3600, "hours"), (seconds / 60 % 60, "mins")];
    let parts = parts.map(|(value, unit)| (i64::from(value), unit)).into_iter().chain(clock);
    let mut words: Vec<String> =
        parts.filter(|(value, _)| *value != 0).map(|(value, unit)| format!("{value} {unit}")).collect();
    let seconds = seconds % 60;
    if seconds != 0 || rest != 0 {
        let sign = if seconds < 0 || rest < 0 { "-" } else { "" };
        words.push(format!("{sign}{}.{:0digits$} secs", seconds.abs(), rest.abs()));
    }
    if words.is_empty() { "0 secs".to_owned() } else { words.join(" ") }
}

fn list<L: ListLikeArray>(array: &L) -> Result<Encode<'_>> {
    let item = column(array.values())?;
    Ok(present(array, move |array, at, out| {
        out.push(b'[');
        for (index, at) in array.element_range(at).enumerate() {
            if index > 0 {
                out.push(b',');
            }
            if !item(at, out) {
                out.extend_from_slice(b"null");
            }
        }
        out.push(b']');
    }))
}

fn map(array: &MapArray) -> Result<Encode<'_>> {
    let key = text(array.keys()).filter(|_| array.keys().null_count() == 0 && array.entries().null_count() == 0);
    let (key, value) = (key.ok_or_else(|| unsupported(array.data_type()))?, column(array.values())?);
    Ok(present(array, move |array, at, out| {
        out.push(b'{');
        for entry in array.value_offsets()[at] as usize..array.value_offsets()[at + 1] as usize {
            member(out, |out| _ = key(entry, out), |out| value(entry, out));
        }
        out.push(b'}');
    }))
}

#[cfg(test)]
mod tests;
