#!/usr/bin/env python3
"""Makes tests/golden/vision: image encoders, and models that see pictures.

    python3 scripts/golden/vision.py --out tests/golden/vision

Every model is tiny and random: no weight keeps its trivial start (norms of one, biases and layer scales of zero or one). All runs are
eager, in float32, on one thread. Pictures are normal numbers: how files become numbers is another golden's.

ENCODER/model is an encoder alone; ENCODER/features.safetensors has pictures, outputs, and the gradients of `sum(output * seed)`.
MODEL has a whole model: its rows, logits, gradients of the mean loss, twenty AdamW steps, and greedy answers. In `prefix`, `prefix_mlp`,
and `prefix_gpt2` the encoder and the decoder are two checkpoints, and the connector is `init.safetensors`'. `llava/text_steps.json` has
twenty more steps from the same start, of which some have rows without pictures alone: their indices in `run.json`, and the losses.
"""
import argparse
import copy
import json
import os
import shutil

os.environ |= {"HF_HUB_OFFLINE": "1", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

IGNORE = -100
RANK, ALPHA = 4, 8
STEPS, WARMUP, MICRO_BATCH, GRAD_ACCUM = 20, 3, 2, 2
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01
VOCABULARY, IMAGE = 96, 95
PICTURES = 6
# Sides in pixels: four patches.
SIDE, PATCH = 32, 8
TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=SIDE, patch_size=PATCH)
TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)

GPT2 = dict(
    vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1,
    eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
)

# Name: the class of the configuration, that of the model, further arguments, the side of the pictures in pixels.
ENCODERS = {
    "vit": ("ViTConfig", "ViTModel", {}, SIDE),
    "clip": ("CLIPVisionConfig", "CLIPVisionModel", {}, SIDE),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", {}, SIDE),
    "dinov2": ("Dinov2Config", "Dinov2Model", dict(mlp_ratio=2), SIDE),
    "dinov2_larger": ("Dinov2Config", "Dinov2Model", dict(mlp_ratio=2), 48),
    "dinov2_registers": ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", dict(mlp_ratio=2, num_register_tokens=3), SIDE),
    "dinov2_registers_larger": ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", dict(mlp_ratio=2, num_register_tokens=3), 48),
    "dinov2_registers_smaller": ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", dict(mlp_ratio=2, num_register_tokens=3), 24),
}
LANGUAGE = r".*(?:language_model|text_model)\.layers\.\d+\..*\.(?:q|k|v|o|gate|up|down)_proj"


def scramble(model, seed):
    """Gives every parameter random numbers that bfloat16 holds exactly."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), dtype=np.float32))
            gemma = "gemma" in type(model).__name__.lower() and ("norm" in name and "vision" not in name)
            # Gemma 4 has norms of their weights alone.
            gemma &= "Gemma4" not in type(model).__name__
            # Qwen3.5 has norms of one more than their weight too, outside of its linear attention.
            gemma |= "Qwen3_5" in type(model).__name__ and not any(part in name for part in ("visual", "linear_attn"))
            if parameter.dim() == 1 and ("norm" in name or "lambda" in name or ".ln_" in name and "visual" not in name) and name.endswith(("weight", "lambda1")):
                value = (0.0 if gemma else 1.0) + 0.2 * noise
            elif name.endswith(("router.scale", "per_expert_scale")):
                value = 1.0 + 0.2 * noise
            elif name.endswith("bias"):
                value = 0.2 * noise
            elif "embed" in name and "patch" not in name and "projection" not in name or name.endswith("position_embedding_table") or name.endswith(("wte.weight", "wpe.weight")):
                value = 0.5 * noise
            else:
                value = noise * (1.2 / np.sqrt(max(1, int(np.prod(parameter.shape[1:])))))
            parameter.copy_(value.to(torch.bfloat16).to(torch.float32))
    return model.train()


def normals(shape, seed):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).to(torch.bfloat16).to(torch.float32)


def save(tensors, path):
    save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, path)


def dump(value, path):
    with open(path, "w", encoding="utf-8") as out:
        out.write(json.dumps(value, indent=1))


def store(model, folder):
    """The files of a model."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)


def make_encoder(name, out, seed):
    kind, cls, further, side = ENCODERS[name]
    config = getattr(transformers, kind)(**{**TOWER, **further}, attn_implementation="eager")
    if kind.startswith("Dinov2"):
        config.intermediate_size = None
        del config.intermediate_size
    model = scramble(getattr(transformers, cls)(config), seed)
    folder = f"{out}/{name}"
    store(model, f"{folder}/model")
    pixels = normals((2, 3, side, side), seed + 1)
    more = dict(interpolate_pos_encoding=True) if side != SIDE and not kind.startswith("Dinov2") else {}
    output = model(pixel_values=pixels, output_hidden_states=True, **more)
    last, second = output.last_hidden_state, output.hidden_states[-2]
    weights = normals(tuple(last.shape), seed + 2)
    (last * weights).sum().backward()
    tensors = {f"grad.{key}": value.grad for key, value in model.named_parameters() if value.grad is not None}
    save(dict(pixel_values=pixels, last=last, second=second, seed=weights, **tensors), f"{folder}/features.safetensors")


