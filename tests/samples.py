"""The config that tests start from; they turn what they need with `apply`."""

from harness.config import unflatten

BASE = unflatten(
    {
        "optim.learning_rate": 3e-4,
        "optim.weight_decay": 0.1,
        "optim.beta1": 0.9,
        "optim.beta2": 0.95,
        "optim.epsilon": 1e-8,
        "optim.max_grad_norm": 1.0,
        "schedule.shape": "cosine",
        "schedule.warmup_fraction": 0.1,
        "schedule.decay_fraction": 1.0,
        "schedule.final_rate_fraction": 0.1,
        "batch.per_device": 8,
        "batch.accumulation": 1,
        "batch.sequence_length": 128,
        "model.depth": 2,
        "model.width": 64,
        "model.heads": 2,
        "model.attention_dropout": 0.0,
        "sampling.fraction": 1.0,
        "sampling.order": "shuffled",
        "precision": "fp32",
    }
)
