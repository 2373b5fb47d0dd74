//! Generation: with a cache it gives the same bits as without, in a batch the same as alone, and it agrees with Transformers'
//! `generate` (`tests/golden/generate`).
use crate::parity::{adapted, families, golden, load, recipe};
use serde_json::Value;
use std::path::Path;
use tunesmith::config::arch::{Arch, PartSpec};
use tunesmith::config::{Bias, Config, Dtype, Mode, Quantization};
use tunesmith::data::batch::{Batch, Example};
use tunesmith::eval::beam::{BeamEarlyStopping, Beams};
use tunesmith::eval::chat::Memory;
use tunesmith::eval::processors::Processors;
use tunesmith::eval::sample::{Sampling, distribution, penalise};
use tunesmith::eval::{Answer, End, Go, PromptLookup, Settings, Strategy, Unwatched, Watcher, While, generate};
use tunesmith::model::stack::Stack;
use tunesmith::model::weights::WeightFiles;
use tunesmith::model::{Drafted, Model, TextCache};
use tunesmith::ops::simd::pair_level;

/// The logits after the last token, from the whole text.
pub fn uncached(model: &Model, text: &[u32]) -> Vec<f32> {
    let example = Example { input_ids: text.to_vec(), labels: vec![-100; text.len()] };
    model.logits(&Batch::from_examples([&example]), &[text.len() - 1]).unwrap()
}

pub fn text(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|at| 3 + (seed * 7919 + at * 104_729 + at * at * 31) % 500).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Whether long sequences are computed in chunks, whose sums have another order than those of a token at a time.
fn has_chunks(model: &Model) -> bool {
    let mut branches = model.arch.blocks.iter().flat_map(|block| &block.branches);
    branches.any(|branch| matches!(branch.part, PartSpec::DeltaNet(_) | PartSpec::Mamba(_)))
}

/// Bytes that the cached latents of `positions` positions take; `None` without latent attention.
pub fn latent_bytes(model: &Model, positions: usize) -> Option<usize> {
    let widths = model.arch.attentions().map(|attention| attention.latent.as_ref().map(|it| it.kv_rank + it.rope_dim));
    Some(widths.sum::<Option<usize>>()? * positions.next_multiple_of(16) * size_of::<f32>()).filter(|bytes| *bytes > 0)
}

/// Whether caches keep latents, over which the tokens of an answer are computed in another order than those of a prompt.
pub fn keeps_latents(model: &Model) -> bool {
    let mut cache = model.cache();
    model.extend(&mut [(&mut cache, &[5])]).unwrap();
    latent_bytes(model, 1) == Some(cache.bytes())
}

/// Logits from a cache are those without one: to the bit, or with chunks or latents within the limit of the goldens' logits.
fn check_same(model: &Model, found: &[f32], wanted: &[f32], what: &str) {
    if has_chunks(model) || keeps_latents(model) {
        let far = found.iter().zip(wanted).map(|(found, wanted)| (found - wanted).abs()).fold(0.0, f32::max);
        assert!(far < 5e-5, "{what}: {far}");
    } else {
        assert_eq!(bits(found), bits(wanted), "{what}");
    }
}

