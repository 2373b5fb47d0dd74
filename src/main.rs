//! The `tunesmith` program: hands its arguments to [`tunesmith::cmd::run`] and exits with the code of the error's class.
use std::process::ExitCode;

fn main() -> ExitCode {
    tunesmith::cmd::run(std::env::args_os())
}
