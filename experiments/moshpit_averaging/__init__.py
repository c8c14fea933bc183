"""Rounds that averaging takes among peers that may be absent: Moshpit and what it is compared with."""
