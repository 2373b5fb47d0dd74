#!/usr/bin/env python3
"""Makes tests/golden/b: matrices quantized by bitsandbytes, and QLoRA on the tiny llama, in float32 on one thread of the CPU.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/quantize.py --out tests/golden/b --a tests/golden/a

- `matrices.safetensors`: for each matrix W and format, its codes, scales and dequantized values
- `nf4_matrices.safetensors`: NF4 of more matrices, with values at the borders of codes, 1e-39, and float16
- `loftq.safetensors`: results of PEFT's `loftq_init`
- `llama_nf4`, `llama_nf4dq`: a/llama with 4-bit matrices as Transformers saves it, without and with double quantization, and results computed
  with it; data, initial adapter and settings are those of a/llama
- `llama_fp4`, `llama_int8`: the checkpoints, and results computed with the dequantized weights
"""
import argparse
import json
import os
import shutil
from unittest import mock

# Before torch is imported: no network, and the same instruction set on every machine.
os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import bitsandbytes as bnb
import bitsandbytes.functional as BF
import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file

from common import *
from parity import STORED

def dequantize(codes, state):
    """bitsandbytes' plain-PyTorch kernel: its AVX-512 one rounds on the way, that for AVX2 gives the same as this."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    absmax = state.absmax
    if state.nested:
        absmax = state.state2.code[absmax.long()] * state.state2.absmax.repeat_interleave(256)[: absmax.numel()] + state.offset
    return _dequantize_4bit_compute(codes.reshape(-1), absmax, state.code, state.blocksize, state.shape, state.dtype)


FORMATS = {"nf4": ("nf4", False), "nf4dq": ("nf4", True), "fp4": ("fp4", False), "fp4dq": ("fp4", True)}


def matrices():
    """Small matrices of every awkward size: rows that begin within a block or a byte, short last blocks, two nested blocks."""
    rng = np.random.default_rng(77)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))

    special = normal(4, 64)
    special[1], special[2], special[3, 5] = 0, 0.25, 1e4
    yield "even", normal(24, 80) * 0.05
    yield "odd", normal(33, 51) * 0.02
    yield "small", normal(7, 13)
    yield "tiny", normal(1, 3)
    yield "nested", normal(101, 199) * 0.03
    yield "special", special
    yield "bf16", (normal(12, 72) * 0.05).bfloat16()


def quantized_matrices():
    stored = {}
    for name, weight in matrices():
        stored[f"{name}.w"] = weight
        for label, (kind, double) in FORMATS.items():
            codes, state = BF.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=double)
            parts = dict(codes=codes.reshape(-1), absmax=state.absmax, numbers=dequantize(codes, state))
            if double:
                parts |= dict(nested_absmax=state.state2.absmax, offset=state.offset.reshape(1))
                stored["nested_quant_map"] = state.state2.code
            stored[f"{kind}_quant_map"] = state.code
            stored |= {f"{name}.{label}.{part}": value for part, value in parts.items()}
        if weight.dtype == torch.float32:
            codes, scales, _ = BF.int8_vectorwise_quant(weight)
            numbers = BF.int8_vectorwise_dequant(codes, scales)
            stored |= {f"{name}.int8.codes": codes.view(torch.uint8), f"{name}.int8.scales": scales, f"{name}.int8.numbers": numbers}
    for block in (32, 128, 4096):
        weight = stored["nested.w"]
        codes, state = BF.quantize_4bit(weight, blocksize=block, quant_type="nf4")
        stored |= {f"block{block}.codes": codes.reshape(-1), f"block{block}.absmax": state.absmax}
    return stored


def nf4_matrices():
    rng = np.random.default_rng(4242)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))

    weights = {
        "sq64x64": normal(64, 64) * 0.05, "rect48x80": normal(48, 80) * 0.02, "odd33x50": normal(33, 50), "small7x13": normal(7, 13),
        "row1x64": normal(1, 64), "nested128x160": normal(128, 160) * 0.03, "nested_odd101x199": normal(101, 199) * 0.03,
    }
    special = normal(4, 64)
    special[1], special[2], special[3, 5] = 0, 0.25, 1e4
    weights["special_zero_const_outlier"] = special
    code = BF.quantize_4bit(torch.ones(1, 64), blocksize=64, quant_type="nf4")[1].code
    middles, ties = (code[1:] + code[:-1]) / 2, torch.zeros(2, 64)
    ties[0, :15], ties[0, 15], ties[0, 16:31], ties[0, 31:47] = middles, 1.0, -middles, code
    ties[1, :15], ties[1, 15:30] = (torch.nextafter(middles, torch.tensor(end)) for end in (2.0, -2.0))
    ties[1, 63] = -1.0
    weights["ties_absmax1"] = ties
    weights["tiny_denormal"] = normal(2, 64) * 1e-39
    weights["bf16_72x64"], weights["f16_64x72"] = (normal(72, 64) * 0.05).bfloat16(), (normal(64, 72) * 0.05).half()
    stored = {"nf4_code": code}
    for name, weight in weights.items():
        stored[f"{name}.w"] = weight
        for label, double in (("nf4", False), ("nf4dq", True)):
            codes, state = BF.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
            parts = dict(packed=codes.reshape(-1), absmax=state.absmax, dequant=dequantize(codes, state).reshape(weight.shape))
            if double:
                nested = state.state2
                absmax = nested.code[state.absmax.long()] * nested.absmax.repeat_interleave(256)[: state.absmax.numel()] + state.offset
                parts |= dict(nested_absmax=nested.absmax, offset=state.offset.reshape(1), absmax_dequant=absmax)
                stored["nested_quant_map"] = nested.code
            stored |= {f"{name}.{label}.{part}": value for part, value in parts.items()}
    return stored


def loftq(weight, rank, rounds):
    """PEFT's own loftq_init, which moves to a GPU: here it stays. On the CPU, bitsandbytes dequantizes rows of other lengths wrongly."""
    from peft.utils import loftq_utils

    def stays(to):
        def call(tensor, *args, **given):
            given = {name: value for name, value in given.items() if name != "device"}
            return to(tensor, *("cpu" if arg == "cuda" else arg for arg in args), **given)

        return call

    with mock.patch.object(torch.Tensor, "to", stays(torch.Tensor.to)), mock.patch.object(bnb.nn.Params4bit, "to", stays(bnb.nn.Params4bit.to)):
        numbers, right, left = loftq_utils.loftq_init(weight, 4, rank, rounds)
    return numbers, right.contiguous(), left.contiguous()


