//! Generation over a cache of latents: of multi-head latent attention. The logits are those of Transformers and of a pass without a cache,
//! within the limits of the goldens; and they are the same to the bit however a text is cut into walks.
use crate::generate::{bits, keeps_latents, latent_bytes, moved, text, uncached};
use crate::parity::{Forward, adapted, close, golden, load, recipe};
use tunesmith::config::TargetModules;
use tunesmith::model::{Drafted, Model, TextCache};

/// The families with goldens that have latent attention.
const FAMILIES: [&str; 7] =
    ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_dense", "moonlight", "glm4_moe_lite", "mistral4"];
/// How far logits may be from stored ones, as for a pass without a cache.
const LOGITS: f32 = 5e-5;

fn best(logits: &[f32]) -> u32 {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32
}

#[test]
fn latent_attention_keeps_latents_and_answers_as_without_a_cache() {
    for family in FAMILIES {
        let adapted = adapted(family, &golden(family).join("adapter_init"), 0);
        let mut on_projection = recipe();
        on_projection.tuning.lora.target_modules = TargetModules::List(vec!["kv_b_proj".into(), "o_proj".into()]);
        let mut dora = on_projection.clone();
        dora.tuning.lora.use_dora = true;
        for (what, model, keeps) in [
            ("adapters of the golden", adapted, true),
            ("LoRA on the projection", moved(load(family, &on_projection)), true),
            ("DoRA on the projection", moved(load(family, &dora)), false),
        ] {
            let (mut whole, mut cache) = (text(4, 33), model.cache());
            let mut logits = model.extend(&mut [(&mut cache, &whole)]).unwrap().row(0);
            assert_eq!(bits(&logits), bits(&uncached(&model, &whole)), "{family}, {what}: a prompt is read as ever");
            assert_eq!(latent_bytes(&model, 33) == Some(cache.bytes()), keeps, "{family}, {what}: {}", cache.bytes());
            for _ in 0..30 {
                whole.push(best(&logits));
                let wanted = uncached(&model, &whole);
                let (token, mut copy) = ([whole[whole.len() - 1]], cache.clone());
                logits = model.extend(&mut [(&mut cache, &token)]).unwrap().row(0);
                let at = format!("{family}, {what}: {} tokens", whole.len());
                assert_eq!(best(&logits), best(&wanted), "{at}");
                if keeps {
                    close(&at, &logits, &wanted, LOGITS);
                } else {
                    assert_eq!(bits(&logits), bits(&wanted), "{at}");
                }
                // In company of a prompt, and from a copy that was not asked before.
                let mut other = model.cache();
                let both = model.extend(&mut [(&mut other, &text(9, 25)), (&mut copy, &token)]).unwrap();
                assert_eq!(bits(&both.row(1)), bits(&logits), "{at}: in company");
            }
            assert_eq!(latent_bytes(&model, 63) == Some(cache.bytes()), keeps, "{family}, {what}");
        }
    }
}

#[test]
fn logits_over_latents_are_those_of_transformers() {
    for family in FAMILIES {
        let forward = Forward::read(family);
        let [base, tuned] = [load(family, &recipe()), adapted(family, &golden(family).join("adapter_init"), 0)];
        for (suffix, model) in [("base", base), ("lora", tuned)] {
            let stored = forward.tensors[&format!("logits_{suffix}")].1.chunks(model.arch.vocab_size);
            let [row, position] =
                ["sel_row", "sel_pos"].map(|name| forward.tensors[name].1.iter().map(|&at| at as usize));
            let mut compared = 0;
            for ((row, position), wanted) in row.zip(position).zip(stored) {
                let ids = &forward.examples[row].input_ids[..=position];
                // Three tokens are the prompt, and all others its answer.
                let (mut cache, mut logits) = (model.cache(), Vec::new());
                for piece in
                    std::iter::once(&ids[..3.min(ids.len())]).chain(ids.iter().skip(3).map(std::slice::from_ref))
                {
                    logits = model.extend(&mut [(&mut cache, piece)]).unwrap().row(0);
                }
                close(&format!("{family}, {suffix}: row {row} at {position}"), &logits, wanted, LOGITS);
                compared += usize::from(position > 3);
            }
            assert!(compared > 1 && keeps_latents(&model), "{family}, {suffix}: {compared} positions after a prompt");
        }
    }
}

