"""Namespaces before names, and off again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.client.message import MessageQueue
from skylark.client.namespace import Namespace
from skylark.client.producer import Producer
from skylark.client.session import Session

TENANT = Namespace("tenant")
names = st.text("abc_-", min_size=1, max_size=20)
prefixes = st.sampled_from(["", "%RETRY%", "%DLQ%"])


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("orders", "tenant%orders"),
        ("%RETRY%billing", "%RETRY%tenant%billing"),
        ("%DLQ%billing", "%DLQ%tenant%billing"),
        ("tenant%orders", "tenant%orders"),
        ("other%orders", "tenant%other%orders"),
        ("TBW102", "TBW102"),
        ("RMQ_SYS_TRACE_TOPIC", "RMQ_SYS_TRACE_TOPIC"),
        ("rmq_sys_anything", "rmq_sys_anything"),
        ("CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_TRANS"),
        ("", ""),
    ],
)
def test_names_as_apaches_client_wraps_them(name: str, wrapped: str) -> None:
    assert TENANT.wrap(name) == wrapped


@given(prefixes, names)
def test_what_is_put_before_comes_off_again(prefix: str, name: str) -> None:
    wrapped = TENANT.wrap(prefix + name)
    assert TENANT.unwrap(wrapped) == prefix + name
    assert TENANT.wrap(wrapped) == wrapped
    assert Namespace("other").unwrap(wrapped) == wrapped


@given(prefixes, names)
def test_no_namespace_changes_nothing(prefix: str, name: str) -> None:
    assert Namespace().wrap(prefix + name) == Namespace().unwrap(prefix + name) == prefix + name
    queue = MessageQueue("broker-a", 1, prefix + name)
    assert Namespace().wrap_queue(queue) is Namespace().unwrap_queue(queue) is queue


def test_a_shared_session_brings_its_own_namespace() -> None:
    session = Session("127.0.0.1:1", namespace="tenant", unit="eu")
    assert session.client_id.endswith("@eu")
    assert Producer(session=session, group="g").group == "tenant%g"
    with pytest.raises(ValueError, match="give the namespace to the session"):
        Producer(session=session, namespace="another")
