//! How much memory is held, and how much was at most.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A count of bytes with its high-water mark.
#[derive(Debug, Clone, Default)]
pub struct Usage(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    now: AtomicU64,
    highest: AtomicU64,
}

impl Usage {
    /// Counts `bytes` until the result is dropped.
    pub fn hold(&self, bytes: u64) -> Held {
        let now = self.0.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.0.highest.fetch_max(now, Ordering::Relaxed);
        Held { usage: self.clone(), bytes }
    }

    /// Bytes that are held now.
    pub fn now(&self) -> u64 {
        self.0.now.load(Ordering::Relaxed)
    }

    /// The most bytes that were held at once.
    pub fn highest(&self) -> u64 {
        self.0.highest.load(Ordering::Relaxed)
    }
}

/// Bytes that count as held while this lives.
#[derive(Debug)]
pub struct Held {
    usage: Usage,
    bytes: u64,
}

impl Held {
    /// How many bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.usage.0.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_no_longer_counts_but_was_counted() {
        let usage = Usage::default();
        let (one, two) = (usage.hold(5), usage.hold(7));
        assert_eq!((usage.now(), two.bytes()), (12, 7));
        drop(one);
        let _three = usage.hold(1);
        assert_eq!((usage.now(), usage.highest()), (8, 12));
    }
}
