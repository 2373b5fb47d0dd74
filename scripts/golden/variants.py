"""The part of parity.py that goes beyond plain LoRA. On the llama model: DoRA, rsLoRA, patterns, modules_to_save, full training, packing. On
the qwen2 model, some of whose modules have biases: adapters that are not LoRA.

    python3 scripts/golden/variants.py --only ia3 tests/golden/a/variants    # one of these alone
"""
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}  # before torch is imported

import numpy as np
import torch

from common import *

STORED = [(0, 5), (0, 23), (1, 16), (2, 8)]
KEPT_OF_FULL = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight")


def lora(tag, out, config, weights, rows, **changes):
    """One LoRA variant: forward, gradients, twenty steps."""
    folder = f"{out}/{tag}"
    os.makedirs(folder, exist_ok=True)
    batch = forward_batch(config.vocab_size, SEED + 1)
    valid = batch[1].bool()
    runs = []
    for double in (False, True):
        with float64(double):
            model = with_lora(config, weights, SEED + 3, double, **changes)
            if not double and "modules_to_save" not in changes:
                save_adapter(model, f"{folder}/adapter_init")
            output = forward(model, *batch, backward=True)
            grads = gradients(model)
            model.zero_grad(set_to_none=True)
            trace = train_trace(model, rows)
            if not double:
                save_adapter(model, f"{folder}/adapter_final")
            runs.append((output, grads, trace, adapter_state(model)))
    (output, grads, trace, final), (output64, grads64, trace64, final64) = runs
    if "modules_to_save" in changes:
        # Only LoRA's tensors are stored: a saved module starts as a copy of the base's tensor.
        start = adapter_state(with_lora(config, weights, SEED + 3, **changes))
        save_tensors({name: value for name, value in start.items() if "lora_" in name}, f"{folder}/lora_init.safetensors")
    row, position = (torch.tensor(values) for values in zip(*STORED))
    logits, losses, loss = output
    tensors = dict(sel_row=row.int(), sel_pos=position.int(), logits=logits[row, position], nll=losses, loss=loss.reshape(1))
    save_tensors(tensors, f"{folder}/forward.safetensors")
    save_tensors({name: value for name, value in grads.items() if "lora_" in name}, f"{folder}/grads.safetensors")
    norms = {name: float(value.double().norm()) for name, value in grads.items()}
    dump(dict(lora=changes, grad_l2=norms, steps=beside_float64(trace, trace64)), f"{folder}/trace.json")
    return dict(
        logits=difference(logits[valid], output64[0][valid]),
        grad_rel=max(relative(grads[name], grads64[name]) for name in grads),
        final_abs=max(difference(final[name], final64[name]) for name in final),
        **trace_differences(trace, trace64),
    )


# Adapters that are not LoRA, on the qwen2 model, and how far their values are moved from where they start.
METHODS = {
    "ia3": (lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"), 0.3),
    "oft": (lambda: peft.OFTConfig(target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], oft_block_size=8, task_type="CAUSAL_LM"), 0.1),
    "oft_exact": (lambda: peft.OFTConfig(target_modules=["k_proj", "up_proj"], r=4, oft_block_size=0, block_share=True, use_cayley_neumann=False, task_type="CAUSAL_LM"), 0.1),
}


def with_method(tag, config, weights, double=False):
    """The model with that adapter, every value moved from its start."""
    settings, spread = METHODS[tag]
    model = peft.get_peft_model(build(config, weights, double), settings())
    rng = np.random.default_rng(SEED + 4)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), dtype=np.float32)).to(parameter.dtype)
                parameter.add_(spread * noise)
    return model.train()


