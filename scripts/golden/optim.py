"""The golden traces of the optimizers and schedules: fifty steps of each on a few tensors, with the library it comes from.

    python scripts/golden/optim.py --out tests/golden/optim

Script and test draw the same values and gradients from counters (`draw`). So only results are stored: the values after some steps, and the
bytes of 8-bit state. The learning rate falls linearly. Matrices get weight decay and vectors do not, as in the Trainer. In the traces
`NAME_idle`, some tensors have no gradient in half of the steps, as an image encoder has none in a step without images.
"""
import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
import numpy as np
import torch
from safetensors.numpy import save_file

STEPS, KEPT = 50, (1, 10, 50)
SHAPES = {"square": (16, 16), "wide": (7, 33), "high": (37, 5), "vector": (29,)}
LARGE = {"large": (67, 65), "small": (9, 11)}
# What has no gradient in these steps, the first of all among them.
IDLE = ("high", "vector", "small")
IDLE_STEPS = [step for step in range(1, STEPS + 1) if step % 4 in (1, 2)]
DECAY = 0.1
MASK = (1 << 64) - 1


def mix(z):
    """SplitMix64's finalizer on an array of uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(stream, step, shape):
    """Numbers in -1..1, exact in f32, each then scaled by a power of two from 1 to 2^-7."""
    start = (stream * 0x9E3779B97F4A7C15 + step * 0xD1342543DE82EF95) & MASK
    count = int(np.prod(shape))
    with np.errstate(over="ignore"):
        bits = mix(np.uint64(start) + np.arange(count, dtype=np.uint64) * np.uint64(0x2545F4914F6CDD1D))
    number = (bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    scale = np.float32(2) ** -(bits & np.uint64(7)).astype(np.float32)
    return torch.from_numpy((number * scale).reshape(shape))


def rate(peak, step):
    """The learning rate of step 1, 2, ..."""
    return peak * (1 - (step - 1) / 100)


idle_steps = []


def trace(shapes, peak, build, before=None, after=None):
    """Values after the kept steps. `build` makes optimizers from (matrices, vectors)."""
    tensors = {name: torch.nn.Parameter(draw(index + 1, 0, shape)) for index, (name, shape) in enumerate(shapes.items())}
    matrices = [tensor for tensor in tensors.values() if tensor.ndim == 2]
    vectors = [tensor for tensor in tensors.values() if tensor.ndim == 1]
    optimizers = build(matrices, vectors)
    kept = {}
    for step in range(1, STEPS + 1):
        for index, (name, tensor) in enumerate(tensors.items()):
            idle = name in IDLE and step in idle_steps
            tensor.grad = None if idle else draw(index + 1, step, tuple(tensor.shape))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(peak, step)
            if before:
                before(optimizer)
            optimizer.step()
        if step in KEPT:
            for name, tensor in tensors.items():
                kept[f"{name}.{step}"] = tensor.detach().numpy().copy()
        if after:
            after(step, tensors, optimizers, kept)
    return kept


def groups(matrices, vectors, **more):
    groups = [dict(params=matrices, weight_decay=DECAY, **more)]
    return groups + [dict(params=vectors, weight_decay=0.0, **more)] if vectors else groups


def one(kind, **arguments):
    return lambda matrices, vectors: [kind(groups(matrices, vectors), **arguments)]


def adamw():
    return trace(SHAPES, 1e-2, one(torch.optim.AdamW, lr=1.0, betas=(0.9, 0.99), eps=1e-8))


def sgd(**arguments):
    return trace(SHAPES, 1e-2, one(torch.optim.SGD, lr=1.0, **arguments))


def adafactor(**arguments):
    from transformers.optimization import Adafactor

    return trace(SHAPES, 1e-2, one(Adafactor, **(dict(lr=1.0, relative_step=False, scale_parameter=False) | arguments)))


def lion():
    from lion_pytorch import Lion

    return trace(SHAPES, 1e-3, one(Lion, lr=1.0, betas=(0.9, 0.99)))


def lion_bitsandbytes():
    import bitsandbytes

    return trace(SHAPES, 1e-3, one(bitsandbytes.optim.Lion, lr=1.0, betas=(0.9, 0.99)))


def adamw_8bit():
    """bitsandbytes on the CPU, with the quantization of its plain-PyTorch backend: each value becomes the nearest entry of the
    map, as on a GPU. The CPU library's own looks entries up in a table of 65536 places, too coarse for the small ones.
    """
    import bitsandbytes
    from bitsandbytes.backends.cpu import ops

    def quantize(values, code, absmax_out, out, blocksize):
        flat = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % blocksize)).reshape(-1, blocksize)
        absmax = flat.abs().max(dim=-1)[0]
        scaled = torch.clamp(flat * (1.0 / absmax.clamp(min=1e-38).view(-1, 1)), -1, 1).reshape(-1)[: values.numel()]
        bounds = (code[:-1] + code[1:]) / 2
        out.copy_(torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8).reshape(out.shape))
        absmax_out.copy_(absmax)

    ops._quant_blockwise_fp32_direct = quantize

    def keep(step, tensors, optimizers, kept):
        if step not in KEPT:
            return
        state = optimizers[0].state[tensors["large"]]
        for name in ("state1", "state2", "absmax1", "absmax2"):
            kept[f"large.{name}.{step}"] = state[name].numpy().copy()
        kept["qmap1"], kept["qmap2"] = state["qmap1"].numpy().copy(), state["qmap2"].numpy().copy()

    build = one(bitsandbytes.optim.AdamW8bit, lr=1.0, betas=(0.9, 0.99), eps=1e-8)
    return trace(LARGE, 1e-2, build, after=keep)


def ademamix(beta3=0.9999, **arguments):
    import bitsandbytes

    return trace(SHAPES, 1e-2, one(bitsandbytes.optim.AdEMAMix, lr=1.0, betas=(0.9, 0.99, beta3), eps=1e-8, **arguments))


def muon(double=True, **arguments):
    """PyTorch's Muon with the iteration in float64 instead of bfloat16; AdamW for the vector."""
    module = torch.optim._muon
    bfloat16 = torch.bfloat16

    def build(matrices, vectors):
        rest = torch.optim.AdamW(vectors, lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
        return [torch.optim.Muon(matrices, lr=1.0, weight_decay=DECAY, **arguments), rest]

    original = module._zeropower_via_newtonschulz

    def precise(grad, coefficients, steps, eps):
        torch.bfloat16 = torch.float64
        try:
            return original(grad, coefficients, steps, eps).to(torch.float32)
        finally:
            torch.bfloat16 = bfloat16

    module._zeropower_via_newtonschulz = precise if double else original
    try:
        return trace(SHAPES, 1e-2, build)
    finally:
        module._zeropower_via_newtonschulz = original


def schedule_free(**arguments):
    """The trained values, and as NAME.STEP.x those to evaluate."""
    import schedulefree

    def build(matrices, vectors):
        optimizer = schedulefree.AdamWScheduleFree(groups(matrices, vectors), lr=1.0, betas=(0.9, 0.99), eps=1e-8, **arguments)
        optimizer.train()
        return [optimizer]

    def keep(step, tensors, optimizers, kept):
        if step not in KEPT:
            return
        saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        optimizers[0].eval()
        for name, tensor in tensors.items():
            kept[f"{name}.{step}.x"] = tensor.detach().numpy().copy()
        optimizers[0].train()
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(saved[name])

    return trace(SHAPES, 1e-2, build, after=keep)


def ema():
    """The moving average of AdamW's values."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    averages = {}

    def keep(step, tensors, optimizers, kept):
        if not averages:
            averages["model"] = AveragedModel(torch.nn.ParameterDict(tensors), multi_avg_fn=get_ema_multi_avg_fn(0.95))
        averages["model"].update_parameters(torch.nn.ParameterDict(tensors))
        if step in KEPT:
            for name, tensor in averages["model"].module.items():
                kept[f"{name}.{step}"] = tensor.detach().numpy().copy()

    return trace(SHAPES, 1e-2, one(torch.optim.AdamW, lr=1.0, betas=(0.9, 0.99), eps=1e-8), after=keep)


@dataclass
class Trace:
    """A word of `train.optim`, its arguments, how the trace is made of them, and on what."""

    optim: str
    arguments: dict
    make: Callable
    peak: float = 1e-2
    shapes: dict = field(default_factory=lambda: SHAPES)
    idle: list = field(default_factory=list)


OPTIMIZERS = {
    "adamw": Trace("adamw_torch", {}, adamw),
    "sgd": Trace("sgd", {}, sgd),
    "sgd_momentum": Trace("sgd", dict(momentum=0.9, dampening=0.1), sgd),
    "sgd_nesterov": Trace("sgd", dict(momentum=0.9, nesterov=True), sgd),
    "adafactor": Trace("adafactor", {}, adafactor),
    "adafactor_scaled": Trace("adafactor", dict(scale_parameter=True, beta1=0.9, clip_threshold=0.5, decay_rate=-0.7), adafactor),
    "lion": Trace("lion", {}, lion, peak=1e-3),
    "adamw_8bit": Trace("adamw_8bit", {}, adamw_8bit, shapes=LARGE),
    "muon": Trace("muon", {}, muon),
    "muon_rms": Trace("muon", dict(adjust_lr_fn="match_rms_adamw", nesterov=False, momentum=0.9, ns_steps=4), muon),
    "muon_spectral": Trace("muon", dict(adjust_lr_fn="spectral_unclamped"), muon),
    "schedule_free": Trace("schedule_free_adamw", {}, schedule_free),
    "ademamix": Trace("ademamix", {}, ademamix),
    "ademamix_rising": Trace("ademamix", dict(beta3=0.999, alpha=8.0, t_alpha=30, t_beta3=40), ademamix),
    "schedule_free_power": Trace("schedule_free_adamw", dict(r=0.5, weight_lr_power=1.0), schedule_free),
}

for name in ("adamw", "sgd_momentum", "adafactor", "lion", "adamw_8bit", "muon", "schedule_free", "schedule_free_power", "ademamix_rising"):
    OPTIMIZERS[f"{name}_idle"] = replace(OPTIMIZERS[name], idle=IDLE_STEPS)

# form, arguments, warm-up, steps
SCHEDULES = [
    ("constant", {}, 0, 50),
    ("constant_with_warmup", {}, 7, 50),
    ("linear", {}, 7, 50),
    ("cosine", {}, 7, 50),
    ("cosine", {"num_cycles": 1.25}, 0, 50),
    ("cosine_with_restarts", {}, 5, 50),
    ("cosine_with_restarts", {"num_cycles": 3}, 5, 50),
    ("polynomial", {}, 5, 50),
    ("polynomial", {"lr_end": 1e-5, "power": 2.5}, 5, 50),
    ("inverse_sqrt", {}, 5, 50),
    ("inverse_sqrt", {}, 0, 50),
    ("inverse_sqrt", {"timescale": 20}, 5, 50),
    ("cosine_with_min_lr", {"min_lr": 1e-4}, 5, 50),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1.0}, 5, 50),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, 5, 50),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-4, "warmup_lr_rate": 0.3}, 5, 50),
    ("warmup_stable_decay", {"num_decay_steps": 20}, 5, 50),
    ("warmup_stable_decay", {"num_decay_steps": 15, "num_stable_steps": 20, "min_lr_ratio": 0.1, "decay_type": "linear"}, 5, 50),
    ("warmup_stable_decay", {"num_decay_steps": 20, "warmup_type": "cosine", "decay_type": "1-sqrt"}, 10, 50),
    ("warmup_stable_decay", {"num_decay_steps": 20, "warmup_type": "1-sqrt", "num_cycles": 1.0, "min_lr_ratio": 0.2}, 10, 50),
]


def schedules():
    """The rates of steps 0 to 54, also beyond the end."""
    import transformers

    out = []
    for form, arguments, warmup, total in SCHEDULES:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
        schedule = transformers.get_scheduler(form, optimizer, warmup, total, scheduler_specific_kwargs=arguments)
        rates = []
        for _ in range(total + 5):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        out.append(dict(form=form, arguments=arguments, warmup=warmup, total=total, rates=rates))
    return out


def objectives():
    """Gradients of the logits: with the Trainer's LabelSmoother, and with PaLM's z-loss."""
    from transformers.trainer_pt_utils import LabelSmoother

    out = {}
    labels = torch.tensor([[(at * 13) % 33 if at % 4 != 2 else -100 for at in range(18)]])
    count = int((labels[:, 1:] != -100).sum())
    for name, smoothing, z in (("smoothed", 0.1, 0.0), ("z", 0.0, 1e-2), ("both", 0.25, 1e-3)):
        logits = (6 * draw(7, 0, (1, 18, 33))).requires_grad_()
        loss = LabelSmoother(epsilon=smoothing)({"logits": logits}, labels, shift_labels=True, num_items_in_batch=count)
        squares = torch.logsumexp(logits[:, :-1], dim=-1) ** 2
        (loss + z * (squares * (labels[:, 1:] != -100)).sum() / count).backward()
        out[name] = logits.grad[0].numpy().copy()
    return out | {"labels": labels[0].numpy().astype(np.int32)}


def loraplus():
    """The learning rates and decays that PEFT's create_loraplus_optimizer gives, by tensor."""
    import peft
    import transformers
    from peft.optimizers import create_loraplus_optimizer

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=32)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))
    config = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["lm_head", "model.norm"])
    model = peft.get_peft_model(model, config)
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def plain(name):
        return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".default", "")

    rows = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rows.append(dict(name=plain(names[id(parameter)]), shape=list(parameter.shape), lr=group["lr"]))
    return rows


