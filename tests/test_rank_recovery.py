"""examples/rank_recovery.py: PF2LoRA and HETLoRA on matrices of known rank."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lightning_fed.federation.federation import Federation
from lightning_fed.methods.families.lora import CLIENT
from lightning_fed.tensors import count_floats


def load() -> ModuleType:
    """An example is no module of the package: it is imported by its path."""
    path = Path(__file__).parent.parent / "examples" / "rank_recovery.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for what annotations mean
    spec.loader.exec_module(module)
    return module


example = load()


def matrices(federation: Federation) -> list[Tensor]:
    """The clients' W after the last round's average."""
    return [federation.client_module(client.id).matrix() for client in federation.run.clients]


def joint_distance(learned: list[Tensor], truths: list[Tensor]) -> float:
    return example.joint([(one - other).norm().item() for one, other in zip(learned, truths, strict=True)])


def learned_ranks(recovery, when: str) -> list[int]:
    return [ranks[-1] for ranks in recovery.ranks(when)]


@pytest.fixture(scope="module")
def paper():
    """Twenty of the paper's 200 rounds, with plain SGD."""
    return example.play("PF2LoRA", "paper", rounds=20)


def test_the_rank_is_how_many_singular_values_make_up_nine_tenths_of_their_sum():
    """Of their squares it would be 3, 1 and 1."""
    for values, rank in (([1, 1, 1, *[0] * 7], 3), ([8.5, 1, 0.5], 2), ([9.5, 0.5], 1)):
        assert example.rank90(torch.diag(torch.tensor(values, dtype=torch.float32))) == rank


def test_the_settings_have_ranks_3_and_4_and_only_one_has_something_in_common():
    for setting, rank_of_difference in (("paper", 7), ("consistent", 3)):
        one, other = example.draw(setting, 0).truths
        ranks = [torch.linalg.matrix_rank(w.double(), rtol=1e-5).item() for w in (one, other, one - other)]
        assert ranks == [3, 4, rank_of_difference]


def test_a_client_has_the_first_700_rows_of_its_own_problem_for_training():
    problem = example.draw("paper", 0)
    data = problem.data()
    for client, info in enumerate(data.clients):
        assert (info.num_train, info.num_val, info.num_test) == (700, 0, 300)
        (inputs, targets), *none = data.client(client).test_dataloader()
        assert not none
        assert torch.equal(inputs["x"], problem.x[client, 700:])
        noise = targets - inputs["x"] @ problem.truths[client]
        assert noise.std().item() == pytest.approx((0.1, 0.2)[client], rel=0.05)


@pytest.mark.parametrize("method", example.METHODS)
def test_two_clients_train_240_parameters(method):
    """PF2LoRA: 10·4 + 4·10 common, counted with each client, and 10·2 + 2·10 private ones. HETLoRA: 20 times ranks 2 and 10."""
    federation, _ = example.play(method, "paper", rounds=1)
    modules = [federation.client_module(client.id) for client in federation.run.clients]
    assert sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad) == 240
    sent = 80 if method == "PF2LoRA" else 120
    assert federation.run.history[-1]["traffic/up_parameters"] == (2 * sent if method == "PF2LoRA" else 240)
    assert count_floats(federation.run.server.state) == (80 if method == "PF2LoRA" else 240)


def test_private_factors_start_without_a_column_or_row_in_common_with_the_shared_ones():
    problem = example.draw("paper", 0)
    template = example.new_method("PF2LoRA", problem)
    modules = [template.for_client(client) for client in problem.data().clients]
    for module in modules:
        (a, b), (c, d) = module.factors(), module.factors(CLIENT)
        assert (a.T @ c).abs().max() < 1e-6 * a.norm() * c.norm()
        assert (d @ b.T).abs().max() < 1e-6 * d.norm() * b.norm()
        assert torch.linalg.matrix_rank(module.matrix()) == 6
        assert torch.equal(a, modules[0].factors()[0])
    assert not torch.equal(modules[0].factors(CLIENT)[0], modules[1].factors(CLIENT)[0])


@pytest.mark.parametrize("method", example.METHODS)
def test_what_is_measured_is_what_the_network_computes(method):
    """Both adapters of PF2LoRA act, and W = AB is applied from the right."""
    problem = example.draw("paper", 0)
    module = example.new_method(method, problem).for_client(problem.data().clients[0])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_() if parameter.requires_grad else None
        output = module({"x": torch.eye(10)})
    torch.testing.assert_close(output, module.matrix())


def test_no_state_with_a_shared_adapter_comes_nearer_than_the_lower_bound():
    for seed in range(20):
        truths = example.draw("paper", seed).truths
        bound = example.lower_bound(*truths, client_r=2)
        assert bound > 1
        scale = 10.0 ** -(seed % 4)
        common = torch.randn(10, 4) @ torch.randn(4, 10)
        for shared in (common, truths[0], (truths[0] + truths[1]) / 2):
            learned = [shared + scale * torch.randn(10, 2) @ torch.randn(2, 10) for _ in truths]
            assert joint_distance(learned, truths) >= bound


def test_the_lower_bound_can_be_met_if_the_shared_matrix_may_have_any_rank():
    """Half of what lies behind four singular values of the difference is left to each client."""
    one, other = (truth.double() for truth in example.draw("paper", 0).truths)
    u, s, v = torch.linalg.svd(one - other)
    halves = [u[:, part] @ torch.diag(s[part]) @ v[part] for part in (slice(2), slice(2, 4))]
    shared = (one + other - halves[0] + halves[1]) / 2
    learned = [shared + halves[0], shared - halves[1]]
    assert joint_distance(learned, [one, other]) == pytest.approx(example.lower_bound(one, other, client_r=2))


@pytest.mark.slow
def test_trained_states_obey_the_lower_bound(paper):
    federation, recovery = paper
    truths = example.draw("paper", 0).truths
    bound = example.lower_bound(*truths, client_r=2)
    assert recovery.bounds == {"before": 0.0, "after": bound}
    assert min(recovery.distances("after")) >= bound
    assert joint_distance(matrices(federation), truths) == pytest.approx(recovery.distances("after")[-1], rel=1e-5)


def test_in_the_papers_setting_what_is_learned_is_lost_in_the_average(paper):
    _, recovery = paper
    assert recovery.distances("before")[-1] < 0.7 * recovery.distances("after")[-1]


@pytest.mark.slow
def test_with_something_in_common_the_truths_are_found():
    _, recovery = example.play("PF2LoRA", "consistent", rounds=80)
    assert recovery.distances("after")[-1] < 0.6
    assert learned_ranks(recovery, "after") == recovery.truths == [3, 4]


def test_a_run_leaves_scalars_and_a_figure(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    federation, recovery = example.play("HETLoRA", "paper", rounds=2, run_dir=tmp_path)
    events = EventAccumulator(str(federation.run.folder))
    events.Reload()
    assert "recovery/ranks" in events.Tags()["images"]
    assert [event.value for event in events.Scalars("recovery/distance_after")] == pytest.approx(recovery.distances("after"))
    assert events.Scalars("recovery/rank_before_client_2")[-1].value == recovery.ranks("before")[1][-1]
    assert "HETLoRA" in example.report("HETLoRA", recovery)
