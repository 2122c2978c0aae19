"""The image models of flaxmodels (linen): VGG, and ResNet with the library's own batch normalization."""

import jax
import pytest

from tests.others.checks import check, library, path_roundings, quick_initialization
from tests.support import normal

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]

# Their dtype is an attribute, float32 by default, and batch normalization casts to it.
FLOAT32 = ("VGG16", "ResNet18")
MODELS = {
    # Thirteen convolutions with a bias and relu; without the head, which takes images of 224 x 224 only.
    "VGG16": ({"include_head": False}, {"conv_epilogue": 13}),
    # Twenty convolutions: the stem, sixteen, three shortcuts, each with stored statistics; the classifier has a bias.
    "ResNet18": ({"output": "logits", "num_classes": 10}, {"conv_epilogue": 20, "gemm_epilogue": 1}),
}
LONGEST_SUM = 9 * 512  # a window of 3 x 3 over 512 channels


@pytest.mark.parametrize("name", MODELS)
def test_image_models(name):
    flaxmodels = library("flaxmodels", "flaxmodels==0.1.3", "--no-deps")
    options, expected = MODELS[name]
    model = getattr(flaxmodels, name)(pretrained=None, **options)
    images = jax.nn.sigmoid(normal(1, 2, 32, 32, 3))
    with quick_initialization():
        variables = model.init(jax.random.key(0), images, train=False)

    def run(model):
        return lambda variables, images: model.apply(variables, images, train=False)

    check(model, run, variables, images, expected=expected, roundings=path_roundings(18, LONGEST_SUM))
