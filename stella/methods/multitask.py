"""Multitask: Finetune on all tasks shuffled into one."""

from stella.methods.finetune import Finetune


class Multitask(Finetune):
    title = "Multitask"
    summary = "learns from all tasks shuffled into one, which no stream allows"
    cost = "as Finetune"
    joint = True
