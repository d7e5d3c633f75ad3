"""The code bundle: deterministic, without secrets, data and dangling links."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.image_packages import LOCK_FILE
from sm_llm.contract.job_file import entrypoint_source
from sm_llm.contract.program_tree import IGNORE_FILE
from sm_llm.errors import Issue, PlanError
from sm_llm.launcher.images.images import IMAGES
from sm_llm.launcher.planning.bundle import make_bundle
from sm_llm.launcher.planning.requirement_file import requirement_issues
from sm_llm.launcher.planning.source_tree import WARN_TREE, source_tree
from sm_llm.spec.tasks import TASK_KINDS
from sm_llm.spec.validation.runner import errors_of
from tests.launcher.sagemaker.conftest import SCRIPT

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.launcher.images.images import Image


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def contents(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        members = [(it.name, opened.extractfile(it)) for it in opened.getmembers()]
        return {name: stream.read() for name, stream in members if stream is not None}


def test_the_same_files_give_the_same_archive_whenever_they_were_written(tmp_path: Path) -> None:
    first = write(tmp_path / "a", train_py="x = 1", pkg__util_py="y = 2")
    second = write(tmp_path / "b", pkg__util_py="y = 2", train_py="x = 1")
    os.utime(second / "train.py", (1, 1))
    one, two = make_bundle(source_tree(first)), make_bundle(source_tree(second))
    assert (one.digest, one.archive) == (two.digest, two.archive)
    (second / "train.py").write_text("x = 2")
    assert make_bundle(source_tree(second)).digest != one.digest


def test_entrypoints_lie_at_the_root_with_the_text_of_the_checkout() -> None:
    files = contents(make_bundle(lock="torch\n").archive)
    assert {kind: files[f"{kind}.py"].decode() for kind in TASK_KINDS} == {
        kind: entrypoint_source(kind) for kind in TASK_KINDS
    }
    assert files[LOCK_FILE] == b"torch\n"


def test_SR02_SR04_a_setup_py_of_the_program_stays_below_the_root(
    tmp_path: Path, faults: Callable[..., list[Issue]]
) -> None:
    source = write(tmp_path / "with", train_py="", setup_py="from setuptools import setup; setup()")
    assert "source/setup.py" in contents(make_bundle(source_tree(source)).archive)
    (source / "setup.py").write_text("")
    (fault,) = faults({**SCRIPT, "task": {**SCRIPT["task"], "source": str(source)}})
    assert "setup.py is empty" in fault.message


def test_SR10_what_is_not_a_code_stays_here_and_secrets_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path, train_py="", data__big="", _git__config="", _env="KEY=1", key="")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("ref")
    (source / ".venv").mkdir()
    (source / ".env").write_text("TOKEN=1")
    with (source / "data" / "big").open("wb") as stream:
        stream.truncate(200_000_000)
    tree = source_tree(source)
    assert {".git/", ".venv/"} <= set(tree.left_out)
    assert [it.message for it in tree.issues] == [
        ".env holds secrets by its name",
        "data/big is not code: it has 200 MB",
    ]
    (source / IGNORE_FILE).write_text("# not for the cloud\n.env\ndata/*\n!data/small\n")
    (source / "data" / "small").write_text("x")
    tree = source_tree(source)
    assert tree.issues == []
    assert "data/small" in tree.files


def test_a_large_program_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 50 MB; 6 MB here, as every byte is searched for secrets."""
    assert WARN_TREE == 50_000_000
    monkeypatch.setattr("sm_llm.launcher.planning.source_tree.WARN_TREE", 5_000_000)
    with (tmp_path / "weights").open("wb") as stream:
        stream.truncate(5_000_000)
    assert source_tree(tmp_path).issues == []
    with (tmp_path / "weights").open("wb") as stream:
        stream.truncate(6_000_000)
    (warning,) = source_tree(tmp_path).issues
    assert (warning.severity, "6 MB" in warning.message) == ("warning", True)


def test_SR12_links_are_followed_reported_and_loops_refused(tmp_path: Path) -> None:
    outside = write(tmp_path / "common", util_py="shared = 1")
    source = write(tmp_path / "source", train_py="")
    (source / "common").symlink_to(outside)
    (source / "again.py").symlink_to("train.py")
    tree = source_tree(source)
    assert contents(make_bundle(tree).archive)["source/common/util.py"] == b"shared = 1"
    assert "source/again.py" in contents(make_bundle(tree).archive)
    (warning,) = tree.issues
    assert "common is a link out of the folder" in warning.message
    (source / "loop").symlink_to(source)
    (source / "broken").symlink_to("nowhere")
    assert [it.message for it in errors_of(source_tree(source).issues)] == [
        "the link broken leads nowhere", "the link loop leads back to a folder that holds it",
    ]  # fmt: skip


