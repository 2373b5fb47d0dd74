#!/usr/bin/env python3
"""Trains small models that see images with the tunesmith binary, merges them, and loads the folders with load_vision.py. Compares the losses of the
validation rows and greedy answers with tunesmith's own. Then trains an adapter on each folder, and compares again. Takes a minute per model.

    pip install -r scripts/golden/requirements.txt && cargo build
    python3 scripts/load_check.py [--binary target/debug/tunesmith] [--only captions,…]

Prints a line per model; exits 1 if a loss differs by more than 5e-5 or an answer differs.
"""
import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "tests/golden"
LIMIT = 5e-5
IMAGES = ["rgb.png", "wide.png", "tall.png", "grey.png"]
QUESTION = "what is it?"
SIGLIP = dict(encoder="siglip")
NAFLEX = dict(encoder="naflex")
# The encoder is trained too.
TRAINED = dict(trained=True)
WORLD = dict(world=("world_wan", "channel", "mlp"))
# Name: the golden model and that of its tokenizer, whether its rows are chats, its encoders.
MODELS = dict(
    captions=("prefix", "llava", False, SIGLIP),
    captions_mlp=("prefix", "llava", False, SIGLIP | dict(connector="mlp")),
    captions_world=("prefix", "llava", False, SIGLIP | dict(world=("world_kl", "spatial", "mlp_no_final_gelu"))),
    captions_gpt2=("prefix_gpt2", "llava", False, SIGLIP),
    captions_gpt2_world=("prefix_gpt2", "llava", False, SIGLIP | dict(world=("world_kl", "spatial", "mlp_no_final_gelu"))),
    captions_siglip_trained=("prefix", "llava", False, SIGLIP | TRAINED),
    captions_dinov2=("prefix", "llava", False, dict(encoder="dinov2")),
    captions_dinov2_trained=("prefix", "llava", False, dict(encoder="dinov2") | TRAINED),
    captions_dinov2_registers_trained=("prefix_gpt2", "llava", False, dict(encoder="dinov2_registers") | TRAINED),
    across_vit_trained=("across_vit", "llava", False, TRAINED),
    across_dinov2_trained=("across_dinov2", "llava", False, TRAINED),
    gemma3_trained=("gemma3", "gemma3", True, TRAINED),
    qwen3_vl_trained=("qwen3_vl", "qwen3_vl", True, TRAINED),
    chat=("prefix", "llava", True, SIGLIP | dict(image_token="<image>")),
    chat_world=("prefix", "llava", True, SIGLIP | WORLD | dict(image_token="<image>")),
    captions_naflex=("prefix", "llava", False, NAFLEX),
    chat_naflex=("prefix", "llava", True, NAFLEX | dict(image_token="<image>")),
    gemma3_world=("gemma3", "gemma3", True, WORLD),
    gemma3_world_kl=("gemma3", "gemma3", True, dict(world=("world_kl", "spatial", "linear"))),
    qwen2_5_vl_world=("qwen2_5_vl", "qwen2_5_vl", True, WORLD),
    qwen3_vl_world=("qwen3_vl", "qwen3_vl", True, WORLD),
    paligemma_world=("paligemma", "paligemma", True, WORLD),
)


