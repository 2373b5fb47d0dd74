#!/usr/bin/env python3
"""Writes crates/config/src/key_types.txt: the keys of `config.json` as Transformers' configuration classes declare them.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/key_types.py > crates/config/src/key_types.txt

Transformers refuses a file whose value has another type, null included. A line is `key: types: model types`; a key that classes declare
differently has several lines. `other name: = key: model types` is a class's `attribute_map`. Types that Transformers does not check are
left out.
"""
import dataclasses
import pathlib
import re
import types
import typing

import transformers

SIMPLE = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list", type(None): "null"}
CONFIG = pathlib.Path(__file__).parents[2] / "crates/config/src"


def words(kind):
    """The types that a JSON value may have, or None where everything passes."""
    if kind in SIMPLE:
        return {SIMPLE[kind]}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        every = [words(one) for one in arguments]
        return None if None in every else set().union(*every)
    if origin is typing.Literal:
        return {f'"{word}"' for word in arguments}
    if origin is dict:
        return {"dict"}
    if origin is list:
        inner = words(arguments[0])
        return inner and {"list[" + ", ".join(sorted(inner)) + "]"}
    if origin is tuple or typing.is_typeddict(kind):
        return set()  # no value of JSON is one
    if isinstance(kind, type):
        return set() if issubclass(kind, transformers.PreTrainedConfig) else None
    return None


def model_types():
    """Every model_type that the program reads: families, language models, models around them, and image encoders."""
    files = [*sorted((CONFIG / "families").glob("*.rs")), CONFIG / "wrapped.rs", CONFIG / "wrapped_json.rs"]
    found = re.findall(r'(?:model_type: |text\()"(\w+)"', "".join(file.read_text() for file in files))
    for file in sorted((CONFIG / "vision/families").glob("*.rs")):
        for names in re.findall(r"model_types: &\[([^]]*)\]", file.read_text()):
            found += re.findall(r'"(\w+)"', names)
    return sorted({name for name in found if name in transformers.CONFIG_MAPPING})


def main():
    of_base = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    table = {}
    for name in model_types():
        kind = transformers.CONFIG_MAPPING[name]
        declared = {field.name for field in dataclasses.fields(kind)}
        for other, key in kind.attribute_map.items():
            # The declared one of the two comes first in Transformers, the other one is set over it.
            pair = (key, other) if other in declared else (other, key)
            table.setdefault((pair[0], f"= {pair[1]}"), []).append(name)
        for field in dataclasses.fields(kind):
            kinds = None if isinstance(field.type, str) or field.name in of_base else words(field.type)
            if kinds:
                table.setdefault((field.name, " | ".join(sorted(kinds))), []).append(name)
    for (key, kinds), names in sorted(table.items()):
        print(f"{key}: {kinds}: {' '.join(names)}")


if __name__ == "__main__":
    main()
