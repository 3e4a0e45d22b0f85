"""Where settings come from, which are refused and how, and that the documentation is current."""

from __future__ import annotations

import grp
import os
import pwd
import re
import subprocess
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest

from ckptd.config.daemon_config import (
    ConfigError,
    daemon_user,
    default_endpoint,
    field_docs,
    handed_files,
    load_config,
    notify_settings,
    render_table,
    render_toml,
    traces_wanted,
    trusted_users,
    user_quotas,
)
from ckptd.config.runtime_dir import default_runtime_dir
from ckptd.config.settings import DaemonConfig, parse_bytes, parse_memory
from ckptd.core.users import UserQuotas
from tests.ckptd.running import ROOT
from tests.users import DAEMON, GROUP, needs_users, spawn_as

UID = os.getuid()


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ckptd.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = toml(tmp_path, 'memory = "1 GiB"\nnice = 1\nlog_level = "error"\n')
    environ = {"CKPTD_MEMORY": "2GiB", "CKPTD_NICE": "2"}
    loaded = load_config({"memory": "3GiB"}, file=file, environ=environ)
    assert (loaded.config.memory, loaded.config.nice) == ("3GiB", 2)
    assert loaded.config.log_level == "error"
    assert loaded.config.max_events == 10_000
    assert loaded.sources["memory"] == "flag --memory"
    assert loaded.sources["nice"] == "environment variable CKPTD_NICE"
    assert loaded.sources["log_level"] == f"file {file}"
    assert loaded.sources["max_events"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = toml(tmp_path, "nice = 3\n")
    assert load_config(environ={"CKPTD_CONFIG": file}).config.nice == 3


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("nice", "20"),
        ("nice", "low"),
        ("memory", "lots"),
        ("memory", "0%"),
        ("memory", "101%"),
        ("memory", "1KiB"),
        ("retain_detached_s", "nan"),
        ("retain_detached_s", "-1"),
        ("mlock", "maybe"),
        ("allow_disk_segments", "perhaps"),
        ("runtime_dir", "relative/path"),
        ("listen", "tcp://0.0.0.0:1"),
        ("listen", "ipc://@ckptd"),
        ("listen", "ipc://relative"),
        ("listen", "ipc://" + "x" * 108),
        ("metrics", "9464"),
        ("metrics", "127.0.0.1:"),
        ("metrics", "127.0.0.1:65536"),
        ("metrics", "http://127.0.0.1:9464"),
        ("metrics", "unix:metrics.sock"),
        ("metrics", "unix:/" + "x" * 108),
        ("node_id", "a b"),
        ("digest_threads", "1e3"),
    ],
)
def test_a_bad_value_names_key_value_source_and_what_is_allowed(key: str, text: str) -> None:
    allowed = next(f.metadata["allowed"] for f in fields(DaemonConfig) if f.name == key)
    with pytest.raises(ConfigError) as caught:
        load_config(environ={"CKPTD_" + key.upper(): text})
    for part in (key, repr(text), "CKPTD_" + key.upper(), allowed):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["", "127.0.0.1:0", "[::1]:9464", "node-a:9464", "unix:/run/m.sock"])
def test_metrics_are_off_or_at_an_address(text: str) -> None:
    assert load_config(environ={"CKPTD_METRICS": text}).config.metrics == text


@pytest.mark.parametrize("url", ["bucket/prefix", "s3://", "file://folder"])
def test_a_store_without_a_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store .*cannot be used: expected a URL such as s3://"):
        load_config(environ={"CKPTD_STORE": url})


def test_an_unknown_key_is_refused_with_the_likely_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'memroy'.*did you mean 'memory'"):
        load_config(file=toml(tmp_path, "memroy = 1\n"), environ={})
    with pytest.raises(ConfigError, match="unknown setting"):
        load_config({"colour": "red"}, environ={})


