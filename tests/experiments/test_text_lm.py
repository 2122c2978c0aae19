"""The text model: corpus, bounds, resume, verdict and command line; `fuse` is injected, no time is asserted."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

import aicf_jax
from experiments._arguments import ConfigError
from experiments.text_lm import agreement, cli, corpus, report, results, sampling, train
from experiments.text_lm.config import PROMPT_LENGTH, TextConfig, quick
from experiments.text_lm.store import Store
from tests.experiments.command_support import help_of

FLAGS = ("--quick", "--steps", "9", "--save-every", "2", "--eval-every", "4", "--samples", "1", "--sample-length", "8")
SMALL = dataclasses.replace(quick(), steps=9, save_every=2, eval_every=4, samples=1, sample_length=8)


def identity(module):
    return module


class Reassociated:
    """A rightly fused model that sums in another order: the hidden units of each feed-forward layer change places."""

    def __init__(self, module):
        self._module = module

    def apply(self, variables, tokens):
        params = dict(variables["params"])
        for name in [name for name in params if name.startswith("Block")]:
            block = dict(params[name])
            up, down = block["Dense_0"], block["Dense_1"]
            block["Dense_0"] = {key: value[..., ::-1] for key, value in up.items()}
            block["Dense_1"] = {"kernel": down["kernel"][::-1], "bias": down["bias"]}
            params[name] = block
        return self._module.apply({"params": params}, tokens)


class WrongGradient:
    """A "fused" model with the right values and gradients 1% too large."""

    def __init__(self, module):
        self._module = module

    def apply(self, variables, tokens):
        y = self._module.apply(variables, tokens)
        return y + 0.01 * (y - jax.lax.stop_gradient(y))


def command(folder, *flags, fuse=identity, **options):
    """Run the command in this process; (exit code, what it printed)."""
    out = io.StringIO()
    console = Console(file=out, width=200, soft_wrap=True)
    code = cli.main([*FLAGS, *flags, "--output", str(folder)], fuse=fuse, console=console, **options)
    return code, out.getvalue()


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Programs here run a few times, and compiling them is what takes the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def trainers():
    """Runs with the same `fuse` share one compiled trainer."""
    made = {}

    def trainer(config, applies, states, *data):
        key = type(applies["fused"].__self__)
        if key not in made:
            made[key] = train.Trainer(config, applies, states, *data)
        made[key].states, made[key].history = states, train.History()
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "Trainer", trainer)
        yield


@pytest.fixture(scope="module")
def variables(text):
    """Initial variables of the small model."""
    return train.initial_states(SMALL, train.build(SMALL, len(text.vocabulary)))["fused"][0]


@pytest.fixture(scope="module")
def text():
    return corpus.load(SMALL)


@pytest.fixture(scope="module")
def reassociated(tmp_path_factory):
    """The record of an uninterrupted run of `Reassociated`."""
    folder = tmp_path_factory.mktemp("reassociated")
    assert command(folder, fuse=Reassociated)[0] == 0
    return json.loads((folder / "results.json").read_text())["results"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The small run, once, truly fused: (folder, exit code, output)."""
    folder = tmp_path_factory.mktemp("text_lm")
    return folder, *command(folder, fuse=aicf_jax.fuse, explain=aicf_jax.explain)


# configuration


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("sequence", 8, f"an integer >= {PROMPT_LENGTH + 1}"),
        ("heads", 3, "a divisor of width 128"),
        ("steps", 0, "an integer >= 1"),
        ("warmup", 120, "an integer from 0 to 119"),
        ("gradient_steps", 0, "an integer from 1 to 120"),
        ("sample_length", 1000, "an integer from 1 to 992"),
        ("corpus_bytes", 100, "an integer >= 20500"),
        ("learning_rate", -1.0, "a positive finite number"),
        ("temperature", math.nan, "a positive finite number"),
        ("weight_decay", -0.1, "a number >= 0"),
        ("seed", True, "an integer from 0"),
    ],
)
def test_config_names_argument_expected_found_and_remedy(argument, value, expected):
    with pytest.raises(ConfigError) as caught:
        TextConfig(**{argument: value})
    message = str(caught.value)
    assert message.startswith(f"{argument}: expected {expected}") and "found " in message and "; " in message


# corpus


def test_corpus_is_the_standard_library_and_always_the_same(text):
    again = corpus.load(SMALL)
    assert again.digest == text.digest and again.vocabulary == text.vocabulary
    assert corpus.load(dataclasses.replace(SMALL, seed=1)).digest != text.digest
    whole = text.decode(text.train) + text.decode(text.validation)
    assert "import " in whole and "def " in whole and whole.isascii()
    assert abs(len(whole) - SMALL.corpus_bytes) < 4 * text.files
    assert 0.05 < len(text.validation) / len(whole) < 0.5
    np.testing.assert_array_equal(text.encode(b"def "), text.encode(b"def f")[:4])
    with pytest.raises(ValueError, match="expected characters of the corpus, found"):
        text.encode("ä".encode())