def test_SR13_a_tree_of_links_to_blobs_is_packed_as_files(tmp_path: Path) -> None:
    blobs = write(tmp_path / "cache" / "blobs", abc="weights")
    snapshot = tmp_path / "cache" / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").symlink_to("../blobs/abc")
    assert contents(make_bundle(source_tree(snapshot)).archive)["source/config.json"] == (blobs / "abc").read_bytes()


@pytest.mark.parametrize("entry", ["train.sh;id", 'tr"ain.py', "../x.py", "/abs.py", "train.py extra", "-m pkg;id", ""])
def test_HP18_an_entry_that_is_not_a_plain_name_is_refused(entry: str, faults: Callable[..., list[Issue]]) -> None:
    assert "task.entry" in {it.path for it in faults({**SCRIPT, "task": {"kind": "script", "entry": entry}})}


def test_SR17_a_missing_entry_is_reported_with_what_there_is(
    tmp_path: Path, faults: Callable[..., list[Issue]]
) -> None:
    write(tmp_path, run_py="")
    (fault,) = faults({**SCRIPT, "task": {"kind": "script", "entry": "train.py", "source": str(tmp_path)}})
    assert (fault.path, fault.remedy) == ("task.entry", "There are: run.py")
    (missing,) = faults({**SCRIPT, "task": {"kind": "script"}})
    assert (missing.path, "missing" in missing.message) == ("task.entry", True)


def test_SR14_a_source_in_S3_is_a_folder(faults: Callable[..., list[Issue]]) -> None:
    """The worker stages it; an archive, which other tools take, is reported before anything starts."""
    assert faults({**SCRIPT, "task": {**SCRIPT["task"], "source": "s3://bucket/code"}}) == []
    (fault,) = faults({**SCRIPT, "task": {**SCRIPT["task"], "source": "s3://bucket/code/sourcedir.tar.gz"}})
    assert (fault.path, fault.remedy) == ("task.source", "Unpack it, and give the folder")


def image(line: str) -> Image:
    return next(row for row in IMAGES if row.stack == line)


@pytest.mark.parametrize(
    ("line", "text", "is_refused"),
    [
        ("gpu", "torch==2.1.0", True),
        ("gpu", "torch>=2.0", False),
        ("gpu", "torch", False),
        ("gpu", "flash_attn==2.9.9", True),
        ("gpu", "nvidia-cublas-cu12==12.1", True),
        ("gpu", "transformers==4.40", False),
        ("smp", "transformers==4.50", True),
        ("gpu", "rich  # torch==1", False),
        ("neuron", "torch-xla==2.1", True),
        ("gpu", "einops>>1", True),
        ("gpu", "!!!", True),
        ("gpu", "einops==0.8.0 --hash=sha256:00", False),
        ("gpu", "-r other.txt", False),
        ("gpu", "git+https://github.com/org/name#egg=x", False),
        ("gpu", "./local", False),
        ("gpu", "a-wheel-1.0-py3-none-any.whl", False),
    ],
)
def test_SR08_requirements_may_not_move_what_the_image_owns(
    line: str, text: str, is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "requirements.txt").write_text(f"# needs\n{text}\n")
    (tmp_path / "other.txt").write_text("einops\n")
    (tmp_path / "a-wheel-1.0-py3-none-any.whl").write_bytes(b"")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "pyproject.toml").write_text("")
    found = list(requirement_issues(tmp_path / "requirements.txt", image(line)))
    assert bool(found) == is_refused
    assert all("line 2" in it.message for it in found)


def test_files_that_are_no_text_are_faults_and_no_traceback(tmp_path: Path) -> None:
    folder = write(tmp_path / "src", train_py="")
    (folder / "requirements.txt").write_bytes(b"\xff\xfe")
    (fault,) = requirement_issues(folder / "requirements.txt", None)
    assert "cannot be read" in fault.message
    for damaged in (b"\xff\xfe", b"!\n"):
        (folder / IGNORE_FILE).write_bytes(damaged)
        (fault,) = source_tree(folder).issues
        assert (fault.path, "cannot be read" in fault.message) == ("task.source", True)


