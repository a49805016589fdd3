#!/usr/bin/env python3
"""Makes the golden files of the model tests, with Hugging Face transformers as the oracle.

  scripts/make_llama_golden.py            writes tests/golden/*.safetensors

The oracle is transformers' own LlamaForCausalLM, run in double precision: its code asks for FP32 at a
few places (norms, rotary angles, softmax, loss), and while it runs here, "FP32" means FP64. So logits and
losses are good to about 1e-13. That this changes nothing else is checked below: the unaltered FP32 model
must agree to 1e-5.

  llama_tiny.safetensors          grouped-query attention, plain rope, untied head
  llama_tiny_llama3.safetensors   llama3 rope scaling, tied embeddings
      tokens, targets             I32 [batch, sequence]; targets are independent of tokens
      logits                      F64 [batch, sequence, vocabulary]
      loss_sum, loss_mean         F64 scalars: sum and mean of the token losses
      weight/<name>               F32, names of the Hugging Face model
      gradient/<name>             F32 (rounded from FP64), of loss_sum
      __metadata__: config (config.json as one JSON text), versions
  rope_tables.safetensors
      <kind>/<case>/positions     I64 [P];  <kind>/<case>/table  F64 [P, head_size / 2, 2] = (cos, sin)
      __metadata__: <kind>/<case> = rope parameters as JSON, versions
  python_sample.safetensors       every element type, for the reader's test
"""
import contextlib
import json
import pathlib
import sys

import safetensors
import safetensors.torch
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
VERSIONS = {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "safetensors": safetensors.__version__,
    "made_by": "scripts/make_llama_golden.py",
}


@contextlib.contextmanager
def fp32_means_fp64():
    """Every explicit request for FP32 inside transformers' code yields FP64."""
    saved = torch.float, torch.float32, torch.Tensor.float
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float, torch.float32, torch.Tensor.float = saved


