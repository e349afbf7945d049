"""Tokens, and how often their owners may ask."""

import pytest

from ltx_neuron.errors import UserError
from ltx_neuron.service.tokens import LOCAL, Tokens, new_token


def test_a_token_is_told_once_and_kept_as_a_hash(tmp_path):
    path = tmp_path / "tokens.json"
    ada, bob = new_token(path, "ada"), new_token(path, "bob")
    assert ada not in path.read_text() and path.stat().st_mode & 0o077 == 0
    tokens = Tokens.load(path)
    assert tokens.owner_of(f"Bearer {ada}") == "ada" and tokens.owner_of(f"bearer {bob}") == "bob"
    for wrong in (None, "", ada, f"Basic {ada}", f"Bearer {ada[:-1]}", "Bearer ", "Bearer \udcff"):
        assert tokens.owner_of(wrong) is None
    again = new_token(path, "ada")
    assert [Tokens.load(path).owner_of(f"Bearer {token}") for token in (ada, again)] == [None, "ada"]


def test_without_tokens_there_is_one_owner_and_a_broken_file_is_refused(tmp_path):
    assert Tokens.load(None).owner_of(None) == LOCAL
    path = tmp_path / "tokens.json"
    for content in ("{}", '{"tokens": {}}', '{"tokens": {"ada": "secret"}}', '{"tokens": []}'):
        path.write_text(content)
        with pytest.raises(UserError, match="--new-token NAME"):
            Tokens.load(path)
    with pytest.raises(UserError, match="wanted 1 to 64 characters"):
        new_token(path, "../ada")


def test_an_owner_may_ask_so_often_and_no_more(monkeypatch):
    pytest.importorskip("starlette", reason="the extra is not installed: pip install -e .[serve]")
    from ltx_neuron.service.api_error import ApiError
    from ltx_neuron.service.limits import TokenBucket

    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    rate = TokenBucket(per_minute=60)
    for _ in range(20):
        rate.take("ada")
    with pytest.raises(ApiError) as caught:
        rate.take("ada")
    assert caught.value.status == 429 and caught.value.headers["x-should-retry"] == "true"
    rate.take("bob")
    now[0] += 1
    rate.take("ada")