@pytest.mark.parametrize(
    "text",
    [
        "nice = [1]\n",
        "nice = \n",
        "[run]\nnice = 1\n",
        f"nice = {'[' * 3000}\n",  # this and the next two left as another error, fuzzing found
        f"nice = {'9' * 5000}\n",
        f"nice = 0x{'f' * 5000}\n",
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"ckptd\.toml"):
        load_config(file=toml(tmp_path, text), environ={})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(file=str(tmp_path / "none.toml"), environ={})


def test_a_slip_in_the_environment_is_a_warning_and_client_variables_are_not() -> None:
    environ = {"CKPTD_MEMROY": "1GiB", "CKPTD_JOB": "moe", "CKPTD_SIM_SEEDS": "5"}
    (warning,) = load_config(environ=environ).warnings
    assert "CKPTD_MEMROY" in warning
    assert "CKPTD_MEMORY" in warning


def test_folders_follow_the_user_and_each_other() -> None:
    plain = load_config(environ={}).config
    assert plain.runtime_dir == f"/tmp/ckptd-{UID}"
    assert plain.segment_dir == f"/dev/shm/ckptd-{UID}"
    assert plain.listen == f"ipc:///tmp/ckptd-{UID}/ckptd.sock"
    session = load_config(environ={"XDG_RUNTIME_DIR": "/run/user/7"}).config
    assert session.runtime_dir == "/run/user/7/ckptd"
    assert session.segment_dir == plain.segment_dir
    other = load_config({"runtime_dir": "/tmp/x"}, environ={}).config
    assert other.listen == "ipc:///tmp/x/ckptd.sock"
    assert other.segment_dir.startswith(plain.segment_dir + "-")


def test_whose_daemon_a_client_trusts() -> None:
    assert trusted_users({}) == {0, os.geteuid()}
    assert trusted_users({"CKPTD_DAEMON_USER": "54101"}) == {0, os.geteuid(), 54_101}
    assert 0 in trusted_users({"CKPTD_DAEMON_USER": "root"})
    assert (daemon_user({}), daemon_user({"CKPTD_DAEMON_USER": "root"})) == (os.geteuid(), 0)
    with pytest.raises(ConfigError, match=r"CKPTD_DAEMON_USER = 'nobody-here'"):
        trusted_users({"CKPTD_DAEMON_USER": "nobody-here"})


def test_clients_look_where_the_daemon_listens() -> None:
    for environ in (
        {},
        {"CKPTD_RUNTIME_DIR": "/tmp/x"},
        {"CKPTD_LISTEN": "ipc:///tmp/y"},
        {"XDG_RUNTIME_DIR": "/run/user/7"},
    ):
        assert default_endpoint(environ) == load_config(environ=environ).config.listen
    assert default_runtime_dir({"CKPTD_RUNTIME_DIR": "/tmp/x/"}) == "/tmp/x"


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1.5 GiB", 3 << 29), ("2KB", 2000), ("1m", 1 << 20), ("7 B", 7)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_memory_is_bytes_or_a_share() -> None:
    assert parse_memory("25%") == 0.25
    assert parse_memory("1GiB") == 1 << 30


def test_notify_settings_are_for_this_process_only() -> None:
    environ = {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "2000000"}
    assert notify_settings(environ) == ("/run/n", 2.0)
    assert notify_settings(environ | {"WATCHDOG_PID": "1"}) == ("/run/n", None)
    assert notify_settings(environ | {"WATCHDOG_PID": str(os.getpid())})[1] == 2.0
    assert notify_settings({}) == (None, None)


def test_kept_files_are_for_this_process_and_its_first_image_only() -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a.seg:b.seg"}
    assert handed_files(dict(environ) | {"LISTEN_PID": "1"}) == []
    assert handed_files(environ) == [("a.seg", 3), ("b.seg", 4)]
    assert environ == {}
    assert handed_files(environ) == []


def test_every_field_is_documented() -> None:
    assert set(field_docs()) == {field.name for field in fields(DaemonConfig)}
    assert all(len(text) > 20 for text in field_docs().values())


def test_the_documentation_carries_the_current_table() -> None:
    """If this fails: put the output of `python -c "import ckptd.config.daemon_config as c;
    print(c.render_table())"` between the marks."""
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    between = text.split("<!-- settings -->\n")[1].split("<!-- end of settings -->")[0]
    assert between.strip() == render_table().strip()


def test_quotas_of_users_by_name_and_number() -> None:
    environ = {
        "CKPTD_TRAINER_GROUP": "0",
        "CKPTD_ISOLATE_USERS": "on",
        "CKPTD_USER_QUOTA": "2GiB",
        "CKPTD_USER_QUOTAS": "root=1GiB, 1003=0, no-such-user=1GiB",
    }
    config = load_config(environ=environ).config  # trainers and ckptctl read it, too
    assert user_quotas(config) == (UserQuotas(2 << 30, {0: 1 << 30, 1003: 0}), ("no-such-user",))
    assert user_quotas(load_config(environ={}).config) == (None, ())


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"isolate_users": "true"}, "isolate_users = true needs trainer_group"),
        ({"user_quota": "1GiB", "trainer_group": "0"}, "need isolate_users = true"),
        ({"user_quotas": "0=1GiB"}, "need isolate_users = true"),
        ({"user_quotas": "root"}, "not a new user=bytes"),
        ({"user_quotas": "a=1,a=2"}, "not a new user=bytes"),
        ({"user_quotas": "a=much"}, "a number with one of"),
    ],
)
def test_settings_of_users_that_cannot_be_used(settings: dict[str, str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        load_config(settings, environ={})


def test_the_example_file_names_every_key_with_its_default() -> None:
    text = (ROOT / "deploy/ckptd.toml").read_text(encoding="utf-8")
    for field in fields(DaemonConfig):
        assert f"\n# {field.name} = " in text or f"\n{field.name} = " in text, field.name


def test_the_example_file_loads_also_with_every_line_active(tmp_path: Path) -> None:
    text = (ROOT / "deploy/ckptd.toml").read_text(encoding="utf-8")
    names = tuple(f"# {field.name} = " for field in fields(DaemonConfig))
    active = [line.removeprefix("# ") if line.startswith(names) else line for line in text.splitlines()]
    loaded = load_config(file=toml(tmp_path, "\n".join(active)), environ={})
    defaults = load_config(environ={}).config
    for field in fields(DaemonConfig):
        if field.default != "":
            assert getattr(loaded.config, field.name) == getattr(defaults, field.name)


def test_the_printed_configuration_is_a_configuration(tmp_path: Path) -> None:
    first = load_config({"memory": "1GiB", "node_id": "n1"}, environ={})
    again = load_config(file=toml(tmp_path, render_toml(first)), environ={})
    assert again.config == first.config


def test_what_may_hold_credentials_is_not_told() -> None:
    with pytest.raises(ConfigError) as failure:
        load_config({"store_options": '{"secret": "hunter2"'}, environ={})
    assert "hunter2" not in str(failure.value)
    assert "store_options" in str(failure.value)


CREDENTIALS = 'store = "s3://bucket"\nstore_options = \'{"secret_access_key": "hunter2"}\'\n'


def private_group() -> bool:
    group = grp.getgrgid(os.getgid())
    return group.gr_name == pwd.getpwuid(UID).pw_name and not group.gr_mem


@pytest.mark.skipif(not private_group(), reason="this user has no group of its own")
def test_the_group_of_a_user_is_the_user(tmp_path: Path) -> None:
    """With umask 002, as many systems set it for users that have a group of their own, each file
    may be written to by that group.
    """
    file = toml(tmp_path, CREDENTIALS)
    os.chmod(file, 0o660)
    assert load_config(file=file, environ={}).warnings == ()


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(0o644, id="all"),
        pytest.param(
            0o640,
            id="group",
            marks=pytest.mark.skipif(UID != 0, reason="only root can give to any group"),
        ),
        pytest.param(0o604, id="others"),
    ],
)
def test_a_file_with_credentials_that_others_may_read_is_warned_about(tmp_path: Path, mode: int) -> None:
    """A daemon read the credentials of a bucket from a file with mode 0644 and said nothing: each
    user of the node had them.
    """
    file = toml(tmp_path, CREDENTIALS)
    os.chmod(file, mode)
    if os.getuid() == 0:
        os.chown(file, 0, GROUP)
    (warning,) = load_config(file=file, environ={}).warnings
    assert "credentials in store_options" in warning
    assert "hunter2" not in warning
    (command,) = (part for part in warning.split("`") if part.startswith("chmod"))
    subprocess.run(command, shell=True, check=True)
    assert load_config(file=file, environ={}).warnings == ()


