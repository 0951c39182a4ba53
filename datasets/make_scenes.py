"""Make the demo's detector again: draw scenes of Fashion-MNIST items, train on them, export.

    apt-get install dataset-fashion-mnist
    pip install torch onnx opencv-python-headless
    python datasets/make_scenes.py --out scenes

Takes about 18 minutes on one core, of which 4 draw. A scene is a coloured background with 2 to 6
items, enlarged, turned a little and tinted. Scenes for training and calibration have items of the
60,000 training images, scenes for evaluation have items of the 10,000 test images. Every scene is
drawn from its own number, and training runs in one thread: on one machine two runs give the same
weights. Another machine may round sums differently; its weights, and its accuracy in the first
decimal, then differ from the bundled ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

SOURCE = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist
NAMES = (
    *("T-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)
SIDE = 160  # pixels of a scene, which is square
FEWEST, MOST = 2, 6  # items of a scene
CALIBRATION_SCENES, EVALUATION_SCENES = 64, 100
QUALITY = 90  # of the JPEG files
STEPS, BATCH, PEAK_RATE = 2000, 32, 3e-3
STRIDES = (8, 16)  # pixels from cell to cell, per level
TOP_CELLS = 10  # cells that learn one item
BOX_WEIGHT = 5.0  # of the loss of boxes, against 1 of the loss of scores


@dataclass(frozen=True)
class Scene:
    """A picture and its items."""

    pixels: np.ndarray  # [SIDE, SIDE, 3] uint8, red, green and blue
    boxes: np.ndarray  # [n, 4] corners x1 y1 x2 y2 in pixels
    classes: np.ndarray  # [n] class numbers


def read(source: Path, name: str, offset: int) -> np.ndarray:
    """Bytes of an IDX file after its header."""
    return np.frombuffer(gzip.decompress((source / f"{name}.gz").read_bytes()), np.uint8)[offset:]


def split(source: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """[N, 28, 28] uint8 images and [N] uint8 labels."""
    images = read(source, f"{prefix}-images-idx3-ubyte", 16).reshape(-1, 28, 28)
    return images, read(source, f"{prefix}-labels-idx1-ubyte", 8)


def background(rng: np.random.Generator) -> np.ndarray:
    """A colour gradient with stripes, a few flat shapes and fine noise, float [SIDE, SIDE, 3]."""
    coarse = rng.uniform(30, 225) + rng.uniform(-32, 32, (*rng.integers(2, 5, 2), 3))
    scene = cv2.resize(coarse.astype(np.float32), (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    turn, period = rng.uniform(0, np.pi), rng.uniform(5, 40)
    waves = np.sin((np.cos(turn) * x + np.sin(turn) * y) * np.float32(2 * np.pi / period))
    noise = rng.standard_normal((SIDE, SIDE), np.float32)
    scene += (rng.uniform(0, 10) * waves + rng.uniform(1, 6) * noise)[..., None]
    for _ in range(rng.integers(0, 5)):
        colour = (scene.mean(axis=(0, 1)) + rng.uniform(-50, 50, 3)).tolist()
        centre, half = rng.integers(0, SIDE, 2), rng.integers(8, SIDE // 4, 2)
        place = (centre.tolist(), (2 * half).tolist(), float(rng.uniform(0, 180)))
        covered = scene.copy()
        if rng.random() < 0.5:
            cv2.ellipse(covered, place, colour, -1)
        else:
            cv2.fillConvexPoly(covered, cv2.boxPoints(place).astype(np.int32), colour)
        share = rng.uniform(0.3, 1)
        scene = cv2.addWeighted(covered, share, scene, 1 - share, 0)
    return scene


def outline(item: np.ndarray) -> np.ndarray:
    """1 inside the outer contours of an item, 0 outside, float [28, 28]."""
    contours, _ = cv2.findContours(
        (item > 12).astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE
    )
    inside = np.zeros((28, 28), np.uint8)
    cv2.drawContours(inside, contours, -1, 1, cv2.FILLED)
    return inside.astype(np.float32)


def placement(rng: np.random.Generator) -> np.ndarray:
    """A matrix [2, 3] that takes an item's 28x28 pixels into the scene: flip, turn, size, place."""
    size, turn = rng.uniform(1.3, 2.8), np.deg2rad(rng.uniform(-14, 14))
    flip = -1 if rng.random() < 0.5 else 1
    cosine, sine = size * np.cos(turn), size * np.sin(turn)
    linear = np.array([[cosine * flip, -sine], [sine * flip, cosine]])
    centre = rng.uniform(13 * size, SIDE - 13 * size, 2)
    return np.column_stack([linear, centre - linear @ (13.5, 13.5)])


