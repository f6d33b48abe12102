"""What is told of an SQL statement before Spark starts: never a table that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.pipelines.statements import read


@pytest.mark.parametrize(
    ("statement", "tables"),
    [
        ("select tags, count(*) from orders group by tags", ["orders"]),
        ("SELECT * FROM `%DLQ%billing` where tags = 'from nowhere'", ["%DLQ%billing"]),
        ("select * from `a``b`", ["a`b"]),
        ("select * from Orders o join orders p on o.keys = p.keys", ["Orders", "orders"]),
        ("select * from a, b as x, c y where a.k = b.k", ["a", "b", "c"]),
        ("select * from a left outer join b using (k)", ["a", "b"]),
        ("select * from (select * from inner_one) t", ["inner_one"]),
        ("select * from a where exists (select 1 from b where b.k = a.k)", ["a", "b"]),
        ("with x as (select * from orders) select * from x join y", ["orders", "y"]),
        ("with x (k, n) as (select 1, 2), z as (select 3) select * from X, Z", []),
        ("from orders select tags", ["orders"]),
        ("from orders |> where tags = 'a' |> select tags, keys", ["orders"]),
        ("explain select * from orders", ["orders"]),
        ("select extract(year from storeTimestamp), trim(both ' ' from keys) from orders", ["orders"]),
        ("select substring(keys from 2) from orders where tags is distinct from keys", ["orders"]),
        ("select * from orders where tags is not distinct from keys", ["orders"]),
        ("select * from range(5)", []),
        ("select * from parquet.`lake/orders`", []),
        ("select * from spark_catalog.default.orders", []),
        ("select * from values (1), (2) as t(a)", []),
        ("select * from a lateral view explode(split(keys, ' ')) t as x, y", ["a"]),
        ("select * from a, lateral (select * from b)", ["a", "b"]),
        ("select 1 -- from nowhere\n/* from nowhere */ from orders", ["orders"]),
        ("""select "from nowhere", 'it''s from nowhere', 'it\\'s from nowhere' from orders""", ["orders"]),
        ("select sum(n) over w from orders window w as (partition by tags)", ["orders"]),
        ("select * from orders tablesample (10 percent), others", ["orders"]),
        ("show tables from default", []),
        ("describe orders", []),
        ("select 1", []),
        ("", []),
        ("select * from", []),
    ],
)
def test_the_tables_of_a_query(statement: str, tables: list[str]) -> None:
    assert list(read(statement).tables) == tables


def test_all_names() -> None:
    assert read("select `b c`, 'd' from a -- e").names == {"select", "b c", "from", "a"}


@given(st.text(alphabet="ab`'\"(),.- \n/*|from join selectwith", max_size=60))
def test_any_text(text: str) -> None:
    for start in ("", "select * from ", "with "):
        found = read(start + text)
        assert set(found.tables) <= found.names
