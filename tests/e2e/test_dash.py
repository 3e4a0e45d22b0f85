"""`ckptctl dash` beside a real trainer: what the page is given follows the training."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.ckptd.running import eventually
from tests.e2e.habits import SCRIPT, environment
from tests.e2e.harness import own_daemon
from tests.forked_hosts import ForkedProgram

SLOW = SCRIPT.replace("ckpt.steps(12)", "ckpt.steps(100000)").replace(
    "    generator =", "    __import__('time').sleep(0.02)\n    generator ="
)


def test_the_view_follows_the_training_and_its_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SLOW)
    with own_daemon() as daemon:
        trainer = ForkedProgram([str(script)], cwd=tmp_path, env=environment(daemon), log=tmp_path / "log")
        command = [sys.executable, "-m", "ckptd.ctl", "dash", "--json", "--endpoint", daemon.endpoint]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dash:
            try:
                assert dash.stdout is not None
                url = json.loads(dash.stdout.readline())["url"]

                def run() -> Any:
                    assert trainer.returncode is None or trainer.returncode < 0, (
                        tmp_path / "log"
                    ).read_text()
                    with urllib.request.urlopen(f"{url}view.json", timeout=20) as answer:
                        found = json.load(answer)["runs"]
                    return (
                        found[0]
                        if found
                        else {"step": -1, "stalls": [], "live": True, "tiers": [{"grade": "x"}]}
                    )

                eventually(lambda: len(run()["stalls"]) > 1, "stalls of the trainer", timeout_s=120)
                first = run()
                assert first["live"]
                assert first["step_s"] > 0
                assert first["columns"]["ranks"] == [0]
                eventually(lambda: run()["tiers"][0]["grade"] == "+", "its snapshots are complete")
                eventually(lambda: run()["step"] > first["step"], "it goes on")
                trainer.kill()
                trainer.wait()
                eventually(lambda: not run()["live"], "no trainer is attached")
                assert run()["tiers"][0]["iteration"] >= first["tiers"][0]["iteration"]
            finally:
                trainer.kill()
                trainer.wait()
                dash.kill()