def test_a_whole_disk_or_home_is_not_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (Path("/"), tmp_path):
        (fault,) = source_tree(folder).issues
        assert "not a program folder" in fault.message


def test_more_files_than_a_program_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm_llm.launcher.planning.source_tree.MOST_FILES", 2)
    (fault,) = source_tree(write(tmp_path / "src", a_py="", b_py="", c_py="")).issues
    assert "3 files are too many" in fault.message


@pytest.mark.parametrize(
    ("entry", "is_refused"),
    [
        ("-m pkg.train", False),
        ("-m pkg", False),
        ("-m pkg.trian", True),
        ("-m train", False),
        ("-m accelerate.commands.launch", False),
        ("pkg/train.py", False),
        ("trian.py", True),
    ],
)
def test_an_entry_that_the_folder_does_not_hold_is_refused(
    entry: str, is_refused: bool, tmp_path: Path, faults: Callable[..., list[Issue]]
) -> None:
    """A module of a package that is not there may come with the image."""
    folder = write(tmp_path / "src", train_py="", pkg__train_py="")
    (folder / "pkg" / "__main__.py").touch()
    found = faults(SCRIPT, task={"entry": entry, "source": str(folder)})
    assert [fault.path for fault in found] == (["task.entry"] if is_refused else [])


@pytest.mark.parametrize("entry", ["pkg/train.py", "-m pkg.train"])
def test_an_entry_that_the_ignore_file_leaves_out_is_refused_in_these_words(
    entry: str, tmp_path: Path, faults: Callable[..., list[Issue]]
) -> None:
    folder = write(tmp_path / "src", train_py="", pkg__train_py="")
    (folder / IGNORE_FILE).write_text("pkg/\n")
    for job in (SCRIPT, {**SCRIPT, "backend": {"name": "local"}, "compute": {}}):
        (fault,) = faults(job, task={"entry": entry, "source": str(folder)})
        assert (fault.path, f"{IGNORE_FILE} (or its name) leaves it out" in fault.message) == ("task.entry", True)


@pytest.mark.parametrize(
    ("args", "path"),
    [
        (["--x", "a\0b"], "task.args.1"),
        (["y" * 131_072], "task.args.0"),
        ({"x": "a\0b"}, "task.args.x"),
        ({"x": ["y" * 131_072]}, "task.args.x"),
    ],
)
def test_SR_arguments_that_no_program_can_be_given_are_refused(
    args: Any, path: str, faults: Callable[..., list[Issue]]
) -> None:
    (fault,) = faults(SCRIPT, task={"args": args})
    assert fault.path == path


def test_an_error_lists_no_more_faults_than_can_be_read() -> None:
    error = PlanError([Issue("task-odd", "task", f"issue {number}") for number in range(100)])
    assert str(error).endswith("… and 70 more")
    assert len(error.issues) == 100


