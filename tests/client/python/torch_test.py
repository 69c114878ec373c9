"""awqd.torch: a model's linears replaced by a server's, a ring's and libawqd's, which give the same bits."""
import importlib.util
import os
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

if importlib.util.find_spec("awqd_torch") is None:
    os.environ.setdefault("LIBAWQD", str(pathlib.Path(os.environ["AWQD_BUILD"]) / "kernels/library/libawqd.so"))

from safetensors.torch import save_file  # noqa: E402
from torch import library  # noqa: E402

import awqd  # noqa: E402
import awqd.torch  # noqa: E402
from conftest import ROOT  # noqa: E402
from server import Server, awqctl  # noqa: E402

HIDDEN, MIDDLE = 128, 384


class Mlp(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(HIDDEN, MIDDLE, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(MIDDLE, HIDDEN, bias=False)
        self.act_fn = activation

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OtherMlp(Mlp):
    """Has the children of a gated MLP, and computes something else."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Embedding(50, HIDDEN)
        self.layers = torch.nn.ModuleList([Mlp(torch.nn.SiLU()), OtherMlp(torch.nn.GELU())])
        self.head = torch.nn.Linear(HIDDEN, 50, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


MOE = ROOT / "tests/data/experts/goldens"
TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's layers, quantised; its embedding and its head are not."""
    path = tmp_path_factory.mktemp("torch")
    dense = path / "dense"
    dense.mkdir()
    state = {f"model.{name}": value.half() for name, value in Model().layers.state_dict(prefix="layers.").items()}
    save_file(state, dense / "model.safetensors")
    (dense / "config.json").write_text('{"model_type": "test"}')
    awqctl("quantize", dense, "-o", path / "q4", "--group_size", 64)
    return path / "q4"


@pytest.fixture(scope="module")
def running(folder, tmp_path_factory):
    sockets = tmp_path_factory.mktemp("sockets")
    with Server(f"--ring_path={sockets / 'ring'}", f"--lend={sockets / 'lend'}", f"--model=q4={folder}") as server:
        server.lend_path = sockets / "lend"
        yield server


@pytest.fixture(scope="module")
def local(folder):
    return awqd.torch.Local(folder)


def replaced(source, **options):
    model = Model().eval()
    return model, awqd.torch.replace(model, source, **options)


def test_what_is_replaced(local):
    model, report = replaced(local)
    assert report.mlps == ["layers.0"]
    assert sorted(report.linears) == [f"layers.1.{name}_proj" for name in ("down", "gate", "up")]
    assert report.not_in_model == report.experts == []
    assert isinstance(model.layers[0], awqd.torch.QuantMlp)
    assert isinstance(model.layers[1].up_proj, awqd.torch.QuantLinear)
    assert type(model.head) is torch.nn.Linear
    assert not [name for name, _ in model.named_parameters() if name.startswith("layers")], "dense weights are kept"
    assert "model.layers.1.up_proj" in repr(model)
    _, apart = replaced(local, fuse=False)
    assert apart.mlps == [] and len(apart.linears) == 6


def test_the_model_is_the_one_of_decoded_weights(local, running):
    model, _ = replaced(local)
    dense = Model().eval()
    with awqd.Client(running.address) as client:
        for name, parameter in dense.layers.named_parameters(prefix="layers"):
            parameter.data = client.dequantize("q4", f"model.{name.removesuffix('.weight')}", dtype=torch.float32).T
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), dense(TOKENS), rtol=1e-3, atol=1e-3)
        assert not torch.allclose(dense(TOKENS), Model()(TOKENS), atol=1e-3), "quantisation changes it"


