#!/usr/bin/env python3
"""Makes tests/golden/makers: one tiny model in the formats of its makers.

    python3 scripts/golden/makers.py --models tests/golden/a --out tests/golden/makers

The script codes the matrices itself, from the documented formats, and widens them again with the formats' own code where a package has
some that runs on a CPU: Transformers (FP8), compressed-tensors. GPTQ and AWQ are widened by their definitions. Each folder has the model
as `save_pretrained` of its quantizer lays it out, the digest of every widened matrix in float32, and logits of Transformers on the widened
model.
"""
import argparse
import json
import os
import shutil

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import bitsandbytes.functional as BF
import compressed_tensors
import numpy as np
import torch
import transformers
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file

E4M3 = torch.float8_e4m3fn
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def configuration():
    return transformers.Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16",
    )


def mixture():
    """The same with experts, whose matrices have more rows or columns than a block of FP8."""
    dense = configuration()
    same = {key: getattr(dense, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")}
    return transformers.Qwen3MoeConfig(
        **same, intermediate_size=80, moe_intermediate_size=160, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16",
    )


def by_expert(values):
    """Each expert's matrices by themselves, as files have them."""
    apart = {}
    for name, value in values.items():
        module, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for number, both in enumerate(value):
                apart |= dict(zip((f"{module}.{number}.gate_proj.weight", f"{module}.{number}.up_proj.weight"), both.chunk(2)))
        elif last == "down_proj":
            apart |= {f"{module}.{number}.down_proj.weight": one for number, one in enumerate(value)}
        else:
            apart[name] = value
    return apart


def stacked(values, model):
    """The other way round: the tensors of the model's modules."""
    found = {}
    for name in model.state_dict():
        module, _, last = name.rpartition(".")
        of = lambda part: [values[f"{module}.{number}.{part}.weight"] for number in range(model.config.num_experts)]
        if last == "gate_up_proj":
            found[name] = torch.stack([torch.cat(both) for both in zip(of("gate_proj"), of("up_proj"))])
        elif last == "down_proj":
            found[name] = torch.stack(of("down_proj"))
        else:
            found[name] = values[name]
    return found


def weights(config):
    """name -> float32 tensor, each value a bfloat16 number."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    rng, values = np.random.default_rng(4242), {}
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), dtype=np.float32))
        value = 1.0 + 0.2 * noise if "norm" in name else noise * (0.4 if "embed" in name else 1.2 / parameter.shape[-1] ** 0.5)
        values[name] = value.bfloat16().float()
    return values


def digest(values):
    """FNV-1a of the bytes of float32 numbers, 64 bits."""
    hash = 0xCBF29CE484222325
    for byte in values.float().contiguous().numpy().tobytes():
        hash = (hash ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{hash:016x}"


def fields(values, bits):
    """The last dimension of unsigned numbers packed into words of 32 bits, the first in the lowest bits."""
    each = 32 // bits
    words = values.long().reshape(*values.shape[:-1], -1, each)
    packed = sum(words[..., at] << bits * at for at in range(each))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


# FP8: the code is the nearest to the quotient, the scale the largest magnitude of a block over 448.


def fp8_blocks(weight, block, scale_dtype=torch.float32):
    rows, columns = weight.shape
    grid = torch.zeros(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            grid[i, j] = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].abs().max() / 448
    if scale_dtype == torch.uint8:
        exponents = torch.ceil(torch.log2(grid))
        stored, grid = (exponents + 127).to(torch.uint8), torch.exp2(exponents)
    else:
        stored = grid = grid.to(scale_dtype)
    scales = grid.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    codes = (weight / scales).clamp(-448, 448).to(E4M3)
    return codes, stored, codes.float() * scales


def fp8(name, weight):
    codes, scales, wide = fp8_blocks(weight, (16, 16))
    return {"weight": codes, "weight_scale_inv": scales}, wide


def fp8_edges(name, weight):
    """Blocks that do not divide the matrix, other spellings of the scales, a scale a row and one for the matrix."""
    layer, module = name.split(".")[2], name.split(".")[-2]
    whole, row, block = weight.shape, (1, weight.shape[1]), (48, 24)
    activation = {"activation_scale": torch.tensor(0.03)}
    if layer == "0" and module == "gate_proj":
        return None
    if module == "q_proj":
        codes, scales, wide = fp8_blocks(weight, whole)
        return {"weight": codes, "weight_scale_inv": scales.reshape(())} | activation, wide
    if module == "k_proj":
        codes, scales, wide = fp8_blocks(weight, row)
        return {"weight": codes, "weight_scale": scales}, wide
    if module == "v_proj":
        codes, scales, wide = fp8_blocks(weight, block, torch.uint8)
        return {"weight": codes, "scale": scales}, wide
    if module == "o_proj":
        codes, scales, wide = fp8_blocks(weight, whole)
        return {"weight": codes, "qscale_weight": scales.reshape(1), "qscale_act": torch.tensor([0.02])}, wide
    codes, scales, wide = fp8_blocks(weight, block, torch.bfloat16 if module == "down_proj" else torch.float32)
    return {"weight": codes, "weight_scale_inv": scales}, wide


# GPTQ and AWQ: (code - zero) * scale, of a group of columns in a row.


def grouped(weight, bits, group_of, groups, symmetric):
    """Codes [out, in], zeros and scales [out, groups]."""
    rows, columns = weight.shape
    codes, most = torch.zeros(rows, columns, dtype=torch.long), 2**bits - 1
    zeros, scales = torch.zeros(rows, groups, dtype=torch.long), torch.zeros(rows, groups)
    for group in range(groups):
        at = group_of == group
        part = weight[:, at]
        if symmetric:
            scale = (part.abs().amax(1) * 2 / most).half().float()
            zero = torch.full((rows,), 2 ** (bits - 1))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / most).half().float()
            zero = torch.round(-low / scale).long().clamp(0, most)
        codes[:, at] = (torch.round(part / scale[:, None]).long() + zero[:, None]).clamp(0, most)
        zeros[:, group], scales[:, group] = zero, scale
    wide = (codes - zeros[:, group_of]).float() * scales[:, group_of]
    return codes, zeros, scales, wide


def gptq_tensors(codes, zeros, scales, bits, version, group_of):
    zeros = fields(zeros.T.contiguous(), bits)
    if version == 1:
        # One less in every field; what the lowest zero borrows, it borrows from the next.
        zeros = (zeros.long() - sum(1 << bits * at for at in range(32 // bits))) & 0xFFFFFFFF
        zeros = torch.where(zeros >= 2**31, zeros - 2**32, zeros).to(torch.int32)
    return {
        "qweight": fields(codes, bits).T.contiguous(), "qzeros": zeros, "scales": scales.T.contiguous().half(), "g_idx": group_of.to(torch.int32),
    }


def gptq(name, weight):
    """Version 1, asymmetric, columns sorted before they were cut into groups of 32; the last group is smaller."""
    columns = weight.shape[1]
    order = torch.from_numpy(np.random.default_rng(columns).permutation(columns))
    group_of = torch.empty(columns, dtype=torch.long)
    group_of[order] = torch.arange(columns) // 32
    codes, zeros, scales, wide = grouped(weight, 4, group_of, -(-columns // 32), False)
    # A zero of 0 in the first field of a word, and one in the middle.
    for row in (0, 10):
        codes[row] = (codes[row] - zeros[row][group_of]).clamp(0, 15)
        zeros[row] = 0
        wide[row] = codes[row].float() * scales[row][group_of]
    return gptq_tensors(codes, zeros, scales, 4, 1, group_of), wide


def gptq_claims(name, weight):
    """Symmetric zeros as version 2 stores them, in a file that claims to be version 1."""
    group_of = torch.arange(weight.shape[1]) // 16
    codes, zeros, scales, wide = grouped(weight, 4, group_of, -(-weight.shape[1] // 16), True)
    return gptq_tensors(codes, zeros, scales, 4, 2, group_of), wide


def gptq8(name, weight):
    """8 bits, version 2, asymmetric, though the file says that it is symmetric."""
    group_of = torch.zeros(weight.shape[1], dtype=torch.long)
    codes, zeros, scales, wide = grouped(weight, 8, group_of, 1, False)
    return gptq_tensors(codes, zeros, scales, 8, 2, group_of), wide


def awq(name, weight):
    group_of = torch.arange(weight.shape[1]) // 16
    codes, zeros, scales, wide = grouped(weight, 4, group_of, weight.shape[1] // 16, False)

    def packed(values):
        # [.., out]: eight outputs a word, in AWQ's order.
        return fields(values.reshape(*values.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(values.shape), 4)

    tensors = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.contiguous().half()}
    return {key: value.contiguous() for key, value in tensors.items()}, wide


# compressed-tensors: coded and widened by its own package.


def scheme(**args):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))


def bounds(weight, group):
    parts = weight.reshape(weight.shape[0], -1, group)
    return parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)


def widened(compressor, tensors, kind):
    """The package's numbers in float32: it computes in the dtype of the scales."""
    wide = {key: value.float() if key == "weight_scale" else value for key, value in tensors.items()}
    return compressor.decompress(wide, kind)["weight"].float()


def ct_int4(name, weight):
    """4 bits, asymmetric, in groups of 16."""
    kind = scheme(num_bits=4, type="int", symmetric=False, strategy="group", group_size=16)
    low, high = bounds(weight, 16)
    scale = ((high - low) / 15).bfloat16()
    zero = (torch.round(-low / scale.float()) - 8).clamp(-8, 7).to(torch.int8)
    tensors = PackedQuantizationCompressor.compress(dict(weight=weight, weight_scale=scale.float(), weight_zero_point=zero), kind)
    tensors["weight_scale"] = scale
    return tensors, widened(PackedQuantizationCompressor, tensors, kind)


def ct_int8(name, weight):
    """8 bits with a scale a row: packed in attention, a byte a number in the MLP."""
    kind = scheme(num_bits=8, type="int", symmetric=True, strategy="channel")
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    compressor = PackedQuantizationCompressor if "self_attn" in name else NaiveQuantizationCompressor
    tensors = compressor.compress(dict(weight=weight, weight_scale=scale.float()), kind)
    tensors["weight_scale"] = scale
    return tensors, widened(compressor, tensors, kind)


def ct_fp8(name, weight):
    """FP8 with a scale a row."""
    kind = scheme(num_bits=8, type="float", symmetric=True, strategy="channel")
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    tensors = NaiveQuantizationCompressor.compress(dict(weight=weight, weight_scale=scale.float()), kind)
    tensors |= {"weight_scale": scale, "input_scale": torch.tensor([0.02])}
    return tensors, widened(NaiveQuantizationCompressor, tensors, kind)


def nvfp4_codes(weight, scales):
    """Codes two a byte, the first in the low half."""
    quotients = weight / scales.repeat_interleave(16, 1)
    codes = (quotients.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (quotients < 0)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def ct_nvfp4(name, weight):
    whole = (448 * 6 / weight.abs().max()).reshape(1)
    scales = (bounds(weight.abs(), 16)[1] / 6 * whole).to(E4M3)
    codes = nvfp4_codes(weight, scales.float() / whole)
    kind = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    wide = dequantize(
        unpack_fp4_from_uint8(codes, *weight.shape, dtype=torch.float32), scales.float(), args=kind, global_scale=whole, dtype=torch.float32
    )
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": whole}, wide


def nvfp4(name, weight):
    whole = weight.abs().max() / (448 * 6)
    scales = (bounds(weight.abs(), 16)[1] / 6 / whole).to(E4M3)
    factors = scales.float() * whole
    codes = nvfp4_codes(weight, factors)
    numbers = torch.cat([E2M1, -E2M1])[torch.stack([codes & 15, codes >> 4], -1).long().reshape(weight.shape)]
    beside = {"input_scale": torch.tensor(0.01)}
    if name.endswith("k_proj.weight"):
        beside["k_scale"] = torch.tensor(1.0)
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": whole} | beside, numbers * factors.repeat_interleave(16, 1)


def fp8_wide(name, weight):
    codes, scales, wide = fp8_blocks(weight, (128, 128))
    return {"weight": codes, "weight_scale_inv": scales}, wide


def compressed(format, **args):
    group = dict(targets=["Linear"], weights=args, input_activations=None, output_activations=None)
    return dict(quant_method="compressed-tensors", format=format, config_groups=dict(group_0=group), ignore=["lm_head"], quantization_status="compressed")


CASES = {
    "fp8": (fp8, dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[16, 16], modules_to_not_convert=["lm_head"])),
    "fp8_edges": (
        fp8_edges,
        dict(quant_method="fp8", activation_scheme="static", weight_block_size=[48, 24], modules_to_not_convert=["model.layers.0.mlp.gate_proj"]),
    ),
    "gptq": (gptq, dict(quant_method="gptq", bits=4, group_size=32, desc_act=True, sym=False, checkpoint_format="gptq")),
    "gptq_claims": (gptq_claims, dict(quant_method="gptq", bits=4, group_size=16, desc_act=False, sym=True, checkpoint_format="gptq")),
    "gptq8": (gptq8, dict(quant_method="gptq", bits=8, group_size=-1, desc_act=False, sym=True, checkpoint_format="gptq_v2")),
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=16, zero_point=True, version="gemm", modules_to_not_convert=None)),
    "ct_int4": (ct_int4, compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=16)),
    "ct_int8": (ct_int8, compressed("mixed-precision", num_bits=8, type="int", symmetric=True, strategy="channel")),
    "ct_fp8": (ct_fp8, compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")),
    "ct_nvfp4": (ct_nvfp4, compressed("nvfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)),
    "nvfp4": (nvfp4, dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"], kv_cache_scheme=dict(num_bits=8, type="float"))),
}
# Of a mixture of experts; in FP8, with the usual blocks.
EXPERTS = {f"{case}_experts": CASES[case] for case in ("gptq", "awq", "ct_int4", "ct_int8", "ct_fp8", "ct_nvfp4", "nvfp4")}
EXPERTS["fp8_experts"] = (fp8_wide, CASES["fp8"][1] | dict(weight_block_size=[128, 128], modules_to_not_convert=["lm_head", "gate"]))


def write(out, case, quantize, described, config, plain, ids):
    os.makedirs(f"{out}/{case}/model")
    tensors, wide, digests = {}, {}, {}
    for name, value in plain.items():
        coded = quantize(name, value) if "_proj" in name else None
        if coded is None:
            tensors[name], wide[name] = value.bfloat16(), value
            continue
        parts, wide[name] = coded
        tensors |= {f"{name.removesuffix('.weight')}.{key}": part.contiguous() for key, part in parts.items()}
        digests[name] = digest(wide[name])
        assert (wide[name] - value).abs().max() < 0.3 or case in ("gptq", "gptq_experts"), name
    save_file(tensors, f"{out}/{case}/model/model.safetensors", metadata={"format": "pt"})
    stored = config.to_dict() | dict(quantization_config=described, architectures=[type(config).__name__.replace("Config", "ForCausalLM")])
    with open(f"{out}/{case}/model/config.json", "w", encoding="utf-8") as file:
        json.dump(stored, file, indent=1, sort_keys=True)
    implementation = dict(attn_implementation="eager", experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, **implementation).float()
    model.load_state_dict(stacked({**wide, "lm_head.weight": wide["model.embed_tokens.weight"]}, model))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    if case == "fp8":
        # Transformers reads the folder itself.
        read = transformers.AutoModelForCausalLM.from_pretrained(
            f"{out}/{case}/model", dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True), attn_implementation="eager"
        )
        for name, value in read.state_dict().items():
            assert torch.equal(value.float(), wide.get(name, value).float()), name
    with open(f"{out}/{case}/expected.json", "w", encoding="utf-8") as file:
        json.dump(dict(digests=digests, input_ids=ids[0].tolist(), logits=logits.flatten().tolist()), file)


def nf4(name, weight):
    """A matrix as bitsandbytes' layers save it, and its numbers by bitsandbytes' plain-PyTorch kernel."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    codes, state = BF.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    absmax = state.state2.code[state.absmax.long()] * state.state2.absmax.repeat_interleave(256)[: state.absmax.numel()] + state.offset
    wide = _dequantize_4bit_compute(codes.reshape(-1), absmax, state.code, state.blocksize, state.shape, torch.float32)
    return {name: codes} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}, wide


def unsloth(models, out, ids):
    tensors, wide, digests = {}, {}, {}
    for name, value in load_file(f"{models}/gpt_oss/model/model.safetensors").items():
        block, _, end = name.partition(".mlp.experts.")
        if ".mlp.router." in name:
            tensors[name.replace("router", "router.linear")] = value
        elif end.endswith("_bias"):
            for expert, bias in enumerate(value):
                tensors[f"{block}.mlp.experts.{end.removesuffix('_bias')}s.{expert}.bias"] = bias.contiguous()
        elif end:
            # Linear layers have rows of outputs.
            stacked = []
            for expert, matrix in enumerate(value.float().transpose(1, 2)):
                parts, numbers = nf4(f"{block}.mlp.experts.{end}s.{expert}.weight", matrix.contiguous())
                tensors |= parts
                stacked.append(numbers.T)
                names = ["gate_proj", "up_proj"] if "gate" in end else ["down_proj"]
                for first, part in enumerate(names):
                    digests[f"{block}.mlp.experts.{expert}.{part}.weight"] = digest(numbers[first :: len(names)])
            wide[name] = torch.stack(stacked)
            continue
        else:
            tensors[name] = value
        wide[name] = value.float()
    os.makedirs(f"{out}/unsloth/model")
    save_file({name: value.contiguous() for name, value in tensors.items()}, f"{out}/unsloth/model/model.safetensors", metadata={"format": "pt"})
    with open(f"{models}/gpt_oss/model/config.json", encoding="utf-8") as file:
        config = json.load(file)
    quantization = dict(
        quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["self_attn", "router", "lm_head", "embed_tokens"],
    )
    with open(f"{out}/unsloth/model/config.json", "w", encoding="utf-8") as file:
        json.dump(config | dict(quantization_config=quantization), file, indent=1, sort_keys=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        f"{models}/gpt_oss/model", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    missing, unexpected = model.load_state_dict(wide, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing), (missing, unexpected)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    with open(f"{out}/unsloth/expected.json", "w", encoding="utf-8") as file:
        json.dump(dict(digests=digests, input_ids=ids[0].tolist(), logits=logits.flatten().tolist()), file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    shutil.rmtree(args.out, ignore_errors=True)
    plain = weights(configuration())
    ids = torch.from_numpy(np.random.default_rng(77).integers(3, 96, (1, 17)))
    for case, (quantize, described) in CASES.items():
        write(args.out, case, quantize, described, configuration(), plain, ids)
    of_experts = by_expert(weights(mixture()))
    for case, (quantize, described) in EXPERTS.items():
        write(args.out, case, quantize, described, mixture(), of_experts, ids)
    unsloth(args.models, args.out, ids)
    with open(f"{args.out}/versions.json", "w", encoding="utf-8") as file:
        versions = {module.__name__: module.__version__ for module in (torch, transformers, compressed_tensors)}
        json.dump(versions, file)


if __name__ == "__main__":
    main()
