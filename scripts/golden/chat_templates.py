#!/usr/bin/env python3
"""Makes tests/golden/c2/chats.json: conversations with tools, reasoning, parts and dates, rendered by Transformers.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/chat_templates.py --out tests/golden/c2
    python3 scripts/golden/chat_templates.py --out FOLDER --all    # any templates: FOLDER/*.jinja, to look at by hand

The templates (*.jinja in the output folder) are our own. They behave like five common ones, with other words. The script only reads them.
The date is 26 July 2025.
"""
import argparse
import copy
import datetime
import json
import os

import jinja2
import transformers
from transformers.utils import chat_template_utils

TEMPLATES = ["qwen3", "llama31", "mistral_nemo", "deepseek_r1", "gemma3"]
TODAY = datetime.datetime(2025, 7, 26)

WEATHER = dict(type="function", function=dict(
    name="get_weather", description='The weather in a "city" <now>',
    parameters=dict(type="object", properties=dict(city=dict(type="string", description="Größe & Name"), days=dict(type="integer")), required=["city"]),
))
TIME = dict(type="function", function=dict(name="get_time", description="The time", parameters=dict(type="object", properties={})))


def message(role, content, **fields):
    return dict(role=role, content=content, **fields)


def parsed(messages):
    """The messages with the arguments of calls as objects: text of them, as OpenAI has it, is read by tunesmith before any template."""
    messages = copy.deepcopy(messages)
    for each in (one["function"] for message in messages for one in message.get("tool_calls") or []):
        each["arguments"] = json.loads(each["arguments"]) if isinstance(each["arguments"], str) else each["arguments"]
    return messages


def call(id, name, **arguments):
    return dict(id=id, type="function", function=dict(name=name, arguments=arguments))


WEATHER_CALL = call("call00001", "get_weather", city="Zürich", days=2, note='a<b & "c"', nested=dict(list=[1, 2.5, None, True]))
RESULT = message("tool", '{"temp": 21}', name="get_weather", tool_call_id="call00001")

