//! Which tensors are trained, and on top of which base: freezing, new tokens, biases, `PiSSA`, stacked adapters.
use std::collections::BTreeMap;
use std::path::Path;

use tunesmith::Kind;
use tunesmith::checkpoint::stamp::{Hashes, KernelInfo, Stamp};
use tunesmith::checkpoint::{AdapterConfig, pissa};
use tunesmith::config::arch::{Arch, TokenRows};
use tunesmith::config::{Bias, Config, FreezeConfig, InitLora, Mode, TargetModules};
use tunesmith::model::stack::{Frozen, Stack};
use tunesmith::model::targets::place;
use tunesmith::model::weights::WeightFiles;
use tunesmith::model::{Model, freeze, init};
use tunesmith::ops::testing::in_vectors;
use tunesmith::train::adapter;

use super::parity::{Forward, adapter_config, close, golden, load, put, recipe, tensors};

const LOGITS: f32 = 5e-5;

fn open(family: &str) -> (Arch, WeightFiles) {
    let dir = golden(family).join("model");
    let arch = Arch::from_dir(&dir).unwrap();
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    (arch, weights)
}

/// The gradient of every trained tensor on the golden batch.
fn gradients(model: &mut Model) -> BTreeMap<String, Vec<f32>> {
    let batch = Forward::read("llama").batch();
    model.params.zero_grads();
    model.forward_backward(&batch, 1.0 / batch.label_tokens() as f32, 1.0, 0).unwrap();
    let specs = &model.params.specs;
    specs.iter().map(|spec| (spec.name.clone(), model.params.grads().slice(spec.range()).read())).collect()
}

fn full(family: &str) -> BTreeMap<String, Vec<f32>> {
    let mut config = recipe();
    config.tuning.mode = Mode::Full;
    gradients(&mut load(family, &config))
}

fn frozen_but(layers: i64, modules: &[&str], patterns: &[&str]) -> FreezeConfig {
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
    FreezeConfig { trainable_layers: layers, trainable_modules: words(modules), trainable_patterns: words(patterns) }
}

#[test]
fn frozen_training_has_the_gradients_of_full_training() {
    // Tiles would sum the frozen matrices, which are kept in bfloat16, in another order than trained ones.
    in_vectors(|| {
        for (family, freeze) in [
            ("llama", frozen_but(1, &[], &[])),
            ("llama", frozen_but(-1, &["self_attn", "head"], &[])),
            ("llama", frozen_but(0, &["norms"], &["model.embed"])),
            ("qwen2", frozen_but(0, &["head", "bias"], &[])),
            ("qwen3", frozen_but(1, &["q_norm"], &[])),
        ] {
            let full = full(family);
            let mut config = recipe();
            config.tuning.mode = Mode::Freeze;
            config.tuning.freeze = freeze;
            let mut model = load(family, &config);
            let some = gradients(&mut model);
            assert!(!some.is_empty() && some.len() < full.len());
            for (name, gradient) in &some {
                assert!(gradient.iter().any(|&value| value != 0.0), "{name}");
                assert!(gradient == &full[name], "{family} {name}: the same bits");
            }
        }
    });
}

