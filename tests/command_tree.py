"""The commands of the command line, and their options."""

import click

from deploy.cli import cli


def commands(command=cli, path=()):
    """Yield (names that lead to it, command) for every command without subcommands."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), (*path, name))


def click_options(command):
    return [param for param in command.params if isinstance(param, click.Option)]
