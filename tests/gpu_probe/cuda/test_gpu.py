"""`Gpu` on a driver that is not there: what it asks of cuda-core, in which order and with what."""

import types

import numpy as np
import pytest

from gpu_probe.cuda.gpu import Address, Clock, Fill, Gpu
from gpu_probe.probe import DeviceError
from gpu_probe.probes.cuda_launch import Nothing
from gpu_probe.probes.cuda_occupancy import Stream

NAMES = (
    "multiprocessor_count",
    "l2_cache_size",
    "max_shared_memory_per_block_optin",
    "max_shared_memory_per_multiprocessor",
    "reserved_shared_memory_per_block",
    "max_threads_per_multiprocessor",
    "max_blocks_per_multiprocessor",
    "max_registers_per_multiprocessor",
)


class Driver:
    """As much of cuda-core and its bindings as is used, with host memory for the device's."""

    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="smem")

    def __init__(self, free=1 << 20):
        self.log, self.free = [], free
        self.compute_capability, self.device_id = (9, 0), 0
        self.properties = types.SimpleNamespace(**dict.fromkeys(NAMES, 132))

    # the device and its stream
    def create_stream(self):
        return self

    def allocate(self, size, stream):
        self.log.append(("allocate", size))
        return types.SimpleNamespace(handle=4096)

    def sync(self):
        self.log.append(("sync",))

    def record(self, options):
        self.log.append(("record", options.timing_enabled))
        return Event(self)

    def create_graph_builder(self):
        return Builder(self)

    # the driver
    def cuMemGetInfo(self):
        return 0, self.free, 1 << 30

    def cuMemcpyHtoD(self, address, host, size):
        self.log.append(("write", address, size))
        return (0,)

    def cuMemcpyDtoH(self, host, address, size):
        self.log.append(("read", address, size))
        return (0,)

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        self.log.append((attribute, value))
        return (0,)

    # cuda-core
    EventOptions = staticmethod(lambda timing_enabled: types.SimpleNamespace(timing_enabled=timing_enabled))

    def LaunchConfig(self, grid, block, shmem_size):
        return grid, block, shmem_size

    def launch(self, stream, config, kernel, *arguments):
        self.log.append(("launch", kernel.name, config, arguments, stream is self))

    @property
    def ObjectCode(self):
        occupancy = types.SimpleNamespace(max_active_blocks_per_multiprocessor=lambda block, smem: 7)
        kernel = lambda name: types.SimpleNamespace(name=name, handle="kernel", occupancy=occupancy)  # noqa: E731
        return types.SimpleNamespace(from_cubin=lambda cubin, name: types.SimpleNamespace(get_kernel=kernel))


class Event:
    """Each is 2 ms later than the one before."""

    def __init__(self, driver):
        self.sync, self.at = driver.sync, sum(entry[0] == "record" for entry in driver.log)

    def __sub__(self, other):
        return 2.0 * (self.at - other.at)


class Builder:
    def __init__(self, driver):
        self.driver = driver

    def begin_building(self):
        self.driver.log.append(("begin",))

    def end_building(self):
        self.driver.log.append(("end",))
        return self

    def complete(self):
        return self

    def upload(self, stream):
        self.driver.log.append(("upload", stream is self.driver))

    def launch(self, stream):
        self.driver.log.append(("graph", stream is self.driver))


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def gpu(driver):
    made = Gpu(driver, driver, driver)
    made.compile = lambda template: types.SimpleNamespace(cubin=b"")
    driver.log.clear()
    return made


def test_facts_are_those_of_the_driver(gpu):
    assert gpu.arch == "sm_90a" and gpu.facts["compute_capability"] == "9.0" and gpu.facts["sm_count"] == 132


def test_a_launch_passes_addresses_and_whole_numbers_in_their_width(gpu, driver):
    memory = gpu.allocate(64)
    gpu.launch(Stream(), 2, 128, (memory, Address(8192), 3))
    name, kernel, config, arguments, in_stream = driver.log[-1]
    assert (name, kernel, config, in_stream) == ("launch", "probe_occupancy_loads1", (2, 128, 0), True)
    assert [type(a) for a in arguments] == [np.uint64, np.uint64, np.uint32] and list(arguments) == [4096, 8192, 3]


def test_more_shared_memory_is_asked_for(gpu, driver):
    gpu.launch(Nothing(), 1, 1, (), 48 << 10)
    assert ("smem", 48 << 10) not in driver.log
    gpu.launch(Nothing(), 1, 1, (), 64 << 10)
    assert ("smem", 64 << 10) in driver.log and gpu.resident_blocks(Nothing(), 128, 64 << 10) == 7


def test_random_memory_is_made_once_and_shared(gpu, driver):
    first = gpu.random(1024)
    assert gpu.random(512) is first and gpu.random(1024, keep=1) is not first
    launches = [entry for entry in driver.log if entry[0] == "launch"]
    assert [kernel for _, kernel, *_ in launches] == [Fill().name] * 2 and launches[0][3][1] == 256
    assert gpu.random(2048) is not first


def test_memory_that_is_not_there_is_not_asked_for(gpu, driver):
    with pytest.raises(DeviceError, match="needs 1,048,576 bytes of device memory, 1,048,576 are free"):
        gpu.allocate(1 << 20)
    assert driver.log == []


def test_copies_wait_for_what_was_launched(gpu, driver):
    memory = gpu.allocate(64)
    gpu.write(memory, np.arange(4, dtype=np.uint64))
    assert gpu.read(memory, 2, np.uint32).dtype == np.uint32
    assert driver.log[1:] == [("sync",), ("write", 4096, 32), ("sync",), ("read", 4096, 8)]


def test_time_is_that_between_two_events(gpu, driver):
    assert gpu.seconds(lambda: gpu.launch(Nothing(), 1, 1)) == pytest.approx(2e-3)
    assert [entry[0] for entry in driver.log] == ["record", "launch", "record", "sync"]


def test_a_graph_is_built_once_and_launched_in_the_stream(gpu, driver):
    go = gpu.graph(lambda on: gpu.launch(Nothing(), 1, 1, on=on))
    go()
    go()
    assert [entry[0] for entry in driver.log] == ["begin", "launch", "end", "upload", "graph", "graph"]
    assert driver.log[1][-1] is False  # on the graph and not in the stream


def test_the_clock_is_cycles_over_time(gpu, driver, monkeypatch):
    monkeypatch.setattr(gpu, "read", lambda memory, count, dtype: np.array([340_000, 200_000], dtype))
    assert gpu.clock_hz() == pytest.approx(1.7e9) and driver.log[-1][1] == Clock().name


def test_what_the_driver_refuses_is_said(gpu, driver):
    driver.cuMemcpyDtoH = lambda *arguments: (types.SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS"),)
    with pytest.raises(DeviceError, match="the CUDA driver says CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu.read(gpu.allocate(64), 1, np.uint64)
