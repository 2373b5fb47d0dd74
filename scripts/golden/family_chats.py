#!/usr/bin/env python3
"""Makes tests/golden/c4/chats.json: what the assistant writes in each turn under templates of 2026's families, by Transformers.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/family_chats.py --out tests/golden/c4

The templates (*.jinja in the output folder) are our own, in the manner of the families that they name. They mark what the assistant
writes ({% generation %}). The script only reads them. The date is 26 July 2025.

A case is a template, a conversation of chat_templates.py or of this script, and variables. It has digests (FNV-1a) of the text with and
without the prompt of the next answer, the marked parts of the text, and for each assistant message what is learned of it: in the text
through this message, what is behind the prompt up to the end of the last mark. Where the template writes no end, the token of the next
role follows. `before` is the digest of the text before it. Learned and marked parts are numbers of `texts`. A case that the template
refuses has `error`.
"""
import argparse
import copy
import json
import os

import jinja2
from transformers.utils import chat_template_utils

from chat_templates import CONVERSATIONS, RESULT, TODAY, WEATHER, WEATHER_CALL, Today, message, parsed

# template: (variables, whether the arguments of calls are text)
TEMPLATES = {
    "harmony": ([{}, dict(reasoning_effort="high", model_identity="Me.")], False),
    "muse": ([{}, dict(reasoning_strength="low", current_date="today")], False),
    "gemma4": ([{}, dict(enable_thinking=True), dict(preserve_thinking=True)], False),
    "qwen35": ([{}, dict(enable_thinking=False), dict(preserve_thinking=True), dict(reasoning_effort="low")], False),
    "glm45": ([{}, dict(enable_thinking=False)], False),
    "glm47": ([{}, dict(enable_thinking=False), dict(clear_thinking=False)], False),
    "lfm2": ([{}], False),
    "lfm25": ([{}, dict(preserve_thinking=True)], False),
    "deepseek_v3": ([{}], True),
    "minimax_m2": ([{}], False),
    "granite4": ([{}], False),
    "nemotron3": ([{}, dict(enable_thinking=False), dict(truncate_history_thinking=False, low_effort=True)], False),
    "seed_oss": ([{}, dict(thinking_budget=0), dict(thinking_budget=512)], False),
    "hunyuan": ([{}, dict(enable_thinking=False)], False),
    "ministral3": ([{}], False),
    "gemma3n": ([{}], False),
}
THOUGHT = [dict(type="thinking", thinking="Two and two."), dict(type="text", text="4")]
MORE = {
    "thinking_parts": ([message("user", "2+2?"), message("assistant", THOUGHT), message("user", "So?"), message("assistant", THOUGHT)], None),
    "trailing": ([message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d"), message("user", "e")], None),
    "calls_twice": ([message("user", "Weather?"), message("assistant", "", reasoning_content="Look.", tool_calls=[WEATHER_CALL]), RESULT, message("assistant", "21."), message("user", "Now?"), message("assistant", "", reasoning_content="Again.", tool_calls=[WEATHER_CALL]), RESULT, message("assistant", "22.", reasoning_content="Done.")], [WEATHER]),
    "same_words": ([message("user", "d"), message("assistant", "d"), message("user", "d"), message("assistant", "d")], None),
}
# Where a turn of Gemma's goes on, and where it begins.
GEMMA = ["<|turn>model\n", "<tool_response|>"]


def digest(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return f"{value:016x}"


def learned(name, render, messages, index):
    """The text before what is learned of a message, and what is learned."""
    text, blocks = render(messages[: index + 1])
    prompt = render(messages[:index], True)[0] if index else None
    blocks = [block for block in blocks if block[0] < block[1]]
    if name == "gemma4":
        begin = max(text.rfind(mark) + len(mark) for mark in GEMMA if mark in text)
        blocks = [block for block in blocks if block[0] >= begin]
    else:
        blocks = blocks[-1:]
    if not blocks:
        return text, ""
    start, end = blocks[0][0], blocks[-1][1]
    if prompt is not None and text.startswith(prompt):
        start = len(prompt)
    words = text[start:end]
    if name.startswith("glm"):
        following = messages[index + 1]["role"] if index + 1 < len(messages) else None
        calls = bool(messages[index].get("tool_calls"))
        words += {"tool": "<|observation|>", "system": "<|system|>", "user": "<|user|>", None: "<|observation|>" if calls else "<|user|>"}[following]
    return text[:start], words


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    chat_template_utils.datetime = Today
    conversations = CONVERSATIONS | MORE
    cases, texts = [], {}

    def number(text):
        return texts.setdefault(text, len(texts))

    for name, (variants, as_text) in TEMPLATES.items():
        with open(os.path.join(args.out, f"{name}.jinja"), encoding="utf-8") as file:
            template = file.read()
        for title, (messages, tools) in conversations.items():
            # As apply_chat_template does, null is no field.
            messages = [{key: value for key, value in one.items() if value is not None} for one in parsed(messages)]
            for each in (one["function"] for one in sum((message.get("tool_calls") or [] for message in messages), [])):
                if as_text and not isinstance(each["arguments"], str):  # messages may share a call
                    each["arguments"] = json.dumps(each["arguments"], ensure_ascii=False)
            for kwargs in variants:

                def render(messages, prompt=False):
                    texts, blocks = chat_template_utils.render_jinja_template(
                        [copy.deepcopy(messages)], tools=copy.deepcopy(tools), chat_template=template, add_generation_prompt=prompt,
                        return_assistant_tokens_mask=True, bos_token="<s>", eos_token="</s>", **kwargs,
                    )
                    return texts[0], blocks[0]

                case = dict(template=name, conversation=title, kwargs=kwargs)
                try:
                    text, blocks = render(messages)
                    case |= dict(text=digest(text), marked=[number(text[a:b]) for a, b in blocks if a < b])
                    try:
                        case["prompt"] = digest(render(messages, True)[0])
                    except jinja2.exceptions.TemplateError:
                        pass
                    turns = [learned(name, render, messages, at) for at, one in enumerate(messages) if one["role"] == "assistant"]
                    case["turns"] = [dict(before=digest(before), learned=number(words)) for before, words in turns if words]
                except (jinja2.exceptions.TemplateError, TypeError, AttributeError) as error:
                    case = dict(template=name, conversation=title, kwargs=kwargs, error=str(error) if isinstance(error, jinja2.exceptions.TemplateError) else "")
                cases.append(case)
    conversations = {name: dict(messages=messages, tools=tools) for name, (messages, tools) in conversations.items()}
    with open(os.path.join(args.out, "chats.json"), "w", encoding="utf-8") as out:
        out.write('{"date": "%s",\n"conversations": {\n' % TODAY.strftime("%Y-%m-%d"))
        out.write(",\n".join(json.dumps(name) + ": " + json.dumps(one, ensure_ascii=False) for name, one in conversations.items()))
        out.write("},\n\"texts\": [\n" + ",\n".join(json.dumps(text, ensure_ascii=False) for text in texts))
        out.write("],\n\"cases\": [\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "]}\n")
    print(len(cases), "cases,", sum("error" in case for case in cases), "of them errors")


if __name__ == "__main__":
    main()