class Prefix(torch.nn.Module):
    """Rows of pictures before a text."""

    def __init__(self, encoder, projection, decoder):
        super().__init__()
        self.encoder, self.projection, self.decoder = encoder, projection, decoder

    def forward(self, ids, mask, pixels):
        rows = self.projection(self.encoder(pixel_values=pixels).last_hidden_state)
        texts = self.decoder.get_input_embeddings()(ids)
        mask = torch.cat([torch.ones(rows.shape[:2], dtype=mask.dtype), mask], 1)
        logits = self.decoder(inputs_embeds=torch.cat([rows, texts], 1), attention_mask=mask, use_cache=False).logits
        return logits[:, rows.shape[1] - 1 : -1]


def lora(model, targets, seed):
    """A LoRA adapter whose A and B are random and not zero."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=targets, bias="none"))
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), dtype=np.float32))
                parameter.copy_(noise / np.sqrt(parameter.shape[1]) if "lora_A" in name else noise * 0.1)
    return model


def our_name(name):
    """The name of a trained tensor in the engine: the decoder's as in a plain language model, others as Transformers 5 has them."""
    name = name.replace("base_model.model.", "").replace(".default.weight", ".weight").replace(".base_layer.", ".")
    if name.startswith("decoder."):
        return name.removeprefix("decoder.").replace("transformer.h.", "model.layers.")
    if name.startswith("encoder."):
        return "model.vision_tower." + name.removeprefix("encoder.")
    if name.startswith("projection."):
        return "model.multi_modal_projector." + name.removeprefix("projection.")
    return name.replace("model.language_model.", "model.").replace("model.text_model.", "model.")


def prefix_model(out, name, seed, hidden=None):
    tower = scramble(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TOWER, vision_use_head=False, attn_implementation="eager")), seed)
    if name == "prefix_gpt2":
        targets = ["c_attn", "c_proj"]
        text = transformers.GPT2LMHeadModel._from_config(transformers.GPT2Config(**GPT2), attn_implementation="eager")
    else:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        text = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**TEXT), attn_implementation="eager")
    text = scramble(text, seed + 1)
    store(tower, f"{out}/{name}/encoder")
    store(text, f"{out}/{name}/model")
    if hidden is None:
        projection = torch.nn.ModuleDict(dict(linear=torch.nn.Linear(32, 32)))
        projection.forward = lambda rows: projection["linear"](rows)
    else:
        projection = torch.nn.ModuleDict(dict(linear_1=torch.nn.Linear(32, hidden), linear_2=torch.nn.Linear(hidden, 32)))
        projection.forward = lambda rows: projection["linear_2"](F.gelu(projection["linear_1"](rows)))
    scramble(projection, seed + 2)
    decoder = lora(text, targets, seed + 3)
    model = Prefix(tower, projection, decoder)
    for part in (tower, projection):
        part.requires_grad_(True)
    return model, lambda ids, mask, pixels: model(ids, mask, pixels), dict(prefix=True)


def composite(out, name, seed):
    towers = dict(llava="clip_vision_model", gemma3="siglip_vision_model", smolvlm="smolvlm_vision", idefics3="idefics3_vision")
    vision = dict(model_type=towers[name], **TOWER)
    if name == "llava":
        config = transformers.LlavaConfig(text_config=dict(model_type="llama", **TEXT), vision_config=vision, image_token_index=IMAGE)
    elif name == "gemma3":
        text = dict(model_type="gemma3_text", **TEXT | dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=8, num_hidden_layers=3))
        text |= dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], tie_word_embeddings=True)
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=94, eoi_token_index=93)
    else:
        kind = transformers.SmolVLMConfig if name == "smolvlm" else transformers.Idefics3Config
        config = kind(text_config=dict(model_type="llama", **TEXT), vision_config=vision, image_token_id=IMAGE, scale_factor=2, pad_token_id=0)
    cls = getattr(transformers, type(config).__name__.replace("Config", "ForConditionalGeneration"))
    model = scramble(cls._from_config(config, attn_implementation="eager"), seed)
    store(model, f"{out}/{name}/model")
    model = lora(model, LANGUAGE, seed + 3)
    for key, parameter in model.named_parameters():
        if any(part in key for part in ("vision", "projector", "connector")):
            parameter.requires_grad_(True)
    kind = config.model_type

    def forward(ids, mask, pixels):
        more = dict(token_type_ids=(ids == IMAGE).long()) if kind == "gemma3" else {}
        if pixels is not None and kind in ("smolvlm", "idefics3"):
            # A row's pictures beside each other; one of zeros is none.
            counts = (ids == IMAGE).sum(1) // 4
            per_row = torch.split(pixels, counts.tolist())
            most = int(counts.max())
            pixels = torch.stack([F.pad(own, (0, 0, 0, 0, 0, 0, 0, most - len(own))) for own in per_row])
        if pixels is not None:
            more |= dict(pixel_values=pixels)
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits

    return model, forward, dict(prefix=False, rows=dict(llava=16, gemma3=4, smolvlm=4, idefics3=4)[name])


