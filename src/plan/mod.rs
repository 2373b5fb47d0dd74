//! Layer 2: what a run will do, computed before it starts. Pure functions: rows to optimizer steps
//! ([`batches`]), the learning rate over them ([`rates`]), the bytes that saving needs
//! ([`bytes`]), those of memory ([`memory`], by strategy [`strategies`]), and the operations of a step ([`flops`]).
use std::fmt::Write as _;

pub mod batches;
pub mod bytes;
pub mod flops;
pub mod memory;
pub mod rates;
pub mod strategies;

/// Lays `(label, value)` rows out as an aligned two-column table, one line a row.
pub fn table(rows: &[(String, String)]) -> String {
    let width = rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
    rows.iter().fold(String::new(), |mut out, (label, value)| {
        let _ = writeln!(out, "  {label:<width$}  {value}");
        out
    })
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Bytes in the binary unit that keeps three digits: `1.50 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ if value < 10.0 => format!("{value:.2} {}", UNITS[unit]),
        _ if value < 100.0 => format!("{value:.1} {}", UNITS[unit]),
        _ => format!("{value:.0} {}", UNITS[unit]),
    }
}

/// Reads `24GiB`, `1.5 GB` or a number of bytes; a unit without `i` counts in thousands.
///
/// # Errors
/// What was expected, in words.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 9] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("KB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("B", 1),
    ];
    let text = text.trim();
    let split = UNITS.iter().find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number, *unit)));
    let (number, unit) = split.unwrap_or((text, 1));
    match number.trim_end().parse::<f64>() {
        Ok(number) if (0.0..=1e18).contains(&(number * unit as f64)) => Ok((number * unit as f64) as u64),
        _ => Err("expected a size such as 24GiB".to_owned()),
    }
}

/// A duration as people write it: `4.2s`, `3m 07s`, `2h 05m`.
pub fn human_seconds(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        _ if seconds < 59.95 => format!("{seconds:.1}s"),
        0..3600 => format!("{}m {:02}s", whole / 60, whole % 60),
        _ => format!("{}h {:02}m", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(["0", "999", "1,000", "1,234,567"].map(String::from), [0, 999, 1000, 1_234_567].map(grouped));
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1536), "1.50 KiB");
        assert_eq!(human_bytes(200 << 20), "200 MiB");
        assert_eq!(["24GiB", "1.5 KB", "7"].map(parse_bytes), [Ok(24 << 30), Ok(1500), Ok(7)]);
        assert!(["", "GiB", "-1B", "nan", "1e40"].iter().all(|text| parse_bytes(text).is_err()));
        assert_eq!(human_seconds(4.21), "4.2s");
        assert_eq!(human_seconds(59.99), "1m 00s");
        assert_eq!(human_seconds(187.0), "3m 07s");
        assert_eq!(human_seconds(7500.0), "2h 05m");
    }
}