#[test]
fn products_in_bfloat16_round_a_prompt_as_ever_and_latents_less() {
    let mut config = recipe();
    config.train.bf16 = true;
    for family in ["deepseek_v2", "deepseek_v3_dense"] {
        let [model, exact] = [&config, &recipe()].map(|config| moved(load(family, config)));
        let (whole, mut cache) = (text(4, 60), model.cache());
        let prompt = model.extend(&mut [(&mut cache, &whole[..33])]).unwrap().row(0);
        assert_eq!(bits(&prompt), bits(&uncached(&model, &whole[..33])), "{family}");
        let mut far = [0.0f32; 2];
        for end in 34..=60 {
            let logits = model.extend(&mut [(&mut cache, &whole[end - 1..end])]).unwrap().row(0);
            let wanted = uncached(&exact, &whole[..end]);
            for (far, found) in far.iter_mut().zip([&logits, &uncached(&model, &whole[..end])]) {
                *far = found.iter().zip(&wanted).fold(*far, |far, (found, wanted)| far.max((found - wanted).abs()));
            }
        }
        eprintln!("{family} {far:?}");
        assert!(far[0] <= 2.0 * far[1], "{family}: {far:?} from float32");
    }
}

/// A text that goes on to each of `ends`, and its logits there.
fn walked(model: &Model, mut cache: TextCache, whole: &[u32], ends: &[usize]) -> (TextCache, Vec<Vec<u32>>) {
    let mut logits = Vec::new();
    for &end in ends {
        let piece = &whole[cache.tokens().len()..end];
        logits.push(bits(&model.extend(&mut [(&mut cache, piece)]).unwrap().row(0)));
    }
    (cache, logits)
}

#[test]
fn a_text_over_latents_has_the_same_bits_however_it_is_cut() {
    const PROMPT: usize = 37;
    for family in FAMILIES {
        let model = adapted(family, &golden(family).join("adapter_init"), 0);
        let whole = text(6, 90);
        let start = || {
            let mut cache = model.cache();
            cache.expect_prompt(PROMPT);
            cache
        };
        let one_by_one: Vec<usize> = (PROMPT..=90).collect();
        let (_, wanted) = walked(&model, start(), &whole, &one_by_one);
        let check = |logits: &[Vec<u32>], ends: &[usize], what: &str| {
            for (found, &end) in logits.iter().zip(ends).filter(|(_, end)| **end >= PROMPT) {
                assert!(*found == wanted[end - PROMPT], "{family}, {what}: at {end}");
            }
        };
        assert_eq!(wanted[0], bits(&uncached(&model, &whole[..PROMPT])), "{family}: the prompt");
        for (what, ends) in [
            ("a prompt in pieces", &[1, 2, 20, 36, 37, 38, 39, 90][..]),
            ("a prompt and a part of its answer", &[50, 51, 90]),
            ("pieces of an answer", &[37, 38, 55, 72, 73, 90]),
            ("at once", &[90]),
        ] {
            check(&walked(&model, start(), &whole, ends).1, ends, what);
        }
        // Given up for other texts, and read again.
        let (mut parked, _) = walked(&model, start(), &whole, &[37, 38, 60]);
        let tokens = parked.give_up();
        assert!(tokens == whole[..60] && parked.bytes() == 0, "{family}");
        check(&walked(&model, parked, &whole, &[60, 61, 90]).1, &[60, 61, 90], "after parking");
        // Goes back, from tokens that another copy still has.
        let (cache, _) = walked(&model, start(), &whole, &[37, 50]);
        let (mut other, _) = walked(&model, cache.clone(), &[&whole[..50], &text(2, 20)].concat(), &[51, 70]);
        assert!(other.truncate(48));
        check(&walked(&model, other, &whole, &[49, 90]).1, &[49, 90], "after going back");
        check(&walked(&model, cache, &whole, &[51, 90]).1, &[51, 90], "its copy");
        // Guessed tokens: a row of logits for each.
        let (mut cache, _) = walked(&model, start(), &whole, &[37]);
        for (from, drafted) in [(37, 9), (47, 1), (49, 30)] {
            let tokens = &whole[from..=from + drafted];
            let logits = model.extend_drafted(&mut [Drafted { cache: &mut cache, tokens, drafted }]).unwrap();
            let rows: Vec<Vec<u32>> = (0..=drafted).map(|row| bits(&logits.row(row))).collect();
            check(&rows, &(from + 1..=from + 1 + drafted).collect::<Vec<_>>(), "guessed");
        }
        // Beside texts in and after their prompts.
        let mut beside = [model.cache(), model.cache()];
        beside[0].expect_prompt(60);
        let mut cache = start();
        for (end, others) in
            [(20, [5, 30]), (37, [21, 31]), (38, [40, 32]), (60, [61, 50]), (61, [62, 51]), (90, [80, 90])]
        {
            let [first, second] = &mut beside;
            let texts = [text(7, 80), text(8, 90)];
            let pieces = [&texts[0][first.tokens().len()..others[0]], &texts[1][second.tokens().len()..others[1]]];
            let own = &whole[cache.tokens().len()..end];
            let logits = model.extend(&mut [(first, pieces[0]), (&mut cache, own), (second, pieces[1])]).unwrap();
            check(&[bits(&logits.row(1))], &[end], "in company");
        }
    }
}