def test_credentials_in_a_url_count_and_settings_without_any_do_not(tmp_path: Path) -> None:
    file = toml(tmp_path, 'store = "s3://key:hunter2@bucket/prefix"\n')
    os.chmod(file, 0o644)
    assert "credentials in store" in load_config(file=file, environ={}).warnings[0]
    file = toml(tmp_path, 'store = "s3://bucket"\nstore_options = \'{"region": "eu-1"}\'\n')
    assert load_config(file=file, environ={}).warnings == ()
    # What the environment gives is not in the file.
    environ = {"CKPTD_STORE_OPTIONS": '{"token": "hunter2"}'}
    assert load_config(file=file, environ=environ).warnings == ()


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(
            0o620,
            id="group",
            marks=pytest.mark.skipif(UID != 0, reason="only root can give to any group"),
        ),
        pytest.param(0o602, id="others"),
        pytest.param(0o666, id="all"),
    ],
)
def test_a_file_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """Whoever could write to the file could name another folder of trusted keys, or another store."""
    file = toml(tmp_path, "nice = 3\n")
    os.chmod(file, mode)
    if os.getuid() == 0:
        os.chown(file, 0, GROUP)
    with pytest.raises(ConfigError, match=f"chmod go-w {re.escape(file)}"):
        load_config(file=file, environ={})
    assert load_config(file="/dev/null", environ={}).config.nice == 10


