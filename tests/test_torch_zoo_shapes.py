"""Networks of the shapes that zoos have: Q/DQ, training on each grid, and a build."""

from pathlib import Path

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="the torch front end needs torch: calib8[torch]")

from deploy.fx.export import compare, to_onnx  # noqa: E402
from deploy.fx.fuse import norms_in_float  # noqa: E402
from deploy.fx.modes import measure, quantized  # noqa: E402
from deploy.fx.prepare import prepare  # noqa: E402
from deploy.fx.qat import Task, train  # noqa: E402
from deploy.fx.source import load_factory  # noqa: E402
from deploy.targets import OnnxRuntime  # noqa: E402

torch.set_num_threads(1)
SHAPES = Path(__file__).parent / "torch_shapes.py"
make = load_factory(f"{SHAPES}:make")
# of norms all but the ConvTranspose, which ONNX Runtime has no int8 kernel for
LAYERS = {"detector": 17, "norms": 9, "attention": 6, "convnext": 5, "ssd": 6}


def pictures(seed, count=2):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_every_shape_is_quantized_and_runs_in_onnxruntime_as_in_torch(name):
    model, batches = make(name), [(pictures(0),), (pictures(1),)]
    target = OnnxRuntime(int8_stem=True)
    converted = quantized(model, batches[0], batches, mode="static", target=target)
    assert norms_in_float(converted) == ""
    integers = [m for m in converted.modules() if type(m).__name__ == "IntLayer"]
    assert len(integers) == LAYERS[name]
    exported = to_onnx(converted, batches[0])
    found = compare(exported, converted, [*batches, (pictures(2, 5),)], optimized=False)
    assert found.max_difference <= 0.05 * found.max_output
    assert measure("static", model, converted, batches).sqnr_db > 15


def boxes(epoch):
    """(pictures, targets of a raw map): a bright square, where it is and of which class."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(10):
        x = 0.1 * torch.randn(2, 3, 32, 32, generator=generator)
        target = torch.zeros(2, 7, 4, 4)
        for i in range(2):
            row, column, kind = torch.randint(0, 3, (3,), generator=generator).tolist()
            x[i, kind, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 2
            target[i, :4, row, column] = 1
            target[i, 4 + kind, row, column] = 1
        yield x, target


def loss(output, target):
    return torch.nn.functional.mse_loss(output[1][1][:, :, :4, :4].sigmoid(), _fit(output, target))


def _fit(output, target):
    size = output[1][1].shape[-2:]
    return torch.nn.functional.adaptive_max_pool2d(target, size)


def task():
    return Task(model=make("detector"), inputs=[pictures(0)], batches=boxes, loss=loss, epochs=2)


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "ascend"])
def test_a_detector_trains_on_each_grid_and_goes_on_after_a_break(target, tmp_path):
    whole = train(task(), target=target)
    assert whole.losses[-1] < whole.losses[0]
    assert not any(type(m).__name__ == "BatchNorm2d" for m in whole.prepared.modules())

    def stop(line):
        if line.startswith("epoch 2"):
            raise Killed

    path = tmp_path / "run.pt"
    with pytest.raises(Killed):
        train(task(), target=target, checkpoint=path, report=stop)
    again = train(task(), target=target, checkpoint=path)
    wanted, got = (trained.converted.state_dict() for trained in (whole, again))
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


@pytest.mark.slow
def test_norms_train_with_their_layers_where_they_are_functions():
    prepared = prepare(make("norms").train(), [pictures(0)], norms="train")
    merged = [m for m in prepared.modules() if type(m).__name__ == "QatConvBn"]
    assert len(merged) == 10  # the two before a layer and the frozen one are none
    before = merged[0].norm.running_mean.clone()
    prepared.train()(pictures(1))
    assert not torch.equal(before, merged[0].norm.running_mean)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detector", "all_norms"])
def test_the_commands_build_them(run, tmp_path, name):
    images = tmp_path / "images.npy"
    np.save(images, pictures(3, 4).numpy())
    out = tmp_path / "out"
    spec = f"{SHAPES}:{name}"
    code, _, err = run(
        "build", spec, "--input", "1x3x32x32", "--images", images, "--out", out,
        "--effort", "0", "--duration", "0",
    )  # fmt: skip
    assert code == 0, err
    (built,) = out.glob("*.int8.onnx")
    nodes = [node.op_type for node in onnx.load(built).graph.node]
    assert "BatchNormalization" not in nodes
    assert nodes.count("Conv") == {"detector": 17, "all_norms": 8}[name]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "ascend"])  # scales by channel, and one
def test_a_bias_after_a_tensor_of_next_to_nothing_is_kept(target):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 5, 1),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(5, 3),
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(1e-9)
    batches = [(pictures(0),), (pictures(1),)]
    converted = quantized(model, batches[0], batches, mode="static", target=target)
    found = compare(to_onnx(converted, batches[0]), converted, batches)
    assert found.max_difference <= 0.01 * found.max_output
    assert measure("static", model, converted, batches).sqnr_db > 30
