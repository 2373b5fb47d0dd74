//! `tunesmith models`: lists the supported model families, or describes a model folder.
use super::terminal::{print, print_exact};
use super::{models_adapters, models_memory};
use crate::checkpoint::peft;
use crate::config::FAMILIES;
use crate::config::arch::ENCODER_DECODER;
use crate::config::arch::{AltUpSpec, Arch, Experts, LinearSpec, PartSpec, QkNorm, TensorSpec, WRAPPERS};
use crate::config::vision::{CONNECTORS, ENCODERS};
use crate::error::{Error, Result};
use crate::train::output;
use crate::words::count;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Describe this model folder instead of listing families
    dir: Option<PathBuf>,
    /// Print the list as Markdown, as in docs/models.md
    #[arg(long, conflicts_with = "dir")]
    docs: bool,
}

/// Runs the command.
///
/// # Errors
/// A folder that holds no supported model.
pub(super) fn run(args: &Args) -> Result<()> {
    match &args.dir {
        Some(dir) => {
            refuse_result(dir)?;
            let arch = Arch::from_dir(dir)?;
            print(&(describe(&arch)? + &lines_of(models_memory::lines(dir, &arch))))
        }
        None if args.docs => print_exact(&format!("{}\n{}", table(), wrappers())),
        None => print(&list()),
    }
}

/// Refuses the output folder of a run, and that of an adapter, which have the model's folder elsewhere.
///
/// # Errors
/// [`crate::Kind::Model`], with what to name.
fn refuse_result(dir: &Path) -> Result<()> {
    let has = |name: &str| dir.join(name).is_file();
    let fail = |what: &str, hint: &str| Err(Error::model(format!("{}: {what}", dir.display())).hint(hint));
    match has("config.json") {
        false if has(output::CONFIG) => fail(
            "the output folder of a run, not of a model",
            "name its base model: model.name in config.resolved.yaml",
        ),
        false if has(peft::CONFIG_FILE) => fail(
            "the folder of an adapter, not of a model",
            "name its base model: base_model_name_or_path in adapter_config.json",
        ),
        _ => Ok(()),
    }
}

/// Every family with its models and its differences from Llama, multimodal models, image encoders, and connectors.
fn list() -> String {
    let mut out = String::new();
    for family in FAMILIES {
        let _ = writeln!(out, "{:12}  {}\n{:12}  {}", family.model_type, family.models, "", family.features);
    }
    let _ = writeln!(out, "\nThe text of multimodal models, where their language model is one of these:");
    for wrapper in WRAPPERS {
        let _ = writeln!(out, "{:16}  {}", wrapper.model_type, wrapper.models);
    }
    let _ = writeln!(out, "\nAn image encoder, and a GPT-2 that reads its output by cross-attention:");
    let _ = writeln!(out, "{:16}  {}", ENCODER_DECODER.model_type, ENCODER_DECODER.models);
    out.push_str("\nImage encoders, of multimodal models or for vision.encoder:\n");
    for encoder in ENCODERS {
        let _ = writeln!(out, "{:20}  {}", encoder.model_types.first().unwrap_or(&""), encoder.models);
    }
    out.push_str("\nConnectors, and the multimodal models that have them; vision.connector names linear and mlp:\n");
    for connector in CONNECTORS {
        let _ = writeln!(out, "{:22}  {}", connector.name, connector.model_types.join(", "));
    }
    out
}

/// The table of families in docs/models.md, as Markdown.
pub fn table() -> String {
    let mut out = String::from("| `model_type` | models | beside Llama's form |\n|---|---|---|\n");
    for family in FAMILIES {
        let _ = writeln!(out, "| `{}` | {} | {} |", family.model_type, family.models, family.features);
    }
    out
}

/// The table of multimodal models in docs/models.md.
pub fn wrappers() -> String {
    let mut out = String::from("| `model_type` | models | class in Transformers |\n|---|---|---|\n");
    for wrapper in WRAPPERS.iter().chain([&ENCODER_DECODER]) {
        let _ = writeln!(out, "| `{}` | {} | `{}` |", wrapper.model_type, wrapper.models, wrapper.class_name);
    }
    out
}

