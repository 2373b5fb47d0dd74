"""What the parity goldens share: tiny random models, their adapters, data, the training loop, and writing files.

Weights and data come from numpy's PCG64 with fixed seeds, so that nothing has to be downloaded.
"""
import contextlib
import copy
import json
import math
import os
import shutil

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

import muse
from architectures import ARCHITECTURES, BASE, place

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
IGNORE = -100

# Transformers has the class, and does not list it.
transformers.AutoModelForCausalLM.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)

SEED, RANK, ALPHA = 1000, 4, 8
STEPS, WARMUP, MICRO_BATCH, GRAD_ACCUM = 20, 3, 4, 2
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


@contextlib.contextmanager
def float64(on):
    """A true float64 reference: Transformers upcasts norms, softmax, loss and rope to a literal float32; make those float64."""
    if not on:
        yield
        return
    saved = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved[:3]
        torch.set_default_dtype(saved[3])


def configuration(name):
    """The Transformers configuration of an architecture."""
    architecture = ARCHITECTURES[name]
    return getattr(transformers, architecture.kind)(**copy.deepcopy(architecture.arguments))


def is_choice_bias(name):
    """Whether it is what a router adds to its scores to choose experts, and nothing trains."""
    return name.endswith(("e_score_correction_bias", "expert_bias"))


def make_weights(config, seed, stored):
    """name -> float32 tensor, in sorted name order, each value exactly representable in the stored dtype.

    Norm weights and biases are random too, so that none can be skipped unnoticed.
    """
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    rng = np.random.default_rng(seed)
    weights = {}
    # Gemma's norms multiply by one more than their weight, and its embeddings are scaled up. Qwen3.5 has such norms outside of its
    # linear attention, and Gemma 3n and 4 have none.
    gemma, fourth = config.model_type.startswith("gemma"), config.model_type.startswith(("gemma3n", "gemma4"))
    # Those of Muse Glimmer's blocks do too, and the one behind them does not.
    in_muse = lambda name: config.model_type.startswith("muse_glimmer") and ".layers." in name
    centred = lambda name: in_muse(name) or (gemma and not fourth) or (config.model_type.startswith(("qwen3_5", "qwen3_next")) and "linear_attn" not in name)
    # Buffers that a router adds to its scores for the choice alone are in the files too.
    named = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if is_choice_bias(name))]
    for name, parameter in sorted(named):
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), dtype=np.float32))
        if "norm" in name or ".ln_" in name and name.endswith(".weight"):
            value = (0.0 if centred(name) else 1.0) + 0.2 * noise
            # Gemma 3n and 4 leave the scale of scores to these.
            value *= 0.5 if fourth and name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        elif name.endswith(".bias"):
            value = 0.2 * noise
        elif is_choice_bias(name):
            value = 0.3 * noise
        elif name.endswith("altup.modality_router.weight"):
            # What it takes is divided by the width.
            value = noise * 20.0 / math.sqrt(parameter.shape[-1])
        elif name.endswith(("altup.prediction_coefs.weight", "altup.correction_coefs.weight")):
            # Larger ones make the streams grow from block to block, with their rounding.
            value = noise * 0.2
        elif name.endswith((".router.scale", ".per_expert_scale", ".correct_output_scale")):
            value = 1.0 + 0.2 * noise
        elif "per_layer_input_gate" in name:
            # GELU loses digits where all of a token's gates are far below 0, and a norm behind it makes the rest large.
            value = noise * (0.3 / math.sqrt(parameter.shape[-1]))
        elif "embed_tokens_per_layer" in name:
            value = noise * 0.3
        elif name.endswith(("wte.weight", "wpe.weight")):
            value = noise * 0.4
        elif config.model_type == "gpt2" and "lm_head" not in name:
            # Its matrices are stored as [in, out].
            value = noise * (1.2 / math.sqrt(parameter.shape[0]))
        elif "embed_tokens" in name:
            value = noise * 0.08 if gemma else noise * (0.4 if config.tie_word_embeddings else 1.0)
        elif "lm_head" in name:
            value = noise * (2.0 / math.sqrt(parameter.shape[1]))
        else:
            value = noise * (1.2 / math.sqrt(parameter.shape[-1]))
        if config.model_type == "olmo_hybrid" and name.endswith("linear_attn.v_proj.weight"):
            # The norm behind the rule makes small outputs large, with their rounding. Its eps is fixed: outputs near it are not.
            value = value * 0.05
        weights[name] = value.to(DTYPES[stored]).to(torch.float32)
    # Gemma 4 has a factor for each block that is no parameter.
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith(".layer_scalar"):
            noise = torch.from_numpy(rng.standard_normal(tuple(buffer.shape), dtype=np.float32))
            weights[name] = (0.9 + 0.2 * noise).to(DTYPES[stored]).to(torch.float32)
    return weights


