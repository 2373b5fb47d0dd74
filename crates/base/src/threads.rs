//! How many threads share the work of a process.

/// The most threads of a pool, whatever `RAYON_NUM_THREADS` says: starting more takes longer than any work.
const MOST: usize = 1024;

/// `RAYON_NUM_THREADS`, if it is a positive number, else the processors that this process may use; at most 1024.
pub fn default_threads() -> usize {
    let asked = std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok());
    let processors = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    asked.filter(|&asked| asked > 0).unwrap_or_else(processors).min(MOST)
}
