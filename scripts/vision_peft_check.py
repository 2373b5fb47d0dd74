#!/usr/bin/env python3
"""Trains small multimodal models with the tunesmith binary, in several modes, with several parts of encoder and connector. Loads each adapter with
PEFT on the base of Transformers. Shows it the validation rows through the checkpoint's own processor, and compares the loss of the answers with that
of `tunesmith eval`. Takes half a minute per model.

    pip install -r scripts/golden/requirements.txt && cargo build
    python3 scripts/vision_peft_check.py [--binary target/debug/tunesmith] [--models llava,qwen2_vl,…] [--modes dora,whole,…]

Prints a line per model and mode; exits 1 if a loss, also that of the base, differs by more than 5e-5 of itself.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "tests/golden"
LIMIT = 5e-5
# What the processors' files of these models do not say: how many tokens an image has.
PROCESSORS = dict(
    gemma3=dict(image_seq_length=4),
    internvl=dict(image_seq_length=4),
    smolvlm=dict(image_seq_len=4),
    llava=dict(patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    llava_onevision=dict(num_image_tokens=16, vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_2"),
)
MODELS = ["gemma3", "llava", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "internvl", "llava_onevision", "mistral3", "ministral3", "pixtral", "gemma4", "gemma4_31b"]
CONNECTOR = {"freeze_connector": False}
ENCODER = {"vision_target_modules": ["all-linear"]}
MODES = dict(
    dora={"lora": {"use_dora": True}} | CONNECTOR,
    ia3={"mode": "ia3"} | ENCODER,
    oft={"mode": "oft"} | ENCODER | CONNECTOR,
    last={"vision_unfreeze_layers": 1} | CONNECTOR,
    connector={"freeze_language": True} | CONNECTOR,
    whole={"freeze_vision": False} | CONNECTOR,
)
QUESTION = "what is it?"
ROWS = [("rgb.png", "a cat"), ("wide.png", "the sea"), ("tall.png", "a tree by the sea")]


class Model:
    """A golden model with its processor in a folder, and rows to train and to validate on."""

    def __init__(self, binary, folder, name):
        from transformers import AutoProcessor, PreTrainedTokenizerFast

        self.binary, self.folder, self.name, self.dir = binary, folder, name, folder / "model"
        for source in (GOLDEN / "vision" / name / "model", GOLDEN / "picture_chats" / name):
            shutil.copytree(source, self.dir, dirs_exist_ok=True)
        rows = [{"image": str(GOLDEN / "pixels" / image), "question": QUESTION, "answer": answer} for image, answer in ROWS]
        for file, lines in (("train", rows * 6), ("val", rows)):
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        self.rows = rows
        self.processor = AutoProcessor.from_pretrained(self.dir, **PROCESSORS.get(name, {}))
        # Some classes of tokenizers ignore how tokenizer.json splits text; the golden ones split it in their own way.
        plain = PreTrainedTokenizerFast.from_pretrained(self.dir)
        known = self.processor.tokenizer
        plain.chat_template = known.chat_template
        for field in ("image_token", "image_token_id", "video_token", "video_token_id", "boi_token", "eoi_token"):
            if getattr(known, field, None) is not None and getattr(plain, field, None) is None:
                setattr(plain, field, getattr(known, field))
        self.processor.tokenizer = plain

    def run(self, *args):
        done = subprocess.run([self.binary, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise SystemExit(f"{self.name}: {' '.join(args)}\n{done.stderr}")

    def train(self, tuning):
        """The losses of the base and of the tuned model, and the adapter's folder."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        config = dict(
            model=dict(name=str(self.dir), max_seq_len=256),
            data=dict(train_path=str(self.folder / "train.jsonl"), val_path=str(self.folder / "val.jsonl"), use_cache=False),
            tuning=tuning,
            train=dict(output_dir=str(out), batch_size=4, max_steps=4, learning_rate=0.01, save_strategy="no"),
            logging=dict(report=False, tensorboard=False),
            gen=dict(num_samples=0, max_new_tokens=1),
        )
        path = self.folder / "run.yaml"
        path.write_text(json.dumps(config))
        self.run("train", str(path))
        self.run("eval", str(path))
        models = json.loads((out / "eval/metrics.json").read_text())["models"]
        return [models[name]["scores"]["loss"]["value"] for name in ("base", "tuned")], out / "adapter"

    def loss(self, adapter=None):
        """The mean loss of the answers' tokens, as Transformers and PEFT compute it."""
        import torch
        from peft import PeftModel
        from PIL import Image
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(self.dir, dtype=torch.float32, attn_implementation="eager")
        model = (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()
        total, count = 0.0, 0
        for row in self.rows:
            image = Image.open(row["image"]).convert("RGB")
            asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]}]
            answered = asked + [{"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]}]

            def encoded(messages, asks):
                text = self.processor.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False)
                return self.processor(text=[text], images=[[image]], return_tensors="pt", add_special_tokens=False)

            inputs, prompt = encoded(answered, False), encoded(asked, True)["input_ids"][0].tolist()
            ids = inputs["input_ids"][0].tolist()
            start = next((at for at, pair in enumerate(zip(ids, prompt)) if pair[0] != pair[1]), len(prompt))
            # What the template writes after the end of a turn is not trained on.
            while not self.processor.tokenizer.decode(ids[-1:]).strip():
                ids.pop()
            with torch.no_grad():
                logits = model(**inputs).logits[0].double()
            wanted = torch.tensor(ids[start:])
            scores = torch.log_softmax(logits[start - 1 : len(ids) - 1], -1)
            total -= scores.gather(1, wanted[:, None]).sum().item()
            count += len(wanted)
        return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=str(HERE.parent / "target/debug/tunesmith"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    args = parser.parse_args()
    bad = False
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = Model(args.binary, Path(folder), name)
            theirs_of_base = model.loss()
            for mode in args.modes.split(","):
                (base, tuned), adapter = model.train(MODES[mode])
                theirs = model.loss(adapter)
                off = max(abs(base / theirs_of_base - 1), abs(tuned / theirs - 1))
                bad |= off > LIMIT
                print(f"{name:16} {mode:10} base {base:.6f} {theirs_of_base:.6f}   tuned {tuned:.6f} {theirs:.6f}   off by {off:.1e}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
