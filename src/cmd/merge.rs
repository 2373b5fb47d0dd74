//! `tunesmith merge`: merges an adapter into its base and checks that the logits agree, or blends several adapters into one.
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::args::ConfigArgs;
use super::numbers::number;
use super::parts_args::{Opened, PartsArgs};
use super::terminal;
use crate::checkpoint::loaded_adapter::LoadedAdapter;
use crate::checkpoint::publish::{publish_output, recover_folder};
use crate::checkpoint::{Manifest, peft};
use crate::config::{Config, ModelConfig, Range};
use crate::error::{Error, Result};
use crate::export::folder::{self, FolderSettings, WrittenFolder};
use crate::export::merge::{Comparison, Merged, Parts, compare, dequantized, plain_model, sample_logits};
use crate::export::requantize::Requantization;
use crate::files::disk::RealDisk;
use crate::files::output::check_output_folder;
use crate::files::temporary;
use crate::model::quantize::{Held, How};
use crate::model::weights::{Dtype, Stacking};
use crate::ops::quant::Format;
use crate::plan::human_bytes;
use crate::words::count;

/// Write a model with an adapter merged into it.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    parts: PartsArgs,
    /// Write the model to this folder (default: `merged` in the run's output folder)
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Write weights in this dtype; `auto` keeps the base's
    #[arg(long, value_name = "auto|float32|bfloat16|float16", default_value = "auto")]
    dtype: String,
    /// Quantize linear layers to 4 or 8 bits as bitsandbytes does, and report the loss. `model.double_quant` and
    /// `model.quantization_skip_modules` apply
    #[arg(long, value_name = "nf4|fp4|int8", conflicts_with = "adapter_only")]
    requantize: Option<String>,
    /// Split weights into files of at most this many GB
    #[arg(long, value_name = "GB", default_value_t = 5.0, value_parser = number(Range::greater_than(0.0)))]
    shard_size: f64,
    /// Accept a result whose logits differ by at most this, relative to the largest logit
    #[arg(long, value_name = "X", default_value_t = MAX_DIFFERENCE, value_parser = parse_difference)]
    max_difference: f32,
    /// Write the blend of several adapters as an adapter, without merging it
    #[arg(long)]
    adapter_only: bool,
    /// Replace an existing output folder
    #[arg(long)]
    overwrite: bool,
}

/// The default limit: float32 keeps 7 digits, and sums in another order lose some of them, in a sound merge of the quickstart's
/// model up to 1.3e-5, here and with PEFT in PyTorch. A wrong merge differs by far more.
pub const MAX_DIFFERENCE: f32 = 1e-4;

/// Reads the value of `--max-difference`: with NaN or infinity the check would pass whatever it finds, or nothing at all.
pub fn parse_difference(text: &str) -> std::result::Result<f32, String> {
    let value = text.parse::<f32>().ok().filter(|value| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "expected a finite number, at least 0".to_owned())
}

