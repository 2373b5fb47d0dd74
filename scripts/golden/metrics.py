"""Writes tests/golden/metrics/metrics.json: ROUGE, BLEU, chrF, METEOR and SARI of texts, Porter's stems, and which documents fit which
JSON Schemas, by rouge-score, sacrebleu, nltk and jsonschema.

Usage: python scripts/golden/metrics.py tests/golden/metrics/metrics.json
       python scripts/golden/metrics.py tests/golden/metrics/captions.json VQAEVAL.PY

The second form writes metrics of captions and answers with several references instead: CIDEr by pycocoevalcap 1.2 (it needs no Java: the
words are those of sacrebleu's tokenizer 13a in lower case, without words of nothing but punctuation), ROUGE and METEOR over the best
reference by rouge-score and nltk, and the accuracy of VQA v2 by its official script, PythonEvaluationTools/vqaEvaluation/vqaEval.py of
github.com/GT-Vision-Lab/VQA at a013f00 (for Python 2: its print statements are left out here).

METEOR is nltk's without WordNet (no synonyms), on the lower-cased words of sacrebleu's tokenizer 13a. SARI follows the paper with 0/0
counted as 1, as `evaluate`'s documentation does; its example there (three references, 26.9536) is the first case and checked below.
"""
import json
import os
import re
import string
import sys
import types
from collections import Counter

import jsonschema
import sacrebleu
from nltk.stem.porter import PorterStemmer
from nltk.translate.meteor_score import meteor_score, single_meteor_score
from rouge_score import rouge_scorer
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

PAIRS = [
    ("the cat sat on the mat", "the cat sat on the mat"),
    ("the cat", "the cat sat on the mat"),
    ("", "a reference"),
    ("a prediction", ""),
    ("", ""),
    ("running runs ran", "run running runner"),
    ("The Cat SAT!", "the cat, sat."),
    ("police killed the gunman", "the gunman was shot by police"),
    ("Größe und Maß", "größe und mass"),
    ("漢字 かな", "漢字 カナ"),
    ("naïve café", "naive cafe"),
    ("e\u0301te\u0301", "été"),
    ("3.14 is pi", "pi is 3.14"),
    ("don't stop", "dont stop"),
    ("state-of-the-art results", "state of the art result"),
    ("a b c d e f g", "a c e g b d f"),
    ("x", "x"),
    ("🙂 smile", "smile 🙂"),
    ("one two three\nfour five", "one two\nthree four five six"),
    ("generalization generalizes generalized", "general generally"),
    ("flies dies mules denied", "fly die mule deny"),
    ("42", "42"),
    ("-42", "42"),
    ("a_b snake_case", "a b snake case"),
    ("the the the the", "the cat the dog"),
    ("  spaced   out  ", "spaced out"),
    ("Привет мир", "привет, мир"),
    ("abc123 45x", "abc 123 45 x"),
    ("ponies caresses agreed plastered motoring hopping", "poni caress agre plaster motor hop"),
    (
        "I am a very long sentence with quite a lot of words in it to test the longest common subsequence.",
        "A very long sentence in which a lot of words test, quite well, the longest common subsequence of it.",
    ),
    ("\u00a0nbsp\u2009thin", "nbsp thin"),
    ("0", "zero"),
    # Lines, repeated words, ties between subsequences.
    ("the dog ran\nthe dog sat\nthe dog ran", "the dog sat and ran\nthe the dog"),
    ("a b a b\nb a", "b a b a\na b\na"),
    ("\n\nfirst\n\nsecond\n", "second\nfirst\n"),
    ("one\r\ntwo", "one\ntwo"),
    # What the tokenizer 13a does: entities, hyphens at a line's end, numbers, marks.
    ("He said &quot;1,000.50 &amp; more&quot; -\nended <skipped>now", 'he said "1,000.50 & more" ended now .'),
    ("1990-1995: $3.50/kg (50%)...", "1990 - 1995 : $ 3.50 / kg ( 50 % ) ."),
    ("tail of spaces .   ", "tail of spaces."),
    ("a\x1cb\x1fc", "a b c"),
    ("(hi) 'there', [you]!", "hi there , you !"),
    ("It is a guide to action which ensures that the military always obeys the commands of the party",
     "It is a guide to action that ensures that the military will forever heed Party commands"),
    ("İstanbul ISTANBUL ΣΑΣ", "istanbul i̇stanbul σας"),
]

