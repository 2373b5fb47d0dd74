"""The golden rates of Axolotl's schedule REX, from its own file (src/axolotl/utils/schedulers.py of its repository).

    python scripts/golden/rex.py SCHEDULERS.PY tests/golden/optim/schedules_rex.json
"""
import importlib.util
import json
import sys

import torch

PEAK = 2e-3
# arguments, warm-up, steps
CASES = [({}, 5, 50), ({}, 0, 50), ({"min_lr": 1e-4}, 7, 50), ({"min_lr_rate": 0.2}, 3, 40)]


def main():
    spec = importlib.util.spec_from_file_location("schedulers", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = []
    for arguments, warmup, total in CASES:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
        lowest = arguments.get("min_lr", PEAK * arguments.get("min_lr_rate", 0))
        schedule = module.RexLR(optimizer, max_lr=PEAK, min_lr=lowest, total_steps=total, num_warmup_steps=warmup)
        rates = []
        for _ in range(total + 5):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        out.append(dict(form="rex", arguments=arguments, warmup=warmup, total=total, rates=rates))
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(json.dumps(dict(peak=PEAK, schedules=out), indent=0))


if __name__ == "__main__":
    main()
