"""The precision that tests of other libraries run in."""

import pytest


@pytest.fixture(autouse=True)
def _float64(request):
    """float64 is allowed, but for a model (parameter `name`) that its test module lists under FLOAT32."""
    import jax

    callspec = getattr(request.node, "callspec", None)
    name = callspec.params.get("name") if callspec else None
    with jax.enable_x64(name not in getattr(request.module, "FLOAT32", ())):
        yield
