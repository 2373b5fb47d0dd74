//! How long a chat template may compute: in one rendering, and in all renderings of a run. Processor time counts,
//! because a loaded machine lets threads wait.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::thread_time::thread_time;

use tunesmith_base::words::count;

/// How often the processor time is read during a rendering. Reading it takes longer than most renderings.
const STEP: Duration = Duration::from_millis(20);
/// The factor on the limit where the system does not report processor time and wall-clock time counts.
const WAITING: u32 = 2;
/// A rendering that lasts this long has the next one measured from its start.
const SLOW: Duration = Duration::from_millis(1);
/// All renderings by one template may take `FREE`, plus `PER_RENDERING` for each, plus `PER_KIB` for each KiB of their
/// variables. Known templates take 10 to 50 microseconds per rendering.
const FREE: Duration = Duration::from_secs(10);
const PER_RENDERING: Duration = Duration::from_millis(5);
const PER_KIB: Duration = Duration::from_millis(5);

/// The time limit of one rendering.
#[derive(Debug, Clone, Copy)]
pub(super) struct RenderTime {
    limit: Duration,
    began: Instant,
    next_read: Instant,
    /// The thread's processor time when it was first read.
    first_read: Option<Duration>,
}

impl RenderTime {
    /// Starts to measure. `thread_time` is the thread's processor time, where it is already known.
    pub(super) fn start(limit: Duration, thread_time: Option<Duration>) -> Self {
        let began = Instant::now();
        Self { limit, began, next_read: began + STEP, first_read: thread_time }
    }

    /// Whether the rendering has exceeded its limit. Reads the processor time at most once every [`STEP`].
    pub(super) fn is_over(&mut self) -> bool {
        let now = Instant::now();
        now >= self.next_read && self.is_over_at(now, thread_time())
    }

    fn is_over_at(&mut self, now: Instant, spent: Option<Duration>) -> bool {
        self.next_read = now + STEP;
        let Some(spent) = spent else { return now.duration_since(self.began) >= self.limit * WAITING };
        spent.saturating_sub(*self.first_read.get_or_insert(spent)) >= self.limit
    }

    /// The processor time since it was first read; `None` if it never was.
    pub(super) fn since_first_read(&self) -> Option<Duration> {
        // Most renderings end before the first reading, and a reading takes longer than they do.
        let first = self.first_read?;
        thread_time()?.checked_sub(first)
    }

    pub(super) const fn limit_seconds(&self) -> u64 {
        self.limit.as_secs()
    }
}

/// The time that all renderings by a template have taken.
#[derive(Debug, Default)]
pub(super) struct TotalTime {
    /// Whether the last rendering was slow.
    slow: AtomicBool,
    nanoseconds: AtomicU64,
    renderings: AtomicU64,
    bytes: AtomicU64,
}

impl TotalTime {
    /// The thread's processor time, if the next rendering is to be measured from its start.
    pub(super) fn thread_time_before(&self) -> Option<Duration> {
        self.slow.load(Ordering::Relaxed).then(thread_time).flatten()
    }

    /// Adds a rendering with variables of `bytes`. `began` is when it started, and `thread_time_before` the thread's
    /// processor time then, where that is known. `since_first_read` is that of [`RenderTime`].
    ///
    /// # Errors
    /// A message: all renderings together have taken too long.
    pub(super) fn add(
        &self,
        began: Instant,
        thread_time_before: Option<Duration>,
        since_first_read: Option<Duration>,
        bytes: usize,
    ) -> Result<(), String> {
        let elapsed = began.elapsed();
        self.slow.store(elapsed >= SLOW, Ordering::Relaxed);
        let exact = thread_time_before.and_then(|before| thread_time()?.checked_sub(before));
        self.add_spent(exact.unwrap_or_else(|| estimate(elapsed, since_first_read)), bytes)
    }