def test_corpus_skips_tests_and_files_that_are_not_ascii(tmp_path):
    for name, content in {"a.py": "a = 1\n", "b.py": "# ä\n", "test/c.py": "c = 3\n", "p/d.py": "d = 4\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content * 400, encoding="utf-8")
    config = dataclasses.replace(SMALL, corpus_bytes=4000)
    found = corpus.load(config, tmp_path)
    assert found.files == 2 and set(found.decode(found.train) + found.decode(found.validation)) == set("ad=14 \n")
    with pytest.raises(RuntimeError, match=r"corpus_bytes: expected 100000 .* found 4800; lower it"):
        corpus.load(SMALL, tmp_path)


def test_batches_are_windows_of_the_text(text):
    found = corpus.batches(SMALL, text.train, 3, 1)
    assert found.shape == (3, SMALL.batch, SMALL.sequence + 1) and found.dtype == np.int32
    np.testing.assert_array_equal(found, corpus.batches(SMALL, text.train, 3, 1))
    assert not np.array_equal(found, corpus.batches(SMALL, text.train, 3, 2))
    assert text.decode(found[0, 0]) in text.decode(text.train)


# bounds


def test_curve_bound_follows_the_formula():
    bounds = agreement.curve_bounds(1e-6, [4.0, 3.0, 2.0], [0.1, 0.2, 0.3], [10.0, 20.0, 30.0])
    np.testing.assert_allclose(bounds, [4e-6, 3e-6 + 2e-6 * 1.0, 2e-6 + 2e-6 * 5.0], rtol=1e-12)


def test_errors_of_one_step_follow_the_chain():
    length = agreement.chain_length(SMALL, 90)
    # one layer of 11 x 32 + 16 + 128, twice, with the head; 2 x 64 positions
    assert length == 2 * (352 + 16 + 128 + 32 + 90) + 128
    assert agreement.gradient_bound(SMALL, 90) == pytest.approx(2 * length * 2**-24)
    assert agreement.usual_error(SMALL, 90) == pytest.approx(16 * math.sqrt(length) * 2**-24)


def test_differences_that_are_not_finite_are_infinite():
    found = agreement.curve_differences([1.0, math.nan, math.inf], [1.5, math.nan, 1.0])
    assert found.tolist() == [0.5, math.inf, math.inf]


@pytest.mark.parametrize(
    ("differences", "bounds", "gradient", "words"),
    [
        ([0.0, 1.0], [1.0, 1.0], 0.5, "learn alike: yes"),
        (
            [0.0, 2.0],
            [1.0, 1.0],
            0.5,
            "the curves disagree: 1 steps beyond what rounding explains, the first is step",
        ),
        ([0.0, math.inf], [1.0, math.nan], 0.5, "the curves disagree"),
        ([0.0, 1.0], [1.0, 1.0], 2.0, "the gradients disagree: 2 exceeds 1"),
        ([0.0, 1.0], [1.0, 1.0], math.inf, "the gradients disagree"),
    ],
)
def test_verdict(differences, bounds, gradient, words):
    verdict = results.judge(np.asarray(differences), np.asarray(bounds), gradient, 1.0, 3)
    assert words in "\n".join(verdict.lines) and verdict.passed == ("yes" in words)


def test_mass_is_at_least_the_first_norm():
    gradient = {"a": jnp.asarray([3.0, -4.0]), "b": jnp.asarray([[2.0]])}
    assert float(train.gradient_mass(gradient)) == pytest.approx(math.sqrt(2) * 5 + 2)


def test_the_mask_is_causal(text, variables):
    apply = jax.jit(train.build(SMALL, len(text.vocabulary)).apply)
    tokens = jnp.zeros((1, SMALL.sequence), jnp.int32)
    changed = apply(variables, tokens.at[0, 40].set(5)) - apply(variables, tokens)
    assert not np.any(changed[0, :40]) and np.any(changed[0, 40:])


# the command


@pytest.mark.slow
def test_command_trains_reports_and_writes(finished):
    folder, code, output = finished
    assert code == 0 and "fused and unfused learn alike: yes" in output
    assert "gemm_epilogue" in output and "-- text 1: prompt" in output and "step 9/9: unfused | fused" in output
    document = json.loads((folder / "results.json").read_text())
    record = document["results"]
    assert len(record["history"]["losses"]) == len(record["curve"]["bounds"]) == 9
    assert [row[0] for row in record["history"]["validation"]] == [4, 8, 9]
    assert record["fusions"]["gemm_epilogue"] > 0 and record["ratio"]["low"] <= record["ratio"]["median"]
    assert all(record["steps"][name]["temporaries_bytes"] > 0 for name in train.VARIANTS)
    assert record["history"]["losses"][-1][0] < record["history"]["losses"][0][0]
    assert len(record["samples"]["fused"][0]) == PROMPT_LENGTH + 8
    picture = imread(folder / report.FILE_NAME)
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50
    assert sorted(path.name for path in folder.iterdir()) == ["results.json", report.FILE_NAME]


@pytest.mark.slow
def test_a_finished_run_trains_nothing_again(finished, monkeypatch):
    folder, _, _ = finished
    monkeypatch.setattr(cli, "run", lambda *arguments: pytest.fail("trained again"))
    code, output = command(folder, fuse=aicf_jax.fuse, explain=aicf_jax.explain)
    assert code == 0 and "finished already" in output and "ms / step" in output


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_losses(tmp_path, monkeypatch, reassociated):
    real = train.Trainer._train_step

    def interrupted(self, step):
        if step == 5:
            raise KeyboardInterrupt
        real(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "_train_step", interrupted)
        code, output = command(tmp_path, fuse=Reassociated)
    assert code == 130 and "run the same command again" in output
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.msgpack"]
    code, output = command(tmp_path, fuse=Reassociated)
    assert code == 0 and "resumed after step 4 of 9" in output
    record = json.loads((tmp_path / "results.json").read_text())["results"]
    assert record["history"]["losses"] == reassociated["history"]["losses"]
    # summed in another order, so the curves do differ, and rounding explains it
    assert max(record["curve"]["differences"]) > 0 and record["gradient"]["max_difference"] > 0


@pytest.mark.slow
def test_a_wrong_gradient_fails(tmp_path):
    code, output = command(tmp_path, fuse=WrongGradient)
    assert code == 1 and "the gradients disagree: 0.01 exceeds" in output and "learn alike: no" in output
    # and stays failed when it is only shown again
    assert command(tmp_path, fuse=WrongGradient)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "label"),
    [
        (lambda content: content[:-1], "corrupt"),
        (lambda content: b"{", "corrupt"),
        (lambda content: content.replace(b'"fingerprint": "', b'"fingerprint": "x', 1), "stale"),
    ],
)
def test_unusable_checkpoints_are_kept_aside_and_never_trusted(tmp_path, text, damage, label):
    store = Store(tmp_path, SMALL, text, "identity")
    states = {"unfused": (jnp.ones(2), jnp.ones(1)), "fused": (jnp.zeros(2), jnp.ones(1))}
    store.save_checkpoint(states, train.History(losses=[[1.0, math.nan]]))
    restored, history = store.load_checkpoint(states)
    np.testing.assert_array_equal(restored["unfused"][0], np.ones(2))
    assert history.losses[0][0] == 1.0 and math.isnan(history.losses[0][1])
    content = damage(store.checkpoint_path.read_bytes())
    store.checkpoint_path.write_bytes(content)
    assert store.load_checkpoint(states) is None and not store.checkpoint_path.exists()
    assert (tmp_path / f"checkpoint.{label}-1.msgpack").read_bytes() == content
    assert "is not used" in store.notes[0]
    assert store.load_checkpoint(states) is None