/// Runs the subcommand.
///
/// # Errors
/// Everything that reading and writing can fail with; [`crate::Kind::Numeric`]: the merged model's logits are not the adapter's.
pub fn run(args: &Args) -> Result<()> {
    let dtype = parse_dtype(&args.dtype)?;
    let opened = args.parts.open(&args.config, false)?;
    let requantization = args.requantize.as_deref().map(|word| requantization(word, &opened)).transpose()?;
    let Opened { parts, top, tokenizer, template, config, reads, .. } = opened;
    let output = output_dir(args.output.as_deref(), config.as_ref(), "merged")?;
    claim(&output, args.overwrite, &reads)?;
    let top = top.ok_or_else(|| {
        Error::config("no adapter is named: give --adapter DIR, or the configuration of a run that trained one")
    })?;
    let shard_bytes = (args.shard_size * 1e9) as u64;
    if shard_bytes == 0 {
        return Err(Error::config(format!("--shard-size {}: expected more than 0 GB", args.shard_size)));
    }
    if args.adapter_only {
        if args.parts.adapter.len() < 2 {
            return Err(Error::config("--adapter-only writes a blend: name at least two adapters"));
        }
        let tensors: Vec<_> =
            top.tensors.iter().map(|(name, (shape, values))| (name.clone(), shape.clone(), &values[..])).collect();
        publish_output(&RealDisk, &output, args.overwrite, |staging| {
            peft::stage(staging, &top.config, &tensors)?;
            let source = crate::checkpoint::folder::SourceModel {
                dir: &tokenizer,
                grown: None,
                template: template.as_deref(),
                own_head: None,
                wrapping: None,
                stacking: Stacking::NONE,
            };
            crate::checkpoint::folder::stage_companions(staging, source)
        })?;
        return terminal::print(&format!("adapter  {}\n", output.display()));
    }
    let (mut text, merged) = check_merge(parts, top, args.max_difference)?;
    let form = FolderSettings {
        dtype,
        shard_bytes,
        tokenizer: &tokenizer,
        template: template.as_deref(),
        card: None,
        requantization: requantization.as_ref(),
        overwrite: args.overwrite,
    };
    let WrittenFolder { bytes, loss } = folder::write(&output, &merged.model, &form)?;
    let format = match &requantization {
        Some(requantization) => Some(requantization.describe()),
        None => (loss.matrices > 0).then(|| "FP8, as the base has it".to_owned()),
    };
    if let Some(format) = format {
        let _ = writeln!(
            text,
            "requantized     {format}, {}: a weight changes by {:.2e} at most, by {:.2e} on average (weights reach {:.2})",
            count(loss.matrices, "matrix"),
            loss.largest,
            loss.mean(),
            loss.scale
        );
    }
    let mut plain = plain_model(&output, None, merged.model.device)?;
    // Both models must compute the same sample rows, whose tokens depend on the trained token rows.
    plain.arch.token_rows.clone_from(&merged.model.arch.token_rows);
    let written = compare(&merged.logits, &sample_logits(&plain)?, merged.model.arch.outputs());
    if dtype == Some(Dtype::F32) && requantization.is_none() {
        refuse(&written, args.max_difference).inspect_err(|_| drop(std::fs::remove_dir_all(&output)))?;
    }
    let _ = writeln!(text, "as written      {}", show(&written)); // a String never fails
    if requantization.is_some() && written.agreeing * 10 < written.positions * 9 {
        text.push_str("warning: the codes change the best token at more than a tenth of the positions. An adapter that is trained on the quantized base \
                       (tuning.mode: qlora) fits them; or merge without --requantize\n");
    }
    let _ = writeln!(text, "model           {} ({})", output.display(), human_bytes(bytes));
    if merged.model.weights.wrapping().is_some_and(|wrapping| wrapping.predicts_ahead()) {
        text.push_str(
            "note: the heads that predict several tokens at once (mtp.*, or blocks after the model's last one) are copied as they were, \
             and do not fit the tuned model: decode without them\n",
        );
    }
    let mxfp4 = requantization.is_none() && !merged.model.weights.stacked_mxfp4().is_empty();
    if mxfp4 && dtype.is_none() && !folder::keeps_mxfp4(&merged.model, dtype) {
        text.push_str(
            "note: the adapter changes experts that the base has in MXFP4: all of them are written in the embedding's dtype\n",
        );
    }
    let dir = output.display();
    let _ = match merged.model.arch.auto_class() {
        Some(class) => writeln!(text, "use it          Transformers: {class}.from_pretrained(\"{dir}\")"),
        None => {
            writeln!(text, "use it          model.name={dir}, or in Python scripts/load_vision.py: load(\"{dir}\")")
        }
    };
    terminal::print(&text)
}

/// The quantization that `--requantize` asks for. Double quantization and skipped modules are the configuration's, else the
/// training's.
fn requantization(word: &str, opened: &Opened) -> Result<Requantization> {
    let format = [Format::Nf4, Format::Fp4, Format::Int8].into_iter().find(|format| format.name() == word);
    let Some(format) = format else {
        return Err(Error::config(format!("--requantize {word}: expected nf4, fp4 or int8")));
    };
    let default = ModelConfig::default();
    let (double, skip) = match (&opened.config, &opened.held) {
        (Some(config), _) => (config.model.double_quant, config.model.quantization_skip_modules.clone()),
        (None, Some(held)) if held.how.format != Format::Int8 => (held.how.double, held.skip.clone()),
        (None, Some(held)) => (default.double_quant, held.skip.clone()),
        (None, None) => (default.double_quant, opened.parts.dense_modules()?),
    };
    Requantization::new(&opened.parts.arch, Held { how: How { format, double }, skip })
}

/// A merged model whose logits agree with the adapter's.
pub struct Checked {
    pub model: Merged,
    /// Logits of the unmerged adapter on the sample rows.
    pub logits: Vec<f32>,
}