SARI = [
    ("About 95 species are currently accepted .", "About 95 you now get in .",
     ["About 95 species are currently known .", "About 95 species are now accepted .", "95 species are now accepted ."]),
    ("The cat perched on the mat.", "The cat sat on the mat.", ["The cat sat on the mat."]),
    ("The cat perched on the mat.", "The cat perched on the mat.", ["The cat sat on the mat."]),
    ("one two three four five six", "one two three", ["one two three four"]),
    ("a a a b", "a b b", ["a a b", "b"]),
    ("same", "same", ["same"]),
    ("something", "", ["something else"]),
    ("", "new text", [""]),
    ("Complex, long-winded text; it costs $1,000.50!", "Simple text. It costs $1,000.50.", ["Easy text. It costs $1,000.50."]),
]

WORDS = """
sky skies dying lying tying news innings inning outings outing cannings canning howe proceed exceed succeed succeeds a is be as
caresses ponies ties caress cats flies dies mules feed agreed plastered bled motoring sing conflated troubled sized hopping tanned
falling hissing fizzed failing filing happy enjoy enjoyment spy fly try spied died denied cried relational conditional rational
valenci hesitanci digitizer conformabli radicalli differentli vileli analogousli vietnamization predication operator feudalism
decisiveness hopefulness callousness formaliti sensitiviti sensibiliti triplicate formative formalize electriciti electrical
hopeful goodness revival allowance inference airliner gyroscopic adjustable defensible irritant replacement adjustment dependent
adoption homologou communism activate angulariti homologous effective bowdlerize probate rate cease controll roll geology
archaeology theology fully hopefully carefully generally basically politically yyyy syzygy toy by boyish say says playing
controlling rolled ing eed ed ies ied yes eyes oed ion sion tion cation nation national nationally nationalization
naïveté größere ation alli logi geologi wholly totally really rally ally bli able ability abilities
""".split()

# An answer and its references for each picture.
CAPTIONS = [
    ("A dog runs on the beach.", ["A dog is running on the beach.", "The brown dog runs along a beach", "a dog at the sea"]),
    ("a man riding a wave on a surfboard", ["A man rides a wave on top of a surfboard.", "a surfer riding a large wave"]),
    ("two cats sleeping on a couch next to each other", ["Two cats are asleep on the couch."]),
    ("a a a a a dog dog dog", ["a dog", "a dog and a dog"]),
    ("", ["A bowl of soup on a table.", "soup"]),
    ("soup", ["A bowl of soup on a table.", "soup"]),
    ("A plate with two slices of pizza, a fork, and a glass of red wine on a white table cloth in the restaurant by the sea where we sat",
     ["pizza and wine", "A plate of pizza with a glass of wine on a table."]),
    ("...", ["!!", "a street sign that says 'STOP'"]),
    ("A man's T-shirt says \"3.14\" & more", ["A man's t-shirt with the number 3.14 .", "the man's shirt - a number on it"]),
    ("ein Hund läuft am Strand", ["Ein Hund läuft am Strand entlang.", "Ein brauner HUND am Strand"]),
    ("A dog is running on the beach.", ["A dog is running on the beach."]),
    ("a train on the tracks\nnear a station", ["A train on tracks near the station", "a train", "a train on the tracks near a station"]),
]

# An answer and those of several people to a question.
QUESTIONS = [
    ("2", ["2"] * 10),
    ("two", ["2"] * 10),
    ("Two", ["2"] * 7 + ["3"] * 3),
    ("3", ["2"] * 7 + ["3"] * 3),
    ("three", ["2"] * 8 + ["3"] * 2),
    ("4", ["2"] * 9 + ["4"]),
    ("5", ["2"] * 9 + ["4"]),
    ("The red one!", ["red one"] * 3 + ["red 1"] * 4 + ["red"] * 3),
    ("a dog", ["dog"] * 5 + ["a dog"] * 5),
    ("dog", ["A dog"] * 10),
    ("dont know", ["don't know"] * 6 + ["dont know"] * 4),
    ("don't know", ["don't know"] * 10),
    ("couldntve", ["couldn't've"] * 9 + ["x"]),
    ("couldn'tve", ["couldn't've"] * 9 + ["x"]),
    ("somebody'd", ["somebodyd"] * 3 + ["somebody'd"] * 7),
    ("1,000", ["1000"] * 4 + ["1,000"] * 6),
    ("1,000 - 2,000", ["1000 2000"] * 4 + ["1000  2000"] * 6),
    ("black/white", ["black white"] * 4 + ["black/white"] * 6),
    ("black / white", ["black white"] * 4 + ["black / white"] * 6),
    ("3.5 p.m.", ["3.5 pm"] * 4 + ["3.5 p.m."] * 6),
    (" \n yes\tit is \n", ["yes it is"] * 5 + ["yes"] * 5),
    ("t-shirt", ["t shirt"] * 5 + ["tshirt"] * 5),
    ("t-shirt -", ["t shirt"] * 5 + ["tshirt "] * 5),
    ("none", ["0"] * 5 + ["none"] * 5),
    ("", [""] * 5 + ["the"] * 5),
    ("." * 40, ["." * 40] * 5 + ["." * 8] * 5),
    ("what? (who)", ["what who"] * 2 + ["what  who "] * 2),
    ("٣,٤ x-y", ["٣٤ xy"] * 2 + ["٣,٤ x-y"] * 2),
    ("yes", ["yes", "yes"]),
    ("yes", ["yes", "no", "yes"]),
]

SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
     "required": ["name"], "additionalProperties": False},
    {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1, "uniqueItems": True,
     "$defs": {"node": {"anyOf": [{"type": "number", "exclusiveMaximum": 10, "multipleOf": 0.5},
                                  {"type": "array", "items": {"$ref": "#/$defs/node"}}]}}},
    {"enum": [1, "a", None, {"x": [1, 2.0]}]},
    {"const": {"a": 1, "b": [True]}},
    {"oneOf": [{"type": "integer"}, {"minimum": 5}]},
    {"not": {"type": "string"}, "allOf": [{"maximum": 3}, {"type": ["number", "null"]}]},
    {"type": "string", "pattern": "^a+b?$", "maxLength": 3},
    {"prefixItems": [{"type": "string"}, True], "items": False, "contains": {"const": 2}, "maxContains": 1},
    {"patternProperties": {"^x_": {"type": "integer"}}, "propertyNames": {"maxLength": 4}, "minProperties": 1, "maxProperties": 2},
    {"if": {"required": ["kind"]}, "then": {"required": ["size"]}, "else": {"required": ["name"]}},
    {"dependentSchemas": {"card": {"required": ["address"]}}},
    False,
]

DOCUMENTS = [
    {"name": "x", "age": 3}, {"name": "", "age": 3}, {"name": "x", "age": 3.0}, {"name": "x", "age": 3.5}, {"age": 1}, {"name": "x", "z": 1},
    [1.5, [2, [3]]], [10], [1, 1.0], [], [0.25], [[1], [1.0]], "a", "aab", "aaab", "b", 1, 1.0, 4, 5, 7.5, 2, 3, None, True,
    {"x": [1.0, 2]}, {"x": [1, 2, 3]}, {"b": [True], "a": 1}, {"b": [1], "a": 1}, ["s", 2], ["s", 2, 2], [2, 2], ["s"],
    {"x_a": 1}, {"x_a": "1"}, {"long_name": 1}, {"a": 1, "b": 2, "c": 3}, {}, {"kind": 1}, {"kind": 1, "size": 2}, {"card": 1},
    {"card": 1, "address": 2, "name": "y"}, "ää", "äöüß",
]


def sari_of_order(n, source, answer, references):
    """Keep F1, delete precision, add F1 of n-grams, the source and the answer counted once for each reference."""
    def grams(tokens):
        return Counter(tuple(tokens[at:at + n]) for at in range(len(tokens) - n + 1))

    def f1(precision, recall):
        return 2 * precision * recall / (precision + recall) if precision + recall else 0.0

    def share(part, whole):
        return part / whole if whole else 1.0

    times = len(references)
    source, answer = ({gram: count * times for gram, count in grams(tokens).items()} for tokens in (source, answer))
    source, answer = Counter(source), Counter(answer)
    wanted = sum((grams(tokens) for tokens in references), Counter())
    kept, keepable = source & answer, source & wanted
    good = kept & wanted
    keep = f1(share(sum(good[gram] / kept[gram] for gram in good), len(kept)), share(sum(good.values()), sum(keepable.values())))
    deleted = source - answer
    good = deleted - wanted
    delete = share(sum(good[gram] / deleted[gram] for gram in good), len(deleted))
    added, addable = set(answer) - set(source), set(wanted) - set(source)
    good = added & set(wanted)
    add = f1(share(len(good), len(added)), share(len(good), len(addable)))
    return keep, delete, add


def sari(source, answer, references):
    tokenize = Tokenizer13a()
    source, answer, *references = (tokenize(text.lower()).split(" ") for text in (source, answer, *references))
    return sum(sum(sari_of_order(n, source, answer, references)) for n in (1, 2, 3, 4)) / 12


class NoSynonyms:
    def synsets(self, word):
        return []


def meteor(answer, reference):
    words = [Tokenizer13a()(text.rstrip()).split() for text in (reference, answer)]
    return single_meteor_score(*words, wordnet=NoSynonyms())


def caption_words(text):
    words = Tokenizer13a()(text.lower().rstrip()).split()
    return [word for word in words if any(character not in string.punctuation for character in word)]


