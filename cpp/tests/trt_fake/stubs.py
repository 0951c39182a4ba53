"""Write a C++ header with a stub class for every interface that TensorRT's library implements.

    python3 stubs.py INCLUDE_FOLDER > stubs.hpp

TensorRT's headers declare what its library fills in as pure virtual functions: the V classes of
NvInferImpl.h and the parser of NvOnnxParser.h. Each stub overrides all of them with a function that
names itself and aborts, so that a fake library has to write the few that it is driven through, and
compiles against every version's headers. Nothing of the headers is kept but those signatures, which
are made anew on every build.
"""

import re
import sys
from pathlib import Path

_HEAD = """\
// Made by stubs.py from TensorRT's headers; never committed.
#pragma once

#include <NvInfer.h>
#include <NvOnnxParser.h>

#include <cstdio>
#include <cstdlib>

[[noreturn]] inline void not_faked(const char* function) {
  std::fprintf(stderr, "the fake TensorRT has no %s\\n", function);
  std::abort();
}
"""


def without_comments(source: str) -> str:
    """The source without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)


def classes(source: str, pattern: str) -> dict[str, str]:
    """Name -> body of every class whose name fits the pattern, in the order of the source."""
    found = re.finditer(
        rf"^class ({pattern})\b[^{{;]*\{{(.*?)^\}};", source, flags=re.DOTALL | re.MULTILINE
    )
    return {match[1]: match[2] for match in found}


def pure_virtuals(body: str) -> list[str]:
    """The signatures of a class's pure virtual functions, on one line each, without defaults."""
    found = re.findall(r"\bvirtual\s+([^;{}]*?)=\s*0\s*;", body)
    signatures = [" ".join(signature.split()) for signature in found]
    return [
        re.sub(r"\s*=\s*[\w:]+(?=\s*[,)])", "", re.sub(r"\bTRT_(NODISCARD|DEPRECATED)\s+", "", one))
        for one in signatures
        if "~" not in one
    ]


def stub(name: str, base: str, body: str) -> str:
    """A class that overrides every pure virtual function of `base`."""
    lines = [f"struct {name} : {base} {{"]
    for signature in pure_virtuals(body):
        function = re.search(r"(\w+)\s*\(", signature)
        assert function is not None, signature
        lines.append(f'  {signature} override {{ not_faked("{name}::{function[1]}"); }}')
    return "\n".join([*lines, "};"])


def namespace(name: str, uses: str, stubs: list[str]) -> str:
    return "\n".join([f"namespace {name} {{", f"using namespace {uses};", *stubs, "}", ""])


def main(folder: Path) -> None:
    """Print the header for the TensorRT whose include folder this is."""
    library = without_comments((folder / "NvInferImpl.h").read_text("utf-8"))
    parser = without_comments((folder / "NvOnnxParser.h").read_text("utf-8"))
    inner = [
        stub(name, f"nvinfer1::apiv::{name}", body)
        for name, body in classes(library, r"V\w+").items()
        if name != "VRoot"
    ]
    outer = [
        stub(name[1:], f"nvonnxparser::{name}", body)  # its signatures mean the I classes
        for name, body in classes(parser, "IParser|IParserError").items()
    ]
    # a later declaration must say noexcept where the first did
    made = re.search(r"createNvOnnxParser_INTERNAL\([^)]*\)(\s*noexcept)?", parser)
    assert made is not None
    print(_HEAD)
    print(f"#define PARSER_NOEXCEPT {(made[1] or '').strip()}\n")
    print(namespace("stubs", "nvinfer1", inner))
    print(namespace("parser_stubs", "nvonnxparser", outer), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
