//! Numbers as values of flags: what is valid is said when a value is not, and `-1` is a value and not the name of a flag.
use clap::{Arg, Command};

use crate::config::Range;

/// Reads a whole number of this range, as a flag's `value_parser`.
pub(super) fn whole<T: TryFrom<u64>>(range: Range) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text: &str| {
        let number = text.parse::<u64>().ok().filter(|&number| range.contains(number as f64));
        number.and_then(|number| number.try_into().ok()).ok_or_else(|| format!("expected an integer{range}"))
    }
}

/// Reads a finite number of this range, as a flag's `value_parser`.
pub(super) fn number(range: Range) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text: &str| {
        let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && range.contains(*number));
        number.ok_or_else(|| format!("expected a number{range}"))
    }
}

/// The command, whose flags with a value all take a negative number, so that a flag that has no use for one can say what it takes.
/// Lists such as `-1,2` and sizes such as `-1GiB` are no numbers: such flags have `allow_hyphen_values`.
pub(super) fn taking_negative(command: Command) -> Command {
    let has_value = |arg: &Arg| !arg.is_positional() && arg.get_action().takes_values();
    command.mut_subcommands(|subcommand| {
        subcommand.mut_args(|arg| if has_value(&arg) { arg.allow_negative_numbers(true) } else { arg })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn a_number_that_is_not_valid_is_answered_with_those_that_are() {
        let rows = whole::<u64>(Range::at_least(1.0));
        assert_eq!(rows("3"), Ok(3));
        for text in ["0", "-1", "1.5", "x", "", "99999999999999999999"] {
            assert_eq!(rows(text), Err("expected an integer, at least 1".to_owned()), "{text}");
        }
        assert_eq!(whole::<u16>(Range::within(1.0, 65_535.0))("65536").unwrap_err(), "expected an integer, 1 to 65535");
        let speed = number(Range::greater_than(0.0));
        assert_eq!(speed("1e2"), Ok(100.0));
        for text in ["0", "-1", "nan", "inf", "x"] {
            assert_eq!(speed(text), Err("expected a number, greater than 0".to_owned()), "{text}");
        }
    }

    /// A flag of a new command cannot be forgotten.
    #[test]
    fn every_flag_with_a_value_takes_minus_one_as_a_value() {
        let command = taking_negative(super::super::Cli::command());
        let mut flags = 0;
        for subcommand in command.get_subcommands() {
            for arg in
                subcommand.get_arguments().filter(|arg| arg.get_long().is_some() && arg.get_action().takes_values())
            {
                flags += 1;
                assert!(arg.is_allow_negative_numbers_set() || arg.is_allow_hyphen_values_set(), "{subcommand} {arg}");
                let typed = ["tunesmith", subcommand.get_name(), &format!("--{}", arg.get_long().unwrap()), "-1"];
                if let Err(error) = command.clone().try_get_matches_from(typed) {
                    let text = error.to_string();
                    assert!(!text.contains("unexpected argument"), "{subcommand} {arg}: {text}");
                    for unclear in ["invalid digit", "is not in", "invalid float"] {
                        assert!(!text.contains(unclear), "{subcommand} {arg}: {text}");
                    }
                }
            }
        }
        assert!(flags > 50, "{flags}");
    }
}
