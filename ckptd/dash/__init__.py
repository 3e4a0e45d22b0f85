"""What `ckptctl top` and `ckptctl dash` show: one view of a daemon's answers, on a terminal and on a page."""
