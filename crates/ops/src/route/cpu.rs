//! The routing itself, on the host: plain loops in a single task, because a router has few logits.
use super::{Expert, GroupScore, Groups, Router, Routing, Scores};
use crate::activation::Activation;

pub(super) fn route(logits: &Activation, bias: Option<&[f32]>, router: Router) -> Routing {
    let Router { per_token, groups, normalised, scale, .. } = router;
    let count = logits.features();
    let mut scores = logits.to_rows();
    let mut chosen = vec![(Vec::new(), Vec::new()); count];
    let mut order: Vec<usize> = Vec::with_capacity(count);
    let (mut sigmoids, mut biased) = (Vec::new(), Vec::new());
    for (row, scores) in scores.chunks_exact_mut(count).enumerate() {
        let s: &[f32] = match router.scores {
            Scores::Softmax => {
                softmax(scores);
                scores
            }
            Scores::Sigmoid => {
                sigmoids.clear();
                sigmoids.extend(scores.iter().map(|&x| sigmoid_of(x)));
                &sigmoids
            }
        };
        let choice = match bias {
            None => s,
            Some(bias) => {
                biased.clear();
                biased.extend(s.iter().zip(bias).map(|(s, bias)| s + bias));
                &biased
            }
        };
        candidates(choice, groups, &mut order);
        keep_best(choice, per_token, &mut order);
        let sum = normalised.map_or(1.0, |eps| order.iter().map(|&expert| s[expert]).sum::<f32>() + eps);
        for &expert in &order {
            chosen[expert].0.push(row);
            chosen[expert].1.push(s[expert] / sum * scale);
        }
    }
    let experts = chosen.into_iter().map(|(tokens, weights)| Expert { tokens: tokens.into(), weights: weights.into() });
    let experts = experts.collect();
    Routing { tokens: logits.tokens(), scores, experts, router, factors: Vec::new(), group: 1 }
}

/// Turns a row of logits into probabilities, in place.
fn softmax(row: &mut [f32]) {
    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for x in row.iter_mut() {
        *x = (*x - top).exp();
    }
    let sum: f32 = row.iter().sum();
    for x in row.iter_mut() {
        *x /= sum;
    }
}

