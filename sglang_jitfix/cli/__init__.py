"""What the `sglang-jitfix` command does; nothing here runs unless it is typed."""
