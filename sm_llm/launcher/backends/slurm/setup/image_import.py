"""Brings an image of ECR onto a cluster's shared file system, as the .sqsh file for pyxis: by enroot on a node."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, PlanError, SubmitError
from sm_llm.launcher.backend import ImportedImage
from sm_llm.launcher.backends.slurm.setup.setup_job import SetupJob, run_job
from sm_llm.launcher.images.image_build import registry_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.launcher.backends.slurm.cluster import Cluster
    from sm_llm.spec.backends.slurm import SlurmOptions

START_SECONDS = 3600.0
_NAME = re.compile(r"(?P<name>[a-z0-9][a-z0-9._/-]*):(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})")

IMPORT = """
# Arguments: registry, its account and region, repository, tag, the .sqsh file, a folder on the node's own disk.
set -eu
registry=$1 account=$2 region=$3 repository=$4 tag=$5 target=$6 scratch=$7
for program in enroot aws; do
  command -v "$program" > /dev/null || { echo "$program is not installed on $SLURMD_NODENAME"; exit 1; }
done
digest=$(aws ecr batch-get-image --region "$region" --registry-id "$account" --repository-name "$repository" \\
  --image-ids "imageTag=$tag" --query 'images[0].imageId.imageDigest' --output text)
case $digest in
  sha256:*) ;;
  *) echo "$registry has no $repository:$tag"; exit 1 ;;
esac
if [ -e "$target" ] && [ "$(cat -- "$target.digest" 2> /dev/null)" = "$digest" ]; then
  echo "current $digest"
  exit 0
fi
# On the node's disk: unpacked layers are many small files, for which a shared file system is slow.
work=$(mktemp -d -- "$scratch/sm-llm-import.XXXXXX")
trap 'rm -rf -- "$work" "$target.$SLURM_JOB_ID.sqsh"' EXIT
export ENROOT_CONFIG_PATH=$work/config ENROOT_CACHE_PATH=$work/cache ENROOT_DATA_PATH=$work/data
export ENROOT_TEMP_PATH=$work/temp
mkdir -- "$ENROOT_CONFIG_PATH" "$ENROOT_CACHE_PATH" "$ENROOT_DATA_PATH" "$ENROOT_TEMP_PATH"
# enroot runs the command when it needs the password, so that the file holds no secret.
# shellcheck disable=SC2016
printf 'machine %s login AWS password $(aws ecr get-login-password --region %s)\\n' "$registry" "$region" \\
  > "$ENROOT_CONFIG_PATH/.credentials"
mkdir -p -- "${target%/*}"
enroot import --output "$target.$SLURM_JOB_ID.sqsh" -- "docker://$registry#$repository:$tag"
# The digest last: an import that ends in between is made again.
rm -f -- "$target.digest"
mv -f -- "$target.$SLURM_JOB_ID.sqsh" "$target"
printf '%s\\n' "$digest" > "$target.digest.$SLURM_JOB_ID"
mv -f -- "$target.digest.$SLURM_JOB_ID" "$target.digest"
echo "imported $digest"
"""


def import_image(image: str, options: SlurmOptions, cluster: Cluster, tell: Callable[[str], None]) -> ImportedImage:
    """Import an image unless the cluster has it already, with the same digest.

    Args:
        image: ``ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG``.
        options: where the cluster is, where jobs may run there, and their scratch folder.
        cluster: the same, connected.
        tell: gets a line about each step.

    Raises ``PlanError`` for what is no such image, ``SubmitError`` where it cannot be imported.
    """
    registry = registry_of(image)
    match = _NAME.fullmatch(image.removeprefix(f"{registry[0]}/"))
    if match is None:
        remedy = "enroot takes tags alone: write ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG"
        raise PlanError([Issue("image-without-tag", "image", "has no repository and tag", image, remedy)])
    name, tag = match["name"], match["tag"]
    target = f"{options.shared_folder}/images/{name.replace('/', '_')}_{tag}.sqsh"
    arguments = (registry[0], registry["account"], registry["region"], name, tag, target, options.scratch_folder)
    # Alone: two imports of one image would write the same file.
    job = SetupJob("sm-llm-image", IMPORT, arguments, minutes=120, alone=True)
    end = run_job(job, options, cluster, tell, wait_seconds=START_SECONDS)
    # enroot prints its progress into the same log; the outcome is the script's last line.
    last = end.log.strip().splitlines()[-1:]
    done = re.fullmatch(r"(imported|current) (sha256:\S+)", last[0]) if last else None
    if not end.ok or done is None:
        raise SubmitError(f"{image} could not be imported: {end.last_words}")
    return ImportedImage(target, done[2], is_new=done[1] == "imported")
