"""What the docs say of the code is so: tables of arguments, the map of the engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardwise
from shardwise.arguments import Table, markdown
from shardwise.fairscale import fsdp_arguments, oss, sharded_ddp
from shardwise.lightning_common.arguments import TRAINER_ARGUMENTS

from .test_structure import ORDER

DOCS = Path(__file__).parents[2] / "docs"

TABLES = {
    ("fairscale.md", "OSS"): oss.ARGUMENTS,
    ("fairscale.md", "ShardedDataParallel"): sharded_ddp.ARGUMENTS,
    ("fairscale.md", "FullyShardedDataParallel"): fsdp_arguments.ARGUMENTS,
    ("lightning.md", "Trainer"): TRAINER_ARGUMENTS,
}


@pytest.mark.parametrize("where", TABLES, ids="-".join)
def test_table_is_in_the_docs(where: tuple[str, str]) -> None:
    page, heading = where
    text = (DOCS / page).read_text()
    assert heading in text
    assert markdown(TABLES[where]) in text


def test_a_table() -> None:
    from shardwise.arguments import Argument, Support

    table: Table = {"a": Argument("does it"), "b": Argument("cannot matter", Support.ACCEPTED)}
    assert markdown(table).splitlines()[2:] == [
        "| `a` | supported | does it |",
        "| `b` | accepted with a warning | cannot matter |",
    ]


def test_the_map_of_the_engine_has_every_room_in_the_order_of_import() -> None:
    proper, around = (DOCS / "engine.md").read_text().split("Around them")
    rooms, others = (re.findall(r"^\| `([\w/]+)\.py`", text, re.MULTILINE) for text in (proper, around))
    core = {f"core/{path.stem}" for path in Path(shardwise.__file__).parent.glob("core/*.py")} - {"core/__init__"}
    assert {*rooms, *others} == core | {"placements", "fully_shard"}
    places = [ORDER.index(room.replace("/", ".")) for room in rooms]
    assert places == sorted(places)
