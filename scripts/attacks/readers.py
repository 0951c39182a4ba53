"""Every reader of calib8, with whole inputs to begin from."""

from __future__ import annotations

import fcntl
import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np

from scripts.attacks import whole
from scripts.attacks.archives import changed_png, changed_zip
from scripts.attacks.fields import changed_fields
from scripts.attacks.forms import forms
from scripts.attacks.fuzz import Reader
from scripts.attacks.mutate import retyped
from scripts.attacks.options import option_texts, with_options
from scripts.attacks.subject import TARGETS, made

if TYPE_CHECKING:
    from deploy.calibration.observation import ObservedStatistics
    from deploy.feed.preprocess import Preprocess

ROOT = Path(__file__).parents[2]
_SIDE = 16
_LEGACY = b"03ff00000000000003feffffde7210be9\nx: 3c008912\ny: 3d8\n"

# ---------------------------------------------------------------- whole inputs


def _texts(*texts: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [text.encode() for text in texts]


def _caches(folder: Path) -> list[bytes]:
    golden = (ROOT / "tests" / "golden" / "caches").glob("*.cache")
    return [_LEGACY, *(path.read_bytes() for path in sorted(golden))]


def _built(folder: Path) -> Path:
    """A build of every target with a search; made once, whoever needs it first."""
    from calib8 import build

    shared = folder.parents[1]
    with (shared / "built.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "built").exists():
            subject = made(shared / "subject")
            build(
                subject.model, subject.pictures(0), out=shared / "making", duration_s=0, threads=1,
                targets=TARGETS.split(","),
            )  # fmt: skip
            (shared / "making").rename(shared / "built")
    return shared / "built"


def _of_build(pattern: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [path.read_bytes() for path in sorted(_built(folder).glob(pattern))]


def _pictures(suffix: str, *flags: int) -> Callable[[Path], list[bytes]]:
    def seeds(folder: Path) -> list[bytes]:
        import cv2

        rng = np.random.default_rng(0)
        smooth = cv2.resize(rng.integers(0, 256, (5, 6, 3), np.uint8), (40, 36))
        kinds = [smooth, smooth[:, :, 0], rng.integers(0, 256, (16, 16, 3), np.uint8)]
        return [cv2.imencode(suffix, kind, list(flags))[1].tobytes() for kind in kinds]

    return seeds


def _npy(folder: Path) -> list[bytes]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3, _SIDE, _SIDE)).astype(np.float32)
    return [_saved(x), _saved(np.asfortranarray(x)), _saved(x.astype(">f4")), _saved(x[0])]


def _saved(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _npz(folder: Path) -> list[bytes]:
    x = np.random.default_rng(0).normal(size=(4, 3, _SIDE, _SIDE)).astype(np.float32)
    made = []
    for save in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        save(buffer, x=x, labels=np.arange(4))
        made.append(buffer.getvalue())
    return made


def _onnx(folder: Path) -> list[bytes]:
    return [made(folder / "subject").model.read_bytes()]


_COCO = json.dumps(
    {
        "images": [
            {"id": n, "file_name": f"{n:02}.png", "height": 9, "width": 8} for n in range(3)
        ],
        "annotations": [
            {"id": n, "image_id": n % 3, "category_id": 1, "bbox": [1, 2.5, 3, 4], "iscrowd": 0}
            for n in range(4)
        ],
        "categories": [{"id": 1, "name": "cat"}, {"id": 7, "name": "dog"}],
    },
    indent=1,
)
_YAML = "path: .\ntrain: .\nval: [.]\nnc: 2\nnames:\n  0: cat\n  1: dog\nkpt_shape: [17, 3]\n"
_VOC = (
    "<annotation><size><width>9</width><height>8</height></size><object><name>cat</name><bndbox>"
    "<xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4.5</ymax></bndbox></object></annotation>"
)
_CFG = """batch_num: 4
activation_offset: true
skip_layers: "Gemm_logits"
common_config {
  arq_quantize { channel_wise: true }
  ifmr_quantize { search_range_start: 0.7 search_range_end: 1.3 search_step: 0.01 }
}
override_layer_types { layer_type: "Gemm" calibration_config { arq_quantize { } } }
override_layer_configs {
  layer_name: "Conv_c1"
  calibration_config { hfmg_quantize { num_of_bins: 4096 asymmetric: false } }
}
"""
_AIPP = """aipp_op {
  aipp_mode: static
  input_format: RGB888_U8
  csc_switch: false
  mean_chn_0: 123
  min_chn_0: 0.675
  var_reci_chn_0: 0.0171247
}
"""
_PATTERNS = "# kept\nConv_c1\nop:Gemm\nConv_*\n\n/x/[ab]*\n"

# ---------------------------------------------------------------- what reads them


def _fed(folder: Path) -> Callable[[Path], Callable[[], object]]:
    """A feed is opened and read to its end, and what would be remembered of it."""
    from deploy.feed.feed import open_feed
    from deploy.feed.preprocess import Preprocess
    from deploy.tensors import TensorSpec

    specs = [TensorSpec("x", "float32", ("batch", 3, _SIDE, _SIDE))]

    def read(path: Path) -> None:
        how = None if path.suffix in (".npy", ".npz") else _unit(Preprocess)
        feed = open_feed(path, specs, preprocess=how)
        feed.manifest()
        for sample in feed.samples():
            assert sample["x"].shape == (1, 3, _SIDE, _SIDE)

    return lambda path: partial(read, path)


def _unit(kind: type[Preprocess]) -> Preprocess:
    return kind(size=(_SIDE, _SIDE))


def _listed_in(name: str) -> Callable[[Path], Callable[[Path], Callable[[], object]]]:
    """Lists of pictures, or descriptions of a data set, that stand beside the pictures."""

    def opened(folder: Path) -> Callable[[Path], Callable[[], object]]:
        feed = _fed(folder)
        pictures = made(folder / "subject").pictures(0)
        return lambda path: feed(Path(shutil.copyfile(path, pictures / name)))

    return opened


def _labels(folder: Path) -> Callable[[Path], Callable[[], object]]:
    from deploy.feed.evaluation import read_labels

    return lambda path: partial(read_labels, path)


def _label_folder(folder: Path) -> Callable[[Path], Callable[[], object]]:
    """A folder of one label file."""
    from deploy.feed.evaluation import read_labels

    labels = folder / "own" / "labels"
    labels.mkdir(parents=True, exist_ok=True)
    (labels / "classes.txt").write_text("cat")

    def opened(path: Path) -> Callable[[], object]:
        shutil.copyfile(path, labels / f"0{path.suffix}")
        return partial(read_labels, labels)

    return opened


def _judged(sidecar: str) -> Callable[[Path], Callable[[Path], Callable[[], object]]]:
    """A cache whose fingerprint or statistics are the changed file, asked for what it holds."""

    def opened(folder: Path) -> Callable[[Path], Callable[[], object]]:
        from calib8 import calibrate
        from deploy.calibration import reuse, store

        subject, cache = made(folder / "own"), folder / "own" / "m.cache"
        for path in store.cache_files(_built(folder) / "calib8" / "m.cache"):
            shutil.copyfile(path, cache.parent / path.name)
        wanted = calibrate(subject.model, subject.pictures(0), threads=1).observations
        fingerprint = store.load_calibration(cache).fingerprint
        policy = reuse.CachePolicy(path=cache, require=True)

        def read(path: Path) -> None:
            shutil.copyfile(path, f"{cache}{sidecar}")
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                _stamp(cache)
            reuse.check_cache(policy, lambda _: fingerprint, wanted)

        return lambda path: partial(read, path)

    return opened


def _sharded(folder: Path) -> Callable[[Path], Callable[[], object]]:
    """A shard, changed in earnest or in passing, merged."""
    from calib8 import calibrate
    from deploy.calibration.sample_checks import Peaks
    from deploy.calibration.shards import ShardSet

    subject = made(folder / "own")
    whole = calibrate(subject.model, subject.pictures(0), limit=4, threads=1)

    def read(path: Path) -> None:
        with suppress(ValueError, KeyError, TypeError, RecursionError, zipfile.BadZipFile, OSError):
            _stamp_shard(path)
        ShardSet([path], whole.loaded).observed(whole.observations, Peaks())

    return lambda path: partial(read, path)


def _resumed(folder: Path) -> Callable[[Path], Callable[[], object]]:
    """A checkpoint, changed in earnest or in passing, gone on from."""
    from calib8 import calibrate
    from deploy.frontends import load

    subject = made(folder / "own")
    loaded, place = load(subject.model), folder / "own" / "begun"

    def read(path: Path) -> None:
        with suppress(ValueError, KeyError, TypeError, RecursionError, zipfile.BadZipFile, OSError):
            _stamp_shard(path)
        shutil.copyfile(path, place)
        calibrate(loaded, subject.pictures(0), limit=4, threads=1, checkpoint=place, resume=True)

    return lambda path: partial(read, path)


def _checkpoints(folder: Path) -> list[bytes]:
    """What a run leaves that was ended after two of four samples."""
    from calib8 import calibrate
    from deploy.calibration import checkpoint

    class Ended(BaseException):
        pass

    class Ending(checkpoint.Checkpoint):
        def is_due(self) -> bool:
            return True

        def save(self, number: int, observed: ObservedStatistics) -> None:
            super().save(number, observed)
            if number == 2:
                raise Ended

    subject, place = made(folder / "seeded"), folder / "begun"
    with patch("deploy.pipeline.calibration_run.Checkpoint", Ending), suppress(Ended):
        calibrate(subject.model, subject.pictures(0), limit=4, threads=1, checkpoint=place)
    return [place.read_bytes()]


def _shards(folder: Path) -> list[bytes]:
    from calib8 import calibrate
    from deploy.calibration.shards import write_shard
    from deploy.feed.sampling import Choice

    subject = made(folder / "seeded")
    path = folder / "one.shard"
    choice = Choice(limit=4, shard=(1, 1))
    write_shard(calibrate(subject.model, subject.pictures(0), limit=choice, threads=1), path)
    return [path.read_bytes()]


def _stamp_shard(path: Path) -> None:
    """As `_stamp`, of a shard."""
    from deploy.calibration import shards
    from deploy.files.manifest import sha256

    with zipfile.ZipFile(path) as archive:
        packed, document = archive.read("statistics.npz"), json.loads(archive.read("shard.json"))
    document["statistics"] = sha256(packed)
    document["sha256"] = shards._digest(document)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("shard.json", json.dumps(document))
        archive.writestr("statistics.npz", packed)


def _stamp(cache: Path) -> None:
    """Let the digests be those of what stands there, as who changes it in earnest would."""
    from deploy.calibration import store
    from deploy.files.manifest import sha256

    text, packed = (Path(f"{cache}{ending}").read_bytes() for ending in ("", ".npz"))
    document = json.loads(Path(f"{cache}.json").read_bytes())
    document["sha256"] |= {"cache": sha256(text), "statistics": sha256(packed)}
    Path(f"{cache}.json").write_bytes(store.seal_json(document))


def _plan(folder: Path) -> Callable[[Path], Callable[[], object]]:
    from deploy.tuning.plan_file import read_plan

    return lambda path: (
        lambda: [
            target.with_split(split.row.number)
            for target in read_plan(path).targets.values()
            for split in target.front
        ]
    )


_SETTINGS = """# The options of a build: calib8 build --config calib8.toml

[build]
model = "net.onnx"
images = "photos/"
target = ["onnxruntime,ascend", "tensorrt"]
keep-float = ["/model.22/*", "op:Sigmoid"]
limit = 12
duration = 0.5
accept = true
"""


def _settings(folder: Path) -> Callable[[Path], Callable[[], object]]:
    from deploy.commands.build import build
    from deploy.commands.settings import options_in

    return lambda path: lambda: options_in(build, path)


def _model(folder: Path) -> Callable[[Path], Callable[[], object]]:
    from deploy.frontends import load

    return lambda path: partial(load, path)


def _deployed(folder: Path) -> Callable[[Path], Callable[[], object]]:
    """A model, inspected; if that accepts it, built for every target."""
    from deploy.commands.build import build
    from deploy.commands.diagnose import inspect

    subject, out = made(folder / "own"), folder / "out"

    def read(path: Path) -> object:
        if code := inspect.main([str(path)], standalone_mode=False):
            return code
        shutil.rmtree(out, ignore_errors=True)
        _, _, *words = subject.build(0, out, "--limit", "4", "-q")
        code = build.main([str(path), *words], standalone_mode=False)
        assert not (left := whole.leftovers(out)), left
        return code

    return lambda path: partial(read, path)


def _forms(folder: Path) -> list[bytes]:
    """Models of many forms; the file beside one of them lies where the changed one will."""
    return [*_onnx(folder), *_of_build("*.int8.onnx")(folder), *forms(folder.parent)]


def _pairs(folder: Path) -> Callable[[Path], Callable[[], object]]:
    from deploy.frontends.onnx_reader import read_model
    from deploy.targets.ascend.recipe import recipe_from_qdq

    return lambda path: lambda: recipe_from_qdq(read_model(path), path)


def _trained(folder: Path) -> Callable[[Path], Callable[[], object]]:
    from deploy.frontends import load_float_or_qdq

    return lambda path: partial(load_float_or_qdq, path)


_PROCESSOR = json.dumps(
    {
        "do_center_crop": True, "do_normalize": True, "do_resize": True, "resample": 3,
        "crop_size": {"height": 16, "width": 16}, "size": {"shortest_edge": 18},
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        "image_processor_type": "ViTImageProcessor", "rescale_factor": 0.00392156862745098,
    },
    indent=1,
)  # fmt: skip
_INFER = """mode: paddle
Preprocess:
- interp: 2
  keep_ratio: false
  target_size:
  - 16
  - 16
  type: Resize
- is_scale: true
  mean: [0.485, 0.456, 0.406]
  std:
  - 0.229
  - 0.224
  - 0.225
  type: NormalizeImage
- type: Permute
label_list:
- cat
"""
_TIMM = (
    '{"architecture": "resnet18", "pretrained_cfg": {"input_size": [3, 16, 16], "mean": [0.5],'
    ' "std": [0.5], "crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "center"}}'
)


def _beside(name: str) -> Callable[[Path], Callable[[Path], Callable[[], object]]]:
    """What stands beside a model, under its own name."""

    def opened(folder: Path) -> Callable[[Path], Callable[[], object]]:
        import onnx

        from deploy.feed.model_preprocess import resolve_preprocess
        from deploy.frontends.metadata import read_metadata_preprocess
        from deploy.tensors import TensorSpec

        model = made(folder / "own").model
        loaded, spec = onnx.load(model), TensorSpec("x", "float32", ("batch", 3, _SIDE, _SIDE))

        def read(path: Path) -> None:
            shutil.copyfile(path, model.parent / name)
            found = resolve_preprocess(None, read_metadata_preprocess(loaded, model), spec)
            assert all(note.isprintable() for note in found.notes)

        return lambda path: partial(read, path)

    return opened


def _ascend(folder: Path) -> Callable[[Path], Callable[[], object]]:
    import click

    from deploy.calibration.observation import CalibrationSubject
    from deploy.frontends import load
    from deploy.targets.ascend.existing_files import check_file

    model = made(folder / "own").model
    subject = CalibrationSubject(loaded=load(model), sample_count=0, user_model=model)
    return lambda path: lambda: click.echo(check_file(path, subject))


def _noted(folder: Path) -> Callable[[Path], Callable[[], object]]:
    """A file whose note is the changed one."""
    from deploy.files.manifest import note_path, read_if_made_from, write_made_from

    made_from = {"model": "a", "batch": 8, "shape": [1, 3]}
    file = write_made_from(folder / "m.engine", b"plan", made_from)

    def opened(path: Path) -> Callable[[], object]:
        shutil.copyfile(path, note_path(file))
        return partial(read_if_made_from, file, made_from)

    return opened


def _patterns(folder: Path) -> Callable[[Path], Callable[[], object]]:
    import onnx

    from deploy.graph.index import match_nodes

    model = onnx.load(made(folder / "own").model)
    return lambda path: partial(match_nodes, model, [f"@{path}"])


def _shown(folder: Path) -> Callable[[Path], list[str]]:
    """A cache, by the commands that read one."""
    ways = (["cache", "show"], ["cache", "check"], ["cache", "show", "--json"])
    state = random.Random(0)
    return lambda path: [*state.choice(ways), str(path)]


READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        Reader(name="cache", suffix=".cache", seeds=_caches, open=_shown),
        Reader(name="fingerprint", suffix=".json", seeds=_of_build("calib8/*.cache.json"),
               open=_judged(".json"), mutate=retyped),
        Reader(name="statistics", suffix=".npz", seeds=_of_build("calib8/*.cache.npz"),
               open=_judged(".npz"), mutate=changed_zip, cases=2000),
        Reader(name="shard", suffix=".shard", seeds=_shards, open=_sharded, mutate=changed_zip,
               cases=2000),
        Reader(name="checkpoint", suffix=".checkpoint", seeds=_checkpoints, open=_resumed,
               mutate=changed_zip, cases=1000),
        Reader(name="plan", suffix=".toml", seeds=_of_build("calib8/*.plan.toml"), open=_plan,
               mutate=retyped),
        Reader(name="settings", suffix=".toml", seeds=_texts(_SETTINGS), open=_settings,
               mutate=retyped),
        Reader(name="report", suffix=".json", seeds=_of_build("report.json"),
               open=lambda folder: lambda path: ["explain", str(path)], mutate=retyped, cases=5000),
        Reader(name="builds", suffix=".json", seeds=_of_build("report.json"),
               open=lambda folder: lambda path: ["report", str(path), str(path)], mutate=retyped,
               cases=3000),
        Reader(name="list", suffix=".txt", open=_listed_in("list.txt"),
               seeds=_texts("00.png\n01.png\n", "# of mine\r\n00.png 3\r\n01.png 4\r\n")),
        Reader(name="labels", suffix=".txt", open=_labels,
               seeds=_texts("1\n2\n\n3\n", "a.png 4\nb c.png 17\n")),
        Reader(name="coco", suffix=".json", seeds=_texts(_COCO), open=_labels, mutate=retyped),
        Reader(name="coco-images", suffix=".json", seeds=_texts(_COCO), open=_listed_in("a.json"),
               mutate=retyped, cases=3000),
        Reader(name="yaml", suffix=".yaml", seeds=_texts(_YAML), open=_listed_in("data.yaml")),
        Reader(name="yolo", suffix=".txt", seeds=_texts("0 0.5 0.5 0.1 0.2\n1 0 0 1 0 1 1\n"),
               open=_label_folder),
        Reader(name="voc", suffix=".xml", seeds=_texts(_VOC), open=_label_folder),
        Reader(name="npy", suffix=".npy", seeds=_npy, open=_fed),
        Reader(name="npz", suffix=".npz", seeds=_npz, open=_fed, mutate=changed_zip),
        Reader(name="values", suffix=".npy", seeds=_npy,
               open=lambda folder: lambda path: ["quantize", str(path)], cases=5000),
        Reader(name="png", suffix=".png", seeds=_pictures(".png"), open=_fed, mutate=changed_png),
        Reader(name="jpeg", suffix=".jpg", seeds=_pictures(".jpg"), open=_fed),
        Reader(name="webp", suffix=".webp", seeds=_pictures(".webp"), open=_fed),
        Reader(name="bmp", suffix=".bmp", seeds=_pictures(".bmp"), open=_fed),
        Reader(name="onnx", suffix=".onnx", seeds=_onnx, open=_model, cases=2000),
        Reader(name="fields", suffix=".onnx", seeds=_forms, open=_deployed, mutate=changed_fields,
               cases=1000, limit_s=600, memory=1 << 30),
        Reader(name="qdq", suffix=".onnx", seeds=_of_build("*.int8.onnx"), open=_pairs,
               cases=2000),
        Reader(name="trained", suffix=".onnx", seeds=_of_build("*.int8.onnx"), open=_trained,
               cases=2000),
        Reader(name="processor", suffix=".json", seeds=_texts(_PROCESSOR),
               open=_beside("preprocessor_config.json"), mutate=retyped, cases=5000),
        Reader(name="timm", suffix=".json", seeds=_texts(_TIMM), open=_beside("config.json"),
               mutate=retyped, cases=5000),
        Reader(name="paddle", suffix=".yml", seeds=_texts(_INFER), open=_beside("infer_cfg.yml"),
               cases=5000),
        Reader(name="record", suffix=".txt", seeds=_of_build("*_record.txt"), open=_ascend),
        Reader(name="quant", suffix=".json", seeds=_of_build("*_config.json"), open=_ascend,
               mutate=retyped),
        Reader(name="simple-cfg", suffix=".cfg", seeds=_texts(_CFG), open=_ascend),
        Reader(name="aipp", suffix=".cfg", seeds=_texts(_AIPP), open=_ascend),
        Reader(name="note", suffix=".json", open=_noted, mutate=retyped, seeds=_texts(
            '{"model": "a", "batch": 8, "shape": [1, 3], "sha256": "0"}')),
        Reader(name="patterns", suffix=".txt", seeds=_texts(_PATTERNS), open=_patterns,
               cases=5000),
        Reader(name="options", suffix=".txt", seeds=option_texts, open=with_options),
    )
}  # fmt: skip
