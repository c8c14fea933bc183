"""Whole states for newcomers: donors announce, serve and resume; nothing that a donor says is believed unchecked."""
