"""The errors that Moray raises on purpose.

Every message names the field or file, the value received, what is accepted, and what to do. Entry points
print the message on one line and exit with `exit_code`; anything else that escapes is a defect and keeps
its traceback. Exit codes of every command:

    0    done
    1    the work failed: data, files, a cluster, a deployment, two artefacts that do not belong together
    2    a setting cannot be used: on the command line, in YAML, in an environment variable, or the model that it names
    130  interrupted by Ctrl-C
    143  ended by SIGTERM, as `ray job stop` sends it
"""


class MorayError(Exception):
    """Base of all errors a user can cause or fix. Picklable: built from its message alone."""

    exit_code = 1


class ConfigError(MorayError):
    """A configuration that cannot be used: unknown key, wrong type, missing file, impossible value."""

    exit_code = 2


class DataError(MorayError):
    """Chats, questions or cached activations that cannot be read or do not mean what they should."""


class UnreachableError(DataError):
    """A store that does not answer now, or does not let us in: nothing of ours is known to be wrong."""


class DamagedError(DataError):
    """A file of ours that is missing, cut short or changed, and can be made again."""


class MismatchError(MorayError):
    """Two artefacts that do not belong together, such as a drafter and a target it was not trained for."""


class StorageFullError(MorayError):
    """A disk, a quota or a bucket has no room for what is to be written. Room made, the same command goes on."""


class LosslessError(MorayError):
    """Text that had to be the target's own, token by token, was not."""


class ClusterError(MorayError):
    """Ray does not start here, or no cluster answers where one is said to be."""


class RankError(MorayError):
    """A process that holds a part of a target has ended or does not answer."""
