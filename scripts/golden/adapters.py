"""PEFT's adapters on anything but linear modules of a block: rows of the vocabulary's tables, grown tables, routers and experts. On the models
of `tests/golden/a`.

    python scripts/golden/adapters.py --models tests/golden/a --out tests/golden/adapters

For each case: the adapter with random values, the logits and the loss of two rows, and the gradients of the trained tensors, except whole
tables. If the embedding and the head share a table that has not grown, also the losses of a few steps.

The cases experts_* and fused_* are on experts; `settings.json` has what is asked for beside rank 2 and alpha 6. PEFT loads each of their adapters again: from its own files, and where `ours/adapter_config.json`
is there, with this file as tunesmith writes it (`TUNESMITH_TEST_UPDATE=1 cargo test --test it adapters::`). Both give the same logits, bit for
bit; those of tunesmith's file are stored as `ours`.
"""
import argparse
import json
import math
import os
import shutil
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers

from common import adapter_state, save_tensors

GROWN = 5
CASES = {
    "rows_list": ("llama", 0, dict(target_modules=["q_proj"], trainable_token_indices=[7, 3, 40])),
    "rows_apart": ("llama", 0, dict(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 9], "lm_head": [40]})),
    "rows_of_the_head": ("llama", 0, dict(target_modules=["q_proj"], trainable_token_indices={"lm_head": [40, 7]})),
    "rows_tied": ("qwen2", 0, dict(target_modules=["q_proj"], trainable_token_indices=[7, 3, 40])),
    "rows_grown": ("llama", GROWN, dict(target_modules=["q_proj"], trainable_token_indices=[512, 516])),
    "tables": ("llama", GROWN, dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])),
    "tables_beside": ("llama", GROWN, dict(target_modules=["q_proj"])),
    "mixtral": ("mixtral", 0, dict(target_modules="all-linear")),
    "qwen3_moe": ("qwen3_moe", 0, dict(target_modules="all-linear", use_rslora=True)),
    "qwen2_moe": ("qwen2_moe", 0, dict(target_modules=["shared_expert_gate"], target_parameters=["gate.weight", "q_proj.weight"])),
    "former_names": ("mixtral", 0, dict(target_modules=["q_proj", "gate", "w2"], rank_pattern={"gate.weight": 3})),
}


FORMER = "transformers_4"


def load(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    widened = dict(quantization_config=transformers.Mxfp4Config(dequantize=True)) if hasattr(config, "quantization_config") else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", **widened
    ).float()


def former(folder, out, seed):
    """An adapter as PEFT wrote it with Transformers 4, where routers and experts were modules; PEFT reads it into today's model."""
    config = transformers.AutoConfig.from_pretrained(folder)
    hidden, inner, rng = config.hidden_size, config.intermediate_size, np.random.default_rng(seed)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        block = f"base_model.model.model.layers.{layer}"
        sizes = {f"{block}.self_attn.q_proj": (hidden, hidden), f"{block}.block_sparse_moe.gate": (config.num_local_experts, hidden)}
        for expert in range(config.num_local_experts):
            for name, size in dict(w1=(inner, hidden), w2=(hidden, inner), w3=(inner, hidden)).items():
                sizes[f"{block}.block_sparse_moe.experts.{expert}.{name}"] = size
        for module, (outputs, inputs) in sizes.items():
            for side, shape, scale in (("A", (2, inputs), inputs**-0.5), ("B", (outputs, 2), 0.1)):
                values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
                tensors[f"{module}.lora_{side}.weight"] = torch.from_numpy(values)
    settings = peft.LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM", target_modules=["gate", "q_proj", "w1", "w2", "w3"])
    os.makedirs(f"{out}/adapter")
    settings.save_pretrained(f"{out}/adapter")
    path = f"{out}/adapter/adapter_config.json"
    with open(path, encoding="utf-8") as file:
        written = json.load(file)
    written["target_modules"].sort()
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(written, indent=2, sort_keys=True))
    save_tensors(tensors, f"{out}/adapter/adapter_model.safetensors")
    return peft.PeftModel.from_pretrained(load(folder), f"{out}/adapter", is_trainable=True).train()


