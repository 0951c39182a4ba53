"""States that a model feeds itself: found or named, carried in sequences, their errors measured."""

import json
from functools import partial

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import calib8
from deploy.calibration.reference_outputs import make_evaluation_set
from deploy.errors import ConfigError, FeedError
from deploy.feed.calibrator import CalibratorScript
from deploy.feed.feed import Dataset
from deploy.feed.sampling import Choice
from deploy.feed.states import find_states, spread_steps
from deploy.frontends import load
from deploy.metrics.output_form import derive_from_first
from deploy.tensors import TensorSpec
from deploy.tuning.search_samples import GrowingComparison
from tests.models import as_float32, make_model, save_net

STATES = {"h": "hn", "c": "cn"}
SHAPE = (1, 8, 6, 6)


def normal(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def tracker(names=STATES):
    """A net of two states: h of the last step, and c, which adds up what h was."""
    weights = as_float32(
        {
            "w": normal(8, 3, 3, 3, scale=0.3),
            "u": normal(8, 8, 3, 3, seed=1, scale=0.12),
            "v": normal(8, 8, 3, 3, seed=2, scale=0.2),
            "keep": 0.95,
        }
    )
    nodes = """a = Conv <pads = [1, 1, 1, 1]> (x, w) b = Conv <pads = [1, 1, 1, 1]> (h, u)
        s = Add(a, b) hn = Tanh(s) k = Mul(c, keep) cn = Add(k, hn)
        y = Conv <pads = [1, 1, 1, 1]> (cn, v)"""
    inputs = {"x": [1, 3, 6, 6], "h": SHAPE, "c": SHAPE}
    outputs = {"y": SHAPE, "hn": SHAPE, "cn": SHAPE}
    model = make_model(nodes, inputs, outputs, weights)
    replaced = {"h": "h", "c": "c", "hn": "hn", "cn": "cn"}
    for (old_in, old_out), (new_in, new_out) in zip(STATES.items(), names.items(), strict=True):
        replaced |= {old_in: new_in, old_out: new_out}
    for value in (*model.graph.input, *model.graph.output):
        value.name = replaced.get(value.name, value.name)
    for node in model.graph.node:
        for field in (node.input, node.output):
            field[:] = [replaced.get(name, name) for name in field]
    return model


def sequences(lengths):
    return [normal(length, 3, 6, 6, seed=10 + number) for number, length in enumerate(lengths)]


def run_sequence(path, frames, names=STATES):
    """Run a model over frames with its own states; return its inputs and y of each step."""
    source = path.SerializeToString() if isinstance(path, onnx.ModelProto) else str(path)
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    states = {name: np.zeros(SHAPE, np.float32) for name in names}
    steps, results = [], []
    for frame in frames:
        steps.append({"x": frame[None], **states})
        outputs = [output.name for output in session.get_outputs()]
        values = dict(zip(outputs, session.run(None, steps[-1]), strict=True))
        states = {name: values[output] for name, output in names.items()}
        results.append(values["y"])
    return steps, results


def save_sequences(folder, arrays):
    folder.mkdir()
    for number, frames in enumerate(arrays):
        np.savez(folder / f"{number}.npz", x=frames)
    return folder


def test_samples_have_states_of_use():
    model, arrays = tracker(), sequences([3, 4])
    feed = load(model).open_samples(Dataset(source=[{"x": frames} for frames in arrays]))
    expected = [step for frames in arrays for step in run_sequence(model, frames)[0]]
    fed = list(feed.samples())
    assert feed.states == STATES and len(fed) == len(expected) == 7
    for sample, step in zip(fed, expected, strict=True):
        for name, values in step.items():
            np.testing.assert_allclose(sample[name], values, atol=1e-5)
    # later, and out of order
    ((_, sample),) = feed.samples_by_key([5])
    np.testing.assert_array_equal(sample["c"], fed[5]["c"])


def test_frames_one_by_one_are_one_sequence():
    model, (frames,) = tracker(), sequences([4])
    feed = load(model).open_samples(Dataset(source=(frame[None] for frame in frames)))
    expected, _ = run_sequence(model, frames)
    for sample, step in zip(feed.samples(), expected, strict=True):
        np.testing.assert_allclose(sample["c"], step["c"], atol=1e-5)


def test_states_in_data_are_kept():
    samples = [{"x": x[None], "h": normal(*SHAPE), "c": normal(*SHAPE)} for x in normal(3, 3, 6, 6)]
    feed = load(tracker()).open_samples(Dataset(source=samples))
    assert not feed.states
    for sample, given in zip(feed.samples(), samples, strict=True):
        np.testing.assert_array_equal(sample["c"], given["c"])


def test_a_bad_sample_with_states_is_named(tmp_path):
    samples = [{"x": x[None], "h": normal(*SHAPE), "c": normal(*SHAPE)} for x in normal(3, 3, 6, 6)]
    for number, sample in enumerate(samples):
        np.savez(tmp_path / f"{number}.npz", **sample)
    (tmp_path / "2.npz").write_bytes(b"cut")
    feed = load(tracker()).open_samples(Dataset(source=tmp_path, skip_bad=True))
    assert not feed.states and len(list(feed.samples())) == 2
    samples[0]["c"] = normal(1, 9)
    with pytest.raises(FeedError, match="fit the input 'c'"):
        load(tracker()).open_samples(Dataset(source=samples))


def test_given_values_start_named_states():
    (frames,) = sequences([3])
    start = {"h": normal(3, *SHAPE[1:], seed=3), "c": normal(3, *SHAPE[1:], seed=4)}
    dataset = Dataset(source=[{"x": frames, **start}], states=STATES)
    first, second, _ = load(tracker()).open_samples(dataset).samples()
    np.testing.assert_array_equal(first["c"], start["c"][:1])
    assert not np.array_equal(second["c"], start["c"][1:2])


SCRIPT = """
import numpy as np, pycuda.autoinit, pycuda.driver as cuda

class Calibrator:
    steps = [1, 2]

    def get_batch_size(self):
        return 1

    def get_batch(self, names):
        if not self.steps:
            return None
        self.steps = self.steps[1:]
        shapes = [(1, 3 if name == "x" else 8, 6, 6) for name in names]
        self.arrays = [cuda.to_device(np.ones(shape, np.float32)) for shape in shapes]
        return list(map(int, self.arrays))
"""


def test_named_states_of_a_script_are_followed(tmp_path):
    (tmp_path / "old.py").write_text(SCRIPT)
    dataset = Dataset(source=CalibratorScript(f"{tmp_path}/old.py:Calibrator"), states=STATES)
    first, second = load(tracker()).open_samples(dataset).samples()
    assert (first["c"] == 1).all() and (second["c"] != 1).any()


def sqnr_of_sequences(model, candidate, arrays, names=STATES):
    """Return the SQNR of y in dB where each model has its own states."""
    signal = noise = 0.0
    for frames in arrays:
        _, expected = run_sequence(model, frames, names)
        _, results = run_sequence(candidate, frames, names)
        signal += np.square(expected).sum()
        noise += np.square(np.subtract(results, expected)).sum()
    return 10 * np.log10(signal / noise)


def test_search_compares_models_with_own_states():
    model, arrays = tracker(), sequences([5, 4])
    candidate = onnx.ModelProto.FromString(model.SerializeToString())
    weight = next(tensor for tensor in candidate.graph.initializer if tensor.name == "u")
    changed = onnx.numpy_helper.to_array(weight) * np.float32(1.1)
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, "u"))
    loaded = load(model)
    feed = loaded.open_samples(Dataset(source=[{"x": frames} for frames in arrays]))
    evaluation_set = make_evaluation_set(feed, loaded.model, 100)
    form, _ = derive_from_first(evaluation_set.samples_with_outputs(9))
    comparison = GrowingComparison(candidate, evaluation_set, form, int8_kernels=False)
    comparison.compare(4, threads=2)  # then the sequences go on where they were left
    accuracy = comparison.compare(9, threads=2)
    figures = {output.name: output.sqnr_db for output in accuracy.outputs}
    assert figures["y"] == pytest.approx(sqnr_of_sequences(model, candidate, arrays), abs=0.01)


