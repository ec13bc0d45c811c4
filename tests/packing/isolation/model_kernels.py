"""Stand-ins for FLA, causal-conv1d, mamba-ssm and flash-attention: their arguments, in plain torch.

transformers looks for the first three when it imports the module of a model, and hands a kernel the
arguments that its signature names. So the signatures here are those that the packages publish. What
a kernel does about `seq_idx` or `cu_seqlens` is what theirs do: a token sees no token of another
sequence. Most are quadratic in the tokens.
"""

# ruff: noqa: PLR0917 - the signatures are those of others

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    assert initial_states is final_states_out is None
    assert not return_final_states
    length, width = x.shape[-1], weight.shape[-1]
    sequence = _sequences(seq_idx, x.shape[0], length)
    out = torch.zeros_like(x)
    for back in range(width):
        seen = F.pad(sequence, (back, 0), value=-1)[:, :length] == sequence
        out += weight[:, width - 1 - back, None] * F.pad(x, (back, 0))[..., :length] * seen[:, None]
    if bias is not None:
        out = out + bias[:, None]
    return F.silu(out) if activation in ("silu", "swish") else out


def _by_sequence(kernel):
    """Call a kernel for each sequence alone, where ``cu_seqlens`` gives boundaries."""

    @wraps(kernel)  # with its signature, which transformers reads
    def called(q, k, v, g, beta, *, cu_seqlens=None, **options):
        if cu_seqlens is None:
            return kernel(q, k, v, g, beta, **options)
        assert len(q) == 1
        assert int(cu_seqlens[-1]) == q.shape[1]
        lengths = cu_seqlens.diff().tolist()
        rows = zip(*(x.split(lengths, 1) for x in (q, k, v, g, beta)), strict=True)
        return torch.cat([kernel(*row, **options)[0] for row in rows if row[0].numel()], 1), None

    return called


@_by_sequence
def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    assert initial_state is None
    assert not output_final_state
    decay = g.double().cumsum(1).transpose(1, 2)
    decay = decay[..., None] - decay[:, :, None]

    def products(left, right, seen):
        return left @ right.mT * decay.masked_fill(~seen, -torch.inf).exp()

    return _delta_rule(q, k, v, beta, scale, use_qk_l2norm_in_kernel, products)


@_by_sequence
def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    assert initial_state is None
    assert not output_final_state
    decay = g.double().cumsum(1).transpose(1, 2)
    decay = decay[:, :, :, None] - decay[:, :, None]

    def products(left, right, seen):
        decays = decay.masked_fill(~seen[..., None], -torch.inf).exp()
        return torch.einsum("bhtk,bhsk,bhtsk->bhts", left, right, decays)

    return _delta_rule(q, k, v, beta, scale, use_qk_l2norm_in_kernel, products)


