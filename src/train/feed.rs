//! From sampled rows to the batches of one optimizer step.
use crate::data::batch::{Batch, Example};

/// Lays each micro-batch's rows end to end. A micro-batch of more than `max_tokens` tokens is walked in parts, cut
/// between sequences; a sequence that alone is longer stays whole. The step's result does not depend on the cuts: its
/// loss is divided by the label tokens of the whole step, and dropout counts tokens through the step.
pub fn batches<'a>(
    micro_batches: &[Vec<Vec<usize>>],
    example: impl Fn(usize) -> &'a Example,
    max_tokens: Option<usize>,
) -> Vec<Batch> {
    let limit = max_tokens.unwrap_or(usize::MAX);
    let mut out: Vec<Batch> = Vec::new();
    let mut first_row = 0;
    let mut push = |part: &mut Vec<&'a Example>| {
        if !part.is_empty() {
            let batch = Batch { first_row, ..Batch::from_examples(part.drain(..)) };
            first_row += batch.tokens.len() as u64;
            out.push(batch);
        }
    };
    for rows in micro_batches {
        let mut part = Vec::new();
        let mut tokens = 0;
        for example in rows.iter().flatten().map(|&index| example(index)) {
            if tokens + example.input_ids.len() > limit {
                push(&mut part);
                tokens = 0;
            }
            tokens += example.input_ids.len();
            part.push(example);
        }
        push(&mut part);
    }
    out
}

/// Where a row's last answer begins: the start of its last unbroken run of labels. Nothing where a row has no labels,
/// or no prompt before them.
pub fn answer_start(example: &Example) -> Option<usize> {
    use crate::data::batch::IGNORE;
    let end = example.labels.iter().rposition(|&label| label != IGNORE)?;
    let start = example.labels[..=end].iter().rposition(|&label| label == IGNORE)? + 1;
    Some(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::batch::IGNORE;

    fn examples() -> Vec<Example> {
        let row = |length: usize| Example {
            input_ids: (0..length as u32).collect(),
            labels: (0..length as i32).map(|token| if token < 2 { IGNORE } else { token }).collect(),
        };
        [4, 5, 3, 9].map(row).to_vec()
    }

    #[test]
    fn long_micro_batches_are_cut_between_sequences_and_dropout_counts_through() {
        let examples = examples();
        let micro_batches = [vec![vec![0], vec![1]], vec![vec![2, 3]]];
        let whole = batches(&micro_batches, |index| &examples[index], None);
        assert_eq!(
            whole.iter().map(|batch| (batch.tokens.len(), batch.first_row)).collect::<Vec<_>>(),
            [(9, 0), (12, 9)]
        );
        assert_eq!(whole[1].cu_seqlens, [0, 3, 12]);

        let parts = batches(&micro_batches, |index| &examples[index], Some(8));
        let shape: Vec<_> = parts.iter().map(|batch| (batch.tokens.len(), batch.first_row)).collect();
        assert_eq!(shape, [(4, 0), (5, 4), (3, 9), (9, 12)]);
        let labels = |batches: &[Batch]| batches.iter().map(Batch::label_tokens).sum::<usize>();
        assert_eq!(labels(&parts), labels(&whole));
    }

    #[test]
    fn the_answer_is_the_last_run_of_labels() {
        let row = |labels: &[i32]| Example { input_ids: vec![1; labels.len()], labels: labels.to_vec() };
        assert_eq!(answer_start(&row(&[IGNORE, 5, IGNORE, 6, 7, IGNORE])), Some(3));
        assert_eq!(answer_start(&row(&[5, 6])), None, "no prompt");
        assert_eq!(answer_start(&row(&[IGNORE, IGNORE])), None, "no answer");
    }
}
