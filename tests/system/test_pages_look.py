"""A real launch whose pages somebody looks at from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from launches import ROOT, Launch, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.model]


def test_the_pages_of_a_launch_can_be_looked_at(tmp_path: Path, model_folder: Path) -> None:
    with Launch(tmp_path) as launch:
        launch.wait_ready()

        def look(*arguments: str) -> subprocess.CompletedProcess[str]:
            words = [sys.executable, "-m", "tools.pages", str(launch.run_dir), "--once", *arguments]
            return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

        with launch.stream(max_tokens=300) as stream:
            stream.read(40)
            told = json.loads(look("--json").stdout)
            pages = told["pages"]
            assert pages["total"] == 1024
            assert pages["open"] == 1
            assert pages["held"] >= 2
            assert pages["used"] == pages["leased"] + pages["open"] + pages["held"]
            assert sum(pages[kind] for kind in ("free", "cached", "used", "quarantined")) == 1024
            (request,) = told["requests"]
            assert stream.request_id.endswith(request["request"])
            assert request["worker"] == "decode@1"
            assert request["slots"] > 40
        launch.wait_quiet()

        def agrees() -> bool:
            said, seen = launch.statistics()["allocator"], json.loads(look("--json").stdout)["pages"]
            return all(said[f"pages_{kind}"] == seen[kind] for kind in ("free", "cached", "leased", "open"))

        wait_until(agrees, 10, "the allocator says the same of an idle pool")
        assert f"{launch.run_dir.name}: 1,024 pages of 16 tokens" in look().stdout
        assert launch.stop() == 0
        assert look().returncode == 3
