#!/bin/sh
# ray-job.sh ID GPUS COMMAND...: run a Ray job, and stop it when this script is stopped.
# `ray job submit` alone leaves the job running on the cluster. In server.yaml:
#   launch: [./ray-job.sh, "{job}-{attempt}", "{gpus}"]
id=$1 gpus=$2
shift 2
trap 'ray job stop "$id"; exit 143' TERM INT HUP
ray job submit --submission-id="$id" --entrypoint-num-gpus="$gpus" -- "$@" &
wait $!
