#!/bin/bash
# llama-2-70b-finetune-smp-slurm-20261128-040000-ab12-model, attempt 1. Written by sm_llm from the run's specification.
#SBATCH --job-name=llama-2-70b-finetune-smp-slurm-20261128-040000-ab12-model
#SBATCH --comment=/fsx/runs/llama-2-70b-finetune-smp-slurm-20261128-040000-ab12/steps/model
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --output=/fsx/sm_llm/jobs/llama-2-70b-finetune-smp-slurm-20261128-040000-ab12-model/attempt-1/job.log
#SBATCH --open-mode=append

set -u
umask 077

# Where all nodes find the code and the files of this attempt.
code=/opt/sm_llm
folder=/fsx/sm_llm/jobs/llama-2-70b-finetune-smp-slurm-20261128-040000-ab12-model/attempt-1
python=python3
restart=${SLURM_RESTART_COUNT:-0}

# The environment of every process: our own, then by the facts of the instance type, then from the specification.
export SM_LLM_JOB_FILE=/fsx/sm_llm/jobs/llama-2-70b-finetune-smp-slurm-20261128-040000-ab12-model/attempt-1/job.json
export PYTHONPATH=/opt/sm_llm
# A node keeps its ranks over restarts: the checkpoints on its disk are theirs. Read once, for all nodes alike.
SM_LLM_NODES=$(cat "$folder/../nodes" 2> /dev/null || scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)
export SM_LLM_NODES
if [ "$restart" -gt 0 ]; then
  # When Slurm queued this start and when it began: parts of the time that a recovery takes.
  read -r queued began <<< "$(squeue --noheader --states=all --jobs "$SLURM_JOB_ID" -o '%V %S')"
  SM_LLM_QUEUED_AT=$(date -d "$queued" +%s 2> /dev/null)
  SM_LLM_BEGAN_AT=$(date -d "$began" +%s 2> /dev/null)
  export SM_LLM_QUEUED_AT SM_LLM_BEGAN_AT
fi
# Signs entries in the processes' common store: what another job writes there is refused.
SM_LLM_STORE_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export SM_LLM_STORE_SECRET

# Slurm forgets a job soon after its end; this file stays.
# shellcheck disable=SC2317  # the trap calls it
record_outcome() {
  printf '{"job_id": "%s", "restart": %d, "exit_code": %d, "requeued": %s, "time": %d}\n' \
    "$SLURM_JOB_ID" "$restart" "$1" "$2" "$(date +%s)" > "$folder/outcome.new"
  mv -f "$folder/outcome.new" "$folder/outcome-$restart.json"
}
trap 'record_outcome "$?" false' EXIT
# Slurm sends TERM to the processes as well; they may save a checkpoint before it kills them.
is_asked=
trap 'echo "sm_llm: the job is asked to end"; is_asked=1' TERM

echo "--- $SLURM_JOB_NAME: job $SLURM_JOB_ID, restart $restart, on $SLURM_JOB_NODELIST, $(date -u +%FT%TZ) ---"
if [ -e "$folder/stop" ]; then
  echo "sm_llm: the run was asked to stop before this start"
  touch "$folder/stopped-$restart"
  exit 75
fi
if [ "$restart" -gt 20 ]; then
  echo "sm_llm: restart $restart is not allowed: backend.max_requeues is 20" >&2
  exit 1
fi

# What this start has printed: the log holds those before it as well.
this_start() {
  sed -n "/--- .*, restart $restart, on /,\$p" "$folder/job.log" 2> /dev/null
}

# srun ends all nodes when one fails, but a node whose task is only just starting misses that, and would wait for the
# failed one. So a node without code or interpreter prints that and waits until this has ended the step.
end_without_code() {
  while sleep 1; do
    if this_start | grep -q '^node [^ :]*: .* is not there'; then
      sleep 2 # for nodes that find the same
      scancel "$SLURM_JOB_ID.0"
    fi
    set -- "$folder/fit-$restart-"*
    if [ -e "$1" ] && [ "$#" -ge "$SLURM_JOB_NUM_NODES" ]; then
      return
    fi
  done
}

# A job that its user has cancelled stays so: Slurm would take a request to queue it again. Of an end that has another
# cause, as the time limit, its notice names that.
is_cancelled() {
  [ -n "$is_asked" ] && ! this_start | grep -q ' DUE TO '
}

# One task per node: it checks the node and runs torchrun. In the background, since bash runs traps only in between.
# shellcheck disable=SC2016  # the step's own bash expands these
srun \
  --kill-on-bad-exit=1 \
  --wait=600 \
  --cpu-bind=none \
  --container-image=/fsx/sm_llm/images/smp.sqsh \
  --container-mounts=/fsx/sm_llm:/fsx/sm_llm,/opt/dlami/nvme:/opt/dlami/nvme,/fsx/runs:/fsx/runs,/fsx/sm_llm/bundles/0000000000000000000000000000000000000000000000000000000000000000:/opt/sm_llm:ro \
  --container-env=SM_LLM_JOB_FILE,PYTHONPATH \
  --no-container-mount-home \
  bash -c 'absent=
  if [ ! -e "$1/sm_llm/worker/slurm/node.py" ]; then
    absent="$1 is not there: $4"
  elif ! command -v "$2" > /dev/null; then
    absent="the interpreter $2 is not there. $6"
  fi
  if [ -n "$absent" ]; then
    echo "node $SLURMD_NODENAME: $absent" | tee "$5-$SLURM_NODEID" >&2
    sleep 60 # see end_without_code
    exit 78
  fi
  exec "$2" -P "$1/sm_llm/worker/slurm/node.py" 1 "$3"' \
  step "$code" "$python" fetch.py "the container was not started" "$folder/failure-$restart" "Take an image that holds it" &
step=$!
end_without_code &
watch=$!
wait "$step"
status=$?
while kill -0 "$step" 2> /dev/null; do # a trap ended the wait
  wait "$step"
  status=$?
done
kill "$watch" 2> /dev/null
# A node that does not see the shared folder can leave nothing there: what it printed is in the log.
absent=$(this_start | grep '^node [^ :]*: .* is not there: ' | sort -u)
if [ -n "$absent" ]; then
  head -n 1 <<< "$absent" > "$folder/failure-$restart-0"
fi
# Nodes found themselves unfit where others did not: the job is tried without them. A fault of all is the job's own.
unfit=$(cat "$folder/unfit-$restart-"* 2> /dev/null)
if [ -n "$unfit" ] && cat "$folder/fit-$restart-"* > /dev/null 2>&1 && [ ! -e "$folder/stop" ] && ! is_cancelled; then
  unfit=$(cat "$folder/unfit-"* | sort -u | paste -sd, -)
  record_outcome "$status" true
  trap - EXIT
  trap '' TERM # with which Slurm ends this script as soon as the job is requeued
  echo "sm_llm: the job is requeued without the unfit nodes $unfit"
  scontrol requeue "$SLURM_JOB_ID"
  exec scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$unfit"
fi
again=
if [ -e "$folder/port-taken-$restart" ]; then
  again="the port of this start was taken"
fi
if [ -n "$again" ] && [ ! -e "$folder/stop" ] && ! is_cancelled; then
  record_outcome "$status" true
  trap - EXIT
  echo "sm_llm: $again; the job is requeued"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
# Slurm would start the jobs that wait for this one, whose result is not there.
if [ "$status" -eq 0 ] && [ -e "$folder/stopped-$restart" ]; then
  status=75
fi
exit "$status"
