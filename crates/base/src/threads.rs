//! How many threads share the work of a process.
use crate::error::{Error, Result};

/// The most threads of a pool: starting more takes longer than any work.
const MOST: usize = 1024;

const VARIABLE: &str = "RAYON_NUM_THREADS";

/// `RAYON_NUM_THREADS`, if it is a positive number, else the processors that this process may use; at most 1024.
pub fn default_threads() -> usize {
    let asked = std::env::var(VARIABLE).ok().and_then(|text| text.trim().parse().ok());
    let processors = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    asked.filter(|&asked| asked > 0).unwrap_or_else(processors).min(MOST)
}

/// Refuses a `RAYON_NUM_THREADS` that [`default_threads`] would not follow. Zero and an empty text mean all processors, as for rayon.
///
/// # Errors
/// [`crate::Kind::Config`]: no number, or more than 1024.
pub fn check_environment() -> Result<()> {
    std::env::var_os(VARIABLE).map_or(Ok(()), |text| check(&text.to_string_lossy()))
}

fn check(text: &str) -> Result<()> {
    let number = text.trim();
    if number.is_empty() || number.parse::<usize>().is_ok_and(|number| number <= MOST) {
        return Ok(());
    }
    Err(Error::config(format!("env {VARIABLE}={text}: expected a number of threads from 1 to {MOST}"))
        .hint("unset it to use every processor, or set train.num_threads"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_threads_is_followed_or_refused() {
        for fine in ["", "0", "1", " 8 ", "1024"] {
            check(fine).unwrap();
        }
        for wrong in ["two", "-1", "1.5", "1025", "99999999", "99999999999999999999999"] {
            let error = check(wrong).unwrap_err();
            assert!(error.message().contains(&format!("RAYON_NUM_THREADS={wrong}: expected")), "{error}");
        }
    }
}