def build(config, weights, double=False, attention="eager"):
    """The model with the given weights, in training mode (there is no dropout): but for Gemma 3n, see `in_training`."""
    dtype = torch.float64 if double else torch.float32
    implementation = dict(attn_implementation=attention, experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **implementation)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    assert not unexpected and all("lm_head" in key for key in missing), (missing, unexpected)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    return in_training(model)


def in_training(model):
    """The model as it is trained.

    In training mode Gemma 3n reads the weight of `correction_coefs` beside the module, so that an adapter on it does nothing that it
    does in evaluation; and it cuts weights far beyond these. Without dropout there is no other difference.
    """
    return model.eval() if model.config.get_text_config().model_type == "gemma3n_text" else model.train()


def with_lora(config, weights, seed, double=False, **changes):
    """The model with a LoRA adapter on every linear layer, A and B both random and non-zero; DoRA's magnitudes moved by a tenth."""
    arguments = dict(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", bias="none", task_type="CAUSAL_LM")
    model = peft.get_peft_model(build(config, weights, double), peft.LoraConfig(**(arguments | changes)))
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" not in name:
                continue
            noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), dtype=np.float32)).to(parameter.dtype)
            if "magnitude" in name:
                parameter.mul_((1 + 0.1 * noise).to(parameter.dtype))
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[1]) if "lora_A" in name else noise * 0.1)
    return in_training(model)