def paint(rng: np.random.Generator, scene: np.ndarray, item: np.ndarray, where: np.ndarray) -> None:
    """Put an item and its shadow on a scene, in two colours of its own for black and white."""
    grey, inside = (
        cv2.warpAffine(one, where, (SIDE, SIDE), flags=cv2.INTER_CUBIC)
        for one in (item.astype(np.float32) / 255, outline(item))
    )
    left, top, width, height = cv2.boundingRect((inside > 0.01).astype(np.uint8))
    part = np.s_[max(top - 8, 0) : top + height + 12, max(left - 8, 0) : left + width + 12]
    grey, inside, under = grey[part][..., None], inside[part], scene[part]
    dark, light = rng.uniform(0, 60, 3), rng.uniform(110, 255, 3)
    shadow = cv2.GaussianBlur(np.roll(inside, (3, 3), (0, 1)), (0, 0), 3)
    under *= 1 - np.float32(0.4) * shadow[..., None]
    under += ((dark + (light - dark) * grey) - under) * np.clip(inside, 0, 1)[..., None]


def overlap(box: np.ndarray, others: Sequence[np.ndarray]) -> float:
    """Largest share of a box or of another one that both cover."""
    shares = [0.0]
    for other in others:
        sides = np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2])
        smaller = min(np.prod(one[2:] - one[:2]) for one in (box, other))
        shares.append(float(np.prod(np.maximum(sides, 0)) / smaller))
    return max(shares)


def draw(images: np.ndarray, labels: np.ndarray, seed: tuple[int, int]) -> Scene:
    """The scene of a number: `seed` is the series and the number in it."""
    rng = np.random.default_rng(seed)
    scene = background(rng)
    boxes: list[np.ndarray] = []
    classes: list[int] = []
    wanted = rng.integers(FEWEST, MOST + 1)
    for _ in range(8 * MOST):
        if len(boxes) == wanted:
            break
        index, where = int(rng.integers(len(images))), placement(rng)
        inside = cv2.warpAffine(outline(images[index]), where, (SIDE, SIDE))
        left, top, width, height = cv2.boundingRect((inside > 0.5).astype(np.uint8))
        box = np.array([left, top, left + width, top + height], np.float32)
        if min(width, height) < 12 or overlap(box, boxes) > 0.15:
            continue
        paint(rng, scene, images[index], where)
        boxes.append(box)
        classes.append(int(labels[index]))
    pixels = np.clip(np.rint(scene), 0, 255).astype(np.uint8)
    return Scene(pixels, np.stack(boxes), np.array(classes, np.int64))


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A 3x3 convolution that keeps or halves the map, BatchNorm and ReLU."""
    layer = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class Head(nn.Module):
    """Boxes and scores of one level, from a 3x3 and a 1x1 convolution each."""

    def __init__(self, channels: int, width: int = 64) -> None:
        super().__init__()
        self.box = nn.Sequential(conv(channels, width), nn.Conv2d(width, 4, 1))
        self.kind = nn.Sequential(conv(channels, width), nn.Conv2d(width, len(NAMES), 1))
        nn.init.constant_(self.box[1].bias, 1.5)
        nn.init.constant_(self.kind[1].bias, -4.5)  # nearly no cell has an item

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, channels, H, W] -> [N, 4, H W] and [N, classes, H W]."""
        return self.box(x).flatten(2), self.kind(x).flatten(2)


