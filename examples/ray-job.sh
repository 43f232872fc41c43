#!/bin/sh
# ray-job.sh ID GPUS COMMAND...: a job of Ray that also ends when this script is asked to end.
# `ray job submit` alone leaves it to the cluster. In server.yaml:
#   launch: [./ray-job.sh, "{job}-{attempt}", "{gpus}"]
id=$1 gpus=$2
shift 2
trap 'ray job stop "$id"; exit 143' TERM INT HUP
ray job submit --submission-id="$id" --entrypoint-num-gpus="$gpus" -- "$@" &
wait $!