def make_data(vocabulary, seed):
    """160 rows from a small Markov chain, so that the loss can fall, with a random part of each masked."""
    rng = np.random.default_rng(seed)
    states = rng.choice(np.arange(3, vocabulary), 48, replace=False)
    successors = rng.integers(0, 48, (48, 3))
    rows = []
    for _ in range(STEPS * MICRO_BATCH * GRAD_ACCUM):
        length, state = int(rng.integers(8, 29)), int(rng.integers(48))
        ids = [1]
        while len(ids) < length:
            ids.append(int(states[state]))
            state = int(successors[state][rng.integers(3)])
        masked = int(rng.integers(1, max(2, length // 2)))
        rows.append(dict(input_ids=ids, labels=[IGNORE] * masked + ids[masked:]))
    return rows


def collate(rows):
    """Rows padded on the right: ids with 0, labels with -100."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(values, filler):
        return values + [filler] * (longest - len(values))

    return (
        torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
        torch.tensor([pad(row["labels"], IGNORE) for row in rows]),
    )


def token_losses(logits, labels, reduction):
    """Cross-entropy of every token's successor."""
    rows = logits[:, :-1].reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, labels[:, 1:].reshape(-1), ignore_index=IGNORE, reduction=reduction)


def by_length(model):
    """Whether the rotary frequencies depend on the length, as with `dynamic` and `longrope`."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    # HunYuan writes "dynamic" where a fixed alpha makes the frequencies those of every length.
    return rope.get("rope_type") in ("dynamic", "longrope") and not rope.get("alpha")


def forget_lengths(model):
    """Resets the frequencies of `dynamic`: Transformers uses those of the longest row so far."""
    for module in model.modules():
        if hasattr(module, "original_max_seq_len"):
            module.inv_freq.copy_(module.original_inv_freq)
            module.max_seq_len_cached = module.original_max_seq_len


def outputs_of(model, ids, mask):
    """The logits of a batch of rows padded on the right, and the router load-balancing loss (0 without experts).

    Where the frequencies depend on the length, Transformers takes the longest row of the batch (and `dynamic` those before it), so
    that a row's result depends on its neighbours. Here each row is a batch of its own then, as if it were alone.
    """
    if not by_length(model):
        output = model(input_ids=ids, attention_mask=mask, use_cache=False)
        uneven = getattr(output, "aux_loss", None)
        return output.logits, 0.0 if uneven is None else model.config.router_aux_loss_coef * uneven
    rows = []
    for row, length in zip(ids, mask.sum(1).tolist()):
        forget_lengths(model)
        logits = model(input_ids=row[None, :length], use_cache=False).logits[0]
        rows.append(F.pad(logits, (0, 0, 0, len(row) - length)))
    return torch.stack(rows), 0.0


def train_trace(model, rows, groups=None):
    """Twenty AdamW steps; a step's loss is the sum over its label tokens divided by their number, not a mean of means.

    What uneven use of experts adds is a mean over the micro-batches, so that it weighs the same however a step is split.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        groups(model) if groups else trained, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY
    )
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    trace, at = [], 0
    for step in range(STEPS):
        micro_batches = [collate(rows[at + part * MICRO_BATCH : at + (part + 1) * MICRO_BATCH]) for part in range(GRAD_ACCUM)]
        at += MICRO_BATCH * GRAD_ACCUM
        label_tokens = sum(int((labels[:, 1:] != IGNORE).sum()) for _, _, labels in micro_batches)
        total = 0.0
        for ids, mask, labels in micro_batches:
            logits, uneven = outputs_of(model, ids, mask)
            loss = token_losses(logits, labels, "sum") / label_tokens + uneven / GRAD_ACCUM
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        trace.append(dict(step=step + 1, lr=rate, loss=total, grad_norm=norm, label_tokens=label_tokens))
    return trace


def forward_batch(vocabulary, seed):
    """Three rows of 24, 17 and 9 tokens with different label masks. labels[0, 0] is set: the shift must drop it."""
    rng = np.random.default_rng(seed)
    rows = []
    for length, labelled in ((24, lambda at: True), (17, lambda at: at >= 5), (9, lambda at: at % 3 != 1)):
        ids = rng.integers(3, vocabulary, length).tolist()
        rows.append(dict(input_ids=ids, labels=[ids[at] if labelled(at) else IGNORE for at in range(length)]))
    return collate(rows)


def forward(model, ids, mask, labels, backward=False):
    """Logits, the loss of each token's successor, and the mean loss with the router load-balancing loss."""
    if by_length(model):
        logits, _ = outputs_of(model, ids, mask)
        loss = token_losses(logits, labels, "mean")
    else:
        output = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        logits, loss = output.logits, output.loss
    losses = token_losses(logits, labels, "none").reshape(ids.shape[0], -1)
    if backward:
        loss.backward()
    return logits.detach(), losses.detach(), loss.detach()


def adapter_state(model):
    """The adapter's tensors under the names of adapter_model.safetensors."""
    return {name: value.detach().clone() for name, value in peft.get_peft_model_state_dict(model).items()}


def gradients(model):
    """The gradients under the names of adapter_model.safetensors."""
    return {
        name.replace("vector.default.weight", "vector").replace(".default.weight", ".weight").replace(".modules_to_save.default", ""): parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def save_adapter(model, folder):
    """PEFT's own files, less its README, and with the targets sorted (PEFT writes sets in no fixed order)."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    for name in os.listdir(folder):
        if name.endswith(".md"):
            os.remove(os.path.join(folder, name))
    path = os.path.join(folder, "adapter_config.json")
    with open(path, encoding="utf-8") as file:
        written = json.load(file)
    written["target_modules"].sort()
    if written["target_parameters"]:
        written["target_parameters"].sort()
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(written, indent=2, sort_keys=True))


def watch_routers(model):
    """Returns a list that collects the gaps between the last chosen and the first rejected expert. A small gap may go either way elsewhere."""
    gaps = []

    def gap(scores, count):
        best = scores.topk(count + 1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))

    def note(router, bias, output):
        if type(router).__name__.startswith("Gemma4"):
            # Gemma 4's gives probabilities.
            return gap(output[0].detach(), router.config.top_k_experts)
        logits, chosen = output[0].detach(), router.top_k
        scores = logits.softmax(-1) if bias is None else logits.sigmoid() + bias
        groups, kept = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
        if kept < groups:
            by_best = getattr(router, "topk_method", None) == "group_limited_greedy"
            of_groups = scores.view(len(scores), groups, -1).topk(1 if by_best else 2).values.sum(-1)
            gap(of_groups, kept)
            others = torch.ones_like(of_groups).scatter(1, of_groups.topk(kept).indices, 0.0).bool()
            scores = scores.masked_fill(others.repeat_interleave(scores.shape[1] // groups, 1), -torch.inf)
        gap(scores, chosen)

    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith(("topkrouter", "tokenchoicerouter", "gemma4textrouter")):
            # The bias is the router's, or of the module that holds it.
            holders = (module, model.get_submodule(name.rsplit(".", 1)[0]))
            biases = [value for holder in holders for value in (*holder._buffers.items(), *holder._parameters.items()) if is_choice_bias(value[0])]
            bias = biases[0][1].detach() if biases else None
            module.register_forward_hook(lambda router, _, output, bias=bias: note(router, bias, output))
    return gaps


def difference(ours, theirs):
    """The largest absolute difference."""
    return float((ours.double() - theirs.double()).abs().max())


def relative(ours, theirs):
    """The largest absolute difference, relative to the largest absolute value."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30))


def beside_float64(trace, trace64):
    """The float32 trace, with the float64 run's loss and norm in each step."""
    return [dict(step, loss_f64=other["loss"], grad_norm_f64=other["grad_norm"]) for step, other in zip(trace, trace64)]


def trace_differences(trace, trace64):
    """How far two traces are apart: loss absolutely, gradient norm relatively."""
    pairs = list(zip(trace, trace64))
    return dict(
        trace_loss=max(abs(one["loss"] - other["loss"]) for one, other in pairs),
        trace_gnorm_rel=max(abs(one["grad_norm"] - other["grad_norm"]) / other["grad_norm"] for one, other in pairs),
    )


def dump(value, path):
    with open(path, "w", encoding="utf-8") as out:
        out.write(json.dumps(value, indent=1))


def save_tensors(tensors, path):
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
