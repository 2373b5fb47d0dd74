//! Positions for M-RoPE (Qwen-VL): a position has a time, a row and a column. For a text token the three are equal and
//! counted; the rows of an image have their place in the image.
use std::ops::Range;
use std::sync::Arc;
use tunesmith_config::arch::{Frequencies, Rope as Rule};
use tunesmith_config::vision::Mrope;
use tunesmith_ops::activation::Pool;
use tunesmith_ops::rope::{Pairing, Rope, interleaved_sections, sections};

/// Positions of the tokens of a walk, text after text.
#[derive(Debug)]
pub struct Positions {
    /// Which component turns each frequency: 0 time, 1 row, 2 column.
    components: Vec<usize>,
    /// Time, row and column of each token.
    of: [Vec<u32>; 3],
}

/// An image in a text: the places of its rows, and how many rows and columns they form.
pub type Shown = (Range<usize>, [usize; 2]);

impl Positions {
    pub fn new(rule: &Mrope) -> Self {
        let components = if rule.interleaved { interleaved_sections(&rule.sections) } else { sections(&rule.sections) };
        Self { components, of: Default::default() }
    }

    fn push(&mut self, at: [usize; 3]) {
        self.of.iter_mut().zip(at).for_each(|(of, at)| of.push(at as u32));
    }

    /// Appends the positions of the tokens at the places `fresh` of a text. `pictures` are all images of the text,
    /// rising. After an image, counting continues behind its longer side.
    pub fn extend(&mut self, pictures: &[Shown], fresh: Range<usize>) {
        // The place up to which the text is read, and the position there.
        let (mut place, mut position) = (0, 0);
        let text = |this: &mut Self, place: &mut usize, position: &mut usize, end: usize| {
            for at in fresh.start.max(*place)..fresh.end.min(end) {
                this.push([*position + at - *place; 3]);
            }
            *position += end - *place;
            *place = end;
        };
        for (run, [rows, columns]) in pictures {
            if run.start >= fresh.end {
                break;
            }
            text(self, &mut place, &mut position, run.start);
            for at in fresh.start.max(run.start)..fresh.end.min(run.end) {
                let patch = at - run.start;
                self.push([position, position + patch / columns, position + patch % columns]);
            }
            (place, position) = (run.end, position + rows.max(columns));
        }
        if fresh.end > place {
            text(self, &mut place, &mut position, fresh.end);
        }
    }

    /// The rotary table of these tokens by one rule. `texts` has the number of these tokens in each text, and the
    /// text's length.
    pub fn table(&self, pool: &Arc<Pool>, texts: impl Iterator<Item = (usize, usize)>, rule: &Rule) -> Rope {
        let rules: Vec<(usize, Frequencies)> =
            texts.map(|(tokens, length)| (tokens, rule.frequencies(length))).collect();
        let parts = rules.iter().map(|(tokens, found)| (*tokens, (found.inv_freq.as_slice(), found.attention_factor)));
        let of: Vec<&[u32]> = self.of.iter().map(Vec::as_slice).collect();
        Rope::with_components(pool, &of, &self.components, parts).paired(pairing(rule))
    }
}

/// Which features a rule turns together.
pub fn pairing(rule: &Rule) -> Pairing {
    if rule.interleaved { Pairing::Interleaved } else { Pairing::Half }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_goes_on_behind_the_longer_side_of_a_picture() {
        let rule = Mrope { sections: [1, 1, 1], interleaved: false };
        let pictures = [(2..8, [2, 3]), (9..13, [4, 1])];
        let mut whole = Positions::new(&rule);
        whole.extend(&pictures, 0..15);
        assert_eq!(whole.of[0], [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 10, 11]);
        assert_eq!(whole.of[1], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(whole.of[2], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 6, 10, 11]);
        for cut in 0..15 {
            let mut parts = Positions::new(&rule);
            parts.extend(&pictures, 0..cut);
            parts.extend(&pictures, cut..15);
            assert_eq!(parts.of, whole.of, "cut at {cut}");
        }
    }
}
