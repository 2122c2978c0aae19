"""Property maps: what they hold, what they refuse, how they are kept and compared."""

import json
import pickle
import re

import pytest

from gpu_probe import MapError, Property, PropertyMap, shipped, units
from gpu_probe.compare import against_system, compare
from gpu_probe.vocabulary import known
from tests.gpu_probe.maps import cpu_map, measured

SIZES = {"l1__size": measured(32, "KiB", (32, 48)), "dram__bw": Property(10, "GB/s", "datasheet", "paper, page 1")}


def test_a_value_is_given_in_any_unit_of_its_dimension():
    found = cpu_map(**SIZES)
    assert found.get("l1.size", "B") == 32768 and found.get("dram.bw", "B/s") == 1e10
    assert found.get("l2.size", "B") is None
    assert found.first(("l3.size", "l1.size"), "KiB") == ("l1.size", 32.0)
    with pytest.raises(ValueError, match="expected one of bytes like 'KiB', found 's'"):
        found.get("l1.size", "s")
    with pytest.raises(KeyError, match=r"l9\.size: not in the property map of test, which has dram\.bw, l1\.size"):
        found["l9.size"]


def test_written_and_read_back_it_is_equal(tmp_path):
    found = cpu_map(**SIZES)
    found.save(tmp_path / "deep" / "map.json")
    again = PropertyMap.load(tmp_path / "deep" / "map.json")
    assert again == found and hash(again) == hash(found) and pickle.loads(pickle.dumps(found)) == found
    assert again["l1.size"].interval == (32, 48) and again != cpu_map()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["map.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": float("nan")}, "value=...): expected a finite number, found nan"),
        ({"unit": "furlong"}, "unit=...): expected one of s, ms"),
        ({"source": "hearsay"}, "source=...): expected one of measured, datasheet, derived, found 'hearsay'"),
        ({"method": ""}, "method=...): expected how the value was found"),
        ({"interval": (2, 3)}, "interval=...): expected low <= 1 <= high, found (2, 3)"),
        ({"probes": ()}, "probes=...): expected the probes of a measured value, found none"),
    ],
)
def test_a_property_that_says_too_little_cannot_be_made(change, message):
    right = {"value": 1, "unit": "s", "source": "measured", "method": "m", "probes": ("p",)}
    with pytest.raises(MapError, match=re.escape(message)):
        Property(**(right | change))


def test_a_map_that_says_too_little_cannot_be_made():
    with pytest.raises(MapError, match="device: expected kind, found none"):
        PropertyMap({"name": "x"}, {})
    with pytest.raises(MapError, match=r"l1.size: expected a unit like B, found s"):
        cpu_map(l1__size=measured(1, "s"))
    with pytest.raises(MapError, match=r"gemm.float32: expected a unit like FLOP/s, found B/s"):
        cpu_map(gemm__float32=measured(1, "B/s"))
    for name, unit in (("dram__bw_copy", "B/s"), ("gemm__float32", "FLOP/s"), ("l2__size", "B"), ("l1__latency", "ns")):
        with pytest.raises(MapError, match=f"{name.replace('__', '.')}: expected a value above 0, found 0"):
            cpu_map(**{name: measured(0, unit)})
    assert len(cpu_map(launch__loop_step=measured(0, "s"), my__own=measured(0, "s"))) == 2
    assert len(cpu_map(my__own=measured(1, "s"))) == 1  # names of the user's own are as free as their units


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON, found text that is none"),
        ('{"schema": 99}', "expected an object of schema 1, found 99"),
        (
            '{"schema": 1, "device": {"kind": "cpu", "name": "x"}}',
            "expected an object 'properties', found only device, schema",
        ),
        ('{"schema": 1, "device": "cpu", "properties": {}}', "device: expected an object, found 'cpu'"),
        (
            '{"schema": 1, "device": {"kind": "tpu", "name": "x"}, "properties": {}}',
            "device.kind: expected cpu or cuda, found 'tpu'",
        ),
        (
            '{"schema": 1, "device": {"kind": "cpu", "name": "x"}, "properties": {"l1.size": {"value": 1}}}',
            "l1.size: expected unit, source, method too, found only value",
        ),
        (
            '{"schema": 1, "device": {"kind": "cpu", "name": "x"}, "properties": {"l1.size": {"value": 1, "size": 2}}}',
            "l1.size: expected an object with interval, method, probes, source, unit, value",
        ),
    ],
)
def test_a_file_that_is_no_map_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "map.json"
    path.write_text(text)
    with pytest.raises(MapError, match=f"property map {re.escape(str(path))}.*{re.escape(message)}"):
        PropertyMap.load(path)


