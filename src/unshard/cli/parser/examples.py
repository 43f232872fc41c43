"""The example lines at the end of each command's `--help`, at most three."""

EXAMPLES = """
unshard merge checkpoints/my-run/global_step_100 my-model
unshard merge outputs/checkpoint-1000 my-model --base Qwen/Qwen3-8B
unshard merge checkpoints/my-run my-models --role all --dtype bfloat16
unshard inspect checkpoints/my-run
unshard inspect s3://bucket/my-run/global_step_100
unshard hint checkpoints/my-run
unshard verify my-model --against checkpoints/my-run/global_step_100
unshard verify my-model --checksums sums.txt
unshard diff my-run/global_step_100 my-run/global_step_200
unshard diff my-model checkpoints/my-run --layers
unshard checksums checkpoints/my-run/global_step_100
unshard average checkpoints/my-run averaged --last 3 --schedule 1-sqrt
unshard average outputs averaged --base Qwen/Qwen3-8B --ema-decay 0.9
unshard reshard checkpoints/my-run/global_step_100 resharded --world-size 8
unshard delta my-run/global_step_100 my-run/global_step_110 changes
unshard delta --run checkpoints/my-run s3://bucket/my-run-archive
unshard apply my-model changes my-newer-model
unshard apply s3://bucket/my-run-archive my-model --step 110
unshard push checkpoints/my-run/global_step_100 my-name/my-model --private
unshard vllm checkpoints/my-run/global_step_100 --tensor-parallel-size 2
unshard sglang checkpoints/my-run/global_step_100 --tp-size 2
unshard env /mnt/checkpoints
unshard eval serve --root checkpoints --gpus 0,1
unshard eval doctor --config server.yaml
unshard eval drain
unshard eval submit checkpoints/my-run/global_step_100 --tasks gsm8k --wait
unshard eval submit outputs/checkpoint-1000 --tasks mmlu --limit 100
unshard eval status --run my-run --watch
unshard eval cancel 3f2a
unshard eval logs 3f2a --follow
unshard eval results --run my-run --best gsm8k/exact_match
unshard eval watch checkpoints/my-run --tasks gsm8k,ifeval
unshard eval export --to wandb --project my-project --run my-run
unshard eval compare my-run my-other-run --markdown
unshard eval retry 3f2a 9c41
unshard eval hide 3f2a --reason "wrong chat template"
unshard eval show 3f2a
unshard eval adopt checkpoints/my-run
"""
