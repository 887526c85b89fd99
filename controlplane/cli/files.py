"""Files that flags name: tried before anything starts, so that a mistake is told by its flag.

Every message names the flag, the file, what is wrong with it and what to give instead.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.cli.errors import UsageError


@contextmanager
def named(flag: str, path: Path | str, wanted: str) -> Iterator[None]:
    """Tell what goes wrong with a file by the flag that names it.

    Args:
        wanted: what the file has to hold.

    Raises:
        UsageError: what is done within raises OSError or ValueError.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise _mistake(flag, path, "this is no text in UTF-8", wanted) from error
    except OSError as error:
        raise _mistake(flag, path, error.strerror or str(error), wanted) from error
    except ValueError as error:
        raise _mistake(flag, path, str(error), wanted) from error


def _mistake(flag: str, path: Path | str, reason: str, wanted: str) -> UsageError:
    return UsageError(f"{flag} {path}: {reason}; give {wanted}")


def read_password(flag: str, path: Path | None) -> str | None:
    """Return the password that a file holds; None without a file.

    Raises:
        UsageError: it cannot be read, or is not one line.
    """
    if path is None:
        return None
    with named(flag, path, "a file that holds the password, in one line"):
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        if len(lines) != 1:
            raise ValueError(f"it has {len(lines)} lines" if lines else "it is empty")
    return lines[0]


def read_key(flag: str, path: Path | None) -> str:
    """Return the API key that a file holds; empty without a file.

    Raises:
        UsageError: it cannot be read, or holds nothing that can be sent as a key.
    """
    if path is None:
        return ""
    with named(flag, path, "a file that holds one key"):
        key = path.read_text(encoding="utf-8").strip()
        if not (key and key.isascii() and key.isprintable()) or " " in key:
            raise ValueError("this is no key: one line of ASCII, no spaces")
    return key


def check_certificates(flag: str, path: Path | None) -> None:
    """See that a file holds certificates to trust. Raises UsageError."""
    if path is None:
        return
    with named(flag, path, "the PEM file of the authority that signed the server's certificate"):
        try:
            ssl.create_default_context(cafile=path)
        except ssl.SSLError as error:
            raise ValueError("there are no certificates in it") from error


def check_identity(certificate: Path, key: Path | None) -> None:
    """See that `--tls-cert` and `--tls-key` can be served with.

    Raises:
        UsageError: names the one that cannot be used.
    """
    chain = "a PEM file with the certificate chain, and its private key unless --tls-key names it"
    with named("--tls-cert", certificate, chain):
        certificate.read_bytes()
    if key is not None:
        with named("--tls-key", key, "the PEM file of the certificate's private key"):
            key.read_bytes()
    flags = "--tls-cert" if key is None else "--tls-cert and --tls-key"
    shown = str(certificate) if key is None else f"{certificate}, {key}"
    with named(flags, shown, f"{chain}, not encrypted"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password from us OpenSSL would ask for one at the terminal.
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            reason = error.reason or "of no use"
            raise ValueError(f"OpenSSL says {reason.lower().replace('_', ' ')}") from error


def check_folder(flag: str, path: Path, wanted: str) -> None:
    """See that a path is a folder. Raises UsageError."""
    with named(flag, path, wanted):
        if not path.exists():
            raise ValueError("there is no such folder")
        if not path.is_dir():
            raise ValueError("this is no folder")


def check_writable(flag: str, path: Path) -> None:
    """See that a file can be written, without touching it, before hours of work.

    Raises:
        UsageError: it cannot.
    """
    with named(flag, path, "a file in a folder that there is, where this user may write"):
        if path.is_dir():
            raise ValueError("this is a folder")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError("this user may not write there")


def check_writable_folder(flag: str, path: Path) -> None:
    """See that a folder can be written to, or made, before hours of work. Raises UsageError."""
    with named(flag, path, "a folder that there is or can be made, where this user may write"):
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not there.is_dir():
            raise ValueError(f"{there} is a file")
        if not os.access(there, os.W_OK):
            raise ValueError(f"this user may not write to {there}")
