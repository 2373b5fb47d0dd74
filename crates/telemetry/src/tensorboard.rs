//! Event files that TensorBoard reads: scalars, text and histograms. The format is small: a `TFRecord` frame (length,
//! masked CRC-32C, payload, masked CRC-32C) around a protobuf `Event`. Both are written by hand, so that a full disk is
//! an ordinary error, and no protobuf library is needed.
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// Appends events to one file below the log directory.
#[derive(Debug)]
pub struct EventWriter {
    file: File,
    path: PathBuf,
}

/// `SessionLog.START`: a run starts or continues.
const START: u64 = 1;

/// The number of writers that this process has opened. It is part of the file name, so that two in one second differ.
static OPENED: AtomicU32 = AtomicU32::new(0);

impl EventWriter {
    /// Opens a new file `events.out.tfevents.SECONDS.HOST.PID.N` in `directory`. `after` is the step from which the run
    /// continues, 0 for a new run. TensorBoard then discards later steps of earlier files.
    ///
    /// # Errors
    /// The directory or the file cannot be created or written.
    pub fn create(directory: &Path, after: u64) -> Result<Self> {
        std::fs::create_dir_all(directory).map_err(|source| Error::io("create", directory, &source))?;
        let host = files::system("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.trim().is_empty() { "localhost" } else { host.trim() };
        let number = OPENED.fetch_add(1, Ordering::Relaxed);
        let name = format!("events.out.tfevents.{:010}.{host}.{}.{number}", wall_time() as u64, std::process::id());
        let path = directory.join(name);
        let file = files::open_to_write(&path, true).map_err(|source| Error::io("create", &path, &source))?;
        let mut writer = Self { file, path };
        writer.event(0, |event| event.bytes(3, b"brain.Event:2"))?;
        writer.event(after + 1, |event| event.message(7, |session| session.varint(1, START)))?;
        Ok(writer)
    }

    /// Writes one number per tag, all at `step`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> Result<()> {
        self.summary(step, |summary| {
            for &(tag, value) in scalars {
                summary.message(1, |entry| {
                    entry.bytes(1, tag.as_bytes());
                    entry.float(2, value as f32);
                });
            }
        })
    }

    /// Writes a text, which TensorBoard shows as Markdown on its Text page.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> Result<()> {
        const DT_STRING: u64 = 7;
        self.summary(step, |summary| {
            summary.message(1, |entry| {
                entry.bytes(1, format!("{tag}/text_summary").as_bytes());
                entry.message(8, |tensor| {
                    tensor.varint(1, DT_STRING);
                    tensor.message(2, |shape| shape.message(2, |dimension| dimension.varint(1, 1)));
                    tensor.bytes(8, text.as_bytes());
                });
                entry.message(9, |metadata| metadata.message(1, |plugin| plugin.bytes(1, b"text")));
            });
        })
    }

    /// Writes a histogram of the finite `values` at `step`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn histogram(&mut self, step: u64, tag: &str, values: &[f64]) -> Result<()> {
        let Some(histogram) = Histogram::of(values) else { return Ok(()) };
        self.summary(step, |summary| {
            summary.message(1, |entry| {
                entry.bytes(1, tag.as_bytes());
                entry.message(5, |histo| {
                    let Histogram { min, max, count, sum, sum_squares, .. } = histogram;
                    for (field, value) in [(1, min), (2, max), (3, count), (4, sum), (5, sum_squares)] {
                        histo.double(field, value);
                    }
                    histo.packed_doubles(6, &histogram.limits);
                    histo.packed_doubles(7, &histogram.counts);
                });
            });
        })
    }

    fn summary(&mut self, step: u64, fill: impl FnOnce(&mut Message)) -> Result<()> {
        self.event(step, |event| event.message(5, fill))
    }

    fn event(&mut self, step: u64, fill: impl FnOnce(&mut Message)) -> Result<()> {
        let mut event = Message::default();
        event.double(1, wall_time());
        event.varint(2, step);
        fill(&mut event);
        let written = self.file.write_all(&frame(&event.0));
        written.map_err(|source| Error::io("append to", &self.path, &source))
    }
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

