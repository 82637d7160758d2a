"""Topology files: what is accepted, and that whatever is wrong is said in one line of use."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine import topology_file
from engine.errors import StartError, UsageError
from engine.launch import file_of_pages
from engine.topology import Table, Topology
from engine.topology_file import FIXED_NAMES, NAMED_TABLES, explanations, parse

SHIPPED = sorted((Path(engine.__file__).parent / "topologies").glob("*.toml"))
BASE = '[gateway.front]\nport = 0\n[worker.both]\nrole = "both"\n'


def complaint(text: str, *settings: str) -> str:
    """What a person reads about a wrong topology: one line that names the file or the setting."""
    with pytest.raises(UsageError) as caught:
        parse(text, "file.toml", settings)
    said = str(caught.value)
    assert said.isprintable()
    assert said.startswith(("file.toml: ", "--set "))
    assert caught.value.exit_code == 2
    return said


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_topologies_parse(path: Path) -> None:
    topology = parse(path.read_text(), str(path))
    actors = topology.actors()
    assert [actor.ordinal for actor in actors] == list(range(len(actors)))
    assert len({actor.name for actor in actors}) == len(actors)
    assert {actor.kind for actor in actors} == {
        "health",
        "allocator",
        "scheduler",
        "replicator",
        "gateway",
        "worker",
    }


def test_the_three_promised_topologies_are_shipped() -> None:
    roles = {
        path.stem: sorted(w.role for w in parse(path.read_text(), "").worker.values()) for path in SHIPPED
    }
    assert roles["local"] == ["decode", "prefill"]
    assert roles["unified"] == ["both"]
    assert roles["two-decode"] == ["decode", "decode", "prefill"]


@pytest.mark.parametrize(
    ("workers", "where"),
    [
        ({"p": ("prefill", []), "d": ("decode", [])}, {"p": "0123", "d": "0123", "front": "0123"}),
        ({"p": ("prefill", [0]), "d": ("decode", [1, 2])}, {"p": "0", "d": "12", "front": "3"}),
        ({"p": ("prefill", [0, 3]), "d": ("decode", [1, 2])}, {"p": "03", "d": "12", "front": "03"}),
        ({"p": ("prefill", []), "d": ("decode", [1, 2])}, {"p": "03", "d": "12", "scheduler": "03"}),
        ({"b": ("both", [0, 1, 2, 3])}, {"b": "0123", "front": "0123"}),
    ],
    ids=str,
)
def test_who_has_no_cores_keeps_off_those_of_others(
    workers: dict[str, tuple[str, list[int]]], where: dict[str, str]
) -> None:
    tables = "".join(
        f'[worker.{name}]\nrole = "{role}"\ncores = {cores}\n' for name, (role, cores) in workers.items()
    )
    topology = parse(f"[gateway.front]\nport = 0\n{tables}", "file.toml")
    found = {name: topology.cores_of(name, "", {0, 1, 2, 3}) for name in where}
    assert found == {name: {int(core) for core in cores} for name, cores in where.items()}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        # Unknown keys, at every level.
        ("[kvv]\npages = 3", ("kvv", "unknown key", "kv")),
        ("[kv]\npage = 3", ("kv.page = 3", "unknown key", "pages")),
        ('[worker.x]\nrole = "both"\ncolour = "red"', ("worker.x.colour = 'red'", "unknown key", "role")),
        ("[gateway.g]\nprot = 1", ("gateway.g.prot = 1", "unknown key", "port")),
        ("[scheduler]\nfast = true", ("scheduler.fast = True", "unknown key", "weights, reserve")),
        ("[allocator]\nfast = true", ("allocator.fast = True", "unknown key", "prefix_cache")),
        ('["a\\nb"]\nx = 1', ("a\\nb", "unknown key")),
        # Wrong types.
        ('[kv]\npages = "many"', ("kv.pages = 'many'", "expected int")),
        ("[kv]\npages = 3.5", ("kv.pages = 3.5", "expected int")),
        ("[kv]\npages = true", ("kv.pages = True", "expected int")),
        ("[kv]\npages = 2021-01-01", ("kv.pages", "expected int")),
        ("[model]\npath = 7", ("model.path = 7", "expected str")),
        ("[gateway.g]\nhost = []", ("gateway.g.host = []", "expected str")),
        ("[gateway]\nfront2 = 5", ("gateway.front2 = 5", "expected a table")),
        ("[scheduler]\nweights = 3", ("scheduler.weights = 3", "expected object")),
        ("[scheduler]\nreserve = true", ("scheduler.reserve = True", "expected float")),
        (
            '[scheduler]\nweights = { a = 1, "b c" = "2" }',
            ("scheduler.weights.'b c' = '2'", "expected float"),
        ),
        ("[scheduler]\nweights = { a = true }", ("scheduler.weights.'a' = True", "expected float")),
        ("[scheduler.weights.a]\nb = 3", ("scheduler.weights.'a' = {'b': 3}", "expected float")),
        # Out of range.
        ('[scheduler]\nweights = { "user:a" = 0 }', ("scheduler.weights.'user:a' = 0", ">= 0.01")),
        ("[scheduler]\nweights = { a = 2, b = -1 }", ("scheduler.weights.'b' = -1", ">= 0.01")),
        ("[scheduler]\nweights = { a = 100.5 }", ("scheduler.weights.'a' = 100.5", "<= 100")),
        ("[scheduler]\nweights = { a = nan }", ("scheduler.weights.'a' = nan", ">= 0.01")),
        ("[scheduler]\nweights = { a = inf }", ("scheduler.weights.'a' = inf", "<= 100")),
        ("[scheduler]\nreserve = 0.6", ("scheduler.reserve = 0.6", "<= 0.5")),
        ("[scheduler]\nreserve = -0.1", ("scheduler.reserve = -0.1", ">= 0")),
        ("[kv]\npages = 1", ("kv.pages = 1", ">= 2")),
        ("[gateway.g]\nport = 65536", ("gateway.g.port = 65536", "<= 65535")),
        ("[gateway.g]\nport = -1", ("gateway.g.port = -1", ">= 0")),
        ("[gateway.g]\nzmq_port = 65536", ("gateway.g.zmq_port = 65536", "<= 65535")),
        ('[gateway.g]\nzmq_port = "x"', ("gateway.g.zmq_port = 'x'", "expected int")),
        ("[health]\ntick_s = 0", ("health.tick_s = 0", "> 0")),
        ("[health]\ntick_s = nan", ("health.tick_s = nan", "> 0")),
        ("[launch]\ndrain_s = inf", ("launch.drain_s = inf", "<= 86400")),
        (f"[kv]\npages = {'9' * 40}", ("kv.pages = 999", "<= 16777216")),
        (f"[kv]\npages = 0x{'f' * 5000}", ("kv.pages", "<= 16777216")),
        # One of a few.
        ("[kv]\npage_tokens = 7", ("kv.page_tokens = 7", "8, 16, 32, 64")),
        ('[kv]\ndtype = "int4"', ("kv.dtype = 'int4'", "'float32', 'float16', 'bfloat16'")),
        ('[worker.x]\nrole = "cook"', ("worker.x.role = 'cook'", "'prefill', 'decode', 'both'")),
        # Missing.
        ("[worker.x]", ("worker.x", "role", "is needed")),
        # Names.
        ("[gateway.Front]", ("gateway.Front", "'Front'", "[a-z]")),
        ('[gateway."a b"]', ("'a b'", "[a-z]")),
        ('[gateway."a\\nb"]', ("a\\nb", "[a-z]")),
        (f"[gateway.{'a' * 33}]", ("a" * 33, "{0,31}")),
        ('[worker.9]\nrole = "both"', ("worker.9", "'9'", "[a-z]")),
        *(
            (f'[worker.{name}]\nrole = "both"', (f"worker.{name}", repr(name), "none of"))
            for name in FIXED_NAMES
        ),
        # Twice.
        ("[gateway.both]", ("'both'", "two actors")),
        ("[gateway.a]\n[gateway.b]", ("gateway.b.port = 8000", "gateway.a", "another port")),
        ("[gateway.a]\nzmq_port = 8000", ("gateway.a.zmq_port = 8000", "gateway.a", "another port")),
        (
            "[gateway.a]\nport = 1\nzmq_port = 7\n[gateway.b]\nport = 7",
            ("gateway.b.port = 7", "gateway.a listens"),
        ),
        # Not TOML.
        ("= 3", ("not TOML", "line")),
        (f"[kv]\npages = {'9' * 5000}", ("not TOML", "digits")),
        (f"[kv]\npages = {'[' * 5000}", ("not TOML", "recursion")),
    ],
)
def test_an_error_names_the_key_the_value_and_what_was_expected(more: str, said: tuple[str, ...]) -> None:
    message = complaint(f"{BASE}{more}\n")
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "[gateway.NAME]"),
        ("[gateway.front]", "[worker.NAME]"),
        ("gateway = 1\nworker = 2", "[gateway.NAME]"),
        ('[worker.w]\nrole = "both"', "[gateway.NAME]"),
        ("[gateway]\n[worker]", "[gateway.NAME]"),
        ("kv = 3", "kv = 3: expected a table"),
        ('[gateway.g]\n[worker.w]\nrole = "decode"', 'no worker can prefill; give one the role "prefill"'),
        ('[gateway.g]\n[worker.w]\nrole = "prefill"', 'no worker can decode; give one the role "decode"'),
    ],
)
def test_missing_tables_and_roles(text: str, said: str) -> None:
    assert said in complaint(text)


def test_weights_of_clients_and_the_reserve() -> None:
    text = f'{BASE}[scheduler]\nreserve = 0\nweights = {{ "user:alice" = 4, "" = 0.5 }}\n'
    table = parse(text, "").scheduler
    assert table.weights == {"user:alice": 4.0, "": 0.5}
    assert table.reserve == 0.0
    assert parse(BASE, "").scheduler.weights == {}
    assert parse(BASE, "", ['scheduler.weights={"key 1" = 2}']).scheduler.weights == {"key 1": 2.0}


def test_long_values_are_cut() -> None:
    assert len(complaint(f'{BASE}[kv]\ndtype = "{"x" * 5000}"')) < 200


def test_two_gateways_may_ask_for_any_free_port_or_other_hosts() -> None:
    parse(f"{BASE}[gateway.b]\nport = 0\n[gateway.c]\nport = 0\n", "")
    parse(f'{BASE}[gateway.b]\nport = 80\n[gateway.c]\nhost = "127.0.0.2"\nport = 80\n', "")


def test_zeromq_clients_have_a_port_when_they_are_given_one() -> None:
    assert parse(BASE, "").gateway["front"].zmq_port is None
    any_free = parse(BASE, "", ["gateway.front.zmq_port=0"])
    assert any_free.gateway["front"].zmq_port == 0
    parse(f"{BASE}[gateway.b]\nport = 0\nzmq_port = 0\n", "", ["gateway.front.zmq_port=0"])


def test_settings_replace_what_the_file_says() -> None:
    text = f"{BASE}[kv]\npages = 10\n"
    topology = parse(
        text,
        "",
        [
            "kv.pages=20",
            "kv.dtype=float16",
            'model.path="a b"',
            "model.name=a=b",
            " launch.drain_s = 3 ",
            "gateway.front.port=9",
            "worker.both.threads=0x10",
        ],
    )
    assert (topology.kv.pages, topology.kv.dtype) == (20, "float16")
    assert (topology.model.path, topology.model.name) == ("a b", "a=b")
    assert topology.launch.drain_s == 3.0
    assert {name: gateway.port for name, gateway in topology.gateway.items()} == {"front": 9}
    assert topology.worker["both"].threads == 16


def test_the_last_setting_of_a_key_counts() -> None:
    assert parse(BASE, "", ["kv.pages=20", "kv.pages=30"]).kv.pages == 30


def test_a_whole_table_can_be_set() -> None:
    assert parse(BASE, "", ["kv={pages = 5, page_tokens = 8}"]).kv.pages == 5


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("kv.pages", "expected key=value"),
        ("=3", "expected key=value"),
        ("kv..pages=3", "expected key=value"),
        ("x\ny", "expected key=value"),
        ("kv.pages.more.deep=3", "kv.pages = {'more': {'deep': 3}}"),
        ("gateway.front.port.x=3", "port is not a table"),
        ("kv.page=3", "kv.page = 3: unknown key"),
        ("nothing=3", "nothing = 3: unknown key"),
        ("kv.pages=", "kv.pages = ''"),
        ("kv.pages=1 2", "kv.pages = '1 2'"),
        ("kv.pages=9\nx = 3", "kv.pages = '9\\nx = 3'"),
        (f"kv.pages={'9' * 5000}", "kv.pages = '999"),
        ("worker.both.role=cook", "worker.both.role = 'cook'"),
    ],
)
def test_bad_settings(setting: str, said: str) -> None:
    assert said in complaint(BASE, setting)


def test_log_slots_are_disjoint_and_cover_the_arena() -> None:
    text = f"{BASE}[gateway.b]\nport = 0\nmax_open = 3\n[gateway.c]\nport = 0\nmax_open = 5\n"
    topology = parse(text, "", ["gateway.front.max_open=7"])
    slots = [slot for name in topology.gateway for slot in topology.log_slots_of(name)]
    assert slots == list(range(topology.log_slots())) == list(range(15))
    with pytest.raises(KeyError):
        topology.log_slots_of("nobody")


def test_all_names_come_from_the_same_space_of_ordinals() -> None:
    """Every gateway's ordinal fits the 8 bits that it has in a request id."""
    many = "".join(f"[gateway.g{n}]\nport = 0\n" for n in range(249))
    topology = parse(f"{BASE}{many}", "")
    assert max(actor.ordinal for actor in topology.actors() if actor.kind == "gateway") < 256
    more = "".join(f"[gateway.h{n}]\nport = 0\n" for n in range(3))
    assert "more than a topology may have" in complaint(f"{BASE}{many}{more}")