def loftq_cases():
    stored = {}
    for seed, (name, (rows, cols, rank, rounds)) in enumerate({"once": (24, 64, 4, 1), "twice": (48, 64, 4, 2), "often": (32, 128, 6, 5)}.items()):
        weight = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)) * 0.05
        numbers, a, b = loftq(weight, rank, rounds)
        stored |= {f"{name}.w": weight, f"{name}.numbers": numbers, f"{name}.a": a, f"{name}.b": b, f"{name}.rounds": torch.tensor([rounds]).int()}
    return stored


def widened_llama(how, folder, source):
    """Saves the checkpoint; returns the model with the numbers that its codes mean. Computed on these: bitsandbytes' own products for the CPU
    round otherwise on every kind of processor."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    loaded = dict(device_map={"": "cpu"}, dtype=torch.float32, attn_implementation="eager")
    coded = transformers.AutoModelForCausalLM.from_pretrained(f"{source}/model", quantization_config=how, **loaded)
    coded.save_pretrained(f"{folder}/model")
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{source}/model", **loaded)
    widened = dict(model.named_modules())
    for name, module in coded.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = dequantize(module.weight.data, module.weight.quant_state)
            assert weight.shape == widened[name].weight.shape
            widened[name].weight.data.copy_(weight)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            state = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            widened[name].weight.data.copy_(BF.int8_vectorwise_dequant(module.weight.data, state))
    return model


def checkpoint(label, how, a, out):
    """The checkpoint and what its numbers compute, without training."""
    folder, source = f"{out}/llama_{label}", f"{a}/llama"
    model = widened_llama(how, folder, source)
    given = load_file(f"{source}/forward.safetensors")
    batch = tuple(given[name].long() for name in ("input_ids", "attention_mask", "labels"))
    row, position = (torch.tensor(values) for values in zip(*STORED))
    with torch.no_grad():
        logits, losses, loss = forward(model, *batch)
    stored = dict(logits_base=logits[row, position], nll_base=losses, loss_base=loss.reshape(1), sel_row=given["sel_row"], sel_pos=given["sel_pos"])
    save_tensors(stored, f"{folder}/forward.safetensors")


def llama(label, double, a, out):
    """The checkpoint and what QLoRA computes with it."""
    folder, source = f"{out}/llama_{label}", f"{a}/llama"
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=torch.float32)
    model = widened_llama(how, folder, source)
    given = load_file(f"{source}/forward.safetensors")
    batch = tuple(given[name].long() for name in ("input_ids", "attention_mask", "labels"))
    row, position = (torch.tensor(values) for values in zip(*STORED))
    tensors = {}
    with torch.no_grad():
        tensors["base"] = forward(model, *batch)
    model = peft.get_peft_model(model, peft.LoraConfig.from_pretrained(f"{source}/adapter_init"))
    missing = peft.set_peft_model_state_dict(model, load_file(f"{source}/adapter_init/adapter_model.safetensors"))
    assert not missing.unexpected_keys
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    model.train()
    tensors["lora"] = forward(model, *batch, backward=True)
    grads = gradients(model)
    model.zero_grad(set_to_none=True)
    with open(f"{a}/data.json", encoding="utf-8") as file:
        trace = train_trace(model, json.load(file)["rows"])
    stored = {}
    for side, (logits, losses, loss) in tensors.items():
        stored |= {f"logits_{side}": logits[row, position], f"nll_{side}": losses, f"loss_{side}": loss.reshape(1)}
    stored |= {name: given[name] for name in ("sel_row", "sel_pos")}
    save_tensors(stored, f"{folder}/forward.safetensors")
    save_tensors(grads, f"{folder}/lora_grads.safetensors")
    dump(dict(steps=trace), f"{folder}/trace.json")
    save_tensors(adapter_state(model), f"{folder}/adapter_final.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--a", required=True)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.makedirs(args.out, exist_ok=True)
    save_tensors(quantized_matrices(), f"{args.out}/matrices.safetensors")
    save_tensors(nf4_matrices(), f"{args.out}/nf4_matrices.safetensors")
    save_tensors(loftq_cases(), f"{args.out}/loftq.safetensors")
    fp4 = dict(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
    for label, how in (("fp4", fp4), ("int8", dict(load_in_8bit=True))):
        checkpoint(label, transformers.BitsAndBytesConfig(**how), args.a, args.out)
    for label, double in (("nf4", False), ("nf4dq", True)):
        llama(label, double, args.a, args.out)


if __name__ == "__main__":
    main()