def build(folder, seed, grown, arguments):
    """The model with the adapter, its values random."""
    model = load(folder)
    if grown:
        model.resize_token_embeddings(model.config.vocab_size + grown, mean_resizing=False)
        with torch.no_grad():
            for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
                table[-grown:] = table[:-grown].double().mean(0).float() * (1 if "trainable_token_indices" in arguments else 2)
    # Grown tables are saved whole only if they are trained whole.
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM", **arguments))
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if not parameter.requires_grad:
                continue
            noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), dtype=np.float32))
            parameter.copy_(noise * 0.1 if "lora_B" in name else noise / math.sqrt(parameter.shape[1]))
    return model.train()


def case(folder, out, seed, grown, arguments):
    for entry in os.listdir(out) if os.path.exists(out) else []:
        if entry != "ours":
            shutil.rmtree(f"{out}/{entry}") if os.path.isdir(f"{out}/{entry}") else os.remove(f"{out}/{entry}")
    os.makedirs(out, exist_ok=True)
    if arguments is FORMER:
        measure(former(folder, out, seed), out, seed, grown, False)
        return
    model = build(folder, seed, grown, arguments)
    ours = f"{out}/ours/adapter_config.json"
    # "auto" would look for the base's configuration on the hub.
    model.save_pretrained(f"{out}/adapter", save_embedding_layers=bool(grown and "trainable_token_indices" not in arguments))
    os.remove(f"{out}/adapter/README.md")
    path = f"{out}/adapter/adapter_config.json"
    with open(path, encoding="utf-8") as file:
        written = json.load(file)
    # They are sets, whose order differs from run to run; the folder is that of a machine.
    for key in ("target_modules", "target_parameters", "modules_to_save"):
        if isinstance(written[key], list):
            written[key].sort()
    written["base_model_name_or_path"] = os.path.basename(os.path.dirname(folder))
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(written, indent=2, sort_keys=True))
    more = {}
    if os.path.basename(out).startswith(("experts_", "fused_")):
        with open(f"{out}/settings.json", "w", encoding="utf-8") as file:
            file.write(json.dumps(arguments, indent=2, sort_keys=True))
        more = {"ours": reloaded(folder, out, ours, seed)} if os.path.exists(ours) else {}
        model_again = peft.PeftModel.from_pretrained(load(folder), f"{out}/adapter").eval()
        with torch.no_grad():
            again, first = (it(input_ids=rows(seed, grown), use_cache=False).logits for it in (model_again, model.eval()))
        assert torch.equal(again, first), "PEFT loads what it has saved"
        model.train()
    measure(model, out, seed, grown, "modules_to_save" in arguments, more)


def reloaded(folder, out, settings, seed):
    """The logits of PEFT with the case's tensors and other settings."""
    with tempfile.TemporaryDirectory() as adapter:
        shutil.copy(f"{out}/adapter/adapter_model.safetensors", adapter)
        shutil.copy(settings, adapter)
        with torch.no_grad():
            model = peft.PeftModel.from_pretrained(load(folder), adapter).eval()
            return model(input_ids=rows(seed, 0), use_cache=False).logits[:, [3, 7, 11]]


