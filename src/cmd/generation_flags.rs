//! The flags of `infer` and `chat` that set keys of section `gen`. Their help, ranges and defaults come from the keys' definitions.
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};

use crate::config::{Config, Flag, OptionDef, schema};
use crate::error::{Error, Result};

/// A flag and the key that it sets.
struct Setting {
    flag: &'static str,
    key: &'static str,
    value_name: &'static str,
    /// Added to the key's documentation.
    more: &'static str,
}

const SAMPLES: &str = "; turns on sampling";

const SETTINGS: [Setting; 12] = [
    Setting { flag: "--max-new-tokens", key: "gen.max_new_tokens", value_name: "N", more: "" },
    Setting { flag: "--min-new-tokens", key: "gen.min_new_tokens", value_name: "N", more: "" },
    Setting {
        flag: "--temperature",
        key: "gen.temperature",
        value_name: "T",
        more: "; turns on sampling, and 0 turns it off",
    },
    Setting { flag: "--top-k", key: "gen.top_k", value_name: "K", more: SAMPLES },
    Setting { flag: "--top-p", key: "gen.top_p", value_name: "P", more: SAMPLES },
    Setting { flag: "--min-p", key: "gen.min_p", value_name: "P", more: SAMPLES },
    Setting { flag: "--repetition-penalty", key: "gen.repetition_penalty", value_name: "X", more: "" },
    Setting { flag: "--no-repeat-ngram-size", key: "gen.no_repeat_ngram_size", value_name: "N", more: "" },
    Setting { flag: "--num-beams", key: "gen.num_beams", value_name: "N", more: "" },
    Setting { flag: "--prompt-lookup-num-tokens", key: "gen.prompt_lookup_num_tokens", value_name: "N", more: "" },
    Setting { flag: "--seed", key: "gen.seed", value_name: "N", more: SAMPLES },
    Setting { flag: STOP, key: "gen.stop_strings", value_name: "TEXT", more: "; may be given more than once" },
];

const TEMPERATURE: &str = "--temperature";
const STOP: &str = "--stop";

impl Setting {
    fn definition(&self) -> Option<&'static OptionDef> {
        schema::options().find(|def| def.path() == self.key)
    }

    fn samples(&self) -> bool {
        self.more.contains("turns on sampling")
    }

    /// What the flag does, from the first line of its key's documentation.
    fn summary(def: &OptionDef) -> String {
        let summary = def.doc.lines().next().unwrap_or_default().trim().trim_end_matches('.');
        // Flags set `do_sample` themselves.
        let summary = summary.strip_prefix("With `do_sample`: ").unwrap_or(summary);
        let (first, rest) = summary.split_at(summary.chars().next().map_or(0, char::len_utf8));
        first.to_uppercase() + rest
    }

    fn argument(&self) -> Arg {
        let mut help = String::new();
        if let Some(def) = self.definition() {
            let default = (def.get)(&Config::default());
            let (summary, more, key, expected) = (Self::summary(def), self.more, self.key, def.expectation());
            help = format!("{summary}{more} (`{key}`: {expected}; default {default})");
        }
        let action = if self.flag == STOP { ArgAction::Append } else { ArgAction::Set };
        Arg::new(self.key).long(&self.flag[2..]).value_name(self.value_name).help(help).action(action)
    }
}

/// The flags that were given, with their values.
#[derive(Debug, Clone, Default)]
pub(super) struct GenerationFlags(Vec<Flag>);

impl clap::Args for GenerationFlags {
    fn augment_args(command: Command) -> Command {
        command.args(SETTINGS.iter().map(Setting::argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for GenerationFlags {
    fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
        let mut given = Vec::new();
        for Setting { flag: name, key, .. } in SETTINGS {
            let values: Vec<&String> = matches.get_many(key).into_iter().flatten().collect();
            let value = match values.as_slice() {
                [] => continue,
                [value] if name != STOP => (*value).clone(),
                several => serde_json::json!(several).to_string(),
            };
            given.push(Flag { name, key, value });
        }
        Ok(Self(given))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> std::result::Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl GenerationFlags {
    /// The error of reading a configuration with these flags; one about a flag's value says what the flag does.
    pub fn explained(error: Error) -> Error {
        let refused = |setting: &&Setting| error.message().starts_with(&format!("flag {}: ", setting.flag));
        let setting = SETTINGS.iter().find(refused).filter(|_| error.hint_text().is_none());
        match setting.and_then(|setting| Some((setting, setting.definition()?))) {
            Some((Setting { flag, value_name, .. }, def)) => {
                error.hint(format!("{flag} {value_name}: {}", Setting::summary(def)))
            }
            None => error,
        }
    }

    /// The flags for the resolver. A flag of sampling sets `gen.do_sample` too; `--temperature 0` sets it to `false`.
    ///
    /// # Errors
    /// [`crate::Kind::Config`]: `--temperature 0` and another flag of sampling contradict each other.
    pub fn flags(&self) -> Result<Vec<Flag>> {
        let mut flags = self.0.clone();
        let greedy = |flag: &Flag| flag.name == TEMPERATURE && flag.value.parse() == Ok(0.0);
        let samples = |flag: &&Flag| SETTINGS.iter().any(|setting| setting.flag == flag.name && setting.samples());
        let sampling: Vec<&Flag> = self.0.iter().filter(samples).collect();
        let is_greedy = self.0.iter().any(greedy);
        if let (true, [_, other, ..]) = (is_greedy, sampling.as_slice()) {
            return Err(Error::config(format!("{} contradicts --temperature 0, which does not sample", other.name))
                .hint("leave one of them out"));
        }
        if let Some(first) = sampling.first() {
            flags.retain(|flag| !greedy(flag));
            flags.push(Flag { name: first.name, key: "gen.do_sample", value: (!is_greedy).to_string() });
        }
        Ok(flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(words: &[&str]) -> Result<Vec<String>> {
        #[derive(clap::Parser)]
        struct Words {
            #[command(flatten)]
            generation: GenerationFlags,
        }
        let words = <Words as clap::Parser>::parse_from([&["infer"], words].concat());
        let flags = words.generation.flags()?;
        Ok(flags.iter().map(|flag| format!("{}={}", flag.key, flag.value)).collect())
    }

    #[test]
    fn every_flag_sets_a_key_of_the_generation() {
        for setting in &SETTINGS {
            let def = setting.definition().unwrap();
            assert_eq!(def.section, "gen");
            assert!(setting.flag == STOP || setting.flag[2..].replace('-', "_") == def.name, "{}", setting.flag);
        }
        assert_eq!(flags(&["--stop", "a", "--stop", "b"]).unwrap(), ["gen.stop_strings=[\"a\",\"b\"]"]);
        assert_eq!(flags(&["--stop", "5"]).unwrap(), ["gen.stop_strings=[\"5\"]"]);
    }

    #[test]
    fn flags_of_sampling_turn_it_on_and_temperature_zero_turns_it_off() {
        assert_eq!(flags(&["--num-beams", "2"]).unwrap(), ["gen.num_beams=2"]);
        assert_eq!(flags(&["--top-p", "0.5"]).unwrap(), ["gen.top_p=0.5", "gen.do_sample=true"]);
        assert_eq!(flags(&["--temperature", "0"]).unwrap(), ["gen.do_sample=false"]);
        assert!(flags(&["--temperature", "0", "--seed", "1"]).unwrap_err().message().contains("--seed contradicts"));
    }
}