def test_silence_is_longer_than_a_turn_of_the_monitor() -> None:
    said = complaint(f"{BASE}[health]\ntick_s = 2.0\ndeadline_s = 3.0\n")
    assert "health.deadline_s = 3" in said
    assert "health.tick_s = 2" in said


def test_a_setting_is_blamed_for_what_it_breaks_and_the_file_for_the_rest() -> None:
    with pytest.raises(UsageError, match=r"^--set kv\.pages=0: kv\.pages = 0: expected int >= 2$"):
        parse(BASE, "file.toml", ["kv.pages=0"])
    with pytest.raises(UsageError, match=r"^file\.toml: kv\.pages = 1: "):
        parse(f"{BASE}[kv]\npages = 1\n", "file.toml", ["launch.drain_s=3"])
    with pytest.raises(UsageError, match=r"no gateway 'frnt'; it has: front"):
        parse(BASE, "file.toml", ["gateway.frnt.port=1"])


# ── several hosts ─────────────────────────────────────────────────────────────────────────────

TWO = """
[host.a]
address = "10.0.0.1"
[host.b]
address = "10.0.0.2"
[gateway.front]
on = "a"
max_open = 7
[gateway.back]
on = "b"
port = 8001
max_open = 3
[worker.near]
on = "a"
role = "both"
[worker.far]
on = "b"
role = "prefill"
[worker.farther]
on = "b"
role = "decode"
"""


