#!/usr/bin/env python3
"""Tunes a multimodal model on pictures in PyTorch + PEFT and in tunesmith, one after the other in fresh processes, and prints the ratios.

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2 pillow
    python3 scripts/bench_vision.py --work /tmp/bench-vision --rounds 3
    python3 scripts/bench_vision.py --work /tmp/bench-captioner --rounds 3 --captioner

SmolVLM-256M's shape with random weights: pictures of 512 x 512 pixels (1,024 patches, 64 rows of the decoder), 60 tokens of text, LoRA r=16 on
every linear layer of the language model, encoder and connector frozen, float32 (`--bf16`: products and frozen weights in bfloat16; `--dtype bfloat16`: frozen weights alone), AdamW,
batches of 2 rows, the same number of threads. The runs alternate, because a machine's speed drifts. Three runs a round: PyTorch, which
encodes in every step; tunesmith with `vision.cache_features: false`, which does so too, as a first epoch; and tunesmith with features that
were kept before, as later epochs. PyTorch gets finished pixel values, so that decoding and resizing count on our side alone.

`--captioner`: SigLIP-base's shape (pictures of 224 x 224 pixels, 196 patches) before SmolLM2-135M's, and captions of 30 tokens. Only the linear
connector between them is trained, as in the first stage of a captioner.
"""
import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKENIZER = os.path.join(ROOT, "tests/golden/picture_chats/smolvlm")
VOCABULARY, IMAGE, SIDE, TEXT, BATCH, ROWS = 49280, 95, 512, 60, 2, 16
CAPTION_SIDE, CAPTION = 224, 30
TEXT_MODEL = dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=VOCABULARY,
                  max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
ENCODER = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, patch_size=16)


def make(work):
    """The model's folder, pictures and rows."""
    import torch
    import transformers

    model = os.path.join(work, "model")
    os.makedirs(model, exist_ok=True)
    text = dict(model_type="llama", tie_word_embeddings=False, pad_token_id=0, **TEXT_MODEL)
    vision = dict(image_size=SIDE, **ENCODER)
    config = transformers.SmolVLMConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=4, pad_token_id=0)
    torch.manual_seed(0)
    transformers.SmolVLMForConditionalGeneration(config).save_pretrained(model)
    copy_tokenizer(model)
    edge = {"longest_edge": SIDE}
    with open(os.path.join(model, "preprocessor_config.json"), "w", encoding="utf-8") as file:
        json.dump(dict(image_processor_type="SmolVLMImageProcessor", size=edge, max_image_size=edge, do_image_splitting=False), file)
    make_rows(work, SIDE, lambda text: dict(question="what", answer=text), TEXT)


def make_captioner(work):
    """The folders of a text model and an encoder, pictures and rows."""
    import torch
    import transformers

    model, encoder = (os.path.join(work, name) for name in ["model", "encoder"])
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **TEXT_MODEL)).save_pretrained(model)
    transformers.SiglipVisionModel(transformers.SiglipVisionConfig(image_size=CAPTION_SIDE, **ENCODER)).save_pretrained(encoder)
    copy_tokenizer(model)
    with open(os.path.join(encoder, "preprocessor_config.json"), "w", encoding="utf-8") as file:
        json.dump(dict(image_processor_type="SiglipImageProcessor", size=dict(height=CAPTION_SIDE, width=CAPTION_SIDE)), file)
    make_rows(work, CAPTION_SIDE, lambda text: dict(caption=text), CAPTION)


def copy_tokenizer(model):
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
        shutil.copy(os.path.join(TOKENIZER, name), model)


def make_rows(work, side, fields, length):
    """Pictures of random pixels, and rows with texts of so many letters, each a token."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    with open(os.path.join(work, "rows.jsonl"), "w", encoding="utf-8") as file:
        for number in range(ROWS):
            name = f"{number}.png"
            Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(os.path.join(work, name))
            text = "".join(random.choice(list("abcdefgijklmnopqrsuvwxyz"), length))
            file.write(json.dumps(dict(image=name, **fields(text))) + "\n")


def torch_run(work, steps, bf16, stored):
    """Seconds of each step in PyTorch + PEFT, whose weights are rounded to the type `stored`."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # As the Trainer has it with bf16: frozen weights in bfloat16, what is trained in float32, and autocast.
    base = torch.bfloat16 if bf16 else torch.float32
    model = transformers.SmolVLMForConditionalGeneration.from_pretrained(os.path.join(work, "model"), dtype=stored, attn_implementation="sdpa").to(base)
    targets = r".*text_model.*\.(q|k|v|o|gate|up|down)_proj"
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    prompt = [80, 4, 5, 6, 7, 94, 93] + [IMAGE] * 64 + [94, 8, 9, 10, 11]
    ids = torch.tensor([prompt + torch.randint(4, 27, (TEXT,)).tolist() for _ in range(BATCH)])
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    pixels = torch.rand(BATCH, 1, 3, SIDE, SIDE)
    loss = lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, labels=labels).loss
    return seconds_of_steps(loss, trained, steps, bf16)


