"""The config that tests start from, turned with `apply`, and facts of base models that nobody has to load."""

from harness.config import unflatten
from harness.sizes import BaseFacts, Linear

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


def llama_facts(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    key_value_heads: int | None = None,
    vocabulary: int = 32000,
    tied: bool = False,
) -> BaseFacts:
    """Return the facts of a Llama of this shape, without a model."""
    key_value = (key_value_heads or heads) * (hidden // heads)
    block = (
        ("self_attn.q_proj", "query", hidden, hidden),
        ("self_attn.k_proj", "key", hidden, key_value),
        ("self_attn.v_proj", "value", hidden, key_value),
        ("self_attn.o_proj", "attention_output", hidden, hidden),
        ("mlp.gate_proj", "mlp", hidden, intermediate),
        ("mlp.up_proj", "mlp", hidden, intermediate),
        ("mlp.down_proj", "mlp", intermediate, hidden),
    )
    linears = tuple(
        Linear(name=f"model.layers.{layer}.{name}", parts=(part,), inputs=inputs, outputs=outputs)
        for layer in range(layers)
        for name, part, inputs, outputs in block
    )
    embeddings = (1 if tied else 2) * vocabulary * hidden
    parameters = sum(one.inputs * one.outputs for one in linears) + embeddings + (2 * layers + 1) * hidden
    return BaseFacts(
        name="llama",
        revision=None,
        digest="0" * 64,
        architecture="LlamaForCausalLM",
        parameters=parameters,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=key_value_heads or heads,
        head_size=hidden // heads,
        intermediate=intermediate,
        context=4096,
        tied=tied,
        weight_bytes=2 * parameters,
        linears=linears,
    )