def test_ways_give_the_same_bits(local, running):
    with torch.no_grad():
        expected = replaced(local)[0](TOKENS)
        with awqd.Client(running.address) as client:
            assert torch.equal(replaced(client, name="q4")[0](TOKENS), expected)
        model, _ = replaced(running.address, name="q4", ring=True)
        assert torch.equal(model(TOKENS), expected)
        assert torch.equal(replaced(f"lease:{running.lend_path}", name="q4")[0](TOKENS), expected)
        assert torch.equal(replaced(awqd.torch.Leased(running.lend_path, "q4", check=True))[0](TOKENS), expected)
        with pytest.raises(awqd.NotFound, match='model "q5": no such model'):
            replaced(f"lease:{running.lend_path}", name="q5")
        assert torch.equal(model.to(torch.bfloat16)(TOKENS), replaced(local)[0].to(torch.bfloat16)(TOKENS))


def test_compile_takes_the_operators(local):
    model, _ = replaced(local)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(TOKENS), model(TOKENS))
    linear = model.layers[1].up_proj
    library.opcheck(torch.ops.awqd.matmul, (torch.randn(2, 3, HIDDEN), linear._bound.number),
                    test_utils=("test_schema", "test_faketensor"))


def test_there_is_no_gradient(local):
    model, _ = replaced(local)
    loss = model(TOKENS).sum()
    with pytest.raises((RuntimeError, NotImplementedError), match="awqd"):
        loss.backward()


def test_experts(client):
    x, ids, weights = (torch.from_numpy(np.load(MOE / f"{name}.npy")) for name in ("x", "ids", "router"))
    path = "moe.experts.*"
    expected = client.mlp("moe", path, x, expert_ids=ids, router_weights=weights)
    moe = awqd.torch.QuantMoe(awqd.torch.Remote(client, "moe"), path, expected.shape[-1])
    assert torch.equal(moe(x, ids, weights), expected)
    local = awqd.torch.Local(MOE.parent / "moe")
    here = awqd.torch.QuantMoe(local, path, expected.shape[-1])
    assert torch.equal(here(x, ids.long(), weights), expected)
    compiled = torch.compile(here, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, ids, weights), expected)
    with pytest.raises(awqd.InvalidArgument, match=r"args->expert_ids\[0\]: got 5, expected 0 to 4"):
        here(x, torch.full_like(ids, 5), weights)
    with pytest.raises(awqd.InvalidArgument, match="expert_ids: got"):
        here(x, ids[:, :1], weights)
    for other in ("gap.experts.*", "nowhere.*", "moe.experts.0"):
        with pytest.raises(awqd.NotFound, match="expected all from 0"):
            awqd.torch.QuantMoe(local, other, 64)(x, ids, weights)


def test_masked_experts():
    local = awqd.torch.Local(MOE.parent / "moe")
    path = "moe.experts.{}.up_proj"
    k, n = local.linears()[path.format(0)]
    x = torch.randn(5, 4, k, generator=torch.Generator().manual_seed(3)).half()
    counts = torch.tensor([2, 0, 4, 1, 3], dtype=torch.int32)
    for quantization in ("none", "fp8_per_token"):
        out = torch.full((5, 4, n), 7, dtype=x.dtype)
        expected = out.clone()
        for expert, count in enumerate(counts.tolist()):
            if count:
                expected[expert, :count] = local.matmul(path.format(expert), x[expert, :count], quantization)
        assert local.masked(path.format("*"), x, counts, out, quantization, expected_rows=2) is out
        assert torch.equal(out, expected)
    with pytest.raises(awqd.InvalidArgument, match=r"args->counts\[1\]: got 5, expected 0 to 4"):
        local.masked(path.format("*"), x, torch.full_like(counts, 5) - torch.tensor([5, 0, 0, 0, 0], dtype=torch.int32))
    for wrong in ({"x": x[:4]}, {"counts": counts.long()}, {"counts": counts[:4]}, {"out": out[:, :3]}, {"out": out.float()}):
        with pytest.raises(awqd.InvalidArgument, match=f"{next(iter(wrong))}: got .*, expected"):
            local.masked(path.format("*"), **{"x": x, "counts": counts, "out": out} | wrong)


