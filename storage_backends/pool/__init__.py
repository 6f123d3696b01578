"""The pool tier: a store process, or several, whose memory many hosts share (docs/pool.md)."""
