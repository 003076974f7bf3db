"""FSDP2: weights, gradients and optimiser states divided among the processes (`train.shard=true`).

Every parameter is cut along its first dimension, and each process keeps its rows as a DTensor. A block's weights are
gathered when it is computed and freed afterwards; its gradients are averaged and cut while the backward pass goes on.
The rest of the method (embeddings, norms, heads, matching module) is gathered for the whole of a loss. Slow weights and
teachers are cut likewise. The numbers are those of DDP, up to rounding.

With mixed precision the weights of blocks are sent and used in bfloat16, gradients are averaged in float32, and what
is kept is float32.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import register_dataclass

from stella.clip import Batch
from stella.methods import virtual
from stella.methods.base import Losses, Method
from stella.methods.virtual import LooksAhead, Weights
from stella.model.avm import AVM
from stella.model.cav import CAV, Pretrained
from stella.model.slow import SlowWeights
from stella.model.vit import Block, FusionBlock
from stella.train.device import Runtime
from stella.train.sharing import Function, replaced

Module = TypeVar("Module", bound=nn.Module)
register_dataclass(Pretrained)  # torch 2.11 finds tensors in no other dataclass
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing here writes into one


class Sharded:
    """A method whose parameters, and those of slow weights, are divided from now on. Called as `method.loss`."""

    def __init__(self, method: Method, slow: SlowWeights | None, place: Runtime) -> None:
        self.method, self.slow = method, slow
        modules = [*method.modules(), *(slow.modules() if slow else ())]
        self._forms: dict[nn.Module, nn.Module] = {m: _form(m) for m in modules if isinstance(m, CAV | AVM)}
        if slow is not None:
            divide(slow.model, place)
        if isinstance(method, LooksAhead):  # its loss has backward passes of its own, so a pass is the root
            divide(method.model, place)
            register_fsdp_forward_method(method.model, "pretrain")
            self.root = None
        else:
            self.root = _Root(method)
            divide(self.root, place)

    def __call__(self, batch: Batch) -> Losses:
        losses: Losses = self.method.loss(batch) if self.root is None else self.root(batch)[1]
        return losses

    @contextmanager
    def gradient_sync(self, last: bool) -> Iterator[None]:
        """Around a loss. The gradients of each batch are averaged at once: whole ones would not fit."""
        virtual_steps = ShardedVirtualSteps(self.method.model)
        with replaced(
            [
                (LooksAhead, "clip_losses", virtual_steps.clip_losses(LooksAhead.clip_losses)),
                (LooksAhead, "gradients", virtual_steps.gradients(LooksAhead.gradients)),
                (virtual, "adam_step", virtual_steps.adam_step(virtual.adam_step)),
            ]
        ):
            yield

    def full_tensor(self, norm: Tensor) -> Tensor:
        """The norm over the rows of all processes."""
        return full_tensor(norm)

    @torch.no_grad()
    def plain(self, module: Module) -> Module:
        """A copy of one of its models with all weights, for as long as it is kept. Called by all processes."""
        copy = deepcopy(self._forms[module])
        copy.load_state_dict({name: full_tensor(value) for name, value in module.state_dict().items()}, assign=True)
        return cast("Module", copy)

    def cut(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """A trainer's state with this process's rows alone."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = state["optimizer"]["state"]
        own = {i: {name: _rows(each, parameters[i]) for name, each in moments[i].items()} for i in moments}
        cut = {"method": _rows_of(state["method"], self.method)}
        if self.slow is not None:
            cut["slow"] = _rows_of(state["slow"], self.slow)
        return {**state, **cut, "optimizer": {**state["optimizer"], "state": own}}


class _Root(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch) -> tuple[dict[str, Tensor], Losses]:
        losses = self.method.loss(batch)
        return losses.parts, losses  # FSDP finds the tensors of a dictionary


def divide(root: nn.Module, place: Runtime) -> None:
    """Cut the parameters of a module, block by block and then the rest."""
    mesh = init_device_mesh(place.device.type, (torch.distributed.get_world_size(),))
    half = MixedPrecisionPolicy(place.autocast_to, torch.float32) if place.autocast_to else MixedPrecisionPolicy()
    for module in root.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=half)
        if isinstance(module, FusionBlock):
            register_fsdp_forward_method(module, "audio")
            register_fsdp_forward_method(module, "video")
    fully_shard(root, mesh=mesh, reshard_after_forward=not isinstance(root, _Root))
    if place.device.type == "cpu":
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no mean


class ShardedVirtualSteps:
    """Virtual steps of a divided model. Virtual weights are own rows as plain tensors; the model holds them in turn."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: list[Tensor] | None = None  # θ, while the model holds θ'

    def clip_losses(self, one: Function) -> Function:
        def clip_losses(
            method: LooksAhead, weights: Weights, audio: Tensor, video: Tensor, splits: Any = None, at_once: Any = None
        ) -> Tensor:
            """All clips at once: every process must compute the same blocks equally often."""
            if not all(isinstance(weight, DTensor) for weight in weights.values()):
                self._hold(list(weights.values()))
            out: Tensor = one(method, {}, audio, video, splits)
            if not torch.is_grad_enabled():
                self._restore()
            return out

        return clip_losses

    def gradients(self, one: Function) -> Function:
        """Of parameters by FSDP, which averages them; of rows as ever, at the weights of their loss."""

        def gradients(method: LooksAhead, loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
            if not isinstance(inputs[0], nn.Parameter):
                found: tuple[Tensor, ...] = one(method, loss, inputs)
                self._restore()
                return found
            parameters = self._parameters()
            before = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            with torch.autocast(loss.device.type, enabled=False):
                loss.backward()  # type: ignore[no-untyped-call]
            computed = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient
            return computed

        return gradients

    @staticmethod
    def adam_step(one: Function) -> Function:
        """On own rows."""

        def adam_step(optimizer: torch.optim.Adam, parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
            own = [_own(p) for p in parameters]
            states = [{k: _own(v) for k, v in optimizer.state.get(p, {}).items()} for p in parameters]
            rows = SimpleNamespace(param_groups=optimizer.param_groups, state=dict(zip(own, states, strict=True)))
            stepped: list[Tensor] = one(rows, own, [_own(g) for g in gradients])
            return stepped

        return adam_step

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def _hold(self, weights: list[Tensor]) -> None:
        own = [_own(p) for p in self._parameters()]
        self.kept = [rows.clone() for rows in own]
        torch._foreach_copy_(own, weights)

    @torch.no_grad()
    def _restore(self) -> None:
        if self.kept is not None:
            torch._foreach_copy_([_own(p) for p in self._parameters()], self.kept)
            self.kept = None


def full_tensor(value: Tensor) -> Tensor:
    """All rows of a tensor; of a norm over own rows, that over all. Called by all processes."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _form(module: nn.Module) -> nn.Module:
    """A copy whose parameters take no memory."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    return deepcopy(module, empty)


def _rows_of(state: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    like = module.state_dict()
    return {name: _rows(value, like[name]) for name, value in state.items()}


def _rows(value: Tensor, like: Tensor) -> Tensor:
    """This process's rows of a tensor, if they are kept so. The counter of an optimiser has no rows."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _own(value: Tensor) -> Tensor:
    """This process's rows, as a plain tensor on the same memory."""
    return value.to_local().detach() if isinstance(value, DTensor) else value