/// Merges `top`, and compares the merged model's float32 logits with those of the unmerged adapter. One model is in memory at a
/// time.
///
/// # Errors
/// [`crate::Kind::Numeric`]: they differ by more than `limit`, or the adapter's are not finite.
pub fn check_merge(parts: Parts, top: LoadedAdapter, limit: f32) -> Result<(String, Checked)> {
    let vocabulary = parts.arch.outputs();
    let logits = sample_logits(&parts.adapted(&top, &ModelConfig { device: parts.device, ..dequantized() })?)?;
    if !logits.iter().all(|value| value.is_finite()) {
        return Err(Error::numeric("the logits of the base with its adapter are not finite: nothing is merged").hint(
            "the weights are too large for float32, as after a training that diverged: use an earlier checkpoint",
        ));
    }
    let model = parts.merged(Some(top))?;
    let comparison = compare(&logits, &sample_logits(&model.model()?)?, vocabulary);
    refuse(&comparison, limit)?;
    Ok((format!("merged, float32 {}\n", show(&comparison)), Checked { model, logits }))
}

fn show(comparison: &Comparison) -> String {
    let Comparison { largest, scale, agreeing, positions } = comparison;
    format!(
        "largest logit difference from the adapter: {largest:.2e} (logits reach {scale:.3}); same best token at \
         {agreeing} of {}",
        count(positions, "position")
    )
}

fn refuse(comparison: &Comparison, limit: f32) -> Result<()> {
    // The rounding of float32 is relative, so larger logits may differ by more.
    let accepted = limit * comparison.scale;
    if comparison.largest <= accepted {
        return Ok(());
    }
    Err(Error::numeric(format!(
        "the merged model differs from the adapter: {}; at most {accepted:.2e} is accepted, which is {limit:e} of the largest logit",
        show(comparison)
    ))
    .hint("nothing was written; --max-difference accepts a larger difference"))
}

/// Parses `--dtype`; `None` for `auto`.
///
/// # Errors
/// [`crate::Kind::Config`]: another word.
pub fn parse_dtype(word: &str) -> Result<Option<Dtype>> {
    match word {
        "auto" => Ok(None),
        "float32" | "fp32" | "f32" => Ok(Some(Dtype::F32)),
        "bfloat16" | "bf16" => Ok(Some(Dtype::BF16)),
        "float16" | "fp16" | "f16" => Ok(Some(Dtype::F16)),
        other => Err(Error::config(format!("--dtype {other}: expected auto, float32, bfloat16 or float16"))
            .hint("--requantize quantizes to nf4, fp4 or int8; tunesmith export --gguf writes q8_0 and q4_0")),
    }
}

/// The folder of `--output`, else `name` in the configuration's output folder.
///
/// # Errors
/// [`crate::Kind::Config`]: nothing names it.
pub fn output_dir(flag: Option<&Path>, config: Option<&Config>, name: &str) -> Result<PathBuf> {
    match (flag, config) {
        (Some(output), _) => Ok(output.to_owned()),
        (None, Some(config)) => Ok(config.train.output_dir.join(name)),
        (None, None) => Err(Error::config("no output is named").hint("--output DIR")),
    }
}

/// Refuses to replace files without `overwrite`, or to write into a folder that is read. Removes remains of a killed process.
///
/// # Errors
/// Those of [`check_output_folder`]; [`crate::Kind::Io`]: nothing can be written there.
pub fn claim(output: &Path, overwrite: bool, reads: &[PathBuf]) -> Result<()> {
    let written = |dir: &Path| Some(Manifest::read(dir).ok()?.names());
    recover_folder(&RealDisk, output)?;
    check_output_folder(output, overwrite, reads, written)?;
    if let Some(parent) = output.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).map_err(|source| Error::io("create", parent, &source))?;
    }
    // An unwritable output is reported before all the work.
    temporary::unnamed(output).map(drop).map_err(|source| Error::io("write", output, &source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_number() {
        assert_eq!(parse_difference("1e-3"), Ok(1e-3));
        for text in ["nan", "inf", "1e99", "-1", "", "x"] {
            assert!(parse_difference(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_limit_is_in_proportion_to_the_logits() {
        let of = |largest, scale| Comparison { largest, scale, agreeing: 1, positions: 1 };
        for (largest, scale) in [(1.3e-5, 1.0), (9e-8, 1e-3), (9.0, 1e5), (0.0, 0.0)] {
            refuse(&of(largest, scale), MAX_DIFFERENCE).unwrap();
        }
        for (largest, scale) in [(2e-4, 1.0), (2e-7, 1e-3), (20.0, 1e5), (1e-9, 0.0), (f32::INFINITY, 1.0)] {
            let error = refuse(&of(largest, scale), MAX_DIFFERENCE).unwrap_err();
            assert_eq!(error.kind(), crate::Kind::Numeric, "{largest} of {scale}");
        }
    }
}
