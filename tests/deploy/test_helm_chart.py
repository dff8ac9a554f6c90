"""The Helm chart: what it makes is what Kubernetes, the operators and our own programs take."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor

from tests.vlmserve.server_process import ROOT, ServerProcess, await_that
from vlmserve.api.auth import METRICS_PATH, OPEN_PATH
from vlmserve.cli import build_parser
from vlmserve.config.settings import ENV_PREFIX, ServerSettings, load_settings
from vlmserve.router.command import read_settings
from vlmserve.router.settings import DNS, RouterSettings

HELM = ROOT / "deploy" / "helm"
CHART = HELM / "vlmserve"
SERVICES: dict[str, dict[str, Any]] = {
    "default": {},
    **{path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (HELM / "examples").glob("*.yaml")},
}
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
METRICS = re.findall(r"^\| .*`(vlmserve:\w+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.M)
SCHEMA_OF = {"ScaledObject": ScaledObject, "ServiceMonitor": ServiceMonitor}
KEYS = {"api_key", "admin_api_key", "peer_key", "upstream_api_key"}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifests of a release called vlm in the namespace models."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="vlm", namespace="models")
    return [one for name, text in files.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one]


class Release:
    """Rendered manifests, by kind and name."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.all = render(values)
        self.by_kind: dict[str, dict[str, dict[str, Any]]] = {}
        for one in self.all:
            self.by_kind.setdefault(one["kind"], {})[one["metadata"]["name"]] = one

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        return self.by_kind.get(kind, {})

    @property
    def workloads(self) -> dict[str, dict[str, Any]]:
        return self.of("StatefulSet") | self.of("Deployment")

    def pod(self, name: str) -> dict[str, Any]:
        return self.workloads[name]["spec"]["template"]["spec"]

    def container(self, name: str) -> dict[str, Any]:
        [container] = self.pod(name)["containers"]
        return container

    def labels(self, name: str) -> dict[str, str]:
        return self.workloads[name]["spec"]["template"]["metadata"]["labels"]

    def chosen(self, selector: dict[str, str]) -> set[str]:
        """Workloads whose pods a selector chooses."""
        return {name for name in self.workloads if selector.items() <= self.labels(name).items()}


@pytest.fixture(scope="module", params=SERVICES)
def release(request: pytest.FixtureRequest) -> Release:
    return Release(SERVICES[request.param])


