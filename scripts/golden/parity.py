#!/usr/bin/env python3
"""Makes tests/golden/a: what PyTorch, Transformers and PEFT compute on tiny random models, in float32 on one thread.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/parity.py --out tests/golden/a [--only NAME ...]

Per architecture: the model, a forward pass with and without an adapter, the adapter's gradients, twenty training steps, and
greedy generation; of some also the gradients of every weight of the model. The same runs in float64 give the tolerances (tolerances.json).
"""
import argparse
import json
import os
import shutil
import sys

# Before torch is imported: no network, and the same instruction set on every machine.
os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import numpy as np
import peft
import torch
import transformers

import variants
from common import *

# Where of the forward batch the logits are stored: (row, position).
STORED = [(0, at) for at in (0, 1, 3, 6, 8, 10, 13, 15, 18, 20, 22, 23)] + [(1, at) for at in (2, 5, 9, 12, 16)] + [(2, at) for at in (1, 4, 8)]
NEW_TOKENS, EOS = 24, 2


def save_model(name, config, weights, folder):
    """Writes the model folder as Transformers 5 does, and the configuration in the older spelling next to it."""
    architecture = ARCHITECTURES[name]
    shutil.rmtree(folder, ignore_errors=True)
    model = build(config, weights).to(DTYPES[architecture.stored])
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder, **({"max_shard_size": architecture.shard} if architecture.shard else {}))
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        written = json.load(file)
    older = dict(architecture.arguments)
    for key in ("architectures", "model_type", "hidden_act", "hidden_activation", "head_dim", "attention_bias", "mlp_bias", "num_key_value_heads",
                "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers", "max_window_layers"):
        if key in written and key not in older:
            older[key] = written[key]
    if "rope_parameters" not in older:  # A family without an older spelling.
        older.setdefault("rope_scaling", None)
    older["torch_dtype"] = str(DTYPES[architecture.stored]).removeprefix("torch.")
    older["transformers_version"] = "4.51.0"
    dump(dict(sorted(older.items())), f"{folder}/config_v4.json")


def reload_difference(folder, spelling, batch, logits):
    """The difference between the model in memory and the saved one, read with the given config file."""
    ids, mask, _ = batch
    copy = f"{folder}.tmp"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    shutil.copy(f"{folder}/{spelling}", f"{copy}/config.json")
    implementation = dict(attn_implementation="eager", experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, **implementation)
    shutil.rmtree(copy)
    with torch.no_grad():
        found = difference(outputs_of(model, ids, mask)[0][mask.bool()], logits[mask.bool()])
    assert found < 1e-6, (folder, spelling, found)
    return found