/// Continues texts of several lengths together, in pieces of several lengths. The logits of each text must be those of the
/// text alone.
pub fn check_cache(model: &Model) {
    let texts: Vec<Vec<u32>> = [(1, 40), (2, 23), (3, 61), (4, 17)].map(|(seed, length)| text(seed, length)).to_vec();
    let mut caches: Vec<_> = texts.iter().map(|_| model.cache()).collect();
    // How far each text is after each walk; a text that stays takes no part.
    for ends in [[5, 9, 33, 1], [6, 10, 34, 2], [7, 11, 34, 3], [20, 12, 35, 3], [21, 22, 36, 16], [40, 23, 61, 17]] {
        let going: Vec<usize> = (0..4).filter(|&index| caches[index].tokens().len() < ends[index]).collect();
        let mut parts: Vec<_> = caches
            .iter_mut()
            .enumerate()
            .filter(|(index, _)| going.contains(index))
            .map(|(index, cache)| {
                let start = cache.tokens().len();
                (cache, &texts[index][start..ends[index]])
            })
            .collect();
        let logits = model.extend(&mut parts).unwrap();
        for (row, &index) in going.iter().enumerate() {
            let wanted = uncached(model, &texts[index][..ends[index]]);
            let found = logits.row(row);
            check_same(model, &found, &wanted, &format!("text {index} at {}", ends[index]));
            let largest = found.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(found[logits.best()[row].unwrap() as usize], largest);
        }
    }
    // A text goes back and takes another turn.
    let mut cache = caches.swap_remove(0);
    if cache.truncate(30) {
        let other = [&texts[0][..30], &[77, 78]].concat();
        let logits = model.extend(&mut [(&mut cache, &[77, 78])]).unwrap();
        check_same(model, &logits.row(0), &uncached(model, &other), "another turn");
    }
}

#[test]
fn every_family_goes_on_from_its_cache_to_the_bit() {
    for family in &families() {
        let dir = golden(family).join("adapter_init");
        check_cache(&adapted(family, &dir, 0));
    }
}

/// A model for inference has the logits of the same one for training, to the bit. Numbers with scales apart are summed in another order, and
/// `train.bf16` rounds what weights in bfloat16 are multiplied by, if the processor multiplies that: then the logits are near, and do not
/// depend on how a text is split and what is answered with it. Where a token is between two experts, rounding may choose the other one:
/// then a few logits are not near.
fn check_inference(family: &str, config: &Config, what: &str) {
    let dir = golden(family).join("model");
    let arch = Arch::from_dir(&dir).unwrap();
    let routes = arch.experts_of(0).is_some();
    let quantized = !matches!(config.model.quantization, Quantization::None | Quantization::Auto);
    let rounded = config.train.bf16 && pair_level().is_some();
    let limit = if rounded { 2e-2 } else { 2e-6 };
    let check = |found: &[f32], wanted: &[f32], at: &str| {
        if !quantized && !rounded {
            assert_eq!(bits(found), bits(wanted), "{family}, {what}: {at}");
            return;
        }
        let largest = wanted.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
        let apart = found.iter().zip(wanted).map(|(found, wanted)| (found - wanted).abs());
        let far = apart.filter(|&apart| apart > limit * largest).count();
        let may = if rounded && routes { found.len() / 4 } else { 0 };
        assert!(found.len() == wanted.len() && far <= may, "{family}, {what}: {at}: {far} are not near, of {largest}");
    };
    let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
    let [trained, plain] = [Model::load, |arch: &Arch, weights: Option<&WeightFiles>, config: &Config| {
        Model::load_for_inference(arch, weights, config, &Stack::default())
    }]
    .map(|load| moved(load(&arch, Some(&weights), config).unwrap()));
    for length in [1, 3, 20, 70] {
        let text = text(length, length);
        check(&uncached(&plain, &text), &uncached(&trained, &text), &format!("{length} tokens"));
    }
    if quantized || rounded {
        check_cache(&plain);
    }
    // The caches of some texts, which go on together.
    for count in [1, 4, 7, 13] {
        let texts: Vec<Vec<u32>> = (0..count).map(|seed| text(seed, 9 + seed)).collect();
        let [found, wanted] = [&plain, &trained].map(|model| {
            let mut caches: Vec<_> = texts.iter().map(|_| model.cache()).collect();
            let mut logits = Vec::new();
            for [from, to] in [[0, 7], [7, 8], [8, 9]] {
                let parts = caches.iter_mut().zip(&texts).map(|(cache, text)| (cache, &text[from..to]));
                let last = model.extend(&mut parts.collect::<Vec<_>>()).unwrap();
                logits.extend((0..texts.len()).flat_map(|row| last.row(row)));
            }
            logits
        });
        check(&found, &wanted, &format!("{count} texts"));
    }
}

