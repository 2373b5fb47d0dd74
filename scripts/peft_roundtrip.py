#!/usr/bin/env python3
"""Trains the golden models in every mode with the tunesmith binary. Loads each result with Transformers and PEFT, and compares its validation
loss with the run's own. Also reads adapters that PEFT wrote. Takes seconds per case.

    pip install -r scripts/golden/requirements.txt && cargo build
    python3 scripts/peft_roundtrip.py [--binary target/debug/tunesmith] [--only NAME]

Prints a line per case; exits 1 if a loss differs by more than 1e-5.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
GOLDEN = f"{HERE}/../tests/golden"
# The tokenizer's 640 tokens are more than the models' 512 rows: two new ones have the ids 640 and 641.
NEW = ["tuning.new_tokens=[<one>, <two>]"]
CASES = {
    "lora": ("llama", []),
    "dora": ("llama", ["tuning.lora.use_dora=true", "tuning.lora.lora_dropout=0.1"]),
    "dora_biases": ("qwen2", ["tuning.lora.use_dora=true", "tuning.lora.bias=all"]),
    "bias_lora_only": ("qwen2", ["tuning.lora.bias=lora_only", "tuning.lora.target_modules=[q_proj]"]),
    "excluded": ("qwen3", ["tuning.lora.exclude_modules=[down_proj, o_proj]", "tuning.lora.init_lora_weights=gaussian"]),
    "pissa": ("llama", ["tuning.lora.init_lora_weights=pissa"]),
    "pissa_dora": ("llama", ["tuning.lora.init_lora_weights=pissa", "tuning.lora.use_dora=true"]),
    "pissa_niter": ("qwen3", ["tuning.lora.init_lora_weights=pissa_niter_4", "tuning.lora.use_rslora=true"]),
    "tokens": ("llama", NEW),
    "tokens_tied": ("qwen2", NEW),
    "tokens_saved_head": ("llama", [*NEW, "tuning.lora.modules_to_save=[lm_head]"]),
    "tokens_saved": ("llama", [*NEW, "tuning.lora.modules_to_save=[embed_tokens, lm_head]"]),
    "tied_saved": ("qwen2", ["tuning.lora.modules_to_save=[embed_tokens, lm_head]"]),
    "tied_saved_head": ("qwen2", ["tuning.lora.modules_to_save=[lm_head]"]),
    "tied_saved_embedding": ("qwen2", ["tuning.lora.modules_to_save=[embed_tokens]", "tuning.lora.use_dora=true"]),
    "tied_ensured": ("qwen2", ["tuning.lora.modules_to_save=[lm_head]", "tuning.lora.ensure_weight_tying=true"]),
    "tied_ia3": ("qwen2", ["tuning.mode=ia3", "tuning.ia3.modules_to_save=[lm_head]"]),
    "tied_oft": ("qwen2", ["tuning.mode=oft", "tuning.oft.modules_to_save=[embed_tokens, lm_head]"]),
    "tied_tokens_saved": ("qwen2", [*NEW, "tuning.lora.modules_to_save=[embed_tokens, lm_head]"]),
    "tied_tokens_saved_embedding": ("qwen2", [*NEW, "tuning.lora.modules_to_save=[embed_tokens]"]),
    "tied_tokens_ensured": ("qwen2", [*NEW, "tuning.lora.modules_to_save=[embed_tokens, lm_head]", "tuning.lora.ensure_weight_tying=true"]),
    "tokens_full": ("qwen2", [*NEW, "tuning.mode=full"]),
    "freeze": ("llama", ["tuning.mode=freeze", "tuning.freeze.trainable_layers=1", "tuning.freeze.trainable_modules=[head, norms, mlp]"]),
    "freeze_tied": ("qwen2", ["tuning.mode=freeze", "tuning.freeze.trainable_modules=[embeddings, bias]"]),
    "ia3": ("qwen2", ["tuning.mode=ia3"]),
    "ia3_fused": ("phi3", ["tuning.mode=ia3", "tuning.ia3.modules_to_save=[lm_head]"]),
    "ia3_patterns": ("llama", ["tuning.mode=ia3", "tuning.ia3.target_modules=.*(up_proj|q_proj)", "tuning.ia3.feedforward_modules=.*up_proj"]),
    "oft": ("qwen2", ["tuning.mode=oft", "tuning.oft.oft_block_size=24"]),
    "oft_blocks": ("phi3", ["tuning.mode=oft", "tuning.oft.r=4", "tuning.oft.oft_block_size=0", "tuning.oft.modules_to_save=[lm_head]"]),
    "oft_exact": ("llama", ["tuning.mode=oft", "tuning.oft.use_cayley_neumann=false", "tuning.oft.block_share=true"]),
    "router": ("mixtral", ["tuning.lora.modules_to_save=[mlp.gate]"]),
    "adapted_router": ("mixtral", ["tuning.lora.target_modules=[q_proj, gate]"]),
    "all_linear": ("mixtral", ["tuning.lora.target_modules=all-linear"]),
    "all_linear_rslora": ("qwen3_moe", ["tuning.lora.target_modules=all-linear", "tuning.lora.use_rslora=true"]),
    "parameters": ("qwen2_moe", ["tuning.lora.target_modules=[shared_expert_gate]", "tuning.lora.target_parameters=[mlp.gate.weight]"]),
    "stacked": ("llama", ["tuning.adapters=[DORA, LORA]"]),
    "stacked_ia3": ("qwen2", ["tuning.adapters=[IA3]"]),
    "continued_ia3": ("qwen2", ["tuning.mode=ia3", "tuning.adapter=IA3"]),
    "continued_peft_ia3": ("llama", ["tuning.mode=ia3", "tuning.adapter=PEFT_IA3"]),
    "stacked_oft": ("qwen2", ["tuning.adapters=[OFT]"]),
    "continued_oft": ("qwen2", ["tuning.mode=oft", "tuning.adapter=OFT"]),
    "continued_peft_oft": ("llama", ["tuning.mode=oft", "tuning.adapter=PEFT_OFT"]),
    "continued_dora": ("llama", ["tuning.adapter=DORA"]),
    "continued_tokens": ("qwen2", [*NEW, "tuning.adapter=TOKENS"]),
    "continued_peft_pissa": ("llama", ["tuning.adapter=PISSA"]),
    "continued_saved": ("llama", [*NEW, "tuning.adapter=SAVED"]),
    "continued_peft_rows": ("llama", ["tuning.adapter=PEFT_ROWS"]),
    "continued_peft_row_lists": ("llama", ["tuning.adapter=PEFT_APART"]),
    "continued_peft_all_linear": ("mixtral", ["tuning.adapter=PEFT_ALL"]),
    "continued_peft_tokens": ("llama", [*NEW, "tuning.adapter=PEFT_TOKENS"]),
    "stacked_tied": ("qwen2", ["tuning.adapters=[TIED_HEAD]", "tuning.lora.modules_to_save=[embed_tokens]"]),
    "continued_tied": ("qwen2", ["tuning.adapter=TIED_HEAD"]),
    "continued_peft_tied": ("qwen2", ["tuning.adapter=PEFT_BOTH"]),
    "continued_peft_ensured": ("qwen2", ["tuning.adapter=PEFT_ENSURED"]),
    "continued_peft_tied_rows": ("qwen2", ["tuning.adapter=PEFT_HEAD_ROWS"]),
    "continued_peft_tied_tokens": ("qwen2", [*NEW, "tuning.adapter=PEFT_GREW"]),
}


def write_rows(path, seed, new):
    import numpy as np

    rng = np.random.default_rng(seed)
    with open(path, "w") as file:
        for _ in range(8):
            ids = rng.integers(3, 512, int(rng.integers(8, 24))).tolist()
            if new:
                ids[2], ids[5] = 640, 641
            file.write(json.dumps({"input_ids": ids, "labels": [-100] * 3 + ids[3:]}) + "\n")


def peft_adapters(root):
    """Adapters that PEFT writes: PiSSA in its own form, and trained rows of tokens."""
    import peft
    import torch
    import transformers
    from peft_check import grow

    def save(name, grown, family="llama", targets=("q_proj", "down_proj"), **changes):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/{family}", dtype=torch.float32)
        if grown:
            grow(model, 642)
        targets = targets if isinstance(targets, str) else list(targets)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **changes)
        peft.get_peft_model(model, config).save_pretrained(f"{root}/{name}")

    model = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/llama", dtype=torch.float32)
    factors = peft.IA3Config(target_modules=["o_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, factors).save_pretrained(f"{root}/peft_ia3")
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{root}/llama", dtype=torch.float32)
    rotations = peft.OFTConfig(target_modules=["o_proj", "down_proj"], oft_block_size=16, init_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(model, rotations).save_pretrained(f"{root}/peft_oft")
    save("peft_rows", False, trainable_token_indices=[5, 3, 60])
    save("peft_apart", False, trainable_token_indices={"embed_tokens": [5, 3], "lm_head": [60]})
    save("peft_all", False, "mixtral", "all-linear")
    save("peft_pissa", False, init_lora_weights="pissa")
    both = ["embed_tokens", "lm_head"]
    save("peft_tied", False, "qwen2", modules_to_save=both)
    save("peft_ensured", False, "qwen2", modules_to_save=both, ensure_weight_tying=True)
    save("peft_head_rows", False, "qwen2", trainable_token_indices={"lm_head": [60, 5]})
    save("peft_tied_tokens", True, "qwen2", modules_to_save=["embed_tokens"], trainable_token_indices={"lm_head": [640, 641]})
    save("peft_tokens", True, trainable_token_indices={"embed_tokens": [640, 641], "lm_head": [640, 641]})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=f"{HERE}/../target/debug/tunesmith")
    parser.add_argument("--only")
    args = parser.parse_args()
    from peft_check import run_loss

    root = tempfile.mkdtemp(prefix="tunesmith-roundtrip-")
    for family in ("llama", "qwen2", "qwen3", "phi3", "mixtral", "qwen2_moe", "qwen3_moe"):
        shutil.copytree(f"{GOLDEN}/a/{family}/model", f"{root}/{family}")
        shutil.copytree(f"{GOLDEN}/c/tokenizer_bpe_gpt2", f"{root}/{family}", dirs_exist_ok=True)
    peft_adapters(root)
    places = {"DORA": f"{root}/runs/dora/adapter", "LORA": f"{root}/runs/lora/adapter", "PISSA": f"{root}/peft_pissa",
              "PEFT_IA3": f"{root}/peft_ia3", "IA3": f"{root}/runs/ia3/adapter", "PEFT_OFT": f"{root}/peft_oft", "OFT": f"{root}/runs/oft/adapter", "PEFT_TOKENS": f"{root}/peft_tokens", "SAVED": f"{root}/runs/tokens_saved/adapter",
              "PEFT_ROWS": f"{root}/peft_rows", "PEFT_APART": f"{root}/peft_apart", "PEFT_ALL": f"{root}/peft_all", "TOKENS": f"{root}/runs/tokens_tied/adapter",
              "TIED_HEAD": f"{root}/runs/tied_saved_head/adapter", "PEFT_BOTH": f"{root}/peft_tied", "PEFT_ENSURED": f"{root}/peft_ensured",
              "PEFT_HEAD_ROWS": f"{root}/peft_head_rows", "PEFT_GREW": f"{root}/peft_tied_tokens"}
    failed = 0
    for name, (family, words) in CASES.items():
        if args.only and args.only != name and name not in ("lora", "dora", "tokens_tied", "tokens_saved", "tied_saved_head", "ia3", "oft"):
            continue
        new = any("new_tokens" in word for word in words)
        rows, validation = f"{root}/{name}.train.jsonl", f"{root}/{name}.val.jsonl"
        write_rows(rows, 1, new)
        write_rows(validation, 2, new)
        for word, place in places.items():
            words = [text.replace(f"={word}", f"={place}").replace(f"[{word}", f"[{place}").replace(f" {word}", f" {place}") for text in words]
        with open(f"{root}/config.yaml", "w") as file:
            settings = {
                "model": {"name": f"{root}/{family}", "max_seq_len": 64},
                "tuning": {"lora": {"r": 4, "lora_alpha": 8}} if not any("adapter=" in word or "mode=" in word for word in words) else {},
                "train": {"output_dir": f"{root}/runs/{name}", "batch_size": 4, "max_steps": 6, "learning_rate": 0.005, "eval_strategy": "epoch",
                          "lr_scheduler_type": "constant"},
                "data": {"train_path": rows, "val_path": validation, "use_cache": False, "loss_on": "all"},
                "gen": {"num_samples": 0},
            }
            json.dump(settings, file)
        ran = subprocess.run([args.binary, "train", f"{root}/config.yaml", *words], capture_output=True, text=True)
        if ran.returncode:
            print(f"{name}: FAILED to run\n{ran.stdout}{ran.stderr}")
            failed += 1
            continue
        below = {"stacked": [places["DORA"], places["LORA"]], "stacked_ia3": [places["IA3"]], "stacked_oft": [places["OFT"]], "stacked_tied": [places["TIED_HEAD"]]}.get(name, [])
        try:
            theirs, own = run_loss(f"{root}/runs/{name}", f"{root}/{family}", validation, below)
        except Exception as error:
            print(f"{name}: FAILED to load: {error!r}")
            failed += 1
            continue
        good = abs(theirs - own) <= 1e-5
        failed += not good
        print(f"{name}: {own:.6f} here, {theirs:.6f} there, difference {abs(theirs - own):.1e}{'' if good else '  FAILED'}", flush=True)
    shutil.rmtree(root)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
