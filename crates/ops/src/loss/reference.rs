//! The definitions in f64, on rows.
use super::Terms;

/// Each token's negative log-likelihood; `logits [tokens, vocabulary]`.
pub(super) fn cross_entropy(logits: &[f64], targets: &[u32], vocabulary: usize) -> Vec<f64> {
    let one = |(row, &target): (&[f64], &u32)| {
        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top - row[target as usize]
    };
    logits.chunks(vocabulary).zip(targets).map(one).collect()
}

/// The objective of [`super::gradient`], each token by its scale.
pub(super) fn objective(logits: &[f64], targets: &[u32], scales: &[f32], terms: Terms) -> f64 {
    let vocabulary = logits.len() / targets.len();
    let one = |((row, &target), &scale): ((&[f64], &u32), &f32)| {
        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() + top;
        // As the LabelSmoother of Transformers: a share of the mean over the vocabulary of -log p.
        let spread = row.iter().map(|x| lse - x).sum::<f64>() / vocabulary as f64;
        let (smoothing, z) = (f64::from(terms.smoothing), f64::from(terms.z));
        let nll = lse - row[target as usize];
        f64::from(scale) * ((1.0 - smoothing) * nll + smoothing * spread + z * lse * lse)
    };
    logits.chunks(vocabulary).zip(targets).zip(scales).map(one).sum()
}

pub(super) struct LinearCase {
    pub hidden: usize,
    pub outputs: usize,
    pub softcap: Option<f32>,
    pub squared: bool,
    pub terms: Terms,
    pub weights: Vec<f32>,
    pub targets: Vec<u32>,
}

/// The objective of a linear head on `h`, in f64.
pub(super) fn linear(h: &[f64], w: &[f64], case: &LinearCase) -> f64 {
    let hidden = case.hidden;
    let logits: Vec<f64> = h
        .chunks(hidden)
        .flat_map(|h| w.chunks(hidden).map(|w| h.iter().zip(w).map(|(h, w)| h * w).sum::<f64>()).collect::<Vec<_>>())
        .map(|logit| case.softcap.map_or(logit, |cap| f64::from(cap) * (logit / f64::from(cap)).tanh()))
        .collect();
    let one = |(token, row): (usize, &[f64])| {
        let weight = case.weights.get(token).map_or(1.0, |&weight| f64::from(weight));
        let target = case.targets[token];
        if case.squared {
            return weight * (row[0] - f64::from(f32::from_bits(target))).powi(2);
        }
        let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        let (smoothing, z) = (f64::from(case.terms.smoothing), f64::from(case.terms.z));
        let spread = lse - row.iter().sum::<f64>() / row.len() as f64;
        weight * ((1.0 - smoothing) * (lse - row[target as usize]) + smoothing * spread + z * lse * lse)
    };
    logits.chunks(case.outputs).enumerate().map(one).sum()
}