@pytest.mark.parametrize("names", [STATES, {"p": "q", "m": "n"}])
def test_bench_compares_models_with_own_states(names, run, tmp_path):
    model, arrays = save_net(tracker(names), tmp_path / "a.onnx"), sequences([5, 4])
    changed = tracker(names)
    weight = next(tensor for tensor in changed.graph.initializer if tensor.name == "u")
    values = onnx.numpy_helper.to_array(weight) * np.float32(1.1)
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "u"))
    engine = save_net(changed, tmp_path / "b.onnx")
    images, report = save_sequences(tmp_path / "c", arrays), tmp_path / "r.json"
    states = [] if names == STATES else [f"--state={state}={names[state]}" for state in names]
    options = ("--images", images, *states, "--duration", 0, "--json", report)
    run.ok("bench", engine, "--against", model, *options)
    (_, row) = json.loads(report.read_text())["engines"]
    figures = {output["name"]: output["sqnr_db"] for output in row["accuracy"]["outputs"]}
    expected = sqnr_of_sequences(model, engine, arrays, names)
    assert figures["y"] == pytest.approx(expected, abs=0.01)


def test_explain_gives_int8_its_own_states(run, tmp_path):
    model = save_net(tracker(), tmp_path / "net.onnx")
    frames = sequences([12])
    images, out = save_sequences(tmp_path / "c", frames), tmp_path / "out"
    run.ok("build", model, "--images", images, "--out", out, "--effort", 0, "--duration", 0)
    (target,) = calib8.explain(out, images=images).targets
    _, float_results = run_sequence(model, frames[0])
    _, int8_results = run_sequence(out / "net.int8.onnx", frames[0])
    for image in target.held.images:
        step = int(image.name.split()[1])
        noise = int8_results[step] - float_results[step]
        sqnr = 10 * np.log10(np.square(float_results[step]).sum() / np.square(noise).sum())
        assert image.sqnr_db <= sqnr + 0.05  # that of y, unless another output is worse