#[test]
fn freezing_names_tensors_by_block_part_and_pattern() {
    let (arch, _) = open("llama");
    let named = |layers, modules: &[&str], patterns: &[&str]| {
        freeze::trained_tensors(&arch, &frozen_but(layers, modules, patterns)).unwrap()
    };
    let of_block = |names: &[String], block: usize| {
        let prefix = format!("model.layers.{block}.");
        names.iter().filter(|name| name.starts_with(&prefix)).count()
    };
    let last = named(1, &[], &[]);
    assert_eq!((last.len(), of_block(&last, 1)), (9, 9));
    assert_eq!(of_block(&named(-1, &[], &[]), 0), 9);
    assert_eq!(named(0, &["norms"], &[]).len(), 5, "two a block and the last");
    assert_eq!(named(0, &["head", "embeddings"], &[]), ["model.embed_tokens.weight", "lm_head.weight"]);
    assert_eq!(named(1, &["q_proj", "norm"], &[]), ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"]);
    assert_eq!(named(1, &["head"], &[]).len(), 10, "the block, and the head beside it");
    assert_eq!(named(0, &[], &[r"model.layers.[01].mlp.up"]).len(), 2);
    let (tied, _) = open("qwen2");
    let head = freeze::trained_tensors(&tied, &frozen_but(0, &["head"], &[])).unwrap();
    assert_eq!(head, ["model.embed_tokens.weight"], "one matrix for both");
    for (freeze, fragment) in [
        (frozen_but(0, &[], &[]), "names nothing to train"),
        (frozen_but(3, &[], &[]), "the model has 2 blocks"),
        (frozen_but(0, &["q_porj"], &[]), "did you mean q_proj?"),
        (frozen_but(0, &[], &["lm_head.weight["]), "regular expression"),
        (frozen_but(0, &[], &["layers"]), "matches no tensor"),
    ] {
        let error = freeze::trained_tensors(&arch, &freeze).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        assert!(error.to_string().contains(fragment), "{error}");
    }
}

#[test]
fn an_experts_gate_and_up_are_trained_together_or_refused_by_name() {
    for family in ["mixtral", "qwen3_moe"] {
        let (arch, _) = open(family);
        let named =
            |modules: &[&str], patterns: &[&str]| freeze::trained_tensors(&arch, &frozen_but(0, modules, patterns));
        let experts = arch.experts_of(1).unwrap();
        let whole = named(&["mlp.experts"], &[]).unwrap();
        let both = named(&["mlp.experts.gate_up_proj"], &[]).unwrap();
        let down = named(&[], &["model.layers.1.mlp.experts.down_proj"]).unwrap();
        assert_eq!((both.len() * 3, down.len()), (whole.len() * 2, experts.count));
        assert!(down.iter().all(|name| name.starts_with("model.layers.1.")));
        assert_eq!(named(&["mlp.gate"], &[]).unwrap().len(), arch.num_hidden_layers, "the routers");
        let names: Vec<String> = experts.names(0).iter().map(|name| format!("model.layers.0.{name}")).collect();
        let [gate, up, _]: [String; 3] = names.try_into().unwrap();
        let error = named(&[], &[&gate]).unwrap_err();
        assert_eq!(error.kind(), Kind::Config);
        let text = error.to_string();
        assert!(text.contains(&gate) && text.contains(&up) && text.contains("mlp.experts.gate_up_proj"), "{text}");
        // What is named trains.
        let mut config = recipe();
        config.tuning.mode = Mode::Freeze;
        config.tuning.freeze = frozen_but(0, &["mlp.experts.gate_up_proj"], &[]);
        assert_eq!(load(family, &config).params.specs.len(), both.len());
    }
}

#[test]
fn biases_beside_adapters_have_the_gradients_of_full_training() {
    let full = full("qwen2");
    for (bias, count) in [(Bias::All, 6), (Bias::LoraOnly, 2)] {
        let mut config = recipe();
        config.tuning.lora.bias = bias;
        config.tuning.lora.target_modules = TargetModules::List(vec!["q_proj".into()]);
        let some = gradients(&mut load("qwen2", &config));
        let biases: Vec<_> = some.iter().filter(|(name, _)| name.ends_with("bias")).collect();
        assert_eq!(biases.len(), count);
        for (name, gradient) in biases {
            let wrapped = name.contains("q_proj");
            assert_eq!(name.contains("base_layer"), wrapped, "{name}");
            close(name, gradient, &full[&name.replace(".base_layer", "")], 1e-6);
        }
    }
}

#[test]
fn rows_of_tokens_have_the_gradients_of_the_whole_matrices() {
    // Gemma 2: scaled embeddings, and a cap on the logits that the rows of the head are below.
    for family in ["llama", "qwen2", "gemma2", "granite"] {
        let (mut arch, weights) = open(family);
        let batch = Forward::read(family).batch();
        let hidden = arch.hidden_size;
        // Tokens that are inputs, targets or both, and one beyond the vocabulary.
        let tokens = vec![batch.tokens[1], batch.tokens[3], batch.targets[5].max(7) as u32, arch.vocab_size as u32];
        arch.grow(tokens.clone());
        assert_eq!(arch.vocab_size, 513);
        let rows = |config: &Config| Model::load(&arch, Some(&weights), config).unwrap();
        let mut by_rows = rows(&recipe());
        let mut whole = recipe();
        whole.tuning.mode = Mode::Full;
        let mut in_full = rows(&whole);
        let (some, all) = (gradients(&mut by_rows), gradients(&mut in_full));
        let tables =
            if arch.tie_word_embeddings { vec!["model.embed_tokens"] } else { vec!["model.embed_tokens", "lm_head"] };
        for table in &tables {
            let rows = &some[&format!("{table}.token_adapter.trainable_tokens_delta")];
            let matrix = &all[&format!("{table}.weight")];
            let largest = matrix.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            for (row, &token) in rows.chunks_exact(hidden).zip(&tokens) {
                close(table, row, &matrix[token as usize * hidden..][..hidden], 5e-6 * largest);
            }
            // A new row starts as the mean of the others.
            let (_, stored) = weights.read(&format!("{table}.weight")).unwrap();
            let mean: f32 = stored.iter().step_by(hidden).sum::<f32>() / 512.0;
            let start = by_rows.params.find(&format!("{table}.token_adapter.trainable_tokens_delta")).unwrap().range();
            assert!((by_rows.params.values().to_host()[start.end - hidden] - mean).abs() < 1e-5);
        }
        assert_eq!(some.len(), 14 * arch.num_hidden_layers + tables.len());
        // What the rows become is what the next pass sees.
        let before = by_rows.token_losses(&batch).unwrap();
        let spec = by_rows.params.find("model.embed_tokens.token_adapter.trainable_tokens_delta").unwrap().range();
        by_rows.params.values_mut().slice(spec).on_host().fill(0.25);
        assert_ne!(by_rows.token_losses(&batch).unwrap(), before);
    }
}

#[test]
fn a_head_of_its_own_starts_as_the_matrix_that_was_shared() {
    let (mut arch, weights) = open("qwen2");
    arch.separate(&["lm_head".to_owned()]);
    let mut config = recipe();
    config.tuning.lora.modules_to_save = vec!["embed_tokens".into(), "lm_head".into()];
    // As stored, and as drawn without files; with new rows, which start alike.
    for (weights, tokens) in [(Some(&weights), vec![]), (None, vec![]), (Some(&weights), vec![512])] {
        arch.grow(tokens);
        let model = Model::load(&arch, weights, &config).unwrap();
        let table = |name: &str| model.params.values().slice(model.params.find(name).unwrap().range()).read();
        let (embedding, head) = (table("model.embed_tokens.weight"), table("lm_head.weight"));
        assert!(embedding == head && embedding.len() == arch.vocab_size * arch.hidden_size);
    }
    // Frozen, it is the base's.
    let losses = |model: &Model| model.token_losses(&Forward::read("qwen2").batch()).unwrap();
    let (tied, weights) = open("qwen2");
    arch = tied.clone();
    arch.separate(&["lm_head".to_owned()]);
    let apart = Model::load(&arch, Some(&weights), &recipe()).unwrap();
    assert!(losses(&apart) == losses(&Model::load(&tied, Some(&weights), &recipe()).unwrap()), "the same bits");
}

#[test]
fn pissa_takes_out_of_the_weight_what_peft_takes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/peft/pissa.safetensors");
    let stored = tensors(&path);
    let mut cases = 0;
    for (name, (shape, weight)) in
        stored.iter().filter(|(name, _)| name.rsplit_once('.').is_some_and(|(_, part)| part == "w"))
    {
        let of = |part: &str| &stored[&name.replace(".w", part)];
        let (rows, cols, rank, scale) = (shape[0], shape[1], of(".a").0[0], of(".scale").1[0]);
        let rounds = (name == "fast.w").then(|| (16, init::Stream::new(1, name)));
        let mut rest = weight.clone();
        let [a, b] = tunesmith::model::adapters::start::pissa(&mut rest, cols, rank, scale, rounds);
        close(&format!("{name}: what is left"), &rest, &of(".rest").1, 2e-6);
        // A row of A and a column of B may both have the other sign.
        for k in 0..rank {
            let product = |a: &[f32], b: &[f32]| -> Vec<f32> {
                (0..rows * cols).map(|at| b[at / cols * rank + k] * a[k * cols + at % cols]).collect()
            };
            close(&format!("{name} {k}"), &product(&a, &b), &product(&of(".a").1, &of(".b").1), 2e-5);
        }
        cases += 1;
    }
    assert_eq!(cases, 6);
}

