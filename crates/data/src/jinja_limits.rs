//! What one rendering of a chat template may build and how long it may run.
//!
//! A rendering stays on one thread, so its limits are thread-local: [`Limits::start`] puts them in force, and filters
//! and functions that templates call ask [`guard`], [`charge`] and [`measure`]. Outside of a rendering nothing is
//! limited.
use std::cell::Cell;
use std::time::{Duration, SystemTime};

use minijinja::value::{DynObject, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::template_time::RenderTime;

/// How deep lists and maps may nest.
const MAX_DEPTH: usize = 64;
/// Processor time of one rendering, and again for every [`BYTES_PER_TIME_LIMIT`] of its variables.
const TIME_LIMIT: Duration = Duration::from_secs(1);
const BYTES_PER_TIME_LIMIT: u32 = 32 << 20;
/// The most items that one step may compare, at about 50 nanoseconds each.
const MAX_COMPARED: usize = 1 << 24;

/// The characters that enclose the text of a `{% generation %}` block in the output.
#[derive(Debug, Clone, Copy)]
pub struct GenerationMarks {
    pub open: char,
    pub close: char,
}

/// What the running template may still use.
#[derive(Clone, Copy)]
struct Budget {
    /// The largest single value, in bytes of text plus items.
    value: usize,
    /// Bytes that all further values and the output may take together.
    total: usize,
    time: RenderTime,
    marks: GenerationMarks,
    /// The time that `strftime_now` writes.
    now: SystemTime,
}

thread_local! {
    static BUDGET: Cell<Option<Budget>> = const { Cell::new(None) };
    /// Whether a limit has stopped the last rendering.
    static STOPPED: Cell<bool> = const { Cell::new(false) };
    /// Whether that was the time limit.
    static TIMED_OUT: Cell<bool> = const { Cell::new(false) };
    /// Whether the last rendering has called `raise_exception`.
    static RAISED: Cell<bool> = const { Cell::new(false) };
}

/// The limits of a rendering, in force on this thread until the value is dropped.
pub struct Limits(());

impl Limits {
    /// Starts a rendering. `input_bytes` is the size of its variables: the limits grow with it. `thread_time_before`
    /// is the thread's processor time, where it is already known.
    pub fn start(
        input_bytes: usize,
        thread_time_before: Option<Duration>,
        marks: GenerationMarks,
        now: SystemTime,
    ) -> Self {
        STOPPED.set(false);
        TIMED_OUT.set(false);
        RAISED.set(false);
        let limit = TIME_LIMIT * (1 + input_bytes as u32 / BYTES_PER_TIME_LIMIT);
        BUDGET.set(Some(Budget {
            value: input_bytes.saturating_mul(8).saturating_add(4 << 20),
            total: input_bytes.saturating_mul(128).saturating_add(64 << 20),
            time: RenderTime::start(limit, thread_time_before),
            marks,
            now,
        }));
        Self(())
    }
}

impl Drop for Limits {
    fn drop(&mut self) {
        BUDGET.set(None);
    }
}

/// The processor time of the running rendering since it was first read; `None` if it never was.
pub fn time_since_first_read() -> Option<Duration> {
    BUDGET.get().and_then(|budget| budget.time.since_first_read())
}

/// The time that `strftime_now` writes: the clock's outside of a rendering.
pub fn now() -> SystemTime {
    BUDGET.get().map_or_else(SystemTime::now, |budget| budget.now)
}

/// The marks of the running template; `None` outside of a rendering.
pub fn generation_marks() -> Option<GenerationMarks> {
    BUDGET.get().map(|budget| budget.marks)
}

/// An error of a helper function. For an error of a limit, see [`stopped`].
pub fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// The error of a limit: [`blame`] then blames the template.
pub fn stopped(message: impl Into<String>) -> Error {
    STOPPED.set(true);
    failed(message)
}

/// The error of the time limit: [`blame`] then blames the template, and [`timed_out`] is true.
pub fn stopped_by_time(message: impl Into<String>) -> Error {
    TIMED_OUT.set(true);
    stopped(message)
}

/// Whether the time limit has stopped the last rendering on this thread. Unlike other errors of a template, this one
/// may not occur again.
pub fn timed_out() -> bool {
    TIMED_OUT.get()
}

/// The error of `raise_exception`: [`blame`] then blames the row.
pub fn raised(message: String) -> Error {
    RAISED.set(true);
    failed(message)
}

/// Whether the template or the row has caused an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// A limit stopped the template, or it names a filter, test or function that does not exist.
    Template,
    /// The template called `raise_exception`: it refuses the row.
    Row,
    /// The error alone does not say.
    Unclear,
}

