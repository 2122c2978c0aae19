"""The text: source files of Python's standard library, which every Python brings along. Nothing is downloaded."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from experiments.text_lm.config import TextConfig

# Not the library itself: what users installed into it, and its tests.
EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
VALIDATION_PART = 0.1
SEPARATOR = b"\n\n"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Characters as numbers, int32: position in `vocabulary`, which holds every character of both parts, sorted.

    `digest` changes when the text does; `files` counts the sources it is made of.
    """

    train: np.ndarray
    validation: np.ndarray
    vocabulary: bytes
    files: int
    digest: str

    def encode(self, text: bytes) -> np.ndarray:
        """Characters to int32 numbers. Raises ValueError for one that the corpus does not have."""
        unknown = sorted(set(text) - set(self.vocabulary))
        if unknown:
            raise ValueError(f"text: expected characters of the corpus, found {bytes(unknown)!r}; remove them")
        return _table(self.vocabulary)[np.frombuffer(text, np.uint8)]

    def decode(self, tokens: np.ndarray) -> str:
        """Numbers to text."""
        return bytes(self.vocabulary[token] for token in tokens).decode("ascii")


def load(config: TextConfig, folder: Path | None = None) -> Corpus:
    """Reads `corpus_bytes` of the `*.py` below `folder` (the standard library), in an order drawn by the seed.

    Only files that are pure ASCII, so that a byte is a character. The last tenth, whole files, is for validation.

    Raises RuntimeError when there is not that much text.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    texts, size = [], 0
    for text in _texts(folder, config.seed):
        texts.append(text[: config.corpus_bytes - size])
        size += len(texts[-1])
        if size >= config.corpus_bytes:
            break
    else:
        raise RuntimeError(
            f"corpus_bytes: expected {config.corpus_bytes} bytes of ASCII Python sources in the standard library, "
            f"found {size}; lower it, or use a Python that ships its sources"
        )
    train, validation = _split(texts, config.sequence + 1)
    vocabulary = bytes(sorted(set(train) | set(validation)))
    table = _table(vocabulary)
    return Corpus(
        table[np.frombuffer(train, np.uint8)],
        table[np.frombuffer(validation, np.uint8)],
        vocabulary,
        len(texts),
        hashlib.sha256(train + b"\0" + validation).hexdigest()[:16],
    )


def _texts(folder: Path, seed: int) -> Iterator[bytes]:
    """ASCII sources: sorted by name (the order of a file system is nobody's choice), then shuffled by the seed."""
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    paths = [path for path in paths if not EXCLUDED & set(path.parts)]
    for index in np.random.default_rng([seed, 0]).permutation(len(paths)):
        text = (folder / paths[index]).read_bytes()
        if text and text.isascii():
            yield text


def _split(texts: list[bytes], window: int) -> tuple[bytes, bytes]:
    """Whole files to each part; a single file, or a part below two windows, is cut by length instead."""
    total = sum(map(len, texts))
    count, held = 0, 0
    while held < VALIDATION_PART * total:
        count += 1
        held += len(texts[-count])
    train, validation = SEPARATOR.join(texts[:-count]), SEPARATOR.join(texts[-count:])
    if len(train) >= total / 2 and len(validation) >= 2 * window:
        return train, validation
    text = SEPARATOR.join(texts)
    cut = len(text) - max(2 * window, int(VALIDATION_PART * total))
    return text[:cut], text[cut:]


def _table(vocabulary: bytes) -> np.ndarray:
    table = np.zeros(256, np.int32)
    table[np.frombuffer(vocabulary, np.uint8)] = np.arange(len(vocabulary), dtype=np.int32)
    return table


def batches(config: TextConfig, text: np.ndarray, count: int, stream: int) -> np.ndarray:
    """`count` batches of random windows of `text`, int32 (count, batch, sequence + 1).

    `stream` separates uses of one seed: equal seeds and streams draw equal windows.
    """
    starts = np.random.default_rng([config.seed, stream]).integers(
        0, len(text) - config.sequence, (count, config.batch)
    )
    return text[starts[..., None] + np.arange(config.sequence + 1)]
