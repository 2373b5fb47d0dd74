#!/usr/bin/env python3
"""Makes tests/golden/c: tokenizers, rendered chats, token ids and assistant masks as Transformers computes them.

    pip install -r scripts/golden/requirements.txt
    python3 scripts/golden/text.py --out tests/golden/c

The templates (template_*.jinja in the output folder) are hand-written and only read; everything else is written.
"""
import argparse
import copy
import json
import os
import random

import jinja2
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATES = ["chatml", "llama3", "gemma", "mistral", "phi3"]
SPECIAL = [
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>",
]
# name: (vocabulary, the template in its tokenizer_config.json)
TOKENIZERS = {"bpe_gpt2": (640, "chatml"), "bpe_llama3": (1000, "llama3")}
LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def user(text):
    return dict(role="user", content=text)


def assistant(text):
    return dict(role="assistant", content=text)


def system(text):
    return dict(role="system", content=text)


TOOL_CALL = dict(
    role="assistant",
    content="",
    tool_calls=[dict(id="call00001", type="function", function=dict(name="get_weather", arguments=dict(city="Zürich", days=2, note='a<b & "c"')))],
)

# (name, messages, add_generation_prompt)
CONVERSATIONS = [
    ('simple', [user('Hello'), assistant('Hi there!')], False),
    ('gen_prompt', [user('What is 2+2?')], True),
    ('system', [system('You are terse.'), user('Add 3 and 4.'), assistant('7')], False),
    ('system_gen', [system('  Be brief.  \n'), user('Why?')], True),
    ('multi_turn', [user('one'), assistant('two'), user('three'), assistant('four'), user('five'), assistant('six')], False),
    ('multi_turn_gen', [system('count'), user('one'), assistant('two'), user('three')], True),
    ('tool', [system('Use tools.'), user('Weather in Zürich?'), TOOL_CALL, dict(role='tool', content='{"temp": 21}'), assistant('21 degrees.')], False),
    ('empty_content', [user(''), assistant('')], False),
    ('leading_newline', [user('x'), assistant('\n\n answer\n')], False),
    ('unicode', [user('Größe: 漢字 🙂👩‍👩‍👧 e\u0301 \u00a0nbsp \u200bzw'), assistant('naïve — “quotes” Ω≈ç√ \U0001d54f')], False),
    ('spaces', [user('  lead and trail  \n\n'), assistant(' \tx  y \n')], False),
    ('special_in_text', [user('say <|im_end|> or <|eot_id|> or </s> [INST] <end_of_turn> now'), assistant('<|im_start|>user\nno')], False),
    ('newlines_code', [user('Write:\r\n```py\nfor i in range(3):\n\tprint(i)\n```'), assistant('```py\nx = {"a": [1, 2]}\n```\n\n\n')], False),
    ('jinja_in_text', [user('{{ 7*7 }} {% if x %}'), assistant("{# c #} {{ bos_token }} \\n it's")], False),
    ('assistant_first', [assistant('I go first'), user('ok')], True),
    ('two_assistant', [user('a'), assistant('b'), assistant('c')], False),
    ('long_digits', [user('123456789 + 0987 = ? 1,000,000.50'), assistant('123457776; 3.14159e-10')], False),
]

# Texts of which only the ids matter: word forms, scripts, punctuation, white space.
TEXTS = [
    'the cat sat on the mat', 'the cat sat on the mat',
    'the cat', 'the cat sat on the mat',
    '', 'a reference',
    'a prediction', '',
    '', '',
    'running runs ran', 'run running runner',
    'The Cat SAT!', 'the cat, sat.',
    'police killed the gunman', 'the gunman was shot by police',
    'Größe und Maß', 'größe und mass',
    '漢字 かな', '漢字 カナ',
    'naïve café', 'naive cafe',
    'e\u0301te\u0301', 'été',
    '3.14 is pi', 'pi is 3.14',
    "don't stop", 'dont stop',
    'state-of-the-art results', 'state of the art result',
    'a b c d e f g', 'a c e g b d f',
    'x', 'x',
    '🙂 smile', 'smile 🙂',
    'one two three\nfour five', 'one two\nthree four five six',
    'generalization generalizes generalized', 'general generally',
    'flies dies mules denied', 'fly die mule deny',
    '42', '42',
    '-42', '42',
    'a_b snake_case', 'a b snake case',
    'the the the the', 'the cat the dog',
    '  spaced   out  ', 'spaced out',
    'Привет мир', 'привет, мир',
    'abc123 45x', 'abc 123 45 x',
    'ponies caresses agreed plastered motoring hopping', 'poni caress agre plaster motor hop',
    'I am a very long sentence with quite a lot of words in it to test the longest common subsequence.', 'A very long sentence in which a lot of words test, quite well, the longest common subsequence of it.',
    '\u00a0nbsp\u2009thin', 'nbsp thin',
    '0', 'zero',
]
MORE_TEXTS = ["   ", "\n", "\n\n \t", "I'M don't we'LL", "a1b22c333d4444", "\ufeffbom", "ﬁ ligature", "x" * 70, "</s><s><pad>",
              " <|eot_id|> x", "\u0000nul", "नमस्ते 안녕 שלום", "\ud7ff\uffff"]


