"""The process between torchrun and a trainer: it forks a new trainer when one of the job has died.

Nothing here imports torch, except the zygote, by name, in a process of its own.
"""