def test_each_host_has_an_allocator_and_a_replicator_and_the_first_the_rest() -> None:
    topology = parse(TWO, "")
    assert topology.hosts() == ("a", "b")
    here = {host: [actor.name for actor in topology.actors(host)] for host in topology.hosts()}
    assert here["a"] == ["health", "allocator-a", "scheduler", "replicator-a", "front", "near"]
    assert here["b"] == ["allocator-b", "replicator-b", "back", "far", "farther"]
    assert [actor.ordinal for actor in topology.actors()] == list(range(11))
    ordinals = {actor.name: actor.ordinal for actor in topology.actors()}
    assert all(ordinals[actor.name] == actor.ordinal for actor in topology.actors("b"))
    assert topology.allocator_of("farther") == "allocator-b"
    assert topology.replicator_of("front") == "replicator-a"
    assert topology.host_of("scheduler") == "a"
    assert list(topology.workers_on("b")) == ["far", "farther"]
    with pytest.raises(KeyError):
        topology.host_of("nobody")


def test_one_host_needs_no_name() -> None:
    topology = parse(BASE, "")
    assert topology.hosts() == ("",)
    assert topology.actors("") == topology.actors()
    assert topology.allocator_of("both") == "allocator"
    assert topology.replicator_of("both") == "replicator"