@pytest.mark.slow
@pytest.mark.parametrize("effort", [0, 1])
def test_errors_that_add_up_are_measured(effort, run, tmp_path):
    names = {"p": "q", "m": "n"}  # names do not show that these are states
    model = save_net(tracker(names), tmp_path / "net.onnx")
    images = save_sequences(tmp_path / "c", sequences([12, 12]))
    states = [word for pair in names.items() for word in ("--state", "=".join(pair))]
    options = ("--images", images, *states, "--out", tmp_path / "out", "--duration", 0)
    screen = run.ok("build", model, *options, "--effort", effort)
    assert "p is q, m is n" in " ".join(screen.split())
    (engine,) = json.loads((tmp_path / "out" / "report.json").read_text())["engines"][1:]
    figures = {output["name"]: output["sqnr_db"] for output in engine["accuracy"]["outputs"]}
    built = tmp_path / "out" / "net.int8.onnx"
    expected = sqnr_of_sequences(model, built, sequences([12, 12]), names)
    assert figures["y"] == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
def test_build_with_found_states_is_deterministic(run, tmp_path):
    model = save_net(tracker(), tmp_path / "net.onnx")
    images = save_sequences(tmp_path / "c", sequences([5, 3]))
    files = []
    for out in (tmp_path / "a", tmp_path / "b"):
        options = ("--images", images, "--out", out, "--duration", 0, "--effort", 0)
        screen = " ".join(run.ok("build", model, *options).split())
        assert "8 samples" in screen and "2 sequences, in which h is hn, c is cn" in screen
        files.append((out / "net.int8.onnx").read_bytes())
    assert files[0] == files[1]


