"""Stage 3: patterns are data, a regular expression over fingerprints; matching decides nothing about speed or legality.

A pattern is a sequence of bit tests with quantifiers. It is matched along the chain of consumers that starts at its
anchor::

    Pattern("gemm_epilogue", [GEMM, star(CAST | LAYOUT), opt(BIAS), ACTIVATION], rewrite=ops.gemm_epilogue)

Every node but the last must be safe (its only consumer is the next in the chain); a chain that fits but for that is
reported as a near miss. `NearMiss` rows name further sequences that resemble the pattern and must be left alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags, describe
from aicf_jax.graph import Graph, Node

#: Chains are followed no further than this.
MAX_CHAIN = 32

_SAFE = int(OpFlags.SAFE_NODE)
#: Nodes a chain may enter by any operand: symmetric ones, and products (jax.nn puts the attention weights second).
_EITHER_OPERAND = int(OpFlags.IS_SCALE | OpFlags.IS_JOIN | OpFlags.IS_GEMM_LIKE)
_ELEMENTWISE = int(OpFlags.IS_ELEMENTWISE)


@dataclasses.dataclass(frozen=True)
class Test:
    """A bit test. `alternatives` holds ``(require, forbid)`` pairs, any of which may hold.

    Attributes:
      quantifier: ``"one"``, ``"opt"`` (zero or one) or ``"star"`` (any number).
      shared: the node's value may have other users; it becomes a further output of the fused operation.
    """

    alternatives: tuple[tuple[int, int], ...]
    quantifier: str = "one"
    shared: bool = False

    def __post_init__(self) -> None:
        if self.quantifier not in ("one", "opt", "star"):
            raise ValueError(f"Test(quantifier=...): expected 'one', 'opt' or 'star', found {self.quantifier!r}")
        if not self.alternatives:
            raise ValueError("Test(alternatives=...): expected at least one (require, forbid) pair, found none")

    def __or__(self, other: Test) -> Test:
        return Test(self.alternatives + other.alternatives)

    def accepts(self, flags: int) -> bool:
        """``(flags & require) == require and not flags & forbid`` for one of the alternatives."""
        return any(flags & require == require and not flags & forbid for require, forbid in self.alternatives)

    def __str__(self) -> str:
        text = " or ".join(describe(r) for r, _ in self.alternatives)
        return {"one": text, "opt": f"[{text}]", "star": f"({text})*"}[self.quantifier]


def test(require: OpFlags, forbid: OpFlags = OpFlags.NONE) -> Test:
    """A test for nodes with all bits of `require` and none of `forbid`."""
    return Test(((int(require), int(forbid | OpFlags.IS_NOP | OpFlags.IS_FUSED)),))


def opt(inner: Test) -> Test:
    """Zero or one."""
    return dataclasses.replace(inner, quantifier="opt")


def star(inner: Test) -> Test:
    """Any number, as many as possible."""
    return dataclasses.replace(inner, quantifier="star")


def shared(inner: Test) -> Test:
    """The node's value may be used elsewhere too."""
    return dataclasses.replace(inner, shared=True)