def torch_captioner(work, steps, bf16, stored):
    """As `torch_run`, for a connector alone between a frozen encoder and a frozen text model."""
    import torch
    import transformers

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    base = torch.bfloat16 if bf16 else torch.float32
    how = dict(dtype=stored, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM.from_pretrained(os.path.join(work, "model"), **how).to(base).requires_grad_(False)
    encoder = transformers.SiglipVisionModel.from_pretrained(os.path.join(work, "encoder"), **how).to(base).requires_grad_(False)
    connector = torch.nn.Linear(ENCODER["hidden_size"], TEXT_MODEL["hidden_size"])
    # The end-of-sequence token follows.
    ids = torch.randint(4, 27, (BATCH, CAPTION + 1))
    labels = torch.cat([torch.full((BATCH, (CAPTION_SIDE // 16) ** 2), -100), ids], 1)
    pixels = torch.rand(BATCH, 3, CAPTION_SIDE, CAPTION_SIDE, dtype=base)

    def loss():
        with torch.no_grad():
            rows = encoder(pixels).last_hidden_state
        rows = torch.cat([connector(rows), model.get_input_embeddings()(ids)], 1)
        return model(inputs_embeds=rows, labels=labels).loss

    return seconds_of_steps(loss, list(connector.parameters()), steps, bf16)


def seconds_of_steps(loss, trained, steps, bf16):
    """Seconds of each of so many steps."""
    import torch

    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            found = loss()
        found.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    return seconds


def kept_in(arguments):
    """The type of frozen weights."""
    return arguments.dtype or ("bfloat16" if arguments.bf16 else "float32")


def tunesmith_run(work, program, steps, cached, arguments):
    """Seconds of each step in tunesmith."""
    out, bf16, dtype = os.path.join(work, "run"), arguments.bf16, kept_in(arguments)
    words = [
        f"model.name={work}/model", f"model.dtype={dtype}", f"train.bf16={'true' if bf16 else 'false'}", f"data.train_path={work}/rows.jsonl", f"data.cache_dir={work}/cache",
        "tuning.lora.r=16", "tuning.lora.lora_alpha=32", "tuning.lora.target_modules=auto", f"train.batch_size={BATCH}", f"train.max_steps={steps}",
        "train.gradient_checkpointing=false", f"train.output_dir={out}", "train.save_strategy=no", "logging.report_to=none",
        f"vision.cache_features={'true' if cached else 'false'}", f"train.num_threads={os.environ['OMP_NUM_THREADS']}",
    ]
    if arguments.offload_embedding:
        words.append("train.offload_embedding=true")
    if arguments.captioner:
        words += [f"vision.encoder={work}/encoder", "vision.connector=linear", "tuning.freeze_language=true"]
    subprocess.run([program, "train", *words, "--overwrite"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with open(os.path.join(out, "metrics.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [line["tokens"] / line["tokens_per_second"] for line in lines if "tokens_per_second" in line]


def measured(arguments, side):
    """The median step after two that warm up, in seconds, and the peak of the process's memory in MiB."""
    if side == "torch":
        command = [sys.executable, __file__, "--work", arguments.work, "--steps", str(arguments.steps), "--torch"]
        command += [f"--{name}" for name in ["bf16", "captioner"] if getattr(arguments, name)]
        command += ["--dtype", kept_in(arguments)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        return statistics.median(found["seconds"][2:]), found["peak"] / 1024
    seconds = tunesmith_run(arguments.work, arguments.tunesmith, arguments.steps, side == "kept", arguments)
    with open(os.path.join(arguments.work, "run", "metrics.jsonl"), encoding="utf-8") as file:
        peak = max(json.loads(line).get("peak_bytes", 0) for line in file)
    return statistics.median(seconds[2:]), peak / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", required=True)
    parser.add_argument("--tunesmith", default=os.path.join(ROOT, "target/release/tunesmith"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help="products and frozen weights in bfloat16 on both sides")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="what tunesmith keeps frozen weights in; PyTorch then has the same numbers (default: bfloat16 with --bf16, else float32)")
    parser.add_argument("--captioner", action="store_true", help="a connector alone, between SigLIP-base's shape and SmolLM2-135M's")
    parser.add_argument("--offload-embedding", action="store_true", help="tunesmith leaves the table of token embeddings in the model's files")
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    if arguments.torch:
        import torch

        run = torch_captioner if arguments.captioner else torch_run
        seconds = run(arguments.work, arguments.steps, arguments.bf16, getattr(torch, kept_in(arguments)))
        print(json.dumps(dict(seconds=seconds, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)))
        return
    if not os.path.exists(os.path.join(arguments.work, "rows.jsonl")):
        os.makedirs(arguments.work, exist_ok=True)
        (make_captioner if arguments.captioner else make)(arguments.work)
    ratios = {"each": [], "kept": []}
    for number in range(arguments.rounds):
        found = {side: measured(arguments, side) for side in ["torch", "each", "kept"]}
        for side in ratios:
            ratios[side].append(found["torch"][0] / found[side][0])
        names = [("torch", "PyTorch + PEFT"), ("each", "encoder in every step"), ("kept", "features kept")]
        parts = [f"{name} {found[side][0]:.3f} s, {found[side][1]:,.0f} MiB" for side, name in names]
        print(f"round {number + 1}: " + "; ".join(parts), flush=True)
    for side, name in [("each", "first epoch"), ("kept", "later epochs")]:
        print(f"{name}: {statistics.median(ratios[side]):.2f} times PyTorch's speed (from {min(ratios[side]):.2f} to {max(ratios[side]):.2f})")


if __name__ == "__main__":
    main()