def make_rows(count, settings, seed):
    """Rows of a small Markov chain; of composite models with none, one or two pictures among the text."""
    rng = np.random.default_rng(seed)
    states = rng.choice(np.arange(3, 90), 24, replace=False)
    successors = rng.integers(0, 24, (24, 3))
    rows = []
    for number in range(count):
        state, length = int(rng.integers(24)), int(rng.integers(5, 12))

        def walk(length):
            nonlocal state
            ids = []
            for _ in range(length):
                ids.append(int(states[state]))
                state = int(successors[state][rng.integers(3)])
            return ids

        if settings["prefix"]:
            ids = walk(length) + [2]
            rows.append(dict(input_ids=ids, labels=ids, images=[int(rng.integers(PICTURES))]))
            continue
        images = [int(rng.integers(PICTURES)) for _ in range((1, 2, 0, 1)[number % 4])]
        ids = [1]
        if "world" in settings:
            begin, end = settings["world"]["tokens"]
            ids += ([begin] * (1 + settings["world"]["rows"]) + [end]) * len(images)
        for image in images:
            rows_of = settings["rows"] if isinstance(settings["rows"], int) else settings["rows"][image]
            if len(images) > 1:
                rows_of = settings.get("rows_among_others", rows_of)
            ids += walk(int(rng.integers(1, 4))) + [IMAGE] * rows_of
        question = len(ids) + 2
        ids += walk(length + 2) + [2]
        labels = [IGNORE if at < question or token == IMAGE else token for at, token in enumerate(ids)]
        rows.append(dict(input_ids=ids, labels=labels, images=images))
    return rows


def collate(rows, pictures):
    longest = max(len(row["input_ids"]) for row in rows)
    pad = lambda values, filler: values + [filler] * (longest - len(values))
    images = [index for row in rows for index in row["images"]]
    return (
        torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
        torch.tensor([pad(row["labels"], IGNORE) for row in rows]),
        pictures[images] if images else None,
    )


def nll(settings, logits, labels, reduction):
    # In prefix mode the last picture's row predicts the first token: logits already begin there.
    logits, labels = (logits, labels) if settings["prefix"] else (logits[:, :-1], labels[:, 1:])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORE, reduction=reduction)


def count(settings, labels):
    return int(((labels if settings["prefix"] else labels[:, 1:]) != IGNORE).sum())


def shown(settings, labels):
    """What a model whose mask depends on where an answer begins is told of it."""
    return [labels] if settings.get("needs_labels") else []


def train(model, forward, settings, rows, pictures):
    """Twenty steps; a step's loss is the sum over its label tokens divided by their number."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    trace, at = [], 0
    for _ in range(STEPS):
        batches = [collate(rows[at + part * MICRO_BATCH : at + (part + 1) * MICRO_BATCH], pictures) for part in range(GRAD_ACCUM)]
        at += MICRO_BATCH * GRAD_ACCUM
        tokens, total = sum(count(settings, labels) for _, _, labels, _ in batches), 0.0
        for ids, mask, labels, pixels in batches:
            loss = nll(settings, forward(ids, mask, pixels, *shown(settings, labels)), labels, "sum") / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
        trace.append(dict(lr=schedule.get_last_lr()[0], loss=total, grad_norm=norm, label_tokens=tokens))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return trace


def answer(forward, settings, row, pictures, tokens=10):
    """Greedy tokens after a row's prompt: all up to its first label."""
    first = 0 if settings["prefix"] else next(at for at, label in enumerate(row["labels"]) if label != IGNORE)
    # In prefix mode a text must not be empty here: the token that is asked for first is predicted by a picture's row.
    ids, answer = list(row["input_ids"][:first]), []
    pixels = pictures[row["images"]] if row["images"] else None
    for _ in range(tokens):
        padded = ids + [0] if settings["prefix"] else ids
        with torch.no_grad():
            logits = forward(torch.tensor([padded]), torch.ones(1, len(padded), dtype=torch.long), pixels, *shown(settings, first))
        answer.append(int(logits[0, len(ids) if settings["prefix"] else -1].argmax()))
        ids.append(answer[-1])
    return dict(prompt=row["input_ids"][:first], images=row["images"], answer=answer)


