"""What is measured: pairs of times, differences of programs and of values, and the bars; no asserted times."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import bars, compare, measure, rewrite_cost
from experiments.benchmarks.fusers import Fuser, Work
from tests.experiments.benchmarks.benchmark_support import PROGRAMS, TINY, entry

# measuring


class FakeMachine:
    """A clock that moves only while work is done, and a log of who worked."""

    def __init__(self):
        self.time_ns = 0
        self.log = ""

    def clock(self):
        return self.time_ns

    def work(self, name, cost_ns):
        def call():
            self.log += name
            self.time_ns += next(cost_ns) if hasattr(cost_ns, "__next__") else cost_ns

        return call


def test_pairs_take_turns_and_alternate_who_is_first():
    machine = FakeMachine()
    sampling = measure.Sampling(tolerance=0.01, min_pairs=8)
    pairs, stopped = measure.sample_pairs(machine.work("A", 100), machine.work("B", 150), sampling, 1, machine.clock)
    assert machine.log == "AB" * measure.WARM_CALLS + "ABBA" * 4
    assert pairs == [(100, 150)] * 8 and stopped == "tolerance"
    ratio = measure.summarize(pairs, stopped)
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == (1.5, 1.5, 1.5, 8)


def noisy(seed):
    generator = np.random.default_rng(seed)
    while True:
        yield int(generator.integers(50, 150))


def test_sampling_goes_on_until_the_interval_is_narrow():
    machine = FakeMachine()
    sampling = measure.Sampling(tolerance=0.2, min_pairs=8, max_pairs=4000)
    calls = machine.work("A", noisy(0)), machine.work("B", noisy(1))
    pairs, stopped = measure.sample_pairs(*calls, sampling, 1e9, machine.clock)
    ratio = measure.summarize(pairs, stopped)
    assert stopped == "tolerance" and 8 < len(pairs) < 4000
    assert ratio.high - ratio.low <= 0.2 and ratio.low <= ratio.median <= ratio.high and ratio.q1 < ratio.q3


@pytest.mark.parametrize(("seconds", "most", "reason", "count"), [(0, 400, "time", 8), (1e9, 20, "pairs", 20)])
def test_sampling_stops_when_time_or_pairs_are_used_up(seconds, most, reason, count):
    machine = FakeMachine()
    sampling = measure.Sampling(tolerance=1e-9, min_pairs=8, max_pairs=most)
    calls = machine.work("A", noisy(0)), machine.work("B", noisy(1))
    pairs, stopped = measure.sample_pairs(*calls, sampling, seconds, machine.clock)
    assert (stopped, len(pairs)) == (reason, count)


def test_median_interval_is_the_textbook_one():
    # n = 20: 2 P(Binomial(20, 1/2) <= 5) = 0.0414, so the 6th and the 15th value
    assert measure.median_interval(range(1, 21)) == (6, 15)
    assert measure.median_interval(range(6)) == (0, 5)
    assert measure.median_interval(range(5)) is None
    assert measure.median_interval([]) is None
    # n/2 -+ 1.96 sqrt(n)/2 of the normal approximation, for more values than 2**n fits into a float
    low, high = measure.median_interval(range(3000))
    assert abs(low - (1500 - 53.7)) <= 2 and abs(high - (1500 + 53.7)) <= 2


def test_median_interval_covers_the_median():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = measure.median_interval(generator.exponential(size=25))
        covered += low <= math.log(2) <= high
    assert covered / 400 > 0.93  # 0.95 and more, less three standard errors of 400 trials


def test_too_few_pairs_are_refused():
    with pytest.raises(ValueError, match="too few"):
        measure.summarize([(1, 1)] * 7, "time")
    with pytest.raises(ValueError, match="min_pairs"):
        measure.Sampling(min_pairs=2)


def test_temporaries_come_from_the_memory_analysis():
    x = jnp.ones((64, 64))
    compiled = measure.compile_ahead(lambda x: jnp.tanh(x @ x) @ jnp.sin(x @ x.T), (x,))
    assert compiled.temporaries_bytes >= x.nbytes

    class Silent:
        def memory_analysis(self):
            return None

    with pytest.raises(RuntimeError, match="no memory analysis"):
        measure.temporaries_bytes(Silent())


# comparing


def hlo(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


def test_programs_are_identical_whatever_their_names_and_places():
    def one(x, w):
        return jnp.tanh(x @ w)

    def another(inputs, weights):
        product = jnp.dot(inputs, weights)
        return jnp.tanh(product)

    x = jnp.ones((8, 8))
    texts = hlo(one, x, x), hlo(another, x, x)
    assert texts[0] != texts[1]
    assert compare.canonical_hlo(texts[0]) == compare.canonical_hlo(texts[1])
    assert "tanh" in compare.canonical_hlo(texts[0]) and "metadata" not in compare.canonical_hlo(texts[0])
    assert compare.canonical_hlo(hlo(lambda x, w: jnp.tanh(w @ x), x, x)) != compare.canonical_hlo(texts[0])


def test_metadata_with_braces_in_a_name_is_removed():
    text = 'HloModule jit_f, is_scheduled=true\n\nENTRY %main.1 (x.1: f32[2]) -> f32[2] {\n' \
           '  ROOT %t = f32[2] tanh(%x.1), metadata={op_name="a{b}\\"c" stack_frame_id=3}, other={1}\n}\n'  # fmt: skip
    expected = "HloModule, is_scheduled=true\nENTRY %0 (f32[2]) -> f32[2] {\n  ROOT %1 = f32[2] tanh(%2), other={1}\n}"
    assert compare.canonical_hlo(text) == expected


def test_relative_difference():
    a = {"w": jnp.array([1.0, -4.0]), "b": jnp.array([2.0])}
    assert compare.relative_difference(a, a) == 0
    assert compare.relative_difference(a, {**a, "w": jnp.array([1.0, -3.0])}) == 0.25
    # a leaf of rounding noise is judged by the size of the tree, not by itself
    zeros = {**a, "b": jnp.array([1e-9])}
    assert compare.relative_difference(zeros, {**zeros, "b": jnp.array([-1e-9])}) < 1e-6
    # a missing value is not noise
    assert compare.relative_difference({**a, "b": jnp.array([0.01])}, {**a, "b": jnp.array([0.0])}) == pytest.approx(1)


@pytest.mark.parametrize("other", [[jnp.ones(3)], jnp.ones(2), jnp.ones(3, jnp.bfloat16), jnp.array([1, 1, jnp.nan])])
def test_differences_of_structure_and_of_non_finite_places_are_infinite(other):
    assert compare.relative_difference(jnp.ones(3), other) == math.inf


def test_equal_non_finite_places_agree():
    values = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf])
    assert compare.relative_difference(values, values) == 0
    assert compare.relative_difference(values, values.at[3].set(jnp.inf)) == math.inf


# bars


SLOW = {"median": 1.05, "low": 1.04, "high": 1.06, "q1": 1.0, "q3": 1.1, "pairs": 16, "stopped": "time"}
MORE = {"median_ns": 10, "compile_s": 1.0, "temporaries_bytes": 101}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"ratio": SLOW}, "1.050x"),
        ({"ratio": SLOW, "identical_program": True}, None),
        ({"fused": MORE}, "101 bytes"),
        ({"agrees": False, "max_relative_difference": 0.5}, "differs by 0.5"),
        ({"agrees": False, "max_relative_difference": None}, "structure"),
        ({"status": "failed", "error": "ValueError: no"}, "failed"),
    ],
)
def test_bars_of_a_program(changes, words):
    missed = bars.missed_by_program("mlp/forward", entry(**changes))
    assert (not missed) if words is None else (len(missed) == 1 and "mlp/forward" in missed[0] and words in missed[0])


def test_an_interval_that_holds_the_bar_is_named():
    assert not bars.undecided_by_program("k", entry())
    assert bars.undecided_by_program("k", entry(ratio={**SLOW, "low": 1.0}))


def test_bars_of_rewriting():
    fine = {"status": "measured", "fraction": 0.15, "second_calls": {"eager_step": {"traces": 1, "rewrites": 0}}}
    assert not bars.missed_by_rewriting("k", fine)
    assert "16.0%" in bars.missed_by_rewriting("k", {**fine, "fraction": 0.16})[0]
    assert bars.missed_by_rewriting("k", {**fine, "second_calls": {"eager_step": {"traces": 1, "rewrites": 1}}})
    assert bars.missed_by_rewriting("k", {**fine, "second_calls": {"jitted_step": {"traces": 1, "rewrites": 0}}})


def test_rewriting_is_what_fusing_adds_before_compilation():
    calls = {"eager_step": Work(2, 1) - Work(1, 1)}
    rounds = [
        rewrite_cost.Round(rewrite_cost.Stages(1.0, 1.0, 8.0), rewrite_cost.Stages(trace, 1.0))
        for trace in (1.5, 2.0, 9.0)
    ]
    result = rewrite_cost.summarize(rounds, calls)
    assert (result["jit_s"], result["rewriting_s"], result["fraction"]) == (10.0, 1.0, 0.1)
    assert result["fraction_extremes"] == [0.05, 0.8]
    assert result["second_calls"] == {"eager_step": {"traces": 1, "rewrites": 0}}
    with pytest.raises(ValueError, match="denominator"):
        rewrite_cost.Round(rewrite_cost.Stages(1.0, 1.0), rewrite_cost.Stages(1.0, 1.0))


def test_rewriting_is_counted_for_the_second_call_only():
    seen = []

    def fuse(target):
        def fused(*args):
            seen.append(target)
            return target(*args)

        return fused

    counting = Fuser("counting", fuse, lambda: Work(len(seen), len(seen)), lambda: None, lambda target, args: {})
    program = PROGRAMS["mlp"]
    calls = rewrite_cost.second_calls(program, *program.build(0, TINY), counting)
    one, none = Work(1, 1), Work(0, 0)
    assert calls == {"eager_forward": one, "eager_step": one, "jitted_step": none}
    result = rewrite_cost.measure_round(program, *program.build(0, TINY), counting, fused_first=True)
    assert result.unfused.compile_s is not None and result.fused.compile_s is None
