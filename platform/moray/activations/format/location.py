"""Converts cache paths to URIs, and refuses URIs that contain credentials."""

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from moray.errors import ConfigError

_SECRETS = ("access_key", "secret_key", "session_token", "sas_token", "client_secret", "account_key")


def refuse_secrets(uri: str) -> None:
    """Refuse a URI that contains credentials: they would be written into run.yaml, logs and messages.

    Raises:
        ConfigError: the URI contains credentials; the message does not repeat them.
    """
    if "://" not in uri:
        return
    parts = urlsplit(uri)
    place = parts.netloc.rpartition("@")
    named = [key for key, _ in parse_qsl(parts.query) if key.lower() in _SECRETS]
    if (place[1] and (parts.scheme == "s3" or ":" in place[0])) or named:
        raise ConfigError(
            f"a URI of an activation cache ({parts.scheme}://...@{place[2]}) holds credentials, which would be written "
            "into run.yaml and logs; give them in the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
        )


def absolute(path: str) -> str:
    """Return a local path as a URI."""
    return Path(path).absolute().as_uri()
