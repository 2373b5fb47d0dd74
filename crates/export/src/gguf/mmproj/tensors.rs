//! Names each tensor of an image encoder and its connectors in an `mmproj` file, and chooses the format of its numbers.
use super::super::GgufFormat;
use super::super::rows::{Step, paired};
use super::super::tensors::Output;
use super::Projector;
use tunesmith_config::arch::{Arch, EMBEDDING, TensorSpec};
use tunesmith_config::vision::{CLIP_BOUNDS, Connector, Encoder, VisionArch};

/// Every tensor of encoder and connectors in the order of the forward pass, each with the tensor of the file that it becomes.
pub(super) fn outputs(projector: Projector, vision: &VisionArch) -> Vec<(TensorSpec, Output)> {
    let encoder = &vision.encoder;
    let mut all = Vec::new();
    for spec in encoder.tensors() {
        for output in of_encoder(projector, encoder, &spec) {
            all.push((spec.clone(), output));
        }
    }
    connector(&mut all, &vision.connector, names(projector, &vision.connector));
    for deep in &vision.deepstack {
        let name = |part: &str| format!("v.deepstack.{}.{part}", deep.block);
        connector(&mut all, &deep.connector, (name("norm"), ["fc1", "fc2"].map(name).to_vec()));
    }
    all
}

/// The embedding of the token after each line of an image's rows: one row of the model's embedding.
pub(super) fn line_end(arch: &Arch, token: usize) -> (TensorSpec, Output) {
    let steps = vec![Step::Rows(vec![token])];
    let output = Output { name: "v.token_embd.img_break".into(), shape: vec![arch.hidden_size], steps };
    (TensorSpec::new(EMBEDDING, &[arch.vocab_size, arch.hidden_size]), output)
}

/// Names of a connector's modules: its norm, and its linear modules in their order.
fn names(projector: Projector, connector: &Connector) -> (String, Vec<String>) {
    let (norm, linears): (&str, &[&str]) = match projector {
        Projector::Gemma4 => ("", &["mm.input_projection"]),
        Projector::Gemma3 => ("mm.soft_emb_norm", &["mm.input_projection"]),
        Projector::Idefics3 => ("", &["mm.model.fc"]),
        Projector::InternVl => ("mm.model.mlp.0", &["mm.model.mlp.1", "mm.model.mlp.3"]),
        Projector::Llava => ("", &["mm.0", "mm.2"]),
        // Mistral 3 has a merger before the two of Pixtral.
        Projector::Pixtral if connector.linears().count() == 2 => ("", &["mm.1", "mm.2"]),
        Projector::Pixtral => ("mm.input_norm", &["mm.patch_merger", "mm.1", "mm.2"]),
        Projector::Qwen2 | Projector::Qwen25 | Projector::Qwen3 => ("v.post_ln", &["mm.0", "mm.2"]),
    };
    (norm.to_owned(), linears.iter().map(|&name| name.to_owned()).collect())
}

/// The tensors of a connector: of its norm, then of its linear modules in their order.
fn connector(all: &mut Vec<(TensorSpec, Output)>, connector: &Connector, (norm, linears): (String, Vec<String>)) {
    use tunesmith_config::vision::Step as Part;
    let (mut linears, mut standardized) = (linears.into_iter(), Vec::new());
    let mut put = |spec: TensorSpec, module: &str, steps: Vec<Step>| {
        // The name of a bare matrix does not end in `.weight`.
        let kind = if spec.name.rsplit_once('.').is_some_and(|(_, kind)| kind == "bias") { "bias" } else { "weight" };
        let output = Output { name: format!("{module}.{kind}"), shape: spec.shape.clone(), steps };
        all.push((spec, output));
    };
    for part in &connector.steps {
        match part {
            Part::Norm(about) => {
                let steps = if about.offset == 0.0 { Vec::new() } else { vec![Step::Added(about.offset)] };
                part.tensors().into_iter().for_each(|spec| put(spec, &norm, steps.clone()));
            }
            Part::Linear(_) | Part::Matrix { .. } => {
                let module = linears.next().unwrap_or_default();
                part.tensors().into_iter().for_each(|spec| put(spec, &module, Vec::new()));
            }
            Part::Standardize { names, size } => {
                let own = ["v.std_bias", "v.std_scale"];
                let output = |name: &str| Output { name: name.into(), shape: vec![*size], steps: Vec::new() };
                let named = names.iter().zip(own).map(|(name, own)| (TensorSpec::new(name, &[*size]), output(own)));
                standardized.extend(named);
            }
            // Steps without tensors.
            Part::PlainNorm { .. }
            | Part::Scale(_)
            | Part::SideBySide(_)
            | Part::ByFeature(_)
            | Part::Mean(_)
            | Part::Function(_)
            | Part::Dropout(_) => {}
        }
    }
    all.extend(standardized);
}