/// What has caused the error of the last rendering on this thread.
pub fn blame(error: &Error) -> Blame {
    use ErrorKind::{OutOfFuel, TemplateNotFound, UnknownBlock, UnknownFilter, UnknownFunction, UnknownTest};
    let own = [OutOfFuel, TemplateNotFound, UnknownBlock, UnknownFilter, UnknownFunction, UnknownTest];
    let recursion = error.detail().is_some_and(|detail| detail.contains("recursion limit"));
    match () {
        () if STOPPED.get() || recursion || own.contains(&error.kind()) => Blame::Template,
        () if RAISED.get() => Blame::Row,
        () => Blame::Unclear,
    }
}

/// Fails if a value of `bytes` may not be built; `None` stands for more than a `usize` can count. Call it before an
/// operation that can multiply its input.
pub fn guard(bytes: Option<usize>) -> Result<(), Error> {
    let limit = BUDGET.get().map_or(usize::MAX, |budget| budget.value);
    match bytes {
        Some(bytes) if bytes <= limit => Ok(()),
        _ => Err(stopped(format!("the template builds a value larger than {limit} bytes"))),
    }
}

/// Takes `bytes` from what the rendering may still build, and checks the time limit. minijinja may call a filter or
/// test for each item of a list, with no instruction in between: such a filter must call this itself.
pub fn charge(bytes: usize) -> Result<(), Error> {
    let Some(mut budget) = BUDGET.get() else { return Ok(()) };
    if budget.time.is_over() {
        return Err(stopped_by_time(format!("the template ran for more than {} s", budget.time.limit_seconds())));
    }
    budget.total =
        budget.total.checked_sub(bytes).ok_or_else(|| stopped("the template builds too much text in all"))?;
    BUDGET.set(Some(budget));
    Ok(())
}

/// The cost of comparing a whole value: one for each item, and one for each 32 bytes of text.
pub fn weight(value: &Value) -> usize {
    let own = 1 + value.as_str().map_or(0, str::len) / 32;
    let items: usize = match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => value.try_iter().into_iter().flatten().map(|item| weight(&item)).sum(),
        ValueKind::Map => {
            let pairs = value.as_object().and_then(DynObject::try_iter_pairs);
            pairs.into_iter().flatten().map(|(key, item)| weight(&key) + weight(&item)).sum()
        }
        _ => 0,
    };
    own + items
}

/// Fails if sorting a value would take too long. Call it before sorting.
pub fn guard_sorting(value: &Value) -> Result<(), Error> {
    charge(0)?;
    measure(value)?;
    let items = value.len().unwrap_or(1).max(2);
    if weight(value).saturating_mul(items.ilog2() as usize + 1) <= MAX_COMPARED {
        return Ok(());
    }
    Err(stopped(format!("the template sorts a list of {items} items, which is too much for one step")))
}

/// The bytes of a value written out as a tree, where a shared item counts each time it occurs.
///
/// # Errors
/// The value nests too deeply, or is larger than the limit.
pub fn measure(value: &Value) -> Result<usize, Error> {
    let limit = BUDGET.get().map_or(usize::MAX, |budget| budget.value);
    let mut size = 0;
    walk(value, 0, limit, &mut size)?;
    Ok(size)
}

fn walk(value: &Value, depth: usize, limit: usize, size: &mut usize) -> Result<(), Error> {
    *size += 1 + value.as_str().map_or(0, str::len);
    guard(Some(*size).filter(|&size| size <= limit))?;
    if depth > MAX_DEPTH {
        return Err(stopped(format!("the template nests values more than {MAX_DEPTH} deep")));
    }
    let Some(object) = value.as_object() else { return Ok(()) };
    if depth > 0 && is_namespace(value) {
        return Err(stopped("a namespace cannot be an item of another value"));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()?.checked() {
                walk(&item?, depth + 1, limit, size)?;
            }
        }
        ValueKind::Map if depth > 0 || !is_namespace(value) => {
            for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                walk(&key, depth + 1, limit, size)?;
                walk(&item, depth + 1, limit, size)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Whether a value is a `namespace()`, the one kind of value that a template can change.
pub fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}