#[test]
fn a_model_for_inference_has_the_logits_of_the_trained_one() {
    for family in &families() {
        check_inference(family, &recipe(), "float32");
    }
    for (what, family, set) in KINDS {
        let mut config = recipe();
        set(&mut config);
        check_inference(family, &config, what);
    }
}

/// Trained values other than those they begin with, so that every one shows.
pub fn moved(mut model: Model) -> Model {
    for (at, value) in model.params.values_mut().on_host().iter_mut().enumerate() {
        *value += 0.02 * ((at * 7919 % 1000) as f32 / 500.0 - 1.0);
    }
    model
}

/// What is set, and what trained values are moved away from.
type Case = (&'static str, &'static str, fn(&mut Config));

/// Every kind of adapter and every way in which weights are kept, together where a run may have both.
const KINDS: [Case; 24] = [
    ("bfloat16", "qwen3", |config| config.model.dtype = Dtype::Bfloat16),
    ("bfloat16 and DoRA", "llama", |config| {
        (config.model.dtype, config.tuning.lora.use_dora) = (Dtype::Bfloat16, true);
    }),
    ("train.bf16", "llama", |config| config.train.bf16 = true),
    ("bfloat16 and train.bf16", "qwen3", |config| {
        (config.model.dtype, config.train.bf16) = (Dtype::Bfloat16, true);
    }),
    ("train.bf16 and experts", "mixtral", |config| config.train.bf16 = true),
    ("nf4", "llama", |config| config.model.quantization = Quantization::Nf4),
    ("nf4 without double quantization, of a fused family", "phi3", |config| {
        (config.model.quantization, config.model.double_quant) = (Quantization::Nf4, false);
    }),
    ("fp4", "gemma2", |config| config.model.quantization = Quantization::Fp4),
    ("int8", "qwen2", |config| config.model.quantization = Quantization::Int8),
    ("nf4 and DoRA", "qwen3", |config| {
        (config.model.quantization, config.tuning.lora.use_dora) = (Quantization::Nf4, true);
    }),
    ("nf4 and (IA)3", "llama", |config| {
        (config.model.quantization, config.tuning.mode) = (Quantization::Nf4, Mode::Ia3);
    }),
    ("nf4, of latents", "deepseek_v3_dense", |config| config.model.quantization = Quantization::Nf4),
    ("bfloat16, of latents", "deepseek_v3_dense", |config| config.model.dtype = Dtype::Bfloat16),
    ("int8, of latents", "deepseek_v2", |config| config.model.quantization = Quantization::Int8),
    ("DoRA on latents", "deepseek_v3_dense", |config| config.tuning.lora.use_dora = true),
    ("DoRA", "gemma3", |config| config.tuning.lora.use_dora = true),
    ("rank-stabilised", "granite", |config| config.tuning.lora.use_rslora = true),
    ("(IA)3", "mistral", |config| config.tuning.mode = Mode::Ia3),
    ("(IA)3 of a fused family", "phi3", |config| config.tuning.mode = Mode::Ia3),
    ("biases", "qwen2", |config| config.tuning.lora.bias = Bias::All),
    ("a head of its own", "llama", |config| config.tuning.lora.modules_to_save = vec!["lm_head".into()]),
    ("experts", "mixtral", |config| {
        config.tuning.lora.target_parameters = vec!["mlp.experts.gate_up_proj".into(), "mlp.experts.down_proj".into()];
    }),
    ("a router of its own", "mixtral", |config| config.tuning.lora.modules_to_save = vec!["mlp.gate".into()]),
    ("in full", "olmo2", |config| config.tuning.mode = Mode::Full),
];

