"""How long ``launch()`` takes to start a SageMaker training job, against moto: run by hand.

    python benchmarks/submit.py

Prints seconds of wall clock and of CPU for the first launch of a process (imports, botocore's model of the service, the
bundle) and for later ones. The bound is 2 s.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time


def _serve() -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
            return server, endpoint
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("moto did not start")


def main() -> None:
    """Launch the recipe llama-2-7b-fsdp three times."""
    server, endpoint = _serve()
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint, AWS_DEFAULT_REGION="us-west-2", AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x"
    )
    try:
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
        role = boto3.client("iam").create_role(RoleName="SageMaker", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
        before = set(sys.modules)  # boto3 is this program's own
        from sm_llm import launch

        for number in range(3):
            wall, cpu = time.perf_counter(), time.process_time()
            launch("llama-2-7b-fsdp", f"backend.role={role}", "storage=s3://bucket/runs", new=True)
            heavy = {"torch", "transformers", "sagemaker", "boto3.session"} & set(sys.modules) - before
            assert not heavy, heavy
            print(f"launch {number + 1}: {time.perf_counter() - wall:.2f} s, {time.process_time() - cpu:.2f} s of CPU")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