@pytest.fixture
def settings(release: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What our own programs read of each workload's arguments and variables."""
    clients = tmp_path / "clients"
    clients.write_text("someone key\n")
    found: dict[str, Any] = {}
    for name in release.workloads:
        for variable in list(os.environ):
            if variable.startswith(ENV_PREFIX):
                monkeypatch.delenv(variable)
        for variable in release.container(name).get("env", ()):
            monkeypatch.setenv(variable["name"], variable.get("value", "from the Secret"))
        command, *words = [
            word.replace("/etc/vlmserve/keys/clients", str(clients)) for word in release.container(name)["args"]
        ]
        if command == "router":
            found[name] = read_settings(words)
            continue
        args = vars(build_parser().parse_args([command, *words]))
        model = {"model": args["model_argument"]} if args["model_argument"] else {}
        own = ("command", "config", "model_argument")
        found[name] = load_settings({key: args[key] for key in args if key not in own} | model)
    return found


def http_of(settings: ServerSettings | RouterSettings) -> ServerSettings:
    return settings.http if isinstance(settings, RouterSettings) else settings


def test_the_examples_are_the_services_that_the_page_is_about() -> None:
    assert set(SERVICES) == {"default", "one", "replicas", "roles"}
    made = {name: set(Release(values).workloads) for name, values in SERVICES.items()}
    assert made == {
        "default": {"vlm-replica"},
        "one": {"vlm-replica"},
        "replicas": {"vlm-replica", "vlm-router"},
        "roles": {"vlm-prefill", "vlm-decode", "vlm-encode", "vlm-router"},
    }


def test_fields_of_a_set_stand_in_place_of_the_defaults() -> None:
    """Zeros and empty ones, too."""
    defaults = {"gpus": 2, "args": ["--access-log"], "resources": {"limits": {"memory": "8Gi"}}}
    own = {"gpus": 0, "replicas": 1, "args": [], "resources": {"requests": {"cpu": "1"}}}
    release = Release({"defaults": defaults, "replica": own})
    assert release.container("vlm-replica")["resources"] == {"requests": {"cpu": "1"}}
    assert "--access-log" not in release.container("vlm-replica")["args"]
    release = Release({"defaults": defaults, "replica": {"replicas": 3}})
    assert release.container("vlm-replica")["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 2}
    assert {"--access-log", "--tp-size=2"} <= set(release.container("vlm-replica")["args"])
    assert release.of("StatefulSet")["vlm-replica"]["spec"]["replicas"] == 3


def test_manifests_keep_to_their_schemas(release: Release) -> None:
    for one in release.all:
        if one["kind"] in SCHEMA_OF:
            read = SCHEMA_OF[one["kind"]].model_validate(one)
            assert read.model_dump(by_alias=True, exclude_unset=True, mode="json") == one, "a field that is not there"
        else:
            for version in ("1.27", "1.37"):  # the oldest that Chart.yaml allows, and the newest that there was
                kubernetes_validate.validate(one, version, strict=True)


def test_arguments_are_settings_that_can_be_combined(release: Release, settings: dict[str, Any]) -> None:
    for name, found in settings.items():
        http = http_of(found)
        assert (http.host, http.port) == ("0.0.0.0", 8000)
        assert {"vlm", "vlm.models.svc.cluster.local"} <= set((http.allowed_hosts or "").split(","))
        if isinstance(found, RouterSettings):
            continue
        role, gpus = name.removeprefix("vlm-"), release.container(name)["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert found.engine.role == ("all" if role == "replica" else role)
        spread = found.engine.encoder_dp_size if role == "encode" and gpus > 1 else found.engine.tp_size
        assert spread == max(1, gpus)
        assert found.engine.model == release.values.get("model", "")
        given = [*release.values.get("args", ()), *release.values.get(role, {}).get("args", ())]
        assert set(given) <= set(release.container(name)["args"])


def test_probes_ask_what_is_there(release: Release, settings: dict[str, Any]) -> None:
    for name, found in settings.items():
        container = release.container(name)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["http"] == http_of(found).port
        probes = {kind: container[kind] for kind in container if kind.endswith("Probe")}
        asked = {kind for kind, probe in probes.items() if probe.get("httpGet") == {"path": OPEN_PATH, "port": "http"}}
        if isinstance(found, RouterSettings):  # whose /health is that of the servers
            assert asked == {"readinessProbe"}
            assert probes["livenessProbe"]["tcpSocket"] == {"port": "http"}
        else:
            assert asked == set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
            startup = probes["startupProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= found.startup_timeout_s


def test_pods_have_the_time_to_end(release: Release, settings: dict[str, Any]) -> None:
    """docs/deployment.md: besides the answers, 5 s each for embeddings and prefixes, and some for the processes."""
    for name, found in settings.items():
        _, before = release.container(name)["lifecycle"]["preStop"]["exec"]["command"]
        needed = float(before) + http_of(found).shutdown_timeout_s + 5 + 5 + 5
        assert release.pod(name)["terminationGracePeriodSeconds"] >= needed


def test_servers_find_each_other(release: Release, settings: dict[str, Any]) -> None:
    """By names that the sets and their headless services give to pods."""
    headless = {name for name, service in release.of("Service").items() if service["spec"].get("clusterIP") == "None"}
    assert headless == set(release.of("StatefulSet"))
    listens = {"prefill": "prefill_listen", "encode": "encoder_listen"}
    for name, found in settings.items():
        if isinstance(found, RouterSettings):
            wanted = {(one.removeprefix("vlm-"), f"{DNS}http://{one}:8000") for one in headless}
            assert set(found.servers) == wanted
            continue
        for role, urls in (("prefill", found.engine.prefill_urls), ("encode", found.engine.encoder_urls)):
            at = f"vlm-{role}"
            there = at in headless and role not in name and ("decode" in name or role == "encode")
            assert (urls is not None) == there
            if urls is not None:
                [port] = {port["containerPort"] for port in release.container(at)["ports"] if port["name"] == "peers"}
                sets, scaled = release.of("StatefulSet"), release.of("ScaledObject").get(at)
                most = scaled["spec"]["maxReplicaCount"] if scaled else sets[at]["spec"]["replicas"]
                assert urls.split(",") == [f"tcp://{at}-{number}.{at}:{port}" for number in range(most)]
                assert getattr(settings[at].engine, listens[role]) == f"0.0.0.0:{port}"
                assert sets[at]["spec"]["serviceName"] == at


def test_clients_reach_what_answers(release: Release) -> None:
    front = release.of("Service")["vlm"]["spec"]
    [asked] = release.chosen(front["selector"])
    assert asked == ("vlm-router" if "vlm-router" in release.workloads else "vlm-replica")
    assert [port["targetPort"] for port in front["ports"]] == ["http"]


def test_keys_come_from_the_secret_alone(release: Release) -> None:
    named = set(release.values.get("keys", {}).values()) - {release.values.get("keys", {}).get("secret")}
    used = set()
    for name in release.workloads:
        words = [word.partition("=")[0].lstrip("-").replace("-", "_") for word in release.container(name)["args"]]
        assert not KEYS & set(words)
        for variable in release.container(name).get("env", ()):
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["name"] == "vlmserve"
            used.add(reference["key"])
        for volume in release.pod(name)["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["secretName"] == "vlmserve"
                used |= {item["key"] for item in volume["secret"]["items"]}
    assert used == named
    for monitor in release.of("ServiceMonitor").values():
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["authorization"]["credentials"] == {"name": "vlmserve", "key": "admin"}


def test_what_a_pod_writes_to_is_a_volume(release: Release) -> None:
    written = {path for path in re.findall(r"=(/var/\S+)", DOCKERFILE) if not path.startswith("/var/lib/apt")}
    assert len(written) == 3
    for name in release.workloads:
        pod, container = release.pod(name), release.container(name)
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["securityContext"]["runAsNonRoot"]
        assert f"--uid {pod['securityContext']['runAsUser']} " in DOCKERFILE
        assert not pod["enableServiceLinks"]
        assert "/tmp" in mounts
        if name == "vlm-router":
            continue
        folders = [word.partition("=")[2] for word in container["args"] if "-dir=" in word]
        assert all(any(path.startswith(mount) for mount in mounts) for path in (*written, *folders, "/dev/shm/x"))
        shm, memory = volumes["shm"]["emptyDir"], container["resources"]["limits"]["memory"]
        assert shm["medium"] == "Memory"
        assert 2 * int(shm["sizeLimit"].removesuffix("Gi")) < int(memory.removesuffix("Gi"))
        claim = volumes["cache"].get("persistentVolumeClaim", {}).get("claimName")
        assert {claim} - {None} == set(release.of("PersistentVolumeClaim"))


def test_budgets_and_scaling_are_of_what_there_is(release: Release) -> None:
    budgets = release.of("PodDisruptionBudget")
    assert set(budgets) == set(release.workloads)
    for name, budget in budgets.items():
        assert release.chosen(budget["spec"]["selector"]["matchLabels"]) == {name}
        assert release.workloads[name]["spec"]["selector"]["matchLabels"].items() <= release.labels(name).items()
    scaled = release.of("ScaledObject")
    assert set(scaled) == {f"vlm-{name}" for name, own in release.values.items() if "maxReplicas" in (own or ())}
    for name, one in scaled.items():
        assert one["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}
        assert "replicas" not in release.of("StatefulSet")[name]["spec"]
        for trigger in one["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            figures = re.findall(r"vlmserve:\w+", query)
            assert figures
            assert set(figures) <= set(METRICS)
            assert query.count(f'{{namespace="models",service="{name}"}}') == len(figures)


def test_prometheus_scrapes_each_pod_once(release: Release) -> None:
    monitors = release.of("ServiceMonitor")
    chosen: list[str] = []
    for monitor in monitors.values():
        [within] = monitor["spec"]["selector"]["matchExpressions"]
        labels = monitor["spec"]["selector"]["matchLabels"]
        for service in release.of("Service").values():
            own = service["metadata"]["labels"]
            if labels.items() <= own.items() and own[within["key"]] in within["values"]:
                chosen += release.chosen(service["spec"]["selector"])
        [endpoint] = monitor["spec"]["endpoints"]
        assert (endpoint["path"], endpoint["port"]) == (METRICS_PATH, "http")
    assert sorted(chosen) == (sorted(release.workloads) if monitors else [])
    page = (ROOT / "docs" / "router.md").read_text(encoding="utf-8")
    for rule in monitors.get("vlm-router", {"spec": {"endpoints": [{}]}})["spec"]["endpoints"][0].get(
        "metricRelabelings", ()
    ):
        figures = re.findall(r"`(vlmserve:\w+)`", page)
        assert len([name for name in figures if re.fullmatch(rule["regex"], name)]) == len(figures) > 5


@pytest.mark.slow
def test_what_the_manifests_start_answers_their_probes_and_ends_in_time(tmp_path: Path) -> None:
    """A server and a router as in a cluster, but for their addresses."""
    release = Release({"router": {"replicas": 1}, "preStopS": 0, "shutdownTimeoutS": 5})

    def start(name: str, **addresses: str) -> ServerProcess:
        words = release.container(name)["args"]
        for old, new in ({"0.0.0.0": "127.0.0.1", "--port=8000": "--port=0"} | addresses).items():
            words = [word.replace(old, new) for word in words]
        return ServerProcess([sys.executable, "-m", "vlmserve.cli", *words], tmp_path / name)

    server = start("vlm-replica")
    router = start("vlm-router", **{"vlm-replica:8000": f"localhost:{server.port()}"})
    try:
        for name, process in (("vlm-replica", server), ("vlm-router", router)):
            path = release.container(name)["readinessProbe"]["httpGet"]["path"].removeprefix("/")
            await_that(lambda process=process, path=path: process.get(path)[0] == 200)
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert router.post("v1/chat/completions", model="vlmserve-default", **asked)[0] == 200
        for process in (router, server):
            process.process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
    finally:
        for process in (router, server):
            process.end()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"replica": {"gpu": 4}}, "gpu"),
        ({"modle": "x"}, "modle"),
        ({"router": {"replicas": -1}}, "replicas"),
        ({"keys": {"api": "api"}}, "keys.secret must name the Secret"),
        ({"decode": {"replicas": 1}}, "need each other"),
        ({"encode": {"replicas": 1}}, "keys.peer must name"),
        ({"decode": {"replicas": 1}, "prefill": {"replicas": 1}}, "keys.peer must name"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm_python.HelmError, match=complaint):
        render(values)


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    report = helm_python.lint(str(CHART), strict=True)
    assert (report["errors"], [one for one in report["messages"] if one["severity"] > 1]) == ([], [])
