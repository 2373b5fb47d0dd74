//! Adapters from the time of Transformers 4, in which routers and experts were modules: an adapter for each matrix of each expert. PEFT
//! reads them into the stacked parameters of Transformers 5, and so does this.
//!
//! Of experts with gate and up `B1 A1` and `B3 A3` the joined matrix has `A = [A1; A3]` and `B = diag(B1, B3)`: twice the rank. Rows
//! `e * rank ..` of a stacked A are expert e's, and column `i * experts + e` of a stacked B is its i-th.
use std::collections::BTreeMap;

use super::tensors::Tensors;
use tunesmith_model::targets::peft_name;

/// The names of an expert's gate, up and down.
const MATRICES: [[&str; 3]; 2] = [["w1", "w3", "w2"], ["gate_proj", "up_proj", "down_proj"]];

type Tensor = (Vec<usize>, Vec<f32>);

/// A and B of an expert's gate, up and down.
type Expert = [[Option<Tensor>; 2]; 3];

/// Of `model.layers.0.mlp.experts.3.w1.lora_A.weight`: the module with the experts, the expert, its matrix, and 0 for A or 1 for B.
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

/// The tensors under their names in Transformers 5, those of experts stacked. What is no whole set stays as it is.
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

/// A and B of all experts, of each those of its matrices; nothing where their sizes differ.
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