#[test]
fn pissa_starts_as_the_base_and_ends_as_lora_of_twice_the_rank() {
    let forward = Forward::read("llama");
    for (init, dora, stabilised) in
        [(InitLora::Pissa, false, false), (InitLora::PissaRounds(4), false, true), (InitLora::Pissa, true, false)]
    {
        let mut config = recipe();
        let lora = &mut config.tuning.lora;
        (lora.r, lora.lora_alpha, lora.init_lora_weights) = (3, 5.0, init);
        (lora.use_dora, lora.use_rslora) = (dora, stabilised);
        let mut model = load("llama", &config);
        forward.check(&model, &forward.tensors, "_base");
        for (at, value) in model.params.values_mut().on_host().iter_mut().enumerate() {
            *value += 0.02 * (at as f32).sin();
        }
        let trained = model.token_losses(&forward.batch()).unwrap();

        let params = &model.params;
        let values = params.values().read();
        let named = tunesmith::checkpoint::named(&params.specs, &values);
        let start = params.start().unwrap().read();
        let start: Vec<&[f32]> = params.specs.iter().map(|spec| &start[spec.range()]).collect();
        let placements = place(&model.arch, &config.tuning.lora).unwrap();
        let own = AdapterConfig::of(&config.tuning, &placements, None);
        let (plain, tensors) = pissa::as_lora(&own, &named, &start);
        let mut config = recipe();
        config.tuning = plain.settings(&model.arch, &config.tuning).unwrap();
        assert_eq!((config.tuning.lora.r, config.tuning.lora.init_lora_weights), (6, InitLora::Kaiming));
        let mut again = load("llama", &config);
        let stored = tensors.into_iter().map(|(name, shape, values)| (name, (shape, values))).collect();
        put(&mut again, &stored);
        close("losses", &again.token_losses(&forward.batch()).unwrap(), &trained, LOGITS);
    }
}