#[test]
fn every_adapter_and_storage_goes_on_from_its_cache_to_the_bit() {
    let mut answers = Vec::new();
    for (what, family, set) in KINDS {
        let mut config = recipe();
        set(&mut config);
        let (start, model) = (load(family, &config), moved(load(family, &config)));
        let prompt = text(3, 20);
        assert_ne!(uncached(&model, &prompt), uncached(&start, &prompt), "{what}: trained values show");
        check_cache(&model);
        answers.push(uncached(&model, &prompt));
    }
    assert!(answers.iter().all(|logits| logits.iter().all(|logit| logit.is_finite())));
    for family in ["llama", "qwen2"] {
        let dir = golden(family).join("model");
        let mut arch = Arch::from_dir(&dir).unwrap();
        let weights = WeightFiles::open(&dir, &arch.tensors()).unwrap();
        // One that a text of `check_cache` holds, and two that are new.
        arch.grow(vec![text(1, 2)[1], 512, 513]);
        let model = moved(Model::load(&arch, Some(&weights), &recipe()).unwrap());
        check_cache(&model);
        let mut cache = model.cache();
        for at in 0..3 {
            let whole = [512, 513, 512];
            let logits = model.extend(&mut [(&mut cache, &whole[at..=at])]).unwrap();
            assert_eq!(bits(&logits.row(0)), bits(&uncached(&model, &whole[..=at])), "{family} new tokens");
        }
    }
}

#[test]
fn answers_in_company_equal_answers_alone() {
    answers_alone("gemma3");
}

#[test]
fn answers_over_latents_in_company_equal_answers_alone() {
    answers_alone("deepseek_v3");
}

fn answers_alone(family: &str) {
    let model = adapted(family, &golden(family).join("adapter_init"), 0);
    let prompts: Vec<Vec<u32>> = (0..21).map(|seed| text(seed, 1 + seed * 3 % 17)).collect();
    let mut ends = Vec::new();
    let how = Sampling { temperature: 0.9, top_k: 50, top_p: 0.95, min_p: 0.0, seed: 3 };
    for strategy in [
        Strategy::Greedy,
        Strategy::Sample(how),
        Strategy::Beams(Beams { count: 3, length_penalty: 1.0, early_stopping: BeamEarlyStopping::Heuristic }),
    ] {
        let settings =
            Settings { strategy, repetition_penalty: 1.1, ..Settings::greedy(12, 256, (0..512).step_by(7).collect()) };
        let together = generate(&model, &prompts, &settings, &mut Unwatched).unwrap().unwrap();
        for batch_size in [5, 64] {
            let settings = Settings { batch_size: Some(batch_size), ..settings.clone() };
            let others = generate(&model, &prompts, &settings, &mut Unwatched).unwrap().unwrap();
            assert_eq!(others, together, "{strategy:?}, {batch_size} side by side");
        }
        ends.extend(together.iter().map(|answer| (answer.end == End::Stop, answer.tokens.is_empty())));
        for (index, prompt) in prompts.iter().enumerate() {
            let settings = Settings { first_text: index as u64, ..settings.clone() };
            let alone = generate(&model, std::slice::from_ref(prompt), &settings, &mut Unwatched).unwrap().unwrap();
            assert_eq!(alone[0], together[index], "{strategy:?} {index}");
        }
    }
    assert!(ends.contains(&(true, false)) && ends.contains(&(false, false)), "some end early, some by their length");
}

#[test]
fn a_conversation_goes_on_as_if_it_were_read_anew() {
    for family in ["llama", "mistral", "gemma2", "phi3_longrope", "deepseek_v3"] {
        let model = adapted(family, &golden(family).join("adapter_init"), 0);
        let (settings, mut memory) = (Settings::greedy(9, 256, vec![2]), Memory::default());
        let mut prompt = text(5, 11);
        for turn in 0..3 {
            let got = memory.answer(&model, &prompt, &[], &settings, &mut Unwatched).unwrap().unwrap();
            let wanted = generate(&model, std::slice::from_ref(&prompt), &settings, &mut Unwatched).unwrap().unwrap();
            assert_eq!(got, wanted[0], "{family} turn {turn}");
            prompt.extend(&got.tokens);
            prompt.extend(text(turn, 4));
            assert!(memory.known(&prompt, &[]) > 11);
        }
        // Another conversation with the same beginning.
        let other = [&prompt[..7], &[9, 9]].concat();
        let got = memory.answer(&model, &other, &[], &settings, &mut Unwatched).unwrap().unwrap();
        assert_eq!(got, generate(&model, &[other], &settings, &mut Unwatched).unwrap().unwrap()[0]);
    }
}