def steps(model, ids):
    """The losses of a few steps of AdamW on the same rows."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def rows(seed, grown):
    rng = np.random.default_rng(seed + 1)
    ids = rng.integers(3, 512, (2, 12))
    # The trained tokens appear as inputs and as labels.
    ids[0, [1, 4, 7]], ids[1, [2, 5, 8]] = (7, 3, 40), (9, 512 if grown else 40, 516 if grown else 3)
    return torch.from_numpy(ids)


def measure(model, out, seed, grown, whole, more=None):
    ids = rows(seed, grown)
    output = model(input_ids=ids, use_cache=False)
    logits = output.logits
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    uneven = getattr(output, "aux_loss", None)
    (loss if uneven is None else loss + model.config.router_aux_loss_coef * uneven).backward()
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.replace(".default", "").replace(".modules_to_save", "")
            grads[f"grad.{name}"] = parameter.grad
    if whole:
        grads = {name: grad for name, grad in grads.items() if "lora" in name}
    stored = [name.removeprefix("grad.") for name in grads]
    assert set(stored) <= set(adapter_state(model)), (stored, list(adapter_state(model)))
    tensors = dict(ids=ids.int(), logits=logits[:, [3, 7, 11]].detach(), loss=loss.detach().reshape(1), **grads, **(more or {}))
    if os.path.basename(out).startswith("tied") and not grown:
        tensors["losses"] = steps(model, ids)
    save_tensors(tensors, f"{out}/golden.safetensors")


CASES["transformers_4"] = ("mixtral", 0, FORMER)
# The embedding and the head share a matrix. PEFT trains copies of it, unless ensure_weight_tying is set.
BOTH = ["embed_tokens", "lm_head"]
CASES |= {
    "tied_both": ("qwen2", 0, dict(target_modules=["q_proj"], modules_to_save=BOTH)),
    "tied_head": ("qwen2", 0, dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "tied_embedding": ("qwen2", 0, dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"])),
    "tied_ensured": ("qwen2", 0, dict(target_modules=["q_proj"], modules_to_save=BOTH, ensure_weight_tying=True)),
    "tied_rows_of_the_head": ("qwen2", 0, dict(target_modules=["q_proj"], trainable_token_indices={"lm_head": [40, 7]})),
    "tied_rows_apart": ("qwen2", 0, dict(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 9], "lm_head": [40]})),
    "tied_table_and_rows": (
        "qwen2", 0, dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], trainable_token_indices={"lm_head": [40, 7]})
    ),
    "tied_grown": ("qwen2", GROWN, dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"])),
    # Stored because the vocabulary has grown, not because they were trained: one matrix.
    "tied_grown_beside": ("qwen2", GROWN, dict(target_modules=["q_proj"])),
}

# Adapters on experts of every family that has some: a rank and an alpha of their own for a parameter, and the router where it is one.
PATTERNS = dict(rank_pattern={"experts.gate_up_proj": 3}, alpha_pattern={"experts.down_proj": 5, "experts.gate_up_proj": 4})
ROUTERS = {
    "lfm2_moe": "feed_forward.gate.weight", "afmoe": "mlp.router.gate.weight", "gpt_oss": "mlp.router.weight", "gemma4_a4b": "k_proj.weight"
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
for family in (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite", "lfm2_moe", "gemma4_a4b", "deepseek_v2",
    "deepseek_v3", "mistral4", "afmoe", "minimax_m2", "gpt_oss",
):
    parameters = EXPERTS + [ROUTERS.get(family, "mlp.gate.weight")]
    CASES[f"experts_{family}"] = (family, 0, dict(target_modules=["o_proj", "out_proj"], target_parameters=parameters, **PATTERNS))
# One of the two parameters alone, which PEFT then names otherwise.
CASES |= {
    "experts_gate_up": ("gpt_oss", 0, dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"], use_rslora=True)),
    "experts_down": ("gpt_oss", 0, dict(target_modules=[], target_parameters=["layers.1.mlp.experts.down_proj"])),
    "experts_of_a_block": ("qwen3_5_moe", 0, dict(target_modules=["q_proj"], target_parameters=["layers.1.mlp.experts.gate_up_proj"])),
}
# Former names of modules: gate and up are one parameter with twice the rank and twice the alpha.
FORMER_QWEN = ["gate", "gate_proj", "up_proj", "down_proj"]
CASES |= {
    "fused_qwen3_next": ("qwen3_next", 0, dict(target_modules="all-linear")),
    "fused_glm4_moe": ("glm4_moe", 0, dict(target_modules=["q_proj", *FORMER_QWEN], rank_pattern={"down_proj": 3})),
    "fused_glm4_moe_lite": ("glm4_moe_lite", 0, dict(target_modules="all-linear", use_rslora=True)),
    "fused_deepseek_v2": ("deepseek_v2", 0, dict(target_modules=r".*\.(o_proj|gate_proj|up_proj)")),
    "fused_deepseek_v3": ("deepseek_v3", 0, dict(target_modules="all-linear", rank_pattern={"o_proj": 3})),
    "fused_afmoe": ("afmoe", 0, dict(target_modules=["v_proj", *FORMER_QWEN], alpha_pattern={"experts.down_proj": 5})),
    "fused_minimax_m2": ("minimax_m2", 0, dict(target_modules=["v_proj", "w1", "w2", "w3"], use_rslora=True)),
}
# The same over experts in MXFP4, which PEFT sees widened.
CASES["experts_mxfp4"] = ("../mxfp4", 0, dict(target_modules=["q_proj"], target_parameters=EXPERTS, **PATTERNS))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="*", help="these cases alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for number, (name, (family, grown, arguments)) in enumerate(CASES.items()):
        if args.only is None or name in args.only:
            case(f"{args.models}/{family}/model", f"{args.out}/{name}", 500 + 10 * number, grown, arguments)


main()
