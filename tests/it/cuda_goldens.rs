//! Every golden model on a GPU: with 16-bit activations, losses and gradients are those in float32 but for rounding; in float32, the
//! gradients of all weights and those of classification heads are PyTorch's.
use crate::classify;
use crate::parity::{
    Forward, adapter_config, check_full_gradients, families, golden, load, on_gpu, put, recipe, tensors,
};
use crate::processes::alone;

/// The loss of a golden batch and the gradients of its adapter, with these settings of `train.bf16` and `train.fp16`.
fn run(family: &str, [bf16, fp16]: [bool; 2]) -> (f64, Vec<f32>) {
    let adapter = golden(family).join("adapter_init");
    let mut config = adapter_config(&adapter.join("adapter_config.json"));
    (config.train.bf16, config.train.fp16) = (bf16, fp16);
    let mut model = load(family, &config);
    put(&mut model, &tensors(&adapter.join("adapter_model.safetensors")));
    let batch = Forward::read(family).batch();
    model.params.zero_grads();
    let loss = model.forward_backward(&batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
    (loss, model.params.grads().read())
}

/// The relative differences of a loss and of gradients from those in float32.
fn apart((loss, exact): &(f64, Vec<f32>), (other, rounded): &(f64, Vec<f32>)) -> [f64; 2] {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let error = norm(&mut exact.iter().zip(rounded).map(|(a, b)| f64::from(a - b)));
    let size = norm(&mut exact.iter().map(|&a| f64::from(a)));
    [(other / loss - 1.0).abs(), error / size]
}

/// A number of bfloat16 is off by 2^-9 of its size at most, one of float16 by 2^-12. Some tens of roundings lie on the way through these
/// small models. Where a router has two experts that it likes alike, rounding may choose the other one.
#[test]
fn every_family_rounds_its_activations_and_nothing_more() {
    if !alone("cuda_goldens::every_family_rounds_its_activations_and_nothing_more") {
        return;
    }
    on_gpu(|| {
        for family in families() {
            let [exact, bf16, f16] = [[false, false], [true, false], [false, true]].map(|number| run(&family, number));
            let routed = load(&family, &recipe()).arch.experts.is_some();
            for (name, found, [loss, gradient]) in [
                ("bf16", apart(&exact, &bf16), if routed { [0.01, 0.25] } else { [0.005, 0.1] }),
                ("f16", apart(&exact, &f16), if routed { [0.001, 0.04] } else { [0.0005, 0.0125] }),
            ] {
                println!("{family:24} {name:4} loss {:.1e}  gradients {:.4}", found[0], found[1]);
                assert!(found[0] < loss && found[1] < gradient, "{family} in {name}: {found:?}");
                assert!(found[1] > 1e-5, "{family} in {name} rounds");
            }
        }
    });
}

#[test]
fn gradients_of_all_weights_and_of_heads_are_pytorch_s_on_a_gpu() {
    if !alone("cuda_goldens::gradients_of_all_weights_and_of_heads_are_pytorch_s_on_a_gpu") {
        return;
    }
    on_gpu(|| {
        for family in families() {
            check_full_gradients(&family);
        }
        for (family, case) in [("llama", "llama"), ("gemma2", "gemma2"), ("llama", "regression")] {
            classify::check(family, case);
        }
    });
}