fn sigmoid_of(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The experts that a token may be sent to, in rising order, with the limit on groups if there is one.
fn candidates(choice: &[f32], groups: Option<Groups>, order: &mut Vec<usize>) {
    order.clear();
    let Some(Groups { count, chosen, score }) = groups else { return order.extend(0..choice.len()) };
    let size = choice.len() / count;
    let best_two = |group: &[f32]| {
        let mut best = [f32::NEG_INFINITY; 2];
        for &score in group {
            if score > best[0] {
                best = [score, best[0]];
            } else if score > best[1] {
                best[1] = score;
            }
        }
        best
    };
    let of_group = |group: &[f32]| match (score, best_two(group)) {
        (GroupScore::Best, [best, _]) => best,
        (GroupScore::BestTwo, [best, second]) => best + second,
    };
    let scores: Vec<f32> = choice.chunks_exact(size).map(of_group).collect();
    let mut best: Vec<usize> = (0..count).collect();
    keep_best(&scores, chosen, &mut best);
    best.sort_unstable();
    order.extend(best.into_iter().flat_map(|group| group * size..(group + 1) * size));
}

/// Keeps the `count` experts with the largest scores, the largest first; of equal ones, the first in number.
fn keep_best(scores: &[f32], count: usize, order: &mut Vec<usize>) {
    let by_score = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
    if count < order.len() {
        order.select_nth_unstable_by(count, by_score);
        order.truncate(count);
    }
    order.sort_unstable_by(by_score);
}

/// For each expert, the number of its tokens and the sum of its probabilities.
pub(super) fn load(routing: &Routing) -> Vec<(f64, f64)> {
    let count = routing.experts.len();
    if routing.router.scores == Scores::Softmax {
        let sum = |expert: usize| routing.scores.iter().skip(expert).step_by(count).map(|&p| f64::from(p)).sum();
        let one = |(expert, it): (usize, &Expert)| (it.tokens.len() as f64, sum(expert));
        return routing.experts.iter().enumerate().map(one).collect();
    }
    let (mut load, mut order) = (vec![(0.0, 0.0); count], Vec::with_capacity(count));
    for row in routing.scores.chunks_exact(count) {
        let mut p = row.to_vec();
        softmax(&mut p);
        candidates(&p, None, &mut order);
        keep_best(&p, routing.router.per_token, &mut order);
        for &expert in &order {
            load[expert].0 += 1.0;
        }
        for (load, &p) in load.iter_mut().zip(&p) {
            load.1 += f64::from(p);
        }
    }
    load
}

/// Sets the gradient of an expert's weights; `gradient` is `[tokens, experts]`.
pub(super) fn set_weight_gradient(
    routing: &Routing,
    expert: usize,
    d_middle: &Activation,
    middle: &Activation,
    gradient: &mut [f32],
) {
    let (tokens, count) = (&routing.experts[expert].tokens, routing.experts.len());
    for (&token, d) in tokens.iter().zip(factor_gradients(&routing.weights(expert), d_middle, middle)) {
        gradient[token * count + expert] = d;
    }
}

/// Adds the bias's part to the gradient of an expert's weights: `d_out · b`, where `dy` is `w d_out`.
pub(super) fn add_weight_gradient(
    routing: &Routing,
    expert: usize,
    dy: &Activation,
    biases: &Activation,
    gradient: &mut [f32],
) {
    add_products(routing, expert, dy.dot(biases), gradient);
}

/// Adds one product for each token of an expert, divided by the token's weight, to the gradient of the weights
/// `[tokens, experts]`.
pub(super) fn add_products(
    routing: &Routing,
    expert: usize,
    products: impl IntoIterator<Item = f32>,
    gradient: &mut [f32],
) {
    let (tokens, count) = (&routing.experts[expert].tokens, routing.experts.len());
    for (&token, d) in tokens.iter().zip(over_factors(products, &routing.weights(expert))) {
        gradient[token * count + expert] += d;
    }
}

/// Turns `gradient [tokens, experts]`, that of the weights times factors, into that of the weights. `of_factors`
/// becomes each token's part of the gradient of the factors.
pub(super) fn scale_backward(routing: &Routing, gradient: &mut [f32], of_factors: &mut [f32]) {
    let count = routing.experts.len();
    for (expert, (Expert { tokens, weights }, factor)) in routing.experts.iter().zip(&routing.factors).enumerate() {
        for (&token, weight) in tokens.iter().zip(weights.iter()) {
            let at = token * count + expert;
            of_factors[at] = gradient[at] * weight;
            gradient[at] *= factor;
        }
    }
}

/// Turns the gradient of the weights `[tokens, experts]` into that of the logits, in place.
pub(super) fn backward(routing: &Routing, gradient: &mut [f32], balance: Option<&[f32]>) {
    let (count, Router { scores, normalised, scale, .. }) = (routing.experts.len(), routing.router);
    let score = |at: usize| match scores {
        Scores::Softmax => routing.scores[at],
        Scores::Sigmoid => sigmoid_of(routing.scores[at]),
    };
    if let Some(eps) = normalised {
        // w = c s / S with S = sum s + eps: ds = (c dw - sum dw w) / S, for the chosen.
        let mut sums = vec![(0.0f32, 0.0f32); gradient.len() / count];
        for (expert, Expert { tokens, weights }) in routing.experts.iter().enumerate() {
            for (&token, weight) in tokens.iter().zip(weights.iter()) {
                sums[token].0 += score(token * count + expert);
                sums[token].1 += gradient[token * count + expert] * weight;
            }
        }
        for (expert, it) in routing.experts.iter().enumerate() {
            for &token in &it.tokens[..] {
                let d = &mut gradient[token * count + expert];
                *d = (scale * *d - sums[token].1) / (sums[token].0 + eps);
            }
        }
    } else {
        for d in gradient.iter_mut() {
            *d *= scale;
        }
    }
    match scores {
        Scores::Softmax => {
            for (d, p) in gradient.chunks_exact_mut(count).zip(routing.scores.chunks_exact(count)) {
                softmax_backward(p, balance, d);
            }
        }
        Scores::Sigmoid => {
            for (d, x) in gradient.iter_mut().zip(&routing.scores) {
                let s = sigmoid_of(*x);
                *d *= s * (1.0 - s);
            }
            let rows = gradient.chunks_exact_mut(count).zip(routing.scores.chunks_exact(count));
            for (d, x) in rows.filter(|_| balance.is_some()) {
                let (mut p, mut of_balance) = (x.to_vec(), vec![0.0; count]);
                softmax(&mut p);
                softmax_backward(&p, balance, &mut of_balance);
                d.iter_mut().zip(&of_balance).for_each(|(d, balance)| *d += balance);
            }
        }
    }
}

/// Turns the gradient `d` of a row of probabilities `p`, to which `balance` is added first, into that of the logits.
fn softmax_backward(p: &[f32], balance: Option<&[f32]>, d: &mut [f32]) {
    if let Some(balance) = balance {
        d.iter_mut().zip(balance).for_each(|(d, balance)| *d += balance);
    }
    let along: f32 = d.iter().zip(p).map(|(d, p)| d * p).sum();
    d.iter_mut().zip(p).for_each(|(d, p)| *d = p * (*d - along));
}

/// The gradient of each token's factor. `d_middle` already contains the factor.
fn factor_gradients(factors: &[f32], d_middle: &Activation, middle: &Activation) -> Vec<f32> {
    over_factors(d_middle.dot(middle), factors).collect()
}

/// Divides each product by the factor that it contains; 0 if the factor is 0.
fn over_factors(products: impl IntoIterator<Item = f32>, factors: &[f32]) -> impl Iterator<Item = f32> {
    products.into_iter().zip(factors).map(|(sum, &factor)| if factor == 0.0 { 0.0 } else { sum / factor })
}

/// The sigmoid of `logits [tokens, 1]`, on the host.
pub(super) fn sigmoid(logits: &Activation) -> Vec<f32> {
    logits.to_rows().into_iter().map(sigmoid_of).collect()
}

pub(super) fn sigmoid_backward(factors: &[f32], d_middle: &Activation, middle: &Activation) -> Vec<f32> {
    let d = factor_gradients(factors, d_middle, middle);
    d.iter().zip(factors).map(|(d, g)| d * g * (1.0 - g)).collect()
}
