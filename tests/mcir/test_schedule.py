"""Tile sizes: what fits, what moves least, and what is refused."""

import dataclasses
import itertools

import pytest

from gpu_probe import Property, PropertyMap
from mcir.schedule import Hardware, ScheduleError, batch_axes, schedule
from tests.mcir.programs import attention, backward, moments

LARGE = dict(h=8, i=1024, j=1024, d=64, e=64, bh=1, bi=16, bj=16)


def block_sizes(program):
    return {a.name: a.block for a in program.axes}


@pytest.mark.parametrize("cache_bytes", [2**16, 2**18, 2**20, 2**25])
@pytest.mark.parametrize("step_bytes", [0, 2**16])
def test_nothing_that_fits_costs_less(cache_bytes, step_bytes):
    program = attention(**LARGE)
    chosen = schedule(program, Hardware("test", cache_bytes, step_bytes)).verify()
    assert chosen.peak_bytes() <= cache_bytes

    def cost(p):
        found = p.traffic()
        return found.dram.total + step_bytes * found.steps

    for h, i, j in itertools.product([1, 8], [16, 128, 512, 1024], [16, 128, 512, 1024]):
        other = program.with_blocks(h=h, i=i, j=j)
        assert other.peak_bytes() > cache_bytes or cost(other) >= cost(chosen)


def test_more_room_never_moves_more():
    program = attention(**LARGE)
    moved = [schedule(program, Hardware("test", 2**n)).traffic().dram.total for n in range(15, 26, 2)]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == program.traffic().compulsory.total


def test_powers_of_two_and_whole_axes():
    found = block_sizes(schedule(attention(h=6, i=1000, j=300, d=64, e=48), Hardware("test", 2**17)))
    assert (found["d"], found["e"]) == (64, 48)
    assert found["h"] in (1, 2, 4, 6)
    assert found["i"] in (16, 32, 64, 128, 256, 512, 1000)
    assert found["j"] in (16, 32, 64, 128, 256, 300)


def test_own_tile_sizes_do_not_matter_and_the_choice_is_always_the_same():
    hardware = Hardware("test", 2**18, 2**14)
    found = {str(schedule(attention(**(LARGE | blocks)), hardware)) for blocks in ({}, dict(bh=8, bi=64), dict(bj=512))}
    assert len(found) == 1


def test_of_equals_larger_blocks_of_the_nest():
    """Rows of a normalization move the same in any tiles."""
    assert block_sizes(schedule(moments(r=512, c=64), Hardware("test", 2**30)))["r"] == 512


def test_skipping_makes_small_tiles_worth_it():
    program = attention(-1e30, **LARGE)
    memory = schedule(program, Hardware("test", 2**25, 2**16))
    both = schedule(program, Hardware("test", 2**25, 2**16, flops_per_byte=1.0))
    assert both.traffic().flops < memory.traffic().flops
    assert both.traffic().dram.total >= memory.traffic().dram.total


def test_backward_fits():
    hardware = Hardware("test", 2**20, 2**14)
    assert schedule(backward(-1e30, **LARGE), hardware).verify().peak_bytes() <= 2**20


def test_batch_axes():
    assert batch_axes(attention()) == {"h"}
    assert batch_axes(backward(-1e30)) == {"h"}
    assert batch_axes(moments()) == {"r"}


def test_refusal_names_what_does_not_fit():
    message = (
        r"schedule\(attention\): expected at most 1,000 bytes on chip of tiny, found [\d,]+ with the smallest tiles "
        r"\(h = 1, i = 16, j = 16\), at statement \d+, `.*`; the largest value there is q1, 4,096 bytes"
    )
    with pytest.raises(ScheduleError, match=message):
        schedule(attention(**LARGE), Hardware("tiny", 1000))


def test_size_one_and_nothing():
    for size in (0, 1):
        program = attention(h=1, i=size, j=size, d=1, e=1, bi=1, bj=1)
        assert set(block_sizes(schedule(program, Hardware("test", 1000))).values()) == {1}