@pytest.mark.slow
def test_results_of_another_run_are_kept_aside(tmp_path, text):
    Store(tmp_path, SMALL, text, "identity").save_results({"loss": math.nan})
    assert Store(tmp_path, SMALL, text, "identity").load_results() == {"loss": "nan"}
    other = Store(tmp_path, dataclasses.replace(SMALL, seed=1), text, "identity")
    assert other.load_results() is None and "another config" in other.notes[0]
    assert (tmp_path / "results.stale-1.json").exists()


@pytest.mark.slow
def test_samples_follow_prompt_seed_and_temperature(text, variables):
    model = train.build(SMALL, len(text.vocabulary))
    one, two = (sampling.generate(SMALL, text, model.apply, variables) for _ in range(2))
    assert one == two and one[0].startswith(text.decode(sampling.prompts(SMALL, text)[0]))
    cold = dataclasses.replace(SMALL, temperature=1e-6)
    (found,) = sampling.generate(cold, text, model.apply, variables)
    tokens = text.encode(found.encode())
    logits = jax.jit(model.apply)(variables, tokens[None])
    assert np.argmax(logits[0, PROMPT_LENGTH - 1]) == tokens[PROMPT_LENGTH]


def test_usage_errors_name_the_flag_and_exit_with_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        command(tmp_path, "--warmup", "99")
    assert caught.value.code == 2
    assert "--warmup: expected an integer from 0 to 8, found 99" in capsys.readouterr().err


def test_help_runs_as_a_module():
    text = help_of("experiments.text_lm")
    assert all(word in text for word in ("--sequence", "--temperature", "--quick", "--fresh", "exit codes"))