GEMM = test(OpFlags.IS_GEMM_LIKE)
BATCHED_GEMM = test(OpFlags.IS_GEMM_LIKE | OpFlags.IS_BATCHED)
UNBATCHED_GEMM = test(OpFlags.IS_GEMM_LIKE, OpFlags.IS_BATCHED)
BIAS = test(OpFlags.IS_BIAS)
ACTIVATION = test(OpFlags.IS_ACTIVATION)
ALMOST_ACTIVATION = test(OpFlags.IS_NEAR_ACTIVATION)
SCALE = test(OpFlags.IS_SCALE)
CAST = test(OpFlags.IS_CAST)
LAYOUT = test(OpFlags.IS_LAYOUT)
TRANSPOSE = test(OpFlags.IS_TRANSPOSE)
JOIN = test(OpFlags.IS_JOIN)
ACTIVATION_GRAD = test(OpFlags.IS_ACTIVATION_GRAD)
REDUCTION = test(OpFlags.IS_REDUCTION)
ELEMENTWISE = test(OpFlags.IS_ELEMENTWISE, OpFlags.IS_NEAR_SOFTMAX | OpFlags.HAS_EFFECT)
BROADCAST = test(OpFlags.IS_BROADCAST)
MASK = test(OpFlags.IS_MASK)
SOFTMAX = test(OpFlags.IS_SOFTMAX, OpFlags.IS_UNNORMALIZED)
SOFTMAX_WEIGHTS = test(OpFlags.IS_SOFTMAX | OpFlags.IS_UNNORMALIZED)
NEAR_SOFTMAX = test(OpFlags.IS_NEAR_SOFTMAX)
NORMALIZE = test(OpFlags.IS_NORMALIZE)
LAYER_NORM = test(OpFlags.IS_NORMALIZATION | OpFlags.IS_CENTERED)
RMS_NORM = test(OpFlags.IS_NORMALIZATION, OpFlags.IS_CENTERED)
BATCH_NORM = test(OpFlags.IS_BATCH_NORM)
NEAR_LAYER_NORM = test(OpFlags.IS_NEAR_NORM | OpFlags.IS_CENTERED)
NEAR_RMS_NORM = test(OpFlags.IS_NEAR_NORM, OpFlags.IS_CENTERED)
RESIDUAL = test(OpFlags.IS_RESIDUAL)
SLICE = test(OpFlags.IS_SLICE)
GATE = test(OpFlags.IS_GATE)
NEAR_GATE = test(OpFlags.IS_NEAR_GATE)
CONV = test(OpFlags.IS_CONV)
AFFINE = test(OpFlags.IS_AFFINE)
NEAR_AFFINE = test(OpFlags.IS_NEAR_AFFINE)
CROSS_ENTROPY = test(OpFlags.IS_CROSS_ENTROPY)
NEAR_CROSS_ENTROPY = test(OpFlags.IS_NEAR_CROSS_ENTROPY)


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A sequence that resembles a pattern and is not it.

    Attributes:
      code, expected, found: of the refusal. Without `expected`, the attributes of these names of the last node of the
        chain that has them are used, so that normal forms can describe what they saw.
      sequence: tests along the chain, as in a pattern.
      fork: the last node's consumers must include one for each of these tests (other than each other).
      operand: the last node must have another operand that is computed by a node passing this test.
      whole: the chain is left exactly as written. Otherwise shorter patterns with the same `rewrite` may get a part.
    """

    code: str
    sequence: tuple[Test, ...]
    expected: str | None = None
    found: str | None = None
    fork: tuple[Test, ...] = ()
    operand: Test | None = None
    whole: bool = True


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A named sequence of tests and the operation it is promoted to.

    Attributes:
      name: unique among the patterns in use; `Fusion.pattern` and `Refusal.pattern`.
      sequence: tests; one must be ``"one"``, those before it are ``"opt"``. The first node of a chain is its anchor.
      rewrite: the `SemanticOp` that takes the nodes' place.
      near_misses: sequences to refuse by name.
      rules: normalization rules of its own (`normalize.Rule`), which see canonical nodes that the package does not
        know. They run with the package's, in the order of all their `order`.

    A chain with a near miss is left exactly as written: shorter patterns with the same `rewrite` do not get it either,
    but where the `NearMiss` says so.
    """

    name: str
    sequence: tuple[Test, ...]
    rewrite: Any
    near_misses: tuple[NearMiss, ...] = ()
    rules: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.sequence, Test):
            raise TypeError(f"Pattern({self.name!r}, sequence=...): expected a sequence of tests, found a single one")
        object.__setattr__(self, "sequence", tuple(self.sequence))
        object.__setattr__(self, "near_misses", tuple(self.near_misses))
        object.__setattr__(self, "rules", tuple(self.rules))
        wrong = [r for r in self.rules if not callable(getattr(r, "apply", None))]
        if wrong:
            raise TypeError(f"Pattern({self.name!r}, rules=...): expected Rule objects, found {wrong[0]!r}")
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"Pattern(name=...): expected a non-empty string, found {self.name!r}")
        bad = [t for t in self.sequence if not isinstance(t, Test)]
        if bad or not self.sequence:
            raise TypeError(f"Pattern({self.name!r}, sequence=...): expected Test objects, found {bad or 'none'}")
        before = self.sequence[: self.prefix]
        if len(before) == len(self.sequence) or any(t.quantifier == "star" for t in before):
            raise ValueError(f"Pattern({self.name!r}): one test cannot be optional, and no star may stand before it")
        if not hasattr(self.rewrite, "attributes"):
            raise TypeError(f"Pattern({self.name!r}, rewrite=...): expected a SemanticOp, found {self.rewrite!r}")

    @functools.cached_property
    def prefix(self) -> int:
        """Number of optional tests before the first that is not."""
        return next((k for k, t in enumerate(self.sequence) if t.quantifier == "one"), len(self.sequence))

    @functools.cached_property
    def _starts(self) -> tuple[Test, ...]:
        firsts = (row.sequence[0] for row in self.near_misses)
        return tuple(dict.fromkeys((*self.sequence[: self.prefix + 1], *firsts)))

    def starts_at(self, flags: int) -> bool:
        """Whether a chain, or one that resembles it, may start at a node with these flags."""
        return any(t.accepts(flags) for t in self._starts)


