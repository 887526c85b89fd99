"""The certificate that clients are shown, which may be replaced while they are served.

A context that serves must not be given another certificate: where the new chain and the new key do
not belong together, as while somebody is replacing one after the other, OpenSSL takes the chain,
refuses the key, and the context serves nobody any more. So each certificate is loaded into a
context of its own, and only one that is whole takes the place of the one before, for handshakes
that begin from then on.
"""

from __future__ import annotations

import ssl


class ServerTls:
    """TLS for a listener.

    Args:
        cert_path: certificate chain, PEM.
        key_path: its private key, PEM; empty if it is in the same file.

    Attributes:
        paths: of the files.
        context: to listen with; of use once `load` has succeeded.
    """

    def __init__(self, cert_path: str, key_path: str = "") -> None:
        self.paths = (cert_path, key_path or cert_path)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.sni_callback = self._choose
        self._latest = self.context

    def load(self) -> None:
        """Read both files, and show what they hold to clients from now on.

        Raises:
            OSError: a file cannot be read or used (`ssl.SSLError`); nothing has changed.
        """
        fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        fresh.load_cert_chain(*self.paths)
        self._latest = fresh

    def _choose(self, handshake: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Let a handshake that begins use the latest certificate; also where no name is sent."""
        handshake.context = self._latest
