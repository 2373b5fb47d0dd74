#!/usr/bin/env python3
"""Loads a folder that `tunesmith merge --requantize` wrote with the real Transformers and bitsandbytes, on the CPU.

    pip install -r scripts/golden/requirements.txt
    tunesmith merge CONFIG --output dense --dtype float32
    tunesmith merge CONFIG --output quantized --dtype float32 --requantize nf4
    python3 scripts/bnb_check.py --dense dense --quantized quantized

The codes and scales of every quantized matrix must equal, to the byte, what bitsandbytes makes of the dense one. Every other tensor must equal
the dense one. Then the script shows the logits of the loaded model and of the dense model with its matrices dequantized by bitsandbytes. They
differ, because bitsandbytes' products on the CPU round to bfloat16, or to float16 for int8. Prints one JSON line; exits 1 if a tensor differs.
"""
import argparse
import json
import os
import sys

# Before torch is imported: no network, and the sums of scales as on a processor with AVX2.
os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True)
    parser.add_argument("--quantized", required=True)
    args = parser.parse_args()
    import bitsandbytes as bnb
    import bitsandbytes.functional as BF
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    loaded = dict(device_map={"": "cpu"}, dtype=torch.float32, attn_implementation="eager")
    dense = transformers.AutoModelForCausalLM.from_pretrained(args.dense, **loaded)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(args.quantized, **loaded)
    plain, wrong, matrices = dict(dense.named_modules()), [], 0
    for name, module in quantized.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            codes, own = BF.quantize_4bit(plain[name].weight.data, blocksize=state.blocksize, quant_type=state.quant_type, compress_statistics=state.nested)
            same = torch.equal(codes.reshape(-1), module.weight.data.reshape(-1)) and torch.equal(own.absmax, state.absmax)
            if state.nested:
                same = same and torch.equal(own.state2.absmax, state.state2.absmax) and torch.equal(own.offset.reshape(1), state.offset.reshape(1))
            numbers = BF.dequantize_4bit(module.weight.data, state).float().reshape(plain[name].weight.shape)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            codes, own, _ = BF.int8_vectorwise_quant(plain[name].weight.data)
            scales = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            same = torch.equal(codes, module.weight.data) and torch.equal(own, scales)
            numbers = BF.int8_vectorwise_dequant(module.weight.data, scales)
        else:
            continue
        matrices += 1
        if not same:
            wrong.append(name)
        plain[name].weight.data.copy_(numbers)
    others = {name for name, module in quantized.named_modules() if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))}
    stored = dict(dense.named_parameters())
    for name, parameter in quantized.named_parameters():
        if name.rpartition(".")[0] not in others and not torch.equal(parameter.data.float(), stored[name].data.float()):
            wrong.append(name)
    ids = torch.randint(0, dense.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        apart = (quantized(input_ids=ids).logits - dense(input_ids=ids).logits).abs().max().item()
    print(json.dumps(dict(matrices=matrices, wrong=wrong, logits_apart=apart)))
    return 1 if wrong or not matrices else 0


if __name__ == "__main__":
    sys.exit(main())
