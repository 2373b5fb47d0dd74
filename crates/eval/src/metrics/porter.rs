//! Porter's stemmer with the extensions of the Natural Language Toolkit, which rouge-score and METEOR use:
//! M. Porter, "An algorithm for suffix stripping", Program 14.3 (1980), 130-137, and NLTK's `PorterStemmer`.

/// Exceptions to the rules.
const IRREGULAR: [(&str, &str); 16] = [
    ("sky", "sky"),
    ("skies", "sky"),
    ("dying", "die"),
    ("lying", "lie"),
    ("tying", "tie"),
    ("news", "news"),
    ("innings", "inning"),
    ("inning", "inning"),
    ("outings", "outing"),
    ("outing", "outing"),
    ("cannings", "canning"),
    ("canning", "canning"),
    ("howe", "howe"),
    ("proceed", "proceed"),
    ("exceed", "exceed"),
    ("succeed", "succeed"),
];

/// A suffix, its replacement, and the condition on the stem.
type Rule = (&'static str, &'static str, fn(&[char]) -> bool);

/// The stem of a word in lower case.
pub fn stem(word: &str) -> String {
    let word = word.to_lowercase();
    if let Some((_, stem)) = IRREGULAR.iter().find(|(irregular, _)| *irregular == word) {
        return (*stem).to_owned();
    }
    let mut letters: Vec<char> = word.chars().collect();
    if letters.len() <= 2 {
        return word;
    }
    for step in [step_1a, step_1b, step_1c, step_2, step_3, step_4, step_5a, step_5b] {
        letters = step(letters);
    }
    letters.into_iter().collect()
}

/// For each letter whether it is a consonant: `y` is one where the letter before it is not.
fn consonants(word: &[char]) -> Vec<bool> {
    let mut flags = Vec::with_capacity(word.len());
    for letter in word {
        flags.push(match letter {
            'a' | 'e' | 'i' | 'o' | 'u' => false,
            'y' => !flags.last().copied().unwrap_or(false),
            _ => true,
        });
    }
    flags
}

/// Porter's m: how often a vowel is followed by a consonant.
fn measure(stem: &[char]) -> usize {
    consonants(stem).windows(2).filter(|pair| !pair[0] && pair[1]).count()
}

fn positive(stem: &[char]) -> bool {
    measure(stem) > 0
}

fn above_one(stem: &[char]) -> bool {
    measure(stem) > 1
}

fn always(_: &[char]) -> bool {
    true
}

fn has_vowel(stem: &[char]) -> bool {
    consonants(stem).contains(&false)
}

fn ends_double_consonant(word: &[char]) -> bool {
    let length = word.len();
    length >= 2 && word[length - 1] == word[length - 2] && consonants(word)[length - 1]
}

/// Consonant, vowel, consonant other than w, x, y at the end; of two letters, vowel and consonant.
fn ends_cvc(word: &[char]) -> bool {
    match consonants(word).as_slice() {
        [.., true, false, true] => !matches!(word[word.len() - 1], 'w' | 'x' | 'y'),
        [false, true] => true,
        _ => false,
    }
}

/// The word without the suffix, if it ends so.
fn without<'a>(word: &'a [char], suffix: &str) -> Option<&'a [char]> {
    let length = suffix.chars().count();
    let rest = word.len().checked_sub(length)?;
    word[rest..].iter().copied().eq(suffix.chars()).then(|| &word[..rest])
}

fn with(stem: &[char], suffix: &str) -> Vec<char> {
    stem.iter().copied().chain(suffix.chars()).collect()
}

/// Applies the first rule whose suffix matches; if its condition fails, no rule.
fn apply(word: Vec<char>, rules: &[Rule]) -> Vec<char> {
    for (suffix, replacement, condition) in rules {
        if let Some(stem) = without(&word, suffix) {
            return if condition(stem) { with(stem, replacement) } else { word };
        }
    }
    word
}