struct Histogram {
    min: f64,
    max: f64,
    count: f64,
    sum: f64,
    sum_squares: f64,
    limits: Vec<f64>,
    counts: Vec<f64>,
}

impl Histogram {
    /// Thirty buckets of equal width between the smallest and the largest value.
    fn of(values: &[f64]) -> Option<Self> {
        const BUCKETS: usize = 30;
        let values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        let min = values.iter().copied().reduce(f64::min)?;
        let max = values.iter().copied().reduce(f64::max)?;
        // Even if all values are equal, a bucket needs some width.
        let width = ((max - min) / BUCKETS as f64).max(f64::MIN_POSITIVE).max(min.abs() * 1e-9);
        let limits = (1..=BUCKETS).map(|bucket| min + width * bucket as f64).collect();
        let mut counts = vec![0.0; BUCKETS];
        for value in &values {
            counts[(((value - min) / width) as usize).min(BUCKETS - 1)] += 1.0;
        }
        let sum = values.iter().sum();
        let sum_squares = values.iter().map(|value| value * value).sum();
        Some(Self { min, max, count: values.len() as f64, sum, sum_squares, limits, counts })
    }
}

/// A protobuf message under construction; fields are appended in the wire format.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn key(&mut self, field: u64, wire_type: u64) {
        self.raw_varint(field << 3 | wire_type);
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.key(field, 2);
        self.raw_varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn packed_doubles(&mut self, field: u64, values: &[f64]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.bytes(field, &bytes);
    }

    fn message(&mut self, field: u64, fill: impl FnOnce(&mut Self)) {
        let mut inner = Self::default();
        fill(&mut inner);
        self.bytes(field, &inner.0);
    }
}

fn frame(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(payload.len() + 16);
    out.extend(length);
    out.extend(masked_crc32c(&length).to_le_bytes());
    out.extend(payload);
    out.extend(masked_crc32c(payload).to_le_bytes());
    out
}

fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        const POLYNOMIAL: u32 = 0x82f6_3b78;
        let mut table = [0u32; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut value = byte as u32;
            let mut bit = 0;
            while bit < 8 {
                value = if value & 1 == 1 { value >> 1 ^ POLYNOMIAL } else { value >> 1 };
                bit += 1;
            }
            table[byte] = value;
            byte += 1;
        }
        table
    };
    !bytes.iter().fold(!0u32, |crc, &byte| TABLE[((crc ^ u32::from(byte)) & 0xff) as usize] ^ crc >> 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_castagnoli() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn histograms_count_every_finite_value_once() {
        let histogram = Histogram::of(&[1.0, 2.0, 2.0, f64::NAN, 4.0]).unwrap();
        assert_eq!((histogram.min, histogram.max, histogram.count, histogram.sum), (1.0, 4.0, 4.0, 9.0));
        assert_eq!(histogram.counts.iter().sum::<f64>(), 4.0);
        assert!(histogram.limits.last().unwrap() >= &3.999_999);
        let single = Histogram::of(&[0.0]).unwrap();
        assert!(single.limits.windows(2).all(|pair| pair[0] < pair[1]), "{:?}", single.limits);
        assert!(Histogram::of(&[f64::INFINITY]).is_none());
    }

    #[test]
    fn messages_are_in_the_wire_format() {
        let mut message = Message::default();
        message.varint(2, 300);
        message.message(5, |inner| inner.bytes(1, b"ab"));
        assert_eq!(message.0, [0x10, 0xac, 0x02, 0x2a, 0x04, 0x0a, 0x02, b'a', b'b']);
        message.0.clear();
        message.float(2, 1.0);
        assert_eq!(message.0, [0x15, 0, 0, 0x80, 0x3f]);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(EventWriter::create(&file.join("tb"), 0).unwrap_err().kind(), tunesmith_base::Kind::Io);
    }
}
