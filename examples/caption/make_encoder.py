#!/usr/bin/env python3
"""Makes the example's image encoder, a SigLIP of 0.14 million weights. Needs Python alone.

    python3 make_encoder.py blank FOLDER             # a random one
    python3 make_encoder.py take ADAPTER FOLDER      # the encoder that a run has trained, as a folder of its own
"""

import json
import math
import random
import struct
import sys
from pathlib import Path

HIDDEN, LAYERS, HEADS, MIDDLE, SIDE, PATCH = 64, 3, 4, 160, 48, 8
CONFIG = {
    "architectures": ["SiglipVisionModel"], "model_type": "siglip_vision_model", "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_channels": 3,
    "image_size": SIDE, "patch_size": PATCH, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
    "attention_dropout": 0.0,
}
PROCESSOR = {
    "image_processor_type": "SiglipImageProcessor", "size": {"height": SIDE, "width": SIDE}, "resample": 3,
    "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}


def shapes():
    yield "embeddings.patch_embedding.weight", [HIDDEN, 3, PATCH, PATCH]
    yield "embeddings.patch_embedding.bias", [HIDDEN]
    yield "embeddings.position_embedding.weight", [(SIDE // PATCH) ** 2, HIDDEN]
    for layer in range(LAYERS):
        start = f"encoder.layers.{layer}."
        for name in ["layer_norm1", "layer_norm2"]:
            yield f"{start}{name}.weight", [HIDDEN]
            yield f"{start}{name}.bias", [HIDDEN]
        for name in ["q_proj", "k_proj", "v_proj", "out_proj"]:
            yield f"{start}self_attn.{name}.weight", [HIDDEN, HIDDEN]
            yield f"{start}self_attn.{name}.bias", [HIDDEN]
        yield f"{start}mlp.fc1.weight", [MIDDLE, HIDDEN]
        yield f"{start}mlp.fc1.bias", [MIDDLE]
        yield f"{start}mlp.fc2.weight", [HIDDEN, MIDDLE]
        yield f"{start}mlp.fc2.bias", [HIDDEN]
    yield "post_layernorm.weight", [HIDDEN]
    yield "post_layernorm.bias", [HIDDEN]


def write(folder, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1) + "\n")
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (shape, values) in tensors.items():
        header[f"vision_model.{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(values)]}
        data += struct.pack(f"<{len(values)}f", *values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def blank(folder):
    rng = random.Random(1)
    tensors = {}
    for name, shape in shapes():
        count = math.prod(shape)
        if "norm" in name or name.endswith("bias"):
            values = [1.0 if "norm" in name and name.endswith("weight") else 0.0] * count
        else:
            width = count // shape[0]
            deviation = 0.02 if "position" in name else 1 / math.sqrt(width)
            values = [rng.gauss(0, deviation) for _ in range(count)]
        tensors[name] = (shape, values)
    write(folder, tensors)


def take(adapter, folder):
    whole = (adapter / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    tensors = {}
    for name, shape in shapes():
        (found,) = [key for key in header if key.endswith(f"vision_tower.{name}")]
        start, end = header[found]["data_offsets"]
        assert header[found]["shape"] == shape and header[found]["dtype"] == "F32", found
        values = struct.unpack(f"<{math.prod(shape)}f", whole[8 + length + start : 8 + length + end])
        tensors[name] = (shape, values)
    write(folder, tensors)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["blank", folder]:
            blank(Path(folder))
        case ["take", adapter, folder]:
            take(Path(adapter), Path(folder))
        case _:
            sys.exit(__doc__)