def synthetic_rows():
    """200 rows, 50 each of messages, instruction/input/output, prompt/completion and text."""
    rng = random.Random(7)
    words = "apple river stone cloud green seven quick lamp orange music table window bright candle forest paper silver garden".split()
    rows = []
    for index in range(200):
        kind = rng.randrange(5)
        one, two = rng.randrange(100), rng.randrange(100)
        chosen = rng.sample(words, 3)
        question, answer = [
            (f"What is {one} + {two}?", str(one + two)),
            (f"What is {one} minus {two}?", str(one - two)),
            (f'Reverse the word "{chosen[0]}".', chosen[0][::-1]),
            (f"Sort these words: {', '.join(chosen)}", ", ".join(sorted(chosen))),
            (f'How many letters are in "{chosen[1]}"?', f'"{chosen[1]}" has {len(chosen[1])} letters.'),
        ][kind]
        if index % 4 == 0:
            messages = [system("Answer briefly.")] if rng.random() < 0.4 else []
            messages += [user(question), assistant(answer)]
            if rng.random() < 0.3:
                messages += [user(f"And double {one}?"), assistant(str(2 * one))]
            rows.append(dict(messages=messages))
        elif index % 4 == 1:
            head, _, rest = question.partition(": ")
            rows.append(dict(instruction=head if rest else question, input=rest, output=answer))
        elif index % 4 == 2:
            rows.append(dict(prompt=question + "\n", completion=answer))
        else:
            rows.append(dict(text=f"Q: {question}\nA: {answer}"))
    return rows


def corpus(rows):
    """What the tokenizers are trained on."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines += [value for row in rows for value in row.values() if isinstance(value, str)]
    lines += [message["content"] for row in rows for message in row.get("messages", [])]
    lines += [message["content"] for _, messages, _ in CONVERSATIONS for message in messages] * 2
    common = "the and of to in is that it for was on are with as system user assistant model tool helpful answer question number words letters"
    return lines + [common] * 20


def make_tokenizer(name, lines, templates, out):
    """A byte-level BPE: GPT-2's split without a BOS, or Llama 3's split with one."""
    vocabulary, template = TOKENIZERS[name]
    llama3 = name == "bpe_llama3"
    tokenizer = Tokenizer(models.BPE(ignore_merges=llama3))
    if llama3:
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    byte_level = processors.ByteLevel(trim_offsets=False)
    begin = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([byte_level, begin]) if llama3 else byte_level
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=512, clean_up_tokenization_spaces=False
    )
    fast.chat_template = templates[template]
    folder = f"{out}/tokenizer_{name}"
    fast.save_pretrained(folder)
    # Transformers 5 writes chat_template.jinja; the older place, inside tokenizer_config.json, is filled too.
    path = f"{folder}/tokenizer_config.json"
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config["chat_template"] = fast.chat_template
    dump(config, path)
    return transformers.AutoTokenizer.from_pretrained(folder)


def tokenized(text, tokenizer):
    """Ids with and without the special tokens around a text, and what they decode to."""
    ids = tokenizer(text)["input_ids"]
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    return dict(ids=ids, ids_nospecial=bare, decode=tokenizer.decode(ids), decode_skip=tokenizer.decode(ids, skip_special_tokens=True))


def chat_case(conversation, template_name, template, tokenizers):
    """One conversation by one template: the text, or the error that the template raises, and each tokenizer's ids and mask."""
    name, messages, generation_prompt = conversation
    case = dict(template=template_name, conversation=name, add_generation_prompt=generation_prompt)
    for tokenizer_name, tokenizer in tokenizers.items():
        arguments = dict(chat_template=template, add_generation_prompt=generation_prompt)
        try:
            rendered = tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **arguments)
            case["rendered"] = rendered
            encoded = tokenizer.apply_chat_template(
                copy.deepcopy(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **arguments
            )
        except jinja2.exceptions.TemplateError as error:
            case["error"] = str(error)
            continue
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        answers = [tokenizer.decode([id for id, inside in zip(ids, mask) if inside])]
        case[tokenizer_name] = dict(ids=ids, assistant_mask=mask, assistant_text=answers)
    return case


def dump(value, path):
    with open(path, "w", encoding="utf-8") as out:
        json.dump(value, out, ensure_ascii=False, indent=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    templates = {}
    for name in TEMPLATES:
        with open(os.path.join(args.out, f"template_{name}.jinja"), encoding="utf-8") as file:
            templates[name] = file.read()
    rows = synthetic_rows()
    with open(f"{args.out}/synthetic_200.jsonl", "w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    lines = corpus(rows)
    tokenizers = {name: make_tokenizer(name, lines, templates, args.out) for name in TOKENIZERS}
    texts = [message["content"] for _, messages, _ in CONVERSATIONS for message in messages] + TEXTS + MORE_TEXTS
    distinct = list(dict.fromkeys(texts))
    dump([dict(text=text, **{name: tokenized(text, tokenizer) for name, tokenizer in tokenizers.items()}) for text in distinct], f"{args.out}/tokenize.json")
    cases = [chat_case(conversation, name, template, tokenizers) for name, template in templates.items() for conversation in CONVERSATIONS]
    note = ("rendered by transformers apply_chat_template (jinja sandbox: trim_blocks, lstrip_blocks); "
            "ids = tokenizer(rendered, add_special_tokens=False); error = the template raised")
    dump(dict(conversations={name: messages for name, messages, _ in CONVERSATIONS}, cases=cases, note=note), f"{args.out}/chat.json")


if __name__ == "__main__":
    main()