class SceneNet(nn.Module):
    """[N, 3, SIDE, SIDE] of 0..1 -> [N, 4 + classes, cells], as YOLOv8: cx cy w h, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(
            *(conv(3, 16, 2), conv(16, 64, 2), conv(64, 64), conv(64, 64)),
            *(conv(64, 128, 2), conv(128, 128), conv(128, 128)),
        )
        self.coarse = nn.Sequential(conv(128, 128, 2), conv(128, 128))
        self.heads = nn.ModuleList([Head(128), Head(128)])
        centres, strides = [], []
        for stride in STRIDES:
            y, x = np.mgrid[: SIDE // stride, : SIDE // stride].reshape(2, -1)
            centres.append((np.stack([x, y]) + 0.5) * stride)
            strides.append(np.full((1, x.size), stride))
        self.register_buffer("centres", torch.tensor(np.concatenate(centres, 1)).float()[None])
        self.register_buffer("strides", torch.tensor(np.concatenate(strides, 1)).float()[None])

    def raw(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Distances from each cell's centre to the four sides in pixels, and logits of classes."""
        fine = self.fine(image)
        levels = [head(x) for head, x in zip(self.heads, (fine, self.coarse(fine)), strict=True)]
        boxes, kinds = (torch.cat(parts, 2) for parts in zip(*levels, strict=True))
        return functional.softplus(boxes) * self.strides, kinds

    def forward(self, image: Tensor) -> Tensor:
        """One pass."""
        sides, kinds = self.raw(image)
        before, after = sides[:, :2], sides[:, 2:]
        return torch.cat(
            [self.centres + (after - before) / 2, before + after, torch.sigmoid(kinds)], 1
        )


def overlaps(found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalized IoU (Rezatofighi et al. 2019) of boxes [..., 4] with broadcasting."""
    low, high = (
        torch.maximum(found[..., :2], truth[..., :2]),
        torch.minimum(found[..., 2:], truth[..., 2:]),
    )
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(one[..., 2:] - one[..., :2]).prod(-1) for one in (found, truth)]
    union = areas[0] + areas[1] - shared + 1e-6
    low, high = (
        torch.minimum(found[..., :2], truth[..., :2]),
        torch.maximum(found[..., 2:], truth[..., 2:]),
    )
    hull = (high - low).prod(-1) + 1e-6
    return shared / union, shared / union - (hull - union) / hull


def assign(
    found: Tensor, scores: Tensor, centres: Tensor, boxes: Tensor, classes: Tensor
) -> tuple[Tensor, Tensor]:
    """Which item each cell learns, and how sure it shall be (Feng et al. 2021, TOOD).

    Args:
        found: [N, A, 4] corners of each cell's box.
        scores: [N, A, classes] probabilities.
        centres: [A, 2] of the cells in pixels.
        boxes: [N, M, 4] corners of the items, 0 where there are fewer than M.
        classes: [N, M] of the items.

    Returns:
        [N, A] numbers of items, and [N, A] target scores, 0 for cells without an item.
    """
    iou = overlaps(found[:, None], boxes[:, :, None])[0]  # [N, M, A]
    own = scores.transpose(1, 2).gather(1, classes[..., None].expand(-1, -1, scores.shape[1]))
    inside = (centres > boxes[:, :, None, :2]) & (centres < boxes[:, :, None, 2:])
    fit = own.sqrt() * iou**6 * inside.all(-1)
    best = fit >= fit.topk(TOP_CELLS, -1).values[..., -1:].clamp(min=1e-12)
    iou = iou * best
    item = iou.argmax(1)
    best = best & (functional.one_hot(item, boxes.shape[1]).transpose(1, 2) > 0)
    fit = fit * best
    share = fit / fit.amax(-1, keepdim=True).clamp(min=1e-12) * (iou * best).amax(-1, keepdim=True)
    return item, share.amax(1)


def loss_of(model: SceneNet, image: Tensor, boxes: Tensor, classes: Tensor) -> Tensor:
    """Cross entropy of the scores and generalized IoU of the boxes, per item."""
    sides, kinds = model.raw(image)
    found = torch.cat([model.centres - sides[:, :2], model.centres + sides[:, 2:]], 1)
    found, kinds, centres = found.transpose(1, 2), kinds.transpose(1, 2), model.centres[0].T
    with torch.no_grad():
        item, sure = assign(found, kinds.sigmoid(), centres, boxes, classes)
        own = functional.one_hot(classes.gather(1, item), len(NAMES)) * sure[..., None]
    truth = boxes.gather(1, item[..., None].expand(-1, -1, 4))
    wrong = functional.binary_cross_entropy_with_logits(kinds, own, reduction="sum")
    off = ((1 - overlaps(found, truth)[1]) * sure).sum()
    return (wrong + BOX_WEIGHT * off) / sure.sum().clamp(min=1)


def batch(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures of 0..1, boxes [N, M, 4] and classes [N, M], filled with 0."""
    pixels = torch.from_numpy(np.stack([one.pixels for one in scenes])).permute(0, 3, 1, 2)
    boxes = torch.zeros(len(scenes), MOST, 4)
    classes = torch.zeros(len(scenes), MOST, dtype=torch.int64)
    for row, one in enumerate(scenes):
        boxes[row, : len(one.boxes)] = torch.from_numpy(one.boxes)
        classes[row, : len(one.classes)] = torch.from_numpy(one.classes)
    return pixels.float() / 255, boxes, classes


def train(images: np.ndarray, labels: np.ndarray, steps: int) -> SceneNet:
    """AdamW with a one-cycle rate, on scenes that are drawn as they are needed."""
    model = SceneNet().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.02)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=steps, pct_start=0.15
    )
    mean, start = 0.0, time.process_time()
    for step in range(steps):
        scenes = [draw(images, labels, (0, step * BATCH + row)) for row in range(BATCH)]
        loss = loss_of(model, *batch(scenes))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        rate.step()
        mean += loss.item() / 100
        if step % 100 == 99:
            spent = time.process_time() - start
            print(f"step {step + 1} of {steps}: loss {mean:.3f}, {spent:.0f} s of CPU", flush=True)
            mean = 0.0
    return model.eval()