class Runs:
    """Runs of a model in a folder."""

    def __init__(self, binary, folder, name):
        self.binary, self.folder = binary, Path(folder)
        self.of_model, of_chat, self.chats, self.encoders = MODELS[name]
        # Of a decoder that reads images by cross-attention: Transformers has a class for the whole.
        self.across = self.of_model.startswith("across")
        for source in [GOLDEN / "vision" / self.of_model / "model", GOLDEN / "picture_chats" / of_chat]:
            self.copy(source, "model")
        if self.encoders.get("encoder"):
            (self.folder / "model/preprocessor_config.json").unlink()
            self.copy(GOLDEN / "vision" / self.encoders["encoder"] / "model", "encoder")
            settings = dict(image_processor_type="SiglipImageProcessor", size=dict(height=32, width=32))
            if self.encoders["encoder"] == "naflex":
                settings = dict(image_processor_type="Siglip2ImageProcessor", patch_size=8, max_num_patches=16)
            (self.folder / "encoder/preprocessor_config.json").write_text(json.dumps(settings))
        if self.across:
            settings = dict(image_processor_type="ViTImageProcessor", size=dict(height=32, width=32))
            (self.folder / "model/preprocessor_config.json").write_text(json.dumps(settings))
        if of_chat == "gemma3":
            # The rows of an image in this model's config.json.
            (self.folder / "model/processor_config.json").write_text(json.dumps(dict(processor_class="Gemma3Processor", image_seq_length=4)))
        answers = ["a cat", "the sea", "a tree, and a cat"]
        field = lambda text: dict(question=QUESTION, answer=text) if self.chats else dict(caption=text)
        rows = [dict(image=str(GOLDEN / "pixels" / IMAGES[at % 4])) | field(answers[at % 3]) for at in range(12)]
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.rows = rows

    def copy(self, source, name):
        (self.folder / name).mkdir(exist_ok=True)
        for file in source.iterdir():
            (self.folder / name / file.name).write_bytes(file.read_bytes())

    def command(self, *words):
        done = subprocess.run([self.binary, *map(str, words)], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, words))}\n{done.stderr}")
        return done.stdout

    def train(self, name, model, further):
        """A run of three steps; its configuration, and the loss of its rows behind them."""
        vision = dict(backend="torchvision" if importlib.util.find_spec("torchvision") else "pil")
        tuning = dict(lora=dict(r=4, lora_dropout=0.0), freeze_vision=not self.encoders.get("trained", False))
        if further:
            tuning |= dict(freeze_connector=False)
        else:
            if self.encoders.get("encoder"):
                vision |= dict(encoder=str(self.folder / "encoder"), connector=self.encoders.get("connector", "linear"))
                vision |= dict(image_token=self.encoders["image_token"]) if self.chats else {}
            if "world" in self.encoders:
                vae, mode, architecture = self.encoders["world"]
                vision |= dict(world=dict(encoder=str(GOLDEN / "vision" / vae), projection_mode=mode, projection_architecture=architecture, image_size=16))
                tuning |= dict(new_tokens=["<start_of_world>", "<end_of_world>"])
        train = dict(output_dir=str(self.folder / name), max_steps=3, batch_size=2, learning_rate=0.01, save_strategy="no", eval_strategy="steps", eval_steps=3)
        rows = str(self.folder / "rows.jsonl")
        data = dict(train_path=rows, val_path=rows, cache_dir=str(self.folder / "cache"))
        data |= dict(chat_template="paligemma") if self.of_model == "paligemma" else {}
        config = self.folder / f"{name}.yaml"
        # JSON is YAML too.
        config.write_text(json.dumps(dict(model=dict(name=str(model), max_seq_len=128), vision=vision, tuning=tuning, train=train, data=data, gen=dict(num_samples=0))))
        self.command("train", config)
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        return config, [line["eval_loss"] for line in lines if "eval_loss" in line][-1]

    def difference(self, config, loss, *loaded):
        """How far tunesmith's loss and answers are from those of a loaded folder."""
        import torch
        import torch.nn.functional as F
        from load_vision import answer, inputs, load
        from PIL import Image

        if self.across:
            return self.difference_across(config, loss, *loaded)
        seeing = load(*loaded)
        total, count = 0.0, 0
        for row in self.rows:
            image = Image.open(row["image"]).convert("RGB")
            with torch.no_grad():
                prompt = inputs(seeing, [image], row.get("question"))["input_ids"].shape[1]
                found = inputs(seeing, [image], row.get("question"), row.get("answer", row.get("caption")))
                logits = seeing.model(**found).logits[0, prompt - 1 : -1].double()
            labels = found["input_ids"][0, prompt:]
            if self.chats:
                # Behind the token that ends an answer, templates write what is not learned.
                end = int((labels == seeing.tokenizer.eos_token_id).nonzero()[0]) + 1
                logits, labels = logits[:end], labels[:end]
            total += F.cross_entropy(logits, labels, reduction="sum").item()
            count += len(labels)
        same = []
        for name in IMAGES:
            file = GOLDEN / "pixels" / name
            asked = ["--prompt", QUESTION] if self.chats else []
            own = self.command("infer", config, "--image", file, *asked, "gen.max_new_tokens=20")
            same.append(own.strip() == answer(seeing, file, QUESTION if self.chats else None, 20).strip())
        return abs(total / count - loss), sum(same)


    def difference_across(self, config, loss, folder, adapter=None):
        """The same of a `vision-encoder-decoder` checkpoint, whose folder Transformers loads, without a tensor too few or too many."""
        import torch
        import torch.nn.functional as F
        from PIL import Image
        from transformers import AutoImageProcessor, AutoTokenizer, VisionEncoderDecoderModel

        model, about = VisionEncoderDecoderModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(about.values()), about
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter)
        model.eval()
        tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
        start, end = model.config.decoder_start_token_id, tokenizer.eos_token_id
        pixels = lambda file: processor(Image.open(file).convert("RGB"), return_tensors="pt")["pixel_values"]
        total, count, same = 0.0, 0, []
        with torch.no_grad():
            for row in self.rows:
                ids = tokenizer(row["caption"], add_special_tokens=False).input_ids + [end]
                logits = model(pixel_values=pixels(row["image"]), decoder_input_ids=torch.tensor([[start, *ids[:-1]]])).logits[0].double()
                total += F.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()
                count += len(ids)
            for name in IMAGES:
                own = self.command("infer", config, "--image", GOLDEN / "pixels" / name, "gen.max_new_tokens=20")
                ids = model.generate(pixel_values=pixels(GOLDEN / "pixels" / name), max_new_tokens=20, do_sample=False, eos_token_id=end)[0]
                same.append(own.strip() == tokenizer.decode(ids[1:], skip_special_tokens=True).strip())
        return abs(total / count - loss), sum(same)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(HERE.parent / "target/debug/tunesmith"))
    parser.add_argument("--only", default=",".join(MODELS))
    args = parser.parse_args()
    bad = False
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(args.binary, folder, name)
            config, loss = runs.train("first", runs.folder / "model", False)
            merged = runs.folder / "merged"
            runs.command("merge", config, "--output", merged, "--dtype", "float32")
            results = [runs.difference(config, loss, merged)]
            config, loss = runs.train("second", merged, True)
            results.append(runs.difference(config, loss, merged, runs.folder / "second/adapter"))
        bad |= any(difference > LIMIT or same < len(IMAGES) for difference, same in results)
        show = lambda result: f"loss {result[0]:.1e}, {result[1]} of {len(IMAGES)} answers"
        print(f"{name:18} merged: {show(results[0])}   adapter: {show(results[1])}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
