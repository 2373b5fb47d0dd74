//! The definition in f64, on rows.
use super::{Groups, Router, Scores};

/// The largest `count` of `candidates` by their scores, the first of equal ones.
fn best(scores: &[f64], mut candidates: Vec<usize>, count: usize) -> Vec<usize> {
    candidates.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    candidates.truncate(count);
    candidates
}

/// The scores `[tokens, experts]`.
pub(super) fn scores(logits: &[f64], experts: usize, scores: Scores) -> Vec<f64> {
    let one = |row: &[f64]| {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        let score = |x: &f64| match scores {
            Scores::Softmax => x.exp() / sum,
            Scores::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        };
        row.iter().map(score).collect::<Vec<f64>>()
    };
    logits.chunks(experts).flat_map(one).collect()
}

/// The weights `[tokens, experts]`; zero where an expert is not chosen.
pub(super) fn weights(logits: &[f64], experts: usize, bias: Option<&[f32]>, router: Router) -> Vec<f64> {
    let one = |s: &[f64]| {
        let bias = |expert: usize| bias.map_or(0.0, |bias| f64::from(bias[expert]));
        let choice: Vec<f64> = s.iter().enumerate().map(|(expert, s)| s + bias(expert)).collect();
        let candidates = match router.groups {
            None => (0..experts).collect(),
            Some(Groups { count, chosen, score }) => {
                let size = experts / count;
                let sum = |group: usize| {
                    let members = (group * size..(group + 1) * size).collect();
                    best(&choice, members, score.experts()).into_iter().map(|expert| choice[expert]).sum()
                };
                let sums: Vec<f64> = (0..count).map(sum).collect();
                let groups = best(&sums, (0..count).collect(), chosen);
                (0..experts).filter(|expert| groups.contains(&(expert / size))).collect()
            }
        };
        let chosen = best(&choice, candidates, router.per_token);
        let sum = router.normalised.map_or(1.0, |eps| chosen.iter().map(|&e| s[e]).sum::<f64>() + f64::from(eps));
        let weight = |e: usize| if chosen.contains(&e) { f64::from(router.scale) * s[e] / sum } else { 0.0 };
        (0..experts).map(weight).collect::<Vec<f64>>()
    };
    scores(logits, experts, router.scores).chunks(experts).flat_map(one).collect()
}
