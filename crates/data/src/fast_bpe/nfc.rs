//! Recognizes texts that NFC leaves unchanged. NFC is the normalization of Qwen's tokenizers.

/// Characters that NFC never changes, alone or next to each other: Latin, Greek, Cyrillic, Hebrew and Arabic letters,
/// punctuation, arrows, signs, kana, Chinese characters, Hangul syllables, full-width forms, emoji. The list is not
/// complete.
const STABLE: &[(char, char)] = &[
    ('\0', '\u{2ff}'),
    ('\u{391}', '\u{3ce}'),
    ('\u{400}', '\u{482}'),
    ('\u{48a}', '\u{52f}'),
    ('\u{5d0}', '\u{5ea}'),
    ('\u{621}', '\u{64a}'),
    ('\u{2010}', '\u{205e}'),
    ('\u{20a0}', '\u{20c0}'),
    ('\u{2190}', '\u{2328}'),
    ('\u{2460}', '\u{2adb}'),
    ('\u{3000}', '\u{3029}'),
    ('\u{3041}', '\u{3096}'),
    ('\u{30a1}', '\u{30ff}'),
    ('\u{4e00}', '\u{9fff}'),
    ('\u{ac00}', '\u{d7a3}'),
    ('\u{ff01}', '\u{ff9d}'),
    ('\u{1f300}', '\u{1faff}'),
];

/// Whether NFC certainly leaves `text` unchanged. False does not mean that NFC changes it.
pub(super) fn stays(text: &str) -> bool {
    text.is_ascii() || text.chars().all(|letter| letter < '\u{300}' || stable(letter))
}

fn stable(letter: char) -> bool {
    let next = STABLE.partition_point(|(first, _)| *first <= letter);
    next > 0 && letter <= STABLE[next - 1].1
}

#[cfg(test)]
mod tests {
    use super::*;
    use unicode_normalization_alignments::char::canonical_combining_class;
    use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

    /// By the quick check of Unicode's annex 15: a text of characters that pass it, none of which combines, is in NFC.
    #[test]
    fn characters_that_stay_pass_the_quick_check_and_do_not_combine() {
        for letter in (0..=0x10_ffff).filter_map(char::from_u32).filter(|&letter| stable(letter)) {
            assert_eq!(is_nfc_quick([letter].into_iter()), IsNormalized::Yes, "{letter:?}");
            assert_eq!(canonical_combining_class(letter), 0, "{letter:?}");
        }
        assert!(stable('é') && stable('漢') && stable('🙂') && !stable('\u{301}') && !stable('\u{212b}'));
    }
}
