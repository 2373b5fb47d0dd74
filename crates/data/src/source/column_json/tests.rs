//! Unit tests of columns as JSON, against what arrow-json writes.
use std::sync::Arc;

use super::*;
use arrow_array::builder::*;
use arrow_array::types::{ArrowDictionaryKeyType, IntervalDayTime, IntervalMonthDayNano};
use arrow_array::*;
use arrow_buffer::OffsetBuffer;
use arrow_schema::Field;

fn lines(columns: Vec<(&str, ArrayRef)>) -> Vec<String> {
    let columns = columns.into_iter().map(|(name, array)| (name, array, true));
    let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
    let encode = object(batch.schema_ref().fields(), batch.columns()).unwrap();
    let line = |row| {
        let mut line = Vec::new();
        assert!(encode(row, &mut line));
        String::from_utf8(line).unwrap()
    };
    (0..batch.num_rows()).map(line).collect()
}

fn dictionary<K: ArrowDictionaryKeyType>(keys: PrimitiveArray<K>) -> ArrayRef {
    Arc::new(DictionaryArray::try_new(keys, Arc::new(StringArray::from(vec!["red", "green"]))).unwrap())
}

/// An array of each type that data sets have, most with a null.
fn every_type() -> Vec<ArrayRef> {
    let ints = || [Some(vec![Some(1), None, Some(-3)]), None, Some(vec![])];
    let item = || Arc::new(Field::new("item", DataType::Int32, true));
    let mut map = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
    map.keys().append_value("a\"b");
    map.values().append_value(1);
    map.keys().append_value("gone");
    map.values().append_null();
    map.keys().append_value("c");
    map.values().append_value(2);
    map.append(true).unwrap();
    map.append(false).unwrap();
    map.append(true).unwrap();
    let structure = StructArray::try_new(
        vec![Field::new("n", DataType::Int32, true), Field::new("t", DataType::Utf8, true)].into(),
        vec![
            Arc::new(Int32Array::from(vec![Some(1), Some(2), None])),
            Arc::new(StringArray::from(vec![None, Some("x"), None])),
        ],
        Some(vec![true, false, true].into()),
    );
    let structure: ArrayRef = Arc::new(structure.unwrap());
    let nested = ListArray::new(
        Arc::new(Field::new("item", structure.data_type().clone(), true)),
        OffsetBuffer::from_lengths([2, 0, 1]),
        structure.clone(),
        None,
    );
    vec![
        Arc::new(NullArray::new(2)),
        Arc::new(BooleanArray::from(vec![Some(true), None, Some(false)])),
        Arc::new(Int8Array::from(vec![Some(i8::MIN), None, Some(i8::MAX)])),
        Arc::new(Int16Array::from(vec![Some(i16::MIN), None, Some(i16::MAX)])),
        Arc::new(Int32Array::from(vec![Some(i32::MIN), None, Some(i32::MAX)])),
        Arc::new(Int64Array::from(vec![Some(i64::MIN), None, Some(i64::MAX)])),
        Arc::new(UInt8Array::from(vec![Some(0), None, Some(u8::MAX)])),
        Arc::new(UInt16Array::from(vec![Some(0), None, Some(u16::MAX)])),
        Arc::new(UInt32Array::from(vec![Some(0), None, Some(u32::MAX)])),
        Arc::new(UInt64Array::from(vec![Some(0), None, Some(u64::MAX)])),
        Arc::new(Float16Array::from_iter(
            [0.1, -0.0, 65504.0, f32::NAN]
                .map(|value| Some(<Float16Type as ArrowPrimitiveType>::Native::from_f32(value))),
        )),
        Arc::new(Float32Array::from(vec![
            Some(0.1),
            None,
            Some(-0.0),
            Some(1e-7),
            Some(16_777_216.0),
            Some(f32::MAX),
            Some(f32::NAN),
        ])),
        Arc::new(Float64Array::from(vec![
            Some(0.1),
            None,
            Some(-0.0),
            Some(1e-7),
            Some(1e15),
            Some(1.5e300),
            Some(5e-324),
            Some(f64::INFINITY),
        ])),
        Arc::new(Decimal32Array::from(vec![Some(12345), None, Some(-5)]).with_precision_and_scale(9, 2).unwrap()),
        Arc::new(Decimal64Array::from(vec![Some(12345), None, Some(-5)]).with_precision_and_scale(18, 0).unwrap()),
        Arc::new(Decimal128Array::from(vec![Some(12345), None, Some(0)]).with_precision_and_scale(38, -2).unwrap()),
        Arc::new(
            Decimal256Array::from(vec![Some(12345.into()), None, Some((-5).into())])
                .with_precision_and_scale(76, 10)
                .unwrap(),
        ),
        Arc::new(StringArray::from(vec![Some("é\"\\\n\u{1}\u{2028}😀"), None, Some("")])),
        Arc::new(LargeStringArray::from(vec![Some("a"), None, Some("b")])),
        Arc::new(StringViewArray::from(vec![Some("short"), None, Some("longer than twelve bytes")])),
        Arc::new(BinaryArray::from_opt_vec(vec![Some(b"a"), None, Some(b"")])),
        Arc::new(LargeBinaryArray::from_opt_vec(vec![
            Some(b"\xff"),
            None,
            Some(b"\xff\xd8"),
            Some(b"\xff\xd8\xff\xe0"),
        ])),
        Arc::new(BinaryViewArray::from_iter([Some(b"\xff".as_slice()), None, Some(b"\xff\xd8")])),
        Arc::new(
            FixedSizeBinaryArray::try_from_sparse_iter_with_size(
                [Some(*b"\xff\0ab"), None, Some(*b"\xff\xd8\xff\xe0")].into_iter(),
                4,
            )
            .unwrap(),
        ),
        Arc::new(TimestampSecondArray::from(vec![Some(1_600_000_000), None, Some(-1), Some(i64::MAX)])),
        Arc::new(TimestampMillisecondArray::from(vec![Some(1_600_000_000_001), None, Some(0)])),
        Arc::new(TimestampMicrosecondArray::from(vec![Some(1_600_000_000_000_001), None, Some(-1)])),
        Arc::new(TimestampNanosecondArray::from(vec![Some(1_600_000_000_000_000_001), None, Some(-1)])),
        Arc::new(TimestampSecondArray::from(vec![Some(1_600_000_000), None]).with_timezone("+02:00")),
        Arc::new(TimestampMillisecondArray::from(vec![Some(1_600_000_000_001), None]).with_timezone("-0930")),
        Arc::new(TimestampMicrosecondArray::from(vec![Some(1_600_000_000_000_001), None]).with_timezone("+00")),
        Arc::new(Date32Array::from(vec![Some(18_000), None, Some(-800_000), Some(i32::MAX)])),
        Arc::new(Date64Array::from(vec![Some(1_600_000_000_001), None, Some(0), Some(i64::MAX)])),
        Arc::new(Time32SecondArray::from(vec![Some(86_399), None, Some(86_400)])),
        Arc::new(Time32MillisecondArray::from(vec![Some(86_399_001), None, Some(-1)])),
        Arc::new(Time64MicrosecondArray::from(vec![Some(1), None])),
        Arc::new(Time64NanosecondArray::from(vec![Some(1), None])),
        Arc::new(DurationSecondArray::from(vec![Some(90_061), None, Some(-1), Some(i64::MAX)])),
        Arc::new(DurationMillisecondArray::from(vec![Some(90_061_001), None, Some(i64::MIN)])),
        Arc::new(DurationMicrosecondArray::from(vec![Some(1), None, Some(i64::MIN)])),
        Arc::new(DurationNanosecondArray::from(vec![Some(1), None, Some(0)])),
        Arc::new(IntervalYearMonthArray::from(vec![Some(14), None, Some(-1), Some(0), Some(-12)])),
        Arc::new(IntervalDayTimeArray::from(vec![
            Some(IntervalDayTime::new(1, 3_723_004)),
            None,
            Some(IntervalDayTime::new(0, 0)),
            Some(IntervalDayTime::new(-1, -500)),
            Some(IntervalDayTime::new(0, -3_600_000)),
        ])),
        Arc::new(IntervalMonthDayNanoArray::from(vec![
            Some(IntervalMonthDayNano::new(2, 1, 3_723_000_000_004)),
            None,
            Some(IntervalMonthDayNano::new(0, 0, 0)),
            Some(IntervalMonthDayNano::new(-2, 0, -61_000_000_001)),
        ])),
        Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(ints())),
        Arc::new(LargeListArray::from_iter_primitive::<Int32Type, _, _>(ints())),
        Arc::new(ListViewArray::new(
            item(),
            vec![2, 0, 0].into(),
            vec![2, 0, 3].into(),
            Arc::new(Int32Array::from(vec![1, 2, 3, 4])),
            Some(vec![true, false, true].into()),
        )),
        Arc::new(LargeListViewArray::new(
            item(),
            vec![2, 0].into(),
            vec![2, 0].into(),
            Arc::new(Int32Array::from(vec![1, 2, 3, 4])),
            None,
        )),
        Arc::new(FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(
            [Some([Some(1), None]), None, Some([Some(2), Some(3)])].map(|item| item.map(Vec::from)),
            2,
        )),
        structure.clone(),
        Arc::new(nested),
        Arc::new(map.finish()),
        dictionary(Int8Array::from(vec![Some(1), None, Some(0)])),
        dictionary(Int16Array::from(vec![Some(1), None, Some(0)])),
        dictionary(Int32Array::from(vec![Some(1), None, Some(0)])),
        dictionary(Int64Array::from(vec![Some(1), None, Some(0)])),
        dictionary(UInt8Array::from(vec![Some(1), None, Some(0)])),
        dictionary(UInt16Array::from(vec![Some(1), None, Some(0)])),
        dictionary(UInt32Array::from(vec![Some(1), None, Some(0)])),
        dictionary(UInt64Array::from(vec![Some(1), None, Some(0)])),
        Arc::new(RunArray::try_new(&Int16Array::from(vec![2, 3]), &StringArray::from(vec![Some("a"), None])).unwrap()),
        Arc::new(RunArray::try_new(&Int32Array::from(vec![2, 3]), &StringArray::from(vec![Some("a"), None])).unwrap()),
        Arc::new(RunArray::try_new(&Int64Array::from(vec![2, 3]), &StringArray::from(vec![Some("a"), None])).unwrap()),
    ]
}