def make_model(name, out, seed):
    plain = lambda: prefix_model(out, name, seed)
    makers = dict(prefix=plain, prefix_mlp=lambda: prefix_model(out, name, seed, 40), prefix_gpt2=plain)
    made = makers.get(name, lambda: composite(out, name, seed))()
    pictures = normals((PICTURES, 3, SIDE, SIDE), seed + 4)
    start = copy.deepcopy(made[0].state_dict())
    write_model(f"{out}/{name}", made, pictures, dict(pixel_values=pictures), seed)
    if name == "llava":
        made[0].load_state_dict(start)
        write_text_steps(f"{out}/{name}/text_steps.json", made, pictures, seed)


def write_text_steps(path, made, pictures, seed):
    """Steps of which every third, and two in a row, have no picture: then parameters of encoder and connector have no gradient."""
    model, forward, settings = made
    rows = make_rows(4 + STEPS * MICRO_BATCH * GRAD_ACCUM, settings, seed + 5)
    any_row, of_text = iter(range(4, len(rows))), [at for at, row in enumerate(rows) if not row["images"]]
    order = []
    for step in range(STEPS):
        size = MICRO_BATCH * GRAD_ACCUM
        text = step % 3 == 2 or step == 9
        order.append([of_text[(step * size + part) % len(of_text)] if text else next(any_row) for part in range(size)])
    model.zero_grad(set_to_none=True)
    trace = train(model, forward, settings, [rows[at] for step in order for at in step], pictures)
    dump(dict(rows=order, steps=trace), path)


def doubled(pictures):
    return pictures.double() if torch.is_tensor(pictures) else type(pictures)(picture.double() for picture in pictures)


def write_model(folder, made, pictures, stored, seed, drifts=False):
    """What a model computes of its rows. `stored` are the pictures' numbers as tensors. With `drifts`, each step says how far single
    precision is from double precision: where that is far, another order of sums is too."""
    model, forward, settings = made
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    rows = make_rows(4 + STEPS * MICRO_BATCH * GRAD_ACCUM, settings, seed + 5)
    own = {key: parameter for key, parameter in trained.items() if "lora_" in key or key.startswith("projection.")}
    save({our_name(key): parameter for key, parameter in own.items()}, f"{folder}/init.safetensors")
    ids, mask, labels, pixels = collate(rows[:4], pictures)
    logits = forward(ids, mask, pixels, *shown(settings, labels))
    loss = nll(settings, logits, labels, "mean")
    loss.backward()
    grads = {our_name(key): parameter.grad for key, parameter in trained.items() if parameter.grad is not None}
    save(grads, f"{folder}/grads.safetensors")
    kept = [(row, at) for row in range(4) for at in range(len(rows[row]["input_ids"])) if at % 3 == row % 3]
    chosen = torch.stack([logits[row, at] for row, at in kept])
    losses = nll(settings, logits, labels, "none")[(labels if settings["prefix"] else labels[:, 1:]).reshape(-1) != IGNORE]
    save(dict(**stored, logits=chosen, losses=losses), f"{folder}/forward.safetensors")
    answers = [answer(forward, settings, row, pictures) for row in rows[:3]]
    model.zero_grad(set_to_none=True)
    if drifts:
        start = copy.deepcopy(model.state_dict())
        precise = train(model.double(), forward, settings, rows[4:], doubled(pictures))
        model.float().load_state_dict(start)
        model.zero_grad(set_to_none=True)
    trace = train(model, forward, settings, rows[4:], pictures)
    for step, exact in zip(trace, precise if drifts else []):
        step["drift"] = abs(step["grad_norm"] / exact["grad_norm"] - 1)
    missing = sorted(our_name(key) for key, parameter in trained.items() if our_name(key) not in grads)
    dump(dict(**settings, image_token=IMAGE, rows_of_logits=kept, loss=loss.item(), untrained=missing, data=rows, answers=answers, steps=trace), f"{folder}/run.json")


def arguments_of_command():
    """Where to write, and the one model that is asked for; PyTorch is given one thread."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only")
    torch.set_num_threads(1)
    return parser.parse_args()


def main():
    arguments = arguments_of_command()
    os.makedirs(arguments.out, exist_ok=True)
    # The place of a name is its seed, so that new ones come last.
    last = ["dinov2_registers_larger", "dinov2_registers_smaller"]
    names = [*(name for name in ENCODERS if name not in last), "prefix", "prefix_mlp", "llava", "smolvlm", "gemma3", "prefix_gpt2", *last, "idefics3"]
    for number, name in enumerate(names):
        if arguments.only in (None, name):
            (make_encoder if name in ENCODERS else make_model)(name, arguments.out, 7000 + 20 * number)
            print(name)


if __name__ == "__main__":
    main()
