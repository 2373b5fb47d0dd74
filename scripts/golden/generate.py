#!/usr/bin/env python3
"""Makes tests/golden/generate: beam search, stopping and sampling as in Transformers' generate, on the models of tests/golden/a.

    python3 scripts/golden/generate.py --out tests/golden/generate [--only NAME ...]

Every beam search runs in float64 too, and is stored only if both agree, so that no near tie decides it.
"""
import argparse
import json
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import numpy as np
import peft
import torch
import transformers
from transformers.generation import logits_process as processors

from architectures import ARCHITECTURES, place
from common import SEED, build, by_length, configuration, dump, float64, forget_lengths, make_weights, with_lora

NEW_TOKENS = 14
# Settings of a search beside the default ones.
SEARCHES = [
    dict(num_beams=2),
    dict(num_beams=3, length_penalty=0.0, early_stopping=True),
    dict(num_beams=4, length_penalty=2.0, early_stopping="never"),
    dict(num_beams=3, length_penalty=-0.5, repetition_penalty=1.3),
]


def caches(model):
    """Whether a cache changes nothing: with one, Transformers does not cut the time step of Nemotron-H's single tokens."""
    return not by_length(model) and model.config.model_type != "nemotron_h"


def search(model, prompt, eos, settings):
    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, bos_token_id=1, eos_token_id=eos, use_cache=caches(model),
        return_dict_in_generate=True, output_scores=True, **settings
    )
    ids = torch.tensor([prompt])
    if by_length(model):
        forget_lengths(model)
    with torch.no_grad():
        found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens = found.sequences[0, len(prompt) :].tolist()
    while tokens and tokens[-1] == 0:
        tokens.pop()
    return tokens, float(found.sequences_scores[0])


def beams(name):
    """For each setting a prompt, the ids that end an answer, and the answer of base and adapter."""
    architecture, config = ARCHITECTURES[name], configuration(name)
    weights = make_weights(config, SEED + 10 * place(name), architecture.stored)
    config.output_router_logits = False  # generate can't, with a cache
    cases, sides, seed = [], {}, 7000 + 1000 * place(name)
    for double in (False, True):
        with float64(double):
            sides["base", double] = build(config, weights, double).eval()
            sides["lora", double] = with_lora(config, weights, SEED + 10 * place(name) + 2, double, **architecture.lora).eval()
    for number, settings in enumerate(SEARCHES):
        for attempt in range(60):
            rng = np.random.default_rng(seed + 100 * number + attempt)
            prompt = rng.integers(3, 512, int(rng.integers(3, 9))).tolist()
            # Many ids end an answer, so that some do: one in twelve.
            eos = sorted(rng.choice(np.arange(3, 512), 42, replace=False).tolist())
            case = dict(prompt=prompt, eos=eos, **settings)
            agreed = True
            for side in ("base", "lora"):
                found = {}
                for double in (False, True):
                    with float64(double):
                        found[double] = search(sides[side, double], prompt, eos, settings)
                agreed &= found[False][0] == found[True][0] and abs(found[False][1] - found[True][1]) < 1e-4
                case |= {side: found[False][0], f"{side}_score": found[False][1]}
            # One of the two ends before its longest answer, where the search doesn't favour long ones; the adapter makes a difference.
            ended = min(len(case["base"]), len(case["lora"])) < NEW_TOKENS or settings.get("length_penalty", 0.0) > 1.0
            # A model that only repeats itself need do neither.
            if agreed and (attempt >= 30 or ended and case["base"] != case["lora"]):
                cases.append(case)
                break
        else:
            raise AssertionError((name, settings))
    return cases