/// What a tensor of the encoder becomes. A patch embedding of several frames is cut into one tensor per frame, and a fused
/// module of queries, keys and values into three.
fn of_encoder(projector: Projector, encoder: &Encoder, spec: &TensorSpec) -> Vec<Output> {
    let inner = spec.name.strip_prefix(&encoder.prefix).unwrap_or(&spec.name);
    let whole = |name: String| vec![Output { name, shape: spec.shape.clone(), steps: Vec::new() }];
    let in_block = inner.strip_prefix(encoder.names.blocks).and_then(|rest| rest.strip_prefix('.')?.split_once('.'));
    let Some((layer, rest)) = in_block else {
        let (module, kind) = inner.rsplit_once('.').unwrap_or((inner, ""));
        let stem = &encoder.names.stem;
        return match encoder.frames {
            _ if inner == stem.class_token => whole("v.class_embd".into()),
            _ if inner == stem.positions => whole("v.position_embd.weight".into()),
            Some(frames) if module == stem.patch && kind == "weight" => {
                (0..frames).map(|frame| of_frame(&spec.shape, frame)).collect()
            }
            _ if module == stem.patch && encoder.channels_last => vec![of_patches(encoder)],
            _ if module == stem.patch => whole(format!("v.patch_embd.{kind}")),
            _ if module == stem.pre_norm => whole(format!("v.pre_ln.{kind}")),
            _ => whole(format!("v.post_ln.{kind}")),
        };
    };
    let names = &encoder.names.block;
    let of = |part: &str| format!("v.blk.{layer}.{part}");
    if rest == names.scale1 || rest == names.scale2 {
        return whole(of(if rest == names.scale1 { "ls1.weight" } else { "ls2.weight" }));
    }
    let (module, kind) = rest.rsplit_once('.').unwrap_or((rest, ""));
    let fused = encoder.fused_qkv && module == names.query;
    if fused && projector != Projector::Qwen3 {
        let rows = spec.shape[0] / 3;
        let cut = |(place, part): (usize, &str)| Output {
            name: of(&format!("{part}.{kind}")),
            shape: [&[rows], &spec.shape[1..]].concat(),
            steps: vec![Step::Rows((place * rows..(place + 1) * rows).collect())],
        };
        return ["attn_q", "attn_k", "attn_v"].into_iter().enumerate().map(cut).collect();
    }
    // llama.cpp applies rotary embeddings to pairs of neighbouring rows of a head.
    let turns = module == names.query || module == names.key;
    if encoder.rope_in_turns && turns {
        let size = encoder.hidden_size / encoder.num_heads;
        let part = if module == names.query { "attn_q" } else { "attn_k" };
        let steps = vec![Step::Rows(paired(encoder.num_heads, size, 0, size))];
        return vec![Output { name: of(&format!("{part}.{kind}")), shape: spec.shape.clone(), steps }];
    }
    // The bounds of a module that clips its values are named after the module.
    let bound = CLIP_BOUNDS.contains(&kind);
    let is = |name: &str| module == if bound { name.rsplit_once('.').map_or(name, |(module, _)| module) } else { name };
    let is_norm = |norms: Option<[&str; 2]>, place: usize| norms.is_some_and(|norms| norms[place] == module);
    let part = match module {
        _ if fused => "attn_qkv",
        _ if is_norm(encoder.qk_norms, 0) => "attn_q_norm",
        _ if is_norm(encoder.qk_norms, 1) => "attn_k_norm",
        _ if is_norm(encoder.post_norms, 0) => "attn_post_norm",
        _ if is_norm(encoder.post_norms, 1) => "ffn_post_norm",
        _ if module == names.norm1 => "ln1",
        _ if is(names.query) => "attn_q",
        _ if is(names.key) => "attn_k",
        _ if is(names.value) => "attn_v",
        _ if is(names.out) => "attn_out",
        _ if module == names.norm2 => "ln2",
        _ if is(names.fc1) && encoder.gated_mlp => "ffn_gate",
        _ if is(names.fc2) => "ffn_down",
        _ => "ffn_up",
    };
    let shape = if bound { vec![1] } else { spec.shape.clone() };
    vec![Output { name: of(&format!("{part}.{kind}")), shape, steps: Vec::new() }]
}

/// A patch embedding on patches `[row, column, channel]` as a convolution, `[width, channels, rows, columns]`.
fn of_patches(encoder: &Encoder) -> Output {
    let (channels, side) = (encoder.channels, encoder.patch_size);
    let of_channel = |channel: usize| (0..side * side).map(move |pixel| pixel * channels + channel);
    Output {
        name: "v.patch_embd.weight".into(),
        shape: vec![encoder.hidden_size, channels, side, side],
        steps: vec![Step::Columns((0..channels).flat_map(of_channel).collect())],
    }
}

/// A frame of a patch embedding, `[width, channels, frames, rows, columns]`: a convolution of its own.
fn of_frame(shape: &[usize], frame: usize) -> Output {
    let [width, channels, frames, rows, columns] = [0, 1, 2, 3, 4].map(|at| shape.get(at).copied().unwrap_or(1));
    let size = rows * columns;
    let own = |channel: usize| (channel * frames + frame) * size..(channel * frames + frame + 1) * size;
    Output {
        name: if frame == 0 { "v.patch_embd.weight".into() } else { format!("v.patch_embd.weight.{frame}") },
        shape: vec![width, channels, rows, columns],
        steps: vec![Step::Columns((0..channels).flat_map(own).collect())],
    }
}

/// How a tensor is stored in a file of this type.
pub(super) fn format(projector: Projector, name: &str, shape: &[usize], format: GgufFormat) -> GgufFormat {
    let plain = matches!(projector, Projector::Gemma3 | Projector::Idefics3);
    match format {
        _ if shape.len() < 2 || name.contains("position_embd") || name == "v.class_embd" => GgufFormat::F32,
        // llama.cpp has no convolution kernels for other formats. It treats Mistral 3's merger as a convolution.
        _ if name.contains("patch_embd") || name.contains("patch_merger") => {
            if format == GgufFormat::F16 && !plain {
                format
            } else {
                GgufFormat::F32
            }
        }
        // llama.cpp transposes this matrix, which it cannot do with blocks of numbers.
        GgufFormat::Q8_0 if projector == Projector::Gemma3 && name == "mm.input_projection.weight" => GgufFormat::F16,
        format => format.of(name, shape),
    }
}
