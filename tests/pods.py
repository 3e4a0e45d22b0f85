"""Pods as a node of Kubernetes runs them: manifests become OCI containers, which crun starts in the machine of
`tests.systemd`.

What a kubelet adds is here: users, capabilities, volumes with their propagation, the environment, and the order
of init containers. Not here: cgroup limits, seccomp profiles, the pod's own network.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.ckptd.running import eventually
from tests.systemd import ENVIRONMENT, PACKAGES, PYTHON, SOURCE, Systemd, why_no_systemd

__all__ = ["Pod", "why_no_pods"]

# What a runtime gives a container that drops nothing.
USUAL = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
]
ALL = [*USUAL, "SYS_ADMIN"]
PROPAGATION = {"Bidirectional": "rshared", "HostToContainer": "rslave", None: "rprivate"}
FOLDERS = "/srv/pods"
# The image's commands, on the interpreter that services have there.
_IMAGE = f"""
printf '#!/bin/sh\\nexec {PYTHON}/bin/python3 -m ckptd.ctl "$@"\\n' > /usr/local/bin/ckptctl
chmod 755 /usr/local/bin/ckptctl
mkdir -p {FOLDERS}/image
mountpoint -q {FOLDERS}/image || mount --bind / {FOLDERS}/image
"""


@cache
def why_no_pods() -> str:
    """Why none can be started here; "" if they can."""
    return why_no_systemd() if shutil.which("crun") else "crun is not installed"


class Pod:
    """A pod on a machine; its init containers have run when it is made.

    Args:
        spec: of a pod. Images are not looked at: all containers see the files of the machine.
        node: the node's name.
        address: the pod's; it must be one of this machine.
        secret_folders: for volumes, by the Secret's name: folders of the machine.
    """

    def __init__(
        self,
        machine: Systemd,
        spec: Mapping[str, Any],
        node: str,
        address: str = "127.0.0.1",
        secret_folders: Mapping[str, str] | None = None,
    ) -> None:
        self.machine, self.spec = machine, spec
        self.name = f"pod-{secrets.token_hex(4)}"
        self._fields = {"spec.nodeName": node, "status.podIP": address}
        self._crun: subprocess.Popen[bytes] | None = None
        self._secrets = dict(secret_folders or {})
        machine.run("bash", "-ceu", _IMAGE)
        for each in spec["volumes"]:
            self._make_volume(each)
        for each in spec.get("initContainers", ()):
            self._prepare(each)
            words = self._words("run", self._id(each["name"]), bundle=each["name"])
            done = machine.run(*words, check=False)
            assert done.returncode == 0, f"{each['name']}: {done.stdout}{done.stderr}"

    def start(self, name: str) -> None:
        """Start a container; its output goes to `log`."""
        self._prepare(self._container(name))
        words = self._words("run", self._id(name), bundle=name)
        with (self.machine.root / f"{FOLDERS}/{self.name}.log".lstrip("/")).open("ab") as log:
            self._crun = subprocess.Popen(self.machine.command(*words), stdout=log, stderr=log)

    def exec(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """As a probe does: with the user, the environment and the namespaces of the container."""
        there, container = f"/proc/{self.pid}/root", self._container(name)
        uid, gid = self._user(container)
        groups = ",".join(map(str, self.spec["securityContext"].get("supplementalGroups", [gid])))
        enter = ["nsenter", "--target", str(self.pid), "--all", f"--root={there}", f"--wd={there}"]
        become = ["setpriv", f"--reuid={uid}", f"--regid={gid}", f"--groups={groups}", "--no-new-privs"]
        words = [*enter, *become, "env", "-i", *self._environment(container), *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)

    @property
    def pid(self) -> int:
        """The container's first process, as seen from here."""
        assert self._crun is not None
        found = self._crun.pid
        for _ in range(2):  # nsenter, crun
            children = Path(f"/proc/{found}/task/{found}/children")
            eventually(partial(_has_words, children), "the container begins")
            found = int(children.read_text().split()[0])
        return found

    def signal(self, number: int) -> int | None:
        """Send a signal to the container's first process; the exit code, if it ends by that."""
        assert self._crun is not None
        os.kill(self.pid, number)
        return None if number in (signal.SIGSTOP, signal.SIGCONT) else self.end()

    @property
    def is_running(self) -> bool:
        return self._crun is not None and self._crun.poll() is None

    def end(self) -> int:
        """Wait until it has ended; the exit code (128 and a signal)."""
        assert self._crun is not None
        return self._crun.wait(120)

    @property
    def log(self) -> str:
        return (self.machine.root / f"{FOLDERS}/{self.name}.log".lstrip("/")).read_text(errors="replace")

    # --------------------------------------------------------------------------------------------

    def _id(self, container: str) -> str:
        return f"{self.name}-{container}"

    def _words(self, action: str, *words: str, bundle: str) -> list[str]:
        where = ["--bundle", f"{FOLDERS}/{self.name}/{bundle}"]
        return ["crun", "--cgroup-manager=disabled", "--root=/run/crun", action, *where, *words]

    def _container(self, name: str) -> Mapping[str, Any]:
        (container,) = [each for each in self.spec["containers"] if each["name"] == name]
        return dict(container)

    def _user(self, container: Mapping[str, Any]) -> tuple[int, int]:
        of_pod, own = self.spec["securityContext"], container.get("securityContext", {})
        uid, gid = (int(own.get(key, of_pod.get(key, 0))) for key in ("runAsUser", "runAsGroup"))
        assert uid or not own.get("runAsNonRoot", of_pod.get("runAsNonRoot")), "the kubelet would refuse it"
        return uid, gid

    def _folder_of(self, volume: Mapping[str, Any]) -> str:
        if "hostPath" in volume:
            return str(volume["hostPath"]["path"])
        if "secret" in volume:
            return self._secrets[volume["secret"]["secretName"]]
        return f"{FOLDERS}/{self.name}/volumes/{volume['name']}"

    def _make_volume(self, volume: Mapping[str, Any]) -> None:
        folder = self._folder_of(volume)
        self.machine.run("mkdir", "-p", folder)
        if "emptyDir" in volume:
            self.machine.run("chmod", "0777", folder)
        if "hostPath" in volume:  # as the root of a node: what a container mounts there, others see
            shared = f"mount --bind {folder} {folder}; mount --make-rshared {folder}"
            script = f"mountpoint -q {folder} || {{ {shared}; }}"
            self.machine.run("bash", "-ceu", script)

    def _environment(self, container: Mapping[str, Any]) -> list[str]:
        known: dict[str, str] = {}
        for each in container.get("env", ()):
            text = each.get("value")
            if text is None:
                text = self._fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            known[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], text)
        path = f"PATH={PYTHON}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return [path, *ENVIRONMENT, *(f"{name}={text}" for name, text in known.items())]

    def _prepare(self, container: Mapping[str, Any]) -> None:
        of_pod, own = self.spec["securityContext"], container.get("securityContext", {})
        uid, gid = self._user(container)
        asked = own.get("capabilities", {})
        held = ALL if own.get("privileged") else [] if asked.get("drop") == ["ALL"] else USUAL
        held = [f"CAP_{name}" for name in (*held, *asked.get("add", ()))]
        mine = held if uid == 0 else []
        folders = {each["name"]: self._folder_of(each) for each in self.spec["volumes"]}
        mounts: list[dict[str, Any]] = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {
                "destination": "/dev/shm",
                "type": "tmpfs",
                "source": "shm",
                "options": ["mode=1777", "size=64m"],
            },
            *(_bound(path, path, "rprivate", "ro") for path in (PYTHON, PACKAGES, SOURCE)),
        ]
        for each in container.get("volumeMounts", ()):
            access = "ro" if each.get("readOnly") else "rw"
            how = PROPAGATION[each.get("mountPropagation")]
            mounts.append(_bound(folders[each["name"]], each["mountPath"], how, access))
        root = "rshared" if any("rshared" in each.get("options", ()) for each in mounts) else "rslave"
        namespaces = ["ipc", "uts", "mount", *(["pid"] if not self.spec.get("hostPID") else [])]
        config = {
            "ociVersion": "1.0.0",
            "process": {
                "user": {"uid": uid, "gid": gid, "additionalGids": of_pod.get("supplementalGroups", [])},
                "args": [*container.get("command", ["ckptd"]), *container.get("args", ())],
                "env": self._environment(container),
                "cwd": "/",
                "capabilities": {"bounding": held, "effective": mine, "permitted": mine},
                "noNewPrivileges": not own.get("allowPrivilegeEscalation", True),
            },
            "root": {"path": f"{FOLDERS}/image", "readonly": own.get("readOnlyRootFilesystem", False)},
            "hostname": self.name,
            "mounts": mounts,
            "linux": {"namespaces": [{"type": each} for each in namespaces], "rootfsPropagation": root},
        }
        folder = f"{FOLDERS}/{self.name}/{container['name']}"
        self.machine.run("mkdir", "-p", folder)
        (self.machine.root / f"{folder}/config.json".lstrip("/")).write_text(json.dumps(config))


def _has_words(path: Path) -> bool:
    return bool(path.read_text().split())


def _bound(source: str, target: str, propagation: str, access: str) -> dict[str, Any]:
    options = ["rbind", propagation, access]
    return {"destination": target, "type": "bind", "source": source, "options": options}
