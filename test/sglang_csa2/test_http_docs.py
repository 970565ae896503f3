"""docs/http-api.md names every route of ours and every key of their answers."""

from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI

from csa2.documents import DocumentView
from csa2.stats import CacheStats
from sglang_csa2.http import add_routes
from sglang_csa2.request_options import KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()


@pytest.mark.parametrize("record", [CacheStats, DocumentView], ids=lambda record: record.__name__)
def test_every_key_has_a_row(record):
    assert [field.name for field in msgspec.structs.fields(record) if f"\n| `{field.name}` | " not in PAGE] == []


def test_every_route_is_named():
    app = FastAPI()
    before = len(app.routes)
    add_routes(app)
    named = [
        f"`{method} {route.path.replace('{document_id}', 'ID')}`"
        for route in app.routes[before:]
        for method in sorted(route.methods - {"HEAD"})
    ]
    assert len(named) >= 7
    assert [name for name in named if name not in PAGE] == []


def test_every_option_of_a_request_has_a_row():
    assert [key for key in KEYS if f"| `{key}` | " not in PAGE] == []