def captions():
    from pycocoevalcap.cider.cider import Cider

    texts = [[" ".join(caption_words(text)) for text in (answer, *references)] for answer, references in CAPTIONS]
    cider, of_rows = Cider().compute_score(
        {index: references for index, (_, *references) in enumerate(texts)}, {index: row[:1] for index, row in enumerate(texts)}
    )
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorers = {name: rouge_scorer.RougeScorer(kinds, use_stemmer=stem) for name, stem in (("plain", False), ("stem", True))}
    rows = []
    for (answer, references), score, (_, *words) in zip(CAPTIONS, of_rows, texts):
        row = dict(answer=answer, references=references, words=words, cider=float(score))
        for name, scorer in scorers.items():
            row[name] = {kind: float(score.fmeasure) for kind, score in scorer.score_multi(references, answer).items()}
        words = [Tokenizer13a()(text.rstrip()).split() for text in (answer, *references)]
        row["meteor"] = meteor_score(words[1:], words[0], wordnet=NoSynonyms())
        rows.append(row)
    return dict(rows=rows, cider=float(cider))


class Rows:
    """What vqaEval.py reads of a file of questions or of answers."""

    def __init__(self, rows):
        self.qa = dict(enumerate(rows))

    def getQuesIds(self):
        return list(self.qa)


def questions(path):
    with open(path, encoding="utf-8") as file:
        script = re.sub(r"^(\s*)print .*$", r"\1pass", file.read(), flags=re.MULTILINE)
    module = types.SimpleNamespace()
    exec(compile(script, path, "exec"), module.__dict__)
    people = [
        dict(question_type="", answer_type="", answers=[dict(answer=text, answer_id=place) for place, text in enumerate(answers)])
        for _, answers in QUESTIONS
    ]
    evaluation = module.VQAEval(Rows(people), Rows([dict(answer=answer) for answer, _ in QUESTIONS]), n=14)
    evaluation.evaluate()
    rows = [dict(answer=a, references=r, accuracy=evaluation.evalQA[index] / 100) for index, (a, r) in enumerate(QUESTIONS)]
    texts = sorted({text for answer, references in QUESTIONS for text in (answer, *references)})
    normalized = {text: evaluation.processDigitArticle(evaluation.processPunctuation(text)) for text in texts}
    contractions = {word: whole for word, whole in evaluation.contractions.items() if word == word.lower()}
    return dict(rows=rows, accuracy=evaluation.accuracy["overall"] / 100, normalized=normalized, contractions=contractions)


def write(out):
    os.makedirs(os.path.dirname(sys.argv[1]) or ".", exist_ok=True)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(out, file, ensure_ascii=False, indent=1)
        file.write("\n")


def main():
    if len(sys.argv) > 2:
        write(dict(captions=captions(), questions=questions(sys.argv[2])))
        return
    assert abs(100 * sari(*SARI[0]) - 26.953601953601954) < 1e-12
    rouge = {
        name: rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=stem)
        for name, stem in (("plain", False), ("stem", True))
    }
    pairs = []
    for answer, reference in PAIRS:
        pair = dict(prediction=answer, reference=reference)
        for name, scorer in rouge.items():
            scores = scorer.score(reference, answer)
            pair[name] = {kind: dict(p=float(s.precision), r=float(s.recall), f=float(s.fmeasure)) for kind, s in scores.items()}
        pair["sentence_bleu"] = sacrebleu.sentence_bleu(answer, [reference]).score
        pair["chrf"] = sacrebleu.sentence_chrf(answer, [reference]).score
        pair["chrf_pp"] = sacrebleu.sentence_chrf(answer, [reference], word_order=2).score
        pair["meteor"] = meteor(answer, reference)
        pairs.append(pair)
    answers, references = (list(side) for side in zip(*PAIRS))
    corpus = dict(
        bleu=sacrebleu.corpus_bleu(answers, [references]).score,
        chrf=sacrebleu.corpus_chrf(answers, [references]).score,
        chrf_pp=sacrebleu.corpus_chrf(answers, [references], word_order=2).score,
    )
    schemas = []
    for schema in SCHEMAS:
        validator = jsonschema.Draft202012Validator(schema)
        schemas.append(dict(schema=schema, fits=[validator.is_valid(document) for document in DOCUMENTS]))
    stemmer = PorterStemmer()
    out = dict(
        pairs=pairs,
        corpus=corpus,
        sari=[dict(source=s, answer=a, references=r, sari=sari(s, a, r)) for s, a, r in SARI],
        stems={word: stemmer.stem(word) for word in WORDS},
        documents=DOCUMENTS,
        schemas=schemas,
    )
    write(out)


if __name__ == "__main__":
    main()
