"""The files of a deployment agree with each other and with the project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.deploy.base_images import IMAGES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def locked(*files: str) -> dict[str, str]:
    """Return the version of each package that lock files name."""
    text = "".join((DEPLOY / file).read_text() for file in files)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("extra", "files"),
    [
        (None, ["requirements.lock"]),
        ("predictor", ["requirements.lock", "requirements-predictor.lock"]),
    ],
)
def test_the_locks_hold_what_the_project_needs(extra: str | None, files: list[str]) -> None:
    """Every dependency is locked at a version that fits; otherwise make the locks anew."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["optional-dependencies"][extra] if extra else project["dependencies"]
    versions = locked(*files)
    for requirement in map(Requirement, needed):
        assert requirement.name in versions
        assert requirement.specifier.contains(versions[requirement.name]), requirement


def test_every_package_is_copied_into_the_image() -> None:
    """A new top-level package must be in the Dockerfile and in .dockerignore."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {each.partition(".")[0] for each in project["tool"]["setuptools"]["packages"]}
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for package in packages:
        assert f"COPY {package}/ {package}/" in dockerfile
        assert f"!{package}" in ignored


def services() -> dict[str, Any]:
    """Return the services of compose.yaml."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return found


def test_images_are_pinned_and_known() -> None:
    """Every image has a version, and every one that is not ours can be made where none answers."""
    for name, service in services().items():
        image = service["image"]
        assert ":" in image, name
        assert not image.endswith(":latest"), name
        if not image.startswith("multiplane") and not name.startswith("vllm"):
            assert image in IMAGES, name


def test_every_member_has_its_credentials() -> None:
    """Whoever is on the bus is a member, and mounts the password of that member."""
    members = tomllib.loads((DEPLOY / "compose" / "members.toml").read_text())
    names = {member["name"] for kind in members.values() for member in kind}
    for name, service in services().items():
        user = (service.get("environment") or {}).get("MULTIPLANE_NATS_USER")
        if user is not None:
            assert user in names, name
            assert f"credentials-{user}:/run/secrets/bus:ro,nocopy" in service["volumes"], name
