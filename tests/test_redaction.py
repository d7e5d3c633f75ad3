"""Nothing in the shape of a token, and no known secret, stays in a text."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sm_llm.code_redaction import redact_assignments
from sm_llm.errors import Issue, RunFailed, SpecError, StorageError
from sm_llm.redaction import HIDDEN, SHORTEST, Hidden, is_token_shaped, redact
from sm_llm.secret_names import is_secret_name

# Put together at run time: no text in the shape of a token stands in this file.
SHAPES = [
    "hf_" + "aB3" * 12,
    "AKIA" + "ABCDEFGH" * 2,
    "ghp_" + "x1" * 18,
    "github_pat_" + "x1_" * 12,
    "glpat-" + "y2-" * 8,
    "sk-" + "proj-" + "z3" * 20,
    "xoxb-" + "123-" * 5,
    "eyJ" + "hbGciOiJI" + ".eyJ" + "zdWIiOiIx" + ".c2lnbmF0dXJl",
    "-----BEGIN RSA " + "PRIVATE KEY-----\nabc\n-----END RSA " + "PRIVATE KEY-----",
    "https://me:pass" + "word@host/path",
    "redis://:pass" + "word@host",
    "https://host/x?a=1&tok" + "en=abcdef",
    "https://host/x?X-Amz-Sig" + "nature=abcdef",
    "https://hooks.slack.com/ser" + "vices/T0/B0/abcdef",
    "https://discord.com/api/web" + "hooks/123/abcdef",
    "npm_" + "a1B2" * 9,
    "hvs." + "a1B2" * 9,
]
HARMLESS = [
    "hf_hub", "hf://org/name@" + "0a" * 20, "task-1", "s3://bucket/asia", "sk-learn", "user@host", "1e-4",
    "arn:aws:secretsmanager:eu-west-1:123456789012:secret:hub", "https://host:8080/x@y", "hf_transfer",
]  # fmt: skip


@pytest.mark.parametrize("text", SHAPES)
def test_a_token_is_known_by_its_shape(text: str) -> None:
    assert is_token_shaped(f"before {text} after")
    assert redact(f"before={text}").startswith("before=")
    assert text not in redact(f"before {text} after")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_a_little_like_one_stays(text: str) -> None:
    assert not is_token_shaped(text)
    assert redact(text) == text


def test_a_fault_shows_no_token_not_even_half_of_one() -> None:
    token = SHAPES[0]
    text = str(SpecError([Issue("a-b", "a.b", "is odd", "x" * 100 + " " + token), Issue("a-c", token, f"see {token}")]))
    assert "hf_" not in text
    assert HIDDEN in text


class Kind(StrEnum):
    ONE = "one secret value"


@dataclass(frozen=True)
class Record:
    text: str
    more: tuple[dict[str, list[str]], ...]
    kind: Kind = Kind.ONE
    number: float = 123456.0


def test_known_values_are_hidden_inside_records() -> None:
    hidden = Hidden(("secret", 'quo"ted\\value', "123456", "tiny"))
    record = hidden.inside(Record("a secret and tiny", ({"k": ["the secret"]},)))
    assert record == Record(f"a {HIDDEN} and tiny", ({"k": [f"the {HIDDEN}"]},))
    assert record.kind is Kind.ONE
    assert HIDDEN in hidden(json.dumps({"x": 'quo"ted\\value'}))
    assert HIDDEN in hidden(repr('quo"ted\\value'))


@pytest.mark.parametrize("error", [StorageError, RunFailed])
def test_s09b_no_error_shows_credentials_of_an_address(error: type[Exception]) -> None:
    assert "planted" not in str(error("cannot reach http://user:planted@127.0.0.1:9/x?token=planted"))


SECRETS = st.text(st.characters(exclude_categories=("Cs",)), min_size=SHORTEST, max_size=40)


def _shown(secret: str, way: str, before: str, after: str) -> str:
    """What a program prints of ``secret``: itself, or as other formats write it, inside other text."""
    if way == "base64":
        return base64.b64encode(f"{before}{secret}{after}".encode()).decode()
    written = {
        "plain": lambda: secret,
        "json": lambda: json.dumps(secret)[1:-1],
        "repr": lambda: repr(secret)[1:-1],
        "url": lambda: quote(secret, safe=""),
        "form": lambda: quote_plus(secret),
        "urlsafe": lambda: base64.urlsafe_b64encode(secret.encode()).decode(),
    }[way]()
    return f"{before} {written} {after}"


@example("000000", "base64", "\x81", "")  # two bytes before it: five characters lie in whole groups, seven are its own
@given(SECRETS, st.sampled_from(["plain", "json", "repr", "url", "form", "base64", "urlsafe"]), st.text(), st.text())
def test_s08_a_known_secret_is_found_however_it_is_written(secret: str, way: str, before: str, after: str) -> None:
    text = _shown(secret, way, before, after)
    found = Hidden((secret,))(text)
    assert HIDDEN in found
    if way != "base64":  # of base64, characters that also encode neighbours of the secret stay
        assert _shown(secret, way, "", "").strip() not in found.replace(HIDDEN, "\0")


@given(st.lists(SECRETS, min_size=2, max_size=5))
def test_s08_every_line_of_a_secret_of_several_lines_is_hidden(lines: list[str]) -> None:
    secret = "\n".join(lines)
    hidden = Hidden((secret,))
    for line in secret.splitlines():
        if len(line.strip()) >= SHORTEST:
            assert HIDDEN in hidden(f"line: {line.strip()}")


def test_s08_texts_inside_a_secret_that_is_json_are_hidden() -> None:
    hidden = Hidden((json.dumps({"user": "x", "nested": [{"password": "planted-value"}]}),))
    assert hidden("it is planted-value") == f"it is {HIDDEN}"


@given(st.text())
def test_hiding_twice_changes_nothing_more(text: str) -> None:
    hidden = Hidden(("planted-value",))
    assert hidden(hidden(text)) == hidden(text)


def test_s07_values_given_to_secret_names_are_hidden_and_code_stays() -> None:
    text = (
        "+db_password: planted1\n+ 'api_key': 'planted2',\n+export GH_PAT=planted3\n"
        "+token = tokenizer.encode(text)\n+max_tokens=5\n+password=os.environ['X']\n"
    )
    found = redact_assignments(text)
    assert "planted" not in found
    assert found.endswith("+token = tokenizer.encode(text)\n+max_tokens=5\n+password=os.environ['X']\n")


WORD = "plan" + "ted1"
"""Stands for a secret in the texts below."""


@pytest.mark.parametrize(
    "text",
    [
        f"http://user:p@ss{WORD}@host/x", f"https://{WORD}{WORD}@host/simple", f"http://user:it's{WORD}@host/",
        f"//user:{WORD}@host", rf"http:\/\/user:{WORD}@host", f"http%3A%2F%2Fuser%3A{WORD}%40host",
        *(f"https://host/?{it}={WORD}" for it in ("pass", "auth", "code", "sas_token", "x-api-key", "access_key")),
        f"https://host/#access_token={WORD}", f"https://host/?a=b;token={WORD}", f"https://host/?a=b&amp;token={WORD}",
        f"https://hooks.slack.com/triggers/T/{WORD}", f"https://hooks.slack-gov.com/services/T/{WORD}",
        f"https://open.feishu.cn/open-apis/bot/v2/hook/{WORD}", f"https://maker.ifttt.com/trigger/x/with/key/{WORD}",
        f"api-key: {WORD}", f"https://host/?otp={WORD}", f"https://host/?a=b&db_pw={WORD}", f"https://discordapp.com/api/v10/webhooks/123/{WORD}",
        f"Authorization: Bearer {WORD}", f'"authorization": "Basic {WORD}"', f"bearer {WORD}{WORD}",
        f"Authorization: {WORD}", f'Authorization: Digest username="x", response="{WORD}"', f"X-Api-Key: {WORD}",
        f"Authorization: AWS4-HMAC-SHA256 Credential=A/b, SignedHeaders=host, Signature={WORD}",
        f"x-auth-token: {WORD}",
        f"Cookie: session={WORD}", f"Set-Cookie: sid={WORD}; Path=/", f"https://api.telegram.org/bot123:{WORD}/send",
        f"https://hooks.zapier.com/hooks/catch/1/{WORD}", f"https://outlook.office.com/webhook/{WORD}",
        *(f"https://host/?{it}={WORD}" for it in ("session", "jsessionid", "bearer", "assertion", "cas_ticket")),
        f"https%253A%252F%252Fuser%253A{WORD}%2540host", f"%2F%2Fuser%3A{WORD}%40host",
    ],
)  # fmt: skip
def test_s09_credentials_of_every_kind_of_address_are_hidden(text: str) -> None:
    assert is_token_shaped(text)
    assert WORD not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        f"password: correct horse {WORD}", f"DB_PASSWORD={WORD}; run", f"password = P@ss({WORD})", f"PGPASSWORD={WORD}",
        f'password="it\'s{WORD}"', f"db_pass = {WORD}", f"dbPassword: {WORD}", f"PASSWORD={WORD} python x.py",
        f"password: |\n  {WORD}\n  {WORD}", f"password = 'a' '{WORD}'", f'password = f"{WORD}{{x}}"',
        f'password = b"{WORD}"', f'"password": ["{WORD}"]', f"<password>{WORD}</password>", f"--password {WORD}",
        f'password="ab\\"{WORD}"', f"passwords: {WORD}", f"secret_value: {WORD}", f"aws_secret_access_key = {WORD}",
        f"AccountKey={WORD}==;EndpointSuffix", f"password={WORD}$1", f"token: {WORD},x", f'password =\\\n  "{WORD}"',
        f'"password":\n    "{WORD}"', f'password = (\n    "{WORD}"\n)', f"password: !vault |\n    {WORD}",
        f"password:\n  - {WORD}\n  - {WORD}", f"password:\n  {WORD}", f'password = """\n  {WORD}\n"""',
        f"PASSWORD = '''{WORD}'''", f'password = "a" \\\n   "{WORD}"', f'{{"name": "DB_PASSWORD", "value": "{WORD}"}}',
        f"- name: DB_PASSWORD\n  value: {WORD}", f'"name": "DB_PASSWORD",\n  "value": "{WORD}",',
        f'<add key="Password" value="{WORD}"/>', f"--token={WORD}", f'--token "{WORD}"', f"--api-key '{WORD}'",
        f'os.environ.setdefault("API_KEY", "{WORD}")', f'password = os.getenv("X", "{WORD}")',
        f'password = environ.get("PASSWORD") or "{WORD}"', f'if password != "{WORD}":',
        f'(password, x) = ("{WORD}", 1)',
        f"ENV SECRET {WORD}", f"set TOKEN {WORD}", f"machine h login u password {WORD}", f"TOKEN ?= {WORD}",
        f'{{"X-Api-Key": "{WORD}"}}', f'call(a, password=b or "{WORD}")',
        f"<Password type='x'>{WORD}</Password>", f"<n:password>{WORD}</n:password>", f"<a name='x' password='{WORD}'/>",
        f"<password><![CDATA[{WORD}]]></password>", f"<password>{'x' * 600}{WORD}</password>",
        f"<password>\n  {WORD}\n</password>", f'<password value="{WORD}"/>',
        f'<add value="{WORD}" key="DbPassword"/>', f'<string name="api_token">{WORD}</string>',
        f"<S Name='DbPassword'><Value>{WORD}</Value></S>", f"<key>password</key>\n<string>{WORD}</string>",
        f"<property><name>x.ConnectionPassword</name>\n<value>{WORD}</value></property>",
        f"machine h password {WORD}", f"machine h password {WORD} login u", f"default login u password {WORD}",
        f"password\t{WORD}", f"password   {WORD}", f"curl -u u:{WORD} https://h", f"curl --user 'u:{WORD}' h",
        f"mysql -u u -p{WORD} db", f"sshpass -p {WORD} ssh h", f"docker login -u u -p {WORD} h", f"h:5432:db:u:{WORD}",
        f"api-key: {WORD}", f"x_key = {WORD}", f'password: str = "{WORD}"', f'+    "token": "{WORD}", "a": 1',
    ],
)  # fmt: skip
@pytest.mark.parametrize("mark", ["", "+", "-", " ", "+  ", "-\t"])
def test_s07_however_a_value_is_given_to_a_secret_name_it_is_hidden(text: str, mark: str) -> None:
    lines = "\n".join(mark + line for line in text.split("\n"))
    found = redact_assignments(f"+before = 1\n{lines}\n after = 2")
    assert WORD not in found
    assert HIDDEN in found
    assert (found[:11], found[-11:]) == ("+before = 1", "\n after = 2")


TABLES = [
    "user,password\nme,{}\nyou,{}", '"name";"Secret access key"\n"me";"{}"', "user\tpassword\tnote\nme\t{}\t",
    "| user | password |\n|---|---|\n| me | {} |", 'url,username,password\nhttps://h,me,"{},""x"\nhttps://i,you,{}',
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("mark", ["", "+", "-", " "])
def test_s07_columns_of_secrets_are_hidden(table: str, mark: str) -> None:
    lines = "\n".join(mark + line for line in table.replace("{}", WORD).split("\n"))
    found = redact_assignments(f"@@ -1,3 +1,3 @@\n{lines}\n after = 2")
    assert WORD not in found
    assert found.count(HIDDEN) >= table.count("{}")
    assert found.endswith("\n after = 2")


def test_s07_other_columns_and_lines_of_code_stay() -> None:
    text = "+id,token,label\n+1,word,2\n+    user, password,\n+    host, port,\n+a, b, c\n+1, 2, 3\n"
    assert redact_assignments(text) == text


@pytest.mark.parametrize(
    "text",
    [
        f"host=h user=u password={WORD} dbname=d", f"password={WORD} host=h", f"host='h' password='{WORD} x'",
        f"Server=tcp:h,1433;Uid=u;Encrypt=yes;Pwd={WORD};", f"Data Source=h; User ID=u; Password={WORD}",
        f'username="u" password="{WORD}"', f"jdbc:oracle:thin:u/{WORD}@h:1521",
    ],
)  # fmt: skip
def test_s09_passwords_of_connections_to_databases_are_hidden(text: str) -> None:
    assert is_token_shaped(text)
    assert WORD not in redact(text)


@pytest.mark.parametrize(
    "text", ["host=h password=$PW", "connect(user=user, password=password)", "user=u, password=None)", "password=x"]
)
def test_what_only_refers_to_a_password_of_a_database_stays(text: str) -> None:
    assert not is_token_shaped(text)


SECRET_NAMES = (
    "PGPASSWORD SSHPASS DBPASSWORD DB_PW LDAP_BIND_PW HFTOKEN GITHUBTOKEN API_KEYS TOKENS DB_PASSWORD_OLD "
    "MY_TOKEN_PROD SECRETS SECRET_VALUE AUTH_HEADER dbPassword GOOGLE_CREDS JWT AZURE_STORAGE_CONNECTION_STRING GH_PAT "
    "x-api-key SECRETKEY PRIVKEY DBPWD USERPW ROOTPW CRED BEARER AZURE_SAS ACCESSKEY MY_OTP CONNECTIONSTRING CONN_STR "
    "PASSWORD_HASH PASSWORD_BASE64 TOKEN_B64 SECRETS_JSON MY_SECRET_STRING session_key FERNET_KEY tls.key "
    "SECRET_KEY_BASE PRIVATE_KEY_PEM GHPAT DB_PASSCODE SEED_PHRASE WALLET_MNEMONIC"
)
WAYS = (
    "{name}={value}", "{name}: {value}", "export {name}='{value}'", '"{name}": "{value}",', "--{name}={value}",
    '{name} = f(x, "{value}")', "x = y[{name!r}] or '{value}'", "<{name}>{value}</{name}>",
    '{{"{name}":\n  "{value}"}}', "- name: {name}\n  value: {value}", '{name} = """\n{value}\n"""',
    "<{name} a='b'>{value}</{name}>", '<add key="{name}" value="{value}"/>',
    "<name>{name}</name>\n<value>{value}</value>",
    "my_{name}\t{value}",
)  # fmt: skip


@given(
    st.sampled_from([it for it in SECRET_NAMES.split() if it.replace("_", "").isalnum()]),
    st.from_regex(r"[A-Za-z][A-Za-z0-9+/_-]{3,20}[0-9][A-Za-z0-9]{4,20}", fullmatch=True),
    st.sampled_from(WAYS),
    st.sampled_from(["+", "-", " ", "+    ", "-\t"]),
    st.lists(st.text(st.characters(exclude_characters="\r\n\x0b\x0c\x85\u2028\u2029"), max_size=30), max_size=3),
)
def test_s07_no_value_of_a_secret_name_survives_whatever_lines_are_before_it(
    name: str, value: str, way: str, mark: str, before: list[str]
) -> None:
    given = way.format(name=name, value=value)
    text = "\n".join([*before, *(mark + line for line in given.split("\n"))])
    assert value not in redact_assignments(text)


@pytest.mark.parametrize(
    "line",
    [
        "token = tokenizer.encode(text)", "max_tokens=5", "password=os.environ['X']", "def f(password: str, key=None):",
        "run(token=token, revision=rev)", "pad_token: '<pad>'", "forward_pass = 'x'", "primary_key = 'id'",
        "HF_TOKEN: env:HF_TOKEN", "token = os.environ.get('HF_TOKEN')", "f('text', token=token)", "if not password:",
        "class Token:", "headers = {'Authorization': f(token)}", "password = ''", "def get_token(self) -> str:",
        "from_pretrained('x', token=os.getenv('HF_TOKEN'))", "token = self.token", "password = None",
        "export TOKEN=$HF_TOKEN", "tokenizer: gpt2",
    ],
)  # fmt: skip
def test_s07_code_and_references_stay_in_a_diff(line: str) -> None:
    assert redact_assignments(f"+{line}\n") == f"+{line}\n"


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        ("abc/def+ghi=jkl", "abc%2fdef%2bghi%3djkl"), ('ab"cd/ef/gh', json.dumps(json.dumps({"p": 'ab"cd/ef/gh'}))),
        ("ab/cd/ef", r"ab\/cd\/ef"), ("p\xe4ssword", repr("p\xe4ssword".encode())),
        ("p\xe4ssword", ascii("p\xe4ssword")),
        ('ab"cd<ef', "ab&quot;cd&lt;ef"), ("it's$ecret1", "'it'\"'\"'s$ecret1'"), ("abcdef12", b"abcdef12".hex()),
        ("abcdef12", "%61%62%63%64%65%66%31%32"),
        (json.dumps({"pin": 12345678}), "12345678"), (json.dumps({"k": json.dumps({"p": WORD})}), WORD),
        (f"A=1\nPASSWORD='{WORD}'\n", f"pw {WORD}"), (f"user: x\npassword: {WORD}\n", f"pw {WORD}"),
    ],
)  # fmt: skip
def test_s08_further_forms_and_parts_of_a_known_secret_are_hidden(secret: str, text: str) -> None:
    found = Hidden((secret,))(text)
    assert HIDDEN in found
    assert not any(it in found for it in (WORD, "ghi", "gh", "ecret1", "xe4", "678"))


def test_s08_overlapping_secrets_and_keys_of_mappings_are_hidden() -> None:
    assert Hidden(("abcdefgh", "efghijklmn"))("abcdefghijklmn") == HIDDEN
    assert Hidden((WORD * 2,)).inside({WORD * 2: 1}) == {HIDDEN: 1}


OTHER_NAMES = "pad_token max_tokens num_tokens tokenizer forward_pass primary_key TOKENIZERS_PARALLELISM compass path"


def test_s08_names_of_secrets_are_known_by_their_words() -> None:
    assert [it for it in SECRET_NAMES.split() if not is_secret_name(it)] == []
    assert [it for it in OTHER_NAMES.split() if is_secret_name(it)] == []


@pytest.mark.parametrize(
    "text",
    [
        "https://" + "a:" * 50_000,
        "a." * 50_000 + "token",
        'password="' + "\\" * 50_000,
        "?token" * 9000,
        "'a token here', " * 20_000 + "token",
        "token='a', " * 20_000,
        "-token " * 20_000,
        "name: token\n" * 9000,
        *(word * 20_000 for word in ("<a name='token' ", "<password>", "machine ", "curl ", "mysql -p", "user=")),
        *("<password>" + it * 50_000 for it in (" ", "x", "]]>")),
        "a,password\n" + '"x' * 50_000,
    ],
)
def test_s09_long_lines_end(text: str) -> None:
    assert redact_assignments(redact(text))  # within the limit of a test: no pattern tries every part of a line again


@pytest.mark.parametrize("mark", ["+", "-", " "])
def test_s07_a_part_of_a_key_without_its_header_is_hidden(mark: str) -> None:
    body = base64.b64encode(bytes(range(144))).decode()
    lines = "".join(f"{mark}{body[at : at + 64]}\n" for at in range(0, 192, 64))
    found = redact_assignments(f"@@ -7,6 +7,6 @@\n{lines}-----END RSA " + "PRIVATE KEY-----\n")
    assert not any(body[at : at + 20] in found for at in range(0, 170, 10))