# name: (messages, tools)
CONVERSATIONS = {
    "simple": ([message("user", "Hello"), message("assistant", "Hi there!")], None),
    "question": ([message("system", "  Be brief. \n"), message("user", "Why?")], None),
    "turns": ([message("system", "Count."), message("user", "one"), message("assistant", "two"), message("user", "three"), message("assistant", "four")], None),
    "tools_unused": ([message("system", "Be kind."), message("user", "Hi"), message("assistant", "Hello.")], [WEATHER, TIME]),
    "tool": ([message("user", "Weather in Zürich?"), message("assistant", "", tool_calls=[WEATHER_CALL]), RESULT, message("assistant", "21 degrees.")], [WEATHER]),
    "tool_system": ([message("system", "Use tools."), message("user", "Weather?"), message("assistant", "", tool_calls=[WEATHER_CALL]), RESULT, message("assistant", "Warm."), message("user", "Thanks"), message("assistant", "Welcome.")], [WEATHER, TIME]),
    "tool_pending": ([message("user", "Weather?"), message("assistant", "", tool_calls=[WEATHER_CALL]), RESULT], [WEATHER]),
    "tools_in_parallel": ([message("user", "Weather and time?"), message("assistant", "", tool_calls=[WEATHER_CALL, call("call00002", "get_time")]), RESULT, message("tool", "12:00", tool_call_id="call00002"), message("assistant", "21 degrees at noon.")], [WEATHER, TIME]),
    "tool_with_words": ([message("user", "Weather?"), message("assistant", "Let me look.", tool_calls=[WEATHER_CALL]), RESULT, message("assistant", "Fine.")], [WEATHER]),
    "thought": ([message("user", "2+2?"), message("assistant", "<think>\nTwo and two.\n</think>\n\n4"), message("user", "3+3?"), message("assistant", "<think>\nThree and three.\n</think>\n\n6")], None),
    "thought_field": ([message("user", "2+2?"), message("assistant", "4", reasoning_content="Two and two."), message("user", "3+3?"), message("assistant", "6", reasoning_content="Three and three.\n")], None),
    "thought_tool": ([message("user", "Weather?"), message("assistant", "", reasoning_content="I need the tool.", tool_calls=[WEATHER_CALL]), RESULT, message("assistant", "Fine.", reasoning_content="It is warm.")], [WEATHER]),
    "two_systems": ([message("system", "First."), message("user", "a"), message("assistant", "b"), message("system", "Second."), message("user", "c"), message("assistant", "d")], None),
    "parts": ([message("system", [dict(type="text", text="See.")]), message("user", [dict(type="image"), dict(type="text", text=" What is it? ")]), message("assistant", [dict(type="text", text="A cat. ")])], None),
    "unicode": ([message("user", "漢字 🙂 e\u0301 \u00a0x"), message("assistant", " naïve “quotes” \n")], None),
    "tool_string": ([message("user", "Weather?"), message("assistant", "", tool_calls=[dict(id="call00001", type="function", function=dict(name="get_weather", arguments='{"city": "Zürich", "days": 2}'))]), RESULT, message("assistant", "Fine.")], [WEATHER]),
    "tool_null": ([message("user", "Weather?"), message("assistant", None, tool_calls=[WEATHER_CALL]), RESULT, message("assistant", "Fine.")], [WEATHER]),
    "tool_thoughts": ([message("user", "Weather?"), message("assistant", "Let me look.", reasoning_content="First the tool.", tool_calls=[WEATHER_CALL]), RESULT, message("assistant", "", reasoning_content="Now the time.", tool_calls=[call("call00002", "get_time")]), message("tool", "12:00", tool_call_id="call00002"), message("assistant", "21 degrees at noon.", reasoning_content="Both are there.")], [WEATHER, TIME]),
    "thinking": ([message("user", "2+2?"), message("assistant", "4", thinking="Two and two."), message("user", "3+3?"), message("assistant", "6", thinking="Three and three.")], None),
    "two_users": ([message("user", "a"), message("user", "b"), message("assistant", "c")], None),
}


class Today(datetime.datetime):
    """A clock that stands."""

    @classmethod
    def now(cls, tz=None):
        return TODAY


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    chat_template_utils.datetime = Today
    here = os.path.dirname(os.path.abspath(__file__))
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{here}/../../tests/golden/c/tokenizer_bpe_llama3")
    names = sorted(name.removesuffix(".jinja") for name in os.listdir(args.out) if name.endswith(".jinja")) if args.all else TEMPLATES
    cases = []
    for template_name in names:
        with open(os.path.join(args.out, f"{template_name}.jinja"), encoding="utf-8") as file:
            template = file.read()
        for name, (messages, tools) in CONVERSATIONS.items():
            for generate in (False, True):
                case = dict(template=template_name, conversation=name, add_generation_prompt=generate)
                try:
                    case["rendered"] = tokenizer.apply_chat_template(
                        parsed(messages), tools=copy.deepcopy(tools), chat_template=template, tokenize=False, add_generation_prompt=generate
                    )
                except jinja2.exceptions.TemplateError as error:
                    case["error"] = str(error)
                except (TypeError, AttributeError):
                    continue  # a text and parts put together, for which Python has words of its own
                cases.append(case)
    conversations = {name: dict(messages=messages, tools=tools) for name, (messages, tools) in CONVERSATIONS.items()}
    with open(os.path.join(args.out, "chats.json"), "w", encoding="utf-8") as out:
        json.dump(dict(date=TODAY.strftime("%Y-%m-%d"), conversations=conversations, cases=cases), out, ensure_ascii=False, indent=1)
    print(len(cases), "cases,", sum("error" in case for case in cases), "of them errors")


if __name__ == "__main__":
    main()
