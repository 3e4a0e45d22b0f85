"""The third tier: snapshots drain from memory to object storage, in parallel with training and replication
(DESIGN §5, §11).

Pure cores and a shell on the daemon's loop thread decide (`ckptd.persistence.tier`). A separate process
moves the bytes (`ckptd.persistence.keeper`), so that neither the CPU use nor the failures of a store
client affect the daemon.
"""