/// The values of [`every_type`] in a column `x`. arrow-json 60.1 wrote the same rows (compared in November 2026, whole
/// and sliced, floats after parsing), when `LineDelimitedWriter` was still used here; but for bytes, which it wrote as digits.
const WRITTEN: &str = r#"Null: absent | absent
Boolean: true | absent | false
Int8: -128 | absent | 127
Int16: -32768 | absent | 32767
Int32: -2147483648 | absent | 2147483647
Int64: -9223372036854775808 | absent | 9223372036854775807
UInt8: 0 | absent | 255
UInt16: 0 | absent | 65535
UInt32: 0 | absent | 4294967295
UInt64: 0 | absent | 18446744073709551615
Float16: 0.099975586 | -0.0 | 65504.0 | null
Float32: 0.1 | absent | -0.0 | 1e-7 | 16777216.0 | 3.4028235e+38 | null
Float64: 0.1 | absent | -0.0 | 1e-7 | 1000000000000000.0 | 1.5e+300 | 5e-324 | null
Decimal32(9, 2): 123.45 | absent | -0.05
Decimal64(18, 0): 12345 | absent | -5
Decimal128(38, -2): 1234500 | absent | 0
Decimal256(76, 10): 0.0000012345 | absent | -0.0000000005
Utf8: "é\"\\\n\u0001 😀" | absent | ""
LargeUtf8: "a" | absent | "b"
Utf8View: "short" | absent | "longer than twelve bytes"
Binary: "a" | absent | ""
LargeBinary: {"other bytes":1} | absent | {"other bytes":2} | "data:;base64,/9j/4A=="
BinaryView: {"other bytes":1} | absent | {"other bytes":2}
FixedSizeBinary(4): {"other bytes":4} | absent | "data:;base64,/9j/4A=="
Timestamp(s): "2020-09-13T12:26:40" | absent | "1969-12-31T23:59:59" | "ERROR: Cast error: Failed to convert 9223372036854775807 to datetime for Timestamp(s)"
Timestamp(ms): "2020-09-13T12:26:40.001" | absent | "1970-01-01T00:00:00"
Timestamp(µs): "2020-09-13T12:26:40.000001" | absent | "1969-12-31T23:59:59.999999"
Timestamp(ns): "2020-09-13T12:26:40.000000001" | absent | "1969-12-31T23:59:59.999999999"
Timestamp(s, "+02:00"): "2020-09-13T14:26:40+02:00" | absent
Timestamp(ms, "-0930"): "2020-09-13T02:56:40.001-09:30" | absent
Timestamp(µs, "+00"): "2020-09-13T12:26:40.000001Z" | absent
Date32: "2019-04-14" | absent | "-0221-09-04" | "ERROR: Cast error: Failed to convert 2147483647 to temporal for Date32"
Date64: "2020-09-13T12:26:40.001" | absent | "1970-01-01T00:00:00" | "ERROR: Cast error: Failed to convert 9223372036854775807 to temporal for Date64"
Time32(s): "23:59:59" | absent | "ERROR: Cast error: Failed to convert 86400 to temporal for Time32(s)"
Time32(ms): "23:59:59.001" | absent | "ERROR: Cast error: Failed to convert -1 to temporal for Time32(ms)"
Time64(µs): "00:00:00.000001" | absent
Time64(ns): "00:00:00.000000001" | absent
Duration(s): "PT90061S" | absent | "-PT1S" | "<invalid>"
Duration(ms): "PT90061.001S" | absent | "<invalid>"
Duration(µs): "PT0.000001S" | absent | "-PT9223372036854.775808S"
Duration(ns): "PT0.000000001S" | absent | "P0D"
Interval(YearMonth): "1 years 2 mons" | absent | "-1 years 11 mons" | "0 years 0 mons" | "-1 years 0 mons"
Interval(DayTime): "1 days 1 hours 2 mins 3.004 secs" | absent | "0 secs" | "-1 days -0.500 secs" | "-1 hours"
Interval(MonthDayNano): "2 mons 1 days 1 hours 2 mins 3.000000004 secs" | absent | "0 secs" | "-2 mons -1 mins -1.000000001 secs"
List(Int32): [1,null,-3] | absent | []
LargeList(Int32): [1,null,-3] | absent | []
ListView(Int32): [3,4] | absent | [1,2,3]
LargeListView(Int32): [3,4] | []
FixedSizeList(2 x Int32): [1,null] | absent | [2,3]
Struct("n": Int32, "t": Utf8): {"n":1} | absent | {}
List(Struct("n": Int32, "t": Utf8)): [{"n":1},null] | [] | [{}]
Map("entries": non-null Struct("key": non-null Utf8, "value": Int32), unsorted): {"a\"b":1,"c":2} | absent | {}
Dictionary(Int8, Utf8): "green" | absent | "red"
Dictionary(Int16, Utf8): "green" | absent | "red"
Dictionary(Int32, Utf8): "green" | absent | "red"
Dictionary(Int64, Utf8): "green" | absent | "red"
Dictionary(UInt8, Utf8): "green" | absent | "red"
Dictionary(UInt16, Utf8): "green" | absent | "red"
Dictionary(UInt32, Utf8): "green" | absent | "red"
Dictionary(UInt64, Utf8): "green" | absent | "red"
RunEndEncoded(non-null Int16, Utf8): "a" | "a" | absent
RunEndEncoded(non-null Int32, Utf8): "a" | "a" | absent
RunEndEncoded(non-null Int64, Utf8): "a" | "a" | absent"#;