def test_the_log_slots_of_a_host_are_its_gateways() -> None:
    topology = parse(TWO, "", ["gateway.back.on=a", "gateway.front.max_open=5"])
    assert [topology.log_slots(host) for host in "ab"] == [8, 0]
    assert topology.log_slots_of("back") == range(5, 8)
    topology = parse(TWO, "")
    assert [topology.log_slots(host) for host in "ab"] == [7, 3]
    assert topology.log_slots_of("back") == range(3)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("worker.far.on=c", ("worker.far.on = 'c'", "no such host", "a, b")),
        ('worker.far.on=""', ("worker.far", "the key 'on' is needed", "a, b")),
        ("gateway.back.on=c", ("gateway.back.on = 'c'", "no such host")),
        ("host.b.address=10.0.0.1", ("host.b.address = '10.0.0.1'", "host.a has it already")),
        ("host.b.address=0.0.0.0", ("host.b.address = '0.0.0.0'", "address of one machine")),
        ("host.b.address=somewhere", ("host.b.address = 'somewhere'", "expected an IP address")),
        ("host.b.address=224.0.0.1", ("host.b.address", "address of one machine")),
        ("host.a.control_port=0", ("host.a.control_port = 0", "int >= 1")),
        ("host.a.pages_port=7450", ("host.a.pages_port = 7450", "is its control_port too")),
        ("host.a.port=1", ("host.a.port = 1", "unknown key", "control_port")),
        ("host.c.address=10.0.0.3", ("no host 'c'", "a, b")),
        ("worker.near.role=decode", ()),
        ("worker.farther.on=a", ()),
    ],
)
def test_hosts_that_cannot_be(setting: str, said: tuple[str, ...]) -> None:
    if not said:
        parse(TWO, "", [setting])
        return
    complained = complaint(TWO, setting)
    assert all(part in complained for part in said), complained


