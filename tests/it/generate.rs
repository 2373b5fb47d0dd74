//! Generation: with a cache as without to the bit, alone as in company, and as Transformers' `generate`
//! (`tests/golden/generate`).
use crate::parity::{FAMILIES, adapted, adapter_config, golden, load, put, recipe, tensors};
use serde_json::Value;
use std::path::Path;
use tunesmith::config::Dtype;
use tunesmith::data::batch::{Batch, Example};
use tunesmith::eval::beam::{Beams, EarlyStopping};
use tunesmith::eval::chat::Memory;
use tunesmith::eval::sample::{Sampling, distribution, penalise};
use tunesmith::eval::{Answer, End, Go, Settings, Strategy, Unwatched, Watcher, While, generate};
use tunesmith::model::Model;

/// The logits after the last token, from the whole text.
fn uncached(model: &Model, text: &[u32]) -> Vec<f32> {
    let example = Example { input_ids: text.to_vec(), labels: vec![-100; text.len()] };
    model.logits(&Batch::from_examples([&example]), &[text.len() - 1]).unwrap()
}

fn text(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|at| 3 + (seed * 7919 + at * 104_729 + at * at * 31) % 500).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Texts of several lengths go on together by pieces of several lengths; each text's logits are those of the text alone.
fn check_cache(model: &Model) {
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
            assert_eq!(bits(&logits.row(row)), bits(&wanted), "text {index} at {}", ends[index]);
            let largest = wanted.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(wanted[logits.best()[row] as usize], largest);
        }
    }
    // A text goes back and takes another turn.
    let mut cache = caches.swap_remove(0);
    if cache.truncate(30) {
        let other = [&texts[0][..30], &[77, 78]].concat();
        let logits = model.extend(&mut [(&mut cache, &[77, 78])]).unwrap();
        assert_eq!(bits(&logits.row(0)), bits(&uncached(model, &other)));
    }
}

#[test]
fn every_family_goes_on_from_its_cache_to_the_bit() {
    for family in FAMILIES {
        let dir = golden(family).join("adapter_init");
        check_cache(&adapted(family, &dir, 0));
    }
}

#[test]
fn every_adapter_and_storage_goes_on_from_its_cache_to_the_bit() {
    for (variant, family) in
        [("dora", "llama"), ("rslora", "llama"), ("modules_to_save", "llama"), ("patterns", "llama"), ("ia3", "qwen2")]
    {
        let dir = golden("variants").join(variant).join("adapter_final");
        let mut model = load(family, &adapter_config(&dir.join("adapter_config.json")));
        put(&mut model, &tensors(&dir.join("adapter_model.safetensors")));
        check_cache(&model);
    }
    let mut config = recipe();
    config.model.dtype = Dtype::Bfloat16;
    check_cache(&load("qwen3", &config));
}

#[test]
fn answers_in_company_equal_answers_alone() {
    let model = adapted("gemma3", &golden("gemma3").join("adapter_init"), 0);
    let prompts: Vec<Vec<u32>> = (0..21).map(|seed| text(seed, 1 + seed * 3 % 17)).collect();
    let mut ends = Vec::new();
    let how = Sampling { temperature: 0.9, top_k: 50, top_p: 0.95, min_p: 0.0, seed: 3 };
    for strategy in [
        Strategy::Greedy,
        Strategy::Sample(how),
        Strategy::Beams(Beams { count: 3, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic }),
    ] {
        let settings =
            Settings { strategy, repetition_penalty: 1.1, ..Settings::greedy(12, 256, (0..512).step_by(7).collect()) };
        let together = generate(&model, &prompts, &settings, &mut Unwatched).unwrap().unwrap();
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
    for family in ["llama", "mistral", "gemma2", "phi3_longrope"] {
        let model = adapted(family, &golden(family).join("adapter_init"), 0);
        let (settings, mut memory) = (Settings::greedy(9, 256, vec![2]), Memory::default());
        let mut prompt = text(5, 11);
        for turn in 0..3 {
            let got = memory.answer(&model, &prompt, &settings, &mut Unwatched).unwrap().unwrap();
            let wanted = generate(&model, std::slice::from_ref(&prompt), &settings, &mut Unwatched).unwrap().unwrap();
            assert_eq!(got, wanted[0], "{family} turn {turn}");
            prompt.extend(&got.tokens);
            prompt.extend(text(turn, 4));
            assert!(memory.known(&prompt) > 11);
        }
        // Another conversation with the same beginning.
        let other = [&prompt[..7], &[9, 9]].concat();
        let got = memory.answer(&model, &other, &settings, &mut Unwatched).unwrap().unwrap();
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
    for family in FAMILIES {
        let base = load(family, &recipe());
        let tuned = adapted(family, &golden(family).join("adapter_init"), 0);
        let cases = golden_beams["families"][family].as_array().unwrap_or_else(|| panic!("{family}"));
        assert!(cases.len() >= 4);
        for case in cases {
            let early_stopping = match &case["early_stopping"] {
                Value::Bool(true) => EarlyStopping::Full,
                Value::String(word) if word == "never" => EarlyStopping::Never,
                _ => EarlyStopping::Heuristic,
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
        let got = distribution(&logits, &how);
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