def method(tag, out, rows):
    """An adapter that is not LoRA: forward, gradients, twenty steps; the merged model has the same logits."""
    folder = f"{out}/{tag}"
    os.makedirs(folder, exist_ok=True)
    config = configuration("qwen2")
    weights = make_weights(config, SEED + 10 * list(ARCHITECTURES).index("qwen2"), ARCHITECTURES["qwen2"].stored)
    batch = forward_batch(config.vocab_size, SEED + 10 * list(ARCHITECTURES).index("qwen2") + 1)
    runs = []
    for double in (False, True):
        with float64(double):
            model = with_method(tag, config, weights, double)
            if not double:
                save_method(model, f"{folder}/adapter_init")
            output = forward(model, *batch, backward=True)
            grads = {name.replace(".default", ""): parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
            model.zero_grad(set_to_none=True)
            trace = train_trace(model, rows)
            if not double:
                save_method(model, f"{folder}/adapter_final")
            runs.append((output, grads, trace, adapter_state(model)))
    (output, grads, trace, final), (output64, grads64, trace64, final64) = runs
    logits, losses, loss = output
    valid = batch[1].bool()
    with torch.no_grad():
        merged = with_method(tag, config, weights).merge_and_unload()
        merged = difference(outputs_of(merged, *batch[:2])[0][valid], logits[valid])
    row, position = (torch.tensor(values) for values in zip(*STORED))
    tensors = dict(sel_row=row.int(), sel_pos=position.int(), logits=logits[row, position], nll=losses, loss=loss.reshape(1))
    save_tensors(tensors, f"{folder}/forward.safetensors")
    save_tensors(grads, f"{folder}/grads.safetensors")
    norms = {name: float(value.double().norm()) for name, value in grads.items()}
    dump(dict(grad_l2=norms, steps=beside_float64(trace, trace64)), f"{folder}/trace.json")
    return dict(
        logits=difference(logits[valid], output64[0][valid]),
        merged_vs_unmerged_logits=merged,
        grad_rel=max(relative(grads[name], grads64[name]) for name in grads),
        final_abs=max(difference(final[name], final64[name]) for name in final),
        **trace_differences(trace, trace64),
    )


def save_method(model, folder):
    """Saves an adapter that is not LoRA, as save_adapter does."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    os.remove(f"{folder}/README.md")
    path = f"{folder}/adapter_config.json"
    with open(path, encoding="utf-8") as file:
        written = json.load(file)
    for key in ("target_modules", "feedforward_modules"):
        if written.get(key):
            written[key].sort()
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(written, indent=2, sort_keys=True))


def trainer_groups(model):
    """The parameter groups of the Hugging Face Trainer: no decay on norms and biases."""
    named = list(model.named_parameters())
    plain = [parameter for name, parameter in named if "norm" in name or name.endswith("bias")]
    decayed = [parameter for name, parameter in named if not ("norm" in name or name.endswith("bias"))]
    return [dict(params=decayed, weight_decay=WEIGHT_DECAY), dict(params=plain, weight_decay=0.0)]


def full(tag, out, config, weights, rows, groups):
    """Full training. A few tensors are stored whole, and the norms of the others."""
    folder = f"{out}/{tag}"
    os.makedirs(folder, exist_ok=True)
    batch = forward_batch(config.vocab_size, SEED + 1)
    runs = []
    for double in (False, True):
        with float64(double):
            model = build(config, weights, double)
            forward(model, *batch, backward=True)
            grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            model.zero_grad(set_to_none=True)
            trace = train_trace(model, rows, groups)
            runs.append((grads, trace, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}))
    (grads, trace, final), (grads64, trace64, final64) = runs
    kept = [name for name in final if "norm" in name or name in KEPT_OF_FULL]
    tensors = {f"final.{name}": final[name] for name in kept}
    if groups is None:
        tensors |= {f"grad.{name}": grads[name] for name in kept}
    save_tensors(tensors, f"{folder}/tensors.safetensors")
    norms = {key: {name: float(value.double().norm()) for name, value in side.items()} for key, side in (("grad_l2", grads), ("final_l2", final))}
    dump(dict(**norms, steps=beside_float64(trace, trace64)), f"{folder}/trace.json")
    return dict(
        grad_rel=max(relative(grads[name], grads64[name]) for name in grads),
        final_abs=max(difference(final[name], final64[name]) for name in final),
        **trace_differences(trace, trace64),
    )


def packed(out, config, weights):
    """Three sequences in one row, positions restarting, attention block-diagonal; equal to the same three apart."""
    rng = np.random.default_rng(SEED + 9)
    sequences = [rng.integers(3, 512, length).tolist() for length in (11, 7, 14)]
    labels = [[IGNORE] * 2 + ids[2:] for ids in sequences]
    total = sum(map(len, sequences))
    label_tokens = sum(len(ids) - 2 for ids in sequences)
    positions = torch.tensor([[at for ids in sequences for at in range(len(ids))]])
    owner = torch.tensor([[index for index, ids in enumerate(sequences) for _ in ids]])
    visible = (owner[0][:, None] == owner[0][None]) & torch.tril(torch.ones(total, total, dtype=torch.bool))
    row, row_labels = torch.tensor([sum(sequences, [])]), torch.tensor([sum(labels, [])])
    runs = []
    for double in (False, True):
        with float64(double):
            dtype = torch.float64 if double else torch.float32
            mask = torch.zeros(1, 1, total, total, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
            model = with_lora(config, weights, SEED + 2, double)
            logits = model(input_ids=row, attention_mask=mask, position_ids=positions, use_cache=False).logits
            loss = token_losses(logits, row_labels, "sum") / label_tokens
            loss.backward()
            grads = gradients(model)
            model.zero_grad(set_to_none=True)
            ids, padding, apart_labels = collate([dict(input_ids=ids, labels=label) for ids, label in zip(sequences, labels)])
            apart = model(input_ids=ids, attention_mask=padding, use_cache=False).logits
            (token_losses(apart, apart_labels, "sum") / label_tokens).backward()
            apart_logits = torch.cat([apart[index, : len(ids)] for index, ids in enumerate(sequences)]).detach()[None]
            runs.append((logits.detach(), loss.item(), grads, apart_logits, gradients(model)))
    (logits, loss, grads, apart_logits, apart_grads), (logits64, _, grads64, _, _) = runs
    os.makedirs(f"{out}/packed", exist_ok=True)
    stored = torch.tensor([0, 10, 11, 17, 18, 31])
    tensors = dict(input_ids=row.int(), labels=row_labels.int(), position_ids=positions.int(), sequence_ids=owner.int(), sel_pos=stored.int(),
                   logits=logits[0, stored], loss=torch.tensor([loss], dtype=torch.float32))
    save_tensors(tensors, f"{out}/packed/packed.safetensors")
    save_tensors(grads, f"{out}/packed/lora_grads.safetensors")
    return dict(
        packed_vs_unpacked_logits=difference(logits, apart_logits),
        packed_vs_unpacked_grad_rel=max(relative(grads[name], apart_grads[name]) for name in grads),
        logits=difference(logits, logits64),
        grad_rel=max(relative(grads[name], grads64[name]) for name in grads),
    )


def make(out, rows):
    """All variants; returns how far float32 is from float64 in each."""
    config = configuration("llama")
    weights = make_weights(config, SEED, ARCHITECTURES["llama"].stored)
    common = (out, config, weights, rows)
    patterns = dict(rank_pattern={"down_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 3}, layers_to_transform=None)
    return dict(
        dora=lora("dora", *common, use_dora=True),
        rslora=lora("rslora", *common, use_rslora=True),
        modules_to_save=lora("modules_to_save", *common, modules_to_save=["lm_head"], target_modules=["q_proj", "v_proj"]),
        patterns=lora("patterns", *common, target_modules=["q_proj", "v_proj", "down_proj"], **patterns),
        full=full("full", *common, None),
        full_hfdecay=full("full_hfdecay", *common, trainer_groups),
        packed=packed(out, config, weights),
        **{tag: method(tag, out, rows) for tag in METHODS},
    )


if __name__ == "__main__":
    # The other variants do not change; the measured tolerances go into tolerances.json.
    assert sys.argv[1] == "--only" and sys.argv[2] in METHODS
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    measured = method(sys.argv[2], sys.argv[3], make_data(BASE["vocab_size"], SEED + 7))
    path = f"{sys.argv[3]}/../tolerances.json"
    with open(path, encoding="utf-8") as file:
        tolerances = json.load(file)
    tolerances["variants"][sys.argv[2]] = measured
    dump(tolerances, path)
