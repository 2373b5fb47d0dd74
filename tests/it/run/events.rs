//! Event files, read back by a small reader of the test's own and, where Python has it, by the real TensorBoard.
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use tunesmith::telemetry::tensorboard::EventWriter;

/// What one event file says.
#[derive(Debug, Default)]
pub struct Events {
    pub scalars: BTreeMap<String, Vec<(u64, f32)>>,
    pub texts: BTreeMap<String, String>,
    pub histograms: BTreeMap<String, Vec<(u64, f64)>>,
    pub restarts: Vec<u64>,
}

/// Reads every event file of `directory`, in order of name. Panics where a frame's length or checksum is wrong.
pub fn read(directory: &Path) -> Events {
    let mut files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut events = Events::default();
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        let mut rest = bytes.as_slice();
        let mut frames = 0;
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(
                masked_crc(&rest[..8]),
                u32::from_le_bytes(rest[8..12].try_into().unwrap()),
                "{}",
                file.display()
            );
            let payload = &rest[12..12 + length];
            let crc = u32::from_le_bytes(rest[12 + length..16 + length].try_into().unwrap());
            assert_eq!(masked_crc(payload), crc, "{}", file.display());
            let event = fields(payload);
            if frames == 0 {
                assert_eq!(event[&3][0].bytes(), b"brain.Event:2");
            }
            take(&event, &mut events);
            rest = &rest[16 + length..];
            frames += 1;
        }
        assert!(frames > 0, "{} is empty", file.display());
    }
    events
}

fn take(event: &BTreeMap<u64, Vec<Field>>, events: &mut Events) {
    let step = event.get(&2).map_or(0, |step| step[0].number());
    if event.contains_key(&7) {
        events.restarts.push(step);
    }
    let Some(summary) = event.get(&5) else { return };
    for value in fields(summary[0].bytes()).get(&1).into_iter().flatten() {
        let value = fields(value.bytes());
        let tag = String::from_utf8(value[&1][0].bytes().to_vec()).unwrap();
        if let Some(scalar) = value.get(&2) {
            let scalar = f32::from_bits(scalar[0].number() as u32);
            events.scalars.entry(tag).or_default().push((step, scalar));
        } else if let Some(histogram) = value.get(&5) {
            let histogram = fields(histogram[0].bytes());
            let doubles = |field: u64| -> Vec<f64> {
                let packed = histogram[&field][0].bytes().chunks_exact(8);
                packed.map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap())).collect()
            };
            assert_eq!(doubles(6).len(), doubles(7).len(), "a count for each bucket");
            let count = f64::from_bits(histogram[&3][0].number());
            assert_eq!(doubles(7).iter().sum::<f64>(), count);
            events.histograms.entry(tag).or_default().push((step, count));
        } else {
            let plugin = fields(fields(value[&9][0].bytes())[&1][0].bytes())[&1][0].bytes().to_vec();
            assert_eq!(plugin, b"text");
            let text = fields(value[&8][0].bytes())[&8][0].bytes().to_vec();
            events.texts.insert(tag, String::from_utf8(text).unwrap());
        }
    }
}

#[derive(Debug)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

impl Field {
    fn number(&self) -> u64 {
        let Self::Number(value) = self else { panic!("{self:?} is not a number") };
        *value
    }

    fn bytes(&self) -> &[u8] {
        let Self::Bytes(bytes) = self else { panic!("{self:?} is not a message") };
        bytes
    }
}

/// The fields of a protobuf message by number.
fn fields(mut message: &[u8]) -> BTreeMap<u64, Vec<Field>> {
    fn varint(message: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = message[0];
            *message = &message[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }
    let mut out: BTreeMap<u64, Vec<Field>> = BTreeMap::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let fixed = |message: &mut &[u8], width: usize| {
            let mut bytes = [0; 8];
            bytes[..width].copy_from_slice(&message[..width]);
            *message = &message[width..];
            Field::Number(u64::from_le_bytes(bytes))
        };
        let field = match key & 7 {
            0 => Field::Number(varint(&mut message)),
            1 => fixed(&mut message, 8),
            5 => fixed(&mut message, 4),
            2 => {
                let length = varint(&mut message) as usize;
                let (bytes, rest) = message.split_at(length);
                message = rest;
                Field::Bytes(bytes.to_vec())
            }
            other => panic!("wire type {other}"),
        };
        out.entry(key >> 3).or_default().push(field);
    }
    out
}

/// CRC-32C bit by bit, unlike the table of the writer.
fn masked_crc(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    (!crc).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Runs `script` with `TUNESMITH_PYTHON` (default `python3`); nothing, with a line that says so, where it has no TensorBoard.
pub fn python(script: &str, argument: &Path) -> Option<String> {
    let python = std::env::var("TUNESMITH_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has = Command::new(&python).args(["-c", "import tensorboard"]).output();
    if !has.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: {python} has no tensorboard; set TUNESMITH_PYTHON to one that has");
        return None;
    }
    let output = Command::new(&python).args(["-c", script]).arg(argument).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

const ACCUMULATE: &str = r"
import sys, json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
acc = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0, 'tensors': 0, 'histograms': 0})
acc.Reload()
tags = acc.Tags()
scalars = {t: [[e.step, round(e.value, 6)] for e in acc.Scalars(t)] for t in tags['scalars']}
texts = {t: acc.Tensors(t)[-1].tensor_proto.string_val[0].decode() for t in tags['tensors']}
histograms = {t: [[e.step, e.histogram_value.num] for e in acc.Histograms(t)] for t in tags['histograms']}
print(json.dumps([scalars, texts, histograms]))
";

/// What the real TensorBoard reads: `[scalars, texts, histograms]`.
pub fn accumulate(directory: &Path) -> Option<serde_json::Value> {
    python(ACCUMULATE, directory).map(|text| serde_json::from_str(&text).unwrap())
}

#[test]
fn tensorboard_reads_scalars_text_and_histograms_and_forgets_steps_after_the_resumed_one() {
    let root = tempfile::tempdir().unwrap();
    let mut first = EventWriter::create(root.path(), 0).unwrap();
    first.text(0, "config", "| key | value |\n|---|---|\n| `train.seed` | 42 |").unwrap();
    for step in 1..=4 {
        first.scalars(step, &[("train/loss", 4.0 / step as f64), ("train/epoch", 0.25 * step as f64)]).unwrap();
    }
    first.histogram(4, "weight_norm/lora_A", &[0.5, 1.0, 1.5, f64::NAN]).unwrap();
    let mut second = EventWriter::create(root.path(), 2).unwrap();
    second.scalars(3, &[("train/loss", 0.125)]).unwrap();

    let events = read(root.path());
    assert_eq!(events.scalars["train/loss"], [(1, 4.0), (2, 2.0), (3, 4.0 / 3.0), (4, 1.0), (3, 0.125)]);
    assert_eq!(events.histograms["weight_norm/lora_A"], [(4, 3.0)]);
    assert!(events.texts["config/text_summary"].contains("train.seed"));
    assert_eq!(events.restarts, [1, 3]);

    if let Some(seen) = accumulate(root.path()) {
        assert_eq!(seen[0]["train/loss"], serde_json::json!([[1, 4.0], [2, 2.0], [3, 0.125]]));
        assert_eq!(seen[1]["config/text_summary"], events.texts["config/text_summary"].as_str());
        assert_eq!(seen[2]["weight_norm/lora_A"], serde_json::json!([]), "step 4 is forgotten");
    }
}
