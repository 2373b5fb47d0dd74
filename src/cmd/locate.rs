//! Finds programs and libraries of the system.
use std::path::PathBuf;

/// The path of an executable on `PATH`.
pub(super) fn program(name: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let executable =
        |path: &PathBuf| path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(name)).find(executable)
}

/// Where the dynamic linker would find a library. Looks only in `LD_LIBRARY_PATH` and the usual folders.
pub(super) fn library(name: &str) -> Option<PathBuf> {
    const USUAL: &[&str] = &[
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/cuda/lib64",
        "/usr/local/cuda/compat",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
    ];
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).filter(|folder| !folder.as_os_str().is_empty());
    folders.chain(USUAL.iter().map(PathBuf::from)).map(|folder| folder.join(name)).find(|path| path.exists())
}
