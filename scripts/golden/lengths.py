#!/usr/bin/env python3
"""Makes tests/golden/lengths: models with a recurrent state or a short convolution, of odd sizes, on rows of telling lengths.

    python3 scripts/golden/lengths.py --out tests/golden/lengths

A hidden size of 52, four heads of which all share one key-value head, and rows around the ends of chunks of 64 tokens, and shorter than
the convolution. Each row is alone in Transformers, without padding. NAME has the model, an adapter, the losses of the rows' tokens without
and with it, the last token's logits, and the adapter's gradients of the mean loss. `drift` says how far these are from double precision.
"""
import argparse
import copy
import os

# Before torch is imported: no network, and the same instruction set on every machine.
os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

from common import *

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 130)
ODD = dict(hidden_size=52, num_attention_heads=4, num_key_value_heads=1, vocab_size=64)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=13, mamba_n_groups=1)
# Of each kind of mixer one: the changes to the architecture of that name.
MODELS = {
    "qwen3_5": dict(head_dim=16, linear_num_key_heads=1, linear_num_value_heads=3),
    "olmo_hybrid": dict(head_dim=18),
    "lfm2": dict(num_attention_heads=2, num_key_value_heads=1),
    "granitemoehybrid": dict(num_attention_heads=2, **MAMBA),
    "nemotron_h": dict(head_dim=14, mamba_num_heads=3, n_groups=1),
}


def make(name, seed, out):
    architecture = ARCHITECTURES[name]
    config = getattr(transformers, architecture.kind)(**copy.deepcopy(architecture.arguments | ODD | MODELS[name]))
    weights = make_weights(config, seed, architecture.stored)
    folder = f"{out}/{name}"
    shutil.rmtree(folder, ignore_errors=True)
    model = build(config, weights).to(DTYPES[architecture.stored])
    model.save_pretrained(f"{folder}/model")
    rng = np.random.default_rng(seed + 1)
    rows = [torch.from_numpy(rng.integers(3, config.vocab_size, length))[None] for length in LENGTHS]
    runs = []
    for double in (False, True):
        with float64(double):
            base = build(config, weights, double)
            tuned = with_lora(config, weights, seed + 2, double, **architecture.lora)
            if not double:
                save_adapter(tuned, f"{folder}/adapter")
            found = {}
            for side, model in (("base", base), ("lora", tuned)):
                logits = [model(input_ids=row, use_cache=False).logits for row in rows]
                losses = torch.cat([token_losses(of_row, row, "none") for of_row, row in zip(logits, rows)])
                found |= {f"nll_{side}": losses, f"last_{side}": torch.cat([it[0, -1:] for it in logits])}
            losses.mean().backward()
            runs.append(({key: value.detach() for key, value in found.items()}, gradients(tuned)))
    (found, grads), (found64, grads64) = runs
    of_values = max(difference(value, found64[key]) for key, value in found.items())
    of_gradients = max(relative(grads[key], grads64[key]) for key in grads)
    ids, lengths = torch.cat(rows, 1)[0].int(), torch.tensor(LENGTHS).int()
    save_tensors(dict(ids=ids, lengths=lengths, drift=torch.tensor([of_values, of_gradients]), **found), f"{folder}/rows.safetensors")
    save_tensors(grads, f"{folder}/lora_grads.safetensors")
    print(name, "values:", of_values, "gradients:", of_gradients)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in MODELS:
        # Beside the seeds of tests/golden/a.
        make(name, 500_000 + 10 * place(name), out)


if __name__ == "__main__":
    main()
