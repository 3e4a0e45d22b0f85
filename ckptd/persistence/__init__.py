"""The third tier: snapshots drain from memory to object storage, beside training and replication
(DESIGN §5, §11).

Decisions are made here, in pure cores and a shell on the daemon's loop thread; bytes are moved by a
process of its own, so that neither the CPU nor the troubles of a store client reach the daemon
(`ckptd.persistence.keeper`).
"""
