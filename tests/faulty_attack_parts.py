"""Parts for the attack, each with one fault that it must find, or none, for tests/test_attack.py.

Run as a program, it reads a command line of the attack from each line of stdin and answers with a
line of JSON: the exit code and what was printed.
"""

import contextlib
import io
import json
import os
import sys
import time
from dataclasses import replace
from functools import partial

import click

from deploy.errors import FeedError
from scripts.attacks.__main__ import main
from scripts.attacks.fuzz import Reader


def accept(path):
    pass


def refuse(path):
    raise FeedError("a rule, what was got, the way out")


def raise_fault(path):
    raise IndexError("a fault")


def write_control_characters(path):
    os.write(2, b"calib8: error: \x1b[2J\n")  # past the printer
    sys.exit(1)


def echo_control_characters(path):
    click.echo("name: \u202e")


def write_second_line(path):
    os.write(2, b"libjpeg: premature end\n")
    refuse(path)


def take_8_gib(path):
    bytearray(8 << 30)


def sleep_forever(path):
    time.sleep(600)


def abort_on_die(path):
    if b"die" in path.read_bytes():
        os.abort()


READ_BY_NAME = {
    "sound": accept,
    "refusing": refuse,
    "faulty": raise_fault,
    "speaking": write_control_characters,
    "printing": echo_control_characters,
    "chattering": write_second_line,
    "eating": take_8_gib,
    "endless": sleep_forever,
    "dying": abort_on_die,
}


def make_part(name, read):
    def open_reader(folder):
        return lambda path: partial(read, path)

    reader = Reader(
        name=name,
        suffix=".txt",
        cases=160,
        seeds=lambda folder: [b"die"],
        limit_s=0.2 if name == "endless" else 60,
        open=open_reader,
        mutate=lambda rng, data, other: rng.choice((data, b"live")),
    )
    return replace(reader.part, limit_s=180)


def answer_command_lines():
    parts = {f"fuzz-{name}": make_part(name, read) for name, read in READ_BY_NAME.items()}
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                code = main(line.split(), parts=parts)
            except SystemExit as stop:
                code = stop.code
        print(json.dumps([code, output.getvalue()]), flush=True)


if __name__ == "__main__":
    answer_command_lines()