def sampling():
    """Which tokens are left, with which probabilities, of a few rows of logits."""
    cases = []
    settings = [
        dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        dict(temperature=0.7, top_k=5, top_p=1.0, min_p=0.0),
        dict(temperature=1.3, top_k=0, top_p=0.8, min_p=0.0),
        dict(temperature=0.9, top_k=0, top_p=1.0, min_p=0.1),
        dict(temperature=0.8, top_k=12, top_p=0.9, min_p=0.05),
        dict(temperature=0.5, top_k=50, top_p=0.05, min_p=0.0),
    ]
    for number, how in enumerate(settings):
        rng = np.random.default_rng(9000 + number)
        logits = (3 * rng.standard_normal(40)).astype(np.float32)
        if number == 1:
            logits[7] = np.sort(logits)[-5]  # as good as the last one that stays
        seen = rng.integers(0, 40, 9).tolist()
        penalty = [1.0, 1.2, 0.8][number % 3]
        steps = [processors.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1.0 else []
        steps.append(processors.TemperatureLogitsWarper(how["temperature"]))
        if how["top_k"]:
            steps.append(processors.TopKLogitsWarper(how["top_k"]))
        if how["top_p"] < 1.0:
            steps.append(processors.TopPLogitsWarper(how["top_p"]))
        if how["min_p"] > 0.0:
            steps.append(processors.MinPLogitsWarper(how["min_p"]))
        scores = torch.from_numpy(logits)[None]
        for step in steps:
            scores = step(torch.tensor([seen]), scores)
        probabilities = torch.softmax(scores.double(), -1)[0]
        kept = [[at, float(p)] for at, p in enumerate(probabilities) if scores[0, at] > -float("inf")]
        cases.append(dict(how, logits=[float(x) for x in logits], seen=seen, repetition_penalty=penalty, kept=kept))
    return cases


def banned():
    """Which tokens may not come next, and answers without repetitions and of a least length: greedy and with beams."""
    rules = []
    for number in range(24):
        rng = np.random.default_rng(9100 + number)
        # Few ids, so that n-grams come again.
        text = rng.integers(0, 5, int(rng.integers(1, 40))).tolist()
        prompt, size, least = int(rng.integers(1, len(text) + 1)), number % 5, int(rng.integers(0, 20))
        eos = sorted(rng.choice(40, 3, replace=False).tolist())
        steps = [processors.NoRepeatNGramLogitsProcessor(size)] if size else []
        if least:
            steps.append(processors.MinNewTokensLengthLogitsProcessor(prompt, least, eos))
        scores = torch.zeros(1, 40)
        for step in steps:
            scores = step(torch.tensor([text]), scores)
        ids = torch.nonzero(torch.isneginf(scores[0])).flatten().tolist()
        rules.append(dict(text=text, prompt=prompt, no_repeat_ngram_size=size, min_new_tokens=least, eos=eos, banned=ids))
    settings = [
        dict(num_beams=1, no_repeat_ngram_size=2, repetition_penalty=1.1),
        dict(num_beams=1, min_new_tokens=9),
        dict(num_beams=3, no_repeat_ngram_size=1, min_new_tokens=5),
    ]
    answers = []
    for name in ("llama", "gemma2", "mixtral"):
        config, sides = configuration(name), {}
        weights = make_weights(config, SEED + 10 * place(name), ARCHITECTURES[name].stored)
        config.output_router_logits = False
        for double in (False, True):
            with float64(double):
                sides[double] = build(config, weights, double).eval()
        for number, how in enumerate(settings):
            for attempt in range(400):
                rng = np.random.default_rng(9200 + 1000 * number + attempt)
                prompt = rng.integers(3, 512, int(rng.integers(3, 9))).tolist() * 2
                eos = sorted(rng.choice(np.arange(3, 512), 42, replace=False).tolist())
                found = {}
                for double in (False, True):
                    with float64(double):
                        found[double] = answer(sides[double], prompt, eos, how)
                with float64(False):
                    free = {key: value for key, value in how.items() if key not in ("no_repeat_ngram_size", "min_new_tokens")}
                    plain = answer(sides[False], prompt, eos, free)
                if found[False] == found[True] and found[False] != plain:
                    answers.append(dict(model=name, prompt=prompt, eos=eos, **how, answer=found[False]))
                    break
            else:
                raise AssertionError((name, how))
    return dict(rules=rules, answers=answers)


def answer(model, prompt, eos, settings):
    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, bos_token_id=1, eos_token_id=eos, **settings
    )
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens = found[0, len(prompt) :].tolist()
    while tokens and tokens[-1] == 0:
        tokens.pop()
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="+", choices=[*ARCHITECTURES], metavar="NAME", help="the others stay as they are")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.makedirs(args.out, exist_ok=True)
    versions = dict(torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__, python=sys.version.split()[0])
    found = {}
    if args.only:
        with open(f"{args.out}/beams.json", encoding="utf-8") as file:
            found = json.load(file)["families"]
    found |= {name: beams(name) for name in ARCHITECTURES if not args.only or name in args.only}
    with open(f"{args.out}/beams.json", "w", encoding="utf-8") as out:
        json.dump(dict(versions=versions, max_new_tokens=NEW_TOKENS, families=found), out, separators=(",", ":"))
    dump(dict(versions=versions, cases=sampling()), f"{args.out}/sampling.json")
    with open(f"{args.out}/banned.json", "w", encoding="utf-8") as out:
        json.dump(dict(versions=versions, max_new_tokens=NEW_TOKENS, **banned()), out, separators=(",", ":"))


if __name__ == "__main__":
    main()