/// Describes an architecture, with one fact per line.
///
/// # Errors
/// The model has no module that can be adapted.
fn describe(arch: &Arch) -> Result<String> {
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:18}  {value}");
    };
    let parameters: usize = arch.tensors().iter().map(TensorSpec::len).sum();
    line("family", format!("{} ({})", arch.family.model_type, arch.family.models));
    if let Some(wrapper) = arch.wrapper {
        let modules = wrapper.module("model.layers");
        let how = if arch.reads_images_across() {
            "which reads an image by cross-attention"
        } else {
            "trained on text alone, or on text and images"
        };
        line("inside", format!("{} ({}): {modules}, {how}", wrapper.model_type, wrapper.models));
    }
    line("parameters", format!("{:.1} M", parameters as f64 / 1e6));
    line("blocks", arch.num_hidden_layers.to_string());
    line("widths", format!("{} hidden, {} in the MLP", arch.hidden_size, arch.intermediate_size));
    let mut heads: Vec<String> = Vec::new();
    for attention in arch.attentions() {
        let (query, key, width) = (attention.num_heads, attention.num_kv_heads, attention.head_dim);
        let text = match attention.latent {
            Some(latent) => format!(
                "{query}, {width} wide, {} of it turned, values {} wide, from latents of {} (queries: {})",
                latent.rope_dim,
                latent.value_dim,
                latent.kv_rank,
                latent.query_rank.map_or_else(|| "none".to_owned(), |rank| rank.to_string())
            ),
            None => format!("{query} query, {key} key/value, {width} wide"),
        };
        if !heads.contains(&text) {
            heads.push(text);
        }
    }
    line("heads", heads.join("; "));
    let head = match &arch.score {
        Some(scores) if scores.is_number() => "the head gives one number".to_owned(),
        Some(scores) => format!("the head gives scores for {}", count(scores.labels.len(), "label")),
        None if arch.tie_word_embeddings => "the head is the embedding".to_owned(),
        None => "the head has a matrix of its own".to_owned(),
    };
    line("vocabulary", format!("{}, {head}", arch.vocab_size));
    line("context", count(arch.max_position_embeddings, "token"));
    let sliding: Vec<usize> = arch.attentions().filter_map(|attention| attention.window).collect();
    if let Some(window) = sliding.first() {
        line("sliding window", format!("{window} tokens in {} of {} blocks", sliding.len(), arch.num_hidden_layers));
    }
    let still = arch.attentions().filter(|attention| attention.rope.is_none()).count();
    if arch.learned_positions {
        line("positions", "learned".to_owned());
    } else if still > 0 {
        line("no positions", format!("in {still} of {} blocks", arch.num_hidden_layers));
    }
    let shared = arch.attentions().filter(|attention| attention.kv_from.is_some()).count();
    if shared > 0 {
        line("keys and values", format!("of earlier blocks in {shared} of {} blocks", arch.num_hidden_layers));
    }
    if let Some(own) = &arch.per_layer {
        line("embeddings", format!("{} wide for each block, of {} tokens", own.width, own.vocab_size));
    }
    if let Some(AltUpSpec { streams, laurel_rank, .. }) = arch.altup {
        line("streams", format!("{streams}, and a branch of rank {laurel_rank} beside each attention"));
    }
    for (what, text) in mixers(arch) {
        line(what, text);
    }
    if let Some(experts) = &arch.experts {
        let sparse = (0..arch.num_hidden_layers).filter(|&layer| arch.experts_of(layer).is_some()).count();
        let format = if experts.mxfp4 { ", stored in MXFP4" } else { "" };
        let Experts { count, per_token, width, .. } = experts;
        line("experts", format!("{count}, {per_token} a token, {width} wide, in {sparse} blocks{format}"));
    }
    if let Some(format) = &arch.stored {
        line("stored as", format.describe());
    }
    for (index, rope) in arch.ropes.iter().enumerate() {
        let width = arch.attentions().find(|it| it.rope == Some(index)).map_or(rope.rotary_dim, |it| it.head_dim);
        line("rotary", format!("base {}, {} of {width} features, {}", rope.theta, rope.rotary_dim, rope.scaling));
    }
    if arch.qk_norm != QkNorm::None {
        let kind = match arch.qk_norm {
            QkNorm::Whole => "all heads",
            QkNorm::Weightless => "a head, without weights",
            QkNorm::Head | QkNorm::None => "a head",
        };
        line("norms on q and k", kind.to_string());
    }
    // Blocks differ: each module once, by its name and shape.
    let mut seen = BTreeSet::new();
    let new = |module: &LinearSpec| {
        let name = module.name.rsplit('.').next().unwrap_or_default().to_owned();
        !module.is_head() && seen.insert((name, module.out_features, module.in_features))
    };
    let modules: Vec<String> = arch
        .linear_modules()
        .into_iter()
        .filter(new)
        .map(|module| {
            format!(
                "{} [{}, {}]",
                module.name.rsplit('.').next().unwrap_or_default(),
                module.out_features,
                module.in_features
            )
        })
        .collect();
    line("linear modules", modules.join(", "));
    let adapters = models_adapters::lines(arch)?.into_iter().map(|(name, text)| (name.to_owned(), text));
    Ok(out + &lines_of(adapters.collect()))
}

fn lines_of(lines: Vec<(String, String)>) -> String {
    lines.into_iter().fold(String::new(), |mut out, (name, value)| {
        let _ = writeln!(out, "{name:18}  {value}");
        out
    })
}

/// The mixers other than attention, and the number of blocks of each.
fn mixers(arch: &Arch) -> Vec<(&'static str, String)> {
    let branches = || arch.blocks.iter().flat_map(|block| &block.branches);
    let (mut deltas, mut convolutions, mut mambas) = (0, 0, 0);
    let (mut delta, mut kernel, mut mamba) = (String::new(), 0, String::new());
    for branch in branches() {
        match &branch.part {
            PartSpec::DeltaNet(spec) => {
                deltas += 1;
                delta = format!(
                    "{} value heads of {}, {} key heads of {}",
                    spec.value_heads, spec.value_dim, spec.key_heads, spec.key_dim
                );
            }
            PartSpec::ShortConv(spec) => (convolutions, kernel) = (convolutions + 1, spec.kernel),
            PartSpec::Mamba(spec) => {
                mambas += 1;
                let groups = count(spec.groups, "group");
                mamba = format!("{} heads of {}, states of {}, {groups}", spec.heads, spec.dim, spec.state);
            }
            PartSpec::Attention(_)
            | PartSpec::CrossAttention(_)
            | PartSpec::Mlp { .. }
            | PartSpec::PlainMlp { .. }
            | PartSpec::Experts
            | PartSpec::MlpAndExperts { .. }
            | PartSpec::PerLayer => {}
        }
    }
    let all = arch.num_hidden_layers;
    let delta = (deltas > 0).then(|| ("linear attention", format!("{delta}, in {deltas} of {all} blocks")));
    let convolution =
        (convolutions > 0).then(|| ("convolution", format!("over {kernel} tokens, in {convolutions} of {all} blocks")));
    let mamba = (mambas > 0).then(|| ("Mamba 2", format!("{mamba}, in {mambas} of {all} blocks")));
    delta.into_iter().chain(convolution).chain(mamba).collect()
}