    /// Takes more time than any number of renderings may take.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.nanoseconds.store(u64::MAX / 2, Ordering::Relaxed);
    }

    fn add_spent(&self, spent: Duration, bytes: usize) -> Result<(), String> {
        let add = |sum: &AtomicU64, value: u64| sum.fetch_add(value, Ordering::Relaxed).saturating_add(value);
        let spent = Duration::from_nanos(add(&self.nanoseconds, spent.as_nanos() as u64));
        let (renderings, bytes) = (add(&self.renderings, 1), add(&self.bytes, bytes as u64));
        let times = |each: Duration, count: u64| each.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
        if spent <= FREE + times(PER_RENDERING, renderings) + times(PER_KIB, bytes >> 10) {
            return Ok(());
        }
        Err(format!(
            "the template took {:.1} s of processor time for {} of {} KiB in all",
            spent.as_secs_f64(),
            count(renderings, "rendering"),
            bytes >> 10
        ))
    }
}

/// The processor time of a rendering that was not measured from its start: the wall-clock time until the first reading,
/// at most [`STEP`], plus the processor time since then.
fn estimate(elapsed: Duration, since_first_read: Option<Duration>) -> Duration {
    elapsed.min(STEP) + since_first_read.unwrap_or_default().min(elapsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_renderings_among_fast_ones_are_counted() {
        let ms = Duration::from_millis;
        assert_eq!(estimate(ms(3), None), ms(3));
        assert_eq!(estimate(ms(5000), None), STEP, "a thread that only waits");
        assert_eq!(estimate(ms(900), Some(ms(880))), ms(900));
        // Each slow rendering follows a fast one, so it is not measured from its start.
        let total = TotalTime::default();
        let ago = |time: Duration| Instant::now().checked_sub(time).unwrap();
        let stopped = (0..100).any(|_| {
            total.add(ago(ms(0)), total.thread_time_before(), None, 100).unwrap();
            total.add(ago(ms(900)), total.thread_time_before(), Some(ms(880)), 100).is_err()
        });
        assert!(stopped);
    }

    const LIMIT: Duration = Duration::from_secs(1);

    /// How many steps a rendering runs before it is stopped, if its thread gets `percent` of a core.
    fn steps(percent: u32) -> Option<u32> {
        let mut time = RenderTime::start(LIMIT, None);
        let (began, before) = (time.began, Duration::from_secs(7));
        (1..100_000).find(|step| time.is_over_at(began + STEP * *step, Some(before + STEP * *step * percent / 100)))
    }

    #[test]
    fn a_thread_that_shares_its_core_reaches_the_limit_too() {
        // The first look only notes the thread's processor time.
        assert_eq!(steps(100), Some(51));
        assert_eq!(steps(40), Some(126));
        assert_eq!(steps(5), Some(1001));
    }

    #[test]
    fn a_thread_that_only_waits_does_not() {
        assert_eq!(steps(0), None);
    }

    #[test]
    fn without_the_processors_time_the_clock_decides() {
        let mut time = RenderTime::start(LIMIT, None);
        assert!(!time.is_over_at(time.began + LIMIT, None));
        assert!(time.is_over_at(time.began + LIMIT * WAITING, None));
    }

    #[test]
    fn a_template_that_is_slow_for_every_row_is_stopped() {
        let total = TotalTime::default();
        let stopped_at = (1..1000).find(|_| total.add_spent(Duration::from_millis(900), 100).is_err());
        assert_eq!(stopped_at, Some(12));
        let message = total.add_spent(Duration::ZERO, 0).unwrap_err();
        assert_eq!(message, "the template took 10.8 s of processor time for 13 renderings of 1 KiB in all");
    }

    #[test]
    fn an_honest_template_is_not_stopped_on_a_slow_machine() {
        let total = TotalTime::default();
        for _ in 0..100_000 {
            total.add_spent(Duration::from_millis(2), 500).unwrap();
        }
        total.add_spent(Duration::from_secs(1), 1 << 20).unwrap();
    }
}
