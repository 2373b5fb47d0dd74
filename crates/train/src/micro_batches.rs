//! Turns the sampled rows of one optimizer step into batches, each small enough for one pass.
use tunesmith_base::error::Result;
use tunesmith_comm::World;
use tunesmith_data::batch::Batch;
use tunesmith_data::{Split, Step};

/// The micro-batches of a step. One with more than `max_tokens` tokens is split between sequences; a longer sequence stays
/// whole. The result of the step does not depend on the split: the loss is divided by the label tokens of the whole step,
/// and the dropout counter runs through the step.
///
/// # Errors
/// [`tunesmith_base::Kind::Io`]: the tokens cannot be read from disk.
pub fn batches(split: &Split, step: &Step, max_tokens: Option<usize>) -> Result<Vec<Batch>> {
    batches_of_rank(split, step, max_tokens, World::ALONE)
}

/// The micro-batches of one rank. Ranks take micro-batches in turn, so their numbers differ by one at most. The dropout
/// counter runs through the whole step, so its masks do not depend on the number of ranks.
///
/// # Errors
/// As [`batches`].
pub(crate) fn batches_of_rank(
    split: &Split,
    step: &Step,
    max_tokens: Option<usize>,
    world: World,
) -> Result<Vec<Batch>> {
    let limit = max_tokens.unwrap_or(usize::MAX);
    let (mut batches, mut first_row) = (Vec::new(), 0);
    for (number, micro_batch) in step.iter().enumerate() {
        let examples = || micro_batch.iter().flatten().copied();
        if number % world.size != world.rank {
            first_row += examples().map(|example| split.length(example) as u64).sum::<u64>();
            continue;
        }
        let mut batch = Batch { first_row, cu_seqlens: vec![0], ..Batch::default() };
        let indices: Vec<usize> = examples().collect();
        for (&example, images) in indices.iter().zip(split.images(&indices)?) {
            let (sequences, weight) = split.sequences(example)?;
            for (number, sequence) in sequences.iter().enumerate() {
                let tokens = batch.tokens.len();
                if tokens > 0 && tokens + sequence.input_ids.len() > limit {
                    first_row += tokens as u64;
                    let next = Batch { first_row, cu_seqlens: vec![0], ..Batch::default() };
                    batches.push(std::mem::replace(&mut batch, next));
                }
                split.push(&mut batch, sequence, weight, images.get(number).map_or(&[], Vec::as_slice));
            }
        }
        first_row += batch.tokens.len() as u64;
        batches.push(batch);
    }
    Ok(batches)
}

/// Starts to read the images of a later step in the background: those of one rank's micro-batches.
pub(crate) fn read_ahead(split: &Split, step: &Step, world: World) {
    let own = step.iter().skip(world.rank).step_by(world.size);
    split.read_ahead(&own.flatten().flatten().copied().collect::<Vec<_>>());
}

#[cfg(test)]
mod tests {
    use super::*;
    use tunesmith_data::batch::{Example, IGNORE};

    #[test]
    fn long_micro_batches_are_cut_between_sequences_and_dropout_counts_through() {
        let example = |length: u32| {
            let labels = (0..length as i32).map(|token| if token < 2 { IGNORE } else { token }).collect();
            Example { input_ids: (0..length).collect(), labels }
        };
        let split = Split::from_examples(&[4, 5, 3, 9].map(example)).unwrap();
        let batches = |split: &Split, step: &Step, limit| batches(split, step, limit).unwrap();
        let step = vec![vec![vec![0], vec![1]], vec![vec![2, 3]]];
        let shape = |batches: &[Batch]| -> Vec<_> {
            batches.iter().map(|batch| (batch.cu_seqlens.clone(), batch.first_row)).collect()
        };
        let whole = batches(&split, &step, None);
        assert_eq!(shape(&whole), [(vec![0, 4, 9], 0), (vec![0, 3, 12], 9)]);
        let parts = batches(&split, &step, Some(8));
        assert_eq!(shape(&parts), [(vec![0, 4], 0), (vec![0, 5], 4), (vec![0, 3], 9), (vec![0, 9], 12)]);
        let labels = |batches: &[Batch]| batches.iter().map(Batch::label_tokens).sum::<usize>();
        assert_eq!(labels(&parts), labels(&whole));
        assert_eq!(shape(&batches(&split, &step, Some(12))), shape(&whole), "what fits is not cut");

        let of = |rank| batches_of_rank(&split, &step, None, World { rank, size: 2, ..World::ALONE }).unwrap();
        assert_eq!([of(0), of(1)].concat(), whole, "ranks share the step, and dropout counts on");
        let third = batches_of_rank(&split, &step, None, World { rank: 2, size: 3, ..World::ALONE }).unwrap();
        assert_eq!(third, [], "more ranks than micro-batches");
    }
}
