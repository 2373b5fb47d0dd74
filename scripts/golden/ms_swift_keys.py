#!/usr/bin/env python3
"""Makes tests/golden/foreign/ms_swift.json: every key of ms-swift's training configurations that is its own, with its default.

    pip download --no-deps ms-swift==4.6.0 && unzip -d swift ms_swift-4.6.0-*.whl
    python3 scripts/golden/ms_swift_keys.py swift tests/golden/foreign/ms_swift.json

The script imports nothing of it. It reads the fields of the classes that `swift sft` and `swift pt` are configured by.
"""
import ast
import json
import sys
from pathlib import Path

root = Path(sys.argv[1])
classes = {"SwanlabArguments", "SftArguments", "TunerArguments", "BaseArguments", "GenerationArguments", "QuantizeArguments", "DataArguments",
           "TemplateArguments", "ModelArguments", "RayArguments", "TrainArgumentsMixin", "PretrainArguments"}
keys = {}
for path in sorted((root / "swift").rglob("*.py")):
    if path.parts[-2] not in ("arguments", "base_args", "trainers", "ray_utils", "ray"):
        continue
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef) or node.name not in classes:
            continue
        classes.discard(node.name)
        for field in node.body:
            if not isinstance(field, ast.AnnAssign):
                continue
            value = field.value
            if isinstance(value, ast.Call):
                value = next((word.value for word in value.keywords if word.arg == "default"), None)
            try:
                keys.setdefault(field.target.id, ast.literal_eval(value) if value is not None else None)
            except ValueError:
                keys.setdefault(field.target.id, None)
assert not classes, classes
version = next(line.split()[1] for line in next(root.glob("ms_swift-*.dist-info")).joinpath("METADATA").read_text().splitlines() if line.startswith("Version:"))
Path(sys.argv[2]).write_text(json.dumps({"version": version, "keys": dict(sorted(keys.items()))}, indent=1) + "\n", encoding="utf-8")
print(len(keys))
