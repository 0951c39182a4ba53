"""PyTorch's own loaders and tensors as a feed."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.feed.feed import open_feed  # noqa: E402
from deploy.feed.preprocess import Preprocess  # noqa: E402
from deploy.tensors import TensorSpec  # noqa: E402

X = TensorSpec("x", "float32", ("batch", 3, 8, 8))
BATCH = np.random.default_rng(3).normal(size=(6, 3, 8, 8)).astype(np.float32)


def fed(source, **options):
    feed = open_feed(source, [X], **options)
    with feed.samples() as stream:
        return feed, np.concatenate([one["x"] for one in stream])


@pytest.mark.parametrize("labels", [True, False])
def test_a_data_loader(labels):
    tensors = [torch.from_numpy(BATCH), *([torch.arange(6)] if labels else [])]
    data = torch.utils.data.TensorDataset(*tensors)
    feed, seen = fed(torch.utils.data.DataLoader(data, batch_size=4))
    assert np.array_equal(seen, BATCH)
    left = "left out of the items, as no input has it: number 2"
    assert (left in feed.notes) == labels


def test_tensors_with_a_gradient():
    tensor = torch.from_numpy(BATCH).requires_grad_()
    assert np.array_equal(fed(tensor)[1], BATCH)
    assert np.array_equal(fed([one[None] for one in tensor])[1], BATCH)


def test_pictures_of_uint8():
    pictures = np.random.default_rng(4).integers(0, 256, (3, 8, 8, 3), np.uint8)
    _, seen = fed([torch.from_numpy(one) for one in pictures], preprocess=Preprocess())
    assert np.allclose(seen, pictures.transpose(0, 3, 1, 2) / np.float32(255), atol=1e-6)