@dataclasses.dataclass(frozen=True)
class Match:
    """Positions of the matched nodes, in chain order.

    `absorbed` nodes become part of the operation too, but stay where they are for whoever else needs them.
    """

    pattern: Pattern
    graph: Graph
    positions: tuple[int, ...]
    absorbed: tuple[int, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.graph.nodes[i] for i in self.positions)

    @property
    def all_nodes(self) -> tuple[Node, ...]:
        """Matched and absorbed nodes in order of execution."""
        inside = {*self.positions, *self.absorbed}
        order = self.positions if not self.absorbed else [i for i in self.graph.order if i in inside]
        return tuple(self.graph.nodes[i] for i in order)

    def first(self, flag: OpFlags) -> Node | None:
        """The first matched node with a static flag."""
        return next((n for n in self.nodes if n.flags & flag), None)

    @property
    def site(self) -> str:
        return self.graph.site(self.nodes[-1])


def chains(graph: Graph, sequence: Sequence[Test], start: int, safe: bool = True) -> Iterator[tuple[int, ...]]:
    """All ways to lay a sequence along the consumers of `start`, greedy ones first."""
    rarest, viable = _viable(graph, sequence)
    stack: list[tuple[int, int, tuple[int, ...]]] = [(0, start, ())]
    # Where many ways lead to a place from which none leads on, it is explored once: `ends` counts what was found (and
    # what was cut off) when a place was entered, and nothing more when it is left makes it dead.
    dead: set[tuple[int, ...]] = set()
    ends = 0
    while stack:
        k, i, path = stack.pop()
        if k < 0:
            if i == ends:
                dead.add(path)
            continue
        if k == len(sequence):
            ends += 1
            yield path
            continue
        if (k, i) in dead:
            continue
        element = sequence[k]
        options: list[tuple[int, int, tuple[int, ...]]] = []
        if i >= 0 and ((k, i) in viable if k <= rarest else element.accepts(graph.flag_list[i])):
            stack.append((-1, ends, (k, i)))
            if len(path) < MAX_CHAIN:
                here = (*path, i)
                n = k if element.quantifier == "star" else k + 1
                if n < len(sequence):
                    options.extend((n, j, here) for j in _next(graph, i, safe and not element.shared))
                options.append((n, -1, here))
            else:
                ends += 1
        if element.quantifier != "one":
            options.append((k + 1, i, path))
        stack.extend(reversed(options))


def _viable(graph: Graph, sequence: Sequence[Test]) -> tuple[int, set[tuple[int, int]]]:
    """``(k, pairs)``: the element fewest nodes pass, and the ``(element, node)`` up to it that can lead to one.

    Most programs have many products and few softmaxes: from those the way back is short, and most anchors are not on
    it.
    """
    known = graph.viable.get(id(sequence))
    if known is not None:
        return known[1:]
    required = [k for k, t in enumerate(sequence) if t.quantifier == "one"]
    if any(not graph.passing(sequence[k].alternatives) for k in required):
        rarest, todo = len(sequence), []
    else:
        rarest = min(required, key=lambda k: len(graph.passing(sequence[k].alternatives)))
        todo = [(rarest, i) for i in graph.passing(sequence[rarest].alternatives)]
    found, flags, producer = set(todo), graph.flag_list, graph.producer
    while todo:
        k, i = todo.pop()
        before = _elements_before(sequence, k)
        for p in {int(producer[v]) for v in graph.nodes[i].inputs}:
            for j in before if p >= 0 else ():
                if (j, p) not in found and sequence[j].accepts(flags[p]):
                    found.add((j, p))
                    todo.append((j, p))
    # The sequence is kept with what was found: an id is only meaningful while its object lives.
    graph.viable[id(sequence)] = (sequence, rarest, found)
    return rarest, found


