//! Greedy decoding without a cache: each new token runs the whole text again, several texts in one pass.
use crate::data::batch::Batch;
use crate::error::Result;
use crate::model::Model;

/// Tokens that one pass holds, if it holds more than one text.
const PASS_TOKENS: usize = 4096;

/// For each prompt the most probable continuation, token by token, until a token of `stop` (not included), `max_new`
/// tokens, or a text of `context` tokens. An empty prompt has an empty continuation. Nothing at all once `go_on`, asked
/// before each token, says no.
///
/// # Errors
/// [`crate::Kind::Data`]: a token outside the vocabulary.
pub fn greedy(
    model: &Model,
    prompts: &[Vec<u32>],
    max_new: usize,
    context: usize,
    stop: &[u32],
    go_on: &dyn Fn() -> bool,
) -> Result<Option<Vec<Vec<u32>>>> {
    let mut texts = prompts.to_vec();
    let mut open: Vec<usize> = (0..prompts.len()).filter(|&index| !prompts[index].is_empty()).collect();
    for _ in 0..max_new {
        open.retain(|&index| texts[index].len() < context);
        if open.is_empty() {
            break;
        }
        let mut still = Vec::with_capacity(open.len());
        let mut rest = open.as_slice();
        while !rest.is_empty() {
            if !go_on() {
                return Ok(None);
            }
            let mut tokens = 0;
            let fits = |&&index: &&usize| {
                tokens += texts[index].len();
                tokens <= PASS_TOKENS
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (now, later) = rest.split_at(count);
            let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
            for &index in now {
                batch.tokens.extend(&texts[index]);
                batch.cu_seqlens.push(batch.tokens.len());
            }
            let rows: Vec<usize> = batch.cu_seqlens[1..].iter().map(|end| end - 1).collect();
            let logits = model.logits(&batch, &rows)?;
            for (&index, row) in now.iter().zip(logits.chunks(model.arch.vocab_size)) {
                let next = most_probable(row);
                if !stop.contains(&next) {
                    texts[index].push(next);
                    still.push(index);
                }
            }
            rest = later;
        }
        open = still;
    }
    Ok(Some(texts.into_iter().zip(prompts).map(|(text, prompt)| text[prompt.len()..].to_vec()).collect()))
}

/// The first of the largest.
fn most_probable(row: &[f32]) -> u32 {
    let mut best = 0;
    for (index, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = index;
        }
    }
    best as u32
}