@needs_users
def test_a_file_of_another_user_is_refused_unless_that_user_runs_the_daemon(tmp_path: Path) -> None:
    file = toml(tmp_path, "nice = 3\n")
    os.chown(file, DAEMON, DAEMON)
    with pytest.raises(ConfigError, match=f"belongs to user {DAEMON}"):
        load_config(file=file, environ={})
    environ = {"CKPTD_DAEMON_USER": str(DAEMON)}
    assert load_config(file=file, environ=environ).config.nice == 3


@needs_users
def test_root_gives_credentials_to_a_daemon_of_another_user_by_its_group() -> None:
    """``root:ckptd 0640`` is the usual way, and no warning; the trainers' group must not read the file."""
    with tempfile.TemporaryDirectory(prefix="ckptd-c-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        file = toml(Path(folder), CREDENTIALS)
        os.chmod(file, 0o640)
        script = f"loaded = load_config(file={file!r}, environ=dict(CKPTD_TRAINER_GROUP=sys.argv[3]))\n"
        for group, trainers, warnings in (
            (DAEMON, "", 0),
            (DAEMON, str(GROUP), 0),
            (GROUP, str(GROUP), 1),
        ):
            os.chown(file, 0, group)
            process = spawn_as(
                DAEMON,
                script + "print(len(loaded.warnings))\n",
                trainers,
                imports="from ckptd.config.daemon_config import load_config",
                groups=(GROUP,),
            )
            said, _ = process.communicate(timeout=60)
            assert int(said) == warnings


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
GRPC = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}


@pytest.mark.parametrize(
    ("endpoint", "environ", "wanted"),
    [
        ("", {}, None),
        ("http://collector:4318", {}, "http://collector:4318/v1/traces"),
        ("http://collector:4318/", {}, "http://collector:4318/v1/traces"),
        ("https://c/base/v1/traces", {}, "https://c/base/v1/traces"),
        ("", ENDPOINT, ""),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, ""),
        ("", ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, None),
        ("", ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, None),
        ("", ENDPOINT | GRPC, "grpc:"),
        ("", ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, None),
        ("", ENDPOINT | {"OTEL_TRACES_EXPORTER": "", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": ""}, ""),
        ("", ENDPOINT | GRPC | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, ""),
        ("", ENDPOINT | GRPC | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": ""}, "grpc:"),
        ("grpc://collector:4317/", {}, "grpc://collector:4317"),
        ("grpcs://collector:4317", ENDPOINT, "grpcs://collector:4317"),
        (
            "http://collector:4318",
            ENDPOINT | {"OTEL_SDK_DISABLED": "true"},
            "http://collector:4318/v1/traces",
        ),
    ],
)
def test_traces_go_where_the_setting_or_opentelemetry_says(
    endpoint: str, environ: dict[str, str], wanted: str | None
) -> None:
    assert traces_wanted(load_config({"otel_endpoint": endpoint}, environ={}).config, environ) == wanted


@pytest.mark.parametrize(
    "text", ["collector:4318", "grpc://c:4317/v1/traces", "http://user:secret@collector:4318"]
)
def test_a_collector_is_a_url_without_credentials(text: str) -> None:
    with pytest.raises(ConfigError, match="credentials belong in OTEL_EXPORTER_OTLP_HEADERS"):
        load_config({"otel_endpoint": text}, environ={})
