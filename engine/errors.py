"""Errors that a person can act on: one line that says what is wrong and what to do."""

from __future__ import annotations


class EstafetError(Exception):
    """Base of every error that is shown to a person as one line, without a traceback."""

    exit_code = 70


class UsageError(EstafetError):
    """The command line or the topology is wrong: nothing was started."""

    exit_code = 2


class StartError(EstafetError):
    """Something that the system needs (a model, a port, an actor) could not be started."""

    exit_code = 3


class ModelError(StartError):
    """A model file is missing, truncated, corrupt or of a kind that cannot be served."""
