"""Brings the code bundle into a pod: fetched from S3 or a mounted folder, compared with its digest, unpacked.

``python3 fetch_code.py ADDRESS DIGEST FOLDER JOB_FILE``, in an init container. The pod has none of our code before it
has run, so it imports nothing of this package; boto3 only for an address in S3.
"""

import contextlib
import gzip
import hashlib
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path


def main(address: str, digest: str, folder: str, job_file: str) -> None:
    """Unpack the bundle below ``folder``. Ends the process with one line if it cannot be had, or is damaged."""
    try:
        archive = _read(address, job_file)
    except Exception as error:  # of boto3 or the file system, which this module may not import to name
        raise SystemExit(f"sm_llm: cannot fetch the code bundle {address}: {error}") from None
    try:
        plain = gzip.decompress(archive)
    except (OSError, EOFError) as error:
        raise SystemExit(f"sm_llm: the code bundle {address} is damaged: {error}") from None
    found = hashlib.sha256(plain).hexdigest()
    if found != digest:
        raise SystemExit(f"sm_llm: the code bundle {address} has the digest {found}, and {digest} is expected")
    # What an earlier start of this container has left may be half of it.
    for old in Path(folder).iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    with tarfile.open(fileobj=io.BytesIO(plain)) as members:
        if hasattr(tarfile, "data_filter"):
            members.extractall(folder, filter="data")
        else:  # the first releases of Python 3.11; the digest has shown that the archive is ours
            members.extractall(folder)
    print(f"sm_llm: code bundle {digest[:12]} from {address}", flush=True)


def _read(address: str, job_file: str) -> bytes:
    if not address.startswith("s3://"):
        return Path(address).read_bytes()
    import boto3

    options = json.loads(Path(job_file).read_text(encoding="utf-8"))["spec"]["storage_options"]
    client = boto3.client("s3", endpoint_url=options.get("endpoint_url"), region_name=options.get("region"))
    bucket, _, key = address.removeprefix("s3://").partition("/")
    owner = options.get("expected_bucket_owner")
    answer = client.get_object(Bucket=bucket, Key=key, **({"ExpectedBucketOwner": owner} if owner else {}))
    with contextlib.closing(answer["Body"]) as body:
        found: bytes = body.read()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