/// Counts what it hears.
#[derive(Default)]
struct Counting {
    tokens: usize,
    answers: Vec<(usize, Answer)>,
}

impl Watcher for Counting {
    fn token(&mut self, text: usize, tokens: &[u32]) -> tunesmith::Result<Go> {
        self.tokens += 1;
        Ok(if text == 1 && tokens.len() == 3 { Go::EndText } else { Go::On })
    }

    fn answer(&mut self, text: usize, answer: &Answer) -> tunesmith::Result<()> {
        self.answers.push((text, answer.clone()));
        Ok(())
    }
}

#[test]
fn answers_end_with_the_context_the_length_and_the_watchers_word() {
    let model = adapted("llama", &golden("llama").join("adapter_init"), 0);
    let prompts = [vec![5, 6, 7], vec![9, 10], Vec::new(), text(1, 8), text(2, 7)];
    let mut watcher = Counting::default();
    let answers = generate(&model, &prompts, &Settings::greedy(5, 7, Vec::new()), &mut watcher).unwrap().unwrap();
    let ends: Vec<(usize, End)> = answers.iter().map(|answer| (answer.tokens.len(), answer.end)).collect();
    let (stop, context) = (End::Stop, End::Context);
    assert_eq!(ends, [(4, context), (3, stop), (0, stop), (0, context), (0, context)]);
    assert_eq!(watcher.tokens, 7);
    for (text, answer) in &watcher.answers {
        assert_eq!(answer, &answers[*text]);
    }
    let settings = Settings::greedy(5, 99, Vec::new());
    let answer = generate(&model, &prompts[..1], &settings, &mut Unwatched).unwrap().unwrap();
    assert_eq!((answer[0].tokens.len(), answer[0].end), (5, End::Length));
    let mut asked = 0;
    let mut three_times = While(|| {
        asked += 1;
        asked < 4
    });
    assert_eq!(generate(&model, &prompts, &settings, &mut three_times).unwrap(), None);
    assert_eq!(asked, 4, "asked at each token");
    assert!(generate(&model, &[vec![512]], &settings, &mut Unwatched).is_err(), "outside the vocabulary");
}

#[test]
fn drafted_tokens_have_the_logits_of_one_by_one() {
    for family in ["llama", "mistral", "gemma2", "mixtral"] {
        let model = adapted(family, &golden(family).join("adapter_init"), 0);
        let texts = [text(1, 40), text(2, 30)];
        let mut caches = [model.cache(), model.cache()];
        let rows = |caches: &mut [TextCache; 2], ends: [usize; 2], drafted: [usize; 2]| {
            let mut going: Vec<_> = caches
                .iter_mut()
                .zip(&texts)
                .zip(ends.into_iter().zip(drafted))
                .map(|((cache, text), (end, drafted))| {
                    let start = cache.tokens().len();
                    Drafted { cache, tokens: &text[start..end], drafted }
                })
                .collect();
            let logits = model.extend_drafted(&mut going).unwrap();
            let mut row = 0;
            for ((text, end), drafted) in texts.iter().zip(ends).zip(drafted) {
                for length in end - drafted..=end {
                    let wanted = uncached(&model, &text[..length]);
                    assert_eq!(bits(&logits.row(row)), bits(&wanted), "{family} at {length}");
                    row += 1;
                }
            }
        };
        rows(&mut caches, [20, 7], [0, 0]);
        rows(&mut caches, [26, 8], [5, 0]);
        // The last two were wrong.
        assert!(caches[0].truncate(24));
        rows(&mut caches, [40, 30], [12, 20]);
        let refused = model.extend_drafted(&mut [Drafted { cache: &mut caches[0], tokens: &[5], drafted: 1 }]);
        assert!(refused.is_err(), "a text goes on by a token that is none of the guesses");
    }
}

/// Counts the tokens of one text.
struct Counted(usize);

