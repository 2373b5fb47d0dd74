#!/usr/bin/env python3
"""Makes tests/golden/foreign/trl.json: every key of `trl sft --config`, with its default.

    pip install trl==1.16.0
    python3 scripts/golden/trl_keys.py tests/golden/foreign/trl.json
"""
import dataclasses
import json
import sys
from pathlib import Path

import trl

keys = {}
for kind in (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig):
    for field in dataclasses.fields(kind):
        default = None if field.default is dataclasses.MISSING else field.default
        keys[field.name] = default if isinstance(default, (bool, int, float, str, type(None))) else str(default)
Path(sys.argv[1]).write_text(json.dumps({"version": trl.__version__, "keys": dict(sorted(keys.items()))}, indent=1) + "\n", encoding="utf-8")
print(len(keys))