def test_one_host_may_fill_and_another_one_decode() -> None:
    topology = parse(TWO, "", ["worker.near.role=decode", "worker.farther.on=a"])
    assert {table.role for table in topology.workers_on("a").values()} == {"decode"}


def test_a_host_has_something_to_do() -> None:
    said = complaint(f'{TWO}[host.c]\naddress = "10.0.0.3"\n')
    assert "host.c: has no gateway and no worker" in said


def test_where_there_are_no_hosts_nobody_is_on_one() -> None:
    assert "worker.both.on = 'a': no such host; the hosts are: none" in complaint(BASE, "worker.both.on=a")


def test_names_of_a_hosts_own_actors_are_taken() -> None:
    said = complaint(f'{TWO}[worker.allocator-b]\non = "b"\nrole = "both"\n')
    assert "the name 'allocator-b' is given to two actors" in said


def test_doors_of_two_hosts_may_have_the_same_port() -> None:
    parse(TWO, "", ["gateway.front.port=9000", "gateway.back.port=9000"])
    said = complaint(TWO, "gateway.back.on=a", "gateway.front.port=9000", "gateway.back.port=9000")
    assert "listens there already" in said


def test_hosts_agree_on_who_is_where_and_what_a_page_is() -> None:
    agreed = parse(TWO, "").agreement()
    for setting in ("kv.pages=9", "host.b.address=10.0.0.9", "gateway.back.on=a", "worker.far.role=both"):
        assert parse(TWO, "", [setting]).agreement() != agreed, setting
    for setting in ("gateway.back.port=0", "model.path=/elsewhere", "worker.far.threads=3"):
        assert parse(TWO, "", [setting]).agreement() == agreed, setting


