"""The sweep itself: every cell that is not finished yet, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from experiments.lr_sweep import data as data_lib
from experiments.lr_sweep import gradients, train
from experiments.lr_sweep import model as model_lib
from experiments.lr_sweep.config import Cell, SweepConfig
from experiments.lr_sweep.store import CellResult, Results

Fuse = Callable[[model_lib.MLP], model_lib.MLP]


class _Programs:
    """Compiled functions, made once: cells that differ only in inputs share trainers, cells of one dtype a comparer."""

    def __init__(self, config: SweepConfig, fuse: Fuse):
        self._config = config
        self.models = {dtype: model_lib.build(config, dtype) for dtype in config.dtypes}
        self.applies = {dtype: (model.apply, fuse(model).apply) for dtype, model in self.models.items()}
        self.comparers = {dtype: gradients.make_comparer(config, *pair) for dtype, pair in self.applies.items()}
        self.trainers = functools.lru_cache(maxsize=1)(self._make_trainers)

    def _make_trainers(self, optimizer: str, dtype: str) -> tuple[Callable, Callable]:
        unfused, fused = (train.make_trainer(self._config, optimizer, apply) for apply in self.applies[dtype])
        return unfused, fused


def run(config: SweepConfig, fuse: Fuse, finished: Results) -> Iterator[tuple[Cell, CellResult]]:
    """Train the cells that `finished` lacks; yields each with its result as soon as it is done."""
    missing = [cell for cell in config.cells() if cell not in finished]
    if not missing:
        return
    indices = data_lib.batch_indices(config)
    programs = _Programs(config, fuse)
    for cell in missing:
        yield cell, _run_cell(config, cell, programs, indices)


def _run_cell(config: SweepConfig, cell: Cell, programs: _Programs, indices: np.ndarray) -> CellResult:
    data = data_lib.load(cell.inputs, config.seed)
    variables = model_lib.init(programs.models[cell.dtype], config.seed)
    unfused_trainer, fused_trainer = programs.trainers(cell.optimizer, cell.dtype)
    unfused, visited = train.run_trainer(unfused_trainer, config, variables, data, indices)
    fused, _ = train.run_trainer(fused_trainer, config, variables, data, indices)
    comparer = programs.comparers[cell.dtype]
    gradient = gradients.run_comparer(comparer, config, cell.dtype, visited, data, indices, unfused)
    return CellResult(unfused, fused, gradient)