fn step_1a(word: Vec<char>) -> Vec<char> {
    if word.len() == 4
        && let Some(stem) = without(&word, "ies")
    {
        return with(stem, "ie");
    }
    apply(word, &[("sses", "ss", always), ("ies", "i", always), ("ss", "ss", always), ("s", "", always)])
}

fn step_1b(word: Vec<char>) -> Vec<char> {
    if let Some(stem) = without(&word, "ied") {
        return with(stem, if word.len() == 4 { "ie" } else { "i" });
    }
    if let Some(stem) = without(&word, "eed") {
        return if positive(stem) { with(stem, "ee") } else { word };
    }
    let stem = ["ed", "ing"].iter().find_map(|suffix| without(&word, suffix).filter(|stem| has_vowel(stem)));
    let Some(stem) = stem.map(<[char]>::to_vec) else { return word };
    for ending in ["at", "bl", "iz"] {
        if without(&stem, ending).is_some() {
            return with(&stem, "e");
        }
    }
    if ends_double_consonant(&stem) {
        let double = matches!(stem.last(), Some('l' | 's' | 'z'));
        return if double { stem } else { stem[..stem.len() - 1].to_vec() };
    }
    if measure(&stem) == 1 && ends_cvc(&stem) { with(&stem, "e") } else { stem }
}

fn step_1c(word: Vec<char>) -> Vec<char> {
    apply(word, &[("y", "i", |stem| stem.len() > 1 && consonants(stem).last() == Some(&true))])
}

fn step_2(word: Vec<char>) -> Vec<char> {
    if let Some(stem) = without(&word, "alli").filter(|stem| positive(stem)) {
        return step_2(with(stem, "al"));
    }
    // The `l` of `logi` counts as part of the stem, so that `geologi` becomes `geolog`.
    if let Some(stem) = without(&word, "logi") {
        let with_l = &word[..=stem.len()];
        return if positive(with_l) { with(stem, "log") } else { word };
    }
    apply(
        word,
        &[
            ("ational", "ate", positive),
            ("tional", "tion", positive),
            ("enci", "ence", positive),
            ("anci", "ance", positive),
            ("izer", "ize", positive),
            ("bli", "ble", positive),
            ("alli", "al", positive),
            ("entli", "ent", positive),
            ("eli", "e", positive),
            ("ousli", "ous", positive),
            ("ization", "ize", positive),
            ("ation", "ate", positive),
            ("ator", "ate", positive),
            ("alism", "al", positive),
            ("iveness", "ive", positive),
            ("fulness", "ful", positive),
            ("ousness", "ous", positive),
            ("aliti", "al", positive),
            ("iviti", "ive", positive),
            ("biliti", "ble", positive),
            ("fulli", "ful", positive),
        ],
    )
}

fn step_3(word: Vec<char>) -> Vec<char> {
    apply(
        word,
        &[
            ("icate", "ic", positive),
            ("ative", "", positive),
            ("alize", "al", positive),
            ("iciti", "ic", positive),
            ("ical", "ic", positive),
            ("ful", "", positive),
            ("ness", "", positive),
        ],
    )
}

fn step_4(word: Vec<char>) -> Vec<char> {
    const SUFFIXES: [&str; 19] = [
        "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate",
        "iti", "ous", "ive", "ize",
    ];
    for suffix in SUFFIXES {
        if let Some(stem) = without(&word, suffix) {
            let fits = suffix != "ion" || matches!(stem.last(), Some('s' | 't'));
            return if fits && above_one(stem) { stem.to_vec() } else { word };
        }
    }
    word
}

fn step_5a(word: Vec<char>) -> Vec<char> {
    match without(&word, "e") {
        Some(stem) if measure(stem) > 1 || (measure(stem) == 1 && !ends_cvc(stem)) => stem.to_vec(),
        _ => word,
    }
}

fn step_5b(word: Vec<char>) -> Vec<char> {
    if without(&word, "ll").is_some() && above_one(&word[..word.len() - 1]) {
        return word[..word.len() - 1].to_vec();
    }
    word
}