def _elements_before(sequence: Sequence[Test], k: int) -> list[int]:
    """Elements that the node before one at element `k` can stand at."""
    found = [k] if sequence[k].quantifier == "star" else []
    for j in range(k - 1, -1, -1):
        found.append(j)
        if sequence[j].quantifier == "one":
            break
    return found


def _next(graph: Graph, i: int, safe: bool) -> list[int]:
    """Consumers a chain may go on to: those whose main input is the node's value."""
    if safe and not graph.flag_list[i] & _SAFE:
        return []
    out = set(graph.nodes[i].outputs)
    main = []
    for j in graph.consumers(i):
        node = graph.nodes[j]
        if node.inputs[0] in out or node.flags & _EITHER_OPERAND or _is_only_operand(graph, node):
            main.append(j)
    return main


def _is_only_operand(graph: Graph, node: Node) -> bool:
    """Whether an elementwise node has one operand besides scalars: ``1 - x`` runs through x as ``x - 1`` does."""
    if not node.flags & _ELEMENTWISE or len(node.inputs) == 1:
        return False
    return len({v for v in node.inputs if graph.values[v].aval.ndim}) == 1


def match(graph: Graph, pattern: Pattern, start: int) -> Match | None:
    """The pattern at this anchor, None when it does not fit."""
    if not pattern.starts_at(graph.flag_list[start]):
        return None
    for path in chains(graph, pattern.sequence, start):
        return Match(pattern, graph, path)
    return None


def near_miss(graph: Graph, pattern: Pattern, start: int) -> tuple[Refusal | None, bool]:
    """Why a chain that resembles the pattern is not it (None: nothing resembles it), and whether it is left whole."""
    if not pattern.starts_at(graph.flag_list[start]):
        return None, True
    unsafe = max(chains(graph, pattern.sequence, start, safe=False), key=len, default=())
    for row in pattern.near_misses:
        for path in chains(graph, row.sequence, start):
            if _applies(graph, row, path, unsafe):
                return _refusal(graph, pattern, row, path), row.whole
    return _unsafe(graph, pattern, unsafe), True


def _applies(graph: Graph, row: NearMiss, path: tuple[int, ...], unsafe: tuple[int, ...]) -> bool:
    last = graph.nodes[path[-1]]
    if row.operand is not None:
        producers = {int(graph.producer[v]) for v in last.inputs} - set(path)
        if not any(p >= 0 and row.operand.accepts(graph.flag_list[p]) for p in producers):
            return False
    if row.fork and any(row.fork[0].accepts(graph.flag_list[i]) for i in unsafe):
        return False  # the pattern itself goes through the first branch; the trouble is the second user
    users = graph.consumers(path[-1])
    return all(any(t.accepts(graph.flag_list[u]) for u in users) for t in row.fork)


def _refusal(graph: Graph, pattern: Pattern, row: NearMiss, path: tuple[int, ...]) -> Refusal:
    nodes = [graph.nodes[i] for i in path]
    node = nodes[-1] if row.expected else next((n for n in reversed(nodes) if n.attr("code")), nodes[-1])
    code = row.code if row.expected else node.attr("code", row.code)
    expected = row.expected or node.attr("expected", str(pattern.sequence[-1]))
    found = row.found or node.attr("found", node.op)
    detail = f"resembles {pattern.name}, is left as written: {found}"
    return Refusal(pattern.name, "match", code, detail, expected, found, graph.site(node))


def _unsafe(graph: Graph, pattern: Pattern, path: tuple[int, ...]) -> Refusal | None:
    for i in path[:-1]:
        flags = graph.flag_list[i]
        if flags & OpFlags.SAFE_NODE:
            continue
        node = graph.nodes[i]
        if not flags & OpFlags.ESCAPES and set(graph.consumers(i)) <= set(path):
            continue  # several consumers, all of them in the chain
        if flags & OpFlags.ESCAPES:
            code, found = "escapes", f"the result of {node.op} is also a result of the program"
        else:
            code, found = "multiple_consumers", f"{len(graph.consumers(i))} consumers of {node.op}"
        detail = f"fusing would compute {node.op} twice or hide a value that is needed"
        expected = f"{node.op} is used by the next operation only"
        return Refusal(pattern.name, "match", code, detail, expected, found, graph.site(node))
    return None