#[test]
fn adapters_below_the_trained_one_act_as_on_top() {
    let (arch, weights) = open("llama");
    let forward = Forward::read("llama");
    for (dir, stored, suffix) in [
        ("llama/adapter_init", tensors(&golden("llama/forward.safetensors")), "_lora"),
        ("variants/dora/adapter_init", tensors(&golden("variants/dora/forward.safetensors")), ""),
    ] {
        let (stack, hashes) = adapter::stack(&[golden(dir)], &mut arch.clone()).unwrap();
        assert_eq!(hashes.len(), 1);
        let model = Model::load_on(&arch, Some(&weights), &recipe(), &stack).unwrap();
        forward.check(&model, &stored, suffix);
    }
    // Factors: rows, columns and biases of the base times what was trained.
    let (mut qwen, stored) = (open("qwen2"), tensors(&golden("variants/ia3/forward.safetensors")));
    let (stack, _) = adapter::stack(&[golden("variants/ia3/adapter_init")], &mut qwen.0).unwrap();
    let model = Model::load_on(&qwen.0, Some(&qwen.1), &recipe(), &stack).unwrap();
    Forward::read("qwen2").check(&model, &stored, "");
    // Two, of which the second has a head of its own: the same as the second trained on the first.
    let dirs = [golden("llama/adapter_init"), golden("variants/modules_to_save/adapter_final")];
    let (both, _) = adapter::stack(&dirs, &mut arch.clone()).unwrap();
    let merged = Model::load_on(&arch, Some(&weights), &recipe(), &both).unwrap();
    let (first, _) = adapter::stack(&dirs[..1], &mut arch.clone()).unwrap();
    let config = adapter_config(&dirs[1].join("adapter_config.json"));
    let mut on_top = Model::load_on(&arch, Some(&weights), &config, &first).unwrap();
    put(&mut on_top, &tensors(&dirs[1].join("adapter_model.safetensors")));
    let losses = |model: &Model| model.token_losses(&forward.batch()).unwrap();
    close("losses", &losses(&merged), &losses(&on_top), LOGITS);

    let foreign = adapter::stack(&[golden("qwen3/adapter_init")], &mut arch.clone()).unwrap_err();
    assert_eq!(foreign.kind(), Kind::Checkpoint, "{foreign}");
    let short = BTreeMap::from([("model.norm.weight".to_owned(), (vec![3], vec![1.0; 3]))]);
    let frozen = Frozen {
        origin: "there".into(),
        placements: BTreeMap::new(),
        tensors: short,
        tokens: TokenRows::default(),
        shared_head: false,
    };
    let error = Model::load_on(&arch, Some(&weights), &recipe(), &Stack(vec![frozen.into()])).unwrap_err();
    assert!(error.to_string().contains("there: model.norm.weight has 3 values, 64 expected"), "{error}");
}

#[test]
fn a_stamp_tells_what_was_taken_out_of_the_base() {
    let (arch, _) = open("llama");
    let stamp = |init| {
        let mut config = recipe();
        config.tuning.lora.init_lora_weights = init;
        let placements = place(&arch, &config.tuning.lora).unwrap();
        let hashes = Hashes { base_model: "b", tokenizer: "t", chat_template: "c", data: "d" };
        let engine =
            KernelInfo { backend: "fused", simd: "avx2".into(), quantization: String::new(), dtype: String::new() };
        Stamp::new(&config, &placements, &[], hashes, engine).adapter
    };
    assert_eq!(stamp(InitLora::Kaiming), stamp(InitLora::Gaussian), "of no effect after step 0");
    assert!(stamp(InitLora::PissaRounds(2)).ends_with("; pissa_niter_2"));
    assert_ne!(stamp(InitLora::Pissa), stamp(InitLora::Kaiming));
}
