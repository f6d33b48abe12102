"""A snapshot that is replaced, killed at every step: a reader finds one or the other, whole."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from pipelines.lakes import Died, Disk
from skylark.pipelines import files
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.snapshot import Made, Snapshot

BEGAN = datetime(2026, 1, 31, tzinfo=UTC)
STEPS = 30


class Exchanging(Disk):
    def exchange(self, one: str, other: str) -> bool:
        self.step()
        moved = {}
        for name, held in self.files.items():
            for old, new in ((one, other), (other, one)):
                if name.startswith(f"{old}/"):
                    moved[new + name.removeprefix(old)] = held
                    break
            else:
                moved[name] = held
        self.files = moved
        self.step()
        return True


def write(disk: Disk, number: int) -> None:
    def fill(directory: str) -> bytes:
        for part in range(2):
            disk.write(f"{directory}/part-{part}", f"snapshot {number}")
        return msgspec.json.encode(Made(BEGAN + timedelta(days=number)))

    Snapshot(disk, "latest").replace(fill)


def read(disk: Disk) -> set[str]:
    found = [str(disk.files[f"latest/{name}"]) for name in disk.names("latest") if name.startswith("part")]
    assert len(found) in (0, 2), "half a snapshot"
    return set(found)


@pytest.mark.parametrize("kind", [Disk, Exchanging])
def test_a_death_at_every_step_leaves_a_snapshot(kind: type[Disk]) -> None:
    gone = 0
    for steps in range(STEPS):
        disk = kind()
        write(disk, 1)
        disk.left = steps
        try:
            write(disk, 2)
        except Died:
            gone += not read(disk)
        disk.left = None
        assert read(disk) <= {"snapshot 1"} or read(disk) == {"snapshot 2"}
        Snapshot(disk, "latest")  # what every run does first
        assert read(disk) in ({"snapshot 1"}, {"snapshot 2"})
        write(disk, 3)
        assert read(disk) == {"snapshot 3"}
        assert disk.names() == ["latest"], "nothing is left beside it"
    assert gone == 0 or kind is Disk, "only where two renames are needed, none is there in between"
    assert gone or kind is Exchanging


def test_other_files_are_not_replaced() -> None:
    disk = Disk()
    disk.files["latest/mine"] = "text"
    with pytest.raises(PipelineError, match="choose another directory"):
        Snapshot(disk, "latest")


def test_directories_change_places_on_this_machine(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not files._exchange(str(tmp_path / "one"), str(tmp_path / "other")):
        pytest.fail("no renameat2 here")
    assert (tmp_path / "one" / "other").exists()
    assert (tmp_path / "other" / "one").exists()
    assert not files._exchange(str(tmp_path / "one"), str(tmp_path / "nowhere"))
