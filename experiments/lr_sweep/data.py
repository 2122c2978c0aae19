"""scikit-learn's bundled digits: 1797 images of 8x8 pixels with values 0..16, ten classes. Nothing is downloaded."""

from __future__ import annotations

import dataclasses

import numpy as np
from sklearn.datasets import load_digits

from experiments.lr_sweep.config import TRAIN_EXAMPLES, SweepConfig

NUM_FEATURES = 64
NUM_CLASSES = 10
PIXEL_MAX = 16.0


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Host arrays: features float32 (n, 64), labels int32 (n,), for training and for testing."""

    train_features: np.ndarray
    train_labels: np.ndarray
    test_features: np.ndarray
    test_labels: np.ndarray


def load(inputs: str, seed: int) -> Dataset:
    """Digits, split by `seed` (the split does not depend on `inputs`) and scaled as `inputs` says.

    "unscaled": pixels as they are, 0..16. "unit": x / 16. "standardized": (x - mean) / std per pixel, with the
    statistics of the training part; pixels that never change there are only centred.
    """
    features, labels = load_digits(return_X_y=True)
    order = np.random.default_rng([seed, 0]).permutation(len(features))
    train, test = order[:TRAIN_EXAMPLES], order[TRAIN_EXAMPLES:]
    if inputs == "unit":
        features = features / PIXEL_MAX
    elif inputs == "standardized":
        std = features[train].std(axis=0)
        features = (features - features[train].mean(axis=0)) / np.where(std > 0, std, 1.0)
    features, labels = features.astype(np.float32), labels.astype(np.int32)
    return Dataset(features[train], labels[train], features[test], labels[test])


def batch_indices(config: SweepConfig) -> np.ndarray:
    """Training examples of every step, int32 (steps, batch_size): shuffled epochs, the last partial batch dropped."""
    rng = np.random.default_rng([config.seed, 1])
    batches_per_epoch = TRAIN_EXAMPLES // config.batch_size
    epochs = -(-config.steps // batches_per_epoch)
    used = batches_per_epoch * config.batch_size
    order = np.concatenate([rng.permutation(TRAIN_EXAMPLES)[:used] for _ in range(epochs)])
    return order.reshape(-1, config.batch_size)[: config.steps].astype(np.int32)
