"""Small scripts that a login node's ``sh`` runs; their values come as arguments, never as a part of the text."""

SUBMIT = """
# sbatch heeds SBATCH_... and SLURM_... variables, and passes the whole environment on to the job: what a job gets is in
# its script, and nothing of the shell that submits it.
exec env -i HOME="$HOME" PATH="$PATH" USER="${USER:-}" LOGNAME="${LOGNAME:-}" LANG="${LANG:-C.UTF-8}" \\
  ${SLURM_CONF:+"SLURM_CONF=$SLURM_CONF"} sbatch --parsable --chdir="$1" ${3:+"--dependency=$3"} "$2"
"""
"""Arguments: folder, script, and what the job waits for, or nothing."""

PUT = """
set -e; umask 077
mkdir -p -- "${1%/*}"
new=$(mktemp -- "$1.XXXXXX")
trap 'rm -f -- "$new"' EXIT
cat > "$new"
mv -f -- "$new" "$1"
trap - EXIT
"""
"""Writes standard input to a file, atomically, readable to this user alone. Argument: path."""

UNPACK = """
set -e; umask 077
[ ! -d "$1" ] || exit 0
mkdir -p -- "${1%/*}"
new=$(mktemp -d -- "$1.XXXXXX")
trap 'chmod -R u+w -- "$new" 2> /dev/null; rm -rf -- "$new"' EXIT
gzip -dc > "$new/.tar"
sum=$(sha256sum < "$new/.tar")
[ "${sum%% *}" = "$2" ] || { echo "the bundle arrived damaged" >&2; exit 1; }
mkdir "$new/code"
tar -xf "$new/.tar" -C "$new/code"
chmod -R a-w -- "$new/code"
chmod u+w -- "$new/code" # or it could not be moved
mv -T -- "$new/code" "$1" 2> /dev/null || [ -d "$1" ] # another launch may have been faster
chmod a-w -- "$1"
"""
"""Unpacks a tar.gz from standard input, read-only; nobody sees half of it. Arguments: folder, SHA-256 of the tar."""

CLEAN = """
[ -z "$2" ] || rm -rf -- "$2"
[ ! -d "$1" ] || find "$1" -mindepth 1 -maxdepth 1 -type d -user "$(id -u)" -mtime +"$3" -exec rm -rf -- {} +
"""
"""Removes a folder, and this user's folders in another that are older. Arguments: that one, folder or nothing, days."""

READ_LOGS = """
cd -- "$1" || exit 3
most=$2; shift 2
for log in job.log node-*.log; do
  [ -f "$log" ] || continue
  begin=0
  for known; do case $known in "$log="*) begin=${known#*=} ;; esac; done
  count=$(($(wc -c < "$log") - begin))
  [ "$count" -gt 0 ] || continue
  [ "$count" -le "$most" ] || count=$most
  printf '%s %s\\n' "$log" "$count"
  tail -c "+$((begin + 1))" -- "$log" | head -c "$count"
done
"""
"""Arguments: folder, most bytes of one log, then NAME=OFFSET of what is known. Prints name, size and content."""

READ_ENDS = """
cd -- "$1" || exit 3
show() { printf '%s %s\\n' "$1" "$(($(printf %s "$2" | wc -c)))"; printf %s "$2"; }
for file in outcome-*.json failure-* stopped-*; do
  [ ! -f "$file" ] || show "$file" "$(cat -- "$file")"
done
[ ! -f job.log ] || show job.log "$(tail -n 1 job.log)"
"""
"""Argument: folder. Prints name, size and content of what an attempt left about its end, and the log's last line."""