# ── anything at all ───────────────────────────────────────────────────────────────────────────

KEYS = st.sampled_from(
    [
        "model",
        "kv",
        "gateway",
        "worker",
        "health",
        "launch",
        "scheduler",
        "weights",
        "pages",
        "role",
        "port",
        "front",
        "w",
        "host",
        "address",
        "on",
        "a",
        "tick_s",
    ]
) | st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=4)
LEAVES = (
    st.sampled_from(["both", "prefill", "decode", "float16"])
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=5)
)
TABLES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)


def as_toml(value: object) -> str:
    """An inline TOML value."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "{" + ", ".join(f"{quoted(key)} = {as_toml(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(as_toml(item) for item in value) + "]"
        case str():
            return quoted(value)
        case _:
            return repr(value)


def quoted(text: str) -> str:
    """A basic TOML string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def fair(text: str, *settings: str) -> bool:
    """Whether it is a topology, or refused in one line."""
    try:
        return isinstance(parse(text, "file.toml", settings), Topology)
    except UsageError as error:
        return str(error).isprintable()


@given(st.dictionaries(KEYS, TABLES, max_size=5))
def test_any_mapping_is_a_topology_or_one_line(data: dict[str, object]) -> None:
    text = "".join(f"{quoted(key)} = {as_toml(value)}\n" for key, value in data.items())
    tomllib.loads(text)
    valid = {"gateway": {"front": {}}, "worker": {"w": {"role": "both"}}}
    with_base = "".join(f"{quoted(key)} = {as_toml(value)}\n" for key, value in {**valid, **data}.items())
    for source in (text, with_base):
        assert fair(source)


@given(st.text(max_size=60), st.lists(st.text(max_size=20), max_size=3))
def test_any_text_and_settings_are_a_topology_or_one_line(text: str, settings: list[str]) -> None:
    for source in (text, BASE, BASE + text):
        assert fair(source, *settings)


@pytest.mark.parametrize(
    "kind", [*topology_file.TABLES.values(), *NAMED_TABLES.values()], ids=lambda kind: kind.__name__
)
def test_every_key_is_explained(kind: type[Table]) -> None:
    explained = explanations(kind)
    assert list(explained) == list(kind.__struct_fields__)
    assert all(says.endswith(".") and "\n" not in says for says in explained.values()), explained


def test_the_folder_of_the_file_of_pages_is_made_unless_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTAFET_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "a-model"
    settings = ["allocator.file_bytes=1000000"]
    assert file_of_pages(parse(BASE, "file.toml"), model) is None
    assert not (tmp_path / "cache").exists()
    kept = file_of_pages(parse(BASE, "file.toml", settings), model)
    assert kept == str(tmp_path / "cache" / "pages" / "a-model.pages")
    assert (tmp_path / "cache" / "pages").is_dir()
    named = [*settings, f"allocator.file={tmp_path}/mine/of.pages"]
    assert file_of_pages(parse(BASE, "file.toml", named), model) == f"{tmp_path}/mine/of.pages"
    assert not (tmp_path / "mine").exists(), "a typo makes no folders"
    monkeypatch.setenv("ESTAFET_CACHE", "/proc/nothing")
    with pytest.raises(StartError, match=r"/proc/nothing/pages: .*; set allocator\.file"):
        file_of_pages(parse(BASE, "file.toml", settings), model)
