"""A data folder of a few records in the published files' formats, and the same records as the Hugging Face hub has them.

Both are written out by hand: what the hub's data sets look like is known from their pages, not from our converter.
"""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

WIKI = (
    " \n = First page = \n \n A line with words , and a hyphen @-@ ated one ( in brackets ) . \n \n = = Section = = \n \n"
    " He said \" yes \" at 1 @,@ 000 ° C . \n \n = Second page = \n \n The players ' game was lost 3 @.@ 5 to 2 ; it 's over . \n"
    " = = = Deep = = = \n"
)

HUB: dict[str, list[dict[str, Any]]] = {
    "wikitext": [
        {
            "page": " = First page = \n \n A line with words , and a hyphen @-@ ated one ( in brackets ) . \n \n"
            ' = = Section = = \n \n He said " yes " at 1 @,@ 000 ° C . \n '
        },
        {
            "page": " = Second page = \n \n The players ' game was lost 3 @.@ 5 to 2 ; it 's over . \n = = = Deep = = = \n"
        },
    ],
    "lambada_openai": [
        {"text": "She gave the café its name, and\n\nnobody but him called it café"},
        {"text": "The dog ran to its house."},
    ],
    "piqa": [
        {"goal": "To boil an egg", "sol1": "put it in hot water", "sol2": "put it in the sun", "label": 0},
        {"goal": "How do I open a jar?", "sol1": "With a hammer.", "sol2": "Turn the lid.", "label": 1},
    ],
    "hellaswag": [
        {
            "ind": 24,
            "activity_label": "Roof shingle removal",
            "ctx_a": "A man is sitting on a roof.",
            "ctx_b": "he",
            "ctx": "A man is sitting on a roof. he",
            "endings": ["is using wrap.", "is ripping tiles off.", "is holding a cube.", "starts pulling up roofing."],
            "source_id": "a",
            "split": "val",
            "split_type": "indomain",
            "label": "3",
        },
        {
            "ind": 25,
            "activity_label": "Home and Garden",
            "ctx_a": "[header] How to clean [title] Take a cloth. [step] Wipe the  table.",
            "ctx_b": "",
            "ctx": "[header] How to clean [title] Take a cloth. [step] Wipe the  table.",
            "endings": ["[substeps] Rinse it.", "Dry it [title] Then rest.", "Leave.", "Sit  down."],
            "source_id": "b",
            "split": "val",
            "split_type": "zeroshot",
            "label": "0",
        },
    ],
    "winogrande": [
        {
            "sentence": "Sarah was better than Maria so _ got the easier cases.",
            "option1": "Sarah",
            "option2": "Maria",
            "answer": "2",
        },
        {"sentence": "The cup broke the _  , it was hard.", "option1": "floor", "option2": "cup", "answer": "1"},
    ],
    "arc_easy": [
        {
            "id": "Mercury_1",
            "question": "Why does ice float?",
            "choices": {"text": ["It is light.", "It is cold.", "It is hard."], "label": ["A", "B", "C"]},
            "answerKey": "A",
        },
        {
            "id": "NYSEDREGENTS_2",
            "question": "Which is a star?",
            "choices": {"text": ["Moon", "Sun", "Mars", "Pluto"], "label": ["1", "2", "3", "4"]},
            "answerKey": "2",
        },
    ],
    "boolq": [
        {"question": "is water wet", "passage": "Water -- Water is a liquid.", "idx": 7, "label": 1},
        {"question": "is ice warm", "passage": "Ice -- Ice is frozen water.", "idx": 9, "label": 0},
    ],
    "openbookqa": [
        {
            "id": "8-343",
            "question_stem": "To save money one can",
            "choices": {"text": ["call", "cook", "buy", "lunch"], "label": ["A", "B", "C", "D"]},
            "answerKey": "B",
        },
        {
            "id": "8-344",
            "question_stem": "Plants need",
            "choices": {"text": ["light", "salt", "oil", "music"], "label": ["A", "B", "C", "D"]},
            "answerKey": "A",
        },
    ],
    "sciq": [
        {
            "question": "What takes electrons?",
            "distractor3": "salts",
            "distractor1": "metals",
            "distractor2": "acids",
            "correct_answer": "oxidants",
            "support": "  Oxidants take electrons. ",
        },
        {
            "question": "What is H2O?",
            "distractor3": "air",
            "distractor1": "iron",
            "distractor2": "sand",
            "correct_answer": "water",
            "support": "",
        },
    ],
}
HUB["arc_challenge"] = HUB["arc_easy"]


def write_small_data(folder: Path) -> Path:
    """The files, some of them packed, as they are published."""
    for name in ("eval", "lambada", "wikitext-2"):
        (folder / name).mkdir(parents=True)
    evaluation = folder / "eval"
    (folder / "wikitext-2/wiki.test.raw.xz").write_bytes(lzma.compress(WIKI.encode()))
    _lines(folder / "lambada/lambada_test.jsonl", HUB["lambada_openai"])
    piqa = [{k: r[k] for k in ("goal", "sol1", "sol2")} | {"id": str(i)} for i, r in enumerate(HUB["piqa"])]
    _lines(evaluation / "piqa_dev.jsonl", piqa)
    (evaluation / "piqa_dev-labels.lst").write_text("".join(f"{r['label']}\n" for r in HUB["piqa"]))
    packed = "".join(json.dumps(r) + "\n" for r in HUB["hellaswag"]).encode()
    (evaluation / "hellaswag_val.jsonl.gz").write_bytes(gzip.compress(packed))
    _lines(evaluation / "winogrande_xl_dev.jsonl", HUB["winogrande"])
    arc = [
        {
            "id": r["id"],
            "question": {
                "stem": r["question"],
                "choices": [
                    {"text": text, "label": label}
                    for text, label in zip(r["choices"]["text"], r["choices"]["label"], strict=True)
                ],
            },
            "answerKey": r["answerKey"],
        }
        for r in HUB["arc_easy"]
    ]
    _lines(evaluation / "ARC-Easy-Test.jsonl", arc)
    _lines(evaluation / "ARC-Challenge-Test.jsonl", arc)
    boolq = [{**r, "label": "true" if r["label"] else "false"} for r in HUB["boolq"]]
    _lines(evaluation / "boolq_superglue_val.jsonl", boolq)
    _lines(evaluation / "openbookqa_test.jsonl", HUB["openbookqa"])
    _lines(evaluation / "sciq_test.jsonl", HUB["sciq"])
    return folder


def _lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
