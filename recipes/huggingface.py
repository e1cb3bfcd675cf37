"""Hugging Face Trainer: fine-tunes a causal language model, here a small one with random weights. A
second run resumes from the last checkpoint.

python recipes/huggingface.py
torchrun --nproc-per-node 2 recipes/huggingface.py
"""

import torch
from toy import batch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from lowbit.integrations.transformers import optimizer

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
# Or LlamaForCausalLM.from_pretrained(..., dtype="bfloat16").
model = LlamaForCausalLM(config).bfloat16()
rows = torch.cat([batch(step) for step in range(40)])
args = TrainingArguments(
    output_dir="out/huggingface",
    num_train_epochs=1,
    per_device_train_batch_size=16,
    learning_rate=2e-3,
    weight_decay=0.1,
    logging_steps=10,
    save_steps=20,
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model,
    args,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    optimizer_cls_and_kwargs=optimizer(args, "AdamW", state_format="8bit"),
)
try:
    last = get_last_checkpoint(args.output_dir)
except FileNotFoundError:
    last = None
trainer.train(resume_from_checkpoint=last)
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
if trainer.is_world_process_zero():
    print(f"step {trainer.state.global_step}, loss {float(losses[-1]):.3f}")
