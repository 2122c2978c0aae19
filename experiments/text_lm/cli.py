"""Command line: arguments, progress, exit codes."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import aicf_jax
from experiments._arguments import ConfigError
from experiments._progress import Progress
from experiments.text_lm import config as config_lib
from experiments.text_lm import corpus as corpus_lib
from experiments.text_lm import report, sampling, train
from experiments.text_lm.config import TextConfig
from experiments.text_lm.corpus import Corpus
from experiments.text_lm.results import summarize_run
from experiments.text_lm.store import Store
from experiments.text_lm.train import VARIANTS, Trainer

EXIT_PASSED, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_EPILOG = """exit codes: 0 fused and unfused learn alike; 1 their losses or gradients differ by more than rounding
explains; 2 an argument is unusable; 130 interrupted, run again to resume."""
_HELP = {
    "sequence": "characters of a training window",
    "width": "width of the model",
    "layers": "blocks of the model",
    "heads": "attention heads, a divisor of width",
    "batch": "windows a step",
    "steps": "optimizer steps",
    "learning_rate": "peak learning rate",
    "warmup": "steps over which it rises",
    "weight_decay": "of adamw",
    "seed": "decides files, initial parameters, batches and texts",
    "corpus_bytes": "size of the text that is read",
    "eval_every": "steps between two validation losses",
    "eval_batches": "batches of a validation loss",
    "gradient_steps": "first steps in which gradients are compared",
    "save_every": "steps between two checkpoints",
    "samples": "texts to write at the end",
    "sample_length": "characters of each",
    "temperature": "how freely they are drawn",
}


def parser() -> argparse.ArgumentParser:
    """Arguments. A flag that is not given leaves the default of the configuration (or of --quick)."""
    default = TextConfig()
    top = argparse.ArgumentParser(
        prog="python -m experiments.text_lm",
        description="Train a character-level GPT on Python's standard library, fused and unfused, side by side.",
        epilog=_EPILOG,
    )
    for name, text in _HELP.items():
        value = getattr(default, name)
        options: dict[str, Any] = {"type": type(value), "metavar": "X" if isinstance(value, float) else "N"}
        top.add_argument(f"--{name.replace('_', '-')}", help=f"{text} (default: {value})", **options)
    folder = Path("results") / "text_lm"
    output_help = "folder of results (default: %(default)s)"
    top.add_argument("--output", type=Path, default=folder, metavar="DIR", help=output_help)
    top.add_argument("--quick", action="store_true", help="a small model for some seconds; flags still count")
    top.add_argument("--fresh", action="store_true", help="train again and replace the results")
    return top


def parse(argv: Sequence[str] | None) -> tuple[TextConfig, argparse.Namespace]:
    """Arguments to a configuration; exits with code 2 and the reason if that is impossible."""
    top = parser()
    arguments = top.parse_args(argv)
    given = {name: getattr(arguments, name) for name in _HELP if getattr(arguments, name) is not None}
    try:
        return dataclasses.replace(config_lib.quick() if arguments.quick else TextConfig(), **given), arguments
    except ConfigError as error:
        top.exit(EXIT_USAGE, f"{top.prog}: --{error.argument.replace('_', '-')}: {error.reason}\n")


def main(
    argv: Sequence[str] | None = None,
    *,
    fuse: Callable | None = None,
    explain: Callable | None = None,
    console: Console | None = None,
) -> int:
    """Run the command; returns the exit code. `fuse` and `explain` default to those of `aicf_jax`."""
    config, arguments = parse(argv)
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    if fuse is None:
        fuse, explain = aicf_jax.fuse, aicf_jax.explain
    try:
        corpus = corpus_lib.load(config)
    except RuntimeError as error:
        print(f"python -m experiments.text_lm: {error}", file=sys.stderr)
        return EXIT_USAGE
    store = Store(arguments.output, config, corpus, f"{fuse.__module__}.{fuse.__qualname__}")
    record = None if arguments.fresh else store.load_results()
    if record is None:
        try:
            record = run(config, corpus, store, fuse, explain, arguments.fresh, console)
        except KeyboardInterrupt:
            tell(console, "interrupted: run the same command again to resume after the last checkpoint")
            return EXIT_INTERRUPTED
        store.save_results(record)
    else:
        for note in (*store.notes, f"finished already ({store.results_path}); --fresh trains again"):
            tell(console, note)
    conclude(record, console)
    picture = report.plot(record, arguments.output / report.FILE_NAME)
    tell(console, f"wrote {store.results_path} and {picture}")
    return EXIT_PASSED if record["verdict"]["passed"] else EXIT_FAILED


def tell(console: Console, text: str) -> None:
    """A line as it is: texts hold brackets, and a log has no edge to wrap at."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def run(
    config: TextConfig,
    corpus: Corpus,
    store: Store,
    fuse: Callable,
    explain: Callable | None,
    fresh: bool,
    console: Console,
) -> dict[str, Any]:
    """Trains what is missing and writes the texts; the record of the run."""
    model = train.build(config, len(corpus.vocabulary))
    applies = {"unfused": model.apply, "fused": fuse(model).apply}
    states = train.initial_states(config, model)
    fusions = None if explain is None else count_fusions(config, model, states, explain)
    batches = corpus_lib.batches(config, corpus.train, config.steps, train.TRAIN_STREAM)
    validation = corpus_lib.batches(config, corpus.validation, config.eval_batches, train.VALIDATION_STREAM)
    resumed = None if fresh else store.load_checkpoint(states)
    for note in store.notes:
        tell(console, note)
    trainer = Trainer(config, applies, states, batches, validation)
    if resumed is not None:
        trainer.states, trainer.history = resumed
    start = len(trainer.history.losses)
    if start:
        tell(console, f"resumed after step {start} of {config.steps} ({store.checkpoint_path})")
    train_with_progress(config, trainer, store, start, console)
    record = summarize_run(config, len(corpus.vocabulary), trainer.history, trainer.steps, fusions)
    texts = {name: sampling.generate(config, corpus, applies[name], trainer.states[name][0]) for name in VARIANTS}
    return record | {"samples": texts}


