"""Which nodes `--keep-float` means: names, patterns, types, files."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from deploy.errors import ConfigError
from deploy.graph.index import matching, select

NAMES = st.lists(
    st.text(st.sampled_from("abc/[]*?!.@:#op0"), min_size=1, max_size=8), min_size=1, unique=True
)


def model(*nodes):
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    made = [helper.make_node(op, ["x"], ["y"], name=name) for name, op in nodes]
    return helper.make_model(helper.make_graph(made, "g", ends[:1], ends[1:]))


NET = model(
    ("/b/conv", "Conv"), ("/a/conv", "Conv"), ("/a/act", "Sigmoid"), ("conv0", "Conv"),
    ("conv[0]", "Gemm"), ("", "Sigmoid"), ("op:Conv", "Relu"), ("@home", "Relu"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ((), ()),
        (("/a/act", "/b/conv"), ("/b/conv", "/a/act")),  # the model's order
        (("/a/*",), ("/a/conv", "/a/act")),
        (("/a/*", "/*/conv"), ("/b/conv", "/a/conv", "/a/act")),
        (("/?/act",), ("/a/act",)),
        (("op:Sigmoid",), ("/a/act",)),
        (("op:Sig*", "op:Gemm"), ("/a/act", "conv[0]")),
        (("conv[0]",), ("conv[0]",)),  # a name before its reading as a pattern
        (("conv[01]",), ("conv0",)),
        (("conv[[]*",), ("conv[0]",)),
        (("op:Conv",), ("op:Conv",)),
        (("@home",), ("@home",)),
    ],
)
def test_names_patterns_and_types(patterns, found):
    assert matching(NET, patterns) == found


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("/a/cnov", "did you mean '/a/conv'?"),
        ("/model.22/*", "inspect --all"),
        ("op:Sigmoit", "did you mean 'op:Sigmoid'?"),
        ("OP:Sigmoid", "got 'OP:Sigmoid'"),
        ("op:conv", "did you mean 'op:Conv'?"),
        ("", "got ''"),
        ("@nowhere.txt", "must be a text file"),
        ("@", "must be a text file"),
        ("@\0", "must be a text file"),
    ],
)
def test_what_means_nothing_is_an_error(pattern, said):
    with pytest.raises(ConfigError) as caught:
        matching(NET, ["/a/act", pattern])
    assert said in str(caught.value)


def test_a_file_holds_one_a_line(tmp_path):
    listed = tmp_path / "float.txt"
    listed.write_text("# the head\r\n\r\n  op:Sigmoid  \n/b/*\nconv[0]\n")
    assert matching(NET, [f"@{listed}"]) == ("/b/conv", "/a/act", "conv[0]")
    listed.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="at least one"):
        matching(NET, [f"@{listed}"])
    listed.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="text file"):
        matching(NET, [f"@{listed}"])


@given(NAMES, st.data())
def test_every_name_means_itself_alone(names, data):
    known = [(name, "Conv") for name in names]
    chosen = data.draw(st.sets(st.sampled_from(names)))
    assert select(known, sorted(chosen)) == tuple(name for name in names if name in chosen)


@given(NAMES, st.text(st.sampled_from("abc/*?[]!0"), min_size=1, max_size=6))
def test_a_pattern_means_what_a_shell_means_in_the_models_order(names, pattern):
    known = [(name, "Conv") for name in names]
    expected = tuple(n for n in names if fnmatchcase(n, pattern))
    if pattern in names:
        assert select(known, [pattern]) == (pattern,)
    elif expected:
        assert select(known, [pattern]) == expected
        assert select(known, [*expected, pattern]) == expected
    else:
        with pytest.raises(ConfigError):
            select(known, [pattern])
