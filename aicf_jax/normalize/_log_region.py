"""The values around an ``exp`` that depend on one value x and row constants, each with its form (`_log_forms`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import jax.numpy as jnp

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import constant, is_float
from aicf_jax.normalize._log_forms import LOG, Form, Guard
from aicf_jax.normalize._log_rules import RULES
from aicf_jax.normalize._region import Region
from aicf_jax.normalize.bias import broadcast_source

#: Regions are grown no further than this; jax's own masked softmax has 20 equations.
REGION_EQUATIONS = 40

_HAS_EFFECT = int(OpFlags.HAS_EFFECT)


class LogRegion(Region):
    """Forms are those of the log domain (`_log_forms`)."""

    def __init__(self, graph: Graph, x: int, axis: int):
        aval = graph.values[x].aval
        # Coefficients are literals rounded to the type they are used in; low precision ones are compared as float32.
        self.tolerance = 4 * float(jnp.finfo(jnp.promote_types(aval.dtype, jnp.float32)).eps)
        super().__init__(graph, x)
        self.axis, self.shape = axis, aval.shape
        self.forms: dict[int, Form] = {x: Form(LOG, 1.0, {}, tuple(range(len(aval.shape))))}
        self._guards: dict[int, Guard] = {}
        self.masks: dict[int, tuple[Hashable, int, tuple[int, ...]]] = {}
        self._grow(REGION_EQUATIONS)

    # -- forms ------------------------------------------------------------------------------------------
    def _add(self, position: int) -> bool:
        node = self.graph.nodes[position]
        rule = RULES.get(node.op)
        if rule is None or len(node.covers) != 1 or len(node.outputs) != 1 or node.flags & _HAS_EFFECT:
            return False
        form = rule(self, node)
        if isinstance(form, Guard):
            self._guards[node.outputs[0]] = form
        elif form is not None and self._fits(form, node.outputs[0]):
            self.forms[node.outputs[0]] = form
        else:
            return False
        return True

    def _is_inside(self, vid: int) -> bool:
        return vid in self.forms or vid in self._guards

    def _fits(self, form: Form, vid: int) -> bool:
        """Row constants may have any shape, functions of x that of x, its dimensions perhaps exchanged."""
        if not form.slope:
            return True
        if None in form.dims or len(set(form.dims)) != len(self.shape):
            return False
        return self.graph.values[vid].aval.shape == tuple(self.shape[d] for d in form.dims if d is not None)

    def operand(self, vid: int) -> Form | float | None:
        """A form, a number, or None for any other value."""
        form = self.forms.get(vid)
        return form if form is not None else constant(self.graph, vid)[0]

    def operands(self, node: Node) -> list[Form | float | None]:
        """Both operands of a node; a value from elsewhere is a term where it is constant along the other's axis."""
        found = [self.operand(v) for v in node.inputs]
        for k, v in enumerate(node.inputs):
            other = found[1 - k]
            if found[k] is None and isinstance(other, Form) and other.slope:
                found[k] = self._term(v, other)
        return found

    def _term(self, vid: int, beside: Form) -> Form | None:
        if self.graph.values[vid].aval.ndim not in (0, len(self.shape)) or not is_float(self.graph, vid):
            return None
        _, varying, _ = broadcast_source(self.graph, vid)
        if beside.dims.index(self.axis) in varying:
            return None
        return Form(
            LOG, 0.0, {("value", vid): 1.0}, tuple(d if i in varying else None for i, d in enumerate(beside.dims))
        )

    def mask(self, vid: int) -> Hashable:
        """A name for a predicate: equal for two broadcasts of the same value in the same way."""
        steps: list[Hashable] = []
        covers: list[int] = []
        source = vid
        while (position := int(self.graph.producer[source])) >= 0:
            node = self.graph.nodes[position]
            if node.op not in ("broadcast_in_dim", "reshape") or len(node.covers) != 1 or len(node.inputs) != 1:
                break
            steps.append((self.graph.values[source].aval.shape, str(self.graph.eqn(node.covers[0]).params)))
            covers.extend(node.covers)
            source = node.inputs[0]
        self.masks[vid] = ((source, *steps), source, tuple(covers))
        return self.masks[vid][0]

    def surroundings(self, members: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """``(inputs, covers)``: what members read besides forms, and their equations with those of constants."""
        inputs: dict[int, None] = {}
        covers: set[int] = set()
        for p in members:
            covers.update(self.graph.nodes[p].covers)
            for v in self.graph.nodes[p].inputs:
                if v in self.forms or v in self._guards or self.graph.values[v].kind == "literal":
                    continue
                number, more = constant(self.graph, v)
                if number is None and v in self.masks:
                    _, source, more = self.masks[v]
                    inputs[source] = None
                elif number is None:
                    inputs[v] = None
                covers.update(more)
        return tuple(inputs), tuple(sorted(covers))

    def guard(self, vid: int) -> Guard | None:
        return self._guards.get(vid)