impl Watcher for Counted {
    fn token(&mut self, _: usize, tokens: &[u32]) -> tunesmith::Result<Go> {
        assert_eq!(tokens.len(), self.0 + 1, "one after the other");
        self.0 += 1;
        Ok(Go::On)
    }
}

#[test]
fn guessed_tokens_change_no_answer() {
    for family in &families() {
        let model = adapted(family, &golden(family).join("adapter_init"), 0);
        // What is said twice invites guesses, right and wrong ones; a long text meets windows and rules for long contexts.
        let prompts: Vec<Vec<u32>> = [(1, 9), (2, 30), (3, 4)]
            .map(|(seed, length)| [text(seed, length), text(seed, length), text(seed, 3)].concat())
            .to_vec();
        let sampling = Sampling { temperature: 0.3, top_k: 3, top_p: 1.0, min_p: 0.0, seed: 5 };
        for (strategy, penalty) in [(Strategy::Greedy, 1.0), (Strategy::Sample(sampling), 1.0), (Strategy::Greedy, 1.3)]
        {
            let plain =
                Settings { strategy, repetition_penalty: penalty, ..Settings::greedy(24, 100_000, vec![7, 11]) };
            let lookup = Some(PromptLookup { num_tokens: 10, max_ngram: 2 });
            let guessed = Settings { lookup, ..plain.clone() };
            let wanted = generate(&model, &prompts, &plain, &mut Unwatched).unwrap().unwrap();
            let found = generate(&model, &prompts, &guessed, &mut Unwatched).unwrap().unwrap();
            assert_eq!(found, wanted, "{family}: {strategy:?}");
            let mut counted = Counted(0);
            let alone = generate(&model, &prompts[..1], &guessed, &mut counted).unwrap().unwrap();
            assert_eq!(alone[0], wanted[0], "{family}: {strategy:?}, alone");
            assert_eq!(counted.0, wanted[0].tokens.len());
        }
    }
}

fn stored(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/generate").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn beams_equal_those_of_transformers_in_every_family() {
    let golden_beams = stored("beams.json");
    let max_new = golden_beams["max_new_tokens"].as_u64().unwrap() as usize;
    for family in &families() {
        let base = load(family, &recipe());
        let tuned = adapted(family, &golden(family).join("adapter_init"), 0);
        let cases = golden_beams["families"][family].as_array().unwrap_or_else(|| panic!("{family}"));
        assert!(cases.len() >= 4);
        for case in cases {
            let early_stopping = match &case["early_stopping"] {
                Value::Bool(true) => BeamEarlyStopping::Full,
                Value::String(word) if word == "never" => BeamEarlyStopping::Never,
                _ => BeamEarlyStopping::Heuristic,
            };
            let beams = Beams {
                count: case["num_beams"].as_u64().unwrap() as usize,
                length_penalty: case["length_penalty"].as_f64().unwrap_or(1.0),
                early_stopping,
            };
            let settings = Settings {
                strategy: Strategy::Beams(beams),
                repetition_penalty: case["repetition_penalty"].as_f64().unwrap_or(1.0),
                ..Settings::greedy(max_new, 100_000, ids(&case["eos"]))
            };
            for (side, model) in [("base", &base), ("lora", &tuned)] {
                let answer = generate(model, &[ids(&case["prompt"])], &settings, &mut Unwatched).unwrap().unwrap();
                let mut wanted = ids(&case[side]);
                let ended = wanted.last().is_some_and(|last| settings.stop_ids.contains(last));
                if ended {
                    wanted.pop();
                }
                assert_eq!(answer[0].tokens, wanted, "{family} {side} {beams:?}");
                assert_eq!(answer[0].end, if ended { End::Stop } else { End::Length });
            }
        }
    }
}

