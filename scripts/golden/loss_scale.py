#!/usr/bin/env python3
"""Makes tests/golden/optim/loss_scale.json: the scales of DeepSpeed's DynamicLossScaler for a few sequences of overflows.

    python3 scripts/golden/loss_scale.py LOSS_SCALER.PY tests/golden/optim/loss_scale.json

LOSS_SCALER.PY is deepspeed/runtime/fp16/loss_scaler.py of DeepSpeed 0.19.6. Only the class runs, without the rest.
"""
import ast
import json
import random
import sys

source = open(sys.argv[1], encoding="utf-8").read()
tree = ast.parse(source)
wanted = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in ("LossScalerBase", "DynamicLossScaler")]
names = {"DeepSpeedConfigObject": object, "torch": type("torch", (), {"half": None}), "logger": type("logger", (), {"info": print}), "dist": type("dist", (), {"get_rank": staticmethod(lambda: 1)})}
exec(compile(ast.Module(wanted, []), sys.argv[1], "exec"), names)

CASES = [(16, 1000, 2, 1.0, 40, 0.3), (16, 5, 2, 1.0, 200, 0.1), (3, 4, 1, 1.0, 100, 0.2), (8, 7, 3, 4.0, 300, 0.25), (4, 1, 2, 1.0, 60, 0.3)]
runs = []
for seed, (power, window, hysteresis, least, steps, share) in enumerate(CASES):
    rng = random.Random(seed)
    scaler = names["DynamicLossScaler"](2.0**power, window, least, hysteresis, False, raise_error_at_min_scale=False)
    overflows, scales = [], []
    for _ in range(steps):
        overflow = rng.random() < share
        scaler.update_scale(overflow)
        overflows.append(overflow)
        scales.append(scaler.cur_scale)
    assert max(scales) < 2.0**40
    runs.append(dict(power=power, window=window, hysteresis=hysteresis, least=least, overflows=overflows, scales=scales))
json.dump(runs, open(sys.argv[2], "w", encoding="utf-8"), separators=(",", ":"))