def main():
    import importlib.metadata

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only-idle", action="store_true", help="the list of traces and the files NAME_idle alone")
    arguments = parser.parse_args()
    out = arguments.out
    torch.set_num_threads(1)
    os.makedirs(out, exist_ok=True)
    traces = []
    for name, it in OPTIMIZERS.items():
        idle_steps[:] = it.idle
        if it.idle or not arguments.only_idle:
            save_file(it.make(**it.arguments), f"{out}/{name}.safetensors")
        shapes = [[tensor, list(shape)] for tensor, shape in it.shapes.items()]
        traces.append(dict(name=name, optim=it.optim, arguments=it.arguments, peak=it.peak, shapes=shapes, idle=it.idle))
    idle_steps.clear()
    with open(f"{out}/optimizers.json", "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(trace) for trace in traces) + "\n]\n")
    if arguments.only_idle:
        return
    save_file(ema(), f"{out}/ema.safetensors")
    names = ("torch", "transformers", "bitsandbytes", "lion-pytorch", "schedulefree", "numpy")
    versions = {name: importlib.metadata.version(name) for name in names}
    with open(f"{out}/schedules.json", "w", encoding="utf-8") as file:
        file.write(json.dumps(dict(versions=versions, peak=2e-3, schedules=schedules()), indent=0))
    save_file(objectives(), f"{out}/objectives.safetensors")
    with open(f"{out}/loraplus.json", "w", encoding="utf-8") as file:
        file.write(json.dumps(loraplus(), indent=0))
    for name in os.listdir(out):
        os.chmod(f"{out}/{name}", 0o644)
    # Said here and not tested: how far the two libraries' Lion, and PyTorch's own bfloat16 Muon, are from what is stored.
    theirs, other = lion(), lion_bitsandbytes()
    print("lion-pytorch and bitsandbytes:", max(float(abs(theirs[key] - other[key]).max()) for key in theirs))
    precise, rounded = muon(), muon(double=False)
    print("muon in float64 and in bfloat16:", max(float(abs(precise[key] - rounded[key]).max()) for key in precise))


if __name__ == "__main__":
    main()