#[test]
fn answers_without_repetitions_and_of_a_least_length_are_those_of_transformers() {
    let stored = stored("banned.json");
    let number = |case: &Value, name: &str| case[name].as_u64().unwrap_or_default() as usize;
    for case in stored["rules"].as_array().unwrap() {
        let (text, stop_ids) = (ids(&case["text"]), ids(&case["eos"]));
        let rules = Processors {
            repetition_penalty: 1.0,
            no_repeat_ngram_size: number(case, "no_repeat_ngram_size"),
            min_new_tokens: number(case, "min_new_tokens"),
            stop_ids: &stop_ids,
        };
        let (prompt, answer) = text.split_at(number(case, "prompt"));
        let mut scores = [0.0; 40];
        rules.apply(&mut scores, prompt, answer);
        let banned: Vec<u32> = (0..40).filter(|id| scores[*id as usize] == f32::NEG_INFINITY).collect();
        assert_eq!(banned, ids(&case["banned"]), "{case}");
    }
    for case in stored["answers"].as_array().unwrap() {
        let strategy = match number(case, "num_beams") {
            1 => Strategy::Greedy,
            count => {
                Strategy::Beams(Beams { count, length_penalty: 1.0, early_stopping: BeamEarlyStopping::Heuristic })
            }
        };
        let settings = Settings {
            strategy,
            repetition_penalty: case["repetition_penalty"].as_f64().unwrap_or(1.0),
            no_repeat_ngram_size: number(case, "no_repeat_ngram_size"),
            min_new_tokens: number(case, "min_new_tokens"),
            ..Settings::greedy(number(&stored, "max_new_tokens"), 100_000, ids(&case["eos"]))
        };
        let model = load(case["model"].as_str().unwrap(), &recipe());
        let mut wanted = ids(&case["answer"]);
        wanted.pop_if(|last| settings.stop_ids.contains(last));
        // With guesses too, where there are some.
        let lookup = Some(PromptLookup { num_tokens: 10, max_ngram: 2 }).filter(|_| strategy == Strategy::Greedy);
        for lookup in [None, lookup] {
            let settings = Settings { lookup, ..settings.clone() };
            let answer = generate(&model, &[ids(&case["prompt"])], &settings, &mut Unwatched).unwrap().unwrap();
            assert_eq!(answer[0].tokens, wanted, "{case}");
        }
        // A sample keeps the rules too.
        let how = Sampling { temperature: 1.5, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 4 };
        let drawn = Settings { strategy: Strategy::Sample(how), repetition_penalty: 1.0, ..settings };
        let prompt = ids(&case["prompt"]);
        let answer = generate(&model, std::slice::from_ref(&prompt), &drawn, &mut Unwatched).unwrap().unwrap();
        let (text, size) = ([&prompt[..], &answer[0].tokens].concat(), drawn.no_repeat_ngram_size);
        assert!(answer[0].tokens.len() >= drawn.min_new_tokens, "{answer:?}");
        if size > 0 {
            let grams: Vec<&[u32]> = text.windows(size).collect();
            let new = prompt.len() + 1 - size;
            assert!((new..grams.len()).all(|at| !grams[..at].contains(&grams[at])), "{text:?}");
        }
    }
}

#[test]
fn what_may_be_drawn_equals_the_warpers_of_transformers() {
    for case in stored("sampling.json")["cases"].as_array().unwrap() {
        let number = |name: &str| case[name].as_f64().unwrap();
        let mut logits: Vec<f32> =
            case["logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
        penalise(&mut logits, ids(&case["seen"]).into_iter(), number("repetition_penalty") as f32);
        let how = Sampling {
            temperature: number("temperature"),
            top_k: number("top_k") as usize,
            top_p: number("top_p"),
            min_p: number("min_p"),
            seed: 0,
        };
        let got = distribution(&logits, &how).unwrap();
        let wanted: Vec<(u32, f64)> = case["kept"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap()))
            .collect();
        assert_eq!(
            got.iter().map(|pair| pair.0).collect::<Vec<_>>(),
            wanted.iter().map(|pair| pair.0).collect::<Vec<_>>()
        );
        for (got, wanted) in got.iter().zip(&wanted) {
            assert!((got.1 - wanted.1).abs() < 1e-6, "{got:?} {wanted:?}");
        }
    }
}
