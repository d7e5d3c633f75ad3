"""The text of an answer, read more strictly than the SDK reads it: it takes almost anything for a whole, empty one.

Amazon S3 API Reference, "ListObjectsV2", "ListMultipartUploads" and "DeleteObjects".
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any
from xml.etree import ElementTree

from sm_llm.redaction import redact
from sm_llm.storage.base import LARGEST_BYTES

FAULT = "ListingFault"
"""Under this name the SDK's parsed answer holds what is wrong with its text; "" if nothing is."""
ROOTS = {
    "ListObjectsV2": "ListBucketResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
    "DeleteObjects": "DeleteResult",
}
"""Operation -> the root element of its answer."""
_NAMESPACE = re.compile(r"(?:https?://s3\.amazonaws\.com/doc/2006-03-01/?)?")
# Element of which there may be several -> what each must have once.
_ITEMS = {"Contents": ("Key", "Size", "LastModified"), "Upload": ("Key", "UploadId", "Initiated")}
_SEVERAL = frozenset({*_ITEMS, "CommonPrefixes", "ChecksumAlgorithm", "Deleted", "Error"})
# Element -> the elements in it that hold others. Keys in any other element would be hidden.
_NESTED = {
    "ListBucketResult": frozenset({"Contents", "CommonPrefixes"}),
    "ListMultipartUploadsResult": frozenset({"Upload", "CommonPrefixes"}),
    "DeleteResult": frozenset({"Deleted", "Error"}),
    "Contents": frozenset({"Owner", "RestoreStatus"}),
    "Upload": frozenset({"Owner", "Initiator"}),
}
# Of errors and of pages; other elements that are unknown may be a store's own, as long as they hold nothing.
_REFUSED = frozenset({"Code", "Message", "html", "body"})
_WHOLE = re.compile(r"[0-9]{1,18}")
_TIME = re.compile(r"(?:19[7-9]|[2-9][0-9]{2})[0-9]-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?Z")
# Characters of an answer that is something else, in the error: enough to recognise a page of a proxy.
_SHOWN = 60
# Element -> what its text must look like, to the last character.
_FORMS = {
    "IsTruncated": re.compile("true|false"),
    "EncodingType": re.compile("(?:url)?"),
    "Marker": re.compile(""),  # of the first version: where it begins and continues
    "NextMarker": re.compile(""),
    "KeyCount": _WHOLE,
    "MaxKeys": _WHOLE,
    "MaxUploads": _WHOLE,
    "Size": _WHOLE,
    "LastModified": _TIME,
    "Initiated": _TIME,
}


def note_problems(client: Any) -> None:
    """From now on, what a client of the SDK returns for these operations names what is wrong with the answer's text."""
    for operation, root in ROOTS.items():
        # Not before it is parsed: the SDK's own handler of that event comes first, and hides the status.
        client.meta.events.register(f"response-received.s3.{operation}", partial(_note_problem, root))


def _note_problem(
    root: str, response_dict: dict[str, Any] | None, parsed_response: dict[str, Any] | None, **_: object
) -> None:
    if response_dict is None or parsed_response is None or not 200 <= (status := response_dict["status_code"]) < 300:
        return
    # S3 may send an error with status 200: one that names its code is left to the SDK.
    if (code := parsed_response.get("Error", {}).get("Code", "")) and not code.isdigit():
        return
    # Of what is not XML the SDK makes a server error of its own, which would be reported instead of what came.
    unread = "it is not UTF-8" if parsed_response.pop("Error", None) else ""
    parsed_response["ResponseMetadata"]["HTTPStatusCode"] = status
    problem = f"its status is {status}" if status != 200 else text_problem(response_dict["body"], root)
    parsed_response[FAULT] = problem or unread


def text_problem(body: bytes, root: str) -> str:
    """Why ``body`` is not a whole answer with the element ``root``; "" if it is one."""
    try:
        tree = ElementTree.fromstring(body)
    # ``LookupError`` is raised for an encoding that Python does not know.
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        begin = redact(body[: 16 * _SHOWN].decode("utf-8", "replace"))[:_SHOWN]
        return f"it is not XML ({error}), and begins with {begin!r}" if body.strip() else "it is empty"
    # Keys inside a comment would be hidden, and a text of parts reads otherwise than it stands there.
    if b"<!" in body or body.find(b"<?", 1) > 0:
        return "it holds a comment, an instruction or a type of document, which no such answer has"
    namespace, _, name = tree.tag.rpartition("}")
    if name != root or not _NAMESPACE.fullmatch(namespace.removeprefix("{")):
        return f"it is a {tree.tag!r}, expected a {root}"
    if problem := _twice(tree) or _odd_text(tree) or _odd_elements(tree):
        return problem
    # In quiet mode a ``DeleteResult`` holds errors alone, which the caller reads.
    if root == ROOTS["DeleteObjects"]:
        return ""
    if _texts(tree).get("IsTruncated") is None:
        return "it does not state whether it is complete"
    if any(_twice(it) or _odd_elements(it) for it in tree if _name(it) == "CommonPrefixes"):
        return "it holds folders that are none"
    items = [it for it in tree if _name(it) in _ITEMS]
    if problem := next((problem for it in items if (problem := _item_problem(it))), ""):
        return problem
    # One key may have several unfinished uploads: only key and id together are unique.
    names = Counter((it.get("Key"), it.get("UploadId")) for it in map(_texts, items))
    return next((f"it holds {key!r} twice" for (key, _), count in names.items() if count > 1), "")


def _item_problem(item: ElementTree.Element) -> str:
    texts = _texts(item)
    key = repr(texts.get("Key"))
    if lack := next((it for it in _ITEMS[_name(item)] if not texts.get(it)), None):
        return f"{key} has no {lack}"
    if problem := _twice(item) or _odd_text(item) or _odd_elements(item):
        return f"{key}: {problem}"
    if int(texts.get("Size", "0")) > LARGEST_BYTES:
        return f"{key} has {texts['Size']} bytes, more than any object"
    return ""


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _texts(element: ElementTree.Element) -> dict[str, str]:
    return {_name(it): it.text or "" for it in element}


def _twice(element: ElementTree.Element) -> str:
    counts = Counter(_name(it) for it in element)
    return next((f"it has {name} twice" for name, count in counts.items() if count > 1 and name not in _SEVERAL), "")


def _odd_elements(element: ElementTree.Element) -> str:
    """Text between elements, elements of an error or a page, and such that hold others where none may."""
    if any((text or "").strip() for text in (element.text, *(it.tail for it in element))):
        return "it holds text between its elements"
    nested = _NESTED.get(_name(element), frozenset())
    for it in element:
        if _name(it) in _REFUSED or (len(it) and _name(it) not in nested):
            return f"it holds a {_name(it)[:80]!r}, which no such answer has"
    return ""


def _odd_text(element: ElementTree.Element) -> str:
    for it in element:
        form = _FORMS.get(_name(it))
        if form is not None and (len(it) or not form.fullmatch(it.text or "")):
            return f"its {_name(it)} is {(it.text or '')[:80]!r}"
    return ""