def export(model: SceneNet, path: Path) -> None:
    """Write ONNX opset 13 with an open batch and BatchNorm in the convolutions.

    Its metadata have the names of the classes, and OpenVINO's words for pixels / 255 in RGB.
    """
    torch.onnx.export(
        model,
        (torch.zeros(1, 3, SIDE, SIDE),),
        path,
        input_names=["image"],
        output_names=["boxes"],
        dynamic_axes={"image": {0: "batch"}, "boxes": {0: "batch"}},
        opset_version=13,
        dynamo=False,
    )
    proto = onnx.load(path)
    words = {
        "names": repr(dict(enumerate(NAMES))),
        "model_info resize_type": "fit_to_window_letterbox",
        "model_info pad_value": "114",
        "model_info reverse_input_channels": "True",
        "model_info intensity_mode": "scale_to_unit",
    }
    onnx.helper.set_model_props(proto, words)
    onnx.save(proto, path)


def write_scenes(folder: Path, name: str, scenes: Sequence[Scene]) -> None:
    """JPEG files, a list of them, and their items as a COCO json."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    files = [f"{name}/{index:04d}.jpg" for index in range(len(scenes))]
    for file, scene in zip(files, scenes, strict=True):
        quality = [cv2.IMWRITE_JPEG_QUALITY, QUALITY]
        cv2.imwrite(str(folder / file), scene.pixels[..., ::-1], quality)
    (folder / f"{name}.txt").write_text("\n".join(files) + "\n")
    images = [
        {"id": index, "file_name": file, "width": SIDE, "height": SIDE}
        for index, file in enumerate(files)
    ]
    annotations = [
        {
            "image_id": index,
            "category_id": int(kind),
            "bbox": [int(v) for v in (*box[:2], *(box[2:] - box[:2]))],
        }
        for index, scene in enumerate(scenes)
        for box, kind in zip(scene.boxes, scene.classes, strict=True)
    ]
    for index, one in enumerate(annotations):
        one["id"] = index
    categories = [{"id": index, "name": kind} for index, kind in enumerate(NAMES)]
    parts = {"images": images, "annotations": annotations, "categories": categories}
    rows = ",\n".join(
        f'"{part}": [\n{",".join(chr(10) + json.dumps(one) for one in ones)[1:]}\n]'
        for part, ones in parts.items()
    )
    (folder / f"{name}.json").write_text(f"{{{rows}}}\n")


def main() -> None:
    """Draw, train, export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("scenes"), help="folder to write")
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder of Fashion-MNIST")
    parser.add_argument("--steps", type=int, default=STEPS, help="0 writes the scenes only")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums in the same order on any number of cores
    cv2.setNumThreads(1)
    torch.use_deterministic_algorithms(True)
    train_items, test_items = split(given.source, "train"), split(given.source, "t10k")
    for name, items, series, count in (
        ("calib", train_items, 1, CALIBRATION_SCENES),
        ("eval", test_items, 2, EVALUATION_SCENES),
    ):
        write_scenes(given.out, name, [draw(*items, (series, n)) for n in range(count)])
    if given.steps:
        export(train(*train_items, given.steps), given.out / "scenes.onnx")


if __name__ == "__main__":
    main()
