#!/usr/bin/env python3
"""Makes tests/golden/vision/across_*: image encoders and a GPT-2 whose blocks read their output by cross-attention.

    python3 scripts/golden/vision_across.py --out tests/golden/vision

As prefix_gpt2 of vision.py, with `decoder_start_token_id` in the place of a picture's rows. Adapters are on all modules of the decoder's
blocks; all of the encoder that the output comes through is trained, and `enc_to_dec_proj` where the widths differ. The script refuses
to write a run whose loss is not that of the class with `labels`, or whose greedy answers are not those of `generate`.
"""
import torch
import transformers

import vision

START = 1
# Name: the class of the encoder's configuration, what it has beside vision.TOWER, what the decoder has beside vision.GPT2.
MODELS = {
    "across_vit": ("ViTConfig", dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), dict(n_embd=48, tie_word_embeddings=True)),
    "across_clip": ("CLIPVisionConfig", {}, dict(n_layer=3, scale_attn_by_inverse_layer_idx=True)),
    "across_siglip": ("SiglipVisionConfig", dict(vision_use_head=False), dict(n_embd=24, n_inner=40, scale_attn_weights=False)),
    "across_dinov2": ("Dinov2WithRegistersConfig", dict(mlp_ratio=2, num_register_tokens=3), dict(cross_attention_hidden_size=32)),
}
TARGETS = ["c_attn", "q_attn", "c_proj", "c_fc"]
# What no picture comes through.
UNUSED = ("pooler", "mask_token")


def our_name(name):
    """The name of a trained tensor in the engine: the decoder's as in a plain language model, others as Transformers 5 has them."""
    name = name.replace("base_model.model.", "").replace(".default.weight", ".weight").replace(".base_layer.", ".")
    return name.replace("decoder.transformer.h.", "model.layers.")


def make(name, out, seed):
    kind, of_encoder, of_decoder = MODELS[name]
    encoder = getattr(transformers, kind)(**vision.TOWER, **of_encoder)
    if kind.startswith("Dinov2"):
        del encoder.intermediate_size
    decoder = transformers.GPT2Config(**vision.GPT2 | of_decoder)
    ends = dict(decoder_start_token_id=START, pad_token_id=0, eos_token_id=2)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **ends)
    model = transformers.VisionEncoderDecoderModel._from_config(config, attn_implementation="eager")
    vision.scramble(model, seed)
    folder = f"{out}/{name}"
    vision.store(model, f"{folder}/model")
    model = vision.lora(model, TARGETS, seed + 3)
    for key, parameter in model.named_parameters():
        if "enc_to_dec_proj" in key or ".encoder." in key and not any(part in key for part in UNUSED):
            parameter.requires_grad_(True)

    def forward(ids, mask, pixels):
        # A text's tokens behind the first one; padding at the end changes nothing before it.
        shifted = torch.cat([torch.full((len(ids), 1), START), ids[:, :-1]], 1)
        return model(pixel_values=pixels, decoder_input_ids=shifted, use_cache=False).logits

    pictures = vision.normals((vision.PICTURES, 3, vision.SIDE, vision.SIDE), seed + 4)
    settings = dict(prefix=True, start=START, rows=[1] * vision.PICTURES)
    check(model, forward, settings, pictures, seed)
    vision.write_model(folder, (model, forward, settings), pictures, dict(pixel_values=pictures), seed)


def check(model, forward, settings, pictures, seed):
    rows = vision.make_rows(4, settings, seed + 5)
    ids, mask, labels, pixels = vision.collate(rows, pictures)
    with torch.no_grad():
        ours = vision.nll(settings, forward(ids, mask, pixels), labels, "mean")
        theirs = model(pixel_values=pixels, labels=labels).loss
    assert abs(ours - theirs) < 1e-6, (ours, theirs)
    for row in rows[:3]:
        ours = vision.answer(forward, settings, row, pictures)["answer"]
        given = dict(max_new_tokens=len(ours), do_sample=False, eos_token_id=None, pad_token_id=0)
        theirs = [model.generate(pixel_values=pictures[row["images"]], use_cache=cached, **given)[0, 1:].tolist() for cached in (True, False)]
        assert [ours, ours] == theirs, (ours, theirs)


def main():
    arguments = vision.arguments_of_command()
    vision.our_name = our_name
    for number, name in enumerate(MODELS):
        if arguments.only in (None, name):
            make(name, arguments.out, 7000 + 20 * (430 + number))
            print(name)


if __name__ == "__main__":
    main()