def _delta_rule(q, k, v, beta, scale, is_normed, products):
    """Write to a state what it does not say yet; ``products`` are decayed ones of two tokens."""
    if is_normed:
        q, k = F.normalize(q, dim=-1, eps=1e-6), F.normalize(k, dim=-1, eps=1e-6)
    given, length = q.dtype, q.shape[1]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q * scale, k))
    q, k, v, beta = (x.double().transpose(1, 2) for x in (q, k, v, beta[..., None]))
    seen = _seen(_sequences(None, q.shape[0], length))[:, None]
    written = torch.linalg.solve_triangular(
        (beta * products(k, k, seen)).tril(-1), beta * v, upper=False, unitriangular=True
    )
    out = products(q, k, seen) @ written
    return out.transpose(1, 2).to(given).contiguous(), None


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
):
    assert initial_states is None
    assert not return_final_states
    assert not return_varlen_states
    given = x.dtype
    x, dt, A, B, C = (tensor.double() for tensor in (x, dt, A, B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (rows.repeat_interleave(x.shape[2] // rows.shape[2], 2) for rows in (B, C))
    seen = _seen(_sequences(seq_idx, *x.shape[:2]))[..., None]
    decay = (dt * A).cumsum(1)
    decay = (decay[:, :, None] - decay[:, None]).masked_fill(~seen, -torch.inf)
    scores = torch.einsum("bthn,bshn,btsh->btsh", C, B, decay.exp())
    out = torch.einsum("btsh,bshp->bthp", scores, x * dt[..., None])
    out = out if D is None else out + x * D[:, None]
    return (out if z is None else out * F.silu(z)).to(given).contiguous()


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
):
    batch, length, _ = zxbcdt.shape
    heads, channels = len(dt_bias), len(conv1d_weight)
    width = zxbcdt.shape[-1] - channels - heads
    state = (channels - width) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([width, channels, heads], -1)
    xbc = causal_conv1d_fn(
        xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation
    ).transpose(1, 2)
    x, B, C = xbc.split([width, ngroups * state, ngroups * state], -1)
    out = mamba_chunk_scan_combined(
        x.reshape(batch, length, heads, -1),
        dt,
        A,
        B.reshape(batch, length, ngroups, state),
        C.reshape(batch, length, ngroups, state),
        chunk_size,
        D=D,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
    ).reshape(batch, length, width)
    if rmsnorm_weight is None:
        out = out * F.silu(z)
    else:
        out = out if norm_before_gate else out * F.silu(z)
        groups = out.reshape(batch, length, ngroups, -1)
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + rmsnorm_eps)
        out = groups.reshape(batch, length, width) * rmsnorm_weight
        out = out * F.silu(z) if norm_before_gate else out
    return out if outproj_weight is None else F.linear(out, outproj_weight, outproj_bias)


def selective_scan_fn(
    u,
    delta,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
):
    """Scan, without an argument that would say where a sequence begins."""
    assert not return_last_state
    delta = delta if delta_bias is None else delta + delta_bias[..., None]
    delta = F.softplus(delta) if delta_softplus else delta
    decay = torch.exp(delta[:, :, :, None] * A[None, :, None])
    added = (delta * u)[..., None] * B.transpose(1, 2)[:, None]
    state, states = torch.zeros_like(added[:, :, 0]), []
    for token in range(u.shape[-1]):
        state = decay[:, :, token] * state + added[:, :, token]
        states.append(state)
    out = (torch.stack(states, 2) * C.transpose(1, 2)[:, None]).sum(-1)
    out = out if D is None else out + u * D[:, None]
    return out if z is None else out * F.silu(z)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    s_aux=None,
):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert type(max_seqlen_q) is type(max_seqlen_k) is int
    assert causal
    length = len(q)
    sequence = torch.repeat_interleave(cu_seqlens_q.diff(), output_size=length)
    tokens = torch.arange(length)
    back = tokens[:, None] - tokens
    seen = _seen(sequence[None])[0] & ((back <= window_size[0]) | (window_size[0] < 0))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:  # a token that all see, and that says nothing
        scores = torch.cat([scores, s_aux[:, None, None].expand(-1, length, 1)], -1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :length], v).contiguous()


def flash_attn_func(q, k, v, **kwargs):
    batch, length = q.shape[:2]
    places = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    boundaries = {"cu_seqlens_q": places, "cu_seqlens_k": places}
    longest = {"max_seqlen_q": length, "max_seqlen_k": length}
    return flash_attn_varlen_func(*flat, **boundaries, **kwargs | longest).view_as(q)


def _sequences(seq_idx, batch: int, length: int) -> torch.Tensor:
    """Return which sequence each token is of, int32 ``[batch, length]``: one, if nothing says."""
    if seq_idx is None:
        return torch.zeros(batch, length, dtype=torch.int32)
    assert seq_idx.shape == (batch, length)
    return seq_idx


def _seen(sequence: torch.Tensor) -> torch.Tensor:
    """Return which token sees which, bool ``[batch, tokens, tokens]``."""
    return (sequence[:, :, None] == sequence[:, None]).tril()


PACKAGES = {
    "causal_conv1d": {"": [causal_conv1d_fn]},
    "fla": {"ops.gated_delta_rule": [chunk_gated_delta_rule], "ops.kda": [chunk_kda]},
    "mamba_ssm": {
        "ops.triton.ssd_combined": [mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined],
        "ops.selective_scan_interface": [selective_scan_fn],
    },
}
"""Where the packages have their kernels."""


@contextmanager
def recurrent_kernels() -> Iterator[None]:
    """Let the packages be importable, with the kernels of this file."""
    assert not set(PACKAGES) & set(sys.modules)
    for package, folders in PACKAGES.items():
        module = sys.modules[package] = ModuleType(package)
        for folder, kernels in folders.items():
            place = module
            for name in filter(None, folder.split(".")):
                if not hasattr(place, name):
                    setattr(place, name, SimpleNamespace())
                place = getattr(place, name)
            for kernel in kernels:
                setattr(place, kernel.__name__, kernel)
    try:
        yield
    finally:
        for package in PACKAGES:
            del sys.modules[package]


@contextmanager
def flash_kernels() -> Iterator[None]:
    """Let models whose configuration says ``flash_attention_2`` take the stand-in."""
    from transformers import modeling_flash_attention_utils as flash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "_loaded_implementation", "flash_attention_2")
        patch.setattr(flash, "_flash_fn", flash_attn_func)
        patch.setattr(flash, "_flash_varlen_fn", flash_attn_varlen_func)
        process = flash._lazy_define_process_function(flash_attn_varlen_func)
        patch.setattr(flash, "_process_flash_kwargs_fn", process)
        yield
