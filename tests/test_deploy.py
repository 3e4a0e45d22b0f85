"""What `deploy/` ships for Kubernetes, rendered by Helm and checked against Kubernetes' schemas; image and
scripts, linted. `tests.test_pods` runs the rendered pods.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptd.config.daemon_config import load_config
from tests.chart import CHART, ROOT, VALUES, documents, render, why_no_helm

needs_helm = pytest.mark.skipif(bool(why_no_helm()), reason=why_no_helm() or "it is there")
DEPLOY = ROOT / "deploy"
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "without peers": {"peers": {"enabled": False}},
    "nothing privileged": {"mount": False},
    "host network, store, operator": {
        "peers": {"hostNetwork": True, "keysSecret": "ckptd-keys"},
        "store": {"url": "s3://bucket/prefix", "credentialsSecret": "s3"},
        "metrics": {"podMonitor": True, "from": [{"namespaceSelector": {}}]},
        "settings": {"replicas": 3, "labels": "zone=a,rack=17", "max_events": 1_000_000, "store_sign": False},
        "hostPID": True,
        "user": 4_000_001,
        "trainerGroup": 4_000_002,
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"gpu": "true"},
        "priorityClassName": "system-node-critical",
        "image": {"repository": "registry.example/ckptd", "pullSecrets": [{"name": "pull"}]},
    },
}
OLDEST, NEWEST = "1.29", "1.37"


def checked(manifest: dict[str, Any]) -> None:
    """Raise where Kubernetes would refuse it, or would ignore a field."""
    validate: Any = importlib.import_module("kubernetes_validate").validate
    if not manifest["apiVersion"].startswith("monitoring.coreos.com/"):  # another project's
        for version in (OLDEST, NEWEST):
            validate(manifest, version, strict=True)


@needs_helm
@pytest.mark.parametrize("name", VARIANTS)
def test_kubernetes_accepts_what_is_rendered(name: str) -> None:
    found = render(VALUES | VARIANTS[name])
    assert {"DaemonSet", "NetworkPolicy", "ServiceAccount"} <= set(found)
    for manifest in found.values():
        checked(manifest)


@needs_helm
def test_helm_finds_nothing_to_complain_about() -> None:
    lint: Any = importlib.import_module("helm_python.chart").lint
    said = lint(CHART, VALUES, strict=True)
    assert [each for each in said["messages"] if each["severity"] > 1] == []
    assert said["errors"] == []


@needs_helm
@pytest.mark.parametrize("name", VARIANTS)
def test_the_daemon_accepts_its_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = container(render(VALUES | VARIANTS[name]), "ckptd")
    for each in daemon["env"]:
        text = each.get("value", "10.0.0.7" if each["name"] == "POD_IP" else "node-7")
        monkeypatch.setenv(each["name"], text.replace("$(POD_IP)", "10.0.0.7"))
    loaded = load_config({})
    assert list(loaded.warnings) == []
    assert loaded.config.memory == "65536MiB"
    assert loaded.config.node_id == "node-7"
    if "settings" in VARIANTS[name]:
        config = loaded.config
        assert (config.replicas, config.max_events, config.store_sign) == (3, 1_000_000, False)
        assert config.trainer_group == "4000002"


def container(found: dict[str, Any], name: str) -> dict[str, Any]:
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    (one,) = [c for c in (*pod["initContainers"], *pod["containers"]) if c["name"] == name]
    return dict(one)


@needs_helm
def test_the_pod_may_use_its_quota_and_something_beyond() -> None:
    found = render(VALUES | {"memory": "3Ti", "overhead": "512Mi"})
    daemon = container(found, "ckptd")
    total = f"{3 * 1024 * 1024 + 512}Mi"
    assert daemon["resources"]["limits"]["memory"] == daemon["resources"]["requests"]["memory"] == total
    assert {"name": "CKPTD_MEMORY", "value": f"{3 * 1024 * 1024}MiB"} in daemon["env"]
    assert f"size={3 * 1024 * 1024}m," in container(found, "folders")["args"][0]


@needs_helm
@pytest.mark.parametrize("mount", [True, False])
def test_only_the_container_that_mounts_is_root(mount: bool) -> None:
    pod = render(VALUES | {"mount": mount})["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    for each in (*pod["initContainers"], *pod["containers"]):
        own = each["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        if each["name"] == "folders":
            assert own.get("privileged", False) is mount
        else:
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "runAsUser" not in own


@needs_helm
@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({}, "peers.keysSecret is missing"),
        ({"memory": "64GB"}, "at '/memory'"),
        ({"memory": 64}, "at '/memory'"),
        ({"overhaed": "2Gi"}, "overhaed"),
        ({"settings": {"memory": "1GiB"}}, "invalid propertyName 'memory'"),
        ({"hostFolder": "/mnt"}, "at '/hostFolder'"),
        ({"user": 0}, "at '/user'"),
        ({"store": {"url": "s3://key:secret@host/bucket"}}, "at '/store/url'"),
        ({"peers": {"keysSecret": "k", "port": 7078}}, "are both 7078"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], part: str) -> None:
    errors: Any = importlib.import_module("helm_python.errors")
    with pytest.raises(errors.HelmError, match=re.escape(part)):
        render(values if not values or "peers" in values else VALUES | values)


@needs_helm
def test_the_example_of_a_job_fits_the_chart() -> None:
    service, job = documents((DEPLOY / "kubernetes/train.yaml").read_text())
    for manifest in (service, job):
        checked(manifest)
    pod = job["spec"]["template"]["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    daemon = render()["DaemonSet"]["spec"]["template"]["spec"]
    assert env["CKPTD_DAEMON_USER"] == str(daemon["securityContext"]["runAsUser"])
    assert pod["securityContext"]["supplementalGroups"] == daemon["securityContext"]["supplementalGroups"]
    (folder,) = [v["hostPath"]["path"] for v in daemon["volumes"] if "hostPath" in v]
    assert folder in [v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v]
    assert env["CKPTD_RUNTIME_DIR"] == f"{folder}/run"


# -- image and scripts ----------------------------------------------------------------------------


def linted(*command: str, text: str | None = None) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    program = shutil.which(command[0], path=path)
    if program is None:
        pytest.skip(f"{command[0]} is not installed: pip install 'ckptd[deploy]'")
    words = [program, *command[1:]]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_linted() -> None:
    linted("hadolint", str(DEPLOY / "Dockerfile"))


@needs_helm
def test_the_image_has_the_user_of_the_chart() -> None:
    (user,) = re.findall(r"^USER (\d+):", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert render()["DaemonSet"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == int(user)


def test_the_image_has_all_that_a_daemon_needs_and_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "image_requirements.py")], capture_output=True, text=True, check=True
    )
    names = set(re.findall(r"^([a-z0-9-]+)==", done.stdout, re.MULTILINE))
    assert {"pyzmq", "cryptography", "obstore", "prometheus-client", "urllib3", "attrs"} <= names
    assert {"opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk", "requests"} <= names
    assert not names & {"torch", "triton", "sympy", "transformers", "pytest"}
    assert "--hash=sha256:" in done.stdout


def linted_script(text: str) -> None:
    # SC1090, SC1091: files that are read; SC2034, SC2154: variables that these read or set.
    linted("shellcheck", "--exclude=SC1090,SC1091,SC2034,SC2154", "-", text=text)


def test_scripts_are_linted() -> None:
    for path in sorted((DEPLOY / "slurm").iterdir()):
        if path.suffix in (".sh", ".sbatch"):
            text = path.read_text()
            linted_script(text if text.startswith("#!") else f"#!/bin/bash\n{text}")


@needs_helm
@pytest.mark.parametrize("name", VARIANTS)
def test_scripts_of_the_chart_are_linted(name: str) -> None:
    pod = render(VALUES | VARIANTS[name])["DaemonSet"]["spec"]["template"]["spec"]
    for each in pod["initContainers"]:
        linted_script(f"#!/bin/sh\n{each['args'][0]}")
