"""The chart in `deploy/helm/ckptd`, rendered by the Helm library itself."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["CHART", "ROOT", "VALUES", "documents", "render", "why_no_helm"]

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/ckptd"
# What a user has to say at least.
VALUES: dict[str, Any] = {"peers": {"keysSecret": "ckptd-keys"}}


def why_no_helm() -> str:
    """Why nothing can be rendered here; "" if it can."""
    if importlib.util.find_spec("helm_python") is None:
        return "the Helm library is not installed: pip install 'ckptd[deploy]'"
    return ""


def render(values: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """What would be applied, by kind.

    Raises:
        helm_python.errors.HelmError: Helm refuses the values; the message is that of `helm install`.
    """
    chart: Any = importlib.import_module("helm_python").Chart
    with chart.load(CHART) as loaded:
        texts = loaded.render(dict(VALUES if values is None else values), name="ckptd", namespace="training")
    found = [each for name, text in texts.items() if name.endswith(".yaml") for each in documents(text)]
    return {each["kind"]: each for each in found}


def documents(text: str) -> list[dict[str, Any]]:
    """Of a file of manifests."""
    yaml: Any = importlib.import_module("yaml")
    return [each for each in yaml.safe_load_all(text) if each]
