"""The Kullback-Leibler divergences as pure functions, against torch.distributions and a dense full vocabulary."""

import pytest
import torch

from dtrain.losses import forward_kl, mixed_kl, reverse_kl


def distributions(seed=0, shape=(3, 4, 9)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2)]


def test_both_directions_equal_torch_distributions():
    student, teacher = distributions()
    p, q = (torch.distributions.Categorical(logits=logp) for logp in (teacher, student))
    torch.testing.assert_close(forward_kl(student, teacher), torch.distributions.kl_divergence(p, q))
    torch.testing.assert_close(reverse_kl(student, teacher), torch.distributions.kl_divergence(q, p))
    mixed = 0.3 * forward_kl(student, teacher) + 0.7 * reverse_kl(student, teacher)
    torch.testing.assert_close(mixed_kl(student, teacher, 0.3), mixed)


def test_a_zero_probability_counts_as_zero_with_finite_gradients():
    student, teacher = (torch.tensor(row).log().requires_grad_() for row in ([0.5, 0.5, 0.0], [0.2, 0.8, 0.0]))
    for divergence in (forward_kl, reverse_kl):
        value = divergence(student, teacher)
        assert value.isfinite()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(value, (student, teacher)))


def test_entropy_correction_is_the_reverse_kl_to_a_teacher_that_is_tiny_elsewhere():
    student, _ = distributions()
    kept = 4
    teacher_top = torch.randn(3, 4, kept, dtype=torch.float64).log_softmax(-1)
    outside = torch.full((3, 4, 9 - kept), -100.0, dtype=torch.float64)
    teacher = torch.cat([teacher_top, outside], -1)
    whole = (student.exp() * (student - teacher)).sum(-1)
    neg_entropy = (student.exp() * student).sum(-1)
    torch.testing.assert_close(reverse_kl(student[..., :kept], teacher_top, neg_entropy), whole)


def test_a_weight_outside_the_unit_interval_is_refused():
    with pytest.raises(ValueError, match="weight=1.5"):
        mixed_kl(*distributions(), 1.5)
