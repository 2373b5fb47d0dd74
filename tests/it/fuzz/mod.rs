//! Runs the readers of outside input on stored inputs and on mutations of them. `just fuzz` runs the same targets under
//! libFuzzer for any length of time. Inputs that it finds go into `tests/fuzz/TARGET/` and are replayed here.
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use targets::{TARGETS, Target, inputs};

/// Mutations of each target that every test run tries.
const MUTATIONS: usize = 120;

/// Pseudo-random numbers (xorshift64), the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit.max(1)
    }
}

/// Pieces that readers give a meaning to.
const PIECES: &[&[u8]] = &[
    b"null",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b"\\u0000",
    b"\\ud800",
    b"\0",
    b"\xff",
    b"\n",
    b": ",
    b"- ",
    b"{{",
    b"}}",
    b"{%",
    b"%}",
    b"<",
    b">",
    b"&",
    b"*a",
    b"&a",
    b"../",
    b"true",
];

/// One to four random edits.
fn mutated(random: &mut Random, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        let end = (at + random.below(16)).min(bytes.len());
        match random.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 => bytes.truncate(at),
            2 => drop(bytes.drain(at..end)),
            3 => {
                let copy = bytes[at..end].repeat(1 + random.below(40));
                bytes.splice(at..at, copy);
            }
            4 => {
                let from = random.below(other.len() + 1);
                let to = (from + random.below(200)).min(other.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
            _ => {
                let piece = PIECES[random.below(PIECES.len())];
                bytes.splice(at..at, piece.iter().copied());
            }
        }
    }
    bytes
}

/// Runs a target; an input on which it panics is kept, and its path is in the message.
fn run(target: &Target, bytes: &[u8]) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (target.run)(bytes))) {
        let name = format!("fuzz-{}-{}", target.name, blake3::hash(bytes).to_hex().split_at(12).0);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&path, bytes).expect("room for the input");
        eprintln!("{}: panics on {}", target.name, path.display());
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn no_reader_of_outside_input_panics() {
    let mut random = Random(0x0bad_5eed);
    for target in TARGETS {
        let inputs = inputs(target);
        assert!(!inputs.is_empty(), "{} has no input to begin with", target.name);
        for (_, bytes) in &inputs {
            run(target, bytes);
        }
        for _ in 0..MUTATIONS {
            let (first, second) = (random.below(inputs.len()), random.below(inputs.len()));
            run(target, &mutated(&mut random, &inputs[first].1, &inputs[second].1));
        }
    }
}
