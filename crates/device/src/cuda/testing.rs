//! The stand-in for a GPU that tests run on: `crates/device/stand_in/README.md`.
use super::library;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The variable with which tests run on this machine's GPU instead.
const REAL_GPU_VARIABLE: &str = "TUNESMITH_TEST_GPU";

/// Builds the stand-in, unless it exists for these sources, and returns its folder. Other processes load CUDA's libraries from there if
/// the environment variable `TUNESMITH_CUDA_LIBRARIES` names it. This process does not.
///
/// # Panics
/// It cannot be built: there is no `g++`, or a kernel has an error, which the message shows.
pub fn stand_in() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(build)
}

/// Makes this process load CUDA's libraries from the stand-in, which it builds if needed. With `TUNESMITH_TEST_GPU` set, it does nothing:
/// this process then tests the machine's GPU, and the library that is loaded first stays.
///
/// # Panics
/// As [`stand_in`].
pub fn use_stand_in() {
    if std::env::var_os(REAL_GPU_VARIABLE).is_none() {
        library::load_from(stand_in());
    }
}

fn build() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of crates").to_owned();
    let mut sources = Vec::new();
    find(&crates, &mut sources);
    sources.sort();
    let mut hash = blake3::Hasher::new();
    hash.update(std::env::var_os("TUNESMITH_STAND_IN_FLAGS").unwrap_or_default().as_encoded_bytes());
    for source in &sources {
        hash.update(source.as_os_str().as_encoded_bytes());
        hash.update(&std::fs::read(source).expect("a source of the stand-in"));
    }
    let target = std::env::current_exe().expect("this test's path");
    let target = target.ancestors().find(|folder| folder.join(".rustc_info.json").exists());
    let target = target.map_or_else(|| std::env::temp_dir().join("tunesmith"), Path::to_owned);
    let all = target.join("stand-in");
    std::fs::create_dir_all(&all).expect("a folder for the stand-in");
    let folder = all.join(&hash.finalize().to_hex()[..16]);
    // Test processes that start together build it once.
    let lock = File::create(all.join("lock")).expect("a lock file");
    lock.lock().expect("the lock");
    if !folder.join("built").exists() {
        let script = crates.join("device/stand_in/build.sh");
        // A sanitizer that is loaded first is for this process, not for the compiler.
        let mut build = Command::new("bash");
        let built = build.arg(&script).arg(&folder).env_remove("LD_PRELOAD").output().expect("bash runs");
        assert!(
            built.status.success(),
            "{} failed:\n{}{}",
            script.display(),
            String::from_utf8_lossy(&built.stdout),
            String::from_utf8_lossy(&built.stderr)
        );
        std::fs::write(folder.join("built"), "").expect("a mark that it is whole");
    }
    folder
}

/// The stand-in's sources: kernels, headers, and its own files.
fn find(folder: &Path, sources: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources").flatten() {
        let path = entry.path();
        if path.is_dir() {
            find(&path, sources);
        } else if path.extension().is_some_and(|end| ["cu", "cuh", "cpp", "h", "sh"].iter().any(|it| end == *it)) {
            sources.push(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a process of its own, as libraries are loaded once.
    #[test]
    fn a_process_that_tests_the_machines_gpu_never_loads_the_stand_in() {
        const ASKS: &str = "TUNESMITH_TEST_ASKS";
        if std::env::var_os(ASKS).is_some() {
            use_stand_in();
            assert_eq!(library::test_folder().is_some(), std::env::var_os(REAL_GPU_VARIABLE).is_none());
            return;
        }
        let name = concat!(module_path!(), "::a_process_that_tests_the_machines_gpu_never_loads_the_stand_in");
        let name = name.split_once("::").expect("a crate and a path").1;
        for gpu in [None, Some("1")] {
            let mut command = Command::new(std::env::current_exe().expect("this test's path"));
            command.args(["--exact", name]).env(ASKS, "1").env_remove(REAL_GPU_VARIABLE);
            command.envs(gpu.map(|value| (REAL_GPU_VARIABLE, value)));
            let ended = command.output().expect("the test runs again");
            let said = String::from_utf8_lossy(&ended.stdout);
            assert!(ended.status.success() && said.contains("1 passed"), "{gpu:?}: {said}");
        }
    }
}