def test_a_folder_of_a_run_is_its_map(tmp_path):
    PropertyMap.load("h200").save(tmp_path / "map.json")
    assert PropertyMap.load(tmp_path).name == PropertyMap.load("h200").name


def test_a_name_that_is_not_shipped_is_refused():
    with pytest.raises(MapError, match="one of the shipped maps a100, h100, h200, found 'z80'"):
        PropertyMap.load("z80")


def test_a_folder_without_a_map_is_refused_as_one(tmp_path):
    with pytest.raises(MapError, match=r"a folder that has map\.json, .* found the folder '.*' without it"):
        PropertyMap.load(tmp_path)


@pytest.mark.parametrize("name", shipped())
def test_shipped_maps_say_where_each_value_is_from(name):
    found = PropertyMap.load(name)
    assert found.kind == "cuda" and name in found.name.lower()
    for p in found.properties.values():
        assert p.source in ("datasheet", "derived", "measured") and len(p.method) > 10
    assert all(known(n) is not None for n in found)
    assert found.get("dram.size", "B") == {"h200": 141e9}.get(name, 80e9) and "decimal" in found["dram.size"].method
    assert found.get("smem.max_per_block", "B") == {"a100": 166912}.get(name, 232448)


def test_units_print_in_the_largest_that_fits():
    shown = [(3e-9, "s"), (32768, "B"), (2e12, "FLOP/s"), (0, "s"), (7, "count"), (4096, "FLOP/clk/SM")]
    expected = ["3 ns", "32 KiB", "2 TFLOP/s", "0 ns", "7", "4096 FLOP/clk/SM"]
    assert [units.text(*x) for x in shown] == expected


# -- two maps -------------------------------------------------------------------------------------------------------


def agreement(a, b):
    return {d.name: d.agrees for d in compare(a, b)}


def test_intervals_that_meet_agree():
    a = cpu_map(dram__latency=measured(100, "ns", (90, 110)), x=measured(1, "s"), y=measured(1, "s"))
    b = cpu_map(dram__latency=measured(0.115, "us", (0.105, 0.12)), x=measured(2, "s"), y=measured(1, "s"))
    assert agreement(a, b) == {"dram.latency": True, "x": None, "y": True}
    assert agreement(a, cpu_map(dram__latency=measured(130, "ns", (120, 140))))["dram.latency"] is False
    assert agreement(a, cpu_map())["dram.latency"] is None


def test_sizes_agree_within_a_class():
    a = cpu_map(l2__size=measured(1, "MiB"))
    found = [agreement(a, cpu_map(l2__size=measured(n, "KiB")))["l2.size"] for n in (256, 512, 768, 2048, 4096)]
    assert found == [False, True, True, True, False]


def test_values_that_nobody_measured_agree_only_where_they_are_equal():
    stated = {n: cpu_map(dram__size=Property(n, "B", "datasheet", "paper")) for n in (141e9, 140e9, 80e9)}
    found = [agreement(stated[141e9], other)["dram.size"] for other in stated.values()]
    assert found == [True, True, False]
    assert agreement(stated[80e9], cpu_map(dram__size=measured(141e9, "B")))["dram.size"] is True


def test_measured_caches_against_those_of_the_system():
    device = {
        "kind": "cpu",
        "name": "x",
        "caches": [{"level": n, "bytes": 2**b, "line_bytes": 64} for n, b in ((1, 15), (2, 20))],
    }
    found = PropertyMap(device, {"l1.size": measured(48, "KiB"), "line.size": measured(512, "B")})
    assert [(d.name, d.agrees) for d in against_system(found)] == [
        ("l1.size", True),
        ("line.size", False),
        ("l2.size", None),
    ]


def test_a_map_is_plain_json():
    text = json.dumps(cpu_map(**SIZES).as_dict())
    assert PropertyMap.from_dict(json.loads(text)) == cpu_map(**SIZES)
