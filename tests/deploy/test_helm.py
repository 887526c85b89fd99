"""The chart: it renders with a real Helm, and Kubernetes would take what comes out."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.helm_binary import find_helm

# They need no engine, but a Helm, which is fetched: so they run where the engine's tests do.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "multiplane"
KUBERNETES = ("1.29", "1.33")
OWN_KINDS = {"ServiceMonitor"}  # of the Prometheus operator, which brings its own schema
GUARDED = [f"nats.secrets.{name}=bus-{name}" for name in ("router", "sidecar", "detector")]
EVERYTHING = [
    *GUARDED,
    *("nats.ca=true", "predictor.enabled=true", "serviceMonitor.enabled=true"),
    *("router.apiKeysSecret=keys", "instances.cache.storageClass=fast"),
]
LEAST = ["instances.enabled=false", "router.autoscaling.enabled=false", "dashboard.enabled=false"]


def helm(*arguments: str, settings: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Helm with values."""
    given = [word for each in settings for word in ("--set", each)]
    return subprocess.run(
        [find_helm(), *arguments, str(CHART), *given], capture_output=True, text=True
    )


def render(*settings: str) -> dict[tuple[str, str], Any]:
    """Return the manifests of a release `mp`, by kind and name."""
    done = helm("template", "mp", settings=list(settings))
    assert done.returncode == 0, done.stderr
    found = [each for each in yaml.safe_load_all(done.stdout) if each]
    manifests = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(manifests) == len(found)
    return manifests


def pod(manifests: dict[tuple[str, str], Any], kind: str, name: str) -> Any:
    """Return the pod template of a workload."""
    return manifests[kind, name]["spec"]["template"]["spec"]


@pytest.mark.parametrize("settings", [[], EVERYTHING, LEAST])
def test_the_chart_passes_the_linter(settings: list[str]) -> None:
    """`helm lint --strict` has nothing to say."""
    done = helm("lint", "--strict", settings=settings)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("settings", [[], EVERYTHING, LEAST])
def test_kubernetes_would_take_it(settings: list[str], version: str) -> None:
    """Every manifest fits its schema, which knows no other field."""
    for (kind, name), manifest in render(*settings).items():
        if kind not in OWN_KINDS:
            kubernetes_validate.validate(manifest, version, strict=True)
        assert len(name) <= 63


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("nats.url=http://nats", "url"),
        ("nats.replicas=2", "replicas"),
        ("router.replicas=0", "replicas"),
        ("instances.gpus=none", "gpus"),
    ],
)
def test_wrong_values_are_refused(setting: str, reason: str) -> None:
    """A value that makes no sense is named before anything is rendered."""
    done = helm("template", "mp", settings=[setting])
    assert done.returncode != 0
    assert reason in done.stderr


def test_the_sidecar_outlives_the_engine() -> None:
    """It is a sidecar container; at the end it drains while the engine waits for it."""
    manifests = render("instances.drainSeconds=90")
    spec = pod(manifests, "StatefulSet", "mp-vllm")
    (sidecar,) = spec["initContainers"]
    (engine,) = spec["containers"]
    assert sidecar["restartPolicy"] == "Always"
    assert "kill -TERM 1" in sidecar["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "/9100" in engine["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "--drain-s=90" in sidecar["args"]
    assert spec["terminationGracePeriodSeconds"] > 90


def test_a_router_leaves_in_order() -> None:
    """It is out of the Service before it stops listening, and has time for its streams."""
    spec = pod(render("router.drainSeconds=30"), "Deployment", "mp-router")
    (router,) = spec["containers"]
    pause_s = int(router["lifecycle"]["preStop"]["exec"]["command"][-1])
    probe = router["readinessProbe"]
    assert pause_s > probe["periodSeconds"] * probe["failureThreshold"]
    assert spec["terminationGracePeriodSeconds"] > pause_s + 30


def test_nobody_is_root_and_all_is_bounded() -> None:
    """Each container of ours runs as a user, on a read-only system, within limits."""
    manifests = render(*EVERYTHING)
    specs = [
        pod(manifests, kind, name)
        for kind, name in manifests
        if kind in ("Deployment", "StatefulSet")
    ]
    assert len(specs) == 6
    for spec in specs:
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert ":latest" not in container["image"]
            if container["name"] != "engine":  # it writes caches where it likes
                assert context["readOnlyRootFilesystem"] is True


def test_passwords_come_from_secrets() -> None:
    """A member mounts its own Secret and no other; none is in an argument or a variable."""
    manifests = render(*GUARDED)
    for kind, name, secret in (
        ("Deployment", "mp-router", "bus-router"),
        ("Deployment", "mp-detector", "bus-detector"),
        ("StatefulSet", "mp-vllm", "bus-sidecar"),
    ):
        volumes = pod(manifests, kind, name)["volumes"]
        mounted = [each["secret"]["secretName"] for each in volumes if "secret" in each]
        assert mounted == [secret]


def test_policies_leave_the_events_closed() -> None:
    """Engines take requests from routers; nobody reaches their KV events, which have no users."""
    manifests = render()
    ingress = manifests["NetworkPolicy", "mp-vllm"]["spec"]["ingress"]
    ports = {port["port"] for rule in ingress for port in rule["ports"]}
    assert ports == {"http", "metrics"}
    assert all(rule["from"] for rule in ingress)
    everybody = manifests["NetworkPolicy", "mp-default"]["spec"]
    assert everybody["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in everybody


def test_routers_are_scaled_by_what_they_do() -> None:
    """By a metric of each router; disruptions take one at a time."""
    manifests = render()
    scaler = manifests["HorizontalPodAutoscaler", "mp-router"]["spec"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == "multiplane_requests_per_second"
    assert "replicas" not in manifests["Deployment", "mp-router"]["spec"]
    for name in ("mp-router", "mp-vllm"):
        assert manifests["PodDisruptionBudget", name]["spec"]["maxUnavailable"] == 1
