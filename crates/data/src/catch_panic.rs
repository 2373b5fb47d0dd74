//! Runs library code that may panic on hostile input, as the tokenizers crate does. A panic becomes an error, and its
//! message is not printed.
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use tunesmith_base::error::{Error, Result};

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`. A panic becomes a data error that says what the program was `doing`.
pub fn isolated<T>(doing: &str, work: impl FnOnce() -> T) -> Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                print(panic);
            }
        }));
    });
    let outer = QUIET.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    QUIET.set(outer);
    outcome.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Error::data(format!("{doing} failed inside its library: {text}"))
    })
}