class Experts(torch.nn.Module):
    """All experts of tests/data/experts in two parameters. Swapped: the halves of gate_up_proj change places."""

    def __init__(self, swapped=False, middle=96):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(5, 2 * middle, 64))
        self.down_proj = torch.nn.Parameter(torch.empty(5, 72, middle))
        self.act_fn = torch.nn.SiLU()
        self.swapped = swapped

    def forward(self, x, ids, weights):
        rows = torch.einsum("tjok,tk->tjo", self.gate_up_proj[ids], x)
        gate, up = reversed(rows.chunk(2, -1)) if self.swapped else rows.chunk(2, -1)
        return torch.einsum("tjom,tjm,tj->to", self.down_proj[ids], self.act_fn(gate) * up, weights)


def mixture(**options):
    model = torch.nn.Module()
    model.moe = torch.nn.Module()
    model.moe.experts = Experts(**options)
    return model


def test_a_module_of_experts_is_replaced(client):
    x, ids, weights = (torch.from_numpy(np.load(MOE / f"{name}.npy")) for name in ("x", "ids", "router"))
    expected = client.mlp("moe", "moe.experts.*", x, expert_ids=ids, router_weights=weights)
    for source, options in ((MOE.parent / "moe", {}), (client, {"name": "moe"})):
        model = mixture()
        report = awqd.torch.replace(model, source, **options)
        assert report.experts == ["moe.experts"] and report.linears == []
        assert not [linear for linear in report.not_in_model if linear.startswith("moe.experts.")]
        assert isinstance(model.moe.experts, awqd.torch.QuantMoe) and "moe.experts.*.up_proj" in repr(model)
        assert torch.equal(model.moe.experts(x, ids, weights), expected)
    with pytest.raises(awqd.InvalidArgument, match=r"moe.experts.gate_up_proj: got \[5, 192, 64\], expected \[5, 96, 64\]"):
        awqd.torch.replace(mixture(middle=48), MOE.parent / "moe")
    with pytest.raises(awqd.InvalidArgument, match="expected paths of the model's own"):
        awqd.torch.replace(mixture(swapped=True), MOE.parent / "moe")  # it computes something else


