"""The plan file: what is written is read again, and what is no plan is refused in a sentence."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.errors import ConfigError
from deploy.method import Choices, Method
from deploy.tuning.plan_file import SCHEMA, PlanFile, TargetPlan, read_plan, write_plan

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
STRANGE = st.sampled_from(
    ['"', "\\", "'", "\n", "\r\n", "\t", "\x00", "\x7f", "\x85", "\u2028", "a.b", "a b", "", "ü/层",
     "#", "[x]", "= 1", '"""', "\U0001f600", "\ufeff"]
)  # fmt: skip
NAME = TEXT | STRANGE
METHOD = st.sampled_from(["mse", "minmax", "percentile", "entropy"]).map(Method.of)
NUMBER = st.floats(allow_nan=False) | st.integers(-5, 5).map(float)
TARGET = st.builds(
    TargetPlan,
    choices=st.builds(
        Choices,
        float_nodes=st.dictionaries(NAME, NAME, max_size=3),
        method=st.none() | METHOD,
        methods=st.dictionaries(NAME, METHOD, max_size=3),
    ),
    made_from=NAME,
    settled=NAME,
    tried=st.lists(st.dictionaries(NAME, NAME | NUMBER, max_size=3), max_size=2).map(tuple),
)
OWN = ("schema", "model", "float")  # keys of the file, which no target is named after
PLAN = st.builds(
    PlanFile,
    model=NAME,
    float_nodes=st.lists(NAME, max_size=3).map(tuple),
    targets=st.dictionaries(NAME.filter(lambda name: name not in OWN), TARGET, max_size=2),
)

GOOD = f"""schema = "{SCHEMA}"
model = "abc"
float = ["/head/*"]

[onnxruntime]
made_from = "def"
method = "minmax"
float = {{ "/c1" = "alone in int8 it leaves 4.4 dB of y" }}
methods = {{ "t" = "mse" }}
[[onnxruntime.tried]]
what = "all in int8"
sqnr_db = 4.4
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("plan") / "net.plan.toml"


@settings(max_examples=150)
@given(plan=PLAN)
def test_what_is_written_is_read_again(path, plan):
    write_plan(path, plan)
    assert read_plan(path) == plan


def test_a_plan_written_by_hand_is_read_and_written_again(path):
    path.write_text(GOOD, encoding="utf-8-sig")  # as an editor on Windows leaves it
    plan = read_plan(path)
    own = plan.targets["onnxruntime"]
    assert (plan.model, plan.float_nodes, own.made_from) == ("abc", ("/head/*",), "def")
    assert own.choices.float_nodes == {"/c1": "alone in int8 it leaves 4.4 dB of y"}
    assert own.choices.method == Method.of("minmax")
    assert own.choices.methods == {"t": Method.of("mse")}
    assert own.tried == ({"what": "all in int8", "sqnr_db": 4.4},)
    write_plan(path, plan)
    assert read_plan(path) == plan


def test_whole_numbers_in_a_row_of_what_was_tried_are_numbers(path):
    path.write_text(GOOD.replace("sqnr_db = 4.4", "sqnr_db = 4"))
    assert read_plan(path).targets["onnxruntime"].tried[0]["sqnr_db"] == 4.0


def refusal(path, text):
    """The sentence that a plan of this text is refused with; None where it is taken."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        plan = read_plan(path)
    except ConfigError as error:
        return str(error)
    write_plan(path, plan)
    assert read_plan(path) == plan
    return None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must begin with schema"),
        ("float = [", "must be a TOML file"),
        (GOOD.replace("plan/1", "plan/9"), "calib8-plan/9"),
        (GOOD.replace('"calib8-plan/1"', "1"), "must begin with schema"),
        (GOOD.replace('model = "abc"', "model = 3"), "model of a plan must be a string, got 3"),
        (GOOD.replace('["/head/*"]', '"/head/*"'), "float of a plan must be a list of strings"),
        (GOOD.replace('["/head/*"]', "[1]"), "float of a plan must be a list of strings"),
        (GOOD.replace('"def"', "[]"), "made_from of a plan must be a string"),
        (GOOD.replace('method = "minmax"', 'method = "minmix"'), "did you mean 'minmax'"),
        (GOOD.replace('method = "minmax"', "method = 5"), "method of a plan must be a string"),
        (GOOD.replace('"t" = "mse"', '"t" = "best"'), "a method is one of"),
        (GOOD.replace('"t" = "mse"', '"t" = []'), "a method is one of"),
        (re.sub("float = {.*}", 'float = ["/c1"]', GOOD), "[onnxruntime.float] of a plan must be"),
        (re.sub("methods = {.*}", "methods = 1", GOOD), "[onnxruntime.methods] of a plan must be"),
        (GOOD.split("[[")[0] + "tried = 5\n", "tried of a plan must be a list"),
        (GOOD.split("\n[")[0] + "\nascend = 1\n", "[ascend] of a plan must be a table"),
        (b"\xff\xfe" + GOOD.encode("utf-16-le"), "must be a TOML file"),
        (b"\x00" * 40, "must be a TOML file"),
        ("x = " + "[" * 100_000, "must be a TOML file"),
        (".".join("a" * 50_000) + " = 1", "keys of over 64 dots"),
        ('"a.b" . ' + " . ".join("a" * 50_000) + ' = "c"', "keys of over 64 dots"),
        (GOOD + GOOD, "must be a TOML file"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_sentence(path, text, words):
    said = refusal(path, text)
    assert said is not None and words in said and "\n" not in said


@pytest.mark.parametrize(
    "value", ["[1]", "true", "{ a = 1 }", "1979-05-27", "inf", "nan", "1" + "0" * 400]
)
def test_values_of_other_kinds_among_what_was_tried_hurt_nobody(path, value):
    path.write_text(GOOD.replace("sqnr_db = 4.4", f"sqnr_db = {value}"))
    plan = read_plan(path)
    write_plan(path, plan)
    assert read_plan(path).targets["onnxruntime"].tried[0]["what"] == "all in int8"


def test_a_plan_that_is_not_there_and_a_folder_are_refused(tmp_path):
    for place in (tmp_path / "no.toml", tmp_path):
        with pytest.raises(ConfigError, match="must be a TOML file"):
            read_plan(place)