def save(name, tensors, metadata):
    """Writes a file that is the same bytes at every run: the library puts metadata in random order."""
    data = safetensors.torch.save({key: value.contiguous() for key, value in tensors.items()}, metadata)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    (GOLDEN / name).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def make_config(**changes):
    values = dict(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,  # not hidden_size / num_attention_heads: nothing may assume it
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    values.update(changes)
    return transformers.LlamaConfig(**values)


def run(model, tokens, targets):
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    flat = logits.reshape(-1, logits.shape[-1])
    loss_sum = torch.nn.functional.cross_entropy(flat, targets.reshape(-1), reduction="sum")
    loss_sum.backward()
    gradients = {name: parameter.grad.detach().clone() for name, parameter in model.named_parameters()}
    return logits.detach(), loss_sum.detach(), gradients


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def write_llama(name, config, seed, batch=2, sequence=13):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (batch, sequence), generator=generator)
    targets = torch.randint(config.vocab_size, (batch, sequence), generator=generator)
    # Every parameter is representable in FP32, and far from a symmetric start: norm weights differ
    # from one another and projections are large enough for attention to be uneven.
    reference = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    weights = {}
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(1.0 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
            weights[key] = parameter.detach().clone()

    logits32, loss32, gradients32 = run(reference, tokens, targets)
    with fp32_means_fp64():
        model = transformers.LlamaForCausalLM(config).to(torch.float64).eval()
        model.load_state_dict({key: value.double() for key, value in reference.state_dict().items()})
        # Angles come from a buffer that was made before the change of type.
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
        logits, loss_sum, gradients = run(model, tokens, targets)
    assert logits.dtype == torch.float64 and model.model.rotary_emb.inv_freq.dtype == torch.float64
    differences = [relative(logits32, logits), relative(loss32, loss_sum)]
    differences += [relative(gradients32[key], gradients[key]) for key in gradients]
    assert max(differences) < 1e-5, differences
    print(f"{name}: loss_sum {loss_sum.item():.12f}, FP32 model agrees to {max(differences):.1e}")

    tensors = {
        "tokens": tokens.to(torch.int32),
        "targets": targets.to(torch.int32),
        "logits": logits,
        "loss_sum": loss_sum,
        "loss_mean": loss_sum / tokens.numel(),
    }
    tensors |= {f"weight/{key}": value for key, value in weights.items()}
    tensors |= {f"gradient/{key}": value.to(torch.float32) for key, value in gradients.items()}
    metadata = VERSIONS | {"config": json.dumps(json.loads(config.to_json_string()), sort_keys=True)}
    save(f"{name}.safetensors", tensors, metadata)


def write_rope_tables():
    positions = torch.tensor([0, 1, 2, 7, 100, 1023, 4095, 8191, 131071])
    llama3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                  high_freq_factor=4.0, original_max_position_embeddings=8192)
    cases = {
        "plain/0": (64, dict(rope_type="default", rope_theta=10000.0)),
        "plain/1": (128, dict(rope_type="default", rope_theta=500000.0)),
        "plain/2": (12, dict(rope_type="default", rope_theta=1234.5)),
        "linear/0": (64, dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
        "linear/1": (128, dict(rope_type="linear", rope_theta=1000000.0, factor=2.5)),
        "linear/2": (12, dict(rope_type="linear", rope_theta=10000.0, factor=8.0)),
        "llama3/0": (128, llama3),
        "llama3/1": (64, llama3 | dict(factor=32.0)),
        "llama3/2": (80, llama3 | dict(rope_theta=10000.0, factor=4.0, low_freq_factor=2.0,
                                       high_freq_factor=6.0, original_max_position_embeddings=512)),
    }
    tensors, metadata = {}, dict(VERSIONS)
    for case, (head_size, parameters) in cases.items():
        config = make_config(head_dim=head_size, hidden_size=4 * head_size, rope_parameters=dict(parameters),
                             max_position_embeddings=131072)
        with fp32_means_fp64():
            rotary = LlamaRotaryEmbedding(config)
            cos, sin = rotary(torch.zeros(1, dtype=torch.float64), positions[None, :])
        half = head_size // 2
        assert torch.equal(cos[..., :half], cos[..., half:]) and rotary.attention_scaling == 1.0
        tensors[f"{case}/positions"] = positions.clone()
        tensors[f"{case}/table"] = torch.stack((cos[0, :, :half], sin[0, :, :half]), dim=-1).contiguous()
        metadata[case] = json.dumps(parameters, sort_keys=True)
    save("rope_tables.safetensors", tensors, metadata)


def write_python_sample():
    tensors = {
        "fp64": torch.tensor([1 / 3, -1e300], dtype=torch.float64),
        "fp32": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 8,
        "bf16": torch.tensor([[1.5], [-2.0], [2.0**100]], dtype=torch.bfloat16),
        "fp16": torch.tensor([65504.0, 2.0**-24], dtype=torch.float16),
        "int64": torch.tensor([-(2**40)], dtype=torch.int64),
        "int32": torch.tensor([0, 2147483647], dtype=torch.int32),
        "int16": torch.tensor([-32768, 1], dtype=torch.int16),
        "uint8": torch.tensor([[0, 1], [2, 255]], dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.float32),
        "empty": torch.zeros((0, 3), dtype=torch.float32),
    }
    # As the library writes it: this file is what the reader's test is about.
    safetensors.torch.save_file(
        tensors, GOLDEN / "python_sample.safetensors", {"writer": f"safetensors {safetensors.__version__}"}
    )


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{name} {version}" for name, version in VERSIONS.items() if name != "made_by"))
    write_llama("llama_tiny", make_config(), seed=1)
    write_llama(
        "llama_tiny_llama3",
        make_config(
            hidden_size=24,
            intermediate_size=40,
            num_attention_heads=6,
            head_dim=8,
            tie_word_embeddings=True,
            # Wavelengths on both sides of the ramp at this head size: all three branches are taken.
            rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                 high_freq_factor=4.0, original_max_position_embeddings=32),
        ),
        seed=2,
    )
    write_rope_tables()
    write_python_sample()
    for file in sorted(GOLDEN.glob("*.safetensors")):
        print(f"{file.name}: {file.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
