"""Every case file through `aicf_jax.fuse`: the unfused function, run on plain JAX, is the oracle.

Values, `jit`, gradients and the free-form checks run by default; the other transformations of each case (vmap, scan,
remat, jvp, Hessians, low precision, numerical gradients) and long cases are marked slow.
"""

import gc
import json
import sys
import warnings
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parent
CASES = sorted(p.stem for p in (FOLDER / "cases").glob("*.py"))
# Slow in any mode: what they exercise has tests of its own, or they compile for more than ten seconds.
LONG = {
    "a01_multi_user",
    "a02_conv_shared_bn_one_path",
    "a03_softmax_axis",
    "a05_transposes",
    "a07_mask_forms",
    "a08_norm_affine_shapes",
    "a10_shared_modulation",
    "a12_unit_dims",
    "b01_preferred_type",
    "b02_param_vs_compute",
    "b04_low_precision_masks",
    "b05_x64",
    "c01_higher_order",
    "c02_bias_mask_grad",
    "c03_closures",
    "c05_moe_router_grad",
    "c07_user_custom_rules",
    "d01_vmap_axes",
    "d03_remat_names",
    "d04_sharding",
    "e01_odd_tiles",
    "e04_decode",
    "e06_head_dims",
    "e07_gqa",
    "e08_mask_shapes",
    "f03_nnx_vit",
    "f04_resnet_batchnorm",
    "f07_llama",
    "f09_lstm_scan",
    "f10_mha_variants",
    "f11_weight_spectral_norm",
    "f13_conv_norm_variants",
    "g02_nan_inf_flow",
    "g03_gelu_variants",
    "g04_large_logits",
    "h03_deep_models",
    "b07_weak_types",
    "d07_export_symbolic",
    "e02_empty",
    "f01_linen_mlp_dropout",
    "g06_accumulation",
    "k01_lr_sweep",
}
QUICK = "value,jit,grad,custom"
REST = "gradgrad,jvp,hessian,vmap,vmapgrad,scan,remat,dtype,numgrad,linearize"


def run(case: str, checks: str, tmp_path: Path) -> list[dict]:
    """Rows of the checks of one case file that failed.

    But for those that compare times: tests run side by side, so a time says nothing. `run_cases.py` by itself has them.
    """
    sys.path.insert(0, str(FOLDER))
    try:
        import run_cases

        report = tmp_path / "rows.json"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the cases are written for values, not for clean logs
            run_cases.main(["--fuse", "aicf_jax:fuse", "-k", case, "--checks", checks, "--json", str(report)])
    finally:
        sys.path.remove(str(FOLDER))
        jax.clear_caches()
        gc.collect()
    rows = json.loads(report.read_text())["rows"]
    return [r for r in rows if r["result"] != "pass" and not r["mode"].endswith("_time")]


@pytest.fixture(autouse=True)
def _optimized(request):
    """Slow cases are compiled as for users: some compare a program that is compiled with the same one run eagerly."""
    few = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", few and request.node.get_closest_marker("slow") is None)
    yield
    jax.config.update("jax_disable_most_optimizations", few)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in LONG else c for c in CASES])
def test_case(case, tmp_path):
    assert run(case, QUICK, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_case_under_every_transformation(case, tmp_path):
    assert run(case, REST, tmp_path) == []
