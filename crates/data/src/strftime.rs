//! `strftime_now` for chat templates, and `data.template_date`.
use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use minijinja::Error;

use super::jinja_limits::failed;

/// Midnight UTC of a date such as `2025-07-26`.
///
/// # Errors
/// [`tunesmith_base::Kind::Config`]: the text is not a date, or one before 1970.
pub fn parse_date(text: &str) -> tunesmith_base::Result<SystemTime> {
    let parts: Vec<&str> = text.split('-').collect();
    let date = match parts[..] {
        [year, month, day] if (year.len(), month.len(), day.len()) == (4, 2, 2) => {
            year.parse::<u64>().ok().zip(month.parse::<usize>().ok()).zip(day.parse::<u64>().ok())
        }
        _ => None,
    };
    let days = date.filter(|((year, _), _)| *year >= 1970).and_then(|((year, month), day)| {
        (days_before(year)..days_before(year + 1)).find(|&days| civil_date(days) == (year, month, day))
    });
    days.map(|days| UNIX_EPOCH + Duration::from_secs(days * 86_400)).ok_or_else(|| {
        tunesmith_base::Error::config(format!("data.template_date: found {text:?}, expected a date as 2025-07-26"))
    })
}

/// Python's `now.strftime(layout)`, in UTC and English.
///
/// # Errors
/// The layout has a code that is not supported.
pub fn strftime(layout: &str, now: SystemTime) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let (year, month, day) = civil_date(days);
    let day_of_year = days - days_before(year) + 1;
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[(days % 7) as usize]);
    let hour12 = (hour + 11) % 12 + 1;
    let mut text = String::new();
    let mut letters = layout.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let mut code = letters.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = letters.next();
        }
        let mut number = |value: u64, width: usize| {
            let width = if unpadded { 0 } else { width };
            let _ = write!(text, "{value:0width$}");
        };
        match code {
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month as u64, 2),
            Some('d') => number(day, 2),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('j') => number(day_of_year, 3),
            Some('B') => text.push_str(month_name),
            Some('b' | 'h') => text.push_str(&month_name[..3]),
            Some('A') => text.push_str(day_name),
            Some('a') => text.push_str(&day_name[..3]),
            Some('p') => text.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('e') => {
                let _ = write!(text, "{day:2}");
            }
            Some('F') => {
                let _ = write!(text, "{year:04}-{month:02}-{day:02}");
            }
            Some('T') => {
                let _ = write!(text, "{hour:02}:{minute:02}:{second:02}");
            }
            Some('Z') => text.push_str("UTC"),
            Some('%') => text.push('%'),
            other => {
                return Err(failed(format!(
                    "strftime_now does not know %{}",
                    other.map_or(String::new(), String::from)
                )));
            }
        }
    }
    Ok(text)
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before(year: u64) -> u64 {
    let past = year - 1;
    past * 365 + past / 4 - past / 100 + past / 400 - 719_162
}

/// Year, month (from 1) and day (from 1) of the day `days` days after 1970-01-01.
fn civil_date(days: u64) -> (u64, usize, u64) {
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let leap = u64::from(year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)));
    let mut day = days - days_before(year);
    for (month, length) in [31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31].into_iter().enumerate() {
        if day < length {
            return (year, month + 1, day + 1);
        }
        day -= length;
    }
    unreachable!("a year has at most 366 days")
}

#[cfg(test)]
mod tests {
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
        assert!(strftime("%Q", at(0)).is_err());
        assert_eq!(strftime("%d %b %Y", parse_date("2024-02-29").unwrap()).unwrap(), "29 Feb 2024");
        for wrong in ["2023-02-29", "2024-13-01", "1969-12-31", "24-01-01", "today", "2024-01-00"] {
            assert!(parse_date(wrong).is_err(), "{wrong}");
        }
    }
}