def greedy(model, prompt):
    """Greedy decoding without a cache: the new ids and the smallest distance between the two best logits."""
    ids, margin = list(prompt), 1e9
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            text = torch.tensor([ids])
            best = outputs_of(model, text, torch.ones_like(text))[0][0, -1].topk(2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            ids.append(int(best.indices[0]))
    return ids[len(prompt) :], margin


def cached_generate(model, prompts):
    """Transformers' own generate: key-value cache, all prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=None, bos_token_id=1, use_cache=True
    )
    with torch.no_grad():
        return model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist()


def generation(config, weights, seed, lora):
    """Two prompts, chosen by seed so that no step is a near tie, and each model's generations."""
    config = copy.deepcopy(config)
    config.output_router_logits = False  # generate can't, with a cache
    base, tuned = build(config, weights).eval(), with_lora(config, weights, seed + 2, **lora).eval()
    answers = []
    for attempt in range(300):
        distinct = 5 if attempt < 100 else 3 if attempt < 200 else 1
        rng = np.random.default_rng(seed + 5000 + attempt)
        prompt = rng.integers(3, config.vocab_size, int(rng.integers(4, 13))).tolist()
        if len(answers) == 1 and len(prompt) == len(answers[0]["prompt"]):
            continue
        found = {}
        for side, model in (("base", base), ("lora", tuned)):
            ids, margin = greedy(model, prompt)
            if margin < 3e-3 or EOS in ids or len(set(ids)) < distinct:
                break
            found |= {side: ids, f"{side}_min_margin": margin}
        if "lora" in found:
            answers.append(dict(prompt=prompt, **found))
        if len(answers) == 2:
            break
    prompts = [answer["prompt"] for answer in answers]
    assert len(answers) == 2
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if config.model_type == "nemotron_h":
        # With a cache, Transformers does not cut the time step of a single token.
        note = "greedy, no eos, no cache: each token from the whole text so far"
    elif rope == "dynamic" and by_length(base):
        # With a cache the keys of each length would keep that length's frequencies.
        note = "greedy, no eos, no cache: each token from the whole text so far, turned by the frequencies of its length"
    elif rope == "longrope":
        # Each prompt alone: the padded length would decide between the short and the long factors. At the switch generate starts anew.
        for side, model in (("base", base), ("lora", tuned)):
            assert [cached_generate(model, [prompt])[0] for prompt in prompts] == [answer[side] for answer in answers]
        note = "greedy, no eos; equal with HF generate (KV cache, each prompt alone), which drops its cache where the factors switch"
    else:
        assert cached_generate(base, prompts) == [answer["base"] for answer in answers]
        assert cached_generate(tuned, prompts) == [answer["lora"] for answer in answers]
        note = "greedy, no eos; equal with HF generate (KV cache, both prompts left-padded in one batch)"
    return dict(max_new_tokens=NEW_TOKENS, eos=None, prompts=answers, note=note)


def architecture(name, seed, rows, out):
    """All files of one architecture; returns how far float32 is from float64."""
    folder = f"{out}/{name}"
    os.makedirs(folder, exist_ok=True)
    config = configuration(name)
    weights = make_weights(config, seed, ARCHITECTURES[name].stored)
    save_model(name, config, weights, f"{folder}/model")
    batch = forward_batch(config.vocab_size, seed + 1)
    ids, mask, labels = batch
    valid = mask.bool()
    tolerances, runs = {}, []
    for double in (False, True):
        with float64(double):
            with torch.no_grad():
                base = forward(build(config, weights, double), *batch)
            model = with_lora(config, weights, seed + 2, double, **ARCHITECTURES[name].lora)
            if not double:
                gaps = watch_routers(model)
                save_adapter(model, f"{folder}/adapter_init")
            tuned = forward(model, *batch, backward=True)
            grads = gradients(model)
            model.zero_grad(set_to_none=True)
            trace = train_trace(model, rows)
            if not double:
                save_adapter(model, f"{folder}/adapter_final")
                for spelling in ("config.json", "config_v4.json"):
                    tolerances[f"reload_{spelling}_max_logit_diff"] = reload_difference(f"{folder}/model", spelling, batch, base[0])
            runs.append((base, tuned, grads, trace, adapter_state(model)))
    (base, tuned, grads, trace, final), (base64, tuned64, grads64, trace64, final64) = runs
    if gaps:
        tolerances["smallest_router_gap"] = min(gaps)
    # Gemma 2's soft cap on the scores and gpt-oss's sinks are not in PyTorch's own attention.
    if config.model_type not in ("gemma2", "gpt_oss"):
        with torch.no_grad():
            sdpa = forward(build(config, weights, attention="sdpa"), *batch)
        tolerances["sdpa_vs_eager_logits"] = difference(sdpa[0][valid], base[0][valid])

    row, position = (torch.tensor(values, dtype=torch.int32) for values in zip(*STORED))
    tensors = dict(input_ids=ids.int(), attention_mask=mask.int(), labels=labels.int(), sel_row=row, sel_pos=position)
    for side, (logits, losses, loss) in (("base", base), ("lora", tuned)):
        tensors |= {f"logits_{side}": logits[row.long(), position.long()], f"nll_{side}": losses, f"loss_{side}": loss.reshape(1)}
    save_tensors(tensors, f"{folder}/forward.safetensors")
    save_tensors(grads, f"{folder}/lora_grads.safetensors")
    if ARCHITECTURES[name].full:
        model = build(config, weights)
        forward(model, *batch, backward=True)
        save_tensors(gradients(model), f"{folder}/full_grads.safetensors")
    hyper = dict(lr=LEARNING_RATE, betas=[0.9, 0.999], eps=1e-8, weight_decay=WEIGHT_DECAY, warmup=WARMUP, steps=STEPS, schedule="cosine",
                 clip=1.0, micro_batch=MICRO_BATCH, grad_accum=GRAD_ACCUM, data="data.json", order="sequential")
    dump(dict(hyper=hyper, steps=beside_float64(trace, trace64)), f"{folder}/trace.json")
    dump(generation(config, weights, seed, ARCHITECTURES[name].lora), f"{folder}/generate.json")
    tolerances |= dict(
        logits_base=difference(base[0][valid], base64[0][valid]),
        logits_lora=difference(tuned[0][valid], tuned64[0][valid]),
        nll=max(difference(base[1], base64[1]), difference(tuned[1], tuned64[1])),
        loss=max(difference(base[2], base64[2]), difference(tuned[2], tuned64[2])),
        grad_rel=max(relative(grads[name], grads64[name]) for name in grads),
        final_adapter_abs=max(difference(final[name], final64[name]) for name in final),
        **trace_differences(trace, trace64),
    )
    return tolerances


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="+", choices=[*ARCHITECTURES, "variants"], metavar="NAME")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.makedirs(args.out, exist_ok=True)
    rows = make_data(BASE["vocab_size"], SEED + 7)
    note = ("training data, in order: step s uses rows [8s, 8s+8): micro-batch 0 = first 4, micro-batch 1 = next 4; "
            "right-pad with id 0, labels -100")
    with open(f"{args.out}/data.json", "w", encoding="utf-8") as out:
        json.dump(dict(note=note, rows=rows), out, separators=(",", ":"))
    path = f"{args.out}/tolerances.json"
    tolerances = {}
    if args.only and os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            tolerances = json.load(file)
    tolerances["versions"] = dict(
        torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__, numpy=np.__version__, python=sys.version.split()[0]
    )
    for name in ARCHITECTURES:
        if not args.only or name in args.only:
            tolerances[name] = architecture(name, SEED + 10 * place(name), rows, args.out)
    if not args.only or "variants" in args.only:
        tolerances["variants"] = variants.make(f"{args.out}/variants", rows)
    dump(tolerances, path)


if __name__ == "__main__":
    main()
