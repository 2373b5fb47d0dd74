//! `strftime_now` for chat templates, and `data.template_date`.
use std::fmt::Write as _;
use std::time::SystemTime;

use chrono::format::StrftimeItems;
use chrono::{DateTime, Datelike as _, NaiveDate, NaiveTime, Utc};
use minijinja::Error;

use super::jinja_limits::failed;

/// How `data.template_date` writes a date.
const DATE: &str = "%Y-%m-%d";

/// Midnight UTC of a date such as `2025-07-26`.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the text is not a date, or one before 1970.
pub fn parse_date(text: &str) -> tunesmith_base::Result<SystemTime> {
    let date = NaiveDate::parse_from_str(text, DATE).ok();
    // chrono also reads `2025-7-26`.
    let date = date.filter(|date| date.year() >= 1970 && date.format(DATE).to_string() == text);
    date.map(|date| date.and_time(NaiveTime::MIN).and_utc().into()).ok_or_else(|| {
        tunesmith_base::Error::config(format!("data.template_date: found {text:?}, expected a date as 2025-07-26"))
    })
}

/// Python's `now.strftime(layout)`, in UTC and English.
///
/// # Errors
/// The layout has a code that Python does not know.
pub fn strftime(layout: &str, now: SystemTime) -> Result<String, Error> {
    // Python's %f is in microseconds, chrono's in nanoseconds. The first character after %% is not a code.
    let layout = layout.split("%%").map(|part| part.replace("%f", "%6f")).collect::<Vec<_>>().join("%%");
    let unknown = || failed(format!("strftime_now does not know a code of {layout:?}"));
    let items = StrftimeItems::new(&layout).parse().map_err(|_| unknown())?;
    let mut text = String::new();
    // Codes for reading only, such as %#z, fail here.
    write!(text, "{}", DateTime::<Utc>::from(now).format_with_items(items.iter())).map_err(|_| unknown())?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn dates_as_python_writes_them() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        // date -u -d @1709251199 and @1709251200: the leap day of 2024 and the day after.
        assert_eq!(
            strftime("%d %b %Y %H:%M:%S %A %j", at(1_709_251_199)).unwrap(),
            "29 Feb 2024 23:59:59 Thursday 060"
        );
        assert_eq!(strftime("%-d %B %y %I %p", at(1_709_251_200)).unwrap(), "1 March 24 12 AM");
        assert_eq!(strftime("%Y-%m-%d %a", at(0)).unwrap(), "1970-01-01 Thu");
        // Written by Python: datetime.fromtimestamp(1709251199.5, timezone.utc).strftime(...)
        let layout = "%e|%h|%F|%T|%Z|%z|%%|%f|%%f|%c|%x|%X|%D|%R|%r|%U|%W|%V|%G|%u|%w|%-j|%-H|%s|%C|%k|%l|%n|%t|%P|%-I";
        let written = "29|Feb|2024-02-29|23:59:59|UTC|+0000|%|500000|%f|Thu Feb 29 23:59:59 2024|02/29/24|23:59:59|02/29/24|23:59|\
                       11:59:59 PM|08|09|09|2024|4|4|60|23|1709251199|20|23|11|\n|\t|pm|11";
        assert_eq!(strftime(layout, at(1_709_251_199) + Duration::from_millis(500)).unwrap(), written);
        for unknown in ["%Q", "%", "a%-", "%#z"] {
            assert!(strftime(unknown, at(0)).is_err(), "{unknown}");
        }
        assert_eq!(strftime("%d %b %Y", parse_date("2024-02-29").unwrap()).unwrap(), "29 Feb 2024");
        for wrong in ["2023-02-29", "2024-13-01", "1969-12-31", "24-01-01", "today", "2024-01-00", " 2024-1-01"] {
            assert!(parse_date(wrong).is_err(), "{wrong}");
        }
    }
}
