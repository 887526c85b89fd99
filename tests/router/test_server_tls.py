"""The certificate of the listener, replaced while clients come."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest

from router.server_tls import ServerTls
from tests.bus.certificates import make_certificates
from tests.router.http_rig import PROBE, Rig, on_uvloop, parse_answers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two certificate authorities, each with a certificate of this host."""
    top = tmp_path_factory.mktemp("certificates")
    for name in ("old", "new"):
        make_certificates(top / name)
    return top / "old", top / "new"


async def shown(rig: Rig, port: int, authority: Path, name: str | None) -> bool:
    """Whether the listener is whom an authority vouches for; asked by name, or by address."""
    trust = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    trust.check_hostname = name is not None
    try:
        client = await rig.connect(port, ssl=trust, server_hostname=name or "")
    except ssl.SSLCertVerificationError:
        return False
    client.send(PROBE)
    return parse_answers(await client.read_all())[0].status == 200


@pytest.mark.parametrize("name", ["localhost", None])
def test_a_pair_that_is_replaced_file_by_file(
    folders: tuple[Path, Path], tmp_path: Path, name: str | None
) -> None:
    """While chain and key do not fit the old pair serves on; then the new one does."""
    old, new = folders
    chain, key = tmp_path / "chain", tmp_path / "key"
    shutil.copy(old / "server.pem", chain)
    shutil.copy(old / "server.key", key)
    tls = ServerTls(str(chain), str(key))
    tls.load()

    @on_uvloop
    async def check() -> None:
        async with Rig() as rig:
            _, port = await rig.server.start("127.0.0.1", 0, tls=tls.context)
            assert await shown(rig, port, old, name)
            shutil.copy(new / "server.pem", chain)
            with pytest.raises(OSError, match="MISMATCH"):
                tls.load()
            assert await shown(rig, port, old, name)
            shutil.copy(new / "server.key", key)
            tls.load()
            assert await shown(rig, port, new, name)
            assert not await shown(rig, port, old, name)

    check()


def test_a_key_may_be_in_the_same_file(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """One file with both is enough; one without a key is told."""
    both = tmp_path / "both"
    both.write_text((folders[0] / "server.pem").read_text())
    with pytest.raises(OSError, match="PEM"):
        ServerTls(str(both)).load()
    both.write_text(both.read_text() + (folders[0] / "server.key").read_text())
    ServerTls(str(both)).load()
