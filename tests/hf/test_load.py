"""A model of transformers, loaded sharded, is the model; what is wrong with a folder is said at once."""

import copy
import re
from functools import partial

import pytest

pytest.importorskip("transformers", reason="needs the extra: pip install 'shardwright[hf]' (make test-hf)")

import torch
import transformers
from safetensors.torch import load_file, save_file

from shardwright import full_state_dict, fully_shard, hf, nf4
from shardwright.errors import CheckpointError, InputError
from shardwright.hf import library
from shardwright.lora import Lora
from tests.hf import models
from tests.ranks.pool import run_ranks
from tests.ranks.test_checkpoint_bounds import grown

GRAD = 2e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: models.write(kind, root / kind) for kind in models.KINDS}


def _parity(rank, world, folders, out):
    report = {}
    for kind, folder in folders.items():
        model, whole = hf.load(folder), models.whole(folder)
        batches = [models.tokens(r) for r in range(world)]
        with torch.no_grad():
            logits = [(m(batches[rank]).logits) for m in (model, whole)]
        for m in (model, whole):
            m.train()
            m.gradient_checkpointing_enable({"use_reentrant": False})
        model(batches[rank], labels=batches[rank]).loss.backward()
        for batch in batches:
            (whole(batch, labels=batch).loss / world).backward()
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        worst = max(
            (grads[name] - p.grad).abs().max().item() / p.grad.abs().max().clamp_min(1e-3).item()
            for name, p in whole.named_parameters()
        )
        model.zero_grad()
        hf.save_pretrained(model, out / kind, tokenizer_from=folder, max_file_nbytes=30_000)
        report[kind] = (torch.equal(*logits), worst, len(grads), model._unit().runtime.groups[0].name)
    return report


def test_seven_architectures_are_equal_to_the_whole_model_and_so_is_what_they_save(folders, tmp_path):
    (folders["llama"] / "tokenizer.json").write_text("{}")
    for world in (2, 3):
        out = tmp_path / str(world)
        for report in run_ranks(world, _parity, folders, out):
            for kind, (same_logits, worst, num_params, _) in report.items():
                assert same_logits, kind
                assert worst < GRAD, (kind, worst)
                assert num_params > 10, kind
        for kind in models.KINDS:  # transformers alone loads what we wrote, bit by bit
            before, after = models.whole(folders[kind]), models.whole(out / kind)
            assert before.config.architectures == after.config.architectures
            for name, value in before.state_dict().items():
                assert torch.equal(value, after.state_dict()[name]), (kind, name)
            assert (out / kind / "model.safetensors.index.json").is_file()
        assert (out / "llama" / "tokenizer.json").is_file()


def _read(rank, world, folder):
    model = library.build(folder, None)
    hf.shard(model)
    read = hf.read_weights(model, folder)
    poisoned = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    return read.nbytes, poisoned


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma"])
def test_the_ranks_together_read_the_files_once(folders, kind):
    files = sum(f.stat().st_size for f in folders[kind].glob("*.safetensors"))
    reports = run_ranks(3, _read, folders[kind])
    assert sum(nbytes for nbytes, _ in reports) <= 1.1 * files
    assert max(nbytes for nbytes, _ in reports) < 0.5 * files
    assert not any(meta for _, meta in reports)


