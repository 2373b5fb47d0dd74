//! The memory that LoRA and QLoRA take on a GPU, as `tunesmith plan` predicts it, for `tunesmith models DIR`.
use crate::config::arch::Arch;
use crate::config::{Checkpointing, Config, Mode, Quantization};
use crate::error::Result;
use crate::plan::memory::{Device, Pass, Predictor};
use crate::plan::strategies::{self, Fit, Machine, Strategy, Way};
use crate::plan::{grouped, human_bytes};
use crate::train::memory_prediction;
use std::path::Path;

/// Tokens of the row that is planned for.
const TOKENS: u64 = 4096;
/// GiB of the GPUs that are named.
const GPUS: [u64; 4] = [24, 48, 80, 141];

/// The lines about memory: label and text. `dir` is the model's folder; its weights are not needed.
pub(super) fn lines(dir: &Path, arch: &Arch) -> Vec<(String, String)> {
    let tokens = TOKENS.min(arch.max_position_embeddings as u64);
    let heading = format!("a row of {} tokens in bfloat16, the default rank", grouped(tokens));
    let mut lines = vec![("memory on a GPU".to_owned(), heading)];
    for (name, quantization) in [("LoRA", Quantization::Auto), ("QLoRA", Quantization::Nf4)] {
        let need = |checkpointing| {
            let mut config = Config::default();
            (config.tuning.mode, config.model.quantization) = (Mode::Lora, quantization);
            (config.train.bf16, config.train.gradient_checkpointing) = (true, checkpointing);
            predicted(&config, dir, arch, tokens)
        };
        let texts = match need(Checkpointing::CHEAP)
            .and_then(|kept| Ok([(kept, ""), (need(Checkpointing::FULL)?, ", recomputed")]))
        {
            Ok(needs) => needs.map(|(bytes, how)| (format!("{name}{how}"), fits(bytes))).to_vec(),
            Err(error) => vec![(name.to_owned(), error.message().to_owned())],
        };
        lines.extend(texts);
    }
    lines
}

/// The bytes that a run on one GPU takes, as `tunesmith plan` says them.
fn predicted(config: &Config, dir: &Path, arch: &Arch, tokens: u64) -> Result<u64> {
    let mut job = memory_prediction::job(config, arch, memory_prediction::stored(dir), None)?;
    job.companions = memory_prediction::tokenizer(arch.vocab_size);
    let machine = Machine { device: Device::Gpu, ranks: 1, memory: Machine::UNKNOWN };
    let (predictor, pass) = (Predictor::new(job, Device::Gpu), Pass::of(1, tokens, None));
    Ok(strategies::rank(&predictor, &machine, Way::plain(Strategy::Single), &pass).total())
}

fn fits(bytes: u64) -> String {
    let named = |sizes: &[u64]| sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let sizes: Vec<u64> = GPUS.into_iter().filter(|gib| Fit::of(bytes, gib << 30) == Fit::Fits).collect();
    let (fits, sizes) = if sizes.is_empty() { ("fits none of", &GPUS[..]) } else { ("fits", &sizes[..]) };
    format!("{}, {fits} {} GiB", human_bytes(bytes), named(sizes))
}