KEY = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIaB3aB3aB3aB3aB3\n-----END RSA " + "PRIVATE KEY-----\n"
"""Put together here, so that this file holds none."""
SECRET_FILES = [
    ".env", ".env.local", "prod.env", ".ENV", ".envrc", "id_rsa", "id_rsa.bak", "id_ecdsa", "id_dsa", "id_ed25519_sk",
    "my_key.pem", "server.key", "cert.p12", "cert.pfx", "key.ppk", ".netrc", "_netrc", ".npmrc", ".pypirc",
    ".git-credentials", ".pgpass", ".htpasswd", ".aws/credentials", ".aws/config", ".ssh/id_rsa", ".ssh/config",
    ".kube/config", ".docker/config.json", ".azure/accessTokens.json", "gcloud/application_default_credentials.json",
    "service-account.json", "credentials.json", "client_secret.json", "kaggle.json", ".kaggle/kaggle.json",
    ".huggingface/token", ".cache/huggingface/token", "token", "secrets.yaml", "secrets.toml",
    ".streamlit/secrets.toml", "wandb/settings", "terraform.tfstate", "terraform.tfstate.backup", ".bash_history",
    ".python_history", ".zsh_history", ".databrickscfg", ".boto", ".s3cfg", ".mlflow/credentials", ".terraformrc",
    ".vault-token", "PRIVATE.PEM", "conf/Prod.Env", "kubeconfig", ".env~", ".env-prod", ".env_local", ".envrc.local",
    ".netrc.bak", ".netrc~", ".pgpass.bak", "server.key.bak", "my.pem~", "cert.p12.old", ".bash_history~", ".histfile",
    "history.sqlite", "secret", "secrets", "my-secrets.yaml", "prod.secrets.yaml", "token.json", "hf_token",
    ".hf_token", "aws_credentials", "aws_credentials.ini", "new_user_credentials.csv", "rootkey.csv",
    ".config/gh/hosts.yml", "token.txt", "my_token.txt", "hf_token.txt", "api_key", "api_key.txt", "password.txt",
    "passwd", "db_password.txt", "auth.json", "kubeconfig.yaml", "kube-config", "docker/config.json", ".mylogin.cnf",
    ".yarnrc.yml", "vault_pass.txt", ".vault-pass", ".zhistory", ".history", "fish_history", "secring.gpg", "key.p8",
    "cert.pkcs12", "me.ovpn", ".ftpconfig", "sftp-config.json", ".snowflake/connections.toml", "cookies.txt",
    "logins.json", "shadow",
    ".config/rclone/rclone.conf", ".oci/config", ".snowsql/config", ".composer/auth.json", ".m2/settings.xml",
    ".pgpass.txt", ".Renviron", "github_rsa", "deploy_key", "me_ed25519", "firebase-adminsdk-x.json", "token.pickle",
    ".passwd-s3fs", ".modal.toml", "clearml.conf", ".sentryclirc", ".huggingface/stored_tokens", ".runpod/config.toml",
    "terraform.tfvars", ".vault_pass", ".dockerconfigjson", "docker-config.json", ".git-credentials.bak",
    ".git-credentials~", ".env.bak.old", "id_rsa.1",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_FILES)
