//! Similarity of texts: word hashes, shingles, `MinHash` signatures of 128 permutations, and the bands by which
//! locality-sensitive hashing finds likely pairs. All constants are fixed: the same rows give the same pairs on every
//! machine.

/// Permutations per signature, as in `datasketch`.
pub const PERMUTATIONS: usize = 128;
/// Words per shingle, as in Lee et al., "Deduplicating Training Data Makes Language Models Better".
pub const SHINGLE: usize = 5;

/// Upper bound of the numbers in a signature, exclusive.
const LIMIT: u32 = 1 << 31;

/// Mixes 64 bits (the finalizer of `SplitMix64`).
const fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Appends a hash of each word of a text to `words`. A word is a run of letters and digits, regardless of case. In
/// scripts without spaces between words, each letter is a word.
pub fn add_words(text: &str, words: &mut Vec<u64>) {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    let (mut word, mut open) = (OFFSET, false);
    let mut close = |word: &mut u64, open: &mut bool| {
        if std::mem::take(open) {
            words.push(mixed(*word));
        }
        *word = OFFSET;
    };
    for letter in text.chars() {
        if !letter.is_alphanumeric() {
            close(&mut word, &mut open);
            continue;
        }
        let alone = matches!(letter, '\u{0e00}'..='\u{0eff}' | '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}' | '\u{20000}'..='\u{3ffff}');
        if alone {
            close(&mut word, &mut open);
        }
        for lower in letter.to_lowercase() {
            word = (word ^ u64::from(lower)).wrapping_mul(0x0100_0000_01b3);
        }
        open = true;
        if alone {
            close(&mut word, &mut open);
        }
    }
    close(&mut word, &mut open);
}

/// One hash of a sequence of words.
pub fn sequence(words: &[u64]) -> u64 {
    words.iter().fold(words.len() as u64, |hash, &word| mixed(hash.rotate_left(5) ^ word))
}

/// Hashes of all sequences of `size` words, sorted, each once. A shorter text has one hash, of all its words.
pub fn shingles(words: &[u64], size: usize) -> Vec<u64> {
    let mut hashes: Vec<u64> = match words {
        [] => Vec::new(),
        short if short.len() < size => vec![sequence(short)],
        long => long.windows(size).map(sequence).collect(),
    };
    hashes.sort_unstable();
    hashes.dedup();
    hashes
}

/// The `MinHash` signature of a text; `None` for a text without words.
pub fn signature(words: &[u64]) -> Option<Vec<u32>> {
    let shingles = shingles(words, SHINGLE);
    if shingles.is_empty() {
        return None;
    }
    let mut least = vec![u32::MAX; PERMUTATIONS];
    let factors: Vec<(u64, u64)> =
        (0..PERMUTATIONS as u64).map(|nth| (mixed(2 * nth + 1) | 1, mixed(2 * nth + 2))).collect();
    for shingle in shingles {
        for (least, (factor, term)) in least.iter_mut().zip(&factors) {
            // The upper bits of a product are a universal hash.
            let hash = (shingle.wrapping_mul(*factor).wrapping_add(*term) >> 33) as u32;
            *least = (*least).min(hash);
        }
    }
    debug_assert!(least.iter().all(|&number| number < LIMIT));
    Some(least)
}

/// The estimated Jaccard similarity of two texts: the share of permutations in which their signatures agree.
pub fn similarity(one: &[u32], other: &[u32]) -> f64 {
    let same = one.iter().zip(other).filter(|(one, other)| one == other).count();
    same as f64 / one.len().max(1) as f64
}

/// How many bands, and how many rows per band, minimize the sum of false positives and false negatives at this
/// threshold.
pub fn bands(threshold: f64) -> (usize, usize) {
    const STEPS: usize = 200;
    let error = |bands: usize, rows: usize| -> f64 {
        let candidate = |similarity: f64| 1.0 - (1.0 - similarity.powi(rows as i32)).powi(bands as i32);
        let at = |step: usize| (step as f64 + 0.5) / STEPS as f64;
        (0..STEPS)
            .map(at)
            .map(|similarity| if similarity < threshold { candidate(similarity) } else { 1.0 - candidate(similarity) })
            .sum()
    };
    let choices = (1..=PERMUTATIONS).flat_map(|rows| (1..=PERMUTATIONS / rows).map(move |bands| (bands, rows)));
    let best =
        choices.map(|(bands, rows)| (error(bands, rows), bands, rows)).min_by(|one, other| one.0.total_cmp(&other.0));
    best.map_or((PERMUTATIONS, 1), |(_, bands, rows)| (bands, rows))
}