#[test]
fn every_type_is_written_as_arrow_json_writes_it() {
    let written: Vec<String> = every_type()
        .into_iter()
        .map(|array| {
            let rows = lines(vec![("x", array.clone())]);
            let [first, rest] =
                [array.slice(0, 1), array.slice(1, array.len() - 1)].map(|part| lines(vec![("x", part)]));
            assert_eq!(rows, [first, rest].concat(), "slices of {}", array.data_type());
            let values = rows.iter().map(|row| match row.as_str() {
                "{}" => "absent",
                row => row.strip_prefix("{\"x\":").and_then(|row| row.strip_suffix('}')).unwrap(),
            });
            format!("{}: {}", array.data_type(), values.collect::<Vec<_>>().join(" | "))
        })
        .collect();
    assert_eq!(written, WRITTEN.lines().collect::<Vec<_>>());
}

#[test]
fn bytes_are_text_where_they_are_utf8() {
    let mut list = ListBuilder::new(BinaryBuilder::new());
    list.append_value([Some(b"one".as_slice()), None]);
    list.append_null();
    let inner: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"x", b"y"]));
    let keys = Int8Array::from(vec![1, 0]);
    let found = lines(vec![
        ("plain", Arc::new(BinaryArray::from_opt_vec(vec![Some("\u{e9}\"".as_bytes()), None]))),
        ("view", Arc::new(BinaryViewArray::from_iter_values([b"e", b"f"]))),
        (
            "fixed",
            Arc::new(
                FixedSizeBinaryArray::try_from_sparse_iter_with_size([None, Some("\u{e9}")].into_iter(), 2).unwrap(),
            ),
        ),
        ("list", Arc::new(list.finish())),
        ("nested", Arc::new(StructArray::try_from(vec![("inner", inner.clone())]).unwrap())),
        ("keyed", Arc::new(DictionaryArray::try_new(keys, inner).unwrap())),
        ("text", Arc::new(StringArray::from(vec!["g", "h"]))),
    ]);
    assert_eq!(
        found,
        [
            "{\"plain\":\"\u{e9}\\\"\",\"view\":\"e\",\"list\":[\"one\",null],\"nested\":{\"inner\":\"x\"},\"keyed\":\"y\",\"text\":\"g\"}",
            "{\"view\":\"f\",\"fixed\":\"\u{e9}\",\"nested\":{\"inner\":\"y\"},\"keyed\":\"x\",\"text\":\"h\"}"
        ]
    );
}

#[test]
fn other_bytes_are_only_counted() {
    let pixels: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"\xff\xd8\xfe", b"text"]));
    assert_eq!(lines(vec![("image", pixels)]), ["{\"image\":{\"other bytes\":3}}", "{\"image\":{\"other bytes\":4}}"]);
}

#[test]
fn zones_with_a_name_are_shown_in_utc() {
    let zoned =
        |zone: &str| -> ArrayRef { Arc::new(TimestampSecondArray::from(vec![1_600_000_000]).with_timezone(zone)) };
    for zone in ["UTC", "Europe/Berlin", "Z"] {
        assert_eq!(lines(vec![("x", zoned(zone))]), ["{\"x\":\"2020-09-13T12:26:40Z\"}"], "{zone}");
    }
}

#[test]
fn maps_without_keys_of_text_are_refused() {
    let mut map = MapBuilder::new(None, Int32Builder::new(), Int32Builder::new());
    map.append(true).unwrap();
    let error = column(&map.finish()).err().unwrap();
    assert!(error.to_string().contains("a column of type Map("), "{error}");
}