def _poisoned(rank, world, folders):
    """Fresh memory holds NaN, so that what nobody writes is seen."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    found = {}
    for kind, folder in folders.items():
        assert torch.empty(1).isnan(), "the poison works"
        model = hf.load(folder)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        local = [(name, getattr(t, "_local_tensor", t)) for name, t in tensors]
        found[kind] = [name for name, t in local if t.is_floating_point() and t.isnan().any()]
        shared = dict(model.named_parameters(remove_duplicate=False))
        if kind == "gemma":
            assert shared["lm_head.weight"] is shared["model.embed_tokens.weight"], "tied weights stay tied"
    return found


def test_no_parameter_and_no_buffer_is_left_unwritten(folders):
    for found in run_ranks(2, _poisoned, folders):
        assert found == {kind: [] for kind in models.KINDS}


def _forgets_a_buffer(rank, world, folder):
    model = library.build(folder, None)
    model.register_buffer("table", torch.empty(4, device="meta"), persistent=False)
    hf.shard(model)
    with pytest.raises(CheckpointError, match=r"buffer \.?table is in no file") as caught:
        hf.read_weights(model, folder)
    return str(caught.value)


def test_a_buffer_that_nothing_fills_is_named(folders):
    run_ranks(2, _forgets_a_buffer, folders["llama"])


def _trains_without_embedding(rank, world, kind, shard):
    model, batch_of = models.without_embedding(kind)
    whole = copy.deepcopy(model)
    shard(model)
    groups = [group.name for group in model._unit().runtime.groups]
    model(**batch_of(rank)).loss.backward()
    for other in range(world):
        (whole(**batch_of(other)).loss / world).backward()
    grads = {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}
    for name, p in whole.named_parameters():
        assert (p.grad is None) == (grads[name] is None), name
        assert p.grad is None or (p.grad - grads[name]).abs().max() < GRAD, name
    return groups


@pytest.mark.parametrize("shard", [hf.shard, partial(fully_shard, groups="auto")], ids=["hf", "auto"])
@pytest.mark.parametrize("kind", ["clip", "wav2vec2"])
def test_a_model_without_an_input_embedding_is_grouped_by_its_blocks_and_trains_as_the_whole(kind, shard):
    lists = {"clip": ["text_model.encoder.layers", "vision_model.encoder.layers"]}
    for groups in run_ranks(2, _trains_without_embedding, kind, shard):
        for name in lists.get(kind, ["wav2vec2.encoder.layers"]):
            assert {f"{name}.0", f"{name}.1"} <= {*groups}


def _generate(rank, world, folder, lengths):
    model, whole = hf.load(folder), models.whole(folder).eval()
    prompt = models.tokens(rank, lengths[rank])
    kwargs = {"do_sample": False, "max_new_tokens": 4 + 4 * rank, "pad_token_id": 0}
    return torch.equal(model.generate(prompt, synced_gpus=True, **kwargs), whole.generate(prompt, **kwargs))


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_generate_writes_what_the_whole_model_writes(folders, kind):
    assert all(run_ranks(2, _generate, folders[kind], (3, 6)))


# ---- bad input


def _fails(rank, world, folder, message):
    with pytest.raises((CheckpointError, InputError)) as caught:
        hf.load(folder)
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("spoil", models.SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_folder_that_lacks_a_file_or_lies_is_refused_by_name(tmp_path, spoil):
    folder = models.write("llama", tmp_path / "m")
    run_ranks(2, _fails, folder, spoil(folder))


def test_a_missing_tensor_is_named(tmp_path):
    folder = models.write("mixtral", tmp_path / "m", "1GB")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    run_ranks(2, _fails, folder, r"model\.layers\.1\.mlp\.experts\.gate_up_proj")


def test_a_folder_without_a_model_says_how_to_get_one(tmp_path):
    with pytest.raises(InputError, match="hf download"):
        hf.load(tmp_path)


def _saves_over(rank, world, folder):
    model = hf.load(folder)
    with pytest.raises(CheckpointError, match="exists already"):
        hf.save_pretrained(model, folder)


def test_an_export_never_overwrites(folders):
    before = sorted(p.name for p in folders["llama"].parent.iterdir())
    run_ranks(2, _saves_over, folders["llama"])
    assert sorted(p.name for p in folders["llama"].parent.iterdir()) == before


def _exports_deep(rank, world, folder):
    sizes = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 4096}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**models.SIZES | sizes))
    fully_shard(model).to_empty(device="cpu")
    return grown(lambda: hf.save_pretrained(model, folder / "out"))


def test_an_export_holds_no_more_than_two_tensors(tmp_path):
    """Of 160 MiB: the largest has 16 MiB, and as much of two of them is on its way."""
    assert max(run_ranks(2, _exports_deep, tmp_path)) < 80 << 20


def _saves_by_its_own_method(rank, world, folder, out):
    model = hf.load(folder)
    with pytest.raises(InputError, match=r"call shardwright\.hf\.save_pretrained\(model, folder\)"):
        model.save_pretrained(out)
    whole = full_state_dict(model)
    if rank == 0:
        model.save_pretrained(out, state_dict=whole)


def test_a_sharded_models_own_save_pretrained_names_ours_and_writes_a_whole_state_dict(folders, tmp_path):
    run_ranks(2, _saves_by_its_own_method, folders["llama"], tmp_path / "out")
    before, after = models.whole(folders["llama"]).state_dict(), models.whole(tmp_path / "out").state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def _finetune(rank, world, folder, options):
    model = hf.load(folder, **options)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    whole = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.5, momentum=0.9)
    model.train()
    losses = []
    for _ in range(3):
        batch = models.tokens(0)  # the same on each rank: the mean over ranks is one process's gradient
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return names, whole, losses


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_quantised_base_with_adapters_is_read_alike_by_every_number_of_ranks(folders, kind):
    options = {"quantise": "nf4", "lora": Lora(("q_proj", "v_proj"), rank=4)}
    found = [run_ranks(world, _finetune, folders[kind], options)[0] for world in (1, 2, 3)]
    names, whole, losses = found[0]
    assert names
    assert all(".lora_" in name for name in names)
    codes = [name for name, value in whole.items() if value.dtype == torch.uint8]
    assert any(name.endswith("q_proj.weight") for name in codes)
    assert not any("lm_head" in name or "embed" in name for name in codes)
    plain = models.whole(folders[kind]).state_dict()
    for name in codes:
        expected, scales = nf4.quantize(plain[name])
        assert torch.equal(whole[name], expected), name
        assert torch.equal(whole[f"{name}_absmax"], scales), name
    for other_names, other, other_losses in found[1:]:
        assert other_names == names
        assert all(torch.equal(value, other[name]) for name, value in whole.items())
        assert other_losses == pytest.approx(losses, abs=1e-4)
    assert losses[-1] < losses[0]


def test_targets_that_match_nothing_are_refused_before_anything_is_read(folders):
    with pytest.raises(InputError, match="w_proj"):
        hf.load(folders["llama"], lora=Lora(("w_proj",)))