def test_s11_a_file_that_holds_secrets_by_its_name_is_refused_with_the_line_that_leaves_it_out(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("planted\n")
    (tmp_path / "main.py").write_text("")
    (fault,) = source_tree(tmp_path).issues
    assert name in fault.message
    assert f"/{name} to {IGNORE_FILE}" in fault.remedy
    (tmp_path / IGNORE_FILE).write_text(f"/{name}\n")
    tree = source_tree(tmp_path)
    assert (tree.issues, sorted(tree.files)) == ([], ["main.py"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("notes.txt", "-----BEGIN OPENSSH " + "PRIVATE KEY-----\nabc"),
        ("deep/data.bin", "x\n  -----BEGIN " + "PRIVATE KEY-----\n"),
        ("nb.ipynb", '{"cells":[{"outputs":[{"text":["hf_' + "aB3" * 8 + '"]}]}]}'),
        ("main.py", "key = 'AKIA" + "ABCDEFGH" * 2 + "'"),
        ("account.json", '{"type": "service_account", "project_id": "x"}'),
        ("pip.conf", "[global]\nindex-url = https://me:glpat-" + "y2x" * 8 + "@host/simple\n"),
        ("other.conf", "[global]\nindex-url = https://me:planted-aB3@host/simple\n"),
        ("db.ini", "url = postgres://u:planted-aB3@h/d\n"),
        ("docker.json", '{"auths": {"https://h/": {"auth": "planted' + 'aB3aB3=="}}}'),
        ("npm.conf", "//packages.example/:_authToken=planted-aB3-aB3\n"),
        ("net.txt", "machine api.wandb.ai\n  login user\n  password planted-aB3\n"),
        ("app.ini", "[db]\npassword = planted-aB3-aB3\n"),
        ("run.sh", "export WANDB_API_KEY=plantedaB3aB3\n"),
        ("users.yaml", "kind: Config\nusers:\n- user:\n    token: planted-aB3-aB3\n"),
        ("secret-data.yaml", "kind: Secret\ndata:\n  db-password: plantedaB3aB3=\n"),
        ("azure.txt", "AccountName=a;AccountKey=plantedaB3aB3==;EndpointSuffix=x\n"),
        ("key.json", '{"SecretAccessKey": "plantedaB3aB3"}'),
        ("wire.txt", "[Interface]\nPrivateKey = plantedaB3aB3=\n"),
        ("state.json", '{"version": 4, "terraform_version": "1.5.7", "serial": 1, "lineage": "aB3"}\n'),
        ("one-line.txt", "machine h login x password planted-aB3-aB3\n"),
        ("no-login.txt", "machine h password planted-aB3-aB3\n"),
        ("other-order.txt", "machine h password planted-aB3 login x\n"),
        ("default.txt", "default login x password planted-aB3-aB3\n"),
        ("element.xml", "<db><Password type='x'>planted-aB3</Password></db>\n"),
        ("lines.xml", "<n:password>\n  <![CDATA[planted-aB3]]>\n</n:password>\n"),
        ("attribute.xml", '<db user="u"\n    password="planted-aB3"/>\n'),
        ("web.config", '<add key="DbPassword" value="planted-aB3"/>\n'),
        ("site.xml", "<property>\n <name>x.ConnectionPassword</name>\n <value>planted-aB3</value>\n</property>\n"),
        ("info.plist", "<key>api_token</key>\n<string>planted-aB3</string>\n"),
        ("logins.csv", "name,url,username,password\nh,https://h,me,planted-aB3\n"),
        ("late.csv", 'a note\n"User name";"Secret access key"\n"me";"planted-aB3"\n'),
        ("logins.tsv", "user\tpassword\nme\tplanted-aB3\n"),
        ("table.txt", "| user | password |\n|---|---|\n| me | planted-aB3 |\n"),
        ("env.yaml", "env:\n- name: DB_PASSWORD\n  value: planted-aB3\n"),
        ("task.json", '{"name": "DB_PASSWORD", "value": "planted-aB3"}\n'),
        ("words.txt", "user me\npassword planted-aB3\n"),
        ("connect.sh", "psql 'host=h user=u password=planted-aB3'\n"),
        ("load.sh", "curl -u me:planted-aB3 https://h\nmysql -u me -pplanted-aB3 db\n"),
        ("pgpass", "h:5432:db:me:planted-aB3\n"),
        ("users.txt", "me:$apr1$planted$aB3\n"),
        ("hook.yaml", "url: https://hooks.slack.com/services/T0/B0/plantedaB3aB3aB3\n"),
        ("key.ipynb", '{"source": ["-----BEGIN RSA PRIVATE KEY-----\\n", "MIIEowIBAAKCAQEAplanted-aB3\\n"]}'),
        ("note.ipynb", '{"source": ["!pip install git+https://me:planted-aB3@host/x"]}'),
        ("environ.ipynb", '{"source": ["os.environ[\\"WANDB_API_KEY\\"] = \\"planted-aB3-aB3\\""]}'),
        ("key.sh", 'export K="' + KEY + '"\n'),
        ("key.py", "K = '''" + KEY + "'''\n"),
        ("keys.json", json.dumps({"k": KEY})),
        ("comment.txt", "# " + KEY.replace("\n", "\n# ")),
        ("mark.txt", "\ufeff" + KEY),
        ("putty.txt", "PuTTY-User-Key-File-" + "2: ssh-rsa\naB3\n"),
        ("age.txt", "AGE-SECRET-" + "KEY-1" + "ABC3" * 10),
        ("ssh2.txt", "---- BEGIN SSH2 ENCRYPTED " + "PRIVATE KEY ----\naB3\n"),
        ("config.yaml", "kind: Config\nusers:\n- user:\n    client-key-data: " + "aB3" * 10),
        ("notes", "aws_secret_access_" + "key = " + "aB3d" * 10),
        ("oauth.json", '{"refresh_' + 'token": "1//' + "aB3" * 8 + '"}'),
        pytest.param("large.txt", "x" * (17 << 20) + "\n" + KEY, marks=pytest.mark.integration),
    ],
)
def test_s11_a_file_that_holds_secrets_by_its_content_is_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (fault,) = source_tree(tmp_path).issues
    assert name in fault.message
    assert "aB3" not in str(fault)


@pytest.mark.parametrize("text", [KEY, "token = hf_" + "aB3" * 8])
def test_13_text_in_two_bytes_a_character_is_searched_too(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.txt").write_bytes(text.encode("utf-16"))
    (fault,) = source_tree(tmp_path).issues
    assert "notes.txt" in fault.message


def test_13_placeholders_in_addresses_are_packed(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: pg://u:${PW}@h\nb: pg://u:password@h\nc: pg://u:{{ pw }}@h\nd: pg://u:***@h\n")
    (tmp_path / "b.py").write_text('"""Connects to postgres://me:example-word@host/db."""\n')
    tree = source_tree(tmp_path)
    assert (tree.issues, sorted(tree.files)) == ([], ["a.yaml", "b.py"])


@pytest.mark.parametrize(
    "name",
    [
        ".env.example",
        "tokens.txt",
        "api_key.py",
        "my_secrets.py",
        "added_tokens.json",
        "tokens.json",
        "v1.2",
        "notes.old.txt",
        "environment",
        "id_rsa.pub",
        "tokenizer.json",
        "tokens.py",
        "secrets.py",
        "keyboard.txt",
        "config.json",
    ],
)
def test_s11_what_only_sounds_like_a_secret_is_packed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(
        "header = '-----BEGIN ' + 'PRIVATE KEY-----'\nurl = f'pg://{user}:{password}@{host}'\n"
    )
    tree = source_tree(tmp_path)
    assert (tree.issues, list(tree.files)) == ([], [name])


def test_s11_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write(outside / ".ssh", config="Host x")
    (outside / "id_rsa").write_text("x")
    source = write(tmp_path / "source", main_py="")
    (source / "notes.txt").symlink_to(outside / "id_rsa")
    (source / "linked").symlink_to(outside)
    (source / "settings.txt").symlink_to(outside / ".ssh" / "config")
    problems = [it.message for it in errors_of(source_tree(source).issues)]
    assert [it.split()[0] for it in problems] == ["linked/.ssh/config", "linked/id_rsa", "notes.txt", "settings.txt"]
    assert f"leads to {outside}/id_rsa" in problems[2]


@pytest.mark.parametrize("target", ["/proc/self/environ", "/proc/self", "/sys/kernel", "/dev/null", "/proc/self/fd/0"])
def test_A13_15_a_link_to_what_is_not_a_file_of_a_disk_is_refused(tmp_path: Path, target: str) -> None:
    """The launcher's own environment, for one, reads like a file."""
    (tmp_path / "main.py").write_text("")
    (tmp_path / "notes").symlink_to(target)
    (tmp_path / "twice").symlink_to(tmp_path / "notes")
    tree = source_tree(tmp_path)
    assert list(tree.files) == ["main.py"]
    assert [it.message.split()[2] for it in tree.issues] == ["notes", "twice"]
    (tmp_path / IGNORE_FILE).write_text("/notes\n/twice\n")
    assert source_tree(tmp_path).issues == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no disk in memory here")
def test_s11_a_folder_on_a_disk_in_memory_is_one_like_any_other() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        source = write(Path(folder), main_py="")
        (source / "linked.py").symlink_to("main.py")
        (source / "others").symlink_to("/dev/fd")
        tree = source_tree(source)
        assert sorted(tree.files) == ["linked.py", "main.py"]
        assert [it.message.split()[2] for it in tree.issues] == ["others"]


def test_s11_settings_that_hold_no_secret_are_packed(tmp_path: Path) -> None:
    text = (
        "use_auth_token: true\npad_token: <|pad_0000001|>\nnext_token: abcdef0123456789\nimage_token_id: 128256\n"
        "api_key: ${API_KEY_0123456}\npassword: changeme\ntoken: env:HF_TOKEN_12345\nsecret: /run/secrets/db1234567\n"
        "tokenizer: gpt2-0123456789\nmax_tokens: 1234567890\npassword: null\nauth: [hidden]\n"
    )
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "words.csv").write_text("id,token,label\n1,covid19vaccine,x\n")
    (tmp_path / "words.txt").write_text("token covid19vaccine\nthe default password is hunter2hunter2\n")
    (tmp_path / "a.xml").write_text(
        "<password>${env.PW_0123456}</password>\n<string name='password'>Password</string>\n"
    )
    (tmp_path / "b.xml").write_text("<xs:element name='password' type='xs:string1234'/>\n<password/><a>text1234</a>\n")
    (tmp_path / "main.py").write_text("API_KEY = 'example0123456789'\n")
    tree = source_tree(tmp_path)
    files = ["a.xml", "b.xml", "config.yaml", "main.py", "words.csv", "words.txt"]
    assert (tree.issues, sorted(tree.files)) == ([], files)


def test_A1_runs_inside_the_source_are_no_part_of_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    run = tmp_path / "out" / "older"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"run_id": "older"}')
    (run / "notes.txt").write_text("a result")
    tree = source_tree(tmp_path)
    assert sorted(tree.files) == ["train.py"]
    assert tree.left_out == ["out/older/"]
