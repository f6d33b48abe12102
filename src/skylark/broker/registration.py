"""Keeps this broker known to every name server: at the start, every 30 s, at once when a topic changes, and not any
more after its end.

Name servers are independent: each is told by itself, and one that is away or is something else costs nothing but a log
line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from zlib import crc32

from skylark.broker.config import BrokerConfig
from skylark.broker.static_topics import StaticTopics
from skylark.broker.topics import Topics
from skylark.net.pool import Pool
from skylark.wire.bodies import BadBody, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import QueryDataVersion, RegisterBroker, UnregisterBroker
from skylark.wire.routes import KVTable, RegisterBrokerBody, TopicConfigWrapper, encode_register_body
from skylark.wire.tables import PERM_READ, PERM_WRITE, TopicConfig
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)


class Registration:
    """The broker's side of the name servers' routes."""

    def __init__(
        self, config: BrokerConfig, topics: Topics, address: str, ha_address: str, static_topics: StaticTopics
    ) -> None:
        self.filter_servers: Callable[[], list[str]] = list
        """Where consumers may have their messages filtered."""
        self._config = config
        self._topics = topics
        self._static_topics = static_topics
        self._address = address
        self._ha_address = ha_address
        self._pool = Pool()
        self._changed = asyncio.Event()
        self._next_round: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._trouble: dict[str, str] = {}  # name server -> why it does not know this broker

    @property
    def _name_servers(self) -> list[str]:
        return [address for address in self._config.namesrv_addr.split(";") if address]

    def topics_changed(self, _: list[TopicConfig]) -> None:
        """Registers again as soon as possible; many changes at once cost one registration."""
        self._changed.set()

    async def published(self) -> None:
        """Returns when the name servers that can be reached know the topics as they are now."""
        self._changed.set()
        await asyncio.shield(self._next_round)

    async def run(self) -> None:
        """Registers for ever."""
        period_s = self._config.register_name_server_period / 1000
        try:
            while True:
                try:
                    async with asyncio.timeout(period_s):
                        await self._changed.wait()
                    force = True
                except TimeoutError:
                    force = self._config.force_register
                try:
                    await self._round(force)
                except Exception:
                    log.exception("the registration failed, and is tried again")
        finally:
            self._next_round.cancel()

    async def _round(self, force: bool) -> None:
        # Who asks from here on waits for the round after this one: this one may have read the topics already.
        this_round, self._next_round = self._next_round, asyncio.get_running_loop().create_future()
        try:
            await self.register(force)
        finally:
            this_round.set_result(None)

    async def register(self, force: bool = True) -> None:
        """Tells every name server, or only those that say that what they know is old."""
        self._changed.clear()
        body = encode_register_body(self._body())
        header = RegisterBroker(
            broker_name=self._config.broker_name,
            broker_addr=self._address,
            cluster_name=self._config.broker_cluster_name,
            ha_server_addr=self._ha_address,
            broker_id=self._config.broker_id,
            enable_acting_master=False,
            body_crc32=crc32(body) & 0x7FFFFFFF,
        )
        await asyncio.gather(*(self._register_with(server, header, body, force) for server in self._name_servers))

    async def unregister(self) -> None:
        """Says goodbye, so that clients learn of the end before their connections tell them."""
        header = UnregisterBroker(
            broker_name=self._config.broker_name,
            broker_addr=self._address,
            cluster_name=self._config.broker_cluster_name,
            broker_id=self._config.broker_id,
        )
        await asyncio.gather(*(self._unregister_from(server, header) for server in self._name_servers))
        self._pool.close()

    def _body(self) -> RegisterBrokerBody:
        topics = {topic.topic_name: topic for topic in self._topics.all()}
        allowed = self._config.broker_permission
        if allowed & (PERM_READ | PERM_WRITE) != PERM_READ | PERM_WRITE:
            topics = {
                name: TopicConfig(
                    topic_name=name,
                    read_queue_nums=topic.read_queue_nums,
                    write_queue_nums=topic.write_queue_nums,
                    perm=topic.perm & allowed,
                )
                for name, topic in topics.items()
            }
        return RegisterBrokerBody(
            filter_server_list=self.filter_servers(),
            topic_config_serialize_wrapper=TopicConfigWrapper(
                topic_config_table=topics,
                data_version=self._topics.data_version,
                topic_queue_mapping_info_map={
                    name: detail.info() for name, detail in self._static_topics.all().items()
                },
            ),
        )

    async def _register_with(self, server: str, header: RegisterBroker, body: bytes, force: bool) -> None:
        timeout_s = self._config.register_broker_timeout_mills / 1000
        try:
            if not force and await self._is_known(server, timeout_s):
                return
            request = Frame(RequestCode.REGISTER_BROKER, encode_header(header), body)
            response = await self._pool.request(server, request, timeout_s)
            if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                self._note(server, f"{server} is no name server but, it seems, a broker: correct -n or namesrvAddr")
                return
            if response.code != ResponseCode.SUCCESS:
                self._note(server, f"name server {server} refused the registration: {response.remark}")
                return
            if response.body:  # the ordered topics, if the name server is set to tell
                self._topics.mark_ordered(decode_body(KVTable, response.body).table)
        except (OSError, TimeoutError, BadBody) as e:
            self._note(server, f"name server {server} can't be reached, and is tried again", f": {e}")
            return
        if self._trouble.pop(server, None):
            log.warning("name server %s knows this broker again", server)

    def _note(self, server: str, trouble: str, detail: str = "") -> None:
        """Warns once of a trouble that lasts."""
        if self._trouble.get(server) != trouble:
            self._trouble[server] = trouble
            log.warning("%s%s", trouble, detail)

    async def _is_known(self, server: str, timeout_s: float) -> bool:
        header = QueryDataVersion(
            broker_name=self._config.broker_name,
            broker_addr=self._address,
            cluster_name=self._config.broker_cluster_name,
            broker_id=self._config.broker_id,
        )
        body = encode_body(self._topics.data_version)
        request = Frame(RequestCode.QUERY_DATA_VERSION, encode_header(header), body)
        response = await self._pool.request(server, request, timeout_s)
        return response.code == ResponseCode.SUCCESS and response.fields.get("changed") == "false"

    async def _unregister_from(self, server: str, header: UnregisterBroker) -> None:
        request = Frame(RequestCode.UNREGISTER_BROKER, encode_header(header))
        try:
            await self._pool.request(server, request)
        except (OSError, TimeoutError) as e:
            log.info("name server %s was not told of the end: %s", server, e)
