"""The tables of arguments in the docs are those that the code acts on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.arguments import Table, markdown
from shardwise.fairscale import fsdp_arguments, oss, sharded_ddp
from shardwise.lightning_common.arguments import TRAINER_ARGUMENTS

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
