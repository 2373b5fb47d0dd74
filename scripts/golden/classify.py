"""The goldens of classification heads: Transformers' `...ForSequenceClassification` with PEFT's SEQ_CLS adapters on the models of
`tests/golden/a`, and scikit-learn's metrics.

    python scripts/golden/classify.py --models tests/golden/a --out tests/golden/classify

For each model: a random adapter with a random head; rows of ids with a label or a number; the scores of the first rows, their weighted loss
and its gradients; the curve of ten AdamW steps. The loss is that of the whole batch, `CrossEntropyLoss(weight)`, which divides by the sum of
the rows' weights.
"""
import argparse
import json
import math
import os

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from sklearn import metrics

from common import adapter_state, dump, gradients, save_adapter, save_tensors

ROWS, STEPS, BATCH, LABELS = 16, 10, 8, 4
WEIGHTS = [0.5, 1.0, 2.0, 4.0]


def build(folder, labels, seed):
    """The model with a random head and a random adapter on every linear layer."""
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=labels, problem_type="regression" if labels == 1 else "single_label_classification")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="SEQ_CLS")
    model = peft.get_peft_model(model, lora)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if not parameter.requires_grad:
                continue
            noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), dtype=np.float32))
            scale = 0.1 if "lora_B" in name else 1 / math.sqrt(parameter.shape[1])
            parameter.copy_(noise * scale)
    return model.train()


def make_rows(vocabulary, labels, seed):
    """Rows whose label follows from how many of their tokens are in the upper half; the rarer the higher."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(ROWS):
        ids = rng.integers(3, vocabulary, int(rng.integers(3, 25))).tolist()
        share = sum(token > vocabulary // 2 for token in ids) / len(ids)
        label = min(int(share * share * 2 * labels), labels - 1) if labels > 1 else round(4 * share - 2, 3)
        rows.append(dict(ids=ids, label=label))
    return rows


def scores(model, rows):
    longest = max(len(row["ids"]) for row in rows)
    ids = torch.tensor([row["ids"] + [0] * (longest - len(row["ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["ids"]) + [0] * (longest - len(row["ids"])) for row in rows])
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def loss_of(found, rows):
    if found.shape[1] == 1:
        return F.mse_loss(found[:, 0], torch.tensor([row["label"] for row in rows], dtype=torch.float32))
    return F.cross_entropy(found, torch.tensor([row["label"] for row in rows]), weight=torch.tensor(WEIGHTS))


def case(folder, out, labels, seed):
    os.makedirs(out, exist_ok=True)
    model = build(folder, labels, seed)
    rows = make_rows(model.config.vocab_size, labels, seed + 1)
    save_adapter(model, f"{out}/adapter")
    found = scores(model, rows[:BATCH])
    loss = loss_of(found, rows[:BATCH])
    loss.backward()
    of_tensors = {name.replace(".modules_to_save", ""): value for name, value in gradients(model).items()}
    tensors = {"scores": found.detach()} | {f"grad.{name}": value for name, value in of_tensors.items()}
    save_tensors(tensors, f"{out}/forward.safetensors")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    optimizer.zero_grad()
    trace = []
    for step in range(STEPS):
        batch = [rows[(step * BATCH + at) % ROWS] for at in range(BATCH)]
        loss_of_step = loss_of(scores(model, batch), batch)
        loss_of_step.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        trace.append(dict(loss=loss_of_step.item(), grad_norm=norm))
    head = {name: value for name, value in adapter_state(model).items() if "score" in name}
    save_tensors(head, f"{out}/head_after.safetensors")
    dump(dict(rows=rows, weights=WEIGHTS if labels > 1 else None, loss=loss.item(), trace=trace), f"{out}/golden.json")


def measures(labels, rows, seed, absent=None, ties=False):
    """scikit-learn's metrics of random scores; `absent` is a label that no row has and no prediction is."""
    rng = np.random.default_rng(seed)
    given = rng.normal(size=(rows, labels)).astype(np.float32)
    if ties:
        given = np.round(given)
    real = np.array([rng.choice(labels, p=np.arange(1, labels + 1) / (labels * (labels + 1) / 2)) for _ in range(rows)])
    given[np.arange(rows), real] += np.float32(1.0)
    if absent is not None:
        real[real == absent] = (absent + 1) % labels
        given[:, absent] = -10
    found = given.argmax(1)
    shares = np.exp(given.astype(np.float64) - given.max(1, keepdims=True).astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    expected = dict(
        accuracy=metrics.accuracy_score(real, found),
        f1_macro=metrics.f1_score(real, found, average="macro", zero_division=0),
        f1_micro=metrics.f1_score(real, found, average="micro", zero_division=0),
        f1_weighted=metrics.f1_score(real, found, average="weighted", zero_division=0),
        precision_macro=metrics.precision_score(real, found, average="macro", zero_division=0),
        recall_macro=metrics.recall_score(real, found, average="macro", zero_division=0),
        loss=metrics.log_loss(real, shares, labels=list(range(labels))),
    )
    if labels == 2:
        expected["roc_auc"] = metrics.roc_auc_score(real, shares[:, 1])
    elif absent is None:
        expected["roc_auc_ovr"] = metrics.roc_auc_score(real, shares, multi_class="ovr", average="macro")
    for name, function in (("precision", metrics.precision_score), ("recall", metrics.recall_score), ("f1", metrics.f1_score)):
        each = function(real, found, average=None, labels=list(range(labels)), zero_division=0)
        expected |= {f"{name}.{label}": value for label, value in enumerate(each.tolist())}
    return dict(
        labels=labels, scores=given.tolist(), targets=real.tolist(), expected=expected,
        confusion=metrics.confusion_matrix(real, found, labels=list(range(labels))).tolist(),
    )


def of_numbers(rows, seed):
    rng = np.random.default_rng(seed)
    real = rng.normal(size=rows).astype(np.float32)
    found = (0.7 * real + 0.5 * rng.normal(size=rows) + 0.2).astype(np.float32)
    one, other = real.astype(np.float64), found.astype(np.float64)
    expected = dict(
        mse=metrics.mean_squared_error(one, other), mae=metrics.mean_absolute_error(one, other),
        r2=metrics.r2_score(one, other), pearson=float(np.corrcoef(one, other)[0, 1]),
    )
    return dict(labels=1, scores=[[value] for value in found.tolist()], targets=real.tolist(), expected=expected)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for place, family in enumerate(("llama", "gemma2", "gpt2")):
        case(f"{arguments.models}/{family}/model", f"{arguments.out}/{family}", LABELS, 7000 + 10 * place)
    case(f"{arguments.models}/llama/model", f"{arguments.out}/regression", 1, 7100)
    cases = [measures(2, 60, 1), measures(2, 40, 2, ties=True), measures(4, 80, 3), measures(5, 50, 4, absent=2), of_numbers(50, 5)]
    dump(cases, f"{arguments.out}/measures.json")


if __name__ == "__main__":
    main()
