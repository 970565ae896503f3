"""A server with packed weights: what they cost is reported, and new weights arrive."""

from pathlib import Path

import pytest
from served import ARENA, CERTAIN_PROMPTS, CERTAIN_TOKENS, Served, StartServer

pytestmark = pytest.mark.e2e

HEAD_BYTES = 49152 * 576 * 2
"""The output head of the demo model, which is its embedding."""


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> Served:
    return start_server(*ARENA)


def answers(server: Served) -> list[str]:
    return [server.generate(text, CERTAIN_TOKENS)["text"] for text in CERTAIN_PROMPTS]


def test_cost_is_reported(server: Served) -> None:
    assert server.stats()["weight_copy_bytes"] == HEAD_BYTES
    assert "as a second copy (--csa2-pack-weights all)" in server.log.read_text()


def test_weights_can_be_updated(server: Served, demo_model: Path) -> None:
    """With the same weights: the answers stay, and what was packed is packed again."""
    before = answers(server)
    reply = server.post("/update_weights_from_disk", model_path=str(demo_model), load_format="auto").json()
    assert reply["success"], reply
    server.flush()
    assert answers(server) == before
    assert server.stats()["weight_copy_bytes"] == HEAD_BYTES


def test_weights_cannot_be_read_out(server: Served) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    reply = server.post("/get_weights_by_name", name=name, truncate_size=4)
    assert reply.status_code == 400 or reply.json() is None
    assert "--csa2-pack-weights none" in server.log.read_text()
