//! Reads adapters on mixture-of-experts models that were saved with Transformers 4. There each matrix of each expert was a
//! module with its own adapter; Transformers 5 stacks all experts in one parameter. PEFT converts such adapters too.
//!
//! Gate and up, with adapters `B1 A1` and `B3 A3`, become one matrix with `A = [A1; A3]` and `B = diag(B1, B3)`, of twice the rank.
//! In the stacked A the rows `e * rank ..` belong to expert e. In the stacked B column `i * experts + e` is expert e's column i.
use std::collections::BTreeMap;

use super::tensors::Tensors;
use tunesmith_model::targets::peft_name;

/// Names of an expert's gate, up and down projection, in the two styles of Transformers 4.
const MATRICES: [[&str; 3]; 2] = [["w1", "w3", "w2"], ["gate_proj", "up_proj", "down_proj"]];

type Tensor = (Vec<usize>, Vec<f32>);

/// `[gate, up, down][A, B]` of one expert.
type Expert = [[Option<Tensor>; 2]; 3];

/// Splits a name such as `model.layers.0.mlp.experts.3.w1.lora_A.weight` into the module of the experts, the expert's number, its
/// matrix (0 to 2), and 0 for A or 1 for B.
fn parse(name: &str) -> Option<(&str, usize, usize, usize)> {
    let at = name.find(".mlp.experts.")? + ".mlp.experts".len();
    let (module, rest) = (&name[..at], &name[at + 1..]);
    let mut parts = rest.split('.');
    let (expert, matrix) = (parts.next()?.parse().ok()?, parts.next()?);
    let part = parts.next()?;
    let side = ["lora_A", "lora_B"].iter().position(|side| *side == part)?;
    let matrix = MATRICES.iter().find_map(|names| names.iter().position(|name| *name == matrix))?;
    Some((module, expert, matrix, side))
}

fn pair(expert: &Expert, matrix: usize) -> Option<[&Tensor; 2]> {
    Some([expert[matrix][0].as_ref()?, expert[matrix][1].as_ref()?])
}

/// The tensors under their names in Transformers 5, with experts stacked. Tensors of an incomplete set of experts are dropped.
pub fn stacked(tensors: Tensors) -> Tensors {
    let mut blocks: BTreeMap<String, BTreeMap<usize, Expert>> = BTreeMap::new();
    let mut out = Tensors::new();
    for (name, tensor) in tensors {
        let name = peft_name(&name);
        match parse(&name) {
            Some((module, expert, matrix, side)) => {
                let experts = blocks.entry(module.to_owned()).or_default();
                experts.entry(expert).or_default()[matrix][side] = Some(tensor);
            }
            None => drop(out.insert(name, tensor)),
        }
    }
    for (module, experts) in blocks {
        let of = |matrices: &[usize]| -> Option<Vec<Vec<[&Tensor; 2]>>> {
            let all = |expert| matrices.iter().map(|&matrix| pair(expert, matrix)).collect::<Option<Vec<_>>>();
            let counted = experts.keys().copied().eq(0..experts.len());
            experts.values().filter(|_| counted).map(all).collect()
        };
        let (gate_up, down) = (of(&[0, 1]), of(&[2]));
        let inner = if down.is_some() { format!("{module}.base_layer") } else { module.clone() };
        for (wrapper, matrices) in [(inner, gate_up), (module, down)] {
            for (side, tensor) in
                ["lora_A", "lora_B"].iter().zip(matrices.and_then(|all| stack(&all)).into_iter().flatten())
            {
                out.insert(format!("{wrapper}.{side}.weight"), tensor);
            }
        }
    }
    out
}

/// Stacks `[experts][matrices][A, B]` into one A and one B; `None` if the shapes differ.
fn stack(experts: &[Vec<[&Tensor; 2]>]) -> Option<[Tensor; 2]> {
    let [(first_a, _), (first_b, _)] = experts.first()?.first()?;
    let (&[rank, inputs], &[outputs, ranks]) = (first_a.as_slice(), first_b.as_slice()) else { return None };
    let matrices = experts[0].len();
    let fits = |[(a, _), (b, _)]: &[&Tensor; 2]| a == first_a && b == first_b;
    if ranks != rank || !experts.iter().flatten().all(fits) {
        return None;
    }
    let (count, whole) = (experts.len(), rank * matrices);
    let a = experts.iter().flatten().flat_map(|[(_, a), _]| a.iter().copied()).collect();
    let mut b = vec![0.0; outputs * matrices * whole * count];
    for (expert, parts) in experts.iter().enumerate() {
        for (part, [_, (_, values)]) in parts.iter().enumerate() {
            for (row, values) in values.chunks_exact(rank.max(1)).enumerate() {
                let row = &mut b[(part * outputs + row) * whole * count..][..whole * count];
                for (k, value) in values.iter().enumerate() {
                    row[(part * rank + k) * count + expert] = *value;
                }
            }
        }
    }
    Some([(vec![count * whole, inputs], a), (vec![outputs * matrices, whole * count], b)])
}
