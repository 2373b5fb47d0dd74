"""Compares the classification example with the same run in PyTorch, Transformers and PEFT, and loads what tunesmith wrote with them.

    just classify-check            (python scripts/classify_check.py --tunesmith target/release/tunesmith)

Both sides start from one adapter and one head, drawn once by PEFT, and see the rows in the order of the file. The check compares the loss
of each step and the F1 of the validation rows, with `class_weights` none and balanced. Balanced must be better. Then it compares the
scores of the exported model and of the adapter, in Transformers and PEFT, with those of `tunesmith infer`.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from sklearn.metrics import f1_score
from sklearn.utils.class_weight import compute_class_weight

BASE, DATA = "examples/quickstart/model", "examples/classification/data"
LABELS = ["booking", "change", "cancellation", "complaint"]
EPOCHS, BATCH, RATE, WARMUP = 2, 16, 2e-3, 6


def read(name):
    with open(f"{DATA}/{name}.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def base():
    names = dict(enumerate(LABELS))
    config = transformers.AutoConfig.from_pretrained(BASE, id2label=names, label2id={name: at for at, name in names.items()})
    return transformers.AutoModelForSequenceClassification.from_pretrained(BASE, config=config, dtype=torch.float32, attn_implementation="eager")


def start(folder):
    torch.manual_seed(7)
    model = base()
    torch.nn.init.normal_(model.score.weight, std=model.config.initializer_range)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="SEQ_CLS")
    peft.get_peft_model(model, lora).save_pretrained(folder)


def scores(model, tokenizer, texts):
    found = []
    with torch.no_grad():
        for at in range(0, len(texts), 32):
            found.append(outputs(model, tokenizer, texts[at : at + 32]))
    return torch.cat(found)


def outputs(model, tokenizer, texts):
    ids = [tokenizer(text)["input_ids"] for text in texts]
    longest, pad = max(map(len, ids)), model.config.pad_token_id
    padded = torch.tensor([row + [pad] * (longest - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    return model(input_ids=padded, attention_mask=mask, use_cache=False).logits


def train(folder, weights, tokenizer):
    rows, held_out = read("train"), read("val")
    model = peft.PeftModel.from_pretrained(base(), folder, is_trainable=True).train()
    classes = np.array([LABELS.index(row["label"]) for row in rows])
    weight = None
    if weights == "balanced":
        weight = torch.tensor(compute_class_weight("balanced", classes=np.arange(len(LABELS)), y=classes), dtype=torch.float32)
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    steps = EPOCHS * -(-len(rows) // BATCH)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP, steps)
    losses = []
    for step in range(steps):
        at = step % (steps // EPOCHS) * BATCH
        batch = rows[at : at + BATCH]
        labels = torch.tensor([LABELS.index(row["label"]) for row in batch])
        loss = F.cross_entropy(outputs(model, tokenizer, [row["text"] for row in batch]), labels, weight=weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = scores(model.eval(), tokenizer, [row["text"] for row in held_out]).argmax(-1).tolist()
    real = [LABELS.index(row["label"]) for row in held_out]
    return losses, f1_score(real, found, average="macro")


def tunesmith(binary, *words):
    done = subprocess.run([binary, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def ours(binary, folder, weights, out):
    words = [
        f"tuning.adapter={folder}", "data.shuffle=false", f"train.class_weights={weights}", f"train.output_dir={out}",
        "train.load_best_model_at_end=false", "train.eval_strategy=epoch", "train.save_strategy=no", "data.use_cache=false",
    ]
    # The adapter's own rank holds.
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        text = open("examples/classification/classification.yaml", encoding="utf-8").read()
        file.write(text[: text.index("  lora:\n")] + text[text.index("\ntrain:\n") :])
    tunesmith(binary, "train", file.name, *words, "--overwrite")
    os.remove(file.name)
    with open(f"{out}/metrics.jsonl", encoding="utf-8") as lines:
        lines = [json.loads(line) for line in lines]
    losses = [line["loss"] for line in lines if "loss" in line]
    return losses, [line for line in lines if "eval_scores" in line][-1]["eval_scores"]["f1_macro"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tunesmith", default="target/release/tunesmith")
    binary = parser.parse_args().tunesmith
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(BASE)
    wrong, measured = [], {}
    with tempfile.TemporaryDirectory() as work:
        start(f"{work}/start")
        for weights in ("none", "balanced"):
            one, f1 = train(f"{work}/start", weights, tokenizer)
            other, our_f1 = ours(binary, f"{work}/start", weights, f"{work}/{weights}")
            apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
            measured[weights] = our_f1
            print(f"class_weights {weights:9} {len(one)} steps, losses {one[0]:.4f} to {one[-1]:.4f}: at most {apart:.2e} apart; macro F1 {f1:.4f} in PyTorch, {our_f1:.4f} here")
            if apart > 2e-4 or abs(f1 - our_f1) > 1e-9:
                wrong.append(f"class_weights: {weights}")
        print(f"balanced beats none by {measured['balanced'] - measured['none']:+.4f} macro F1")
        if measured["balanced"] <= measured["none"]:
            wrong.append("balanced is not better")
        texts = [row["text"] for row in read("test")[:40]]
        with open(f"{work}/texts.jsonl", "w", encoding="utf-8") as out:
            out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        adapter = f"{work}/balanced/adapter"
        tunesmith(binary, "infer", "--model", BASE, "--adapter", adapter, "--in", f"{work}/texts.jsonl", "--out", f"{work}/answers.jsonl")
        with open(f"{work}/answers.jsonl", encoding="utf-8") as lines:
            answers = torch.tensor([[json.loads(line)["probabilities"][label] for label in LABELS] for line in lines])
        tunesmith(binary, "export", "--base", BASE, "--adapter", adapter, "--hf", "--output", f"{work}/hf")
        whole = transformers.AutoModelForSequenceClassification.from_pretrained(f"{work}/hf", dtype=torch.float32)
        config = transformers.AutoConfig.from_pretrained(adapter)
        on_base = transformers.AutoModelForSequenceClassification.from_pretrained(BASE, config=config, dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(on_base, adapter)
        for name, model in (("exported folder in Transformers", whole), ("adapter in PEFT", adapted)):
            names = [model.config.id2label[at] for at in range(len(LABELS))]
            apart = float((scores(model.eval(), tokenizer, texts).softmax(-1) - answers).abs().max())
            print(f"{name}: probabilities at most {apart:.2e} from `tunesmith infer`")
            if apart > 1e-5 or names != LABELS:
                wrong.append(name)
    sys.exit("; ".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
