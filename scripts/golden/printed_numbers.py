#!/usr/bin/env python3
"""Makes tests/golden/c3/numbers.json: numbers in the arguments of a call as Transformers lets templates print them.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/printed_numbers.py tests/golden/c3/numbers.json
"""
import json
import os
import random
import struct
import sys

import transformers

TEMPLATES = {
    "plain": "{{ x }}",
    "tojson": "{{ x | tojson }}",
    "indented": "{{ {'a': x, 'b': [x]} | tojson(indent=2) }}",
    "string": "{{ x | string }}",
    "concat": "{{ 'a' ~ x ~ 'b' }}",
    "list": "{{ [x, 'y', none, true, 3] }}",
    "map": "{{ {'k': x, 'l': {'m': [x]}} }}",
    "join": "{{ [x, x] | join(', ') }}",
    "percent": "{{ 'a %s b %s' % (x, 'y') }}",
    "format": "{{ 'a {} b {}'.format(x, 'y') }}",
    "format filter": "{{ '%s' | format(x) }}",
    "replace": "{{ x | string | replace('e', 'E') }}",
    "sum": "{{ x + 1 }}",
    "half": "{{ x / 2 }}",
    "negative": "{{ -x }}",
    "condition": "{{ x if x is number else 'no' }}",
}
TEXTS = ["-3.5e-07", "1e+22", "1e22", "1e16", "1E15", "123456789012345680.0", "0.0001", "0.00001", "1.0", "-0.0", "0.1", "100", "-7", "1e5", "2.5e-8",
         "9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551615", "1.7976931348623157e308", "5e-324", "0.30000000000000004"]


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{here}/../../tests/golden/c/tokenizer_bpe_llama3")
    draw = random.Random(20250726)
    texts = TEXTS + [repr(draw.uniform(-180, 180)) for _ in range(20)] + [repr(draw.gauss(0, 1e-7)) for _ in range(10)]
    while len(texts) < len(TEXTS) + 60:
        number = struct.unpack("<d", draw.randbytes(8))[0]
        if number == number and abs(number) != float("inf"):
            texts.append(repr(number))
    cases = []
    for index, text in enumerate(texts):
        for name, expression in TEMPLATES.items():
            if index >= len(TEXTS) and name not in ("plain", "tojson"):
                continue
            template = "{% set x = messages[0].tool_calls[0].function.arguments.x %}" + expression
            call = dict(type="function", function=dict(name="f", arguments=json.loads('{"x": %s}' % text)))
            messages = [dict(role="assistant", content="", tool_calls=[call])]
            rendered = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
            cases.append(dict(number=text, template=name, rendered=rendered))
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(dict(templates=TEMPLATES, cases=cases), out, ensure_ascii=False, indent=0)
        out.write("\n")
    print(len(cases), "cases")


if __name__ == "__main__":
    main()
