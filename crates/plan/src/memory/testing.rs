//! A model and a job for tests, and an engine that counts a fixed number of buffers.
use super::*;
use std::path::Path;
use std::sync::Arc;
use tunesmith_config::arch::Arch;

/// Three blocks of Llama's form, with a large vocabulary.
pub fn arch() -> Arch {
    let text = r#"{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "silu"}"#;
    Arch::from_json(text, Path::new("a test")).expect("a shape")
}

/// Ten buffers for each block that saves anything, one for the others.
#[derive(Debug)]
struct Engine {
    blocks: usize,
    /// Everything is trained.
    full: bool,
}

impl CountBuffers for Engine {
    fn count(&self, walk: &Walk) -> BufferCounts {
        let full = walk.full.min(self.blocks);
        let saved = Counts::from([(1024, (10 * (self.blocks - full) + full) as u64)]);
        let all = Counts::from([(1024, saved[&1024] + 20), (4096, 4)]);
        BufferCounts { saved, all, head: Counts::from([(1024, 2), (32000, 1)]), ..BufferCounts::default() }
    }

    fn count_forward(&self, _: &Walk) -> BufferCounts {
        BufferCounts { all: Counts::from([(1024, 10), (4096, 4)]), ..BufferCounts::default() }
    }

    fn held_on_gpu(&self, base: &Base) -> GpuHeld {
        let arch = arch();
        let stored = if self.full { Storage::F32 } else { base.quantized.unwrap_or(base.matrices) };
        let held = arch.tensors().iter().map(|spec| stored.bytes(&spec.shape)).sum();
        GpuHeld { held, most: held }
    }

    fn on_gpu(&self, _: &Base, walk: &GpuWalk) -> Walked {
        let full = walk.full.min(self.blocks) as u64;
        let kept = 4096 * walk.tokens as u64 * (10 * (self.blocks as u64 - full) + full);
        let head = 4 * 34_048 * (walk.labelled as u64).min(1000);
        Walked { kept, pools: kept + 4 * (20 * 1024 + 4 * 4096) * walk.tokens as u64, head, host: 0 }
    }
}

/// Everything trained, or adapters of rank 8 on every linear module; the state is `AdamW`'s.
pub fn job(arch: &Arch, full: bool) -> Job<'_> {
    let mut trained = Trained::default();
    if full {
        trained.values = arch.tensors().iter().map(|spec| spec.len() as u64).sum();
        trained.tensors = arch.tensors().into_iter().map(|spec| spec.name).collect();
    } else {
        for linear in arch.linear_modules().into_iter().filter(|linear| linear.layer.is_some()) {
            trained.values += 8 * (linear.in_features + linear.out_features) as u64;
            trained.adapters.insert(linear.name, Arc::new(LowRank { rank: 8, magnitudes: false }));
        }
    }
    Job {
        arch,
        base: Base {
            matrices: Storage::Bf16,
            quantized: None,
            quantized_tensors: Arc::default(),
            stored: Arc::default(),
            float32: Arc::default(),
            wide: Arc::default(),
            through_f32: false,
            on_host: false,
        },
        optimizer: OptimizerBytes { state: 8 * trained.values, ..OptimizerBytes::default() },
        trained,
        full: 0,
        none: 0,
        narrow: false,
        narrow_gradients: false,
        rounds_gradients: false,
        threads: 2,
        companions: 0,
        bucket: 25 << 20,
        offloaded: Vec::new(),
        in_files: Vec::new(),
        pictures: None,
        evaluation: None,
        engine: Arc::new(Engine { blocks: arch.num_hidden_layers, full }),
    }
}
