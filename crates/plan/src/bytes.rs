//! How much disk space a run's checkpoints and results take, in bytes. A disk that is too small is refused before the
//! first step and not after the last one.

/// Room for everything but tensors: headers, JSON files, metrics, logs, the report.
const SMALL_FILES: u64 = 1 << 20;

/// Bytes of one checkpoint: `trainable` values in f32, `optimizer` bytes of state, `extra_files` bytes of files that
/// are copied, and small files.
pub fn checkpoint(trainable: u64, optimizer: u64, extra_files: u64) -> u64 {
    4 * trainable + optimizer + extra_files + SMALL_FILES
}

/// The most bytes that a run of `checkpoints` checkpoints holds on disk at once. An old checkpoint is removed only when
/// the new one is durable, so that one more than `keep` exists for a while. The final weights in f32 and the tokenizer
/// (`extra_files`) come on top.
pub fn run(trainable: u64, optimizer: u64, extra_files: u64, checkpoints: u64, keep: Option<u64>) -> u64 {
    let held = keep.map_or(checkpoints, |keep| checkpoints.min(keep + 1));
    held.max(1) * checkpoint(trainable, optimizer, extra_files) + 4 * trainable + extra_files + SMALL_FILES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_new_checkpoint_stands_beside_those_kept() {
        let one = checkpoint(1000, 8000, 50);
        assert_eq!(one, 12_000 + 50 + SMALL_FILES);
        let last = 4000 + 50 + SMALL_FILES;
        assert_eq!(run(1000, 8000, 50, 10, Some(3)), 4 * one + last);
        assert_eq!(run(1000, 8000, 50, 2, Some(3)), 2 * one + last);
        assert_eq!(run(1000, 8000, 50, 10, None), 10 * one + last);
        assert_eq!(run(1000, 8000, 50, 0, None), one + last);
    }
}
