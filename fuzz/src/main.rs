//! libFuzzer over the targets of `tests/it/fuzz/targets.rs`. `just fuzz` builds and starts it.
//!
//! `FUZZ_TARGET` names the target; without it the names are listed. `FUZZ_SEEDS` is a folder that gets the target's stored
//! inputs before the first run.
#![no_main]

#[path = "../../tests/it/fuzz/targets.rs"]
mod targets;

use std::sync::OnceLock;

use targets::{TARGETS, Target};

static TARGET: OnceLock<&Target> = OnceLock::new();

fn begin() {
    let wanted = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let Some(target) = TARGETS.iter().find(|target| target.name == wanted) else {
        TARGETS.iter().for_each(|target| println!("{}", target.name));
        std::process::exit(i32::from(!wanted.is_empty()));
    };
    if let Some(folder) = std::env::var_os("FUZZ_SEEDS") {
        for (number, (_, bytes)) in targets::inputs(target).into_iter().enumerate() {
            std::fs::write(std::path::Path::new(&folder).join(format!("seed-{number:03}")), bytes).expect("a seed");
        }
    }
    TARGET.get_or_init(|| target);
    // libfuzzer-sys aborts in its panic hook. The program catches panics of the tokenizer and template crates, so only a
    // panic that leaves the target counts.
    drop(std::panic::take_hook());
}

libfuzzer_sys::fuzz_target!(init: begin(), |bytes: &[u8]| {
    (TARGET.get().expect("a target").run)(bytes);
});