def train_with_progress(config: TextConfig, trainer: Trainer, store: Store, start: int, console: Console) -> None:
    """Runs the trainer: a bar on a terminal, a line for each validation loss, a checkpoint now and then."""
    told = len(trainer.history.validation)
    with Progress("text_lm", config.steps, console, done=start) as progress:
        for done in trainer.run():
            losses = trainer.history.losses[-1]
            progress.advance(f"step {done}, loss {losses[1]:.3f}")
            if len(trainer.history.validation) > told:
                told = len(trainer.history.validation)
                _, unfused, fused = trainer.history.validation[-1]
                shown = f"training {losses[0]:.4f} | {losses[1]:.4f}, validation {unfused:.4f} | {fused:.4f}"
                progress.note(f"step {done}/{config.steps}: unfused | fused: {shown}")
            if done % config.save_every == 0 or done == config.steps:
                store.save_checkpoint(trainer.states, trainer.history)


def count_fusions(config: TextConfig, model: Any, states: dict[str, Any], explain: Callable) -> dict[str, int]:
    """The fused operations that `explain` sees in the model, by name; nothing is run."""
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32)
    found = explain(model, states["unfused"][0], tokens).fusions
    return dict(sorted(collections.Counter(fusion.op for fusion in found).items()))


def conclude(record: dict[str, Any], console: Console) -> None:
    """Table, what was fused at all, texts, verdict."""
    console.print(report.table(record))
    lines = [*report.sample_lines(record), *record["verdict"]["lines"]]
    if (fused := report.fusion_line(record["fusions"])) is not None:
        lines.insert(0, fused)
    for line in lines:
        tell(console, line)