/// How many different words of a text a [`word_sketch`] holds at most.
const SKETCH: usize = 256;

/// The hashes of the different words of a text, 30 bits each, sorted. If there are more than 256, only the 256
/// smallest, which are a random sample of the words.
pub fn word_sketch(words: &[u64]) -> Vec<u32> {
    let mut sketch: Vec<u32> = words.iter().map(|word| (word >> 34) as u32).collect();
    sketch.sort_unstable();
    sketch.dedup();
    sketch.truncate(SKETCH);
    sketch
}

/// The Jaccard similarity of the word sets of two sketches. It is exact if both texts have fewer than 256 different
/// words; otherwise it is estimated from the smallest hashes of both.
pub fn shared_words(one: &[u32], other: &[u32]) -> f64 {
    let whole = one.len() < SKETCH && other.len() < SKETCH;
    let most = if whole { usize::MAX } else { SKETCH };
    let (mut at, mut to, mut all, mut both) = (0, 0, 0_usize, 0_usize);
    while all < most {
        match (one.get(at), other.get(to)) {
            (None, None) => break,
            (Some(left), Some(right)) if left == right => (at, to, both) = (at + 1, to + 1, both + 1),
            (Some(left), right) if right.is_none_or(|right| left < right) => at += 1,
            _ => to += 1,
        }
        all += 1;
    }
    both as f64 / all.max(1) as f64
}

/// The bucket of a sketch in a band: a hash of the band's part of the `MinHash` signature of its words.
pub fn band_of_words(sketch: &[u32], band: usize, rows: usize) -> u64 {
    (band * rows..(band + 1) * rows).fold(0, |key, nth| {
        let salt = mixed(nth as u64 + 1);
        let least = sketch.iter().map(|&word| mixed(u64::from(word) ^ salt)).min().unwrap_or(u64::MAX);
        mixed(key ^ least).rotate_left(7)
    })
}

/// The bucket of a signature in a band: a hash of its numbers there.
pub fn band(signature: &[u32], band: usize, rows: usize) -> u64 {
    signature[band * rows..(band + 1) * rows]
        .iter()
        .fold(0, |key, &number| mixed(key ^ u64::from(number)).rotate_left(7))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<u64> {
        let mut words = Vec::new();
        add_words(text, &mut words);
        words
    }

    #[test]
    fn words_have_no_case_and_no_punctuation() {
        assert_eq!(words("Hello, World! 42"), words("hello   world (42)"));
        assert_ne!(words("hello world"), words("helloworld"));
        assert_eq!(words("漢字x").len(), 3);
        assert_eq!(words("... --").len(), 0);
    }

    #[test]
    fn the_estimate_is_near_the_true_likeness() {
        let text = |from: usize, to: usize| (from..to).map(|word| format!("word{word}")).collect::<Vec<_>>().join(" ");
        for (one, other) in
            [((0, 400), (0, 400)), ((0, 400), (40, 440)), ((0, 300), (150, 450)), ((0, 200), (500, 700))]
        {
            let (one, other) = (words(&text(one.0, one.1)), words(&text(other.0, other.1)));
            let (first, second) = (shingles(&one, SHINGLE), shingles(&other, SHINGLE));
            let both = first.iter().filter(|hash| second.binary_search(hash).is_ok()).count();
            let exact = both as f64 / (first.len() + second.len() - both) as f64;
            let estimate = similarity(&signature(&one).unwrap(), &signature(&other).unwrap());
            assert!((estimate - exact).abs() < 0.12, "{estimate} {exact}");
        }
        assert_eq!(signature(&[]), None);
    }

    #[test]
    fn bands_follow_the_threshold() {
        for threshold in [0.5, 0.7, 0.8, 0.95] {
            let (bands, rows) = bands(threshold);
            assert!(bands * rows <= PERMUTATIONS);
            let chance = |similarity: f64| 1.0 - (1.0 - similarity.powi(rows as i32)).powi(bands as i32);
            assert!(chance((threshold + 0.1).min(0.99)) > 0.75 && chance(threshold - 0.3) < 0.2, "{threshold}");
        }
    }
}
