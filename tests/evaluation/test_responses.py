"""The log of answers."""

from __future__ import annotations

import json

from efla.evaluation.responses import ResponseLog, remove_responses


def test_a_log_of_answers_survives_a_cut_at_any_place(tmp_path):
    path = tmp_path / "a" / "log.jsonl"
    log = ResponseLog(path, {"model": "m"})
    log.add([("kind", ("x", 1), [-1.5, True]), ("kind", ("y",), 2.0)])
    log.add([("other", ("x", 1), 0.1 + 0.2)])
    whole = path.read_bytes()
    assert json.loads(whole.splitlines()[0]) == {"responses_of": {"model": "m"}}
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in sorted({0, 1, *(end + step for end in ends for step in (-3, 0, 1))}):
        path.write_bytes(whole[:cut])
        read = ResponseLog(path, {"model": "m"})
        lines = max(0, whole[:cut].count(b"\n") - 1)
        assert len(read) == lines
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: 1 + lines])
    assert (read.get("kind", ("x", 1)), read.get("kind", ("y",)), read.get("other", ("x", 1))) == (
        [-1.5, True],
        2.0,
        0.1 + 0.2,
    )
    assert read.get("kind", ("z",)) is None
    path.write_bytes(whole.replace(b"[", b"{", 2))  # a damaged line in the middle is dropped, the rest stays
    assert len(ResponseLog(path, {"model": "m"})) == 2
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[i] for i in (0, 2, 3))
    other = path.with_name("other")
    other.write_text("")
    remove_responses(path)
    remove_responses(path)
    assert list(path.parent.iterdir()) == [other]
    remove_responses(other)
    assert not path.parent.exists()