@pytest.mark.parametrize("kind", ("Mixtral", "Qwen3Moe"))
def test_mixtures_of_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(7)
    more = {"Mixtral": {"num_local_experts": 4}, "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 192, "head_dim": 32}}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_experts_per_tok=2, bos_token_id=1, eos_token_id=2, **more[kind])
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    dense = model_class(config).eval()
    dense.save_pretrained(tmp_path / "dense")
    awqctl("quantize", tmp_path / "dense", "-o", tmp_path / "q4", "--group_size", 64)
    tokens = torch.tensor([[1, 17, 33, 9]])
    with Server(f"--model=q4={tmp_path / 'q4'}") as server, awqd.Client(server.address) as client, torch.no_grad():
        answers = []
        for source, options in ((tmp_path / "q4", {}), (client, {"name": "q4"})):
            model = model_class.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
            report = awqd.torch.replace(model, source, **options)
            assert report.experts == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
            assert len(report.linears) == 8 and report.not_in_model == []
            answers.append(model(tokens).logits)
            # Without the dense checkpoint.
            model = awqd.torch.from_pretrained(tmp_path / "q4", source, dtype=torch.float32, **options).eval()
            assert torch.equal(model(tokens).logits, answers[0])
        assert torch.equal(*answers)
        assert not torch.allclose(answers[0], dense(tokens).logits, atol=1e-3), "quantisation changes it"
        # The dense model with decoded weights.
        weights = {weight.path: client.dequantize("q4", weight.path, dtype=torch.float32).T
                   for weight in client.get_model("q4").weights}
        for path, weight in weights.items():
            if ".experts." not in path:
                dense.get_submodule(path).weight.data = weight
        for number, layer in enumerate(dense.model.layers):
            place = f"model.layers.{number}." + ("block_sparse_moe.experts" if kind == "Mixtral" else "mlp.experts")
            gate, up, down = ("w1", "w3", "w2") if kind == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
            for expert in range(4):
                layer.mlp.experts.gate_up_proj.data[expert] = torch.cat(
                    [weights[f"{place}.{expert}.{name}"] for name in (gate, up)])
                layer.mlp.experts.down_proj.data[expert] = weights[f"{place}.{expert}.{down}"]
        torch.testing.assert_close(answers[0], dense(tokens).logits, rtol=1e-3, atol=1e-3)


def test_a_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    dense = transformers.LlamaForCausalLM(config).half().eval()
    dense.save_pretrained(tmp_path / "dense")
    awqctl("quantize", tmp_path / "dense", "-o", tmp_path / "llama", "--group_size", 64)
    tokens = torch.tensor([[1, 17, 33, 9]])
    with Server(f"--model=llama={tmp_path / 'llama'}") as server:
        answers = []
        for source, options in ((tmp_path / "llama", {}), (server.address, {"name": "llama"})):
            model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float16).eval()
            report = awqd.torch.replace(model, source, **options)
            assert report.mlps == ["model.layers.0.mlp", "model.layers.1.mlp"] and len(report.linears) == 8
            with torch.no_grad():
                answers.append((model(tokens).logits, model.generate(tokens, max_new_tokens=12, do_sample=False)))
        # Without the dense checkpoint; tensors that are not quantised come from the folder.
        for source, options in ((None, {}), (server.address, {"name": "llama"})):
            model = awqd.torch.from_pretrained(tmp_path / "llama", source, dtype=torch.float16, **options).eval()
            with torch.no_grad():
                assert torch.equal(model(tokens).logits, answers[0][0])
                assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), answers[0][1])
            with pytest.raises(Exception, match="awqd"):
                model.save_pretrained(tmp_path / "again")
        # By transformers' own call, whose class for this folder is GPTQConfig.
        from awqd.transformers import AwqdConfig
        for config in (AwqdConfig(), AwqdConfig(server.address, name="llama")):
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float16,
                                                                      quantization_config=config)
            assert isinstance(model.model.layers[0].mlp, awqd.torch.QuantMlp)
            with torch.no_grad():
                assert torch.equal(model.eval()(tokens).logits, answers[0][0])
        with pytest.raises(ValueError, match="GPTQConfig"):  # another class is refused as before
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", quantization_config=transformers.AwqConfig())
    assert torch.equal(answers[0][0], answers[1][0]) and torch.equal(answers[0][1], answers[1][1])
    with torch.no_grad():
        assert 0 < (answers[0][0] - dense(tokens).logits).abs().max() < 0.2


def test_a_part_of_a_linear_is_refused(folder, tmp_path):
    """One that the server has divided among devices, of which a lease has one."""
    refusal = r"model.layers.0.down_proj: got \[(128|256), 128\] of the server's --shard, expected all of \[384, 128\]"
    with Server("--shard=columns", f"--lend={tmp_path / 'lend'}", f"--model=q4={folder}", device="cpu,cpu"):
        with pytest.raises(awqd.FailedPrecondition, match=refusal):
            awqd.torch.Leased(tmp_path / "lend", "q4")


def test_refusals(local, folder):
    with pytest.raises(awqd.InvalidArgument, match="expected paths of the model's own"):
        awqd.torch.replace(torch.nn.Sequential(torch.nn.Linear(4, 4)), local)
    model = Model()
    model.layers[0].up_proj = torch.nn.Linear(HIDDEN, 77)
    with pytest.raises(awqd.InvalidArgument, match=r"layers.0.up_proj: got \[128, 384\], expected \[128, 77\]"):
        awqd.torch.replace(model, local)
    assert isinstance(model.layers[0].gate_proj, torch.nn.Linear), "nothing was replaced"
    for activation in ("tanh", "swiglu_oai"):  # the second has constants, which the module does not take
        with pytest.raises(awqd.InvalidArgument, match=f"activation: got '{activation}'"):
            awqd.torch.QuantMlp(local, "a", "b", "c", activation)
    with pytest.raises(awqd.NotFound, match="nowhere"):
        awqd.torch.Local(str(folder) + "-nowhere")
    with pytest.raises(awqd.InvalidArgument, match="device: got \"tpu\""):
        awqd._library.Device("tpu")
