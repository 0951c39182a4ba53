"""Names, patterns and types that choose nodes of a model."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import ConfigError
from deploy.graph.index import MODULE_SCOPES, match_nodes, match_patterns, module_paths
from tests.models import make_model

NAMES = st.lists(
    st.text(st.sampled_from("abc/[]*?!.@:#op0"), min_size=1, max_size=8), min_size=1, unique=True
)


NODES = {
    "/b/conv": "Conv",
    "/a/conv": "Conv",
    "/a/act": "Sigmoid",
    "conv0": "Conv",
    "conv[0]": "Gemm",
    "": "Sigmoid",
    "op:Conv": "Relu",
    "@home": "Relu",
}


NET = make_model([(op, "x", "y", {"name": name}) for name, op in NODES.items()], {}, {})


@pytest.mark.parametrize(
    ("patterns", "matches"),
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
def test_nodes_match_names_patterns_and_types(patterns, matches):
    assert match_nodes(NET, patterns) == matches


SCOPES_BY_NODE = {  # as torch's exporter stores them; the last one is the operation
    "node_Conv_17": "['', 'r1', 'r1.a', 'r1.a.1', '_native_batch_norm']",
    "node_relu_1": "['', 'r1', 'r1.a', 'r1.a.2', 'relu_1']",
    "node_add": "['', 'r1', 'add']",
    "node_linear": "['', 'fc', 'linear']",
    "node_mean": "['', 'mean']",
    "node_odd": "no list",
}


def make_exported():
    nodes = [("Relu", "x", "y", {"name": name}) for name in SCOPES_BY_NODE]
    model = make_model(nodes, {}, {})
    for node in model.graph.node:
        node.metadata_props.add(key=MODULE_SCOPES, value=SCOPES_BY_NODE[node.name])
    return model


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("r1.a.1", ("node_Conv_17",)),
        ("r1", ("node_Conv_17", "node_relu_1", "node_add")),
        ("r1.a.*", ("node_Conv_17", "node_relu_1")),
        ("fc", ("node_linear",)),
        ("node_add", ("node_add",)),
    ],
)
def test_module_path_matches_its_nodes(pattern, matches):
    assert match_nodes(make_exported(), [pattern]) == matches


def test_module_path_is_of_innermost_module():
    assert module_paths(make_exported()) == {
        "node_Conv_17": "r1.a.1",
        "node_relu_1": "r1.a.2",
        "node_add": "r1",
        "node_linear": "fc",
    }


@pytest.mark.parametrize(
    ("pattern", "hint"),
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
def test_pattern_without_match_is_refused(pattern, hint):
    with pytest.raises(ConfigError) as caught:
        match_nodes(NET, ["/a/act", pattern])
    assert hint in str(caught.value)


def test_patterns_are_read_from_a_file(tmp_path):
    pattern_file = tmp_path / "float.txt"
    pattern_file.write_text("# the head\r\n\r\n  op:Sigmoid  \n/b/*\nconv[0]\n")
    assert match_nodes(NET, [f"@{pattern_file}"]) == ("/b/conv", "/a/act", "conv[0]")
    pattern_file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="at least one"):
        match_nodes(NET, [f"@{pattern_file}"])
    pattern_file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="text file"):
        match_nodes(NET, [f"@{pattern_file}"])


@pytest.mark.slow
@given(NAMES, st.data())
def test_every_name_matches_only_itself(names, data):
    nodes = [(name, "Conv") for name in names]
    chosen = data.draw(st.sets(st.sampled_from(names)))
    assert match_patterns(nodes, sorted(chosen)) == tuple(name for name in names if name in chosen)


@given(NAMES, st.text(st.sampled_from("abc/*?[]!0"), min_size=1, max_size=6))
def test_patterns_match_as_in_a_shell(names, pattern):
    nodes = [(name, "Conv") for name in names]
    expected = tuple(n for n in names if fnmatchcase(n, pattern))
    if pattern in names:
        assert match_patterns(nodes, [pattern]) == (pattern,)
    elif expected:
        assert match_patterns(nodes, [pattern]) == expected
        assert match_patterns(nodes, [*expected, pattern]) == expected
    else:
        with pytest.raises(ConfigError):
            match_patterns(nodes, [pattern])
