#!/usr/bin/env python3
"""Makes the checkpoint `blocks` and the results of gated MLPs of transformers' own modules with its weights, in float64:
activation functions, biases, routers, shared experts. Needs numpy, torch and transformers (2.4.6, 2.13.0 and 5.24.0 made
what is checked in).

SiTU is in no module of transformers; its result is that of the formula in Megatron Core's documentation
(core.activations.situ), for both halves.

Usage: make_blocks.py [--out DIR]
"""
import argparse
import importlib
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import write_json, write_safetensors
from make_experts import GROUP, linear

EXPERTS, K, I, TOKENS = 8, 64, 96, 11
PROJECTIONS = [("gate_proj", K, I), ("up_proj", K, I), ("down_proj", I, K)]


def module_of(model, name):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def made(model, name, config, weights):
    """A module in float64. `weights`: by the name of the parameter or buffer, arrays; every one is set."""
    config._experts_implementation = "eager"
    module = module_of(model, name)(config).double()
    state = {key: torch.from_numpy(np.array(value, np.float64)) for key, value in weights.items()}
    module.load_state_dict(state, strict=True)
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent)
    folder = parser.parse_args().out
    for name in ("blocks", "blocks_goldens"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    random = np.random.default_rng(47)
    tensors = {}

    def add(path, k, n):
        parts, weight = linear(random, k, n)
        tensors.update({f"{path}.{suffix}": tensor for suffix, tensor in parts.items()})
        return weight.T  # [N, K], as torch has it

    experts = {name: np.stack([add(f"mlp.experts.{e}.{name}", k, n) for e in range(EXPERTS)])
               for name, k, n in PROJECTIONS}
    shared = {name: add(f"mlp.shared_experts.{name}", k, n) for name, k, n in PROJECTIONS}
    write_json(folder / "blocks" / "config.json", {"model_type": "golden", "quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}})
    write_safetensors(folder / "blocks" / "model.safetensors", tensors)

    x = random.standard_normal((TOKENS, K)).astype("<f2")
    router = random.standard_normal((EXPERTS, K)).astype("<f4") / 4
    logits = (x.astype(np.float64) @ router.T.astype(np.float64)).astype("<f4")
    correction = random.uniform(-0.2, 0.2, EXPERTS).astype("<f4")
    biases = {name: random.standard_normal((EXPERTS, n)).astype("<f2") for name, _, n in PROJECTIONS}
    shared_gate = random.standard_normal(K).astype("<f2")
    wide = torch.from_numpy(x.astype(np.float64))

    gate_up = np.concatenate([experts["gate_proj"], experts["up_proj"]], 1)
    down = experts["down_proj"]
    routed = {"experts.gate_up_proj": gate_up, "experts.down_proj": down, "gate.weight": router}
    mlp_of_shared = {f"shared_experts.{name}.weight": weight for name, weight in shared.items()}
    corrected = {"gate.e_score_correction_bias": correction}
    cases = {}

    def case(name, result, **request):
        result = result[0] if isinstance(result, tuple) else result
        np.save(folder / "blocks_goldens" / f"{name}.npy", result.detach().numpy().reshape(TOKENS, K))
        cases[name] = request

    with torch.no_grad():
        interleaved = np.stack([experts["gate_proj"], experts["up_proj"]], 2).reshape(EXPERTS, 2 * I, K)
        both = np.stack([biases["gate_proj"], biases["up_proj"]], 2).reshape(EXPERTS, 2 * I)
        config = transformers.GptOssConfig(hidden_size=K, intermediate_size=I, num_local_experts=EXPERTS,
                                           num_experts_per_tok=3, swiglu_limit=2.0)
        block = made("gpt_oss", "GptOssMLP", config, {
            "router.weight": router, "router.bias": np.zeros(EXPERTS),
            "experts.gate_up_proj": interleaved.transpose(0, 2, 1), "experts.gate_up_proj_bias": both,
            "experts.down_proj": down.transpose(0, 2, 1), "experts.down_proj_bias": biases["down_proj"]})
        case("gpt_oss", block(wide[None]), activation_function="SWIGLU_OAI", activation={"limit": 2.0}, biases=True,
             router={"scoring": "SOFTMAX", "top_k": 3, "norm_topk_prob": True})

        text = importlib.import_module("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
        config = text.MiniMaxM3VLTextConfig(
            hidden_size=K, intermediate_size=I, shared_intermediate_size=I, num_local_experts=EXPERTS,
            num_experts_per_tok=2, swiglu_alpha=1.5, swiglu_limit=1.5, routed_scaling_factor=2.0)
        block = made("minimax_m3_vl", "MiniMaxM3VLSparseMoeBlock", config, {
            **routed, **corrected, "shared_experts.down_proj.weight": shared["down_proj"],
            "shared_experts.gate_up_proj.weight": np.concatenate([shared["gate_proj"], shared["up_proj"]])})
        case("minimax_m3", block(wide[None]), activation_function="SWIGLU_OAI", activation={"limit": 1.5, "alpha": 1.5},
             router={"scoring": "SIGMOID", "top_k": 2, "correction_bias": True, "norm_topk_prob": True,
                     "routed_scaling_factor": 2.0}, shared_expert=True)

        sizes = {"hidden_size": K, "moe_intermediate_size": I, "n_shared_experts": 1}
        config = transformers.DeepseekV3Config(
            **sizes, n_routed_experts=EXPERTS, num_experts_per_tok=3, n_group=4, topk_group=2, norm_topk_prob=True,
            routed_scaling_factor=2.5)
        block = made("deepseek_v3", "DeepseekV3MoE", config, {**routed, **corrected, **mlp_of_shared})
        case("deepseek_v3", block(wide[None]), activation_function="SILU",
             router={"scoring": "SIGMOID", "top_k": 3, "correction_bias": True, "n_group": 4, "topk_group": 2,
                     "norm_topk_prob": True, "routed_scaling_factor": 2.5}, shared_expert=True)

        config = transformers.DeepseekV2Config(
            **sizes, n_routed_experts=EXPERTS, num_experts_per_tok=3, n_group=4, topk_group=2,
            topk_method="group_limited_greedy", routed_scaling_factor=16.0)
        block = made("deepseek_v2", "DeepseekV2Moe", config, {**routed, **mlp_of_shared})
        case("deepseek_v2", block(wide[None]), activation_function="SILU",
             router={"scoring": "SOFTMAX", "top_k": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
             shared_expert=True)

        config = transformers.DeepseekV4Config(
            hidden_size=K, moe_intermediate_size=I, n_routed_experts=EXPERTS, num_experts_per_tok=3, swiglu_limit=1.0,
            routed_scaling_factor=1.5, scoring_func="sqrtsoftplus")
        gate = made("deepseek_v4", "DeepseekV4TopKRouter", config,
                    {"weight": router, "e_score_correction_bias": correction})
        block = made("deepseek_v4", "DeepseekV4Experts", config, {"gate_up_proj": gate_up, "down_proj": down})
        _, weights, ids = gate(wide)
        case("deepseek_v4", block(wide, ids, weights), activation_function="SILU", activation={"limit": 1.0},
             router={"scoring": "SQRTSOFTPLUS", "top_k": 3, "correction_bias": True, "norm_topk_prob": True,
                     "routed_scaling_factor": 1.5})

        config = transformers.Qwen2MoeConfig(
            hidden_size=K, moe_intermediate_size=I, shared_expert_intermediate_size=I, num_experts=EXPERTS,
            num_experts_per_tok=2, norm_topk_prob=False)
        block = made("qwen2_moe", "Qwen2MoeSparseMoeBlock", config, {
            **routed, **{key.replace("experts", "expert"): value for key, value in mlp_of_shared.items()},
            "shared_expert_gate.weight": shared_gate[None]})
        case("qwen2_moe", block(wide[None]), activation_function="SILU", router={"scoring": "SOFTMAX", "top_k": 2},
             shared_expert=True, shared_expert_gate=True)

        config = transformers.GemmaConfig(hidden_size=K, intermediate_size=I, hidden_act="gelu_pytorch_tanh")
        block = made("gemma", "GemmaMLP", config, {f"{name}.weight": weight for name, weight in shared.items()})
        case("gemma", block(wide), activation_function="GELU_TANH", dense=True)

        gate, up = (wide @ torch.from_numpy(shared[name].T.copy()) for name in ("gate_proj", "up_proj"))
        situ = 1.5 * torch.tanh(gate / 1.5) * torch.sigmoid(gate) * 2.0 * torch.tanh(up / 2.0)
        case("situ", situ @ torch.from_numpy(shared["down_proj"].T.copy()), activation_function="SITU",
             activation={"beta": 1.5, "linear_beta": 2.0}, dense=True)

    for name, array in [("x", x), ("logits", logits), ("correction_bias", correction), ("shared_expert_gate", shared_gate),
                        *((f"{name.removesuffix('_proj')}_bias", bias) for name, bias in biases.items())]:
        np.save(folder / "blocks_goldens" / f"{name}.npy", array)
    write_json(folder / "blocks_goldens" / "cases.json", {
        "about": "x FP16 [tokens, K], logits FP32 [tokens, experts]; the results of transformers' modules in float64, and "
                 "what a request for GatedMlp says",
        "source": {"numpy": np.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "cases": cases})


if __name__ == "__main__":
    main()