# -- hardware -------------------------------------------------------------------------------------------------------


def write_caches(folder, *caches):
    for n, (level, kind, size, cpus) in enumerate(caches):
        index = folder / f"index{n}"
        index.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", cpus)):
            (index / name).write_text(f"{text}\n")


def test_host_has_the_last_cache_shared_among_its_cores(tmp_path, monkeypatch):
    first = [(1, "Data", "32K", "0"), (1, "Instruction", "32K", "0")]
    write_caches(tmp_path, *first, (2, "Unified", "1M", "0-1"), (3, "Unified", "64M", "0-3,8-11"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    host = Hardware.host(tmp_path)
    assert (host.name, host.cache_bytes) == ("host (L3 cache)", 16 * 2**20)


def test_host_without_any_knowledge(tmp_path):
    (tmp_path / "index0").mkdir()
    assert Hardware.host(tmp_path).cache_bytes == Hardware.host(tmp_path / "nothing").cache_bytes == 4 * 2**20


def test_this_host():
    host = Hardware.host()
    assert host.cache_bytes >= 2**15
    assert schedule(attention(**LARGE)).peak_bytes() <= host.cache_bytes


def test_described_device():
    device = Hardware.from_properties({"name": "h200", "shared_memory_per_block_bytes": 227 * 1024, "step_bytes": 0})
    assert device == Hardware("h200", 227 * 1024, 0)
    assert schedule(attention(**LARGE), device).peak_bytes() <= 227 * 1024
    with pytest.raises(KeyError, match="expected shared_memory_per_block_bytes, found name"):
        Hardware.from_properties({"name": "h200"})
    assert dataclasses.replace(device, flops_per_byte=2.0).flops_per_byte == 2.0


# -- property maps --------------------------------------------------------------------------------------------------


def map_of(kind, **properties):
    values = {k.replace("__", "."): Property(*v, "datasheet", "test") for k, v in properties.items()}
    return PropertyMap({"kind": kind, "name": "test"}, values)


def test_a_map_of_a_cpu():
    found = Hardware.from_map(
        map_of(
            "cpu",
            l1__size=(32, "KiB"),
            l3__size=(4, "MiB"),
            dram__bw_copy=(20, "GB/s"),
            dram__bw_read=(40, "GB/s"),
            gemm__float32=(100, "GFLOP/s"),
            launch__loop_step=(10, "us"),
        ),
        Hardware("default", 1, 1, 1.0, 256, 512),
    )
    assert found == Hardware("test", 4 * 2**20, 200_000, 5.0, 256, 512)
    assert found.used == ("l3.size", "dram.bw_copy", "launch.loop_step", "gemm.float32") and not found.missing
    assert schedule(attention(**LARGE), found).peak_bytes() <= 4 * 2**20


def test_a_map_of_a_gpu():
    found = Hardware.from_map(PropertyMap.load("h200"))
    assert found.cache_bytes == 232448 and found.flops_per_byte == pytest.approx(494.7e12 / 4.8e12)
    assert found.used == ("smem.max_per_block", "dram.bw", "tensor.tensorfloat32")
    assert schedule(attention(**LARGE), found).peak_bytes() <= 232448


def test_what_a_map_lacks_is_assumed_and_named():
    default = Hardware("default", 2**20, 2**16, 8.0, 16, 32)
    found = Hardware.from_map(map_of("cpu"), default)
    assert found == dataclasses.replace(default, name="test")
    assert found.missing == (
        "l3.size or l2.size or l1.size",
        "dram.bw_copy or dram.bw_read or dram.bw",
        "launch.loop_step",
    )
    zero = Hardware.from_map(map_of("cpu", dram__bw=(1, "B/s"), launch__loop_step=(0, "s")), default)
    assert zero.step_bytes == default.step_bytes and "launch.loop_step" in zero.missing
    assert Hardware.from_map(map_of("cpu")).cache_bytes == Hardware.host().cache_bytes
