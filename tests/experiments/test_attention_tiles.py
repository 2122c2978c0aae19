"""Attention by the tiles of a property map beside the default's: the command, its file and its verdict."""

import json

import pytest
from rich.console import Console

from experiments.benchmarks.__main__ import main
from experiments.benchmarks.attention.tiles import missed
from gpu_probe import Property, PropertyMap

MAP = PropertyMap({"kind": "cpu", "name": "test"}, {"l2.size": Property(64, "KiB", "datasheet", "test")})


@pytest.mark.slow
def test_both_are_measured_side_by_side(tmp_path):
    MAP.save(tmp_path / "map.json")
    console = Console(record=True, width=200, force_terminal=False)
    words = ["attention", "--map", str(tmp_path / "map.json"), "--quick", "--lengths", "256", "--modes", "forward"]
    assert main([*words, "--output", str(tmp_path), "--budget", "5"], console) == 0
    (entry,) = json.loads((tmp_path / "attention_tiles.json").read_text())["entries"].values()
    assert entry["tiles"]["default"] != entry["tiles"]["map"] and entry["agrees"] and entry["ratio"]["pairs"] >= 16
    assert "tiles by the map of test against the default's" in console.export_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all", "--map", "h200"], "--map is for the study attention"),
        (["attention", "--map", "z80"], "expected a file, a folder that has map.json, or one of the"),
        (["attention", "--map", "h200", "--quick"], "--map: expected a map of a CPU"),
        (["attention", "--map", "h200", "--list"], "found 'h200' of kind cuda"),
        (["attention", "--list", "--lengths", "7"], "unknown length 7"),
    ],
)
def test_wrong_use(capsys, arguments, message):
    assert main(arguments, Console()) == 2 and message in capsys.readouterr().err


def test_slower_is_told_and_undecided_is_not():
    entry = {"status": "measured", "identical_program": False, "agrees": True}
    slow, unclear = ({"ratio": {"median": 1.1, "low": low, "high": 1.2}} for low in (1.05, 0.95))
    assert missed("k", entry | slow) == ["k: 1.100x the time of the default's tiles, allowed 1x"]
    assert missed("k", entry | unclear) == missed("k", entry | slow | {"identical_program": True}) == []
    assert missed("k", entry | unclear | {"agrees": False}) == ["k: values differ"]
    assert missed("k", {"status": "failed", "error": "E"}) == ["k: failed, E"]
