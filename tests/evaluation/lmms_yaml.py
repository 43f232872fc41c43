"""The configuration of an evaluation as the documents of lmms-engine show it."""

DOCUMENTED = """
trainer_type: fsdp2_trainer
trainer_args:
  output_dir: ./output
  eval_strategy: steps
  eval_steps: 500
  save_steps: 500
  eval_config:
    server_url: http://192.168.8.249:8000
    poll_interval: 20.0
    checkpoint_key: model
    model: qwen_vl
    tasks: [mmmu_val, mme]
    model_args:
      num_gpus: 8
      batch_size: 256
"""
