"""Further demos of `ckptd.demo`: hosts that are lost, storage, and policies side by side."""
