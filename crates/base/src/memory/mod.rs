//! How many bytes the process holds ([`live`], [`peak`]), and how many the machine has ([`limits`]).
mod counting;
pub mod limits;
mod overflow;

use counting::end;
pub use counting::{calls, cost, highest, live, peak, reset_peak, return_large_blocks, share_arena_under_limit};
pub use overflow::catch_stack_overflow;

/// Bytes with three digits in a binary unit, up to TiB: `1.50 GiB`.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Other tests of this process allocate meanwhile, though far less than this.
    const LARGE: usize = 512 << 20;

    #[test]
    fn large_buffers_are_counted_while_they_live() {
        let (before, above) = (live(), LARGE as u64 / 2);
        let block = Vec::<u8>::with_capacity(LARGE);
        assert!(live() > before + above, "{} then {}", before, live());
        assert!(peak() > before + above && highest() >= peak());
        drop(std::hint::black_box(block));
        assert!(live() < before + above, "{} then {}", before, live());
    }

    #[test]
    fn many_small_pieces_are_counted_too() {
        let before = live();
        let pieces: Vec<Box<[u8; 1 << 10]>> = (0..200 << 10).map(|_| Box::new([1; 1 << 10])).collect();
        let held = live().saturating_sub(before);
        assert!((180 << 20..320 << 20).contains(&held), "{} pieces hold {held}", pieces.len());
    }

    #[test]
    fn calls_are_counted_and_counting_costs_little() {
        let before = calls();
        let pieces: Vec<Box<u64>> = (0..100_000).map(|number| std::hint::black_box(Box::new(number))).collect();
        assert!(calls() >= before + pieces.len() as u64 - 1024, "{} then {}", before, calls());
        assert!(cost() < 1e-6, "{:e} s a call", cost());
    }

    #[test]
    fn bytes_read_well() {
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1536), "1.50 KiB");
        assert_eq!(human_bytes(200 << 20), "200 MiB");
    }
}