def test_limit_takes_first_steps_of_sequences():
    dataset = Dataset(source=[{"x": frames} for frames in sequences([4, 4, 4])], limit=6)
    feed = load(tracker()).open_samples(dataset)
    steps = [feed.sequence_of(key) for key in feed.spread_keys(12)]
    assert len(feed) == 6 and len(steps) == 6
    samples = list(feed.samples())
    starts = [not sample["c"].any() for sample in samples]
    assert starts[0] and sum(starts) == len(set(steps))


def test_batch_of_steps_is_refused():
    model = tracker()
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    feed = load(model).open_samples(Dataset(source=[normal(2, 4, 3, 6, 6)]))
    with pytest.raises(FeedError, match="got 4 for x"):
        list(feed.samples())


def test_bad_step_is_left_out_of_its_sequence():
    model, (frames,) = tracker(), sequences([5])
    damaged = frames.copy()
    damaged[2] = np.nan
    dataset = Dataset(source=[{"x": damaged}], skip_bad=True)
    fed = list(load(model).open_samples(dataset).samples())
    expected, _ = run_sequence(model, np.delete(frames, 2, axis=0))
    for sample, step in zip(fed, expected, strict=True):
        np.testing.assert_allclose(sample["c"], step["c"], atol=1e-5)


def test_states_are_a_dict():
    dataset = Dataset(source=sequences([5]), states=["c=c_out"])
    with pytest.raises(ConfigError, match="states are a dict"):
        load(tracker()).open_samples(dataset)


def test_steps_between_are_never_left_out():
    dataset = Dataset(source=sequences([5]), limit=Choice(every=2))
    with pytest.raises(ConfigError, match="--"):
        load(tracker()).open_samples(dataset)


@pytest.mark.parametrize("lengths", [[1], [5], [3, 1, 4], [2] * 9])
@pytest.mark.parametrize("max_steps", [1, 4, 100])
def test_spread_steps_are_starts_of_sequences(lengths, max_steps):
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    steps = spread_steps(range(len(sequence)), lambda index: int(sequence[index]), max_steps)
    assert 0 < len(steps) <= max_steps and steps == sorted(steps)
    for step in steps:
        assert step == 0 or sequence[step - 1] != sequence[step] or step - 1 in steps


def test_named_states_must_exist():
    for states in ({"h": "nothing"}, {"nothing": "hn"}):
        with pytest.raises(ConfigError, match="nothing"):
            load(tracker()).open_samples(Dataset(source=sequences([3]), states=states))


def test_named_state_must_fit_its_output():
    dataset = Dataset(source=[{"c": normal(3, 8, 6, 6)}], states={"x": "y", "h": "hn"})
    feed = load(tracker()).open_samples(dataset)
    with pytest.raises(ConfigError, match=r"'x' .* y .* float32 \[1, 8, 6, 6\]"):
        list(feed.samples())


@pytest.mark.parametrize(
    ("pairs", "found"),
    [
        (("r1i r2i", "r1o r2o"), True),
        (("past_key past_value", "present_key present_value"), True),
        (("h_in c_in", "h_out c_out"), True),
        (("state context", "stateN contextN"), True),
        (("h0 c0", "hn cn"), True),
        (("prev_hidden cache", "hidden new_cache"), True),
        (("first second", "scores boxes"), False),
    ],
)
def test_states_are_found_by_names(pairs, found):
    state_names, output_names = (names.split() for names in pairs)
    inputs = [TensorSpec(name, "float32", (1, 8)) for name in ("input", *state_names)]
    outputs = [TensorSpec(name, "float32", (1, 8)) for name in ("output", *output_names)]
    expected = dict(zip(state_names, output_names, strict=True)) if found else {}
    assert find_states(inputs, outputs) == expected
    others = [TensorSpec(spec.name, "float32", (1, 9)) for spec in outputs]
    assert find_states(inputs, others) == {}
    picture = partial(TensorSpec, dtype="float32", shape=(1, 3, 8, 8))
    picture_inputs = [picture(spec.name) for spec in inputs]
    picture_outputs = [picture(spec.name) for spec in outputs]
    assert find_states(picture_inputs, picture_outputs) == {}
